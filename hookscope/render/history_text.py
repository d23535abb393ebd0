"""A run by its checkpoints in words: what happened and since which file, then the files, then the layers."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import PurePath
from statistics import median

from rich.console import RenderableType
from rich.text import Text

from hookscope.render.columns import (
    Column,
    classes_text,
    draw_table,
    number_column,
    number_text,
    percent_text,
    safe_line,
)
from hookscope.render.terminal import note_lines
from hookscope.results.history import History, HistoryFile, HistoryVerdict, LayerPoint, by_layer
from hookscope.text import counted, in_words, printable, some_of

# What a screen has room for.
_MOST_VERDICTS = 12
_MOST_PLACES = 3
_MOST_FAILURES = 5
_MOST_NAME = 80
_MOST_INPUTS = 3

_STYLES = {"fail": "red", "warn": "yellow"}

# What is wrong with one thing and with several, and what ends a tensor's name that is then left out.
_WORDS: dict[str, tuple[str, str]] = {
    "dead-filters-appear": ("has dead filters", "have dead filters"),
    "dead-filter": ("has many dead filters", "have many dead filters"),
    "frozen-weight-moves": ("is frozen, yet moves", "are frozen, yet move"),
    "non-finite-parameter": ("holds NaN or Inf", "hold NaN or Inf"),
    "zero-parameter": ("is 0 everywhere", "are 0 everywhere"),
    "constant-parameter": ("has one value everywhere", "have one value everywhere"),
    "duplicate-parameter": ("equals another weight", "equal another weight"),
    "untrained-weight": ("looks untrained", "look untrained"),
    "untrained-norm": ("has its initial values", "have their initial values"),
    "outlier-weight": ("has a value far greater than all others", "have a value far greater than all others"),
    "dead-channels": ("has dead channels", "have dead channels"),
    "non-finite-activation": ("makes NaN or Inf", "make NaN or Inf"),
    "optimizer-state": ("cannot resume training", "cannot resume training"),
}


# Rules on changes whose message counts all that it is about.
_LIST_ALL = ("weights-traded", "tensors-change", "dtype-change", "optimizer-reset")


def history_summary(result: History, *, width: int, full: bool = False) -> Iterator[RenderableType]:
    """Yield what the command prints: the answer, further verdicts, notes, the files, the layers."""
    first, *rest = answer(result)
    style = _STYLES[most.level] if (most := decisive(result)) else "" if result.unreadable else "green"
    yield safe_line(first, style=f"bold {style}".strip(), overflow="fold")
    for sentence in rest:
        yield safe_line(sentence, overflow="fold")
    yield from _verdict_lines(result, full=full)
    yield note_lines(result.notes)
    yield _files_table(result, width, full=full)
    if (layers := _layers_table(result, width, full=full)) is not None:
        yield safe_line("Parameters by layer, over the files that were read", style="bold")
        yield layers


def answer(result: History) -> list[str]:
    """Return the answer in sentences: what happened and since when, what could not be read, what was looked at."""
    order = f"Files are in the order of {result.order}."
    return [
        headline(result),
        *_failures(result),
        *_equal_files(result),
        *_steps(result),
        *_best_classes(result),
        order,
        result.scope,
    ]


def _equal_files(result: History) -> Iterator[str]:
    """Yield a sentence for each run of files with the same parameters."""
    learnt = [row for row in result.rows if row.role == "parameter"]
    still = {row.file for row in learnt} - {row.file for row in learnt if row.drift != 0}
    runs: list[list[HistoryFile]] = []
    for file in result.read:
        if file.compared_with is None or file.index not in still:
            continue
        if not runs or runs[-1][-1].index != file.compared_with:
            runs.append([result.files[file.compared_with]])
        runs[-1].append(file)
    for first, *others in runs:
        labels = [printable(each.label, _MOST_NAME) for each in others]
        has = "has" if len(others) == 1 else "have"
        yield f"{some_of(labels, _MOST_PLACES)} {has} the same parameters as {printable(first.label, _MOST_NAME)}."


def _steps(result: History) -> Iterator[str]:
    """Yield a sentence where the optimiser's step count stays while weights move."""
    moved = {row.file for row in result.rows if row.role == "parameter" and row.drift}
    counts = [(each, each.optimisers[0].steps) for each in result.read if each.optimisers]
    known = [(file, steps) for file, steps in counts if steps is not None]
    still = [
        pair
        for pair in pairwise(known)
        if pair[1][1] == pair[0][1] and pair[1][0].index in moved and pair[1][0].compared_with == pair[0][0].index
    ]
    if still:
        (before, steps), (after, _) = still[0]
        names = [printable(each.label, _MOST_NAME) for each in (before, after)]
        more = f", and in {counted(len(still) - 1, 'more file')}" if len(still) > 1 else ""
        stays = f"stays at {steps:,g} from {names[0]} to {names[1]}{more}, although weights move"
        yield f"The optimizer's step count {stays}: its state was reset, or is that of a different run."


def headline(result: History) -> str:
    """Return what happened first of what matters most, in one sentence."""
    count, read = counted(len(result.files), "file"), len(result.read)
    if not read:
        return f"None of {count} could be read."
    most = decisive(result)
    if most is not None:
        return sentence_of(most, result)
    if not any(each.judged for each in result.read):
        return f"No rule could be judged in any of {count}."
    if read == len(result.files):
        return f"No rule objected to any of {count}."
    which = "that were read" if result.searched else "that could be read"
    return f"No rule objected to any of the {counted(read, 'file')} {which}, of {len(result.files):,}."


def decisive(result: History) -> HistoryVerdict | None:
    """Return the verdict to name first: a failure before a warning, one that began before one that was always there."""
    return min(result.verdicts, key=lambda each: (each.level != "fail", each.before is None, each.first), default=None)


def sentence_of(verdict: HistoryVerdict, result: History) -> str:
    """Return what a verdict is about, and in which files, in one sentence."""
    if verdict.is_change:
        more = len(verdict.places) - 1
        named = f" So did {counted(more, 'more tensor')}." if more and verdict.rule not in _LIST_ALL else ""
        return f"{verdict.message}{named}"
    places = places_text(verdict)
    if not places:
        return f"Rule {verdict.rule} objects {span_text(verdict, result)}: {verdict.message}"
    one, several = _WORDS.get(verdict.rule, ("", ""))
    if not one:
        return f"Rule {verdict.rule} objects to {places_text(verdict, quoted=True)} {span_text(verdict, result)}."
    return f"{places} {one if len(verdict.places) == 1 else several} {span_text(verdict, result)}."


def places_text(verdict: HistoryVerdict, *, quoted: bool = False) -> str:
    """Return what a verdict is about: "layer3.1.conv2"; of several the first and how many more there are."""
    names = [printable(each, _MOST_NAME) for each in verdict.places if each]
    if verdict.rule.startswith("dead-filter"):  # a layer's weight is meant, whatever it is called
        names = [each.removesuffix(".weight") for each in names]
    names = [f"'{each}'" for each in names] if quoted else names
    return some_of(names, _MOST_PLACES if len(names) <= _MOST_PLACES else 1)


def span_text(verdict: HistoryVerdict, result: History) -> str:
    """Return in which files a verdict holds: "from epoch_7.pt on"."""
    first = printable(result.files[verdict.first].label, _MOST_NAME)
    if verdict.before is None:
        return _span_from_the_start(verdict, result, first)
    between = verdict.first - verdict.before - 1
    gap = f" ({counted(between, 'file')} before it could not be read)" if between else ""
    if verdict.first == result.read[-1].index:
        return f"in {first}, the last file{gap}"
    if verdict.lasts:
        return f"from {first} on{gap}"
    if len(verdict.files) == 1:
        return f"in {first} alone{gap}"
    return f"in {len(verdict.files)} files, {first} being the first{gap}"


def _span_from_the_start(verdict: HistoryVerdict, result: History, first: str) -> str:
    read = len(result.read)
    if verdict.lasts:
        return f"in all {read} files that were read" if read < len(result.files) else f"in all {read} files"
    if len(verdict.files) == 1:
        return f"in {first}" if result.searched else f"in {first} alone"
    return f"in {len(verdict.files)} of {read} files, {first} being the first"


def _failures(result: History) -> Iterator[str]:
    unread = [each for each in result.files if each.status == "unreadable"]
    stuck = [each for each in result.unreadable if each.status == "read"]
    for failed, what in ((unread, "read"), (stuck, "checked to the end")):
        if failed and (what != "read" or result.read):
            names = some_of([printable(each.label, _MOST_NAME) for each in failed], _MOST_FAILURES)
            yield f"{len(failed)} of {counted(len(result.files), 'file')} could not be {what}: {names}."


def _best_classes(result: History) -> Iterator[str]:
    """Yield how the best class of the first few inputs changed over the files; inputs that changed alike together."""
    alike: dict[str, list[str]] = {}
    for at, record in enumerate(result.inputs[:_MOST_INPUTS]):
        name = printable(PurePath(record.name).name or record.name, _MOST_NAME)
        best = [
            (file.label, each.classes[0][0])
            for file in result.files
            for each in file.predictions
            if each.input_index == at and each.classes
        ]
        changed = [label for (_, was), (label, now) in pairwise(best) if was != now]
        if changed:
            times = "once" if len(changed) == 1 else f"{len(changed)} times, last"
            ends = f"from {best[0][1]} to {best[-1][1]}"
            alike.setdefault(f"goes {ends}; it changes {times} in {changed[-1]}", []).append(name)
        elif best:
            alike.setdefault(f"is {best[0][1]} in all files", []).append(name)
    for went, names in alike.items():
        yield f"The best class of {in_words(names)} {went}."


def _verdict_lines(result: History, *, full: bool) -> Iterator[Text]:
    """Yield the verdicts but for the one in the headline, and the message of each."""
    most = decisive(result)
    if most is None:
        return
    yield safe_line(f"{most.level.upper()} {most.rule}: {most.message}", style=_STYLES[most.level], overflow="fold")
    others = [each for each in result.verdicts if each is not most]
    for each in others if full else others[:_MOST_VERDICTS]:
        heading = f"{each.level.upper()} {each.rule}"
        if each.is_change:
            line = f"{heading}: {sentence_of(each, result)}"
        else:
            at = f" at {places_text(each)}" if len(each.places) > 1 else ""
            line = f"{heading}{at} {span_text(each, result)}: {each.message}"
        yield safe_line(line, style=_STYLES[each.level], overflow="fold")
    if not full and len(others) > _MOST_VERDICTS:
        yield Text(f"… {len(others) - _MOST_VERDICTS} more, --full shows all", style="dim italic")


def verdict_of(file: HistoryFile, result: History) -> str:
    """Return what the rules said of a file, in a few words."""
    if file.status == "skipped":
        return "not read"
    if file.status == "unreadable":
        return "cannot be read"
    levels = [each.level for each in result.verdicts if file.index in each.files]
    fails, warns = levels.count("fail"), levels.count("warn")
    told = [counted(fails, "failure")] * bool(fails) + [counted(warns, "warning")] * bool(warns)
    told += ["not checked to the end"] * bool(file.error)
    return ", ".join(told) or "-"


def files_columns(result: History) -> list[Column]:
    """Return the columns of the files, for the terminal and for the page."""
    files = result.files
    layers = by_layer(result)
    counters = list(dict.fromkeys(name for file in files for name in file.counters))
    columns = [Column("file", [safe_line(each.label) for each in files], 0, words=True)]
    for rank, name in enumerate(counters[:2], 3):
        columns.append(Column(name, [safe_line(_count(each.counters.get(name))) for each in files], rank))
    columns.append(number_column("‖w‖", [_norm(layers, each.index) for each in files], 4))
    columns.append(number_column("median ‖Δw‖/‖w‖", [_median_drift(layers, each.index) for each in files], 2))
    if any(each.optimisers for each in files):
        rates = [", ".join(number_text(rate, 3) for rate in _rates(each)[:2]) or "-" for each in files]
        columns.append(Column("lr", [safe_line(each) for each in rates], 5))
        steps = [each.optimisers[0].steps if each.optimisers else None for each in files]
        if any(each is not None for each in steps):
            columns.append(Column("steps", [safe_line(_count(each)) for each in steps], 6))
    if any(each.predictions for each in files):
        columns.append(Column("best class", [safe_line(_best(each)) for each in files], 7, words=True, max_width=30))
    columns.append(Column("rules", [safe_line(verdict_of(each, result)) for each in files], 1, words=True))
    return columns


def _files_table(result: History, width: int, *, full: bool) -> RenderableType:
    levels = {at: each.level for each in reversed(result.verdicts) for at in each.files}
    styles = [
        "red"
        if each.status == "unreadable"
        else "dim"
        if each.status == "skipped"
        else _STYLES.get(levels.get(each.index, ""), "")
        for each in result.files
    ]
    return draw_table(files_columns(result), width, styles, full=full)


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if math.isfinite(value) else f"{value}"


def _rates(file: HistoryFile) -> list[float]:
    return list(dict.fromkeys(rate for each in file.optimisers for rate in each.rates))


def _best(file: HistoryFile) -> str:
    classes = [each.classes[:1] for each in file.predictions[:1]]
    return classes_text(classes[0]) if classes else "-"


def _norm(layers: dict[str, dict[int, LayerPoint]], at: int) -> float | None:
    norms = [point.norm for files in layers.values() if (point := files.get(at)) and point.norm is not None]
    return math.hypot(*norms) if norms else None


def _median_drift(layers: dict[str, dict[int, LayerPoint]], at: int) -> float | None:
    drifts = [point.drift for files in layers.values() if (point := files.get(at)) and point.drift is not None]
    return median(drifts) if drifts else None


def _layers_table(result: History, width: int, *, full: bool) -> RenderableType | None:
    layers = by_layer(result)
    if not layers:
        return None
    columns, styles = layer_columns(result, layers)
    return draw_table(columns, width, styles, full=full)


def layer_columns(result: History, layers: dict[str, dict[int, LayerPoint]]) -> tuple[list[Column], Sequence[str]]:
    """Return the columns of the layers, for the terminal and for the page, and the style of each row."""
    rows = [(name or "(model)", [files[at] for at in sorted(files)], sorted(files)) for name, files in layers.items()]
    about = {name: [each for each in result.verdicts if _is_about(each, name)] for name in layers}
    largest = [_largest(points, places) for _, points, places in rows]
    columns = [
        Column("layer", [safe_line(name) for name, _, _ in rows], 0, words=True),
        number_column("‖w‖ first", [points[0].norm for _, points, _ in rows], 6),
        number_column("‖w‖ last", [points[-1].norm for _, points, _ in rows], 4),
        number_column("largest ‖Δw‖/‖w‖", [drift for drift, _ in largest], 2),
        Column("in", [safe_line("-" if at is None else result.files[at].label) for _, at in largest], 3, words=True),
        number_column("since first", [points[-1].drift_from_first for _, points, _ in rows], 5),
        Column("dead filters", [safe_line(percent_text(points[-1].dead_fraction)) for _, points, _ in rows], 7),
        Column("remarks", [safe_line(_remarks(about[name], result)) for name in layers], 1, words=True),
    ]
    if not any(points[-1].dead_fraction for _, points, _ in rows):
        columns = [each for each in columns if each.header != "dead filters"]
    styles = [_STYLES[about[name][0].level] if about[name] else "" for name in layers]
    return columns, styles


def _largest(points: Sequence[LayerPoint], places: Sequence[int]) -> tuple[float | None, int | None]:
    known = [(point.drift, at) for point, at in zip(points, places, strict=True) if point.drift is not None]
    return max(known, key=lambda each: each[0], default=(None, None))


def _is_about(verdict: HistoryVerdict, layer: str) -> bool:
    return any(place and layer in (place, place.rpartition(".")[0]) for place in verdict.places)


def _remarks(verdicts: Sequence[HistoryVerdict], result: History) -> str:
    """Return the first verdict on a layer, and how many more there are."""
    more = f" and {len(verdicts) - 1} more" if verdicts[1:] else ""
    return "".join(f"{each.rule} {result.files[each.first].label}{more}" for each in verdicts[:1])
