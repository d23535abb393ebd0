"""Count the inputs that are classified right, and find how the most confident wrong inputs differ from them."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hookscope.commands.check.measuring.labelled_pictures import LabelCounts, classes_of
from hookscope.commands.survey.judged_inputs import GRID, LOOKS, JudgedInputs
from hookscope.commands.survey.measure_chunk import MeasuredInput
from hookscope.results.accuracy import Accuracy, WrongPicture
from hookscope.results.failures import DEPARTURE_RATE, OutsideKind, OutsideRange

MOST_WRONG = 8
"""Wrong inputs that are explained: as many as a reader looks through."""

MOST_MEMBERS = 64
"""Inputs of a class, at most, that go through the network again."""

# The kinds below and above the range of each of `LOOKS`.
_KINDS: tuple[tuple[OutsideKind, OutsideKind], ...] = (("dark", "bright"), ("flat", "harsh"), ("narrow", "wide"))
_ORDER: tuple[OutsideKind, ...] = ("inverted", *(kind for pair in _KINDS for kind in pair), "other layout")
_WAYS_OUT = 2 * len(_KINDS) + 1

# Means of one value over areas of different sizes differ by less than this share in float32.
_ROUNDING = 1e-5


@dataclass(frozen=True, slots=True)
class WrongInput:
    """A wrong input, with its number among all inputs."""

    number: int
    measured: MeasuredInput
    label: int
    name: str
    taken_for: int
    probabilities: tuple[float, float]
    looks: NDArray[np.float64]
    layout: NDArray[np.float32]

    @property
    def surety(self) -> float:
        """Probability of the wrong class minus the right class's; 2, the greatest, for scores with NaN or Inf."""
        gap = self.probabilities[0] - self.probabilities[1]
        return 2.0 if math.isnan(gap) else gap


@dataclass(slots=True)
class Spread:
    """Names of inputs of a class, evenly spread over all so far: fewer than twice `MOST_MEMBERS`."""

    step: int = 1
    seen: int = 0
    names: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        """Add the next input."""
        if self.seen % self.step == 0:
            self.names.append(name)
        self.seen += 1
        if len(self.names) == 2 * MOST_MEMBERS:
            self.names, self.step = self.names[::2], 2 * self.step


@dataclass(slots=True)
class ClassifiedInputs:
    """Inputs of all chunks so far, in their order.

    Attributes:
        labels: Names of the classes of the data by their numbers.
        source: The folder or file with the classes.
        class_count: Classes of the network; `mapping` says how labels became these, in a sentence.
        right_count: Pictures that are classified right; `layout_sum` adds up their layouts.
    """

    labels: Sequence[str]
    source: str
    class_count: int
    mapping: str
    counts: LabelCounts
    worst: list[WrongInput] = field(default_factory=list)
    members: defaultdict[int, Spread] = field(default_factory=lambda: defaultdict(Spread))
    right_count: int = 0
    layout_sum: NDArray[np.float64] = field(default_factory=lambda: np.zeros(GRID * GRID))
    low: NDArray[np.float64] = field(default_factory=lambda: np.full(len(LOOKS), np.nan))
    high: NDArray[np.float64] = field(default_factory=lambda: np.full(len(LOOKS), np.nan))

    @classmethod
    def empty(
        cls, labels: Sequence[str], categories: Sequence[str], source: str, judged: JudgedInputs
    ) -> "ClassifiedInputs":
        """Return no inputs yet, for the network of `judged`; `categories` are names of its classes, if they fit."""
        count = judged.class_count
        names = categories if len(categories) == count else ()
        classes, _ = classes_of(labels, names, count, in_folders=True)
        return cls(labels, source, count, judged.mapping, LabelCounts(classes, names))

    def add(self, inputs: Sequence[MeasuredInput], judged: JudgedInputs, offset: int) -> None:
        """Add the inputs of the next chunk; its first input has the number `offset`."""
        for place, sample in enumerate(inputs):
            label, best = sample.label, int(judged.taken_for[place])
            assert label is not None  # noqa: S101 - judged inputs have one
            is_right = bool(judged.is_right[place])
            self.counts.add([self.labels[label]], [] if is_right else [self.labels[label]], [] if is_right else [best])
            if is_right:
                self.members[label].add(sample.name_in(offset))
                continue
            high, low = judged.probabilities[place].tolist()
            looks, layout = judged.looks[place], judged.layouts[place]
            number, name = offset + sample.number, sample.name_in(offset)
            self.worst.append(WrongInput(number, sample, label, name, best, (high, low), looks, layout))
        self.worst = sorted(self.worst, key=lambda wrong: (-wrong.surety, wrong.number))[:MOST_WRONG]
        of_right = judged.is_right & ~np.isnan(judged.layouts).any(1)
        looks = judged.looks[of_right]
        self.low, self.high = np.fmin.reduce([self.low, *looks]), np.fmax.reduce([self.high, *looks])
        self.layout_sum = self.layout_sum + judged.layouts[of_right].astype(np.float64).sum(0)
        self.right_count += int(of_right.sum())

    @property
    def range_rate(self) -> float:
        """See `Failures.range_rate`: each of n + 1 similar inputs is as likely to be the least, or the greatest."""
        return min(1.0, _WAYS_OUT / (self.right_count + 1))

    @property
    def knows_ranges(self) -> bool:
        """Whether enough inputs are right for their range to mean something."""
        return self.range_rate <= DEPARTURE_RATE

    def outside(self, chunks: Iterable[JudgedInputs]) -> list[tuple[OutsideRange, ...]]:
        """Return where each input of `worst` lies outside the range of right inputs; `chunks` has every chunk again."""
        if not self.knows_ranges:
            return [() for _ in self.worst]
        mean = self.layout_sum / self.right_count
        least, most = math.inf, -math.inf
        for judged in chunks:
            of_right = correlations(judged.layouts[judged.is_right], mean)
            finite = of_right[~np.isnan(of_right)]
            least, most = float(finite.min(initial=least)), float(finite.max(initial=most))
        ways = [[*self._of_layout(wrong, mean, least, most), *self._of_looks(wrong)] for wrong in self.worst]
        return [tuple(sorted(outs, key=lambda out: _ORDER.index(out.kind))) for outs in ways]

    def _of_looks(self, wrong: WrongInput) -> Iterator[OutsideRange]:
        ranges = zip(_KINDS, wrong.looks.tolist(), self.low.tolist(), self.high.tolist(), strict=True)
        for (below, above), value, low, high in ranges:
            if value < low or value > high:
                yield OutsideRange(below if value < low else above, value, low, high)

    def _of_layout(
        self, wrong: WrongInput, mean: NDArray[np.float64], least: float, most: float
    ) -> Iterator[OutsideRange]:
        """Yield the layout's correlation if it is below the range by more than the range's width."""
        value = float(correlations(wrong.layout[None], mean)[0])
        if value < least - (most - least):
            yield OutsideRange("inverted" if least <= -value <= most else "other layout", value, least, most)

    def labels_at(self) -> Mapping[int, int]:
        """Return the number of the label that stands for each class of the network."""
        return {index: self.labels.index(labels[-1]) for index, labels in self.counts.labels_at.items()}

    def accuracy(self) -> Accuracy:
        """Return how many are right, of all and by class."""
        classes = tuple(self.counts.accuracy(label) for label in self.labels if label in self.counts.seen)
        worst = tuple(
            WrongPicture(
                wrong.name, wrong.measured.sha256, self.labels[wrong.label], self.counts.name(wrong.taken_for),
                *(None if math.isnan(share) else share for share in wrong.probabilities),
            )
            for wrong in self.worst
        )  # fmt: skip
        total, right = sum(entry.count for entry in classes), sum(entry.right for entry in classes)
        return Accuracy(self.source, self.mapping, self.class_count, total, right, classes, worst)


def correlations(layouts: NDArray[np.float32], mean: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the correlation of each layout, (N, P), with the mean layout; NaN for a constant layout."""
    (apart, own), (centred, whole) = _centred(layouts.astype(np.float64)), _centred(mean[None])
    lengths = own * whole
    cosines = np.full(len(apart), np.nan)
    np.divide(apart @ centred[0], lengths, out=cosines, where=lengths > 0)
    return cosines


def _centred(layouts: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return layouts less their means, and the lengths of these: 0 for a layout that is constant up to rounding."""
    apart = layouts - layouts.mean(1, keepdims=True)
    lengths = np.linalg.norm(apart, axis=1)
    return apart, np.where(lengths > _ROUNDING * np.linalg.norm(layouts, axis=1), lengths, 0.0)
