import csv
import io
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookscope.render.tables import gradients_to_csv, parameters_to_csv, rows_to_csv
from hookscope.results.activations import Activations, LayerRow
from hookscope.results.distribution import Distribution, distribution_of, histogram
from hookscope.results.gradients import Gradients, LossRecord
from hookscope.results.runs.serialize import (
    gradients_to_json,
    inspection_from_dict,
    inspection_to_dict,
    modules_to_dict,
    parse_json,
    rows_to_json,
)
from hookscope.results.statistics import QUANTILE_LEVELS, TensorStatistics
from hookscope.text import strict_json
from tests.render.conftest import (
    FAILURE,
    GRADIENTS,
    INSPECTION,
    MODULES,
    ROWS,
)

STATISTICS = (
    *("element_count", "mean", "std", "min", "max", "mean_abs", "l2", "zero_fraction", "nan_count", "inf_count"),
    *("channel_axis", "channel_count", "dead_channel_count", "dead_channel_fraction"),
)
QUANTILES = ("q01", "q05", "q25", "q50", "q75", "q95", "q99")


def parsed(text: str) -> Any:
    """Parse JSON as a strict parser does."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def records(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text), strict=True))


def csv_rows(inspection: Activations) -> list[dict[str, str]]:
    return records(rows_to_csv(inspection))


def with_rows(*rows: LayerRow) -> Activations:
    return replace(INSPECTION, rows=rows)


def test_golden_files(assert_golden: Callable[[str, str], None]) -> None:
    assert_golden("inspection.json", INSPECTION.to_json())
    assert_golden("layers.json", rows_to_json(INSPECTION))
    assert_golden("layers.csv", rows_to_csv(INSPECTION))
    assert_golden("modules.json", strict_json(modules_to_dict(MODULES)))
    assert_golden("gradient_inspection.json", GRADIENTS.to_json())
    assert_golden("gradients.json", gradients_to_json(GRADIENTS))
    assert_golden("gradients.csv", gradients_to_csv(GRADIENTS))
    assert_golden("parameters.csv", parameters_to_csv(GRADIENTS))


# JSON


def test_quantile_names_follow_the_levels() -> None:
    assert tuple(float(name[1:]) / 100 for name in QUANTILES) == QUANTILE_LEVELS


# CSV


@given(st.floats(allow_nan=False), st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_survive_csv_and_json_bit_for_bit(mean: float, std: float) -> None:
    row = replace(ROWS[0], activation=TensorStatistics((1,), "float64", 1, mean=mean, std=std))
    cells = csv_rows(with_rows(row))[0]
    assert (float(cells["mean"]), float(cells["std"])) == (mean, std)
    assert math.copysign(1, float(cells["std"])) == math.copysign(1, std)
    document = parsed(rows_to_json(with_rows(row)))
    assert document["rows"][0]["activation"]["std"] == std


def test_numpy_numbers_are_written_as_plain_ones() -> None:
    measured = TensorStatistics((1,), "float32", 1, mean=np.float64(0.1), zero_fraction=np.float64(0))
    cells = csv_rows(with_rows(replace(ROWS[0], activation=measured)))[0]
    assert (cells["mean"], cells["zero_fraction"]) == ("0.1", "0.0")


# Gradients


def test_both_formats_say_which_row_is_repeated_and_which_are_folded() -> None:
    rows = (replace(ROWS[0], also=("pool", "drop;2")), replace(ROWS[1], repeats="=stem"))
    layers = replace(INSPECTION, rows=rows)
    gradients = replace(GRADIENTS, gradients=(replace(GRADIENTS.gradients[0], also=("pool",), repeats="stem"),))
    first, second = records(rows_to_csv(layers))
    assert (first["also"], first["repeats"], second["repeats"]) == (r"pool;drop\x3b2", "", "'=stem")
    entries = parsed(rows_to_json(layers))["rows"]
    assert [(entry["also"], entry["repeats"]) for entry in entries] == [(["pool", "drop;2"], ""), ([], "=stem")]
    (record,) = records(gradients_to_csv(gradients))
    assert (record["also"], record["repeats"]) == ("pool", "stem")
    (entry,) = parsed(gradients_to_json(gradients))["gradients"]
    assert (entry["also"], entry["repeats"]) == (["pool"], "stem")


@pytest.mark.parametrize(("value", "written"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (0.1, 0.1)])
def test_json_says_which_non_finite_value_a_loss_has(value: float, written: object) -> None:
    inspection = replace(GRADIENTS, loss=LossRecord("sum", "", value))
    assert parsed(inspection.to_json())["loss"]["value"] == written


def test_activations_of_a_gradient_run_are_written_as_those_of_any_run() -> None:
    assert rows_to_csv(GRADIENTS) == rows_to_csv(INSPECTION)
    assert rows_to_json(GRADIENTS) == rows_to_json(INSPECTION)


def test_csv_holds_every_number_in_full() -> None:
    of_gradients = tuple(name for name in STATISTICS if "channel" not in name)
    for text, rows, columns in (
        (rows_to_csv(INSPECTION), INSPECTION.rows, (*STATISTICS, "call", "parameter_count")),
        (gradients_to_csv(GRADIENTS), GRADIENTS.gradients, (*of_gradients, "call")),
        (parameters_to_csv(GRADIENTS), GRADIENTS.parameters, of_gradients),
    ):
        text.encode()
        assert all(line.isprintable() for line in text.splitlines())
        for cells, row in zip(records(text), rows, strict=True):
            for name in ("index", *columns):
                value = getattr(row.statistics if name in STATISTICS else row, name)
                assert cells[name] == ("" if value is None else repr(value)), name
            for name, quantile in zip(QUANTILES, row.statistics.quantiles or (None,) * 7, strict=True):
                assert cells[name] == ("" if quantile is None else repr(quantile))
            assert cells.get("status", "") == getattr(row, "status", "")


def test_no_field_of_a_gradient_inspection_is_forgotten() -> None:
    named = set(inspection_to_dict(GRADIENTS))
    assert {field.name for field in fields(GRADIENTS)} - named == {
        *("gradient_maps", "tensors", "unlisted", "repeated"),  # pixels, values, what has no rows, what notes say
        *("comparison", "inputs_alone", "provenance"),  # in files of their own, and in run.json
    }


@pytest.mark.parametrize("result", [INSPECTION, GRADIENTS, replace(INSPECTION, failure=FAILURE)])
def test_what_json_keeps_comes_back_as_the_same_result(result: Activations | Gradients) -> None:
    document = parse_json(result.to_json().encode())
    assert document is not None
    kept = replace(result, model=replace(result.model, categories=()))
    kept = replace(kept, gradient_maps=()) if isinstance(kept, Gradients) else replace(kept, feature_maps=())
    # What JSON has no number for, or no text: infinities are unknown, lone surrogates are spelled out.
    expected = _storable(kept)
    assert inspection_from_dict(document, backward=isinstance(result, Gradients)) == expected


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple):
        return tuple(map(_storable, value))
    if isinstance(value, Mapping):
        return {_storable(key): _storable(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, Distribution):
        named = {each.name: _storable(getattr(value, each.name)) for each in fields(value)}
        return replace(value, **named)  # type: ignore[type-var]
    return value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_comes_back(value: float) -> None:
    written = replace(GRADIENTS, loss=LossRecord("ce", "", value)).to_json()
    document = parse_json(written.encode())
    assert document is not None
    read = inspection_from_dict(document, backward=True)
    assert isinstance(read, Gradients)
    assert read.loss is not None
    assert repr(read.loss.value) == repr(value)


def test_a_histogram_stands_for_a_distribution_and_is_written_again() -> None:
    activation = replace(ROWS[0].activation, distribution=distribution_of(np.arange(100.0)))
    written = with_rows(replace(ROWS[0], activation=activation)).to_json()
    document = parse_json(written.encode())
    assert document is not None
    read = inspection_from_dict(document, backward=False)
    assert read.rows[0].activation.histogram == histogram(activation.distribution)
    assert read.to_json() == written
