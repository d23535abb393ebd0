"""Why inputs are classified wrong, in sentences, and as strips of pictures: the input, and its neighbours."""

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from PIL import Image

from hookscope.commands.survey.draw_crops import square_tile
from hookscope.reporting.columns import number_text
from hookscope.reporting.document import Picture, Pictures, Section, Text
from hookscope.results.failures import FailedInput, Failures, OutsideRange
from hookscope.results.survey import Survey, WrongStrip
from hookscope.text import counted, percent_text, printable

TILE, GAP = 96, 4
_WHITE = (255, 255, 255)

_MOST_NAME = 60

_OUTSIDE = {
    "inverted": ("inverted", "correlation with the mean picture"),
    "dark": ("dark", "mean"),
    "bright": ("bright", "mean"),
    "flat": ("flat", "standard deviation"),
    "harsh": ("harsh", "standard deviation"),
    "narrow": ("of a narrow crop", "width over height"),
    "wide": ("of a wide crop", "width over height"),
    "other layout": ("of another layout", "correlation with the mean picture"),
}


def describe_failures(failures: Failures | None, strips: Sequence[WrongStrip]) -> Section:
    """Describe the wrong inputs, each with possible reasons and its nearest neighbours; the strips are their pictures.

    If no input has a reason, the title says so.
    """
    if failures is None or not failures.inputs:
        return Section("wrong", "", [])
    reasons = [_reasons(miss, failures) for miss in failures.inputs]
    none = [] if any(reasons) else [f"no reason found{' in what could be looked at' if failures.remarks else ''}"]
    title = ": ".join(["Wrong inputs, most confident first", *none])
    files = {strip.index: strip.path for strip in strips}
    pictures = [
        Picture(
            name=_heading(miss),
            caption="the input and those with near features",
            file=files.get(place, ""),
            lines=[*(why if why or none else ["No reason found."]), *_neighbours(miss, failures)],
        )
        for place, (miss, why) in enumerate(zip(failures.inputs, reasons, strict=True))
    ]
    has_near = any(miss.neighbours for miss in failures.inputs)
    legend = "On the left the wrong input, then correctly classified inputs with the nearest features."
    shown = Pictures(title, legend if has_near and files else "", pictures)
    return Section("wrong", title, [shown, Text(_method_words(failures))], "Wrong inputs")


def _heading(miss: FailedInput) -> str:
    """Return "data/red/swapped.png: red (0.1%), taken for green (99.9%)"."""
    label, other = printable(miss.label, _MOST_NAME), printable(miss.taken_for, _MOST_NAME)
    if miss.probability is None or miss.label_probability is None:
        return f"{printable(miss.name)}: {label}, scores with NaN or Inf"
    has, taken = percent_text(miss.label_probability), percent_text(miss.probability)
    return f"{printable(miss.name)}: {label} ({has}), taken for {other} ({taken})"


def _reasons(miss: FailedInput, failures: Failures) -> list[str]:
    sentences = []
    if miss.outside:
        traits = ", ".join(map(_outside, miss.outside))
        sentences.append(f"Unlike all {failures.compared_count:,} that are classified right, its picture is {traits}.")
    if miss.leaves_at:
        where, p = printable(miss.leaves_at, _MOST_NAME), number_text(miss.p_value, 2)
        if miss.is_like_other:
            other = printable(miss.taken_for, _MOST_NAME)
            sentences.append(
                f"From {where} on it is unlike its class (p {p}), and nowhere unlike {other}: its label may be wrong, "
                "or it shows both."
            )
        else:
            sentences.append(f"It leaves its class at {where} (p {p}).")
    return sentences


def _neighbours(miss: FailedInput, failures: Failures) -> Iterator[str]:
    """Yield "Nearest at pool: 1.png (green), …"; nothing without neighbours."""
    if miss.neighbours:
        near = ", ".join(
            f"{PurePath(printable(peer.input)).name} ({printable(peer.label, _MOST_NAME)})" for peer in miss.neighbours
        )
        yield f"Nearest at {printable(failures.neighbour_row, _MOST_NAME)}: {near}."


def _method_words(failures: Failures) -> list[str]:
    """Return how often ordinary inputs get a reason by chance, and what was not looked at."""
    words = []
    if failures.range_rate <= failures.departure_rate:
        words.append(
            f"At most {percent_text(failures.range_rate)} of ordinary inputs lie outside a range of the "
            f"{failures.compared_count:,} that are classified right."
        )
    if failures.sampled_count:
        words.append(
            f"At most {failures.departure_rate:.0%} of ordinary inputs are reported to leave their class; "
            f"{counted(failures.sampled_count, 'input')} of these classes ran again."
        )
    return [*words, *failures.remarks]


def _outside(out: OutsideRange) -> str:
    word, measure = _OUTSIDE[out.kind]
    value, low, high = (number_text(number, 3) for number in (out.value, out.low, out.high))
    return f"{word} ({measure} {value}, theirs {low} to {high})"


def wrong_strips(result: Survey) -> Iterator[tuple[WrongStrip, Image.Image]]:
    """Yield a strip for each wrong input that is a picture: the input, then its neighbours."""
    failures = result.failures
    if failures is None or result.pictures is None:
        return
    wanted = sorted({name for row in failures.inputs for name in (row.name, *(peer.input for peer in row.neighbours))})
    pictures = {name: square_tile(Image.fromarray(pixels), TILE, _WHITE) for name, pixels in result.pictures(wanted)}
    for place, miss in enumerate(failures.inputs):
        tiles = [pictures.get(name) for name in (miss.name, *(peer.input for peer in miss.neighbours))]
        if tiles[0] is None:
            continue
        strip = Image.new("RGB", (len(tiles) * (TILE + GAP) - GAP, TILE), _WHITE)
        for column, tile in enumerate(tiles):
            if tile is not None:
                strip.paste(tile, (column * (TILE + GAP), 0))
        yield WrongStrip(place, f"wrong/{place}.jpg"), strip
