"""Where a network looks as a document: a finding, maps over the inputs, and whether they can be believed."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter

import numpy as np

from hookscope.commands.attribute.draw_maps import draw_given
from hookscope.parameters import arg
from hookscope.reporting.columns import Column, machine_columns, number_text, probability_text
from hookscope.reporting.document import Document, InputMap, Level, MappedInput, PhotographMaps, Section, Table, Text
from hookscope.reporting.run_facts import all_facts, first_name, input_names, making_of, subject_of, where_words
from hookscope.results.attributions import SANITY_LIMITS, AttributionMap, Attributions, SanityCheck, Target, input_word
from hookscope.results.concentration import Concentration, concentration
from hookscope.results.inputs import PICTURE_AXES, InputRecord, Photograph
from hookscope.text import layer_words, percent_text, shape_text, some_of, told_apart

_MOST_LABELS = 6
_LEVELS: dict[bool | None, Level] = {True: "", False: "fail", None: "warn"}


def describe_attributions(
    result: Attributions, only: int | None = None, photograph: Photograph | None = None
) -> Document:
    """Describe where a network looks in all inputs, or in the one at the index `only` with its photograph."""
    shown = range(len(result.inputs)) if only is None else [only]
    maps = [heat_map for heat_map in result.maps if only in (None, heat_map.input_index)]
    over = "photograph" if all(heat_map.values.ndim == PICTURE_AXES for heat_map in maps) else "input"
    left = [f"Left as it is: {labels}, {reason}." for reason, labels in _by_reason(result.unchanged)]
    inputs = [_mapped_input(index, result, photograph) for index in shown]
    where = "" if only is None or not result.inputs[1:] else f" in {input_names(result.inputs)[only]}"
    return Document(
        title=f"Where {result.model.name} looks{where}: {result.method}",
        subtitle="Each map has its own scale, from 0.",
        page_title=f"{result.model.name} · where it looks · {first_name(result)}",
        about=subject_of(result),
        answer=[finding_of(maps[0], result) if maps else "No input has a map.", *_looked_at(result)],
        warnings=result.warnings,
        notes=[*result.notes, *left],
        facts=all_facts(
            result,
            ("Method", result.method, False),
            *([] if result.layers else [("Looked at", "the input itself", False)]),
        ),
        sections=[
            Section("maps", f"Over the {over}", [PhotographMaps(inputs)]),
            Section("numbers", "Numbers", [Table(title="Every map", columns=map_columns(result), rows=maps)]),
            Section("belief", "Can it be believed?", [*_belief(result)]),
        ],
        making=making_of(result),
        main="maps",
    )


def finding_of(heat_map: AttributionMap, result: Attributions) -> str:
    """Return a map's finding in one sentence: the target, and where half of the map lies."""
    record = result.inputs[heat_map.input_index]
    box = concentration(heat_map, record)
    at = f" at {layer_words(heat_map.layer)}" if len(result.layers) > 1 else ""
    subject = f"{input_names(result.inputs)[heat_map.input_index]}, {_target_words(heat_map.target)}{at}: "
    if box is None and not np.isfinite(heat_map.values).all():
        return f"{subject}the {result.method} map holds NaN or infinite values."
    if box is None:
        noun = input_word(heat_map.values.ndim)
        return f"{subject}nothing in the {noun} speaks for it, the {result.method} map is nowhere above 0."
    return f"{subject}half of the {result.method} heat is {where_words(box, record)}."


def _looked_at(result: Attributions) -> Iterator[str]:
    layers = {
        f"{layer_words(layer.label)} ({layer.kind}, {shape_text(layer.grid)})": layer.reason for layer in result.layers
    }
    for reason, labels in _by_reason(layers):
        yield f"Looked at {labels}: {reason}."


def _by_reason(reasons: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for reason in dict.fromkeys(reasons.values()):
        yield reason, some_of([label for label, other in reasons.items() if other == reason], _MOST_LABELS)


def _mapped_input(index: int, result: Attributions, photograph: Photograph | None) -> MappedInput:
    def maps() -> Sequence[InputMap]:
        return [_map(place, heat, result) for place, heat in enumerate(result.maps) if heat.input_index == index]

    return MappedInput(number=index, record=result.inputs[index], maps=maps, photograph=photograph)


def _map(number: int, heat_map: AttributionMap, result: Attributions) -> InputMap:
    box = concentration(heat_map, result.inputs[heat_map.input_index])
    facts = [("score", number_text(heat_map.target.score)), ("cells", shape_text(heat_map.values.shape))]
    if box is not None:
        facts.append(("half of the heat is", where_words(box, result.inputs[heat_map.input_index])))
    values = result.input_values.get(heat_map.input_index)
    drawn = None if heat_map.values.ndim == PICTURE_AXES else partial(draw_given, values, heat_map)
    title = _target_words(heat_map.target)
    return InputMap(title=title, where=heat_map.layer, facts=facts, map=heat_map, number=number, draw=drawn)


def _target_words(target: Target) -> str:
    """Return a target with its probability: "Egyptian cat (softmax 0.40)"."""
    if target.probability is None:
        return target.label
    words = probability_text(target.probability)
    reading = f"probability {words} as returned" if target.reading == "as returned" else f"{target.reading} {words}"
    return f"{target.label} ({reading})"


def _belief(result: Attributions) -> Iterator[Table | Text]:
    if result.sanity:
        levels = [_LEVELS[check.passed] for check in result.sanity]
        yield Table(title="Checks of the maps", columns=_CHECKS, rows=result.sanity, levels=levels)
    else:
        was_tried = any(note.startswith("Sanity") for note in result.notes)
        yield Text(["No checks were made." if was_tried else f"No checks were made: {arg('sanity')} quick makes them."])
    yield Table(title="Left as they are", columns=_UNCHANGED, rows=[*result.unchanged.items()], is_extra=True)


def _verdict(check: SanityCheck) -> str:
    return "inconclusive" if check.passed is None else "ok" if check.passed else "failed"


def _measured(check: SanityCheck) -> str:
    """Return what a check measured: "probability 0.41 → 0.06", "rank correlation 0.12"."""
    if check.name == "deletion":
        after, before = told_apart((check.value, *check.compared_with))[:2]
        return f"probability {before} → {after}"
    return f"gap {percent_text(check.value)}" if check.name == "completeness" else f"rank correlation {check.value:.2f}"


def _compared_with(check: SanityCheck) -> str:
    """Return what decides about a check: "limit 0.85", "random places 0.38"."""
    if check.name == "deletion":
        return f"random places {told_apart((check.value, *check.compared_with))[2]}"
    limit = SANITY_LIMITS[check.name]
    return f"limit {limit:.0%}" if check.name == "completeness" else f"limit {limit}"


_CHECK_NAMES = {"weights": "weights shuffled", "class": "class (runner-up)"}
_CHECKS = (
    Column("name", "check", "what was changed", 0, lambda name: _CHECK_NAMES.get(name, name), words=True),
    Column("", "measured", "what was measured", 2, shown=_measured, words=True),
    Column("", "compared with", "what it is compared with", 3, shown=_compared_with, words=True),
    Column("meaning", "meaning", "what it says of the maps", 12, words=True, max_width=60),
    Column("", "verdict", "what came of it", 1, shown=_verdict, words=True),
)

_UNCHANGED = (
    Column("", "layer", "activation without a changed rule", 0, shown=lambda row: row[0], words=True),
    Column("", "reason", "why", 1, shown=lambda row: row[1], words=True),
)


def map_columns(result: Attributions) -> tuple[Column, ...]:
    """Return the columns of `result.maps`."""
    readings = {heat_map.target.reading for heat_map in result.maps if heat_map.target.probability is not None}
    reading = next(iter(readings)) if len(readings) == 1 and "as returned" not in readings else "prob."
    title = "input" if result.inputs[1:] else ""
    names, target = input_names(result.inputs), attrgetter("target")
    whole = f"({input_word(result.maps[0].values.ndim)})" if result.maps else ""

    def record_of(heat_map: AttributionMap) -> InputRecord:
        return result.inputs[heat_map.input_index]

    def name_of(heat_map: AttributionMap) -> str:
        return names[heat_map.input_index]

    def half(heat_map: AttributionMap) -> Concentration | None:
        return concentration(heat_map, record_of(heat_map))

    return (
        Column("input", title, "input", 11, value=lambda row: record_of(row).name, shown=name_of, words=True),
        Column("label", "target", "class or output that is explained", 0, words=True, fold=40).on(target, key="target"),
        Column("input_index"),
        *(Column(key).on(target) for key in ("index", "box", "reading")),
        Column("score", "score", "score of the target", 2).on(target),
        Column("probability", reading, "probability of the target", 1, probability_text, usual="-").on(target),
        Column("layer", "layer", "layer whose map it is", 3, lambda layer: layer or whole, words=True),
        Column("shape", "grid", "cells of the map", 12, str, lambda row: shape_text(row.values.shape)),
        *machine_columns("extent", "size"),
        *(Column(key, value=partial(_end, at)) for at, key in enumerate(("low", "high"))),
        *(Column(key).on(half, key=f"half_{name}") for name, key in (("share", "share"), ("where", "words"))),
        Column(
            "",
            "half of the heat",
            "the smallest part of the input that holds half of the map",
            4,
            shown=lambda box: f"{percent_text(box.share, 0)} {box.words}",
            words=True,
        ).on(half, blank=""),
    )


def _end(at: int, heat_map: AttributionMap) -> float | None:
    return None if heat_map.range is None else heat_map.range[at]
