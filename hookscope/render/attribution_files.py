"""The run directory of `attribute`: the overview first, overlays on the photographs, the maps themselves."""

from pathlib import Path

from hookscope.render.attributions import describe_attributions
from hookscope.render.map_files import drawn_words, remarks_of, saved_provenance, write_inputs
from hookscope.results.attributions import AttributionMap, Attributions
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
    provenance = saved_provenance(result)
    with new_run(Path(path), numbered=numbered) as run:
        pictures, overlays = write_inputs(run.path, result, result.maps, title=_title, describe=describe_attributions)
        stored = write_result(run.path, result)
        record = record_of("attribute", command, provenance, pictures=tuple(pictures), overlays=tuple(overlays))
        folder = run.finish(record)
    return SavedRun(folder, (*drawn_words(pictures, overlays), *stored), remarks=remarks_of(pictures))


def _title(each: AttributionMap) -> str:
    """Return what a map's files are named after: "Egyptian-cat-layer4"."""
    return "-".join((slug(each.target.label, 60), *([slug(each.layer, 60)] * bool(each.layer))))
