"""The run directory of `attention`: the overview first, overlays on the photographs, maps, and tables of numbers."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hookscope.errors import UsageError
from hookscope.render.attribution_files import distinct_names, photograph_of, write_photograph
from hookscope.render.overlays import overlay
from hookscope.render.overviews.attention import draw_attention
from hookscope.render.tables import heads_to_csv
from hookscope.results.attention import Attention, AttentionMap, PatchWeights
from hookscope.results.inputs import Photograph
from hookscope.results.runs.attention import SCHEMA_VERSION, attention_to_dict
from hookscope.results.runs.attributions import StoredPicture
from hookscope.results.runs.directory import OVERVIEW, new_run, written_lines
from hookscope.results.runs.serialize import provenance_to_dict
from hookscope.results.runs.tensors import write_tensors
from hookscope.text import counted, slug, strict_json

TENSORS = "attention.safetensors"
_AT_ONCE = 2  # overlays in memory: each is as large as the photograph


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
        for part in ("maps", "overlays", "inputs"):
            (run.path / part).mkdir()
        names = _file_names(result)
        pictures: list[StoredPicture] = []
        files: dict[int, dict[str, str]] = {}
        for index in range(len(result.inputs)):
            photograph = photograph_of(result, index)
            pictures.append(_write_input(run.path, result, index, photograph))
            places = [place for place, each in enumerate(result.maps) if each.input_index == index]
            write = partial(_write_map, run.path, photograph)
            # NumPy and zlib let go of the interpreter for most of the work.
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                written = pool.map(write, (result.maps[place] for place in places), (names[place] for place in places))
                files |= zip(places, written, strict=True)
        document = attention_to_dict(result)
        maps = [each | files[place] for place, each in enumerate(document.pop("maps"))]
        patches = [_write_patches(run.path, each, number) for number, each in enumerate(result.patches)]
        rows = document.pop("rows")
        stored = {"schema_version": SCHEMA_VERSION, "rows": rows, "maps": maps, "patches": patches}
        texts = {"heads.csv": heads_to_csv(result)} if result.rows else {}
        texts["attention.json"] = strict_json(stored)
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
    return SavedAttention(folder, tuple(pictures), tuple(files[place] for place in range(len(files))), tuple(tables))


def _file_names(result: Attention) -> list[str]:
    digits = max(3, len(str(len(result.inputs) - 1)))
    return distinct_names(
        "-".join(
            (
                f"{each.input_index:0{digits}d}",
                slug(each.query, 40),
                slug(each.block, 60),
                *([f"head-{each.head}"] if each.head is not None else []),
            )
        )
        for each in result.maps
    )


def _write_input(folder: Path, result: Attention, index: int, photograph: Photograph) -> StoredPicture:
    digits = max(3, len(str(len(result.inputs) - 1)))
    overview = f"overview-{index:0{digits}d}.png" if index else OVERVIEW
    draw_attention(result, index, photograph).save(folder / overview, compress_level=6)
    name = write_photograph(folder, f"{index:0{digits}d}", photograph)
    return StoredPicture(name, overview, photograph.region, photograph.remark)


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
