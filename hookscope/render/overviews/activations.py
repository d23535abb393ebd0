"""What layers make of an input, in one picture: maps of a few layers, and all layers' figures over depth."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath

from PIL import Image, ImageDraw

from hookscope.render.axes import block_names
from hookscope.render.columns import probability_text
from hookscope.render.cost_text import dearest_sentence, whole_words
from hookscope.render.overlays import input_picture
from hookscope.render.overviews.charts import BLUE, GREY, ORANGE, PALE_BLUE, VERMILION, Chart, Marks, Series
from hookscope.render.overviews.maps import MAP_KEY, MapColumns, chosen_maps, is_strip
from hookscope.render.overviews.sheet import (
    AMBER,
    DIM,
    GREEN,
    INK,
    INNER,
    MARGIN,
    NAME,
    RED,
    SMALL,
    TEXT,
    TITLE,
    Block,
    Line,
    draw_sheet,
    framed,
    text_block,
    text_height,
    write,
)
from hookscope.render.terminal import flag_sentences, no_findings
from hookscope.results.activations import Activations, LayerRow
from hookscope.results.findings import Finding
from hookscope.results.inputs import InputRecord
from hookscope.results.network import ModelInfo
from hookscope.text import counted, input_shape_text

_WORDS = 218  # pixels: the column of the input
_LETTERS = "ABCDE"

_MOST_FINDINGS = 6
_VOLUME_AXES = 5  # N, C, D or T, H, W


def draw_activations(result: Activations) -> Image.Image:
    """Draw the overview of a run, 1,200 pixels wide: one input and its maps, or the means of up to three inputs."""
    shown = sorted({summary.input_index for summary in result.map_summaries}) or [0]
    chosen = chosen_maps([summary for summary in result.map_summaries if summary.input_index == shown[0]])
    letters = dict(zip([each.row for each in chosen], _LETTERS, strict=False))
    answer = finding_lines(result.verdicts, no_findings(result.inputs)) + flag_lines(result.rows, result.verdicts)
    blocks = [text_block(_heading(result)), text_block(answer)]
    for index in shown[: len(result.inputs)]:
        maps = [summary for summary in result.map_summaries if summary.input_index == index and summary.row in letters]
        columns = MapColumns(maps, MARGIN + _WORDS + 16, letters, with_strongest=len(result.inputs) == 1)
        blocks.append(_input_block(result, index, columns))
    words = [MAP_KEY] if letters else []
    if any(row.index in letters and len(row.shape or ()) == _VOLUME_AXES for row in result.rows):
        words.append("Of volumes and clips, the plane or frame in the middle is shown.")
    if any(is_strip(each.size) for each in chosen):
        words.append("A strip runs over the steps of a sequence, from left to right, and shows magnitudes.")
    if len(result.inputs) > len(shown):
        words.append(
            f"{counted(len(result.inputs) - len(shown), 'more input')}: the figures below are over all of them."
        )
    blocks.append(text_block([(" ".join(words), SMALL, DIM)] if words else []))
    return draw_sheet([*blocks, *depth_blocks(result.rows, letters)])


def model_line(model: ModelInfo, *more: str) -> Line:
    """Return an overview's line about the weights."""
    weights = "random weights: nothing here was learned" if model.random else f"weights: {model.weights}"
    return "   ·   ".join((weights, *more)), TEXT, DIM


def depth_blocks(rows: Sequence[LayerRow], letters: dict[int, str] | None = None) -> list[Block]:
    """Return the charts of layers over depth: magnitudes, and if there are any, zeros and dead channels.

    `letters` are what stands above a layer, by `LayerRow.index`.
    """
    if not rows:
        return []
    places = [(letters[row.index], place) for place, row in enumerate(rows) if letters and row.index in letters]
    dead = [row.activation.dead_channel_fraction or None for row in rows]
    zeros = [row.activation.zero_fraction for row in rows]
    has_zeros = any(dead) or any(zeros)
    chart = _sizes(rows)
    magnitudes = replace(chart, letters=places, names=() if has_zeros else chart.names)
    if not has_zeros:
        return [magnitudes.block]
    shares = Chart(
        title="Exact zeros and dead channels",
        series=[
            Series("zeros, share of values", zeros, PALE_BLUE, "area"),
            *([Series("dead (all zero), share of channels", dead, VERMILION, "dots")] if any(dead) else []),
        ],
        count=len(rows),
        axis="percent",
        names=chart.names,
    )
    return [magnitudes.block, shares.block]


def _sizes(rows: Sequence[LayerRow]) -> Chart:
    """Return the chart of magnitudes by layer."""
    values = [row.activation for row in rows]
    broken = [place for place, value in enumerate(values) if value.nan_count or value.inf_count]
    return Chart(
        title="Size of the values, layer by layer",
        series=[
            Series("largest |x|", [value.max_abs for value in values], ORANGE),
            Series("std", [value.std for value in values], GREY),
            Series("mean |x|", [value.mean_abs for value in values], BLUE),
        ],
        count=len(rows),
        marks=[Marks("holds NaN or Inf", broken, VERMILION)],
        names=block_names([row.layer or "(model)" for row in rows]),
    )


def input_name(record: InputRecord) -> str:
    """Return the name of an input without its folder."""
    return PurePath(record.name).name or record.name


def names_of(inputs: Sequence[InputRecord]) -> str:
    """Return the names of the first inputs, and how many more there are."""
    names = [*dict.fromkeys(input_name(each) for each in inputs)][:3]
    if len(names) == 1 and len(inputs) > 1:
        return f"{counted(len(inputs), 'input')}, {names[0]}"
    return ", ".join(names) + (f" and {len(inputs) - len(names)} more" if len(inputs) > len(names) else "")


def _heading(result: Activations) -> list[Line]:
    title = f"What the layers of {result.model.name} see in {names_of(result.inputs)}"
    lines = [(title, TITLE, INK), model_line(result.model, counted(len(result.rows), "output") + " of layers")]
    if result.cost is not None:
        lines.append((" ".join([f"{whole_words(result.cost)}.", dearest_sentence(result)]).strip(), TEXT, INK))
    return lines


def _input_block(result: Activations, index: int, columns: MapColumns) -> Block:
    picture = input_picture(result, index, _WORDS, 260 if columns.with_strongest else 160)
    words = _input_lines(result, index)
    width = _WORDS if columns.summaries else INNER
    height = (picture.height + 8 if picture else 0) + sum(text_height(*line, width) for line in words)

    def draw(image: Image.Image, top: int) -> None:
        columns.draw(image, top)
        if picture:
            framed(image, picture, MARGIN, top)
        write(ImageDraw.Draw(image), words, top + (picture.height + 8 if picture else 0), MARGIN, width)

    return Block(max(height, columns.height), draw)


def _input_lines(result: Activations, index: int) -> list[Line]:
    record = result.inputs[index]
    before = f"{record.size[0]} x {record.size[1]} pixels, " if record.size else ""
    lines = [
        (input_name(record), NAME, INK),
        (f"{before}to the network as {input_shape_text(record.shape, ' x ')}", SMALL, DIM),
    ]
    for prediction in result.predictions:
        if prediction.input_index == index:
            best = prediction.classes[:3]
            lines += [(f"{name}  {probability_text(share)}", TEXT, INK) for name, share in best]
            lines.append((f"Best classes, {prediction.reading}.", SMALL, DIM))
    if not any(summary.input_index == index for summary in result.map_summaries):
        lines.append(("No maps: no layer here puts out a map or a sequence.", SMALL, DIM))
    return lines


def finding_lines(findings: Sequence[Finding], nothing: str) -> list[Line]:
    """Return verdicts in words, the first few, or that there are none; a failure that comes first is large."""
    lines: list[Line] = []
    for finding in findings[:_MOST_FINDINGS]:
        where = f"{finding.where}: " if finding.where not in finding.message else ""
        fails = finding.level == "fail"
        size = NAME if fails and not lines else TEXT
        lines.append((f"{finding.level}  {finding.rule}  {where}{finding.message}", size, RED if fails else AMBER))
    if len(findings) > _MOST_FINDINGS:
        lines.append((f"and {counted(len(findings) - _MOST_FINDINGS, 'more finding')}", TEXT, DIM))
    return lines or [(nothing, TEXT, GREEN)]


def flag_lines(rows: Sequence[LayerRow], verdicts: Sequence[Finding]) -> list[Line]:
    """Return a line on each flag that calls for a look, with the first layers that have it and no verdict."""
    return [(each, TEXT, AMBER) for each in flag_sentences(rows, verdicts)]
