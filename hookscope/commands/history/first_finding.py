"""Find since which file a rule fails: among files that were all read, or by halving a series."""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Literal

from hookscope.results.findings import Finding
from hookscope.results.history import HistoryFinding

Key = tuple[str, str]
"""A rule and a place."""

ByKey = Mapping[Key, Finding]


def by_key(findings: Iterable[Finding]) -> dict[Key, Finding]:
    """Return findings by rule and place; places that follow from a cause get the finding of the cause."""
    worst: dict[Key, Finding] = {}
    for finding in findings:
        for place in finding.places:
            previous = worst.get((finding.rule, place))
            if previous is None or previous.level == "warn":
                worst[finding.rule, place] = finding
    return worst


def verdicts(findings: Mapping[int, ByKey], *, fading: AbstractSet[str] = frozenset()) -> list[HistoryFinding]:
    """Return what each rule finds and since which file; `findings` has every file by index, in order.

    Places at which a rule fails in the same files make one verdict; for a rule in `fading`, places at which it begins
    to fail in the same file.
    """
    order = [*findings]
    held: dict[Key, tuple[int, ...]] = {}
    for index in order:
        for key in findings[index]:
            held[key] = (*held.get(key, ()), index)
    began_at: dict[tuple[str, int], set[int]] = {}
    for (rule, _), files in held.items():
        began_at.setdefault((rule, files[0]), set()).update(files)
    for key, files in held.items():
        if key[0] in fading:
            held[key] = tuple(at for at in order if at in began_at[key[0], files[0]])
    before = dict(zip(order, [None, *order], strict=False))
    begun = {key: (before[files[0]], files) for key, files in held.items()}
    return _grouped(begun, findings, lambda files: [*files] == order[order.index(files[0]) :])


def searched(count: int, look: Callable[[int], ByKey | None]) -> list[HistoryFinding]:
    """Find by halving since which file a rule fails, for rules that fail in the first or the last file.

    A rule is assumed to fail from that file on; a rule that fails only in between is not found.

    Args:
        count: Files in the series.
        look: Reads a file and returns its findings; None for an unreadable file. It is called repeatedly for a file.
    """
    readable = (at for at in range(count) if look(at) is not None)
    if (start := next(readable, None)) is None:
        return []
    end = next(at for at in reversed(range(start, count)) if look(at) is not None)
    first, last = look(start) or {}, look(end) or {}
    both = tuple(dict.fromkeys((start, end)))
    begun: dict[Key, tuple[int | None, tuple[int, ...]]] = {
        key: (None, both if key in last else (start,)) for key in first
    }
    for key in last.keys() - first.keys():
        low, high = start, end
        while (middle := _between(low, high, look)) is not None:
            low, high = (low, middle) if key in (look(middle) or {}) else (middle, high)
        begun[key] = low, tuple(dict.fromkeys((high, end)))
    ordered = {key: begun[key] for key in (*first, *last) if key in begun}
    findings = {at: look(at) or {} for _, files in ordered.values() for at in files}
    return _grouped(ordered, findings, lambda files: files[-1] == end)


def _between(low: int, high: int, look: Callable[[int], ByKey | None]) -> int | None:
    """Return the readable file nearest to the middle between two files; None if there is none."""
    middle = (low + high) / 2
    candidates = sorted(range(low + 1, high), key=lambda at: abs(at - middle))
    return next((at for at in candidates if look(at) is not None), None)


def _grouped(
    begun: Mapping[Key, tuple[int | None, tuple[int, ...]]],
    findings: Mapping[int, ByKey],
    lasts: Callable[[tuple[int, ...]], bool],
) -> list[HistoryFinding]:
    groups: dict[tuple[str, int | None, tuple[int, ...]], list[str]] = {}
    for (rule, place), (before, files) in begun.items():
        groups.setdefault((rule, before, files), []).append(place)
    made = []
    for (rule, before, files), places in groups.items():
        where, *others = places
        named = [findings[at][rule, place] for at in files for place in places if (rule, place) in findings[at]]
        level: Literal["fail", "warn"] = "fail" if any(finding.level == "fail" for finding in named) else "warn"
        own = [finding for finding in named if finding.where in places] or named  # or the cause's findings
        first, message, rest = files[0], own[0].message, tuple(others)
        last = lasts(files)
        verdict = HistoryFinding(rule, level, where, message, rest, first=first, before=before, files=files, lasts=last)
        made.append(verdict)
    return made
