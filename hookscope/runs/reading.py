"""Read a run directory back. It may come from a stranger: nothing in it is believed before it is checked.

No file outside the folder is read, whatever `run.json` names; links are not followed.
"""

import json
import math
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, NonNegativeInt, ValidationError

from hookscope.errors import InputError
from hookscope.results.gradients import parameter_owner
from hookscope.results.labels import row_label
from hookscope.text import printable, safe_text

READABLE_VERSION = 1

# Larger files are none of ours. Our choice: JSON of a hundred thousand rows, and a grid of 64 million pixels.
_MAX_JSON_BYTES = 256 * 2**20
_MAX_PICTURE_BYTES = 128 * 2**20

_AGAIN = "Run the command that made it again."


def _number(value: Any) -> Any:
    """Read a number; JSON has none that is not finite, but Python's reader accepts three and overflows to two."""
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return value


Number = Annotated[float | None, BeforeValidator(_number)]
Count = Annotated[int | None, BeforeValidator(_number)]
Model = TypeVar("Model", bound="_Stored")


class _Stored(BaseModel):
    """What is read: unknown entries are left out, types are not converted into each other."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class StoredHistogram(_Stored):
    """See `hookscope.render.histograms.Histogram`."""

    low: float
    high: float
    counts: list[NonNegativeInt]
    below: NonNegativeInt
    above: NonNegativeInt


class StoredStatistics(_Stored):
    """See `TensorStatistics`; quantiles by name: "q05".

    `sample_count` is in runs of earlier versions alone: how many of the values quantiles and histogram are of.
    """

    shape: list[NonNegativeInt]
    dtype: str
    element_count: NonNegativeInt
    mean: Number = None
    std: Number = None
    min: Number = None
    max: Number = None
    mean_abs: Number = None
    l2: Number = None
    zero_fraction: Number = None
    nan_count: Count = None
    inf_count: Count = None
    channel_axis: Count = None
    channel_count: Count = None
    dead_channel_count: Count = None
    dead_channel_fraction: Number = None
    quantiles: dict[str, Number] | None = None
    sample_count: Count = None
    unmeasured: str | None = None
    histogram: StoredHistogram | None = None


class _Place(_Stored):
    index: NonNegativeInt
    layer: str
    kind: str
    call: NonNegativeInt
    slot: str
    aliases: list[str] = []
    also: list[str] = []

    @property
    def label(self) -> str:
        """Name for people: "layer1.0.relu#1", "(model)"."""
        return row_label(self.layer, self.call, self.slot)


class StoredRow(_Place):
    """See `LayerRow`."""

    parameter_count: NonNegativeInt
    activation: StoredStatistics
    flags: list[str] = []


class StoredGradient(_Place):
    """See `GradientRow`."""

    role: str
    status: str
    gradient: StoredStatistics
    remark: str = ""


class StoredParameter(_Stored):
    """See `ParameterRow`."""

    index: NonNegativeInt
    name: str
    kind: str
    trainable: bool
    status: str
    gradient: StoredStatistics
    weight_l2: Number = None
    ratio: Number = None
    aliases: list[str] = []

    @property
    def owner(self) -> str:
        """Dotted name of the module that it belongs to."""
        return parameter_owner(self.name, self.kind)

    @property
    def own_name(self) -> str:
        """Its name inside that module: "weight"."""
        return self.name.removeprefix(f"{self.owner}.")


class StoredUncalled(_Stored):
    """See `UncalledLayer`."""

    layer: str
    kind: str
    parameter_count: NonNegativeInt
    reason: str


class StoredModel(_Stored):
    """See `ModelInfo`."""

    name: str
    kind: str
    weights: str
    random: bool
    sha256: str | None = None
    parameter_count: NonNegativeInt
    arguments: dict[str, Any] = {}


class StoredInput(_Stored):
    """See `InputRecord`."""

    name: str
    sha256: str | None = None
    size: list[NonNegativeInt] | None = None
    shape: list[NonNegativeInt]
    steps: list[str] = []


class StoredClass(_Stored):
    """One class of a prediction."""

    index: int
    name: str | None = None
    probability: Number = None


class StoredPrediction(_Stored):
    """See `Prediction`."""

    input_index: NonNegativeInt
    classes: list[StoredClass]


class StoredVerdict(_Stored):
    """See `Finding`."""

    rule: str
    level: str
    where: str
    message: str


class StoredLoss(_Stored):
    """See `LossRecord`; a value that is not finite is text."""

    name: str
    target: str
    value: float | str | None
    outputs: list[str] = []


class StoredVerification(_Stored):
    """See `Verification`."""

    status: str
    difference: str = ""
    layer: str = ""


class StoredRecord(_Stored):
    """`run.json`."""

    verb: str
    command: str = ""
    versions: dict[str, str] = {}
    platform: str = ""
    threads: Count = None
    patterns: list[str] = []
    unusable_inputs: list[str] = []
    grids: list[str] = []
    thumbnails: list[str | None] = []
    model: StoredModel
    inputs: list[StoredInput]
    seed: int = 0
    device: str
    dtype: str
    timings: dict[str, Number] = {}
    verification: StoredVerification | None = None
    warnings: list[str] = []
    notes: list[str] = []
    predictions: list[StoredPrediction] = []
    mode: str = ""
    loss: StoredLoss | None = None
    verdicts: list[StoredVerdict] = []
    edits: list[str] = []


class _Layers(_Stored):
    rows: list[StoredRow]
    uncalled: list[StoredUncalled] = []


class _Gradients(_Stored):
    gradients: list[StoredGradient] = []
    parameters: list[StoredParameter] = []


@dataclass(frozen=True, slots=True)
class StoredGrid:
    """One grid of feature maps.

    Attributes:
        path: Inside the run.
        row: `index` of the row that it shows: an activation's, or a gradient's in a run of `grads`.
        input_index: Position in the inputs.
    """

    path: str
    row: int
    input_index: int


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run as it lies on the disk.

    Attributes:
        folder: Where.
        record: `run.json`.
        rows: Activations, in execution order.
        uncalled: Selected modules that never ran.
        gradients: Of outputs and inputs; empty for a run without a backward pass.
        parameters: Likewise.
        grids: In the order of `run.json`.
    """

    folder: Path
    record: StoredRecord
    rows: tuple[StoredRow, ...]
    uncalled: tuple[StoredUncalled, ...]
    gradients: tuple[StoredGradient, ...]
    parameters: tuple[StoredParameter, ...]
    grids: tuple[StoredGrid, ...]

    def read_picture(self, path: str) -> bytes:
        """Return the bytes of a picture that `run.json` names.

        Raises:
            InputError: If it is missing, not a plain file inside the run's folder, or too large.
        """
        return _read_inside(self.folder, path, _MAX_PICTURE_BYTES)


def read_run(folder: Path) -> StoredRun:
    """Read what `hookscope activations` or `hookscope grads` wrote.

    Args:
        folder: The run directory.

    Raises:
        InputError: If it is no run, was cut short, is of another version, or does not hold what it says.
    """
    if not folder.is_dir():
        what = "it is not a folder" if os.path.lexists(folder) else "there is no such folder"
        raise InputError(_refusal(folder, what, "Give the folder of a run."))
    if not os.path.lexists(folder / "run.json"):
        what = "without run.json it is no hookscope run, or one that was cut short"
        raise InputError(_refusal(folder, what, "Give the folder of a finished run."))
    document = _read_json(folder, "run.json")
    if document.get("tool") != "hookscope":
        raise InputError(_refusal(folder, "its run.json is not hookscope's", "Give the folder of a run."))
    if document.get("verb") == "check":
        remedy = "`hookscope check CHECKPOINT --report FILE` makes the page of a check."
        raise InputError(_refusal(folder, "it is the evidence of a check, not a run", remedy))
    record = _checked(StoredRecord, folder, "run.json", document)
    layers = _checked(_Layers, folder, "layers.json", _read_json(folder, "layers.json"))
    backward = record.verb == "grads"
    gradients = _checked(_Gradients, folder, "gradients.json", _read_json(folder, "gradients.json") if backward else {})
    return StoredRun(
        folder,
        record,
        tuple(layers.rows),
        tuple(layers.uncalled),
        tuple(gradients.gradients),
        tuple(gradients.parameters),
        tuple(_grid(folder, path, len(record.inputs)) for path in record.grids),
    )


def _grid(folder: Path, path: str, input_count: int) -> StoredGrid:
    """Read what `hookscope.render.grids.grid_name` says in a file's name."""
    several = r"-input(?P<input>\d{1,9})" if input_count > 1 else ""
    found = re.fullmatch(rf"(?P<row>\d{{1,9}})-.*{several}\.png", PurePosixPath(path).name, re.DOTALL)
    if found is None:
        raise InputError(_refusal(folder, f"its run.json names '{printable(path)}', which is no grid", _AGAIN))
    return StoredGrid(path, int(found["row"]), int(found["input"]) if several else 0)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        document = json.loads(_read_inside(folder, name, _MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise InputError(_refusal(folder, f"its {name} is cut short or damaged", _AGAIN)) from error
    if not isinstance(document, dict):
        raise InputError(_refusal(folder, f"its {name} is not hookscope's", _AGAIN))
    version = document.get("schema_version")
    if version != READABLE_VERSION or isinstance(version, bool):
        what = f"its {name} has schema version {printable(json.dumps(version), 20)}, and this hookscope reads 1"
        raise InputError(_refusal(folder, what, "Make the run and its report with the same hookscope."))
    return document


def _checked(model: type[Model], folder: Path, name: str, document: dict[str, Any]) -> Model:
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = printable(".".join(map(str, first["loc"])), 80)
        what = f"its {name} is not as hookscope writes it: {place}: {printable(first['msg'], 100)}"
        raise InputError(_refusal(folder, what, _AGAIN)) from error


def _read_inside(folder: Path, name: str, limit: int) -> bytes:
    """Return the contents of a plain file inside `folder`."""
    shown = f"its file '{printable(name)}'"
    parts = PurePosixPath(name).parts
    if "\0" in name or "\\" in name or not parts or PurePosixPath(name).is_absolute() or ".." in parts:
        raise InputError(_refusal(folder, f"{shown} is not inside the folder", _AGAIN))
    try:
        inside = folder.resolve()
        if (inside / name).resolve() != inside / name:
            raise InputError(_refusal(folder, f"{shown} is a link, or behind one", _AGAIN))
        with os.fdopen(_open_plain(inside / name), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
                raise InputError(_refusal(folder, f"{shown} is no plain file, or too large", _AGAIN))
            return file.read(limit)
    except FileNotFoundError as error:
        raise InputError(_refusal(folder, f"{shown} is missing", _AGAIN)) from error
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "no file can have such a name"
        raise InputError(_refusal(folder, f"{shown}: {safe_text(reason.lower())}", _AGAIN)) from error


def _open_plain(path: Path) -> int:
    # Neither through a link that came meanwhile, nor waiting for somebody to write into a pipe.
    return os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _refusal(folder: Path, what: str, remedy: str) -> str:
    return f"Cannot read the run '{safe_text(str(folder))}': {what}. {remedy}"
