"""What the picture of a check has of its layers: the verdicts in words, and all layers' figures over depth."""

from collections.abc import Sequence
from dataclasses import replace

from hookscope.render.axes import block_names
from hookscope.render.overviews.charts import BLUE, GREY, ORANGE, PALE_BLUE, VERMILION, Chart, Marks, Series
from hookscope.render.overviews.sheet import AMBER, DIM, GREEN, NAME, RED, TEXT, Block, Line
from hookscope.results.activations import LayerRow
from hookscope.results.findings import Finding
from hookscope.results.network import ModelInfo
from hookscope.text import counted

_MOST_FINDINGS = 6


def model_line(model: ModelInfo, *more: str) -> Line:
    """Return an overview's line about the weights."""
    weights = "random weights: nothing here was learned" if model.random else f"weights: {model.weights}"
    return "   ·   ".join((weights, *more)), TEXT, DIM


def depth_blocks(rows: Sequence[LayerRow], ground: Sequence[int] = ()) -> list[Block]:
    """Return the charts of layers over depth: magnitudes, and if there are any, zeros and dead channels.

    Args:
        rows: In the order of the layers.
        ground: Positions of the layers with a tinted ground.
    """
    if not rows:
        return []
    dead = [row.activation.dead_channel_fraction or None for row in rows]
    zeros = [row.activation.zero_fraction for row in rows]
    has_zeros = any(dead) or any(zeros)
    chart = _sizes(rows)
    magnitudes = replace(chart, ground=ground, names=() if has_zeros else chart.names)
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
        ground=ground,
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
