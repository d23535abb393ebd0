"""A run of `attribute` as one HTML page: the overview, and each map over the photograph, as opaque as a slider says."""

import math
from pathlib import PurePath
from typing import Any

from PIL import Image

from hookscope.render.attribution_text import check_text, finding_of, verdict
from hookscope.render.columns import number_text, probability_text
from hookscope.render.html.page import making_facts, model_facts, render_page
from hookscope.render.html.pictures import BUDGET, png_uri, thumbnail_uri
from hookscope.render.overlays import bar, colour_scale, tint
from hookscope.results.attributions import AttributionMap
from hookscope.results.concentration import concentration
from hookscope.results.inputs import Region
from hookscope.results.runs.attributions import StoredAttributions
from hookscope.text import are, counted, shape_text, some_of

# Pixels a side, our choice: maps are smooth, and a browser draws them smoothly larger.
_PHOTOGRAPH_SIDE = 1200
_TINT_SIDE = 480
_OVERVIEW_SIDE = 1600


def attributions_html(run: StoredAttributions) -> str:
    """Return the page of a run; an InputError is raised if a picture is missing, or not what the run says it is."""
    result = run.result
    inputs: list[dict[str, Any]] = []
    room = BUDGET
    for index in range(len(result.inputs)):
        shown = _shown_input(run, index)
        room -= sum(len(uri) for uri in (shown["uri"], *(each["uri"] for each in shown["maps"])))
        if room < 0 and inputs:
            break
        inputs.append(shown)
    left_out = len(result.inputs) - len(inputs)
    remarks = [f"{counted(left_out, 'input')} did not fit and {are(left_out)} in the run's folder."]
    overview = thumbnail_uri(run.read_picture(run.pictures[0].overview), run.pictures[0].overview, _OVERVIEW_SIDE)
    return render_page(
        "attributions.html",
        {"check": check_text, "verdict": verdict},
        script="attributions.js",
        title=_title(run),
        facts=_facts(run),
        making=making_facts(run.record, result, [("Layers asked for", " ".join(run.record.patterns) or "chosen")]),
        overview=overview,
        finding=finding_of(result.maps[0], result) if result.maps else "",
        result=result,
        warnings=result.warnings,
        unusable=run.record.unusable_inputs,
        remarks=remarks if left_out else [],
        inputs=inputs,
    )


def _title(run: StoredAttributions) -> str:
    names = [PurePath(each.name).name or each.name for each in run.result.inputs]
    return f"{run.result.model.name} · where it looks · {some_of(names, 1)}"


def _facts(run: StoredAttributions) -> list[tuple[str, str, bool]]:
    result = run.result
    seconds = sum(result.timings.values())
    layers = [f"{each.label} ({each.kind}): {each.reason}" for each in result.layers]
    return [
        *model_facts(result.model),
        ("Method", result.method, False),
        ("Looked at", "; ".join(layers) or "the picture itself", False),
        ("Device", f"{result.device}, {result.dtype}", False),
        ("Time", f"{seconds:.2f} s", False),
    ]


def _shown_input(run: StoredAttributions, index: int) -> dict[str, Any]:
    record, picture = run.result.inputs[index], run.pictures[index]
    region = picture.region
    maps = [each for each in run.result.maps if each.input_index == index]
    size = f"{' × '.join(map(str, record.size))} pixels, " if record.size else ""
    return {
        "number": index,
        "name": record.name,
        "size": f"{size}to the network as {shape_text(record.shape)}",
        "steps": record.steps,
        "remark": picture.remark,
        "uri": thumbnail_uri(run.read_picture(picture.photograph), picture.photograph, _PHOTOGRAPH_SIDE),
        "region": region,
        "cropped": region.top > 0 or region.left > 0 or region.bottom < region.height or region.right < region.width,
        "maps": [_shown_map(run, each, region) for each in maps],
    }


def _shown_map(run: StoredAttributions, each: AttributionMap, region: Region) -> dict[str, Any]:
    scale = colour_scale(each)
    box = concentration(each, run.result.inputs[each.input_index])
    ratio = min(1.0, _TINT_SIDE / max(region.height, region.width))
    edges = (region.top * ratio, region.left * ratio, region.bottom * ratio, region.right * ratio)
    small = Region(*edges, max(1, round(region.height * ratio)), max(1, round(region.width * ratio)))
    target = each.target
    return {
        "label": target.label,
        "layer": each.layer,
        "grid": " × ".join(map(str, each.values.shape)),
        "score": number_text(target.score),
        "probability": "" if target.probability is None else probability_text(target.probability),
        "half": "" if box is None else f"{max(box.share, 0.01):.0%} of what the network sees, {box.words}",
        "uri": png_uri(Image.fromarray(tint(each, small))),
        "bar": png_uri(Image.fromarray(bar(scale, 240, 10))) if scale.top and math.isfinite(scale.top) else "",
        "ends": scale.labels,
    }
