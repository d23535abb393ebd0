"""A run by its checkpoints as one HTML page: the answer, verdicts over files, layers over files, every file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any
from urllib.parse import quote

from hookscope.render.columns import Column, classes_text
from hookscope.render.history_columns import file_columns, layer_columns, layer_rows, output_columns, tensor_columns
from hookscope.render.history_maps import history_maps
from hookscope.render.history_text import answer, decisive, places_text, sentence_of, span_text
from hookscope.render.html.figures import FRAME, Figure
from hookscope.render.html.page import PageTable, page_table, render_page
from hookscope.render.html.training import shown_map
from hookscope.results.history import ActivationPoint, History, HistoryFile, HistoryVerdict, WeightPoint
from hookscope.results.runs.reading import StoredRun
from hookscope.text import are, counted, figure, safe_text, shape_text, some_of

_MOST_ROWS = 800  # of a heat map
_MOST_VERDICTS = 200
_FEW_VERDICTS = 12  # that are seen at once
_MOST_PLACES = 400  # that a verdict lists
_MOST_POINTS = 24  # files that a row's own table has
_FEW_RULES = 4  # that the answer names


@dataclass(slots=True)
class HistoryPart:
    """A layer, or an output of one, with what its rows in the heat maps open: a table of files for each tensor."""

    name: str
    number: int
    kind: str = ""
    status: str = ""
    verdicts: list[tuple[HistoryVerdict, str]] = field(default_factory=list)
    tables: list[PageTable] = field(default_factory=list)

    @property
    def href(self) -> str:
        """Its place on the page."""
        return f"#layer={quote(safe_text(self.name), safe='')}"


def history_html(run: StoredRun[History]) -> str:
    """Return the page of a run."""
    result = run.result
    named = {name for each in result.verdicts for place in each.places for name in _names_of(place)}
    maps = history_maps(result, _MOST_ROWS, named)
    parts = _parts(result, [name for each in maps for name in each.names])
    most = decisive(result)
    ordered = sorted(result.verdicts, key=lambda each: (each is not most, each.level != "fail", each.first))
    return render_page(
        "history.html",
        {},
        scripts=("fragment.js", "plots.js", "training.js"),
        title=f"{result.files[0].label} to {result.files[-1].label} · history",
        sentences=_sentences(result),
        level=most.level if most else "",
        is_good=most is None and not result.unreadable,
        facts=_facts(result),
        warnings=result.warnings,
        notes=result.notes,
        failures=[(each.label, each.error) for each in result.unreadable],
        verdicts=[_shown(each, result, parts) for each in ordered[:_MOST_VERDICTS]],
        few=_FEW_VERDICTS,
        verdicts_left_out=max(0, len(ordered) - _MOST_VERDICTS),
        ends=(result.files[0].label, result.files[-1].label),
        maps=[shown_map(each) for each in maps],
        parts=parts,
        tables=[*_tables(result)],
        frame=FRAME,
        empty=Figure("", "", [], [], [], [], []),
        making=_making(run),
    )


def _sentences(result: History) -> list[str]:
    """Return the answer, with the rules that objected besides the one in its first sentence."""
    first, *rest = answer(result)
    others = [each.rule for each in result.verdicts if each is not decisive(result)]
    rules = some_of(list(dict.fromkeys(others)), _FEW_RULES)
    return [first, *([f"{counted(len(others), 'other verdict')}: {rules}."] if others else []), *rest]


def _names_of(place: str) -> list[str]:
    return [place or "(model)", place.rpartition(".")[0] or "(model)"]


def _facts(result: History) -> list[tuple[str, str, bool]]:
    read, count = len(result.read), len(result.files)
    how_many = "all" if read == count else f"{read:,} of them"
    facts = [("Files", f"{count:,}, {how_many} read", read < count and not result.searched)]
    facts.append(("In the order of", result.order, False))
    facts.append(("Network", result.arch or "none: judged by what the files store", False))
    optimisers = dict.fromkeys(point.key for file in result.files for point in file.optimisers)
    if optimisers:
        rates = [rate for file in result.files for point in file.optimisers for rate in point.rates]
        ends = f"lr {figure(rates[0], 3)} to {figure(rates[-1], 3)}" if rates else "no learning rate"
        facts.append(("Optimiser", f"at {', '.join(optimisers)}: {ends}", False))
    if result.inputs:
        facts.append(("Inputs", ", ".join(each.name for each in result.inputs[:8]), False))
    return facts


def _parts(result: History, names: Sequence[str]) -> dict[str, HistoryPart]:
    """Return what the heat maps have rows of, by name: layers first, then outputs."""
    parts = {name: HistoryPart(name, number) for number, name in enumerate(dict.fromkeys(names))}
    tensors: dict[str, dict[str, list[WeightPoint]]] = {}
    for row in result.rows:
        tensors.setdefault(row.layer or "(model)", {}).setdefault(row.name, []).append(row)
    outputs: dict[str, list[ActivationPoint]] = {}
    for each in result.activations:
        outputs.setdefault(each.label or "(model)", []).append(each)
    for name, part in parts.items():
        rows, seen = tensors.get(name, {}), outputs.get(name, [])
        kinds = [counted(len(rows), "tensor")] * bool(rows) + [f"output of {seen[0].kind}" for _ in seen[:1]]
        part.kind = ", ".join(kinds)
        part.tables = [_tensor_table(points, result) for points in rows.values()]
        part.tables += [page_table(f"output of {each.kind}", output_columns(result), _some(seen)) for each in seen[:1]]
    for verdict in result.verdicts:
        for name in dict.fromkeys(name for place in verdict.places for name in _names_of(place)):
            if name in parts:
                parts[name].verdicts.append((verdict, _when(verdict, result)))
    return parts


def _when(verdict: HistoryVerdict, result: History) -> str:
    return f"in {result.files[verdict.first].label}" if verdict.is_change else span_text(verdict, result)


def _tensor_table(points: Sequence[WeightPoint], result: History) -> PageTable:
    first = points[0]
    title = f"{first.name} ({shape_text(first.shape)}, {first.dtype})"
    return page_table(title, tensor_columns(result), _some(points))


def _some(points: Sequence[Any]) -> Sequence[Any]:
    """Return the first files, and the last; the CSV files have all."""
    half = _MOST_POINTS // 2
    return points if len(points) <= _MOST_POINTS else [*points[:half], *points[-half:]]


def _shown(verdict: HistoryVerdict, result: History, parts: Mapping[str, HistoryPart]) -> dict[str, Any]:
    """Return a verdict with its place on the line of files, of 1,000."""
    places = [(place, _href(place, parts)) for place in verdict.places if place]
    return {
        "verdict": verdict,
        "when": _when(verdict, result),
        "sentence": sentence_of(verdict, result),
        "name": places_text(verdict),
        "places": places[:_MOST_PLACES],
        "left_out": max(0, len(places) - _MOST_PLACES),
        "bars": _bars(verdict, result),
    }


def _bars(verdict: HistoryVerdict, result: History) -> list[tuple[float, float]]:
    """Return where each run of files with the verdict begins and how long it is, of 1,000; unread files part none."""
    read = [each.index for each in result.read]
    reaches = zip(read, [*read[1:], len(result.files)], strict=True)  # to the next file that was read
    runs = [[*run] for holds, run in groupby(reaches, lambda each: each[0] in verdict.files) if holds]
    unit = 1000 / len(result.files)
    return [(round(run[0][0] * unit, 1), round((run[-1][1] - run[0][0]) * unit, 1)) for run in runs]


def _href(place: str, parts: Mapping[str, HistoryPart]) -> str:
    return next((parts[name].href for name in _names_of(place) if name in parts), "")


def _tables(result: History) -> list[PageTable]:
    tables = [page_table("Files", file_columns(result), result.files)]
    if layers := layer_rows(result):
        tables.append(page_table("Parameters by layer", layer_columns(result), layers))
    seen = [file for file in result.files if file.predictions]
    best = [
        Column("", each.name, shown=partial(_best_class, at), words=True)
        for at, each in enumerate(result.inputs[:_MOST_POINTS])
    ]
    if seen:
        label = Column("label", "file", rank=0, words=True)
        tables.append(page_table("Best class of each input", [label, *best], seen))
    return tables


def _best_class(at: int, file: HistoryFile) -> str:
    classes = [each.classes[:1] for each in file.predictions if each.input_index == at]
    return (classes_text(classes[0]) if classes else "") or "-"


def _making(run: StoredRun[History]) -> list[tuple[str, str]]:
    record, result = run.record, run.result
    made = [("Command", record.command)] if record.command else []
    made += [(f"SHA-256 of {each.label}", each.sha256) for each in result.files[:_MOST_POINTS] if each.sha256]
    left_out = sum(bool(each.sha256) for each in result.files[_MOST_POINTS:])
    made += [("Further digests", f"{left_out:,} {are(left_out)} in files.csv")] if left_out else []
    versions = ", ".join(f"{name} {number}" for name, number in record.versions.items())
    return [*made, ("Versions", versions), ("Platform", record.platform)]
