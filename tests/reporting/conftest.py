"""One fixed result that every renderer's tests render, and the comparison with golden files."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console, RenderableType

from hookscope.results.activations import Activations, FeatureMaps, Flag, LayerRow, UncalledLayer
from hookscope.results.comparison import Prediction
from hookscope.results.distribution import distribution_of
from hookscope.results.findings import Finding
from hookscope.results.gradients import GradientRow, Gradients, LossRecord, ParameterRow
from hookscope.results.inputs import InputRecord
from hookscope.results.network import Failure, ModelInfo, ModuleRow
from hookscope.results.statistics import Quantiles, TensorStatistics

# Fixtures of the tests in a browser.
from tests.reporting.chromium import browser, open_html  # noqa: F401

GOLDEN = Path(__file__).parent / "golden"

HOSTILE_NAME = "=cmd|' /C calc'!A0[/nope]\x1b[31m\n::error::\u202egnp.\ud800"


def statistics(shape: tuple[int, ...], dtype: str = "float32", **values: object) -> TensorStatistics:
    """Return statistics of a plausible activation, with `values` in place of its own."""
    element_count = math.prod(shape)
    expected: dict[str, object] = {
        "mean": 0.125,
        "std": 0.75,
        "min": -2.5,
        "max": 3.25,
        "mean_abs": 0.5,
        "l2": 98.765,
        "zero_fraction": 0.0,
        "nan_count": 0,
        "inf_count": 0,
        "channel_axis": 1 if len(shape) > 1 else None,
        "channel_count": shape[1] if len(shape) > 1 else None,
        "dead_channel_count": 0,
        "quantiles": Quantiles(-1.5, -1.0, -0.25, 0.0625, 0.5, 1.25, 2.0),
    }
    return TensorStatistics(shape, dtype, element_count, **{**expected, **values})  # type: ignore[arg-type]


def _row(
    layer: str,
    kind: str,
    activation: TensorStatistics,
    *flags: Flag,
    call: int = 0,
    slot: str = "",
    parameter_count: int = 0,
    aliases: tuple[str, ...] = (),
) -> LayerRow:
    return LayerRow(0, layer, kind, call, slot, parameter_count, activation, flags, aliases)


def numbered(*rows: LayerRow) -> tuple[LayerRow, ...]:
    """Return the rows with their positions as indices."""
    return tuple(replace(row, index=index) for index, row in enumerate(rows))


MODEL = ModelInfo(
    name="resnet34",
    kind="ResNet",
    weights="ResNet34_Weights.IMAGENET1K_V1",
    random=False,
    sha256="b627a593" * 8,
    parameter_count=21_797_672,
    categories=("tench", "goldfish"),
    arguments={"width": 2, "name": "a\ud800"},
)

ROWS = numbered(
    _row("conv1", "Conv2d", statistics((1, 64, 112, 112)), parameter_count=9408),
    _row(
        "bn1",
        "BatchNorm2d",
        statistics((1, 64, 112, 112), mean=1e-9, std=2.5e-9, min=-65504.0, max=123456.0, l2=1.5e8),
        parameter_count=128,
    ),
    _row("relu", "ReLU", statistics((1, 64, 112, 112), min=0.0, zero_fraction=0.4375), "in-place"),
    _row("relu", "ReLU", statistics((1, 64, 56, 56), min=0.0, zero_fraction=0.00001), "in-place", call=1),
    _row(
        "layer1.0.conv1",
        "Conv2d",
        statistics((1, 64, 56, 56), zero_fraction=0.25, dead_channel_count=12),
        "in-place",
        "dead channels",
        parameter_count=36_864,
        aliases=("layer1.0.shared", "=tied;1"),
    ),
    _row(
        "layer1.0.conv2",
        "Conv2d",
        statistics((1, 64, 56, 56), nan_count=3, inf_count=1, max=9999.6),
        "non-finite",
        parameter_count=36_864,
    ),
    _row(
        "layer2.0.downsample.0",
        "Conv2d",
        statistics(
            (1, 128, 28, 28),
            mean=0.0,
            std=0.0,
            min=0.0,
            max=0.0,
            mean_abs=0.0,
            l2=0.0,
            zero_fraction=1.0,
            dead_channel_count=128,
            quantiles=Quantiles(*(0.0,) * 7),
        ),
        "all zero",
        "constant",
        "dead channels",
    ),
    _row("head", "Heads", statistics((1, 2, 28, 28)), slot="['out']"),
    _row("head", "Heads", TensorStatistics((), "NoneType", 0), "not a tensor", slot="['aux'][1]"),
    _row(
        "encoder.layers.encoder_layer_11.self_attention.out_proj.parametrizations.weight.original0",
        "NonDynamicallyQuantizableLinear",
        statistics((1, 197, 768), "bfloat16", zero_fraction=0.99999),
        "shape varies",
        parameter_count=590_592,
    ),
    _row(
        HOSTILE_NAME,
        "Evil\u202e[bold]",
        TensorStatistics((1, 8), "quint8", 8, unmeasured="no statistics for per-channel quantised tensors"),
        "unmeasured",
    ),
    _row("tokens", "Embedding", statistics((), "int64", mean=None, std=math.inf, quantiles=None)),
    _row("fc", "Linear", statistics((1, 1000), mean=-0.0009996, std=2.0), parameter_count=513_000),
    _row("", "ResNet", statistics((1, 1000), mean=-0.0009996, std=2.0), "pass-through"),
)

INSPECTION = Activations(
    model=MODEL,
    inputs=(
        InputRecord("sample_images/cat.jpg", "0123abcd" * 8, (640, 480), (3, 224, 224), ("resize 256", "crop 224x224")),
        InputRecord("noise", None, None, (3, 224, 224), ()),
    ),
    rows=ROWS,
    uncalled=(
        UncalledLayer("attention.out_proj", "Linear", 4096, "its weights are used without calling it"),
        *(UncalledLayer(f"aux{n}.fc", "Linear", 10, "it never ran") for n in range(8)),
        UncalledLayer(HOSTILE_NAME, "Linear", 1, "it never ran"),
    ),
    feature_maps=(
        FeatureMaps(0, "conv1", "Conv2d", 0, "maps", np.ones((64, 2, 2), np.float32), None, 64, (64, 112, 112)),
    ),
    predictions=(
        Prediction(0, (285, 282, 281), ("Egyptian cat", "tiger cat", "tabby"), (0.4, 0.234, 0.22)),
        Prediction(1, (0, 1, 2), (), (0.999, 0.001, 0.0)),
    ),
    verdicts=(
        Finding("non-finite-activation", "fail", "(model):log", "'(model):log' (net.py:12) has 3 NaN in 10 values."),
        Finding("constant-activation", "warn", HOSTILE_NAME, f"'{HOSTILE_NAME}': all 8 outputs are 0."),
    ),
    warnings=("layer2.0.downsample.0 is zero everywhere.", f"A hostile name: {HOSTILE_NAME}"),
    seed=7,
    timings={"load": 0.5, "forward": 0.25},
)

FAILURE = Failure(
    "layer1.0.conv2", "Conv2d", ("1x64x56x56", "mask=1x56"), "RuntimeError: expected 32 channels, got \x1b[31m64[/]"
)

MODULES = (
    ModuleRow("", "ResNet", 0, 21_797_672, 1, ((1, 3, 224, 224),), ((1, 1000),), selected=False),
    ModuleRow("conv1", "Conv2d", 9408, 9408, 1, ((1, 3, 224, 224),), ((1, 64, 112, 112),), selected=True),
    ModuleRow("layer1", "Sequential", 0, 73_984, 1, ((1, 64, 56, 56),), ((1, 64, 56, 56),), selected=False),
    ModuleRow("layer1.0", "BasicBlock", 0, 73_984, 1, ((1, 64, 56, 56),), ((1, 64, 56, 56),), selected=False),
    ModuleRow("layer1.0.conv1", "Conv2d", 36_864, 36_864, 1, ((1, 64, 56, 56),), ((1, 64, 56, 56),), selected=True),
    ModuleRow("layer1.0.relu", "ReLU", 0, 0, 2, ((1, 64, 56, 56),), ((1, 64, 56, 56),), selected=False),
    ModuleRow(
        "detection.head.proj", "Head", 12, 12, 1, ((1, 4), (), (2, 2), (3,)), ((5,),), selected=False, note="also: tied"
    ),
    ModuleRow(HOSTILE_NAME, "Evil\u202e", 1, 1, 0, (), (), selected=False, note="it never ran"),
)


def gradient_statistics(shape: tuple[int, ...], scale: float = 1.0, **values: object) -> TensorStatistics:
    """Return statistics of a plausible gradient of some size, with `values` in place of its own."""
    expected: dict[str, object] = {
        "mean": 0.001 * scale,
        "std": 0.02 * scale,
        "min": -0.25 * scale,
        "max": 0.125 * scale,
        "mean_abs": 0.01 * scale,
        "l2": 4.5 * scale,
        "channel_axis": None,
        "channel_count": None,
        "dead_channel_count": None,
        "quantiles": Quantiles(*(scale * case for case in (-0.05, -0.02, -0.01, 0.001, 0.01, 0.02, 0.05))),
        "distribution": distribution_of(scale * np.linspace(-0.05, 0.05, 101) ** 3 / 0.0025),
    }
    return statistics(shape, **{**expected, **values})


NO_GRADIENT = {"mean": 0.0, "std": 0.0, "min": 0.0, "max": 0.0, "mean_abs": 0.0, "l2": 0.0, "zero_fraction": 1.0}


def maker(kind: Callable[..., Any], names: Sequence[str], **defaults: object) -> Callable[..., Any]:
    """Return a function that makes rows, given what is not as in most of them."""
    return lambda *args, **values: kind(**{**defaults, **dict(zip(names, args, strict=False)), **values})


_ROW = ("layer", "kind", "gradient", "status")
gradient_row = maker(GradientRow, _ROW, index=0, backward_index=None, call=0, slot="", role="output", status="gradient")
_PARAMETER = ("name", *_ROW[1:])
parameter_row = maker(ParameterRow, _PARAMETER, index=0, status="gradient", trainable=True, weight_l2=2.5, ratio=None)

GRADIENT_ROWS = (
    gradient_row("conv1", "Conv2d", gradient_statistics((1, 64, 112, 112), 1e-7), backward_index=9),
    gradient_row("bn1", "BatchNorm2d", gradient_statistics((1, 64, 112, 112), 1e-6), backward_index=8),
    gradient_row("relu", "ReLU", gradient_statistics((1, 64, 112, 112), zero_fraction=0.4375), backward_index=7),
    gradient_row("relu", "ReLU", gradient_statistics((1, 64, 56, 56)), backward_index=6, call=1),
    gradient_row(
        "layer1.0.conv1", "Conv2d", gradient_statistics((1, 64, 56, 56), **NO_GRADIENT), "zero", backward_index=5
    ),
    gradient_row(
        "layer1.0.conv2",
        "Conv2d",
        gradient_statistics((1, 64, 56, 56), nan_count=3, inf_count=1),
        backward_index=4,
        aliases=("layer1.0.shared", "=tied;1"),
    ),
    gradient_row(
        "layer1.0.conv2",
        "Conv2d",
        gradient_statistics((1, 64, 56, 56), nan_count=5),
        backward_index=3,
        slot="[0]",
        role="input",
    ),
    gradient_row(
        "embedding",
        "Embedding",
        TensorStatistics((1, 7), "int64", 7),
        "no gradient path",
        remark="it holds integers",
    ),
    gradient_row("aux", "Heads", TensorStatistics((1, 10), "float32", 10), "not reached", slot="['aux']"),
    gradient_row(
        HOSTILE_NAME,
        "Evil\u202e[bold]",
        TensorStatistics((1, 8), "float8_e4m3fn", 8, unmeasured="no statistics for this"),
        backward_index=2,
    ),
    gradient_row(
        "encoder.layers.encoder_layer_11.self_attention.out_proj.parametrizations.weight.original0",
        "NonDynamicallyQuantizableLinear",
        gradient_statistics((1, 197, 768), 1e-12),
        backward_index=1,
    ),
    gradient_row("", "ResNet", gradient_statistics((1, 1000), 10.0), backward_index=0),
)

PARAMETER_ROWS = (
    parameter_row("conv1.weight", "Conv2d", gradient_statistics((64, 3, 7, 7), 1e-6), ratio=1.8e-6),
    parameter_row("bn1.weight", "BatchNorm2d", gradient_statistics((64,)), weight_l2=8.0, ratio=0.5625),
    parameter_row("bn1.bias", "BatchNorm2d", gradient_statistics((64,)), weight_l2=0.0),
    parameter_row(
        "layer1.0.conv1.weight", "Conv2d", gradient_statistics((64, 64, 3, 3), **NO_GRADIENT), "zero", ratio=0.0
    ),
    parameter_row(
        "layer1.0.conv2.weight",
        "Conv2d",
        gradient_statistics((64, 64, 3, 3), nan_count=12, inf_count=0),
        aliases=("layer1.0.shared.weight",),
        ratio=1.25,
    ),
    parameter_row("aux.weight", "Linear", TensorStatistics((10, 4), "float32", 40), "not reached"),
    parameter_row(
        "embedding.weight", "Embedding", TensorStatistics((9, 7), "float32", 63), "no gradient path", trainable=False
    ),
    parameter_row(f"{HOSTILE_NAME}.$x^2$", "Evil\u202e", gradient_statistics((8, 8)), ratio=1.8),
    parameter_row("fc.weight", "Linear", gradient_statistics((1000, 512), 100.0), ratio=180.0),
)

GRADIENTS = Gradients(
    model=MODEL,
    inputs=INSPECTION.inputs,
    loss=LossRecord("mse", "noise (seed 7)", 1.0625, ("(model)", "aux['aux']")),
    rows=ROWS,
    gradients=tuple(replace(row, index=index) for index, row in enumerate(GRADIENT_ROWS)),
    parameters=tuple(replace(row, index=index) for index, row in enumerate(PARAMETER_ROWS)),
    uncalled=INSPECTION.uncalled,
    predictions=INSPECTION.predictions,
    verdicts=(
        Finding("non-finite-gradient", "fail", "layer1.0.conv2", "Its gradient has 3 NaN and 1 Inf (limit 0)."),
        Finding("dead-gradient", "fail", "layer1.0.conv1", "The gradient is exactly 0 everywhere (limit: above 0)."),
        Finding("vanishing-gradient", "fail", "conv1.weight", "‖g‖/‖w‖ shrinks to 1.0e-08 times its size."),
        Finding("unused-parameter", "warn", HOSTILE_NAME, f"1 of 8 never gets a gradient: {HOSTILE_NAME}."),
        Finding("zero-gradient", "warn", "", "About the whole network."),
    ),
    warnings=("Some layers are frozen.",),
    mode="train",
    seed=7,
    timings={"forward": 0.25, "backward": 0.5},
)


def printed(renderable: RenderableType, width: int) -> str:
    """Return what a terminal without colours shows, blanks at line ends removed."""
    console = Console(file=StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(renderable)
    assert isinstance(console.file, StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def in_colour(renderable: RenderableType, width: int = 200) -> str:
    """Return what a terminal with colours is sent."""
    console = Console(file=StringIO(), width=width, color_system="standard", force_terminal=True, legacy_windows=False)
    console.print(renderable)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.fixture
def assert_golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with a golden file, or write it there under `--update-golden`."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
        assert text == path.read_text(encoding="utf-8")

    return check
