import csv
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookscope.reporting.layer_columns import gradient_columns, layer_table_of, parameter_columns
from hookscope.reporting.tables import csv_text
from hookscope.results.activations import Activations, LayerRow
from hookscope.results.gradients import Gradients, LossRecord
from hookscope.results.statistics import QUANTILE_LEVELS, QUANTILE_NAMES, TensorStatistics
from tests.reporting.conftest import (
    GRADIENTS,
    INSPECTION,
    ROWS,
)

STATISTICS = (
    *("element_count", "mean", "std", "min", "max", "mean_abs", "l2", "zero_fraction", "nan_count", "inf_count"),
    *("channel_axis", "channel_count", "dead_channel_count", "dead_channel_fraction"),
)


def parsed(text: str) -> Any:
    """Parse JSON as a strict parser does."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def records(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text), strict=True))


def csv_rows(inspection: Activations) -> list[dict[str, str]]:
    return records(csv_text(*layer_table_of(inspection)))


def gradients_to_csv(inspection: Gradients) -> str:
    return csv_text(gradient_columns(inspection), inspection.gradients)


def parameters_to_csv(inspection: Gradients) -> str:
    return csv_text(parameter_columns(inspection), inspection.parameters)


def with_rows(*rows: LayerRow) -> Activations:
    return replace(INSPECTION, rows=rows)


def test_golden_files(assert_golden: Callable[[str, str], None]) -> None:
    assert_golden("inspection.json", INSPECTION.to_json())
    assert_golden("layers.csv", csv_text(*layer_table_of(INSPECTION)))
    assert_golden("gradient_inspection.json", GRADIENTS.to_json())
    assert_golden("gradients.csv", gradients_to_csv(GRADIENTS))
    assert_golden("parameters.csv", parameters_to_csv(GRADIENTS))


# JSON


def test_quantile_names_follow_the_levels() -> None:
    assert tuple(float(name[1:]) / 100 for name in QUANTILE_NAMES) == QUANTILE_LEVELS


# CSV


@given(st.floats(allow_nan=False), st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_survive_csv_and_json_bit_for_bit(mean: float, std: float) -> None:
    row = replace(ROWS[0], activation=TensorStatistics((1,), "float64", 1, mean=mean, std=std))
    cells = csv_rows(with_rows(row))[0]
    assert (float(cells["mean"]), float(cells["std"])) == (mean, std)
    assert math.copysign(1, float(cells["std"])) == math.copysign(1, std)
    document = parsed(with_rows(row).to_json())
    assert document["rows"][0]["activation"]["std"] == std


def test_numpy_numbers_are_written_as_plain_ones() -> None:
    measured = TensorStatistics((1,), "float32", 1, mean=np.float64(0.1), zero_fraction=np.float64(0))
    cells = csv_rows(with_rows(replace(ROWS[0], activation=measured)))[0]
    assert (cells["mean"], cells["zero_fraction"]) == ("0.1", "0.0")


# Gradients


def test_both_formats_say_which_row_is_repeated_and_which_are_folded() -> None:
    rows = (replace(ROWS[0], duplicates=("pool", "drop;2")), replace(ROWS[1], duplicate_of="=stem"))
    layers = replace(INSPECTION, rows=rows)
    gradients = replace(
        GRADIENTS, gradients=(replace(GRADIENTS.gradients[0], duplicates=("pool",), duplicate_of="stem"),)
    )
    first, second = records(csv_text(*layer_table_of(layers)))
    assert (first["duplicates"], first["duplicate_of"], second["duplicate_of"]) == (r"pool;drop\x3b2", "", "'=stem")
    entries = parsed(layers.to_json())["rows"]
    assert [(entry["duplicates"], entry["duplicate_of"]) for entry in entries] == [
        (["pool", "drop;2"], ""),
        ([], "=stem"),
    ]
    (record,) = records(gradients_to_csv(gradients))
    assert (record["duplicates"], record["duplicate_of"]) == ("pool", "stem")
    (entry,) = parsed(gradients.to_json())["gradients"]
    assert (entry["duplicates"], entry["duplicate_of"]) == (["pool"], "stem")


@pytest.mark.parametrize(
    ("value", "written"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity"), (0.1, 0.1)]
)
def test_json_says_which_non_finite_value_a_loss_has(value: float, written: object) -> None:
    inspection = replace(GRADIENTS, loss=LossRecord("sum", "", value))
    assert parsed(inspection.to_json())["loss"]["value"] == written


def test_activations_of_a_gradient_run_are_written_as_those_of_any_run() -> None:
    assert csv_text(*layer_table_of(GRADIENTS)) == csv_text(*layer_table_of(INSPECTION))


def test_csv_holds_every_number_in_full() -> None:
    of_gradients = tuple(name for name in STATISTICS if "channel" not in name)
    for text, rows, columns in (
        (csv_text(*layer_table_of(INSPECTION)), INSPECTION.rows, (*STATISTICS, "call", "parameter_count")),
        (gradients_to_csv(GRADIENTS), GRADIENTS.gradients, (*of_gradients, "call")),
        (parameters_to_csv(GRADIENTS), GRADIENTS.parameters, of_gradients),
    ):
        text.encode()
        assert all(line.isprintable() for line in text.splitlines())
        for cells, row in zip(records(text), rows, strict=True):
            for name in ("index", *columns):
                value = getattr(row.statistics if name in STATISTICS else row, name)
                assert cells[name] == ("" if value is None else repr(value)), name
            for name, quantile in zip(QUANTILE_NAMES, row.statistics.quantiles or (None,) * 7, strict=True):
                assert cells[name] == ("" if quantile is None else repr(quantile))
            assert cells.get("status", "") == getattr(row, "status", "")
