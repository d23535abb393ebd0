"""Where a network looks, in words: a finding, a table of the maps, and whether they can be believed."""

from collections.abc import Iterator
from pathlib import PurePath

from rich.console import Group, RenderableType
from rich.text import Text

from hookscope.render.columns import (
    Drawn,
    draw,
    fold_name,
    number_text,
    probability_text,
    safe_line,
    share_in_words,
)
from hookscope.render.terminal import note_lines, title_lines
from hookscope.results.attributions import AttributionMap, Attributions, SanityCheck, Target, input_word
from hookscope.results.concentration import concentration
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
    records = [result.inputs[each.input_index] for each in shown]
    boxes = [concentration(each, record) for each, record in zip(shown, records, strict=True)]
    places = ["" if box is None else f"{_share(box.share)} {box.words}" for box in boxes]
    readings = {each.target.reading for each in shown if each.target.probability is not None}
    header = next(iter(readings)) if len(readings) == 1 and "as returned" not in readings else "prob."
    whole = f"({input_word(shown[0].values.ndim)})"
    columns = [
        Drawn("input", [safe_line(PurePath(record.name).name or record.name) for record in records], 11, words=True),
        Drawn("target", [safe_line(fold_name(each.target.label, 40)) for each in shown], 0, words=True),
        Drawn("score", [safe_line(number_text(each.target.score)) for each in shown], 2),
        Drawn(header, [safe_line(_probability(each)) for each in shown], 1),
        Drawn("layer", [safe_line(each.layer or whole) for each in shown], 3, words=True),
        Drawn("grid", [safe_line("x".join(map(str, each.values.shape))) for each in shown], 12),
        Drawn("half of it in", [safe_line(place) for place in places], 4, words=True),
    ]
    if len(result.inputs) == 1:
        columns = columns[1:]
    if all(each.target.probability is None for each in shown):
        columns = [column for column in columns if column.header != header]
    table = draw(columns, width)
    if len(shown) == len(result.maps):
        return table
    more = safe_line(f"… {len(result.maps) - len(shown):,} more maps, --full shows all", style="dim")
    return Group(table, more)


def _probability(each: AttributionMap) -> str:
    return "-" if each.target.probability is None else probability_text(each.target.probability)


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "<1%"


def _at(words: str) -> str:
    if words.startswith(("steps", "planes")):
        return f"in {words}"
    return {"left": "at the left", "right": "at the right", "centre": "in the centre"}.get(words, f"at the {words}")
