"""Write the grids of a run directory."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from hookscope.reporting.grids import draw_for_run, encode_png, grid_name
from hookscope.results.activations import FeatureMaps
from hookscope.results.grids import Grid
from hookscope.results.inputs import InputRecord


def write_grids(
    folder: Path, maps: Sequence[FeatureMaps], row_count: int, inputs: Sequence[InputRecord], of: str = "", **style: Any
) -> list[Grid]:
    """Draw maps in several threads, titled by their layer and `of`; `style` holds arguments of `draw_for_run`."""
    if not maps:
        return []
    (folder / "grids").mkdir()

    def write(layer_maps: FeatureMaps) -> Grid:
        name = f"grids/{grid_name(layer_maps, row_count, input_count=len(inputs))}"
        titled = replace(layer_maps, label=f"{layer_maps.label or '(model)'}: {of}") if of else layer_maps
        picture, grid = draw_for_run(titled, name, input_name=inputs[layer_maps.input_index].name, **style)
        (folder / name).write_bytes(encode_png(picture))
        return grid

    # NumPy and zlib release Python's lock for most of the work.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(write, maps))
