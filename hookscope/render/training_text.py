"""A watched training as text: sentences on the first verdict and the end, then a table of verdicts."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from rich.console import RenderableType

from hookscope.render.columns import Column, draw_table, integer_text, number_text, safe_line
from hookscope.render.survey_text import rows_used
from hookscope.render.terminal import LEVEL_STYLES
from hookscope.results.training import TrainingLog, TrainingStep, TrainingVerdict
from hookscope.text import are, counted, some_of

CLOSED = "closed"
PROCESS_ENDED = "the process ended"
"""`TrainingEnd.reason` of a training that was watched to its end."""

# The end of a sentence: in names of layers, no space follows a dot.
_SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z0-9'])")
_LOWERED = ("The ", "A ", "An ", "All ", "Its ", "No ", "One ")

_FEW_PLACES = 2
_FEW_STEPS = 5
_FEW_SPANS = 3


@dataclass(frozen=True, slots=True)
class Objection:
    """The verdicts of one rule that began at one step.

    Attributes:
        verdicts: The verdicts, one for each place.
        ended: The step at which the verdict ended, by place; without the verdicts that did not end.
    """

    verdicts: tuple[TrainingVerdict, ...]
    ended: Mapping[str, int]

    @property
    def first(self) -> TrainingVerdict:
        """The verdict that came first."""
        return self.verdicts[0]

    @property
    def places(self) -> tuple[str, ...]:
        """The places of the verdicts, in order."""
        return tuple(each.where for each in self.verdicts)

    @property
    def level(self) -> Literal["fail", "warn"]:
        """The level of the rule."""
        return self.first.level

    @property
    def began(self) -> int:
        """The step at which the verdicts began."""
        return self.first.step

    @property
    def over(self) -> int | None:
        """The step at which the last of the verdicts ended; None if one did not end."""
        return max(self.ended.values()) if len(self.ended) == len(self.verdicts) else None


def objections(log: TrainingLog) -> list[Objection]:
    """Return the objections in order; verdicts of one rule that begin at one step are one objection.

    A resumed training begins its verdicts again: a verdict that was open goes on.
    """
    found: dict[tuple[str, int], tuple[list[TrainingVerdict], dict[str, int]]] = {}
    since: dict[tuple[str, str], int] = {}
    for verdict in sorted(log.verdicts, key=lambda each: each.step):
        place = (verdict.rule, verdict.where)
        if verdict.state == "began" and place not in since:
            since[place] = verdict.step
            found.setdefault((verdict.rule, verdict.step), ([], {}))[0].append(verdict)
        elif verdict.state == "ended" and place in since:
            found[verdict.rule, since.pop(place)][1][verdict.where] = verdict.step
    return [Objection(tuple(began), ended) for began, ended in found.values()]


def last_step(log: TrainingLog) -> int:
    """Return the last step in the log; 0 for none."""
    seen = (log.steps, log.watched, log.verdicts, log.ends)
    return max((each.step for entries in seen for each in entries), default=0)


def first_step(log: TrainingLog) -> int:
    """Return the first step in the log; 1 for none."""
    seen = (log.steps, log.watched, log.verdicts)
    return min((each.step for entries in seen for each in entries), default=1)


def steps_in_order(log: TrainingLog) -> list[TrainingStep]:
    """Return the steps in order of their numbers."""
    return sorted(log.steps, key=lambda each: each.step)


def decisive(found: Sequence[Objection]) -> Objection | None:
    """Return the objection to look at first: the earliest failure, or else the earliest warning."""
    return min(found, key=lambda each: (each.level != "fail", each.began), default=None)


def finding(log: TrainingLog) -> str:
    """Return the result of the rules in one sentence."""
    found = objections(log)
    first = decisive(found)
    if first is None:
        steps = len(log.steps) or len(log.watched)
        return f"No rule objected in {counted(steps, 'step')}." if steps else "No step was recorded."
    sentence, _ = _sentences(first)
    return sentence


def _sentences(objection: Objection) -> tuple[str, str]:
    """Return the first sentence of a message, with step and place, and the other sentences."""
    message, where = objection.first.message, objection.first.where
    ends = _SENTENCE_END.search(message)
    first, rest = (message[: ends.end()], message[ends.end() :].strip()) if ends else (message, "")
    if first.startswith(_LOWERED):
        first = first[0].lower() + first[1:]
    place = f" {where}:" if where and where not in message else ""
    more = len(objection.places) - 1
    if more:
        rest = f"The same holds at {counted(more, 'more place')}. {rest}".rstrip()
    return f"At step {objection.began:,},{place} {first}", rest


def answer(log: TrainingLog) -> list[str]:
    """Return sentences on the first objection, others, skipped steps, rows used, edits, and the end of the training."""
    found = objections(log)
    first = decisive(found)
    sentences = [finding(log)]
    if first is not None and (rest := _sentences(first)[1]):
        sentences.append(rest)
    if first is not None and first.over is not None:
        sentences.append(f"It passed again at step {first.over:,}.")
    others = [each for each in found if each is not first]
    if others:
        rules = some_of(list(dict.fromkeys(each.first.rule for each in others)), _FEW_STEPS)
        sentences.append(f"{counted(len(others), 'other verdict')}: {rules}.")
    skipped = [each.step for each in steps_in_order(log) if each.skipped]
    if skipped:
        numbers = some_of([f"{step:,}" for step in skipped], _FEW_STEPS)
        sentences.append(f"The optimiser skipped {counted(len(skipped), 'step')}: {numbers}.")
    return [*sentences, *_rows_used(log), *_edits(log), *_ending(log)]


def _rows_used(log: TrainingLog) -> Iterator[str]:
    """Yield a sentence for each embedding and codebook of the last step in which any was watched."""
    last = max((each for each in log.watched if each.tables), key=lambda each: each.step, default=None)
    if last is not None:
        yield from rows_used(last.tables, f"at step {last.step:,}")


def _edits(log: TrainingLog) -> list[str]:
    """Return a sentence for every edit, with the steps in which it was in force."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for step in steps_in_order(log):
        for text, _ in step.edits:
            known = spans.setdefault(text, [])
            if known and known[-1][1] == step.step - 1:
                known[-1] = (known[-1][0], step.step)
            else:
                known.append((step.step, step.step))
    sentences = [
        f"Edited by {text} in {some_of([_span_text(*span) for span in found], _FEW_SPANS)}."
        for text, found in spans.items()
    ]
    left_out = len(sentences) - _FEW_STEPS
    if left_out > 0:
        sentences[_FEW_STEPS:] = [f"{counted(left_out, 'other edit')} {are(left_out)} in watch.jsonl."]
    return sentences


def _span_text(first: int, last: int) -> str:
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def _ending(log: TrainingLog) -> list[str]:
    last = f"step {last_step(log):,}"
    if len(log.ends) < len(log.starts):
        cut = " Its last line is incomplete." if log.cut_short else ""
        return [f"The record stops at {last} without an end: the training still runs, or was killed.{cut}"]
    if log.ends and log.ends[-1].reason == PROCESS_ENDED:
        return [f"The process ended after {last}."]
    if log.ends and log.ends[-1].reason != CLOSED:
        return [f"It ended after {last} ({log.ends[-1].reason.rstrip('.')})."]
    return []


def training_summary(log: TrainingLog, *, width: int, full: bool = False) -> Iterator[RenderableType]:
    """Yield the output of the command: the answer in sentences, then a table of verdicts."""
    for number, sentence in enumerate(answer(log)):
        yield safe_line(sentence, style="" if number else "bold", overflow="fold")
    found = objections(log)
    if found:
        yield _table(found, width, full=full)


def _table(found: Sequence[Objection], width: int, *, full: bool) -> RenderableType:
    styles = [LEVEL_STYLES[each.level] for each in found]
    return draw_table(_OBJECTIONS, found, width, styles, [each is decisive(found) for each in found], full=full)


def places_text(objection: Objection) -> str:
    """Return the places of an objection: "fc1.weight, fc1.bias and 58 more"."""
    return some_of([where or "(training)" for where in objection.places], _FEW_PLACES)


def value_text(value: float | None) -> str:
    """Return a value or a limit as text; whole numbers, which are counts, have no decimals."""
    return f"{value:,.0f}" if value is not None and value.is_integer() and abs(value) < 1e6 else number_text(value)


_OBJECTIONS = (
    Column("began", "step", "step in which it began", 1, integer_text),
    Column("over", "until", "step in which it passed again", 4, integer_text),
    Column("level", "level", "level of the rule", 3, words=True),
    Column("", "rule", "rule that objects", 2, value=attrgetter("first.rule"), words=True),
    Column("", "where", "what it is about", 0, shown=places_text, words=True),
    Column("", "value", "first value", 5, value_text, attrgetter("first.value")),
    Column("", "limit", "limit of the rule", 6, value_text, attrgetter("first.limit")),
)
