"""The run directory of `attention`: the overview first, overlays on the photographs, maps, and tables of numbers."""

from pathlib import Path
from typing import Any

from hookscope.render.attention import HEADS, describe_attention
from hookscope.render.map_files import drawn_words, remarks_of, saved_provenance, write_inputs
from hookscope.render.tables import csv_text
from hookscope.results.attention import Attention, AttentionMap
from hookscope.results.runs.directory import SavedRun, new_run
from hookscope.results.runs.record import record_of
from hookscope.results.runs.store import write_result
from hookscope.results.runs.tensors import write_tensors
from hookscope.text import slug

TENSORS = "attention.safetensors"


def save_attention(result: Attention, path: str | Path, *, command: str = "", numbered: bool = False) -> SavedRun:
    """Write a result as `hookscope attention` does: whole or not at all, and over nothing but an earlier run.

    If `numbered`, a number is appended to the path rather than a run of another command replaced.

    Raises:
        UsageError: If there is nothing to save.
        OutputError: If something cannot be written.
    """
    provenance = saved_provenance(result)
    with new_run(Path(path), numbered=numbered) as run:
        pictures, overlays = write_inputs(run.path, result, result.maps, title=_title, describe=describe_attention)
        tables = ["heads.csv"] if result.rows else []
        for name in tables:
            (run.path / name).write_text(csv_text(HEADS, result.rows), encoding="utf-8")
        tables += write_result(run.path, result)
        if result.tensors:
            saved: Any = result.tensors  # `SavedTensors`, which this room does not import
            write_tensors(run.path / TENSORS, saved.spooled, saved.spool)
            tables.append(TENSORS)
        record = record_of("attention", command, provenance, pictures=tuple(pictures), overlays=tuple(overlays))
        folder = run.finish(record)
    remarks = remarks_of(pictures) if overlays else ()
    return SavedRun(folder, (*drawn_words(pictures, overlays), *tables), remarks=remarks)


def _title(each: AttentionMap) -> str:
    """Return what a map's files are named after: "class-token-blocks.11.attn-head-3"."""
    head = [] if each.head is None else [f"head-{each.head}"]
    return "-".join((slug(each.query, 40), slug(each.block, 60), *head))
