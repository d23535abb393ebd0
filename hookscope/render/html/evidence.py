"""The pictures of what failed, as `hookscope check --evidence` left them in a folder, for a page to hold.

The folder may be gone, or no longer what it was: what cannot be shown is counted, and is no error. No file outside the
folder is read, and no link is followed.
"""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from hookscope.errors import InputError
from hookscope.render.check_report import readable
from hookscope.runs.reading import read_inside
from hookscope.runs.serialize import RunRecord, parse_json, record_from_dict
from hookscope.text import counted

_MAX_RECORD_BYTES = 64 * 2**20
_HISTOGRAMS = "plots/histograms.png"


class EvidencePicture(NamedTuple):
    """One picture as the page shows it."""

    layer: str  # whose feature maps it shows; "" for the histograms of all layers
    alternative: str
    uri: str
    width: int
    height: int


class Evidence(NamedTuple):
    """What a folder holds to be shown: grids in execution order, then histograms."""

    pictures: Sequence[EvidencePicture] = ()
    byte_count: int = 0  # of their files together
    remarks: Sequence[str] = ()  # on what is not shown


def read_evidence(folder: Path, room: int) -> Evidence:
    """Read the pictures in `CheckReport.evidence`, up to `room` bytes; what is beyond stays in the folder."""
    try:
        record = _contents(folder)
    except InputError as error:
        return Evidence(remarks=(f"Its pictures are not shown. {error}",))
    names = [readable(grid.label) for grid in record.grids]
    shown = [
        (grid.path, name, f"Feature maps of {name}: {', '.join(grid.caption)}")
        for grid, name in zip(record.grids, names, strict=True)
    ]
    histograms = f"Histograms of the outputs of {', '.join(record.layers)}"
    shown += [(_HISTOGRAMS, "", histograms)] if _HISTOGRAMS in record.files else []
    pictures: list[EvidencePicture] = []
    taken = left_out = unreadable = 0
    for name, layer, alternative in shown:
        try:
            png = read_inside(folder, name, room)
        except InputError:
            unreadable += 1
            continue
        picture = _picture(png, layer, alternative)
        if picture is None:
            unreadable += 1
        elif taken + len(png) > room:
            left_out += 1
        else:
            taken += len(png)
            pictures.append(picture)
    remarks = (
        f"{counted(left_out, 'picture')} did not fit here and are in the folder only." if left_out else "",
        f"{counted(unreadable, 'picture')} of the folder cannot be read any more." if unreadable else "",
    )
    return Evidence(pictures, taken, tuple(filter(None, remarks)))


def _contents(folder: Path) -> RunRecord:
    """Return what `run.json` says; an InputError if it is missing, or not as hookscope writes it."""
    try:
        if folder.is_symlink():
            raise InputError("The folder of the evidence has become a link.")
        document = parse_json(read_inside(folder, "run.json", _MAX_RECORD_BYTES))
        return record_from_dict(document or {})
    except OSError as error:
        raise InputError("The folder of the evidence cannot be read.") from error
    except (ValueError, RecursionError) as error:
        raise InputError("The run.json in the folder of the evidence is damaged.") from error


def _picture(png: bytes, layer: str, alternative: str) -> EvidencePicture | None:
    """Return a picture with what there is to say about it; None if it is damaged."""
    try:
        with Image.open(io.BytesIO(png), formats=["PNG"]) as file:
            size = file.size
            file.verify()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    uri = f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
    return EvidencePicture(layer, alternative, uri, *size)
