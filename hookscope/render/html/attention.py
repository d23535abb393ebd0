"""A run of `attention` as one HTML page: maps over the photograph, and any patch picked on it with its own map."""

import base64
import math
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.render.attention_text import HEADS, finding_of
from hookscope.render.columns import number_text
from hookscope.render.html.over_photograph import inputs_that_fit, legend, shown_photograph, tinted_region
from hookscope.render.html.page import making_facts, page_table, render_page
from hookscope.render.html.pictures import png_uri
from hookscope.render.overlays import colour_scale, tint, tint_colours
from hookscope.render.terminal import model_facts
from hookscope.results.attention import Attention, AttentionMap, PatchWeights
from hookscope.results.inputs import Region
from hookscope.results.runs.reading import StoredRun
from hookscope.text import some_of


def attention_html(run: StoredRun[Attention]) -> str:
    """Return the page of a run; raise an InputError if a picture is missing, or differs from the run's record."""
    result = run.result
    inputs, remarks = inputs_that_fit(len(result.inputs), lambda index: _shown_input(run, index))
    names = [PurePath(each.name).name or each.name for each in result.inputs]
    return render_page(
        "attention.html",
        {},
        scripts=("over_photograph.js", "attention.js"),
        title=f"{result.model.name} · what its attention looks at · {some_of(names, 1)}",
        facts=[
            *model_facts(result.model),
            ("Blocks", result.census, bool(result.unseen)),
            ("Device", f"{result.device}, {result.dtype}", False),
            ("Time", f"{sum(result.timings.values()):.2f} s", False),
        ],
        making=making_facts(run.record, result, []),
        census=f"{result.census}.",
        finding=finding_of(result),
        heads=page_table("Every head", HEADS, result.rows),
        place="Over the photograph" if any(each["maps"] or each["patches"] for each in inputs) else "The inputs",
        palette=base64.b64encode(tint_colours().tobytes()).decode("ascii"),
        result=result,
        unusable=run.record.unusable_inputs,
        remarks=remarks,
        inputs=inputs,
    )


def _shown_input(run: StoredRun[Attention], index: int) -> dict[str, Any]:
    picture = run.record.pictures[index]
    region = picture.region
    photograph = shown_photograph(index, run.result.inputs[index], picture, run.read_picture(picture.photograph))
    maps = [_shown_map(each, region) for each in run.result.maps if each.input_index == index]
    patches = [_shown_patches(each, region) for each in run.result.patches if each.input_index == index]
    without = {} if maps or patches else {"remark": "It has no map; a note below has the reason."}
    return {**photograph, **without, "maps": maps, "patches": patches}


def _shown_map(each: AttentionMap, region: Region) -> dict[str, Any]:
    return {
        "query": each.query,
        "block": each.block,
        "head": "" if each.head is None else f"head {each.head}",
        "grid": " × ".join(map(str, each.values.shape)),
        "elsewhere": f"{each.elsewhere:.1%}" if math.isfinite(each.elsewhere) else number_text(each.elsewhere),
        "uri": png_uri(Image.fromarray(tint(each, tinted_region(region)))),
        **legend(colour_scale(each)),
    }


def _shown_patches(patches: PatchWeights, region: Region) -> dict[str, Any]:
    """Return the rows of all patches for the script: 255ths of each row's largest weight, and where the cells lie."""
    levels, tops = quantised(patches.values)
    top, left, bottom, right = patches.extent
    tall, wide = region.bottom - region.top, region.right - region.left
    return {
        "block": patches.block,
        "rows": patches.query_grid[0],
        "columns": patches.query_grid[1],
        "height": patches.values.shape[1],
        "width": patches.values.shape[2],
        "x": region.left + left * wide,
        "y": region.top + top * tall,
        "across": (right - left) * wide,
        "down": (bottom - top) * tall,
        "weights": base64.b64encode(levels.tobytes()).decode("ascii"),
        "tops": " ".join(f"{each:.4g}" for each in tops),
    }


def quantised(values: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return maps (n, h, w) in 255ths of each map's largest value, and those values (n,); NaN counts as 0."""
    finite = np.where(np.isfinite(values), values, np.float32(0)).clip(0)
    tops = finite.reshape(len(finite), -1).max(1)
    scale = np.where(tops > 0, tops, 1)[:, None, None]
    return np.rint(finite / scale * 255).astype(np.uint8), tops
