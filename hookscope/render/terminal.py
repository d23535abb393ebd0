"""Results as Rich renderables, for people; `full` shows what is folded else. No name is read as markup."""

from collections.abc import Sequence
from pathlib import PurePath

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hookscope.render.check_report import level_counts
from hookscope.render.columns import (
    SPARKLINE_MEANING,
    draw,
    drawn_columns,
    fitted,
    fold_name,
    number_text,
    prediction_text,
    safe_line,
)
from hookscope.render.cost_text import cost_lines, dearest_sentence
from hookscope.render.document import Level
from hookscope.render.layer_columns import HIST, TOKENS, layer_table_of, module_columns, module_rows
from hookscope.results.activations import Activations, Flag, LayerRow, UncalledLayer, Verification
from hookscope.results.cost import NetworkCost
from hookscope.results.findings import Finding
from hookscope.results.gradients import GradientRow, Gradients
from hookscope.results.inputs import CLIP_STEP, InputRecord
from hookscope.results.network import Failure, ModelInfo, ModuleRow
from hookscope.text import counted, shape_text, some_of

LEVEL_STYLES = {"fail": "bold red", "warn": "yellow", "good": "green", "dim": "dim", "": ""}

# Colours of whole rows. Other flags describe a layer; these indicate problems, so folding keeps their rows.
_ALARMS: dict[Flag, str] = {
    "non-finite": "bold red",
    "all zero": "yellow",
    "constant": "yellow",
    "dead channels": "yellow",
    "unmeasured": "yellow",
}

_CALL_FOR_A_LOOK: tuple[tuple[Flag, str], ...] = (
    ("non-finite", "NaN or Inf in"),
    ("all zero", "All zero:"),
    ("constant", "The same value everywhere:"),
    ("dead channels", "Half of the channels or more are dead in"),
    ("unmeasured", "Not measured:"),
)
"""Flags that call for a look, the most severe first."""

_FEW = 3  # layers that a sentence about a flag names


def activations_answer(inspection: Activations) -> RenderableType:
    """Return the verdicts in a frame; without any, that there are none, and what calls for a look nevertheless."""
    if inspection.verdicts or inspection.failure is not None or not inspection.rows:
        return findings_panel(inspection.verdicts)
    clear = safe_line(no_findings(inspection.inputs), style="green", overflow="fold")
    return Group(clear, *(safe_line(each, "yellow", "fold") for each in flag_sentences(inspection.rows, ())))


def no_findings(inputs: Sequence[InputRecord]) -> str:
    """Return what no rule objected to; on noise, `dead-channels` has another limit.

    Inf that no later output holds, as that of a mask, is not objected to, nor are dead channels of a convolution.
    """
    is_noise = all(each.is_noise for each in inputs)
    share = "88% of its channels dead, the limit on noise" if is_noise else "80% of its channels dead"
    return f"No NaN, no Inf that spreads, no constant output, no ReLU with {share} (the layers shown, and operations)."


def flag_sentences(rows: Sequence[LayerRow], verdicts: Sequence[Finding]) -> list[str]:
    """Return a sentence on each flag that calls for a look, with the first layers that have it and no verdict."""
    judged = {place for verdict in verdicts for place in verdict.places}
    labels = {
        words: [row.label or "(model)" for row in rows if flag in row.flags and row.label not in judged]
        for flag, words in _CALL_FOR_A_LOOK
    }
    return [f"{words} {some_of(found, _FEW)}." for words, found in labels.items() if found]


def layer_table(inspection: Activations, *, width: int, full: bool = False) -> RenderableType:
    """Return the layer rows in execution order as one table under a title, fitted to `width`."""
    rows = inspection.rows
    if not rows:
        return Group(*title_lines(inspection), safe_line("No layer finished."))
    styles = [_row_style(row) for row in rows]
    drawn = drawn_columns(*layer_table_of(inspection, full=full), styles, full=full)
    headers = {column.header for column in fitted(drawn, width)}
    table = draw(drawn, width, styles, full=full)
    legend = [safe_line(SPARKLINE_MEANING, style="dim")] * (HIST in headers)
    legend += [safe_line(f"{TOKENS}: median to maximum norm of the tokens", style="dim")] * (TOKENS in headers)
    below = [*legend, *folded_lines(rows), *token_lines(inspection), *_cost_lines(inspection)]
    return Group(*title_lines(inspection), table, *below)


def token_lines(inspection: Activations) -> list[Text]:
    """Return a line on tokens of high norm and one on massive activations, with the row that has the greatest."""
    lines: list[Text] = []
    rows = [(row, row.tokens) for row in inspection.rows if row.tokens is not None]
    high = [(row, tokens) for row, tokens in rows if tokens.high]
    if high:
        row, tokens = max(high, key=lambda each: each[1].high[0].norm / each[1].median if each[1].median else 0)
        first = tokens.high[0]
        words = f"high-norm tokens in {counted(len(high), 'row')}, most in {row.label or '(model)'}: "
        words += f"{counted(tokens.high_count, 'token')}, above all {tokens.place(first.token)}"
        words += _of_input(inspection.inputs, first.input_index)
        norms = f"norm {number_text(first.norm)}, median {number_text(tokens.median)}"
        lines.append(safe_line(f"{words} ({norms})", overflow="fold"))
    massive = [(row, tokens) for row, tokens in rows if tokens.massive]
    if massive:
        row, tokens = massive[0]
        found = tokens.massive[0]
        words = f"massive activations in {counted(len(massive), 'row')}, first in {row.label or '(model)'}: "
        words += f"{number_text(found.value)} in channel {found.channel} of {tokens.place(found.token)}, "
        words += f"median magnitude {number_text(found.median)}"
        lines.append(safe_line(words, overflow="fold"))
    return lines


def _of_input(inputs: Sequence[InputRecord], index: int) -> str:
    """Return which of several inputs is meant; its number where several have its name."""
    if len(inputs) < 2:
        return ""
    name = inputs[index].name
    is_shared = sum(each.name == name for each in inputs) > 1
    return f" of {f'input {index + 1}' if is_shared else name}"


def _cost_lines(inspection: Activations) -> list[Text]:
    if inspection.cost is None:
        return []
    sentence = dearest_sentence(inspection)
    return [*cost_lines(inspection.cost), *([safe_line(sentence, style="bold")] if sentence else [])]


def folded_lines(rows: Sequence[LayerRow] | Sequence[GradientRow]) -> list[Text]:
    """Return a line on the rows that were folded into those they repeat; none without any."""
    count = sum(len(row.also) for row in rows)
    if not count:
        return []
    what = "row repeats another and is" if count == 1 else "rows repeat others and are"
    return [safe_line(f"{count:,} {what} not shown: --repeats, or repeats=True, shows all", style="dim")]


def uncalled_lines(uncalled: Sequence[UncalledLayer], *, full: bool = False) -> RenderableType:
    """Return the selected layers that never ran, grouped by reason; an empty renderable for none."""
    by_reason: dict[str, list[str]] = {}
    for layer in uncalled:
        by_reason.setdefault(layer.reason, []).append(fold_name(layer.layer or "(model)", 48))
    if not by_reason:
        return Group()
    title = f"Without a row: {counted(len(uncalled), 'selected layer')}"
    lines: list[RenderableType] = [safe_line(title, style="yellow")]
    for reason, layers in by_reason.items():
        shown = layers if full else layers[:6]
        more = f" … and {len(layers) - len(shown)} more, --full names all" if len(shown) < len(layers) else ""
        line = safe_line(f"{reason} ({len(layers)}): {', '.join(shown)}{more}", overflow="fold")
        lines.append(Padding(line, (0, 0, 0, 2)))
    return Group(*lines)


def warnings_panel(warnings: Sequence[str]) -> RenderableType:
    """Return the warnings in a frame, one paragraph each; nothing for none."""
    if not warnings:
        return Group()
    lines = Text("\n", overflow="fold").join(safe_line(f"• {warning}") for warning in warnings)
    return Panel(lines, title="Warning" if len(warnings) == 1 else "Warnings", title_align="left", style="yellow")


def findings_panel(findings: Sequence[Finding]) -> RenderableType:
    """Return findings in a frame, in the colour of the first; nothing for none."""
    if not findings:
        return Group()
    lines: list[RenderableType] = []
    for finding in findings:
        heading = f"{finding.level.upper()} {finding.rule}{f' at {finding.where}' if finding.where else ''}"
        lines.append(safe_line(heading, style=LEVEL_STYLES[finding.level], overflow="fold"))
        lines.append(Padding(safe_line(finding.message, overflow="fold"), (0, 0, 0, 2)))
    title, style = f"Verdict: {level_counts(findings)}", LEVEL_STYLES[findings[0].level]
    return Panel(Group(*lines), title=title, title_align="left", border_style=style)


def verified(verification: Verification, *, with_loss: bool) -> tuple[str, Level]:
    """Return whether hooks changed what the network computes: "verified: the same output as ...", and its level."""
    what = "output, loss and parameter gradients" if with_loss else "output"
    if verification.status == "same":
        return f"verified: the same {what} as without hooks", "good"
    if verification.status == "not repeatable":
        return f"not verified: two passes without hooks differ as well ({verification.difference})", "warn"
    return "not the same as without hooks: see the warning", "fail"


def note_lines(notes: Sequence[str]) -> RenderableType:
    """Return the notes, a paragraph each; nothing for none."""
    return Group(*(safe_line(f"note: {note}", style="dim", overflow="fold") for note in notes))


def failure_panel(failure: Failure) -> RenderableType:
    """Return where and how the forward pass raised, in a frame."""
    grid = Table.grid(padding=(0, 1))
    facts = {
        "module": f"{failure.layer or '(model)'} ({failure.kind})",
        "inputs": ", ".join(failure.input_shapes) or "none",
        "error": failure.error,
    }
    for name, words in facts.items():
        grid.add_row(name, safe_line(words, overflow="fold"))
    return Panel(grid, title="The model raised", title_align="left", style="red")


def predictions_lines(inspection: Activations | Gradients, *, full: bool = False) -> RenderableType:
    """Return the top classes of every input, a line each: "cat.jpg: Egyptian cat 0.40 · tiger cat 0.23 (softmax)"."""
    predictions = inspection.predictions
    shown = predictions if full else predictions[:10]
    if not shown:
        return Group()
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for prediction in shown:
        name = fold_name(inspection.inputs[prediction.input_index].name, 30)
        grid.add_row(safe_line(f"{name}:"), safe_line(prediction_text(prediction)))
    hidden = len(predictions) - len(shown)
    more = safe_line(f"… {counted(hidden, 'more input')}, --full shows all", style="dim")
    return Group(grid, more) if hidden else grid


def module_table(
    rows: Sequence[ModuleRow], *, width: int, title: str, cost: NetworkCost | None = None, full: bool = False
) -> RenderableType:
    """Return the modules of a network as a tree by their dotted names, with what they cost, and lines of totals."""
    styles = ["green" if row.selected and cost is None else "" for row in rows]
    drawn = drawn_columns(module_columns(rows, cost), module_rows(rows, cost), styles, full=full)
    table = draw(drawn, width, styles)
    whole = [row.total_parameter_count for row in rows if not row.layer] or [sum(row.parameter_count for row in rows)]
    operation_count = sum(row.owner is not None for row in rows)
    parts = [counted(len(rows) - operation_count, "module")]
    parts += [counted(operation_count, "operation")] if operation_count else []
    totals = " · ".join([*parts, f"{sum(row.selected for row in rows)} selected", counted(whole[0], "parameter")])
    lines = [] if cost is None else cost_lines(cost)
    if cost is not None and operation_count:
        lines.append(safe_line("Operations have no cost of their own: it counts in the module that calls them."))
    return Group(safe_line(title, style="bold"), table, safe_line(totals), *lines)


def title_lines(inspection: Activations | Gradients) -> list[Text]:
    """Return the lines above every table: model, weights, inputs, and a warning about random weights."""
    inputs = inputs_words(inspection.inputs)
    return about_lines(model_subject(inspection.model, inputs, inspection.dtype, inspection.device))


def about_lines(about: Sequence[tuple[str, Level]]) -> list[Text]:
    """Return lines with their levels, bold."""
    return [safe_line(words, style=LEVEL_STYLES[level] or "bold", overflow="fold") for words, level in about]


def model_subject(model: ModelInfo, inputs: str, dtype: str, device: str) -> list[tuple[str, Level]]:
    """Return the model, its weights and its inputs in one line, and a warning about random weights."""
    unusual = [name for name, usual in ((dtype, ("float32", "none")), (device, ("cpu",))) if name not in usual]
    lines: list[tuple[str, Level]] = [
        (" · ".join((model_words(model), f"weights: {model.weights}", inputs, *unusual)), "")
    ]
    if model.random:
        lines.append(("RANDOM WEIGHTS: this network is untrained, nothing here was learned", "fail"))
    return lines


def model_words(model: ModelInfo, *more: str) -> str:
    """Return the model and its class: "resnet18 (ResNet)", "tiny.pt (net.py:tiny, Sequential)"."""
    is_named = model.name.lower() == model.kind.lower() or model.name.endswith(f" {model.kind}")  # "x.pt (no network)"
    details = [*([] if is_named else [model.kind]), *more]
    if not details:
        return model.name
    if model.name.endswith(")"):
        return f"{model.name[:-1]}, {', '.join(details)})"
    return f"{model.name} ({', '.join(details)})"


def inputs_words(inputs: Sequence[InputRecord]) -> str:
    """Return the name of the only input, or how many there are.

    For those of one tensor file also their shape, and the sampling rate of recordings.
    """
    first, count = inputs[0], len(inputs)
    name = PurePath(first.name).name
    rates = {each.sampling_rate for each in inputs if each.sampling_rate is not None}
    if rates:
        whole = name if count == 1 else f"{count} inputs"
        is_resampled = any(step.startswith("resampled") for each in inputs for step in each.steps)
        how = "resampled" if is_resampled else "as recorded"
        return f"{whole} at {', '.join(f'{rate:,}' for rate in sorted(rates))} Hz ({how})"
    clips = [step for step in first.steps if step.startswith(CLIP_STEP)]
    if count == 1:
        frames = clips[0].partition(",")[0] if clips else ""
        return f"{name}: {frames} ({name}/* for a clip of each picture)" if clips else name
    if clips:
        return f"{count} inputs, folders as clips ('FOLDER/*' for a clip of each picture)"
    of_file = [step for step in first.steps if step.startswith(f"input 0 of {count} in the file")]
    if not of_file:
        return f"{count} inputs{' of noise' if all(each.is_noise for each in inputs) else ''}"
    hint = of_file[0].partition(" in the file")[2]
    whole = f"{hint[:-1]} of {shape_text((count, *first.shape))})" if hint else ""
    return f"{name.removesuffix('[0]')}: {count} inputs of {shape_text(first.shape)}{whole}"


def _row_style(row: LayerRow) -> str:
    return next((style for flag, style in _ALARMS.items() if flag in row.flags), "")
