"""Maps over the photographs of a run on its page, one at a time, as many inputs as fit."""

from collections import Counter

import numpy as np
from PIL import Image

from hookscope.reporting.document import InputMap, MappedInput, PhotographMaps
from hookscope.reporting.html.pictures import BUDGET, Shown, png_uri, thumbnail_uri
from hookscope.reporting.overlays import bar, colour_scale, resized, tint, tint_colours
from hookscope.reporting.run_facts import size_words
from hookscope.results.attention import PatchWeights
from hookscope.results.inputs import Region
from hookscope.results.runs.reading import StoredRun
from hookscope.text import are, counted

# Pixels a side: maps are smooth, and a browser draws them smoothly larger.
_PHOTOGRAPH_SIDE = 1200
_TINT_SIDE = 480
_DRAWN_SIDE = 1600  # pixels of a drawn signal or volume


def shown_maps(part: PhotographMaps, run: StoredRun) -> Shown:
    """Return what the template needs of the first inputs, as many as fit into one page, and a remark on the others.

    An InputError is raised if a picture is missing or damaged.
    """
    inputs: list[Shown] = []
    room = BUDGET
    counts = Counter(mapped.record.name for mapped in part.inputs)
    for mapped in part.inputs:
        shown = _shown_input(mapped, run)
        shown["name"] += f"[{mapped.number}]" * (counts[mapped.record.name] > 1)
        room -= sum(len(picture["uri"]) for picture in (shown, *shown["maps"], *shown["patches"]))
        if room < 0 and inputs:
            break
        inputs.append(shown)
    left = len(part.inputs) - len(inputs)
    remark = f"{counted(left, 'input')} did not fit and {are(left)} in the run's folder." if left else ""
    return {"inputs": inputs, "remark": remark}


def _shown_input(mapped: MappedInput, run: StoredRun) -> Shown:
    record, picture = mapped.record, run.record.pictures[mapped.number]
    region = picture.region
    maps = mapped.maps()
    return {
        "number": mapped.number,
        "name": record.name,
        "size": size_words(record),
        "steps": record.steps,
        "remark": mapped.remark or picture.remark,
        "uri": thumbnail_uri(run.read_picture(picture.photograph), picture.photograph, _PHOTOGRAPH_SIDE),
        "region": region,
        "cropped": region.top > 0 or region.left > 0 or region.bottom < region.height or region.right < region.width,
        "lies_over": all(input_map.draw is None for input_map in maps),
        "maps": [_shown_map(input_map, region, run) for input_map in maps],
        "patches": [_shown_patches(patches, region) for patches in mapped.patches],
    }


def _shown_map(input_map: InputMap, region: Region, run: StoredRun) -> Shown:
    if input_map.draw is None:
        ratio = min(1.0, _TINT_SIDE / max(region.height, region.width))
        smaller = resized(region, max(1, round(region.height * ratio)), max(1, round(region.width * ratio)))
        uri = png_uri(Image.fromarray(tint(input_map.map, smaller)))
    else:
        drawn = run.record.overlays[input_map.number]
        uri = thumbnail_uri(run.read_picture(drawn), drawn, _DRAWN_SIDE)
    scale = colour_scale(input_map.map.values)
    return {
        "title": input_map.title,
        "where": input_map.where,
        "facts": input_map.facts,
        "uri": uri,
        "bar": png_uri(Image.fromarray(bar(scale, 240, 10))) if scale.top > 0 else "",
        "ends": scale.labels,
    }


def _shown_patches(patches: PatchWeights, region: Region) -> Shown:
    """Return one picture with the maps of all patches, each scaled to its largest weight, and where the patches lie.

    NaN counts as 0.
    """
    finite = np.where(np.isfinite(patches.values), patches.values, np.float32(0)).clip(0)
    tops = finite.reshape(len(finite), -1).max(1)
    levels = np.rint(finite / np.where(tops > 0, tops, 1)[:, None, None] * 255).astype(np.uint8)
    top, left, bottom, right = patches.extent
    tall, wide = region.bottom - region.top, region.right - region.left
    place = {"x": region.left + left * wide, "y": region.top + top * tall}
    place |= {"width": (right - left) * wide, "height": (bottom - top) * tall}
    rows, columns = patches.query_grid
    height, width = levels.shape[1:]
    # Browsers blend neighbours: the edge of each map is repeated around it.
    framed = np.pad(levels, ((0, 0), (1, 1), (1, 1)), "edge").reshape(rows, columns, height + 2, width + 2)
    sheet = Image.fromarray(framed.swapaxes(1, 2).reshape(rows * (height + 2), columns * (width + 2)))
    colours = tint_colours()
    sheet.putpalette(colours[:, :3].tobytes())
    return {
        "block": patches.block,
        "rows": rows,
        "columns": columns,
        "height": height,
        "width": width,
        "place": {name: round(number, 3) for name, number in place.items()},
        "uri": png_uri(sheet, transparency=colours[:, 3].tobytes()),
        "tops": " ".join(f"{peak:.4g}" for peak in tops),
    }
