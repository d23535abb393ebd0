"""What a baseline keeps of a run, how it is written, and which files are refused."""

import base64
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookscope.errors import UsageError
from hookscope.results.check import CheckMeasurements
from hookscope.results.inputs import InputRecord
from hookscope.results.network import Failure
from hookscope.rules.baseline import (
    Baseline,
    BaselineGradients,
    BaselineInput,
    BaselineRow,
    baseline_of,
    baseline_text,
    inputs_of,
    read_baseline,
)
from hookscope.rules.baseline_values import (
    channel_differences,
    channels_apart,
    channels_text,
    values_apart,
    values_from_text,
    values_text,
)
from tests.commands.check.measurements import inspected

SAME = nn.Sequential(OrderedDict([("same", nn.Identity())]))


def with_statistics(measured: CheckMeasurements, **changes: float) -> CheckMeasurements:
    rows = [replace(row, activation=replace(row.activation, **changes)) for row in measured.forward.rows]  # type: ignore[arg-type]
    return replace(measured, forward=replace(measured.forward, rows=tuple(rows)))


def row_of(baseline: Baseline, label: str) -> BaselineRow:
    return next(row for row in baseline.rows if row.label == label)


# --- what is kept ---


def test_a_row_holds_the_statistics_of_the_layer() -> None:
    values = torch.tensor([[-3.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 10.0]])
    network = nn.Sequential(OrderedDict([("relu", nn.ReLU())]))
    row = row_of(baseline_of(inspected(network, values)), "relu")
    after = np.array([0, 0, 0, 1, 2, 3, 4, 10.0])
    assert (row.kind, row.shape, row.dtype) == ("ReLU", (1, 8), "float32")
    assert (row.nan_count, row.inf_count) == (0, 0)
    assert row.mean == 2.5
    assert row.std == pytest.approx(after.std(), rel=1e-5)
    assert row.quantiles == pytest.approx(np.quantile(after, [0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99]), rel=1e-5)
    assert row.dead_fraction == 3 / 8
    assert row.gradient_l2 is None


def test_a_row_holds_the_norm_of_the_gradient_where_one_was_taken() -> None:
    network = nn.Sequential(OrderedDict([("linear", nn.Linear(2, 2, bias=False)), ("relu", nn.ReLU())]))
    with torch.no_grad():
        network.linear.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
    baseline = baseline_of(inspected(network, torch.tensor([[3.0, 5.0]]), "sum"))
    assert (baseline.gradients.loss, baseline.gradients.mode) == ("sum", "eval")
    assert row_of(baseline, "relu").gradient_l2 == pytest.approx(2**0.5, rel=1e-5)  # of (1, 1)
    assert row_of(baseline, "linear").gradient_l2 == 1  # of (1, 0): the second output is negative


def test_numbers_are_kept_in_six_significant_digits_and_a_negative_zero_as_zero() -> None:
    row = row_of(baseline_of(inspected(SAME, torch.tensor([[1 / 3, 1 / 3]], dtype=torch.float64))), "same")
    assert row.mean == 0.333333
    measured = inspected(SAME, torch.zeros(1, 2))
    assert baseline_text(baseline_of(with_statistics(measured, mean=-0.0))) == baseline_text(baseline_of(measured))


def test_a_statistic_beyond_what_json_holds_is_left_out() -> None:
    overflown = with_statistics(inspected(SAME, torch.zeros(1, 2)), std=math.inf)
    assert row_of(baseline_of(overflown), "same").std is None


def test_nan_and_inf_are_counted() -> None:
    values = torch.tensor([[math.nan, math.inf, -math.inf, 4.0]])
    row = row_of(baseline_of(inspected(SAME, values)), "same")
    assert (row.nan_count, row.inf_count, row.mean) == (1, 2, 4)


def test_layers_and_the_whole_network_are_kept_and_containers_are_not() -> None:
    inner = nn.Sequential(OrderedDict([("a", nn.Linear(2, 2)), ("b", nn.ReLU())]))
    baseline = baseline_of(inspected(nn.Sequential(OrderedDict([("inner", inner)])), torch.ones(1, 2)))
    assert [row.label for row in baseline.rows] == ["(model)", "inner.a", "inner.b"]


def test_a_layer_with_parameters_of_its_own_is_kept_whatever_is_inside_it() -> None:
    network = nn.Sequential(OrderedDict([("conv", PaddedFirst())]))
    baseline = baseline_of(inspected(network, torch.ones(1, 1, 2, 2)))
    assert [row.label for row in baseline.rows] == ["(model)", "conv", "conv.pad"]
    assert row_of(baseline, "conv").shape == (1, 1, 4, 4)


class PaddedFirst(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(1, 1, 1)
        self.pad = nn.ZeroPad2d(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.pad(x))


def test_rows_are_of_each_call_sorted_with_numbers_in_counting_order() -> None:
    network = nn.Sequential(*[nn.Identity() for _ in range(12)])
    baseline = baseline_of(inspected(network, torch.ones(1, 2)))
    assert [row.label for row in baseline.rows] == ["(model)", *map(str, range(12))]
    act = nn.ReLU()
    baseline = baseline_of(inspected(nn.Sequential(act, act), torch.ones(1, 2)))
    assert [row.label for row in baseline.rows] == ["(model)", "0", "0#1"]


def test_equal_inputs_in_a_row_are_counted_and_folders_are_left_out() -> None:
    noise = InputRecord("noise", None, None, (3, 8, 8), ("standard normal noise, seed 0",))
    cat = InputRecord("/home/someone/cat.jpg", "ab" * 32, (9, 9), (3, 8, 8), ("resized", "warning while reading: odd"))
    assert inputs_of([noise, noise, cat]) == (
        BaselineInput("noise", 2, None, (3, 8, 8), ("standard normal noise, seed 0",)),
        BaselineInput("cat.jpg", 1, "ab" * 32, (3, 8, 8), ("resized",)),
    )


@pytest.mark.parametrize("broken", ["missing", "failed"])
def test_a_forward_pass_that_broke_off_gives_no_baseline(broken: str) -> None:
    measured = inspected(nn.Sequential(nn.ReLU()), torch.ones(1, 2))
    failed = replace(measured.forward, failure=Failure("0", "ReLU", ("1x2",), "ValueError: no"))
    with pytest.raises(UsageError, match="did not run to the end of its forward pass"):
        baseline_of(replace(measured, forward=None if broken == "missing" else failed))


# --- how it is written ---

# 1 and -2 in IEEE 754's binary32, bytes in little-endian order.
VALUES = base64.b64encode(b"\0\0\x80\x3f\0\0\0\xc0").decode()

# Two channels, whose mean and standard deviation add up to 1 and -2, likewise.
CHANNELS = base64.b64encode(b"\x02\0\0\0\0\0\x80\x3f\0\0\0\xc0").decode()

WRITTEN = """\
{
  "schema_version": 8,
  "quantile_levels": [
    0.01,
    0.05,
    0.25,
    0.5,
    0.75,
    0.95,
    0.99
  ],
  "model": "net.py:build",
  "kind": "Net",
  "weights": "epoch12.pt",
  "weights_sha256": "00ff",
  "parameter_count": 1234,
  "dtype": "float32",
  "weights_precision": "float16",
  "gradients": {"loss": "ce", "target": "class 281, tabby", "mode": "eval"},
  "input_values": null,
  "inputs": [
    {"name": "cat.jpg", "count": 1, "sha256": "abcd", "shape": [3, 8, 8], "steps": ["resized", "normalised"]},
    {"name": "noise", "count": 2, "sha256": null, "shape": [3, 8, 8], "steps": ["seed 0"]}
  ],
  "rows": [
    {"label": "conv", "kind": "Conv2d", "shape": [1, 2, 4], "dtype": "float32", "nan_count": 0, "inf_count": 0, \
"mean": 0.5, "std": 1e-07, "dead_fraction": 0.25, "gradient_l2": 2.0, \
"quantiles": [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0], "values": "@@", "channels": "##"},
    {"label": "conv#1", "kind": "Conv2d", "shape": [], "dtype": "float32", "nan_count": 3, "inf_count": 0, \
"mean": null, "std": null, "dead_fraction": null, "gradient_l2": null, "quantiles": null, "values": null, \
"channels": null},
    {"label": "where", "kind": "Where", "shape": [0], "dtype": "bool", "nan_count": null, "inf_count": null, \
"mean": null, "std": null, "dead_fraction": null, "gradient_l2": null, "quantiles": null, "values": null, \
"channels": null}
  ],
  "labelled": [],
  "multi_label": false
}
""".replace("@@", VALUES).replace("##", CHANNELS)

BASELINE = Baseline(
    model="net.py:build",
    kind="Net",
    weights="epoch12.pt",
    weights_sha256="00ff",
    parameter_count=1234,
    dtype="float32",
    weights_precision="float16",
    gradients=BaselineGradients("ce", "class 281, tabby", "eval"),
    input_values=None,
    inputs=(
        BaselineInput("cat.jpg", 1, "abcd", (3, 8, 8), ("resized", "normalised")),
        BaselineInput("noise", 2, None, (3, 8, 8), ("seed 0",)),
    ),
    rows=(
        BaselineRow(
            "conv",
            "Conv2d",
            (1, 2, 4),
            "float32",
            0,
            0,
            0.5,
            1e-7,
            0.25,
            2.0,
            (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0),
            VALUES,
            CHANNELS,
        ),
        BaselineRow("conv#1", "Conv2d", (), "float32", 3, 0, None, None, None, None, None, None, None),
        BaselineRow("where", "Where", (0,), "bool", *[None] * 9),
    ),
)


def test_a_baseline_is_written_one_line_a_layer_and_read_back(tmp_path: Path) -> None:
    assert baseline_text(BASELINE) == WRITTEN
    path = tmp_path / "baseline.json"
    path.write_text(WRITTEN)
    assert read_baseline(path) == BASELINE


def shifted(count: int, by: dict[int, float]) -> tuple[str, str]:
    """Return how channels are kept before and after some moved; their means are those of a seed."""
    moments = np.stack([np.random.default_rng(count).standard_normal(count), np.ones(count)])
    before = channels_text(moments)
    for channel, distance in by.items():
        moments[channel % 2, channel] += distance  # the mean or the standard deviation
    return before or "", channels_text(moments) or ""


@pytest.mark.parametrize("count", [1, 3, 64, 65, 1280, 2048])
def test_channels_that_moved_are_found(count: int) -> None:
    by = {channel: distance for channel, distance in {0: 0.25, 2: -3.0, 1000: 1.0, 64: 0.5}.items() if channel < count}
    expected = np.zeros(count)
    expected[[*by]] = [*by.values()]
    actual = channel_differences(*shifted(count, by))
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    np.testing.assert_array_equal(channel_differences(*shifted(count, {})), 0)


def test_of_many_channels_either_the_right_ones_are_found_or_none() -> None:
    rng = np.random.default_rng(0)
    right = 0
    for _ in range(200):
        by = dict(zip(rng.choice(2048, 4, replace=False).tolist(), rng.uniform(0.5, 2, 4).tolist(), strict=True))
        actual = channel_differences(*shifted(2048, by))
        right += actual is not None and {*np.flatnonzero(actual)} == {*by}
        assert actual is None or {*np.flatnonzero(np.abs(actual) > 0.2)} <= {*by}
    assert right >= 190
    assert channel_differences(*shifted(2048, dict.fromkeys(range(2048), 0.5))) is None
    assert channel_differences(*shifted(2048, dict.fromkeys(range(0, 2048, 50), 0.5))) is None


def test_channels_that_no_float32_holds_are_not_kept() -> None:
    moments = np.array([[1e38, 1.0], [1.0, 1.0]])
    assert channels_text(moments) is not None
    assert channels_text(None) is channels_text(moments * 10) is channels_text(moments * np.nan) is None
    assert channel_differences(*(channels_text(np.ones((2, count))) or "" for count in (3, 4))) is None


@pytest.mark.parametrize(("inputs", "kept"), [(1, 256), (4, 1024), (5, 640), (9, 768), (100, 1024), (2000, 2000)])
def test_values_of_many_inputs_are_thinned_to_about_a_thousand_from_every_input(inputs: int, kept: int) -> None:
    values = np.arange(inputs * 256, dtype=np.float32).reshape(inputs, 256)
    actual = values_from_text(values_text(values) or "").astype(int)
    assert actual.size == pytest.approx(kept, rel=0.01)
    assert {*(actual // 256)} == {*range(inputs)}
    assert len({*(actual % 256)}) == 256  # each place, of one input or another


def test_how_far_kept_values_are_apart_is_the_root_mean_square_of_their_differences() -> None:
    def text(*values: float) -> str:
        return values_text(np.array([values])) or ""

    assert values_apart(text(1, 2, math.nan, math.inf), text(1, 5, math.nan, math.inf)) == 3 / 2
    assert values_apart(text(1, 2), text(1, math.nan)) == values_apart(text(math.inf), text(-math.inf)) == math.inf
    assert values_apart(text(1, 2), text(1)) is values_text(None) is None


@pytest.mark.parametrize("channels", [8, 1000])
def test_one_channel_of_many_that_moved_by_one_is_a_root_of_their_number_apart(channels: int) -> None:
    one = np.ones((2, channels))
    moved = one.copy()
    moved[0, 3] += 1
    apart = channels_apart(channels_text(one) or "", channels_text(moved) or "")
    assert apart == pytest.approx(1 / math.sqrt(channels), rel=1e-5)


def test_the_same_run_twice_gives_the_same_bytes() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    inputs = torch.randn(2, 3, 8, 8)
    texts = {baseline_text(baseline_of(inspected(network.eval(), inputs, "projection"))) for _ in range(2)}
    assert len(texts) == 1


@pytest.mark.parametrize("name", ["a\nb", "::error::x", "a\x1b[31m", "\ud800", "ünïcode", '"quoted"', "a\\b"])
def test_a_layer_of_any_name_is_read_back_as_it_is_compared(name: str, tmp_path: Path) -> None:
    network = nn.Sequential(OrderedDict([(name, nn.ReLU())]))
    baseline = baseline_of(inspected(network, torch.ones(1, 2)))
    path = tmp_path / "baseline.json"
    path.write_text(baseline_text(baseline), encoding="ascii")
    assert len(baseline.rows) == 2
    assert read_baseline(path) == baseline


# --- what is refused ---


def refused(path: Path) -> str:
    """Return the one line that says why a file is no baseline."""
    with pytest.raises(UsageError) as raised:
        read_baseline(path)
    message = str(raised.value)
    assert raised.value.exit_code == 2
    assert message.isprintable()
    assert "--update-baseline" in message or "cannot be read" in message
    return message


def test_a_missing_file_and_a_folder_are_refused_by_safe_names(tmp_path: Path) -> None:
    assert "\\x1b" in refused(tmp_path / "a\x1b[31m.json")
    assert "There is no baseline" in refused(tmp_path / "none.json")
    assert "Is a directory" in refused(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not JSON: line 1"),
        (b"\x80\x04\x95pickle", "is not UTF-8 at byte 0"),
        (WRITTEN.encode()[:-20], "is not JSON: line "),
        (WRITTEN.replace('0.5, "std"', 'NaN, "std"').encode(), "NaN is not JSON"),
        (WRITTEN.replace("1e-07", "1e999").encode(), "layer 'conv' has infinite numbers"),
        (WRITTEN.replace("1e-07", "1" + "0" * 400).encode(), "rows.0.std: Input should be a valid number"),
        (b"[" * 200_000, "recursion"),
        (b"[]", "it has no schema version"),
        (b"{}", "it has no schema version"),
        (
            WRITTEN.replace('version": 8', 'version": 2').encode(),
            "an earlier hookscope wrote it (schema version 2, this one reads 8). Write a new one with",
        ),
        (WRITTEN.replace('version": 8', 'version": 9').encode(), "a later hookscope wrote it (schema version 9"),
        (WRITTEN.replace('version": 8', 'version": true').encode(), "it has no schema version"),
        (WRITTEN.replace("    0.25,\n", "").encode(), "its quantile levels are not 0.01, 0.05"),
        (WRITTEN.replace('"conv#1"', '"conv"').encode(), "layer 'conv' is there twice"),
        (WRITTEN.replace('"conv#1"', "7").encode(), "rows.1.label: Input should be a valid string"),
        (WRITTEN.replace("-3.0, ", "").encode(), "layer 'conv' has infinite numbers, or not 7 quantiles"),
        (
            WRITTEN.replace("[1, 2, 4]", "[1, -2]").encode(),
            "rows.0.shape.1: Input should be greater than or equal to -1",
        ),
        (WRITTEN.replace('"mean": 0.5', '"mean": "0.5"').encode(), "rows.0.mean: Input should be a valid number"),
        (WRITTEN.replace('"nan_count": 3, ', "").encode(), "rows.1.nan_count: Field required"),
        (WRITTEN.replace('"nan_count": 3', '"nan_count": "no"').encode(), "rows.1.nan_count: Input should be a valid"),
        (WRITTEN.replace(VALUES, "AAAA").encode(), "'values' of layer 'conv' is damaged: not whole numbers of four"),
        (
            WRITTEN.replace(CHANNELS, "AAAA").encode(),
            "'channels' of layer 'conv' is damaged: not as many finite numbers",
        ),
        (WRITTEN.replace(f'"{CHANNELS}"', "2").encode(), "rows.0.channels: Input should be a valid string"),
        (
            WRITTEN.replace('"input_values": null', '"input_values": "AAAA"').encode(),
            "'input_values' is damaged: not whole numbers of four bytes",
        ),
        (WRITTEN.replace('["seed 0"]', '["seed 0", 1]').encode(), "inputs.1.steps.1: Input should be a valid string"),
        (WRITTEN.replace('{"loss": "ce", ', "{").encode(), "gradients.loss: Field required"),
    ],
)
def test_a_file_that_is_no_baseline_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_bytes(content)
    assert reason in refused(path)


def test_a_file_that_is_too_large_is_refused_without_reading_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # a terabyte of holes
    assert "is larger than 64 MiB" in refused(path)


def _without(key: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    return lambda record: {name: value for name, value in record.items() if name != key}


@pytest.mark.parametrize(
    ("part", "key"),
    [
        *[("file", key) for key in json.loads(WRITTEN) if key not in ("labelled", "multi_label")],
        *[("inputs", key) for key in json.loads(WRITTEN)["inputs"][0]],
        *[("rows", key) for key in json.loads(WRITTEN)["rows"][0]],
    ],
)
def test_a_baseline_without_a_field_is_refused_and_the_field_named(part: str, key: str, tmp_path: Path) -> None:
    document = json.loads(WRITTEN)
    if part == "file":
        document = _without(key)(document)
    else:
        document[part][0] = _without(key)(document[part][0])
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps(document))
    others = {"schema_version": "schema version", "quantile_levels": "quantile levels"}
    assert others.get(key, f"{key}: Field required") in refused(path)


def test_a_signalling_nan_in_a_baseline_is_a_nan_without_a_warning() -> None:
    assert np.isnan(values_from_text(base64.b64encode(b"\x00\x00\x81\x7f" * 3).decode())).all()
