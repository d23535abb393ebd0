"""A run by its checkpoints in words: what happened and since which file, then the files, then the layers."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import PurePath

from rich.console import RenderableType
from rich.text import Text

from hookscope.render.columns import draw_table, safe_line
from hookscope.render.history_columns import file_columns, layer_columns, layer_rows, verdicts_on
from hookscope.render.terminal import note_lines
from hookscope.results.history import History, HistoryFile, HistoryVerdict
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


def _files_table(result: History, width: int, *, full: bool) -> RenderableType:
    levels = {at: each.level for each in reversed(result.verdicts) for at in each.files}
    unread = {"unreadable": "red", "skipped": "dim"}
    styles = [unread.get(each.status, _STYLES.get(levels.get(each.index, ""), "")) for each in result.files]
    return draw_table(file_columns(result), result.files, width, styles, full=full)


def _layers_table(result: History, width: int, *, full: bool) -> RenderableType | None:
    rows = layer_rows(result)
    about = [verdicts_on(layer, result) for layer, _ in rows]
    styles = [_STYLES[verdicts[0].level] if verdicts else "" for verdicts in about]
    return draw_table(layer_columns(result), rows, width, styles, full=full) if rows else None
