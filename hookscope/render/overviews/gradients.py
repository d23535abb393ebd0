"""Where gradients go, in one picture: the verdicts in words, and gradients of outputs and parameters over depth."""

from collections.abc import Sequence

from PIL import Image

from hookscope.render.axes import block_names
from hookscope.render.columns import number_text
from hookscope.render.overlays import input_picture
from hookscope.render.overviews.activations import finding_lines, model_line, names_of
from hookscope.render.overviews.charts import BLUE, GREY, ORANGE, VERMILION, Chart, Marks, Series
from hookscope.render.overviews.sheet import INK, TEXT, TITLE, Block, Line, draw_sheet, text_block
from hookscope.results.gradients import GradientRow, Gradients, ParameterRow

_PICTURE = 150  # pixels a side, the input


def draw_gradients(result: Gradients) -> Image.Image:
    """Draw the overview of a run, 1,200 pixels wide."""
    outputs = [row for row in result.gradients if row.role == "output"]
    failing = {verdict.where for verdict in result.verdicts if verdict.level == "fail"}
    picture = input_picture(result, 0, _PICTURE, _PICTURE) if result.inputs else None
    words = finding_lines(result.verdicts, "No rule objects to the gradients.")
    blocks = [text_block(_heading(result)), text_block(words, picture)]
    if outputs:
        blocks.append(_flow("Gradient of the loss by each layer's output", outputs, failing))
    if result.parameters:
        blocks.append(_flow("Gradient of the loss by each parameter", result.parameters, failing))
    return draw_sheet(blocks)


def _heading(result: Gradients) -> list[Line]:
    lines = [(f"Gradients of {result.model.name}, {names_of(result.inputs)}", TITLE, INK)]
    if result.loss is not None:
        target = f", target: {result.loss.target}" if result.loss.target else ""
        lines.append((f"loss {result.loss.name} = {number_text(result.loss.value)}{target}", TEXT, INK))
    return [*lines, model_line(result.model, f"{result.mode} mode")]


def _flow(title: str, rows: Sequence[GradientRow | ParameterRow], failing: set[str]) -> Block:
    values = [row.gradient for row in rows]
    broken = [place for place, value in enumerate(values) if value.nan_count or value.inf_count]
    without = [place for place, row in enumerate(rows) if row.status in ("no gradient path", "not reached")]
    zero = [place for place, row in enumerate(rows) if row.status == "zero"]
    return Chart(
        title=title,
        series=[
            Series("largest |g|", [value.max_abs for value in values], ORANGE),
            Series("mean |g|", [value.mean_abs for value in values], BLUE),
        ],
        count=len(rows),
        marks=[
            Marks("exactly 0", zero, VERMILION, "triangle"),
            Marks("no gradient", without, GREY, "triangle"),
            Marks("holds NaN or Inf", broken, VERMILION),
        ],
        ground=[place for place, row in enumerate(rows) if row.label in failing],
        names=block_names([getattr(row, "layer", row.label) or "(model)" for row in rows]),
    ).block
