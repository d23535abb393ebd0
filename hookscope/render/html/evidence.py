"""The pictures of what failed, as `hookscope check --evidence` left them in a folder, for a page to hold.

The folder may be gone, or no longer what it was: what cannot be shown is counted, and is no error. No file outside the
folder is read, and no link is followed.
"""

import base64
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from hookscope.errors import InputError
from hookscope.render.columns import counted
from hookscope.render.tiles import KEY, tiles_from_text
from hookscope.runs.reading import _read_inside as read_inside
from hookscope.text import slug

_MAX_RECORD_BYTES = 64 * 2**20
_PICTURE = re.compile(r"(?P<folder>grids|plots)/(?:\d+-)?(?P<name>[\w.-]+)\.png")


@dataclass(frozen=True, slots=True)
class EvidencePicture:
    """One picture as the page shows it.

    Attributes:
        layer: Label of the layer whose feature maps it shows; "" for the histograms of all layers.
        alternative: What it shows, in words.
        uri: The file, as a data URI.
        width: In pixels.
        height: In pixels.
    """

    layer: str
    alternative: str
    uri: str
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a folder holds to be shown.

    Attributes:
        pictures: Grids in execution order, then histograms.
        byte_count: Of their files together.
        remarks: Sentences on what is not shown.
    """

    pictures: Sequence[EvidencePicture] = ()
    byte_count: int = 0
    remarks: Sequence[str] = ()


def read_evidence(folder: Path, room: int) -> Evidence:
    """Read the pictures of one checkpoint's evidence.

    Args:
        folder: As `CheckReport.evidence` names it.
        room: Bytes that the files may have together; what is beyond stays in the folder.
    """
    try:
        names, layers = _contents(folder)
    except InputError as error:
        return Evidence(remarks=(f"Its pictures are not shown. {error}",))
    pictures: list[EvidencePicture] = []
    taken = left_out = unreadable = 0
    for name in names:
        try:
            png = read_inside(folder, name, room)
        except InputError:
            unreadable += 1
            continue
        picture = _picture(name, png, layers)
        if picture is None:
            unreadable += 1
        elif taken + len(png) > room:
            left_out += 1
        else:
            taken += len(png)
            pictures.append(picture)
    remarks = (
        f"{counted(left_out, 'picture')} found no room here and can be seen in the folder only." if left_out else "",
        f"{counted(unreadable, 'picture')} of the folder cannot be read any more." if unreadable else "",
    )
    return Evidence(pictures, taken, tuple(filter(None, remarks)))


def _contents(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of the pictures that `run.json` lists, and the labels of the layers it is about.

    Raises:
        InputError: If it is missing, or not as hookscope writes it.
    """
    try:
        if folder.is_symlink():
            raise InputError("The folder of the evidence has become a link.")
        record = json.loads(read_inside(folder, "run.json", _MAX_RECORD_BYTES))
        entries = [record["files"], record["layers"]]
    except OSError as error:
        raise InputError("The folder of the evidence cannot be read.") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError("The run.json in the folder of the evidence is damaged.") from error
    if not all(isinstance(entry, list) and all(isinstance(each, str) for each in entry) for entry in entries):
        raise InputError("The run.json in the folder of the evidence is damaged.")
    files, layers = entries
    return [name for name in files if _PICTURE.fullmatch(name)], layers


def _picture(name: str, png: bytes, layers: Sequence[str]) -> EvidencePicture | None:
    """Return a picture with what there is to say about it; None if it is damaged."""
    try:
        with Image.open(io.BytesIO(png), formats=["PNG"]) as file:
            size, said = file.size, file.info.get(KEY, "")
            file.verify()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    found = _PICTURE.fullmatch(name)
    assert found is not None  # noqa: S101 - others were left out
    uri = f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
    if found["folder"] == "plots":
        return EvidencePicture("", f"Histograms of the outputs of {', '.join(layers)}", uri, *size)
    layer = next((label for label in layers if slug(label) == found["name"]), found["name"])
    tiles = tiles_from_text(said)
    about = ", ".join(tiles.caption) if tiles else ""
    return EvidencePicture(layer, ": ".join(filter(None, (f"Feature maps of {layer}", about))), uri, *size)
