"""How two sets of weights differ, in words and as a table."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from rich.console import RenderableType

from hookscope.render.columns import draw_table, number_text
from hookscope.render.difference_columns import WEIGHTS
from hookscope.results.differences import Differences, WeightDifference
from hookscope.text import are, counted


def weights_answer(result: Differences) -> Iterator[str]:
    """Yield in sentences how many tensors differ, which most, and other differences."""
    rows = result.weights
    changed = [row for row in rows if differs(row)]
    yield from different_networks(result)
    if not changed:
        yield f"A and B hold the same values, bit for bit, in {counted(len(rows), 'tensor')}."
    else:
        known = [(row.measures.relative_l2, row.name) for row in changed if row.measures is not None]
        finite = [each for each in known if not math.isnan(each[0])]
        most = f": ‖Δ‖/‖w‖ at most {number_text(max(finite)[0], 3)}, at {max(finite)[1]}" if finite else ""
        yield f"{len(changed):,} of {counted(len(rows), 'tensor')} differ{most}."
        if len(finite) < len(known):
            yield f"{counted(len(known) - len(finite), 'tensor')} hold NaN or Inf on one side only."
    flips = [(row.sign_flips, row.name) for row in changed if row.sign_flips]
    if flips:
        yield f"Signs are opposite in {counted(len(flips), 'tensor')}, most in {max(flips)[1]}: {max(flips)[0]:.2%}."
    dtypes = Counter(f"{row.dtype} in A, {row.dtype_b} in B" for row in rows if row.dtype != row.dtype_b)
    for form, count in dtypes.most_common(3):
        yield f"{counted(count, 'tensor')} {are(count)} {form}."
    alone = sorted(Counter(each.side for each in result.unmatched).items())
    if alone:
        yield f"Without a partner: {', '.join(f'{count:,} of {side}' for side, count in alone)}."


def different_networks(result: Differences) -> Iterator[str]:
    """Yield that A and B are different networks if fewer than half of the rows of the smaller one have a partner."""
    what = "tensor" if result.way == "weights" else "row"
    pairs = result.weights if result.way == "weights" else result.rows
    of_a, of_b = (len(pairs) + sum(each.side == side for each in result.unmatched) for side in ("A", "B"))
    if 2 * len(pairs) < min(of_a, of_b):
        by_order = sum(row.matched == "order" for row in pairs)
        alone = f", {by_order:,} of them by order and shapes alone" if by_order else ""
        pairing = f"{counted(of_a, what)} in A and {of_b:,} in B make {counted(len(pairs), 'pair')}{alone}"
        yield f"A and B are different networks: {pairing}."


def differs(row: WeightDifference) -> bool:
    """Tell whether the values differ, or cannot be compared."""
    return row.measures is None or row.measures.relative_l2 != 0


def weights_table(result: Differences, width: int, *, full: bool) -> RenderableType | None:
    """Return the tensors that differ as a table, with `full` all of them; None if there are none."""
    rows = [row for row in result.weights if full or differs(row)]
    return draw_table(WEIGHTS, rows, width, notable=[False] * len(rows), full=full) if rows else None


def gradients_answer(result: Differences) -> str:
    """Return in a sentence how many gradients differ, and which most."""
    measured = [(row.measures.relative_l2, row.label) for row in result.gradients if row.measures is not None]
    broken = [label for value, label in measured if math.isnan(value)]
    changed = [each for each in measured if each[0] != 0 and not math.isnan(each[0])]
    if not changed and not broken:
        return f"No difference shows in {counted(len(measured), 'gradient')}."
    sentences = []
    if changed:
        many = f"{len(changed):,} of {counted(len(measured), 'gradient')} differ"
        sentences.append(f"{many}: relative L2 at most {number_text(max(changed)[0], 3)}, at {max(changed)[1]}.")
    if broken:
        hold = f"{len(broken):,} of {counted(len(measured), 'gradient')} hold NaN or Inf on one side only"
        sentences.append(f"{hold}, {broken[0]} among them.")
    known = [(row.error_b, row.error, row.label) for row in result.gradients if row.error is not None and row.error_b]
    if result.reference and known:
        error, of_a, label = max(known)
        errors = f"B's largest error is relative L2 {number_text(error, 3)}, at {label}, and A's there"
        sentences.append(f"Beside {result.reference} {errors} {number_text(of_a, 3)}.")
    return " ".join(sentences)


def without_gradients(result: Differences) -> Differences:
    """Return the gradients of a result in the place of its rows, to be shown in the same way."""
    return replace(result, rows=result.gradients, gradients=(), unmatched=())
