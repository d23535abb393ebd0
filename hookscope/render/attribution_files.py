"""The run directory of `attribute`: the overview first, overlays on the photographs, the maps themselves."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.errors import UsageError
from hookscope.render.attributions import describe_attributions
from hookscope.render.given_maps import draw_given_map
from hookscope.render.map_files import WIDE, drawn_words, remarks_of, write_inputs
from hookscope.render.overlays import overlay
from hookscope.render.overviews.document import draw_document
from hookscope.results.attributions import AttributionMap, Attributions
from hookscope.results.inputs import PICTURE_AXES, Photograph
from hookscope.results.runs.directory import SavedRun, new_run
from hookscope.results.runs.record import record_of
from hookscope.results.runs.store import write_result
from hookscope.text import slug


def save_attributions(result: Attributions, path: str | Path, *, command: str = "", numbered: bool = False) -> SavedRun:
    """Write a result as `hookscope attribute` does: whole or not at all, and over nothing but an earlier run.

    If `numbered`, a number is appended to the path rather than a run of another command replaced.

    Raises:
        UsageError: If there is nothing to save.
        OutputError: If something cannot be written.
    """
    provenance = result.provenance
    if provenance is None or not result.inputs:
        raise UsageError("This run did not finish, so it cannot be saved.")
    with new_run(Path(path), numbered=numbered) as run:
        pictures, overlays = write_inputs(
            run.path,
            result,
            result.maps,
            title=_title,
            overview=lambda index, photograph: draw_document(describe_attributions(result, index, photograph)),
            write_map=partial(_write_map, run.path, result.given),
        )
        stored = write_result(run.path, result)
        record = record_of("attribute", command, provenance, pictures=tuple(pictures), overlays=tuple(overlays))
        folder = run.finish(record)
    return SavedRun(folder, (*drawn_words(pictures, overlays), *stored), remarks=remarks_of(pictures))


def _title(each: AttributionMap) -> str:
    """Return what a map's files are named after: "Egyptian-cat-layer4"."""
    return "-".join((slug(each.target.label, 60), *([slug(each.layer, 60)] * bool(each.layer))))


def _write_map(
    folder: Path,
    given: Mapping[int, NDArray[np.float32]],
    photograph: Photograph,
    each: AttributionMap,
    name: str,
) -> str:
    drawn = f"overlays/{name}.png"
    if each.values.ndim != PICTURE_AXES:
        draw_given_map(given.get(each.input_index), each, WIDE).save(folder / drawn)
        return drawn
    # Level 1: of a photograph higher ones save a few hundredths, and take several times as long.
    Image.fromarray(overlay(photograph, each)).save(folder / drawn, compress_level=1)
    return drawn
