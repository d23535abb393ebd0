"""Runs on the disk as tests want them, written here by hand: what the reader and the page have to agree with."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.commands.conversion import DESCRIPTIONS
from hookscope.reporting.html.document import document_html
from hookscope.results.grids import Grid, Tiles
from hookscope.results.json_form import SCHEMA_VERSION
from hookscope.results.runs.reading import StoredRun
from hookscope.results.runs.record import RunRecord


def report_html(run: StoredRun) -> str:
    """Return the page of a run."""
    return document_html(DESCRIPTIONS[type(run.result)](run.result, run.record), run)


HOSTILE_NAMES = (
    "</script><script>window.pwned=1</script>",
    "</style><img src=x onerror=window.pwned=1>",
    '" onmouseover="window.pwned=1" x="',
    "'><svg/onload=window.pwned=1>",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:window.pwned=1",
    "../../etc/passwd",
    "&lt;b&gt;",
    "a&layer=b#c%20d+e",
    "\u202egnp.exe\x1b[31m\ud800\x00",
    "<!--",
    "</template></dialog>",
)

PALETTE = [*range(256)] * 3  # colours do not matter, only that they are kept


MODEL = {"name": "net", "kind": "Net", "weights": "net.pt", "random": False, "sha256": None, "parameter_count": 7}


def given(name: str, **values: Any) -> dict[str, Any]:
    """Return an input of `result.json`."""
    return {"name": name, "sha256": None, "size": None, "shape": [3, 8, 8], "steps": []} | values


def statistics(**values: Any) -> dict[str, Any]:
    """Return the statistics of a (1, 4, 3, 5) activation, with `values` in place of its own."""
    expected = {
        "shape": [1, 4, 3, 5],
        "dtype": "float32",
        "element_count": 60,
        "mean": 0.5,
        "std": 1.25,
        "min": -2.0,
        "max": 3.0,
        "mean_abs": 0.75,
        "l2": 12.5,
        "zero_fraction": 0.25,
        "nan_count": 0,
        "inf_count": 0,
        "channel_axis": 1,
        "channel_count": 4,
        "dead_channel_count": 0,
        "dead_channel_fraction": 0.0,
        "quantiles": {"q01": -2.0, "q05": -1.5, "q25": -0.5, "q50": 0.25, "q75": 1.0, "q95": 2.0, "q99": 3.0},
        "unmeasured": None,
    }
    return expected | values


def row(index: int, layer: str, kind: str = "Conv2d", **values: Any) -> dict[str, Any]:
    """Return a row of `result.json`; `flags`, `call`, `slot` and so on among the values."""
    expected = {"call": 0, "slot": "", "parameter_count": 10 * index, "flags": [], "aliases": []}
    return {"index": index, "layer": layer, "kind": kind, "activation": statistics()} | expected | values


def gradient(index: int, layer: str, **values: Any) -> dict[str, Any]:
    """Return a gradient of `result.json`."""
    place = {"index": index, "backward_index": 0, "layer": layer, "kind": "Conv2d", "call": 0, "slot": ""}
    message = {"role": "output", "status": "gradient", "gradient": statistics(), "remark": "", "aliases": []}
    return place | message | values


def parameter(index: int, name: str, **values: Any) -> dict[str, Any]:
    """Return a parameter of `result.json`."""
    place = {"index": index, "name": name, "kind": "Conv2d", "trainable": True, "status": "gradient"}
    return place | {"gradient": statistics(), "weight_l2": 2.0, "ratio": 0.5, "aliases": []} | values


def drawn(
    maps: NDArray[np.uint8], columns: int = 2, down: int = 2, across: int = 3, gap: int = 1, *, row: int = 0
) -> tuple[bytes, Grid]:
    """Draw palette indices (C, H, W) as a grid; return its file, and what a run says of it."""
    count, height, width = maps.shape
    tiles = Tiles(7, 5, columns, count, 1, height, width, down, across, gap)
    rows = -(-count // columns)
    canvas = np.full((5 + rows * (height * down + gap) + 9, 7 + columns * (width * across + gap) + 4), 243, np.uint8)
    for number, heat_map in enumerate(maps):
        top = 5 + number // columns * (height * down + gap)
        left = 7 + number % columns * (width * across + gap)
        tile = heat_map.repeat(down, axis=0).repeat(across, axis=1)
        canvas[top : top + tile.shape[0], left : left + tile.shape[1]] = tile
    image = Image.fromarray(canvas)
    image.putpalette(PALETTE)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue(), Grid("a.png", row, "conv", 0, ("said <b>so</b>",), ("0", "max"), 0, tiles)


def maps(count: int = 4, height: int = 3, width: int = 5) -> NDArray[np.uint8]:
    """Return palette indices (C, H, W) in which no two neighbours are equal."""
    return (np.arange(count * height * width, dtype=np.int64) * 7 % 241).astype(np.uint8).reshape(count, height, width)


def write_run(
    folder: Path,
    rows: Sequence[dict[str, Any]],
    *,
    grids: Mapping[str, tuple[bytes, Grid]] | None = None,
    thumbnails: Sequence[bytes | None] = (),
    gradients: Sequence[dict[str, Any]] = (),
    parameters: Sequence[dict[str, Any]] = (),
    **entries: Any,
) -> Path:
    """Write a run directory: of `grads` if there are gradients, else of `activations`."""
    folder.mkdir(parents=True, exist_ok=True)
    backward = bool(gradients or parameters)
    expected: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "tool": "hookscope",
        "verb": "grads" if backward else "activations",
        "command": "hookscope …",
        "versions": {"hookscope": "0.1.0"},
        "grids": [asdict(replace(grid, path=f"grids/{name}")) for name, (_, grid) in (grids or {}).items()],
    }
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "rows": list(rows),
        "model": MODEL,
        "inputs": [given("cat.jpg", size=[451, 300], shape=[3, 224, 224], steps=["resized"])],
        "device": "cpu",
        "dtype": "float32",
        "timings": {"forward": 0.5},
        "loss": {"name": "sum", "target": "", "value": 1.5, "outputs": []} if backward else None,
        "gradients": list(gradients),
        "parameters": list(parameters),
    }
    if grids:
        (folder / "grids").mkdir()
        for name, (content, _) in grids.items():
            (folder / "grids" / name).write_bytes(content)
    if thumbnails:
        (folder / "inputs").mkdir()
        expected["thumbnails"] = [
            None if thumbnail is None else f"inputs/{i:03d}.png" for i, thumbnail in enumerate(thumbnails)
        ]
        for number, content in enumerate(thumbnails):
            if content is not None:
                (folder / f"inputs/{number:03d}.png").write_bytes(content)
    of_run = {field.name for field in fields(RunRecord)}
    _write(folder / "result.json", result | {name: value for name, value in entries.items() if name not in of_run})
    _write(folder / "run.json", expected | {name: value for name, value in entries.items() if name in of_run})
    return folder


def picture_png(side: int = 32) -> bytes:
    """Return a small picture."""
    file = io.BytesIO()
    Image.fromarray((np.arange(side * side * 3) % 251).astype(np.uint8).reshape(side, side, 3)).save(file, "PNG")
    return file.getvalue()


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")
