"""Write the photograph, the overview and the overlays of each input, for `attribute` and `attention`.

One photograph is in memory at a time, and two overlays on it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hookscope.commands.attribute.draw_maps import draw_given, given_remark
from hookscope.reporting.document import Document
from hookscope.reporting.overlays import overlay, shrunk
from hookscope.reporting.overviews.document import draw_document
from hookscope.reporting.overviews.sheet import INNER
from hookscope.results.activations import Activations
from hookscope.results.attention import Attention, AttentionMap
from hookscope.results.attributions import AttributionMap, Attributions
from hookscope.results.inputs import PICTURE_AXES, Photograph, grey_photograph, whole_photograph
from hookscope.results.runs.directory import OVERVIEW, RunFiles
from hookscope.results.runs.record import StoredPicture
from hookscope.text import counted, distinct_names, slug

_PAGE_SIDE = 1600  # pixels of the photograph in the page; sharp on any screen
_AT_ONCE = 2  # overlays in memory: each is as large as the photograph


def write_maps(
    folder: Path, result: Attributions | Attention, *, describe: Callable[[Any, int, Photograph], Document]
) -> RunFiles:
    """Write the pictures of all inputs and their maps; `describe` takes the result, an input's index and photograph."""
    for part in ("overlays", "inputs"):
        (folder / part).mkdir()
    digits = max(3, len(str(len(result.inputs) - 1)))
    maps: Sequence[AttributionMap | AttentionMap] = result.maps
    names = distinct_names(f"{heat_map.input_index:0{digits}d}-{_title(heat_map)}" for heat_map in maps)
    named = zip(maps, names, strict=True)
    by_input = {index: [*group] for index, group in groupby(named, lambda pair: pair[0].input_index)}
    pictures: list[StoredPicture] = []
    overlays: list[str] = []
    for index in range(len(result.inputs)):
        photograph = photograph_of(result, index)
        path = f"overview-{index:0{digits}d}.png" if index else OVERVIEW
        draw_document(describe(result, index, photograph)).save(folder / path, compress_level=6)
        name = write_photograph(folder, f"{index:0{digits}d}", photograph)
        pictures.append(StoredPicture(name, path, photograph.region, photograph.remark))
        # NumPy and zlib release Python's lock for most of the work.
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            overlays += pool.map(partial(_write_map, folder, result, photograph), by_input.get(index, []))
    words = [counted(len(pictures) - 1, "more overview")] if len(pictures) > 1 else []
    words += [counted(len(overlays), "overlay")] if overlays else []
    remarks = dict.fromkeys(picture.remark for picture in pictures if picture.remark and overlays)
    return RunFiles(words, {"pictures": tuple(pictures), "overlays": tuple(overlays)}, tuple(remarks))


def _write_map(
    folder: Path,
    result: Attributions | Attention,
    photograph: Photograph,
    named: tuple[AttributionMap | AttentionMap, str],
) -> str:
    """Write the picture of a map under a name; return its path inside the run."""
    heat_map, name = named
    drawn = f"overlays/{name}.png"
    if isinstance(heat_map, AttributionMap) and heat_map.values.ndim != PICTURE_AXES:
        data = result.input_values.get(heat_map.input_index) if isinstance(result, Attributions) else None
        draw_given(data, heat_map, INNER).save(folder / drawn)
    else:
        # Higher levels than 1 save a few hundredths of a photograph, and take several times as long.
        Image.fromarray(overlay(photograph, heat_map)).save(folder / drawn, compress_level=1)
    return drawn


def photograph_of(result: Activations | Attributions | Attention, index: int) -> Photograph:
    """Return the photograph under an input's maps; grey where it is not known, a drawing of what is no picture."""
    data = result.input_values.get(index) if isinstance(result, Attributions) else None
    if data is not None:
        return whole_photograph(np.asarray(draw_given(data, None, INNER)), given_remark(data))
    provenance = result.provenance
    if provenance is not None and provenance.photographs is not None:
        return provenance.photographs(result.inputs, index)
    return grey_photograph(result.inputs[index].shape, "There is no picture of this input.")


def _title(heat_map: AttributionMap | AttentionMap) -> str:
    """Return a map's part of its file name: "Egyptian-cat-layer4", "class-token-blocks.11.attn-head-3"."""
    if isinstance(heat_map, AttributionMap):
        layer = [slug(heat_map.layer, 60)] if heat_map.layer else []
        return "-".join((slug(heat_map.target.label, 60), *layer))
    head = [] if heat_map.head is None else [f"head-{heat_map.head}"]
    return "-".join((slug(heat_map.query, 40), slug(heat_map.block, 60), *head))


def write_photograph(folder: Path, number: str, photograph: Photograph) -> str:
    """Write a photograph as large as a page shows it; return its path inside the run."""
    height, width = photograph.pixels.shape[:2]
    ratio = min(1.0, _PAGE_SIDE / max(height, width))
    small = shrunk(photograph, max(1, round(height * ratio)), max(1, round(width * ratio)))
    name = f"inputs/{number}.jpg"
    Image.fromarray(small.pixels).save(folder / name, quality=90)
    return name
