"""The behaviour of layers and their channels over a data set."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from hookscope.errors import EXIT_DONE, most_severe
from hookscope.results.accuracy import Accuracy
from hookscope.results.activations import OutputRow, UncalledLayer, Verification
from hookscope.results.cost import ReceptiveField
from hookscope.results.failures import Failures
from hookscope.results.headroom import FLOAT16, Headroom
from hookscope.results.json_form import UNSTORED, in_json
from hookscope.results.network import NetworkResult
from hookscope.results.renderers import rendered
from hookscope.results.table_rows import TableRows
from hookscope.text import counted

Pictures = Callable[[Sequence[str]], Iterator[tuple[str, NDArray[np.uint8]]]]

NONFINITE_OUTPUT = "The network returns NaN or Inf, though none of the layers that were measured does"
"""The beginning of a warning; with it, the summary is no all-clear."""

_RULE_OF_THREE = 3.0  # -ln(0.05), rounded up

# Above this, a channel that is 0 on all inputs may still fire on one input in ten. Ours.
_HIGHEST_DEAD_BOUND = 0.1


@dataclass(frozen=True, slots=True)
class TopInput:
    """An input that excites a channel, with the position.

    Attributes:
        input: Name of the input, as in its record.
        value: The channel's greatest value on it.
        position: Position of `value` in the output, along the axes other than batch and channels; () for a vector,
            and where there are more than three such axes.
    """

    input: str
    value: float
    position: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SurveyChannel:
    """One channel over all inputs.

    A channel fires where it is not zero. Statistics are over the finite values.

    Attributes:
        firing_inputs: Share of inputs on which it fires at any position, 0-1; None if axis 0 of the output does not
            count inputs.
        firing_positions: Share of its values that are not zero, 0-1.
        mean: Arithmetic mean; None without a finite value.
        std: Population standard deviation.
        nonfinite_count: Values that are NaN or Inf.
        best_class: The class with the greatest mean of the channel; "" without classes.
        selectivity: How much of the variance of the channel's mean over positions, between inputs, classes explain
            beyond chance: epsilon squared, at most 1 and about 0 by chance (Kelley, "An unbiased correlation ratio
            measure", PNAS 21, 1935). None without classes, and for a channel that is equal on all inputs.
        duplicate_of: The lower-numbered channel of the same output that correlates most with this channel, by means
            over positions on a sample of the inputs, if the magnitude is 0.99 or more; else None.
        correlation: Correlation with `duplicate_of`, -1 to 1; None without one.
        top: The inputs that excite it most, the greatest first; ties in the order of the inputs' paths.
        halves: The same for two halves of the data: every second input, and the others.
    """

    channel: int
    firing_inputs: float | None
    firing_positions: float
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    nonfinite_count: int = 0
    best_class: str = ""
    selectivity: float | None = None
    duplicate_of: int | None = None
    correlation: float | None = None
    top: tuple[TopInput, ...] = ()
    halves: tuple[tuple[TopInput, ...], tuple[TopInput, ...]] = ((), ())

    @property
    def is_dead(self) -> bool:
        """Whether the channel is exactly zero on every input."""
        return self.firing_positions == 0 and not self.nonfinite_count

    @property
    def max_abs(self) -> float:
        """Largest magnitude; 0 without a finite value."""
        return max(abs(self.min or 0.0), abs(self.max or 0.0))


class Duplicate(NamedTuple):
    """A channel that nearly repeats another one: see `SurveyChannel.duplicate_of`."""

    channel: int
    of: int
    correlation: float


@dataclass(frozen=True, slots=True, eq=False)
class ChannelArrays:
    """The channels of a row as arrays, (C,) each; see `SurveyChannel`.

    Attributes:
        firing_inputs: NaN if it is not known.
        mean: NaN without a finite value, like `std`, `min` and `max`.
        best_class: Number of the class; -1 for none.
        selectivity: NaN for none.
        duplicate_of: -1 for none.
        correlation: NaN for none.
        top_values: The greatest values in each half of the data, (2, C, K), in descending order; -Inf for none.
        top_inputs: Numbers of the inputs, (2, C, K); -1 for none.
        top_positions: Positions in the output, (2, C, K, 3); -1 for axes that it lacks.
    """

    firing_inputs: NDArray[np.float64]
    firing_positions: NDArray[np.float64]
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    min: NDArray[np.float64]
    max: NDArray[np.float64]
    nonfinite_count: NDArray[np.int64]
    best_class: NDArray[np.int64]
    selectivity: NDArray[np.float64]
    duplicate_of: NDArray[np.int64]
    correlation: NDArray[np.float64]
    top_values: NDArray[np.float64]
    top_inputs: NDArray[np.int64]
    top_positions: NDArray[np.int32]

    @property
    def is_dead(self) -> NDArray[np.bool_]:
        """Whether each channel is exactly zero on every input."""
        dead: NDArray[np.bool_] = (self.firing_positions == 0) & (self.nonfinite_count == 0)
        return dead


# Fields that `SurveyChannel` and `ChannelArrays` share.
_NUMBERS = (
    *("firing_inputs", "firing_positions", "mean", "std", "min", "max"),
    *("nonfinite_count", "selectivity", "correlation"),
)


class ChannelPlace(NamedTuple):
    """A position of a channel on an input."""

    input: str
    channel: int
    position: tuple[int, ...]


Box = tuple[int, int, int, int]
"""Top, left, bottom and right, in whole pixels of what the network saw."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Channels(Sequence[SurveyChannel]):
    """The channels of a row; a `SurveyChannel` is made on access, because networks have many.

    Attributes:
        arrays: The numbers of all channels; None for an output without channels.
        names: Names of inputs by their numbers.
        classes: Names of classes by their numbers.
    """

    arrays: ChannelArrays | None = None
    names: Mapping[int, str] = field(default_factory=dict, metadata=UNSTORED)
    classes: Sequence[str] = field(default=(), metadata=UNSTORED)

    def __len__(self) -> int:
        return 0 if self.arrays is None else self.arrays.mean.size

    @overload
    def __getitem__(self, channel: int) -> SurveyChannel: ...

    @overload
    def __getitem__(self, channel: slice) -> list[SurveyChannel]: ...

    def __getitem__(self, channel: int | slice) -> SurveyChannel | list[SurveyChannel]:
        places = range(len(self))[channel]
        return self._made(places) if isinstance(places, int) else [self._made(place) for place in places]

    def _made(self, at: int) -> SurveyChannel:
        arrays = self.arrays
        assert arrays is not None  # noqa: S101 - else there is no channel of this number
        best, twin = int(arrays.best_class[at]), int(arrays.duplicate_of[at])
        numbers: dict[str, Any] = {name: getattr(arrays, name)[at].item() for name in _NUMBERS}
        numbers |= {name: None for name, number in numbers.items() if math.isnan(number)}
        halves = [[*self._top(arrays, half, at)] for half in range(2)]
        ranked = sorted((pair for half in halves for pair in half), key=lambda pair: (-pair[1].value, pair[0]))
        return SurveyChannel(
            channel=at,
            best_class=self.classes[best] if 0 <= best < len(self.classes) else "",
            duplicate_of=twin if twin >= 0 else None,
            top=tuple(top for _, top in ranked[: arrays.top_inputs.shape[2]]),
            halves=(tuple(top for _, top in halves[0]), tuple(top for _, top in halves[1])),
            **numbers,
        )

    def _top(self, arrays: ChannelArrays, half: int, at: int) -> Iterator[tuple[int, TopInput]]:
        columns = (array[half, at].tolist() for array in (arrays.top_values, arrays.top_inputs, arrays.top_positions))
        for value, number, places in zip(*columns, strict=True):
            if number >= 0:
                position = tuple(place for place in places if place >= 0)
                yield number, TopInput(self.names.get(number, f"input {number}"), value, position)


@dataclass(frozen=True, slots=True, repr=False)
class SurveyRow(OutputRow):
    """A row of a survey; its statistics are over all inputs together.

    Attributes:
        duplicates: Labels of the rows that repeat this one.
        source: The line that calls the operation; "" for a module.
        receptive_field: The part of the input that a position of the output depends on; None for operations, and after
            layers that mix all positions.
        channels: One per channel; empty if the output has no axis of channels.
        headroom: How well the values fit into narrower formats.
        massive: Channels with massive activations: a magnitude above 100 and above 1,000 times the median magnitude of
            the output (Sun et al., "Massive Activations in Large Language Models", arXiv 2402.17762, section 2).
    """

    duplicates: tuple[str, ...] = ()
    source: str = ""
    channels: Channels = field(default_factory=Channels, compare=False)
    headroom: tuple[Headroom, ...] = ()
    massive: tuple[int, ...] = ()
    receptive_field: ReceptiveField | None = None

    @property
    @in_json
    def dead_channels(self) -> tuple[int, ...]:
        """Channels that are exactly zero on every input."""
        arrays = self.channels.arrays
        return () if arrays is None else tuple(np.flatnonzero(arrays.is_dead).tolist())

    @property
    @in_json
    def duplicate_channels(self) -> tuple[Duplicate, ...]:
        """Channels that nearly repeat another one."""
        arrays = self.channels.arrays
        if arrays is None:
            return ()
        at = np.flatnonzero(arrays.duplicate_of >= 0)
        return tuple(map(Duplicate, at.tolist(), arrays.duplicate_of[at].tolist(), arrays.correlation[at].tolist()))

    @property
    def float16(self) -> Headroom | None:
        """The headroom in float16; None without a finite value."""
        return next((room for room in self.headroom if room.format == FLOAT16), None)

    @property
    def selectivity(self) -> tuple[float, int] | None:
        """The greatest selectivity of a channel, and its channel; None without classes."""
        arrays = self.channels.arrays
        if arrays is None or np.isnan(arrays.selectivity).all():
            return None
        best = int(np.nanargmax(arrays.selectivity))
        return float(arrays.selectivity[best]), best


Supports = Callable[[SurveyRow, Sequence[ChannelPlace]], Mapping[ChannelPlace, Box]]


@dataclass(frozen=True, slots=True)
class Unusable:
    """An input that was left out, and why.

    Attributes:
        exit_code: Exit code of the error: 3 for a file that cannot be read, 6 if the model raised.
    """

    message: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class CropSheet:
    """A picture of inputs that excite channels of one row: a line of crops for each channel, by half of the data.

    Attributes:
        row: `SurveyRow.index`.
        path: Path inside the run.
        channels: The channels from top to bottom.
        tile: Height and width of a crop, in pixels.
        columns: Crops of each half.
        gap: Pixels between crops; the gap between the halves is four times as wide.
        is_whole: Whether crops are whole pictures, because a receptive field is unknown or covers the picture.
    """

    row: int
    path: str
    channels: tuple[int, ...]
    tile: int
    columns: int
    gap: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class WrongStrip:
    """A picture of an input that is classified wrong, and of its neighbours.

    Attributes:
        index: Position in `Failures.inputs`.
        path: Path inside the run.
    """

    index: int
    path: str


@dataclass(frozen=True, slots=True)
class FeatureFiles:
    """The files that features were written to.

    Attributes:
        files: Files with the features, then the JSON file that lists the inputs.
        shapes: Shape of each tensor, by label.
        pool: How positions were reduced: "avg", "max", "cls" or "none".
        dtype: "float32" or "float16".
    """

    files: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    pool: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Survey(NetworkResult[SurveyRow]):
    """The behaviour of layers and their channels over a data set.

    Attributes:
        input_count: Inputs that were measured.
        rows: One per output, in execution order.
        classes: Inputs of each class, by name; empty without `by_class`.
        accuracy: Accuracy on the inputs; None without classes, or if they are not the network's classes.
        failures: Why inputs are classified wrong; None without an accuracy.
        uncalled: Selected modules that never ran.
        unusable: Inputs that were left out.
        nonfinite_inputs: Names of the inputs that hold NaN or Inf themselves; they were measured.
        tables: Embeddings and codebooks, in the order in which they are used.
        model_digest: Digest of the network's structure, parameters and buffers; "" if it is not known.
        batch_size: Inputs per forward pass.
        chunk_size: Files per chunk.
        chunk_count: Chunks that the data were cut into.
        resumed_count: Chunks that an earlier call had measured.
        features: Files that the features were written to; None if none were requested.
        verification: Whether hooks changed the output of the first batch; None without `verify`.
        names: Names of the inputs in lists, by their numbers.
        pictures: Reads inputs again by name, as the network saw them, (H, W, 3) or (H, W) uint8; leaves out inputs that
            are not pictures or no longer exist. None for a survey that was read from a run directory.
        supports: Finds the pixels that positions of a row depend on, if no closed form exists; None for a survey that
            was read from a run directory.
    """

    input_count: int
    rows: tuple[SurveyRow, ...]
    classes: Mapping[str, int] = field(default_factory=dict)
    accuracy: Accuracy | None = None
    failures: Failures | None = None
    uncalled: tuple[UncalledLayer, ...] = ()
    unusable: tuple[Unusable, ...] = ()
    nonfinite_inputs: tuple[str, ...] = ()
    tables: tuple[TableRows, ...] = ()
    model_digest: str = ""
    batch_size: int = 1
    chunk_size: int = 1
    chunk_count: int = 1
    resumed_count: int = 0
    features: FeatureFiles | None = None
    verification: Verification | None = None
    names: Mapping[int, str] = field(default_factory=dict, repr=False)
    pictures: Pictures | None = field(default=None, repr=False, metadata=UNSTORED)
    supports: Supports | None = field(default=None, repr=False, metadata=UNSTORED)

    def __repr__(self) -> str:
        parts = (counted(len(self.rows), "row"), counted(self.input_count, "input"))
        return f"<Survey of {self.model.name}: {', '.join(parts)}>"

    def save(self, path: str | Path, *, crops: int | None = None) -> Path:
        """Write the run directory, as `RunResult.save`, with crops for `crops` channels of a row; None: 128 in all."""
        return Path(rendered(self, "save", path, crops=crops).folder)

    @property
    @in_json
    def exit_code(self) -> int:
        """The command's exit code: 0, or the most severe code of the inputs that were left out."""
        return most_severe([EXIT_DONE, *(unusable.exit_code for unusable in self.unusable)])

    @property
    @in_json
    def dead_bound(self) -> float:
        """Upper limit (95% confidence) of the share of inputs on which a channel fires if it fired on none of these.

        The rule of three: 1 - 0.05^(1/N) is below 3/N. Source: Hanley and Lippman-Hand, "If nothing goes wrong, is
        everything all right?", JAMA 249 (1983), 1743-1745. The inputs must be drawn at random for it to hold.
        """
        return min(1.0, _RULE_OF_THREE / self.input_count) if self.input_count else 1.0

    @property
    def can_call_dead(self) -> bool:
        """Whether there are enough inputs to call a channel dead."""
        return self.dead_bound <= _HIGHEST_DEAD_BOUND

    @property
    def dead_count(self) -> int:
        """Number of dead channels in all rows."""
        return sum(len(row.dead_channels) for row in self.rows)


def channel_counts(rows: Sequence[SurveyRow]) -> int:
    """Return the number of channels in all rows."""
    return sum(len(row.channels) for row in rows)
