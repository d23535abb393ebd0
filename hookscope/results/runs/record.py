"""`run.json`: how a run was made, and the pictures in its folder. The result is in a separate file."""

import platform
from dataclasses import dataclass, fields
from typing import Any, Literal

from hookscope.results.grids import Grid
from hookscope.results.inputs import Provenance, Region, StoredProvenance
from hookscope.results.json_form import json_form
from hookscope.results.survey import CropSheet, WrongStrip

Verb = Literal["activations", "grads", "attribute", "attention", "check", "diff", "history", "survey"]


@dataclass(frozen=True, slots=True)
class StoredPicture:
    """An input as a picture.

    Attributes:
        photograph: Path inside the run: upright, at most 1,600 pixels a side.
        overview: Path inside the run.
        region: The part of the photograph that the network's input covers, in pixels of its full size.
        remark: Why `photograph` is not the photograph itself; "" if it is.
    """

    photograph: str
    overview: str
    region: Region
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(StoredProvenance):
    """The entries of `run.json`. Pictures are paths inside the run.

    Attributes:
        verb: The command that made the run; `command` is the whole command line.
        overview: The summary picture; "" for none.
        thumbnails: The first inputs as the network saw them; None for inputs without a picture.
        pictures: Photographs and overviews of the inputs, for a run with maps.
        overlays: For each map, a picture of the map over the photograph.
        crops: Sheets of crops that excite channels. `wrong` has strips of inputs that are classified wrong.
        files: All files of the run except this one.
    """

    verb: Verb
    command: str = ""
    platform: str = ""
    overview: str = ""
    grids: tuple[Grid, ...] = ()
    thumbnails: tuple[str | None, ...] = ()
    pictures: tuple[StoredPicture, ...] = ()
    overlays: tuple[str, ...] = ()
    crops: tuple[CropSheet, ...] = ()
    wrong: tuple[WrongStrip, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def edits(self) -> tuple[str, ...]:
        """As given with `--edit`."""
        edits = self.settings.get("edits")
        return tuple(map(str, edits)) if isinstance(edits, list | tuple) else ()


def record_of(verb: Verb, command: str, provenance: Provenance, **pictures: Any) -> dict[str, Any]:
    """Return the record of a run that is about to be written, as JSON."""
    stored = {entry.name: getattr(provenance, entry.name) for entry in fields(StoredProvenance)}
    record = RunRecord(verb=verb, command=command, platform=platform.platform(), **stored, **pictures)
    return {"verb": verb, "command": command, **json_form(record)}
