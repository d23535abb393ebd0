"""The run directory of `attribute`: the overview first, overlays on the photographs, the maps themselves.

One photograph is in memory at a time, and two overlays on it.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.errors import UsageError
from hookscope.render.given_maps import draw_given, draw_given_map, given_remark
from hookscope.render.overlays import overlay, shrunk
from hookscope.render.overviews.attributions import draw_overview
from hookscope.results.activations import Activations
from hookscope.results.attention import Attention
from hookscope.results.attributions import PICTURE_AXES, AttributionMap, Attributions
from hookscope.results.inputs import InputRecord, Photograph, Region
from hookscope.results.runs.attributions import SCHEMA_VERSION, StoredPicture, attributions_to_dict
from hookscope.results.runs.directory import OVERVIEW, new_run, written_lines
from hookscope.results.runs.serialize import provenance_to_dict
from hookscope.text import counted, slug, strict_json

_PAGE_SIDE = 1600  # of the photograph that the page shows; sharp on any screen
_AT_ONCE = 2  # overlays in memory: each is as large as the photograph
_WIDE = 1144  # pixels, of drawings of signals and volumes: those of the overview
_NO_PICTURE = 205  # of 255: the ground of maps without a picture


@dataclass(frozen=True, slots=True)
class SavedAttributions:
    """A run directory that was written, with what each file of it shows.

    Attributes:
        pictures: By input.
        files: By map: "values", "pixels" and "overlay", as paths inside the run.
    """

    folder: Path
    pictures: tuple[StoredPicture, ...]
    files: tuple[dict[str, str | None], ...]

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes about maps that are not drawn over their photograph."""
        return tuple(dict.fromkeys(each.remark for each in self.pictures if each.remark))

    @property
    def last_lines(self) -> str:
        """The command's last lines."""
        others = [counted(len(self.pictures) - 1, "more overview")] if len(self.pictures) > 1 else []
        others += [counted(len(self.files), "overlay"), counted(len(self.files), "map"), "attribution.json"]
        return written_lines(self.folder / self.pictures[0].overview, others)


def save_attributions(
    result: Attributions, path: str | Path, *, command: str = "", numbered: bool = False
) -> SavedAttributions:
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
        pictures: list[StoredPicture] = []
        files: dict[int, dict[str, str | None]] = {}
        names = _file_names(result)
        by_input: dict[int, list[int]] = {}
        for place, each in enumerate(result.maps):
            by_input.setdefault(each.input_index, []).append(place)
        (run.path / "maps").mkdir()
        (run.path / "overlays").mkdir()
        (run.path / "inputs").mkdir()
        for index in range(len(result.inputs)):
            photograph = photograph_of(result, index)
            pictures.append(_write_input(run.path, result, index, photograph))
            places = by_input.get(index, [])
            write = partial(_write_map, run.path, photograph, result.given.get(index))
            # NumPy and zlib let go of the interpreter for most of the work.
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                written = pool.map(write, (result.maps[place] for place in places), (names[place] for place in places))
                files |= zip(places, written, strict=True)
        all_files = tuple(files[place] for place in range(len(result.maps)))
        document = attributions_to_dict(result)
        maps = [told | each for told, each in zip(document.pop("maps"), all_files, strict=True)]
        text = strict_json({"schema_version": SCHEMA_VERSION, "method": result.method, "maps": maps})
        (run.path / "attribution.json").write_text(text, encoding="utf-8")
        record: dict[str, Any] = {
            "verb": "attribute",
            "command": command,
            **provenance_to_dict(provenance),
            "pictures": [asdict(each) for each in pictures],
            **provenance.settings,
            **{name: value for name, value in document.items() if name != "schema_version"},
        }
        folder = run.finish(record)
    return SavedAttributions(folder, tuple(pictures), all_files)


def photograph_of(result: Activations | Attributions | Attention, index: int) -> Photograph:
    """Return the photograph under an input's maps; grey where it is not known, a drawing of what is no picture."""
    given = result.given.get(index) if isinstance(result, Attributions) else None
    if given is not None:
        drawn = np.asarray(draw_given(given, _WIDE))
        return Photograph(drawn, Region(0, 0, *drawn.shape[:2], *drawn.shape[:2]), given_remark(given))
    provenance = result.provenance
    if provenance is not None and provenance.photographs is not None:
        return provenance.photographs(result.inputs, index)
    return _nothing(result.inputs[index])


def _nothing(record: InputRecord) -> Photograph:
    height, width = record.shape[-2:] if len(record.shape) > 1 else (1, 1)
    grey = np.full((height, width, 3), _NO_PICTURE, np.uint8)
    return Photograph(grey, Region(0, 0, height, width, height, width), "There is no picture of this input.")


def _file_names(result: Attributions) -> list[str]:
    """Return a name for each map's files: "000-Egyptian-cat-layer4", every one different."""
    digits = max(3, len(str(len(result.inputs) - 1)))
    return distinct_names(
        "-".join(
            (
                f"{each.input_index:0{digits}d}",
                slug(each.target.label, 60),
                *([slug(each.layer, 60)] * bool(each.layer)),
            )
        )
        for each in result.maps
    )


def distinct_names(wanted: Iterable[str]) -> list[str]:
    """Return names for files, a number appended where one is taken, in whatever case."""
    names: list[str] = []
    taken: set[str] = set()
    for each in wanted:
        names.append(next(name for name in _candidates(each) if name.casefold() not in taken))
        taken.add(names[-1].casefold())
    return names


def _candidates(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}-{number}"
        number += 1


def _write_input(folder: Path, result: Attributions, index: int, photograph: Photograph) -> StoredPicture:
    digits = max(3, len(str(len(result.inputs) - 1)))
    overview = f"overview-{index:0{digits}d}.png" if index else OVERVIEW
    draw_overview(result, index, photograph).save(folder / overview, compress_level=6)
    name = write_photograph(folder, f"{index:0{digits}d}", photograph)
    return StoredPicture(name, overview, photograph.region, photograph.remark)


def write_photograph(folder: Path, number: str, photograph: Photograph) -> str:
    """Write a photograph as large as a page shows it; return its path inside the run."""
    height, width = photograph.pixels.shape[:2]
    ratio = min(1.0, _PAGE_SIDE / max(height, width))
    small = shrunk(photograph, max(1, round(height * ratio)), max(1, round(width * ratio)))
    name = f"inputs/{number}.jpg"
    Image.fromarray(small.pixels).save(folder / name, quality=90)
    return name


def _write_map(
    folder: Path, photograph: Photograph, given: NDArray[np.float32] | None, each: AttributionMap, name: str
) -> dict[str, str | None]:
    values, drawn = f"maps/{name}.npy", f"overlays/{name}.png"
    np.save(folder / values, np.ascontiguousarray(each.values, np.float32), allow_pickle=False)
    pixels = None
    if each.pixels is not None:
        pixels = f"maps/{name}-pixels.npy"
        np.save(folder / pixels, np.ascontiguousarray(each.pixels, np.float32), allow_pickle=False)
    if each.values.ndim != PICTURE_AXES:
        draw_given_map(given, each, _WIDE).save(folder / drawn)
        return {"values": values, "pixels": pixels, "overlay": drawn}
    # Level 1: of a photograph higher ones save a few hundredths, and take several times as long.
    Image.fromarray(overlay(photograph, each)).save(folder / drawn, compress_level=1)
    return {"values": values, "pixels": pixels, "overlay": drawn}
