"""Maps over the photographs of a run on its page, one at a time, as many inputs as fit."""

import base64
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.reporting.document import InputMap, MappedInput, PhotographMaps
from hookscope.reporting.html.pictures import BUDGET, png_uri, thumbnail_uri
from hookscope.reporting.overlays import ColourScale, bar, colour_scale, tint, tint_colours
from hookscope.reporting.run_facts import size_words
from hookscope.results.attention import PatchWeights
from hookscope.results.inputs import InputRecord, Region
from hookscope.results.runs.reading import StoredRun
from hookscope.results.runs.record import StoredPicture
from hookscope.text import are, counted

# Pixels a side: maps are smooth, and a browser draws them smoothly larger.
_PHOTOGRAPH_SIDE = 1200
_TINT_SIDE = 480
_DRAWN_SIDE = 1600  # of a map that is no picture's

Shown = dict[str, Any]


def shown_maps(part: PhotographMaps, run: StoredRun[Any]) -> Shown:
    """Return what the template needs of the first inputs, as many as fit into one page, and a remark on the others.

    An InputError is raised if a picture is missing, or is none.
    """
    inputs = inputs_that_fit(_shown_input(mapped, run) for mapped in part.inputs)
    left = len(part.inputs) - len(inputs)
    remark = f"{counted(left, 'input')} did not fit and {are(left)} in the run's folder." if left else ""
    return {"inputs": inputs, "remark": remark, "palette": base64.b64encode(tint_colours().tobytes()).decode("ascii")}


def inputs_that_fit(shown: Iterable[Shown]) -> list[Shown]:
    """Return the first inputs with their maps, as many as fit into one page."""
    inputs: list[Shown] = []
    room = BUDGET
    for entry in shown:
        room -= sum(len(picture["uri"]) for picture in (entry, *entry["maps"]))
        room -= sum(len(patches["weights"]) for patches in entry.get("patches", ()))
        if room < 0 and inputs:
            break
        inputs.append(entry)
    return inputs


def _shown_input(mapped: MappedInput, run: StoredRun[Any]) -> Shown:
    picture = run.record.pictures[mapped.number]
    photograph = shown_photograph(mapped.number, mapped.record, picture, run.read_picture(picture.photograph))
    maps = mapped.maps()
    return {
        **photograph,
        "remark": mapped.remark or picture.remark,
        "lies_over": all(input_map.draw is None for input_map in maps),
        "maps": [_shown_map(input_map, picture.region, run) for input_map in maps],
        "patches": [_shown_patches(patches, picture.region) for patches in mapped.patches],
    }


def _shown_map(input_map: InputMap, region: Region, run: StoredRun[Any]) -> Shown:
    if input_map.draw is None:
        uri = png_uri(Image.fromarray(tint(input_map.map, tinted_region(region))))
    else:
        drawn = run.record.overlays[input_map.number]
        uri = thumbnail_uri(run.read_picture(drawn), drawn, _DRAWN_SIDE)
    return {
        "title": input_map.title,
        "where": input_map.where,
        "facts": input_map.facts,
        "uri": uri,
        **legend(colour_scale(input_map.map.values)),
    }


def _shown_patches(patches: PatchWeights, region: Region) -> Shown:
    """Return the maps of all patches for the script: 255ths of their largest weight, and where the cells lie."""
    levels, tops = quantised(patches.values)
    top, left, bottom, right = patches.extent
    tall, wide = region.bottom - region.top, region.right - region.left
    return {
        "block": patches.block,
        "rows": patches.query_grid[0],
        "columns": patches.query_grid[1],
        "height": patches.values.shape[1],
        "width": patches.values.shape[2],
        "x": round(region.left + left * wide, 3),
        "y": round(region.top + top * tall, 3),
        "across": round((right - left) * wide, 3),
        "down": round((bottom - top) * tall, 3),
        "weights": base64.b64encode(levels.tobytes()).decode("ascii"),
        "tops": " ".join(f"{peak:.4g}" for peak in tops),
    }


def quantised(values: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return maps (n, h, w) in 255ths of the largest value of each, and those values (n,); NaN counts as 0."""
    finite = np.where(np.isfinite(values), values, np.float32(0)).clip(0)
    tops = finite.reshape(len(finite), -1).max(1)
    scale = np.where(tops > 0, tops, 1)[:, None, None]
    return np.rint(finite / scale * 255).astype(np.uint8), tops


def shown_photograph(number: int, record: InputRecord, picture: StoredPicture, png: bytes) -> Shown:
    """Return what the template needs of an input's photograph; an InputError is raised for what is no picture."""
    region = picture.region
    return {
        "number": number,
        "name": record.name,
        "size": size_words(record),
        "steps": record.steps,
        "remark": picture.remark,
        "uri": thumbnail_uri(png, picture.photograph, _PHOTOGRAPH_SIDE),
        "region": region,
        "cropped": region.top > 0 or region.left > 0 or region.bottom < region.height or region.right < region.width,
    }


def tinted_region(region: Region) -> Region:
    """Return the region in a smaller photograph, of the size at which maps are drawn."""
    ratio = min(1.0, _TINT_SIDE / max(region.height, region.width))
    edges = (region.top * ratio, region.left * ratio, region.bottom * ratio, region.right * ratio)
    return Region(*edges, max(1, round(region.height * ratio)), max(1, round(region.width * ratio)))


def legend(scale: ColourScale) -> Shown:
    """Return the colour bar of a map and the numbers at its ends; no bar for a map without values to show."""
    has_values = scale.top and math.isfinite(scale.top)
    return {"bar": png_uri(Image.fromarray(bar(scale, 240, 10))) if has_values else "", "ends": scale.labels}
