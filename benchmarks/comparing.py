"""Check that ways do the same work, then time them: what the sections with ratios share."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from benchmarks.findings import Measurement, Work
from benchmarks.networks import CASES, Row, label, seeded, statistics_of
from benchmarks.same_work import TOLERANCES, Found, Rows, failed, judge, told
from benchmarks.timing import CLOCKS, Run, interleaved, spread

UNCHECKED = "hookscope, without the self-check"
# Medians of fewer turns still differ by several hundredths from one measurement to the next.
_ROUNDS = {"resnet34": 24, "vit_b_16": 10}
_OTHER_ROUNDS = 16


@dataclass(frozen=True)
class Ready:
    """A way that has been prepared and judged.

    Attributes:
        work: Whether it does the same; None for the yardstick.
        run: Runs it once; None if it does not run.
        rounds: How often it is timed.
    """

    work: Work | None
    run: Run | None
    rounds: int


def ready(rounds: int, prepare: Callable[[], tuple[Run, Work | None]]) -> Ready:
    """Prepare and judge a way; what it raises becomes the reason why it does not run."""
    try:
        run, work = prepare()
    except Exception as error:  # noqa: BLE001 - a peer may raise anything
        return Ready(failed(error), None, 0)
    return Ready(work, run, rounds)


def over_first(
    subject: str, ways: Mapping[str, Ready], seconds: Mapping[str, list[float]], limits: Mapping[str, float]
) -> list[Measurement]:
    """Turn seconds into ratios over those of the first way; limits are by way, for those that have one."""
    spreads = {name: spread(actual, "ms", 1e3) for name, actual in seconds.items()}
    base = spreads[next(iter(ways))].median
    actual = []
    for name, way in ways.items():
        times = spreads.get(name)
        figure = times.median / base if times else None
        actual.append(Measurement(subject, name, figure, "×", times, way.work, limits.get(name)))
    return actual


def timeable(ways: Mapping[str, Ready]) -> tuple[dict[str, Run], dict[str, int]]:
    """Return what `interleaved` times: runs and rounds of the ways that run."""
    runs = {name: way.run for name, way in ways.items() if way.run is not None}
    return runs, {name: ways[name].rounds for name in runs}


@dataclass(frozen=True)
class Way:
    """One way to see what every layer of a network returns, or the gradients of that.

    Attributes:
        prepare: Given a network of its own, a batch and the rows to find, returns what runs once. What a tool can
            prepare once, it prepares here, untimed.
        rounds: How often it is timed; 0: as often as the plain pass.
        shapes_only: It finds shapes, no values.
        around: Entered before it is prepared or run, and left afterwards, untimed: for what it changes in the process.
    """

    prepare: Callable[[nn.Module, Tensor, Sequence[Row]], Callable[[], Found]]
    rounds: int = 3
    shapes_only: bool = False
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def judged(
        self, model: nn.Module, batch: Tensor, rows: Sequence[Row], expected: Rows, tolerance: float
    ) -> tuple[Run, Work]:
        """Prepare it, run it once, and compare what it finds with what is expected."""
        with self.around():
            run = self.prepare(model, batch, rows)
            return run, judge(run(), expected, shapes_only=self.shapes_only, tolerance=tolerance)


@dataclass(frozen=True)
class Layerwise:
    """What is done to a network layer by layer.

    Attributes:
        plain: The same passes and nothing else.
        rows: The rows that hookscope's public function finds.
        ways: By name; those of hookscope begin with "hookscope" and are compared with `by_hand`, the others with them.
        by_hand: The name of the way that is written by hand.
        limits: Of `UNCHECKED` with one picture on the CPU, by network.
    """

    plain: Callable[[nn.Module, Tensor], object]
    rows: Callable[[nn.Module, Tensor], Sequence[Row]]
    ways: Mapping[str, Way]
    by_hand: str
    limits: Mapping[str, float]

    def expected(self, name: str, model: nn.Module, batch: Tensor, rows: Sequence[Row]) -> Rows:
        """Return what a way should find."""
        if self.ways[name].shapes_only:
            return {label(row): row.statistics.shape for row in rows}
        if name.startswith("hookscope"):
            return told(self.ways[self.by_hand].prepare(model, batch, rows)())
        return statistics_of(rows)

    def measure(self, device: str) -> tuple[Measurement, ...]:
        """Time all ways on all networks; values found on CUDA are compared with those found on the CPU."""
        return tuple(row for case in CASES for row in self._measure_case(*case, device))

    def _measure_case(self, network: str, count: int, device: str) -> list[Measurement]:
        model, batch = seeded(network, device, count)
        on_cpu = seeded(network, count=count)
        rows = self.rows(*on_cpu)
        turns = _ROUNDS.get(network, _OTHER_ROUNDS)
        # On a network of its own, as each way has one: what ran last finds its weights in the cache.
        ways = {"plain": Ready(None, partial(self.plain, deepcopy(model), batch), turns)}
        for name, way in self.ways.items():
            expected = self.expected(name, *on_cpu, rows)
            prepare = partial(way.judged, deepcopy(model), batch, rows, expected, TOLERANCES[device])
            ways[name] = ready(way.rounds or turns, prepare)
        around = {name: way.around for name, way in self.ways.items()}
        settle = partial(self.plain, model, batch)
        seconds = interleaved(*timeable(ways), CLOCKS[device], settle, warm=True, around=around)
        subject = network if count == 1 else f"{network}, {count} pictures"
        limits = {UNCHECKED: self.limits[network]} if count == 1 and device == "cpu" else {}
        return over_first(subject, ways, seconds, limits)
