"""A run of `attribute` as one HTML page: the answer, and maps over the photograph, with sliders for their opacity."""

from pathlib import PurePath
from typing import Any

from PIL import Image

from hookscope.render.attribution_text import check_text, finding_of, verdict
from hookscope.render.columns import number_text, probability_text
from hookscope.render.html.over_photograph import inputs_that_fit, legend, shown_photograph, tinted_region
from hookscope.render.html.page import making_facts, render_page
from hookscope.render.html.pictures import png_uri, thumbnail_uri
from hookscope.render.overlays import colour_scale, tint
from hookscope.render.terminal import model_facts
from hookscope.results.attributions import AttributionMap, Attributions
from hookscope.results.concentration import concentration
from hookscope.results.inputs import PICTURE_AXES, Region
from hookscope.results.runs.reading import StoredRun
from hookscope.text import some_of

# Pixels a side of a map that is no picture's.
_DRAWN_SIDE = 1600


def attributions_html(run: StoredRun[Attributions]) -> str:
    """Return the page of a run; raise an InputError if a picture is missing, or differs from the run's record."""
    result = run.result
    inputs, remarks = inputs_that_fit(len(result.inputs), lambda index: _shown_input(run, index))
    return render_page(
        "attributions.html",
        {"check": check_text, "verdict": verdict},
        scripts=("over_photograph.js",),
        title=_title(run),
        facts=_facts(run),
        making=making_facts(run.record, result, [("Layers", " ".join(run.record.patterns) or "chosen by hookscope")]),
        finding=finding_of(result.maps[0], result) if result.maps else "",
        result=result,
        unusable=run.record.unusable_inputs,
        remarks=remarks,
        inputs=inputs,
    )


def _title(run: StoredRun[Attributions]) -> str:
    names = [PurePath(each.name).name or each.name for each in run.result.inputs]
    return f"{run.result.model.name} · where it looks · {some_of(names, 1)}"


def _facts(run: StoredRun[Attributions]) -> list[tuple[str, str, bool]]:
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


def _shown_input(run: StoredRun[Attributions], index: int) -> dict[str, Any]:
    picture = run.record.pictures[index]
    maps = [(place, each) for place, each in enumerate(run.result.maps) if each.input_index == index]
    return {
        **shown_photograph(index, run.result.inputs[index], picture, run.read_picture(picture.photograph)),
        "is_picture": all(each.values.ndim == PICTURE_AXES for _, each in maps),
        "maps": [_shown_map(run, each, picture.region, run.record.overlays[place]) for place, each in maps],
    }


def _shown_map(run: StoredRun[Attributions], each: AttributionMap, region: Region, drawn: str) -> dict[str, Any]:
    box = concentration(each, run.result.inputs[each.input_index])
    target = each.target
    if each.values.ndim == PICTURE_AXES:
        uri = png_uri(Image.fromarray(tint(each, tinted_region(region))))
    else:
        uri = thumbnail_uri(run.read_picture(drawn), drawn, _DRAWN_SIDE)
    return {
        "label": target.label,
        "layer": each.layer,
        "grid": " × ".join(map(str, each.values.shape)),
        "score": number_text(target.score),
        "probability": "" if target.probability is None else probability_text(target.probability),
        "reading": "probability" if target.reading == "as returned" else target.reading,
        "half": "" if box is None else f"{max(box.share, 0.01):.0%} of what the network sees, {box.words}",
        "uri": uri,
        **legend(colour_scale(each)),
    }
