"""A run by its checkpoints as a document: what happened and since which file, the files, the layers over files."""

import math
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any

from hookscope.commands.history.columns import (
    OF_OPTIMISERS,
    best_class,
    file_columns,
    layer_columns,
    output_columns,
    rates_of,
    tensor_columns,
    verdicts_on,
)
from hookscope.reporting.columns import Column
from hookscope.reporting.document import (
    DetailedRow,
    Document,
    Facts,
    FindingLine,
    Findings,
    HeatMaps,
    Level,
    Section,
    Table,
    line_of,
)
from hookscope.reporting.run_facts import input_names
from hookscope.reporting.steps import HeatMap, heat_map
from hookscope.reporting.terminal import inputs_words
from hookscope.results.history import (
    ActivationPoint,
    History,
    HistoryFile,
    HistoryFinding,
    LayerPoint,
    WeightPoint,
    by_layer,
)
from hookscope.text import are, counted, figure, in_words, layer_words, printable, shape_text, some_of

_OF_LAYERS = {
    "drift": "Relative weight change per checkpoint",
    "norm": "Norm relative to the first file",
    "dead-filters": "Dead filters",
}
_OF_OUTPUTS = {"std": "Standard deviation of outputs", "dead-share": "Dead channels of outputs"}

_MOST_PLACES = 3
_MOST_FAILURES = 5
_MOST_NAME = 80
_MOST_INPUTS = 3
_MOST_POINTS = 24  # files in a row's table; digests listed
_FEW_RULES = 4  # rules listed in the answer

# What is wrong, for one place and for several.
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

# Rules whose message already counts all places.
_LIST_ALL = ("weights-traded", "tensors-change", "dtype-change", "optimizer-reset")


def describe_history(result: History) -> Document:
    """Describe a run by its checkpoints."""
    most = decisive(result)
    files = result.files
    first, last = files[0].label, files[-1].label
    verdicts = sorted(
        result.verdicts, key=lambda verdict: (verdict is not most, verdict.level != "fail", verdict.first)
    )
    findings = Findings(
        findings=[_finding(verdict, result) for verdict in verdicts], ends=(first, last), all_in="verdicts.csv"
    )
    return Document(
        title=f"From {first} to {last}",
        subtitle=f"{len(result.read)} of {counted(len(files), 'file')} read",
        page_title=f"{first} to {last} · history",
        answer=answer(result),
        level=most.level if most else "" if result.unreadable else "good",
        warnings=[*result.warnings, *(f"{file.label}: {file.error}" for file in result.unreadable)],
        notes=result.notes,
        facts=_facts(result),
        sections=[
            Section("verdicts", "Verdicts over files", [findings], "Verdicts"),
            Section("layers", "Layers over files", [_maps(result)], "Layers"),
            Section("tables", "Tables", [_files_table(result), _layers_table(result), _classes_table(result)]),
        ],
        making=_making(result),
        main="layers",
    )


def _finding(verdict: HistoryFinding, result: History) -> FindingLine:
    when = f"in {result.files[verdict.first].label}" if verdict.is_change else span_text(verdict, result)
    return line_of(verdict, where=places_text(verdict), when=when, spans=_spans(verdict, result))


def _spans(verdict: HistoryFinding, result: History) -> list[tuple[float, float]]:
    """Return the start and length, in thousandths, of each run of files with the verdict, unread files included."""
    read = [file.index for file in result.read]
    reaches = zip(read, [*read[1:], len(result.files)], strict=True)  # to the next file that was read
    runs = [[*run] for holds, run in groupby(reaches, lambda reach: reach[0] in verdict.files) if holds]
    unit = 1000 / len(result.files)
    return [(round(run[0][0] * unit, 1), round((run[-1][1] - run[0][0]) * unit, 1)) for run in runs]


def _maps(result: History) -> HeatMaps:
    tensors: dict[str, dict[str, list[WeightPoint]]] = {}
    for row in result.rows:
        tensors.setdefault(row.layer or "(model)", {}).setdefault(row.name, []).append(row)
    outputs: dict[str, list[ActivationPoint]] = {}
    for output in result.activations:
        outputs.setdefault(output.label or "(model)", []).append(output)
    findings: dict[str, list[FindingLine]] = {}
    for verdict in result.verdicts:
        places = () if verdict.rule in OF_OPTIMISERS else verdict.places
        for name in dict.fromkeys(name for place in places for name in (place, place.rpartition(".")[0])):
            findings.setdefault(name or "(model)", []).append(_finding(verdict, result))

    def details(name: str) -> DetailedRow:
        points, seen = tensors.get(name, {}), outputs.get(name, [])
        kinds = [counted(len(points), "tensor")] * bool(points) + [f"output of {output.kind}" for output in seen[:1]]
        tables = [
            Table(
                title=f"{label} ({shape_text(rows[0].shape)}, {rows[0].dtype})",
                columns=tensor_columns(result),
                rows=_some(rows),
            )
            for label, rows in points.items()
        ]
        tables += [
            Table(title=f"output of {output.kind}", columns=output_columns(result), rows=_some(seen))
            for output in seen[:1]
        ]
        return DetailedRow(name=name, kind=", ".join(kinds), findings=findings.get(name, ()), tables=tables)

    return HeatMaps(
        maps=lambda most_rows, _most_columns: _heat_maps(result, most_rows, findings.keys()),
        details=details,
        legend="A column for each file, in order. Magenta: NaN or Inf. Grey: exactly 0. Blank: not read, or nothing to "
        "compare.",
        empty="No file could be read.",
        all_in="weights.csv",
    )


def _heat_maps(result: History, most_rows: int, named: AbstractSet[str]) -> list[HeatMap]:
    """Return a run's heat maps, without empty maps and shares that are 0 everywhere."""
    layers: dict[str, dict[int, dict[str, float | None]]] = {}
    for name, points in by_layer(result).items():
        first_norm = next((point.norm for point in points.values() if point.norm), None)
        layers[name or "(model)"] = {at: _numbers(point, first_norm) for at, point in points.items()}
    outputs: dict[str, dict[int, dict[str, float | None]]] = {}
    for output in result.activations:
        std = math.inf if output.nonfinite_count else output.std
        numbers = {"std": std, "dead-share": output.dead_channel_fraction}
        outputs.setdefault(output.label or "(model)", {})[output.file] = numbers
    files, maps = [file.index for file in result.files], []
    for by_name, titles in ((layers, _OF_LAYERS), (outputs, _OF_OUTPUTS)):
        for key, title in titles.items():
            rows = {name: [by_file.get(at, {}).get(key) for at in files] for name, by_file in by_name.items()}
            rows = {name: row for name, row in rows.items() if any(value is not None for value in row)}
            share, steps = key.startswith("dead"), [at + 1 for at in files]
            if not share or any(map(any, rows.values())):
                maps.append(heat_map(key, title, rows, steps, (most_rows, len(files)), named, share=share))
    labels = tuple(file.label for file in result.files)
    return [replace(drawn, column_names=labels) for drawn in maps if drawn is not None]


def _numbers(point: LayerPoint, first_norm: float | None) -> dict[str, float | None]:
    norm = None if point.norm is None or not first_norm else point.norm / first_norm
    drift, norm = (math.inf, math.inf) if point.nonfinite_count else (point.drift, norm)
    return {"drift": drift, "norm": norm, "dead-filters": point.dead_fraction}


def _some(points: Sequence[Any]) -> Sequence[Any]:
    """Return the first and the last `_MOST_POINTS` / 2 points; the CSV files have all."""
    half = _MOST_POINTS // 2
    return points if len(points) <= _MOST_POINTS else [*points[:half], *points[-half:]]


def _facts(result: History) -> Facts:
    read, count = len(result.read), len(result.files)
    how_many = "all" if read == count else f"{read:,} of them"
    facts = [("Files", f"{count:,}, {how_many} read", read < count and not result.searched)]
    facts.append(("In the order of", result.order, False))
    facts.append(("Network", result.arch or "none: judged by what the files store", False))
    optimisers = dict.fromkeys(point.key for file in result.files for point in file.optimisers)
    if optimisers:
        rates = [[*dict.fromkeys(rates)][:2] for file in result.files if (rates := rates_of(file))]
        words = [", ".join(figure(rate, 3) for rate in few) for few in rates]
        ends = f"lr {words[0]} to {words[-1]}" if words else "no learning rate"
        facts.append(("Optimiser", f"at {', '.join(optimisers)}: {ends}", False))
    if result.inputs:
        names = [*dict.fromkeys(record.name for record in result.inputs)]
        facts.append(("Inputs", some_of(names, 8) if len(names) > 1 else inputs_words(result.inputs), False))
    return facts


def _making(result: History) -> list[tuple[str, str]]:
    digests = [(f"SHA-256 of {file.label}", file.sha256) for file in result.files if file.sha256]
    left_out = len(digests[_MOST_POINTS:])
    more = [("Further digests", f"{left_out:,} {are(left_out)} in files.csv")] if left_out else []
    return [*digests[:_MOST_POINTS], *more]


def _files_table(result: History) -> Table:
    levels: dict[int, Level] = {at: verdict.level for verdict in reversed(result.verdicts) for at in verdict.files}
    return Table(
        title="Files",
        columns=file_columns(result),
        rows=result.files,
        levels=[
            "fail" if file.status == "unreadable" else "dim" if file.status == "skipped" else levels.get(file.index, "")
            for file in result.files
        ],
        all_in="files.csv",
    )


def _layers_table(result: History) -> Table:
    rows = [*by_layer(result).items()]
    about = [verdicts_on(layer, result) for layer, _ in rows]
    levels: list[Level] = [verdicts[0].level if verdicts else "" for verdicts in about]
    columns = layer_columns(result)
    return Table(title="Parameters by layer", columns=columns, rows=rows, levels=levels, all_in="weights.csv")


def _classes_table(result: History) -> Table:
    files = [file for file in result.files if file.predictions]
    inputs = enumerate(input_names(result.inputs)[:_MOST_POINTS])
    best = [Column("", name, value=partial(best_class, at), words=True) for at, name in inputs]
    columns = [Column("label", "file", rank=0, words=True), *best]
    return Table(title="Best class of each input", columns=columns, rows=files, is_extra=True)


def answer(result: History) -> list[str]:
    """Return the answer in sentences: what happened and since when, what could not be read, what was looked at."""
    most = decisive(result)
    others = [verdict.rule for verdict in result.verdicts if verdict is not most]
    rules = some_of(list(dict.fromkeys(others)), _FEW_RULES)
    return [
        headline(result),
        *([f"{counted(len(others), 'other problem')}: {rules}."] if others else []),
        *_failures(result),
        *_not_compared(result),
        *_equal_files(result),
        *_steps(result),
        *_best_classes(result),
        f"Files are in the order of {result.order}.",
        result.scope,
    ]


def _not_compared(result: History) -> Iterator[str]:
    """Yield a sentence on integer and sparse matrices, which have no norm; int64 holds indices, not weights."""
    unknown = (row for row in result.rows if row.norm is None and row.nonfinite_count < row.element_count)
    weights = (row for row in unknown if sum(size > 1 for size in row.shape) > 1 and row.dtype not in ("bool", "int64"))
    names = dict.fromkeys(f"'{printable(row.name, _MOST_NAME)}'" for row in weights)
    if names:
        tensors = counted(len(names), "tensor of integers or sparse values", "tensors of integers or sparse values")
        yield f"Changes were not looked for in {tensors}: {some_of([*names], _MOST_PLACES)}."


def _equal_files(result: History) -> Iterator[str]:
    drifts: dict[int, dict[str, float | None]] = {}
    for row in result.rows:
        if row.role == "parameter":
            drifts.setdefault(row.file, {})[row.name] = row.drift
    runs: list[list[HistoryFile]] = []
    for file in result.read:
        before, learnt = file.compared_with, drifts.get(file.index, {})
        if before is None or {*learnt.values()} != {0} or learnt.keys() != drifts.get(before, {}).keys():
            continue
        if not runs or runs[-1][-1].index != before:
            runs.append([result.files[before]])
        runs[-1].append(file)
    for first, *others in runs:
        labels = [printable(later.label, _MOST_NAME) for later in others]
        has = "has" if len(others) == 1 else "have"
        yield f"{some_of(labels, _MOST_PLACES)} {has} the same parameters as {printable(first.label, _MOST_NAME)}."


def _steps(result: History) -> Iterator[str]:
    """Yield a sentence where the optimiser's step count stays while weights move."""
    moved = {row.file for row in result.rows if row.role == "parameter" and row.drift}
    counts = [(file, file.optimisers[0].steps) for file in result.read if file.optimisers]
    recorded = [(file, steps) for file, steps in counts if steps is not None]
    still = [
        pair
        for pair in pairwise(recorded)
        if pair[1][1] == pair[0][1] and pair[1][0].index in moved and pair[1][0].compared_with == pair[0][0].index
    ]
    if still:
        (before, steps), (after, _) = still[0]
        names = [printable(file.label, _MOST_NAME) for file in (before, after)]
        more = f", and in {counted(len(still) - 1, 'more file')}" if len(still) > 1 else ""
        stays = f"stays at {steps:,.0f} from {names[0]} to {names[1]}{more}, although weights move"
        yield f"The optimizer's step count {stays}: its state was reset, or belongs to a different run."


def headline(result: History) -> str:
    """Return the decisive verdict in one sentence, or that there are no problems."""
    count, read = counted(len(result.files), "file"), len(result.read)
    if not read:
        return f"None of {count} could be read."
    most = decisive(result)
    if most is not None:
        return sentence_of(most, result)
    if not any(file.judged for file in result.read):
        return f"No rule could be judged in any of {count}."
    if any(file.error for file in result.read) or any(_not_compared(result)):
        return f"No problems in what could be checked of {count}."
    if read == len(result.files):
        return f"No problems in any of {count}."
    files = "the only file" if read == 1 else f"any of the {read:,} files"
    clause = "read" if result.searched else "that could be read"
    return f"No problems in {files} {clause}, of {len(result.files):,}."


def decisive(result: History) -> HistoryFinding | None:
    """Return the most important verdict: a failure, then one that began after the first file, then the earliest."""
    return min(
        result.verdicts,
        key=lambda verdict: (verdict.level != "fail", verdict.before is None, verdict.first),
        default=None,
    )


def sentence_of(verdict: HistoryFinding, result: History) -> str:
    """Return what a verdict is about, and in which files, in one sentence."""
    if verdict.is_change:
        more = len(verdict.places) - 1
        named = f" So did {counted(more, 'more tensor')}." if more and verdict.rule not in _LIST_ALL else ""
        return f"{verdict.message}{named}"
    places = places_text(verdict, layer_words)
    if not places:
        return f"{verdict.rule}, {span_text(verdict, result)}: {verdict.message}"
    singular, several = _WORDS.get(verdict.rule, ("", ""))
    if not singular:
        quoted = places_text(verdict, "'{}'".format)
        return f"{verdict.rule} at {quoted}, {span_text(verdict, result)}."
    return f"{places} {singular if len(verdict.places) == 1 else several} {span_text(verdict, result)}."


def places_text(verdict: HistoryFinding, words: Callable[[str], str] = str) -> str:
    """Return the places of a verdict: "layer3.1.conv2"; of more than three, the first and how many more there are."""
    names = [printable(place, _MOST_NAME) for place in verdict.places if place]
    if verdict.rule.startswith("dead-filter"):  # shown as the layer
        names = [name.removesuffix(".weight") for name in names]
    return some_of([*map(words, names)], _MOST_PLACES if len(names) <= _MOST_PLACES else 1)


def span_text(verdict: HistoryFinding, result: History) -> str:
    """Return in which files a verdict holds: "from epoch_7.pt on"."""
    first, read = printable(result.files[verdict.first].label, _MOST_NAME), len(result.read)
    if verdict.before is None:
        if verdict.lasts:
            every, were = (f"all {read} files", "were") if read > 1 else (f"{first}, the only file", "was")
            return f"in {every} that {were} read" if read < len(result.files) else f"in {every}"
        alone, many = "" if result.searched else " alone", f"{len(verdict.files)} of {read}"
        return f"in {first}{alone}" if len(verdict.files) == 1 else f"in {many} files, {first} being the first"
    between = verdict.first - verdict.before - 1
    gap = f" ({counted(between, 'file')} before it could not be read)" if between else ""
    if verdict.first == result.read[-1].index:
        rest = "" if verdict.first == len(result.files) - 1 else " that was read"
        return f"in {first}, the last file{rest}{gap}"
    if verdict.lasts:
        return f"from {first} on{gap}"
    if len(verdict.files) == 1:
        return f"in {first} alone{gap}"
    return f"in {len(verdict.files)} files, {first} being the first{gap}"


def _failures(result: History) -> Iterator[str]:
    unread = [file for file in result.files if file.status == "unreadable"]
    stuck = [file for file in result.unreadable if file.status == "read"]
    for failed, verb in ((unread, "read"), (stuck, "checked to the end")):
        if failed and (verb != "read" or result.read):
            names = some_of([printable(file.label, _MOST_NAME) for file in failed], _MOST_FAILURES)
            yield f"{len(failed)} of {counted(len(result.files), 'file')} could not be {verb}: {names}."


def _best_classes(result: History) -> Iterator[str]:
    """Yield a sentence for each way in which the best class of the first few inputs changed over the files."""
    alike: dict[str, list[str]] = {}
    for at, full_name in enumerate(input_names(result.inputs)[:_MOST_INPUTS]):
        name = printable(full_name, _MOST_NAME)
        best = [
            (file.label, prediction.best)
            for file in result.files
            for prediction in file.predictions
            if prediction.input_index == at
        ]
        changed = [label for (_, was), (label, now) in pairwise(best) if was != now]
        if changed:
            times = "once" if len(changed) == 1 else f"{len(changed)} times, last"
            ends = f"from {best[0][1]} to {best[-1][1]}"
            alike.setdefault(f"goes {ends}; it changes {times} in {changed[-1]}", []).append(name)
        elif best:
            count = len(result.files)
            where = "all files" if len(best) == count else f"the {len(best)} of {counted(count, 'file')} that ran"
            alike.setdefault(f"is {best[0][1]} in {where}", []).append(name)
    for went, names in alike.items():
        yield f"The best class of {in_words(names)} {went}."
