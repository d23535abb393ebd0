"""`run.json`: how a run was made, and which pictures its folder holds. The result is in a file of its own."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hookscope.results.grids import Grid
from hookscope.results.inputs import Preprocessing, Provenance, Region
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
        remark: Why it is not the photograph itself, or "".
    """

    photograph: str
    overview: str
    region: Region
    remark: str = ""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The entries of `run.json`. Pictures are paths inside the run.

    Attributes:
        verb: The command that made the run, `command` as it was given.
        threads: torch's.
        patterns: As given with `--layer`.
        preprocessing: How files became inputs; None where no file did.
        named_inputs: The value, or the record of the file, of each input that was given by name.
        unusable_inputs: A sentence for each.
        settings: Further options of the command, by name: "edits", "limits", "autocast".
        overview: The picture to look at first; "" for none.
        thumbnails: What the network saw of the first inputs; None for those without a picture.
        pictures: Photographs and overviews of the inputs, of a run with maps.
        overlays: For each map, the picture of it over the photograph.
        crops: What excites channels; `wrong` what is classified wrong.
        files: All files of the run but this one.
    """

    verb: Verb
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    platform: str = ""
    threads: int | None = None
    patterns: tuple[str, ...] = ()
    preprocessing: Preprocessing | None = None
    named_inputs: Mapping[str, Any] = field(default_factory=dict)
    unusable_inputs: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
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
    record = RunRecord(
        verb,
        command,
        versions=provenance.versions,
        platform=platform.platform(),
        threads=provenance.threads,
        patterns=provenance.patterns,
        preprocessing=provenance.preprocessing,
        named_inputs=provenance.named_inputs,
        unusable_inputs=provenance.unusable_inputs,
        settings=provenance.settings,
        **pictures,
    )
    return dict(json_form(record))
