"""Maps over the photographs of a run, as the pages of `attribute` and `attention` show them."""

import math
from collections.abc import Callable
from typing import Any

from PIL import Image

from hookscope.render.html.pictures import BUDGET, png_uri, thumbnail_uri
from hookscope.render.overlays import ColourScale, bar
from hookscope.results.inputs import InputRecord, Region
from hookscope.results.runs.record import StoredPicture
from hookscope.text import are, counted, input_shape_text

# Pixels a side: maps are smooth, and a browser draws them smoothly larger.
_PHOTOGRAPH_SIDE = 1200
_TINT_SIDE = 480

Shown = dict[str, Any]


def inputs_that_fit(count: int, show: Callable[[int], Shown]) -> tuple[list[Shown], list[str]]:
    """Return the first of so many inputs, as many as fit into one page, and a remark on the others.

    Args:
        count: Of the inputs.
        show: Returns what the template needs of an input, with its `maps`.
    """
    inputs: list[Shown] = []
    room = BUDGET
    for index in range(count):
        shown = show(index)
        room -= sum(len(each["uri"]) for each in (shown, *shown["maps"]))
        room -= sum(len(each["weights"]) for each in shown.get("patches", ()))
        if room < 0 and inputs:
            break
        inputs.append(shown)
    left = count - len(inputs)
    return inputs, [f"{counted(left, 'input')} did not fit and {are(left)} in the run's folder."] if left else []


def shown_photograph(number: int, record: InputRecord, picture: StoredPicture, png: bytes) -> Shown:
    """Return what the template needs of an input's photograph; an InputError is raised for what is no picture."""
    region = picture.region
    size = f"{' × '.join(map(str, record.size))} pixels, " if record.size else ""
    return {
        "number": number,
        "name": record.name,
        "size": f"{size}to the network as {input_shape_text(record.shape)}",
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
