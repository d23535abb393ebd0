"""The run directory of `attention`: the overview first, overlays on the photographs, maps, and tables of numbers."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hookscope.errors import UsageError
from hookscope.render.attention_text import HEADS
from hookscope.render.map_files import write_inputs
from hookscope.render.overlays import overlay
from hookscope.render.overviews.attention import draw_attention
from hookscope.render.tables import csv_text
from hookscope.results.attention import Attention, AttentionMap, PatchWeights
from hookscope.results.inputs import Photograph
from hookscope.results.runs.attention import FILE, SCHEMA_VERSION, attention_to_dict
from hookscope.results.runs.attributions import StoredPicture
from hookscope.results.runs.directory import new_run, written_lines
from hookscope.results.runs.serialize import provenance_to_dict
from hookscope.results.runs.tensors import write_tensors
from hookscope.text import counted, slug, strict_json

TENSORS = "attention.safetensors"


@dataclass(frozen=True, slots=True)
class SavedAttention:
    """A run directory that was written, with what each file of it shows.

    Attributes:
        pictures: By input.
        files: By map: "values" and "overlay", as paths inside the run.
        tables: Names of further files.
    """

    folder: Path
    pictures: tuple[StoredPicture, ...]
    files: tuple[dict[str, str], ...]
    tables: tuple[str, ...]

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes about maps that are not drawn over their photograph."""
        return tuple(dict.fromkeys(each.remark for each in self.pictures if each.remark and self.files))

    @property
    def last_lines(self) -> str:
        """The command's last lines."""
        others = [counted(len(self.pictures) - 1, "more overview")] if len(self.pictures) > 1 else []
        count = len(self.files)
        others += [counted(count, "overlay"), counted(count, "map")] if count else []
        others += self.tables
        return written_lines(self.folder / self.pictures[0].overview, others)


def save_attention(result: Attention, path: str | Path, *, command: str = "", numbered: bool = False) -> SavedAttention:
    """Write a result as `hookscope attention` does: whole or not at all, and over nothing but an earlier run.

    If `numbered`, a number is appended to the path rather than a run of another command replaced.

    Raises:
        UsageError: If there is nothing to save.
        OutputError: If something cannot be written.
    """
    provenance = result.provenance
    if provenance is None or not result.inputs:
        raise UsageError("This run did not finish, so it cannot be saved.")
    with new_run(Path(path), numbered=numbered) as run:
        pictures, files = write_inputs(
            run.path,
            result,
            result.maps,
            title=_title,
            overview=partial(draw_attention, result),
            write_map=partial(_write_map, run.path),
        )
        document = attention_to_dict(result)
        maps = [told | each for told, each in zip(document.pop("maps"), files, strict=True)]
        patches = [_write_patches(run.path, each, number) for number, each in enumerate(result.patches)]
        rows = document.pop("rows")
        stored = {"schema_version": SCHEMA_VERSION, "rows": rows, "maps": maps, "patches": patches}
        texts = {"heads.csv": csv_text(HEADS, result.rows)} if result.rows else {}
        texts[FILE] = strict_json(stored)
        for name, text in texts.items():
            (run.path / name).write_text(text, encoding="utf-8")
        tables = [*texts]
        if result.tensors:
            saved: Any = result.tensors  # `SavedTensors`, which this room does not import
            write_tensors(run.path / TENSORS, saved.spooled, saved.spool)
            tables.append(TENSORS)
        record: dict[str, Any] = {
            "verb": "attention",
            "command": command,
            **provenance_to_dict(provenance),
            "pictures": [asdict(each) for each in pictures],
            **provenance.settings,
            **{name: value for name, value in document.items() if name != "schema_version"},
        }
        folder = run.finish(record)
    return SavedAttention(folder, tuple(pictures), tuple(files), tuple(tables))


def _title(each: AttentionMap) -> str:
    """Return what a map's files are named after: "class-token-blocks.11.attn-head-3"."""
    head = [] if each.head is None else [f"head-{each.head}"]
    return "-".join((slug(each.query, 40), slug(each.block, 60), *head))


def _write_map(folder: Path, photograph: Photograph, each: AttentionMap, name: str) -> dict[str, str]:
    values, drawn = f"maps/{name}.npy", f"overlays/{name}.png"
    np.save(folder / values, np.ascontiguousarray(each.values, "<f4"), allow_pickle=False)
    # Level 1: of a photograph higher ones save a few hundredths, and take several times as long.
    Image.fromarray(overlay(photograph, each)).save(folder / drawn, compress_level=1)
    return {"values": values, "overlay": drawn}


def _write_patches(folder: Path, each: PatchWeights, number: int) -> dict[str, Any]:
    name = f"maps/patches-{number:03d}.npy"
    np.save(folder / name, np.ascontiguousarray(each.values, "<f4"), allow_pickle=False)
    return {
        "input_index": each.input_index,
        "block": each.block,
        "query_grid": list(each.query_grid),
        "extent": list(each.extent),
        "shape": list(each.values.shape),
        "values": name,
    }
