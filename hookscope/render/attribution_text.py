"""Where a network looks, in words: a finding, a table of the maps, and whether they can be believed."""

from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from pathlib import PurePath

from rich.console import Group, RenderableType
from rich.text import Text

from hookscope.render.columns import Column, draw_table, machine_columns, probability_text, safe_line, share_in_words
from hookscope.render.terminal import note_lines, title_lines
from hookscope.results.attributions import AttributionMap, Attributions, SanityCheck, Target, input_word
from hookscope.results.concentration import Concentration, concentration
from hookscope.text import some_of, told_apart

_RHO = "\N{GREEK SMALL LETTER RHO}"  # Spearman's rank correlation
_MOST_LABELS = 6
_MOST_ROWS = 40  # a screen


def attribution_summary(result: Attributions, *, width: int, full: bool = False) -> Iterator[RenderableType]:
    """Yield what the command prints: finding, title, table, sanity lines."""
    if result.maps:
        yield safe_line(finding_of(result.maps[0], result), overflow="fold")
    yield note_lines(result.notes)
    yield from title_lines(result)
    if result.maps:
        yield _table(result, width, full=full)
    for each in result.layers:
        about = f"{each.label} ({each.kind}, {'x'.join(map(str, each.grid))}): {each.reason}"
        yield safe_line(about, style="dim", overflow="fold")
    for reason in dict.fromkeys(result.unchanged.values()):
        labels = [label for label, each in result.unchanged.items() if each == reason]
        shown = some_of(labels, len(labels) if full else _MOST_LABELS)
        yield safe_line(f"left as it is: {shown}, {reason}", style="dim", overflow="fold")
    yield from sanity_lines(result)


def finding_of(each: AttributionMap, result: Attributions) -> str:
    """Return a map's finding in one sentence: the target, and where half of the map lies."""
    record = result.inputs[each.input_index]
    name = PurePath(record.name).name or record.name
    certain = f" ({probability})" if (probability := target_probability(each.target)) else ""
    box = concentration(each, record)
    subject = f"{name}, {each.target.label}{certain}: "
    if box is None:
        what = input_word(each.values.ndim)
        return f"{subject}nothing in the {what} speaks for it, the {result.method} map is nowhere above 0."
    share = f"half of the {result.method} map lies in {share_in_words(_share(box.share))} of what the network sees"
    return f"{subject}{share}, " + ("so it is spread out." if box.words == "spread out" else f"{_at(box.words)}.")


def target_probability(target: Target) -> str:
    """Return the probability of a target with what it is, "softmax 0.40"; "" without one."""
    if target.probability is None:
        return ""
    words = probability_text(target.probability)
    return f"probability {words} as returned" if target.reading == "as returned" else f"{target.reading} {words}"


def sanity_lines(result: Attributions) -> Iterator[Text]:
    """Yield the checks, each with its number and whether it passed: deletion in a sentence, the others in one line."""
    short = [each for each in result.sanity if each.name != "deletion"]
    if short:
        line = safe_line("sanity: ")
        for place, check in enumerate(short):
            line.append(" · " if place else "")
            line.append(check_text(check))
            line.append(*_styled_verdict(check))
        yield line
    for check in result.sanity:
        if check.name == "deletion":
            line = safe_line(f"deletion: {_deletion_text(check, result)}", overflow="fold")
            line.append(*_styled_verdict(check))
            yield line


def verdict(check: SanityCheck) -> str:
    """Return what came of a check, in a word or two."""
    return "inconclusive" if check.passed is None else "ok" if check.passed else "failed"


def _styled_verdict(check: SanityCheck) -> tuple[str, str]:
    return f" {verdict(check)}", "yellow" if check.passed is None else "green" if check.passed else "bold red"


def _deletion_text(check: SanityCheck, result: Attributions) -> str:
    after, before, *others = told_apart((check.value, *check.compared_with))
    random = f", blurring a random 10% to {others[0]}" if others else ""
    more = {
        True: "what the map marks matters more",
        False: "what the map marks does not clearly matter more",
        None: "blurring does not lower it enough to judge the map",
    }[check.passed]
    what = input_word(result.maps[0].values.ndim)
    return (
        f"blurring the 10% of the {what} that the map ranks highest takes the probability from {before} to "
        f"{after}{random}; {more}:"
    )


def check_text(check: SanityCheck) -> str:
    """Return what a check measured: "deletion: probability 0.41 → 0.06, random places → 0.38"."""
    if check.name == "deletion":
        after, before, *others = told_apart((check.value, *check.compared_with))
        random = f", random places → {others[0]}" if others else ""
        return f"deletion: probability {before} → {after}{random}"
    if check.name == "completeness":
        return f"completeness gap {check.value * 100:.1f}%"
    return f"{check.name} {_RHO} {check.value:.2f}"


def _table(result: Attributions, width: int, *, full: bool) -> RenderableType:
    shown = result.maps if full else result.maps[:_MOST_ROWS]
    table = draw_table(map_columns(result), shown, width)
    if len(shown) == len(result.maps):
        return table
    more = safe_line(f"… {len(result.maps) - len(shown):,} more maps, --full shows all", style="dim")
    return Group(table, more)


def map_columns(result: Attributions) -> tuple[Column, ...]:
    """Return the columns of `result.maps`."""
    readings = {each.target.reading for each in result.maps if each.target.probability is not None}
    reading = next(iter(readings)) if len(readings) == 1 and "as returned" not in readings else "prob."
    title = "input" if result.inputs[1:] else ""
    target, whole = attrgetter("target"), f"({input_word(result.maps[0].values.ndim)})" if result.maps else ""

    def input_of(each: AttributionMap) -> str:
        return result.inputs[each.input_index].name

    def half(each: AttributionMap) -> Concentration | None:
        return concentration(each, result.inputs[each.input_index])

    return (
        Column("input", title, "input", 11, lambda name: PurePath(name).name or name, input_of, words=True),
        Column("label", "target", "class or output that is explained", 0, words=True, fold=40).on(target, key="target"),
        Column("input_index"),
        *(Column(key).on(target) for key in ("index", "box", "reading")),
        Column("score", "score", "score of the target", 2).on(target),
        Column("probability", reading, "probability of the target", 1, probability_text, usual="-").on(target),
        Column("layer", "layer", "layer whose map it is", 3, lambda layer: layer or whole, words=True),
        Column("shape", "grid", "cells of the map", 12, str, lambda each: "x".join(map(str, each.values.shape))),
        *machine_columns("extent", "size"),
        *(Column(key, value=partial(_end, at)) for at, key in enumerate(("low", "high"))),
        *(Column(key).on(half, key=f"half_{name}") for name, key in (("share", "share"), ("where", "words"))),
        Column("", "half of it in", "where half of the map lies", 4, shown=_half_text, words=True).on(half, blank=""),
    )


def _half_text(box: Concentration) -> str:
    return f"{_share(box.share)} {box.words}"


def _end(at: int, each: AttributionMap) -> float | None:
    return None if each.range is None else each.range[at]


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "<1%"


def _at(words: str) -> str:
    if words.startswith(("steps", "planes")):
        return f"in {words}"
    return {"left": "at the left", "right": "at the right", "centre": "in the centre"}.get(words, f"at the {words}")
