"""Why a checkpoint fails, in one picture: the findings in words, the layers they name, and all layers over depth."""

from collections.abc import Sequence

from PIL import Image

from hookscope.render.check_report import level_counts, readable, untold_error, verdict
from hookscope.render.overviews.activations import depth_blocks, model_line
from hookscope.render.overviews.gradients import finding_lines
from hookscope.render.overviews.maps import MAP_KEY, MOST_STAGES, MapColumns
from hookscope.render.overviews.sheet import DIM, MARGIN, RED, SMALL, TEXT, TITLE, Block, draw_sheet, text_block
from hookscope.results.activations import LayerRow, MapSummary
from hookscope.results.check import CheckReport
from hookscope.text import counted


def draw_check(
    report: CheckReport, rows: Sequence[LayerRow], failing: Sequence[LayerRow], summaries: Sequence[MapSummary]
) -> Image.Image:
    """Draw the overview of the evidence, 1,200 pixels wide.

    Args:
        report: On a checkpoint that fails.
        rows: Of the forward pass, as far as it came.
        failing: Those that findings of level "fail" are about.
        summaries: Of those rows for one input, as far as they have maps.
    """
    report = readable(report)
    labels = {row.label for row in failing}
    ground = [place for place, row in enumerate(rows) if row.label in labels]
    error = untold_error(report)
    told = [(error, TEXT, RED)] if error else []
    findings = sorted(report.findings, key=lambda each: each.level != "fail")
    lines = [*told, *(finding_lines(findings, "") if findings else ())]
    verdict_words = ": ".join(filter(None, (verdict(report), level_counts(report.findings))))
    heading = [(f"{report.checkpoint} {verdict_words}", TITLE, RED)]
    if report.model is not None:
        heading.append(model_line(report.model))
    return draw_sheet([text_block(heading), text_block(lines), *_maps(summaries), *depth_blocks(rows, ground=ground)])


def _maps(summaries: Sequence[MapSummary]) -> list[Block]:
    """Return the maps of the first failing layers."""
    if not summaries:
        return []
    columns = MapColumns(summaries[:MOST_STAGES], MARGIN)
    left_out = len(summaries) - len(columns.summaries)
    more = f"{counted(left_out, 'more failing output')} with maps: see the grids. " if left_out else ""
    return [Block(columns.height, columns.draw), text_block([(f"{more}{MAP_KEY}", SMALL, DIM)])]
