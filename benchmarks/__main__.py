"""Measure every budget and print each as a ratio taken in this run: `python -m benchmarks`.

Compared ways take turns, so that a machine whose speed drifts slows all of them alike; medians are reported. Nothing
else should be running.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torchvision.models import get_model

import hookscope
from hookscope.models.architecture import recognise, state_shapes
from hookscope.render.grids import draw_grid, encode_png

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "sample_images" / "cat.jpg"


@dataclass(frozen=True)
class Figure:
    """One budget and what was measured.

    Attributes:
        what: For people.
        measured: In the unit of `limit`.
        limit: At most this.
        unit: "×", "s" or "MB".
        detail: The absolute figures behind a ratio.
    """

    what: str
    measured: float
    limit: float
    unit: str
    detail: str


def interleaved(ways: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Time the ways in turns; return seconds per round for each."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + warm_up):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def spread(seconds: list[float], scale: float = 1e3, unit: str = "ms") -> str:
    """Return "median (minimum-maximum) unit"."""
    low, middle, high = min(seconds) * scale, statistics.median(seconds) * scale, max(seconds) * scale
    return f"{middle:.1f} ({low:.1f}-{high:.1f}) {unit}"


def capture_cost() -> Figure:
    """Statistics on every module call of resnet34 over the plain forward pass."""
    torch.manual_seed(0)
    model = get_model("resnet34").eval()
    batch = torch.randn(1, 3, 224, 224)

    def plain() -> None:
        with torch.no_grad():
            model(batch)

    seconds = interleaved({"plain": plain, "hookscope": lambda: hookscope.inspect(model, batch, ["*"])}, rounds=60)
    ratio = statistics.median(seconds["hookscope"]) / statistics.median(seconds["plain"])
    detail = f"{spread(seconds['hookscope'])} over {spread(seconds['plain'])}"
    return Figure("statistics on all 132 module calls of resnet34, over the plain forward", ratio, 1.30, "×", detail)


def gradient_cost() -> Figure:
    """Statistics of all activations, gradients and parameters of resnet34 over plain forward and backward passes."""
    torch.manual_seed(0)
    model = get_model("resnet34").eval()
    batch = torch.randn(1, 3, 224, 224)
    weights = torch.randn(1, 1000)

    def plain() -> None:
        (model(batch) * weights).sum().backward()
        model.zero_grad()

    ways = {"plain": plain, "hookscope": lambda: hookscope.inspect_gradients(model, batch, "projection", ["*"])}
    seconds = interleaved(ways, rounds=30)
    ratio = statistics.median(seconds["hookscope"]) / statistics.median(seconds["plain"])
    detail = f"{spread(seconds['hookscope'])} over {spread(seconds['plain'])}"
    what = "statistics of all activations, gradients and parameters of resnet34, over plain forward and backward"
    return Figure(what, ratio, 1.20, "×", detail)


def recognition_cost() -> Figure:
    """Find the network of a state dict by its shapes, after imports: the slowest of a few of torchvision's."""
    slowest: dict[str, float] = {}
    for name in ("resnet18", "vit_b_16", "densenet121", "fasterrcnn_resnet50_fpn", "r3d_18", "deeplabv3_resnet101"):
        options = {} if name in ("resnet18", "vit_b_16", "densenet121", "r3d_18") else {"weights_backbone": None}
        with torch.device("meta"):
            shapes = state_shapes(get_model(name, **options).state_dict())
        slowest[name] = statistics.median(interleaved({name: partial(recognise, shapes)}, rounds=3, warm_up=1)[name])
    name = max(slowest, key=slowest.__getitem__)
    what = "recognising a torchvision checkpoint by its shapes, after imports, the slowest of six"
    return Figure(what, slowest[name], 3.0, "s", f"{name}; " + ", ".join(f"{each:.2f}" for each in slowest.values()))


def listing_cost() -> tuple[Figure, Figure]:
    """List a 2 GiB checkpoint, values counted: seconds and memory beyond the imports, in a process of its own."""
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        path = Path(folder, "large.pt")
        torch.save({f"layer{index}.weight": torch.zeros(1024, 4096) for index in range(128)}, path)
        found = [_run([sys.executable, "-m", "benchmarks.listing", str(path)]).split() for _ in range(4)][1:]
    seconds, megabytes = [float(each[0]) for each in found], [float(each[1]) / 1e6 for each in found]
    return (
        Figure("listing a 2 GiB checkpoint, after imports", statistics.median(seconds), 1.0, "s", spread(seconds)),
        Figure(
            "peak memory of that over the imports'",
            statistics.median(megabytes),
            100,
            "MB",
            spread(megabytes, 1, "MB"),
        ),
    )


def grid_cost() -> Figure:
    """Draw all channels of resnet34's 36 convolutions and encode them as PNG."""
    torch.manual_seed(0)
    model = get_model("resnet34").eval()
    inspection = hookscope.inspect(model, torch.randn(1, 3, 224, 224), ["type:conv2d"], grids_for=1)

    def draw() -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda maps: encode_png(draw_grid(maps)), inspection.feature_maps))

    seconds = interleaved({"draw": draw}, rounds=9)["draw"]
    return Figure(
        f"all channels of resnet34's {len(inspection.feature_maps)} convolutions as PNG grids",
        statistics.median(seconds),
        0.25,
        "s",
        spread(seconds),
    )


def process_cost() -> Figure:
    """The whole command over a bare script that imports, builds and runs once."""
    bare = [sys.executable, "-m", "benchmarks.bare", str(PICTURE)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hookscope", "activations", "resnet34", str(PICTURE), "--layer", "conv"]
        command += ["--weights", "none", "--out", f"{folder}/run"]
        seconds = interleaved({"bare": lambda: _run(bare), "hookscope": lambda: _run(command)}, rounds=7, warm_up=1)
    ratio = statistics.median(seconds["hookscope"]) / statistics.median(seconds["bare"])
    detail = f"{spread(seconds['hookscope'], 1, 's')} over {spread(seconds['bare'], 1, 's')}"
    return Figure(
        "activations resnet34 IMAGE --layer conv, whole process, over a bare script", ratio, 1.15, "×", detail
    )


def help_cost() -> Figure:
    """`hookscope --help`, whole process."""
    seconds = interleaved({"help": lambda: _run([sys.executable, "-m", "hookscope", "--help"])}, rounds=9)["help"]
    return Figure("hookscope --help, whole process", statistics.median(seconds), 0.25, "s", spread(seconds))


def memory_cost(network: str) -> Figure:
    """Peak memory with statistics on every layer, over the plain forward's peak plus the largest activation."""
    peaks: dict[str, list[float]] = {"plain": [], "hookscope": []}
    for _ in range(3):
        for way, found in peaks.items():
            output = _run([sys.executable, "-m", "benchmarks.memory", network, way])
            found.append(float(output) / 1e6)
    largest = _largest_activation_bytes(network) / 1e6
    plain, hooked = (statistics.median(found) for found in peaks.values())
    return Figure(
        f"peak memory of {network} with statistics on every layer, over the plain forward's",
        hooked - plain,
        largest + 30,
        "MB",
        f"{hooked:.0f} MB over {plain:.0f} MB; the largest activation is {largest:.1f} MB",
    )


def _largest_activation_bytes(network: str) -> int:
    with torch.device("meta"):
        model = get_model(network)
    rows, _ = hookscope.list_modules(model, (torch.zeros(1, 3, 224, 224, device="meta"),))
    return max(4 * torch.Size(shape).numel() for row in rows for shape in row.output_shapes)


def _run(command: list[str]) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> int:
    """Measure everything, print a table, and return 1 if a budget is missed."""
    torch.set_num_threads(2)
    figures = [
        capture_cost(),
        gradient_cost(),
        grid_cost(),
        process_cost(),
        help_cost(),
        memory_cost("vgg16"),
        memory_cost("resnet152"),
        recognition_cost(),
        *listing_cost(),
    ]
    table = Table("what", "measured", "at most", "", "median (minimum-maximum)")
    for figure in figures:
        verdict = "holds" if figure.measured <= figure.limit else "MISSED"
        shown = (
            f"{figure.unit}{value:.2f}" if figure.unit == "×" else f"{value:.2f} {figure.unit}"
            for value in (figure.measured, figure.limit)
        )
        table.add_row(figure.what, *shown, verdict, figure.detail)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return int(any(figure.measured > figure.limit for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
