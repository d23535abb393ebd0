"""The outputs whose values come nearest to float16's limit, as bars that end there."""

import math
from operator import itemgetter

from PIL import Image, ImageDraw

from hookscope.commands.survey.columns import FLOAT16, TIGHT, row_name
from hookscope.reporting.columns import number_text
from hookscope.reporting.lettering import font, line_height
from hookscope.reporting.overviews.charts import BLUE
from hookscope.reporting.overviews.sheet import AMBER, INK, INNER, PAPER, RED, SMALL, fitting
from hookscope.results.headroom import FORMATS
from hookscope.results.survey import Survey
from hookscope.text import figure

_MOST_BARS = 10
_GROUND = (84, 91, 100)
_NAMES, _WORDS, _BAR = 330, 200, 12  # pixels: left of the bars, right of them, their height


def draw_limit_bars(result: Survey) -> Image.Image | None:
    """Draw the largest magnitudes as shares of the limit, on a logarithmic scale from 1; None without any."""
    limit, step, whole = FORMATS[FLOAT16].greatest, line_height(SMALL) + 6, INNER - _NAMES - _WORDS
    peaks = [(peak, row_name(row)) for row in result.rows if (peak := row.activation.max_abs)]
    shown = sorted(peaks, key=itemgetter(0), reverse=True)[:_MOST_BARS]
    if not shown:
        return None
    image = Image.new("RGB", (INNER, len(shown) * step), PAPER)
    pen = ImageDraw.Draw(image)
    for place, (peak, name) in enumerate(shown):
        top, upper = place * step, place * step + (line_height(SMALL) - _BAR) // 2
        words = "above it" if peak > limit else f"{figure(limit / peak, 3)}\N{MULTIPLICATION SIGN} below it"
        share = min(math.log(max(peak, 1.0)) / math.log(limit), 1.0)
        colour = RED if peak > limit else AMBER if peak > limit / TIGHT else BLUE
        pen.text((0, top), fitting(name, SMALL, _NAMES - 16), INK, font(SMALL))
        pen.rectangle([_NAMES, upper, _NAMES + whole, upper + _BAR], _GROUND)
        pen.rectangle([_NAMES, upper, _NAMES + max(2, round(whole * share)), upper + _BAR], colour)
        text = fitting(f"{number_text(peak, 3)}, {words}", SMALL, _WORDS - 12)
        pen.text((_NAMES + whole + 12, top), text, INK, font(SMALL))
    return image
