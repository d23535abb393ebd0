"""Check that ways do the same work, then time them: what the sections with ratios share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.findings import Measurement, Work
from benchmarks.same_work import failed
from benchmarks.timing import Run, spread

Budget = tuple[float, float | None]
"""At most, and the next aim."""


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


def ready(rounds: int, prepare: Callable[[], tuple[Run, Work]]) -> Ready:
    """Prepare and judge a way; what it raises becomes the reason why it does not run."""
    try:
        run, work = prepare()
    except Exception as error:  # noqa: BLE001 - a peer may raise anything
        return Ready(failed(error), None, 0)
    return Ready(work, run, rounds)


def over_first(
    subject: str, ways: Mapping[str, Ready], seconds: Mapping[str, list[float]], budgets: Mapping[str, Budget]
) -> list[Measurement]:
    """Turn seconds into ratios over those of the first way; budgets are by way, for those that have one."""
    spreads = {name: spread(found, "ms", 1e3) for name, found in seconds.items()}
    base = spreads[next(iter(ways))].median
    found = []
    for name, way in ways.items():
        at_most, aim = budgets.get(name, (None, None))
        times = spreads.get(name)
        figure = times.median / base if times else None
        found.append(Measurement(subject, name, figure, "×", times, way.work, at_most, aim))
    return found


def timeable(ways: Mapping[str, Ready]) -> tuple[dict[str, Run], dict[str, int]]:
    """Return what `interleaved` times: runs and rounds of the ways that run."""
    runs = {name: way.run for name, way in ways.items() if way.run is not None}
    return runs, {name: ways[name].rounds for name in runs}
