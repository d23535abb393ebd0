"""Norms of tokens on the page of a run: each map over what the network saw, tokens in front of the grid beside it."""

from typing import Any
from urllib.parse import quote

from PIL import Image

from hookscope.render.html.over_photograph import inputs_that_fit, legend, shown_photograph, tinted_region
from hookscope.render.html.pictures import png_uri
from hookscope.render.overlays import ColourScale, bar, colour_scale, tint
from hookscope.results.activations import Activations
from hookscope.results.inputs import Region
from hookscope.results.runs.reading import InspectionRun
from hookscope.results.runs.record import StoredPicture
from hookscope.results.token_norms import TokenMap
from hookscope.text import safe_text

_NO_PICTURE = (205, 205, 205)


def token_norms(run: InspectionRun) -> list[dict[str, Any]]:
    """Return what the template needs of each input with maps of its tokens; an InputError as for other pictures."""
    drawn = sorted({each.input_index for each in token_maps(run)})
    return inputs_that_fit(_shown_input(run, index) for index in drawn)


def token_maps(run: InspectionRun) -> tuple[TokenMap, ...]:
    """Return the maps of tokens of a run; those of gradients have none."""
    return run.result.token_maps if isinstance(run.result, Activations) else ()


def _shown_input(run: InspectionRun, index: int) -> dict[str, Any]:
    record, names = run.result.inputs[index], run.record.thumbnails
    height, width = record.shape[-2:]
    region = Region(0, 0, height, width, height, width)
    name = names[index] if index < len(names) else None
    maps = [_shown_map(each, region) for each in token_maps(run) if each.input_index == index]
    if name is None:
        grey = {"uri": png_uri(Image.new("RGB", (1, 1), _NO_PICTURE)), "region": region, "cropped": False}
        return {"number": index, "name": record.name, "maps": maps, **grey}
    shown = shown_photograph(index, record, StoredPicture(name, "", region), run.read_picture(name))
    return {**shown, "maps": maps}


def _shown_map(each: TokenMap, region: Region) -> dict[str, Any]:
    scale = colour_scale(each)
    return {
        "label": each.label or "(model)",
        "href": f"#layer={quote(safe_text(each.label), safe='')}",
        "high": each.high,
        "token_count": len(each.norms),
        "median": each.median,
        "limit": each.limit,
        "prefix": [(name, norm, norm > each.limit, _colour(norm, scale)) for name, norm in each.prefix_norms],
        "uri": png_uri(Image.fromarray(tint(each, tinted_region(region)))),
        **legend(scale),
    }


def _colour(norm: float, scale: ColourScale) -> str:
    """Return the colour of a norm as the colour bar has it: "#a1b2c3"."""
    level = min(round(255 * norm / scale.top), 255) if scale.top else 0
    red, green, blue = map(int, bar(scale, 256, 1)[0][level])
    return f"#{red:02x}{green:02x}{blue:02x}"
