from collections.abc import Sequence

import pytest

from hookscope.commands.conversion import summary
from hookscope.results.comparison import Change, Comparison, Prediction
from hookscope.results.statistics import TensorStatistics
from tests.reporting.conftest import printed


def change(label: str, before: float | None, after: float | None, subject: str = "grad_output") -> Change:
    sides = (None if l2 is None else TensorStatistics((4,), "float32", 4, l2=l2, mean=l2 / 2) for l2 in (before, after))
    return Change(label, subject, *sides)


def comparison(
    changes: Sequence[Change],
    losses: tuple[float, float] | None = (2.0, 1.5),
    predictions: tuple[tuple[Prediction, ...], tuple[Prediction, ...]] = ((), ()),
) -> Comparison:
    return Comparison(("relu:grad:clamp(min=0)",), losses, predictions, tuple(changes), 120)


def lines(of: Comparison, *, width: int = 80, full: bool = False) -> list[str]:
    return [line.rstrip() for line in printed(summary(of, width=width, full=full), width).splitlines()]


def test_a_row_says_what_it_was_and_what_it_is() -> None:
    shown = lines(comparison([change("layer1.conv", 4, 1), change("fc.bias", 3, 0, "gradient")]))
    assert shown[0] == "2 of 120 rows changed."
    assert shown[1].split() == ["changed", "quantity", "L2", "ratio", "mean"]
    assert " ".join(shown[3].split()) == "layer1.conv grad_output 4.000 → 1.000 0.2500 2.000 → 0.5000"
    assert " ".join(shown[4].split()) == "fc.bias gradient 3.000 → 0 0 1.500 → 0"
    assert shown[5] == "Effect of relu:grad:clamp(min=0)"
    assert shown[-1] == "  loss 2.000 → 1.500"


def test_every_kind_of_row_is_summed_up_in_a_line() -> None:
    changes = [change("a", 4, 1), change("0", 1, 3), change("c", 0, 3), change("a.w", 2, 1, "gradient")]
    changes += [change("new", None, 1, "activation")]
    shown = lines(comparison(changes, losses=None))
    assert shown[-3:] == [
        "  grad_output: 3 rows, L2 ratio 0.2500 (a) to 3.000 (layer 0)",
        "  gradient: 1 row, L2 ratio 0.5000",
        "  activation: 1 row",
    ]


def test_of_many_rows_those_that_changed_most_are_shown_in_the_order_of_the_run() -> None:
    factors = [1 + number / 100 for number in range(50)]
    factors[7], factors[30], factors[41] = 0.001, 1000.0, 0.0
    changes = [change(f"row{number}", 1, factor) for number, factor in enumerate(factors)]
    folded, full = (lines(comparison(changes), full=full) for full in (False, True))
    rows = [line.split()[0] for line in folded if line.startswith("row")]
    # 20 in all: the three outliers, and 17 of the largest of the others, which grow with their number.
    largest = [number for number in range(49, 0, -1) if number not in (7, 30, 41)][:17]
    assert rows == [f"row{number}" for number in sorted({7, 30, 41, *largest})]
    assert "50 of 120 rows changed." in folded
    assert "… 30 rows not shown, --full shows all" in folded
    assert sum(line.startswith("row") for line in full) == 50


def test_classes_are_shown_on_a_line_each_without_and_with_edits() -> None:
    before = Prediction(0, (285, 282), ("Egyptian cat", "tiger cat"), (0.75, 0.25))
    after = Prediction(0, (3, 4), (), (0.5, 0.5))
    shown = lines(comparison([], predictions=((before,), (after,))))
    assert shown[-2:] == [
        "  input 0 without edits: Egyptian cat 0.75 · tiger cat 0.25 (softmax)",
        "  input 0 with edits: class 3 0.50 · class 4 0.50 (softmax)",
    ]


def test_classes_that_stay_the_same_are_one_line() -> None:
    same = Prediction(0, (3,), (), (0.5,))
    assert lines(comparison([], predictions=((same,), (same,))))[-1] == (
        "  input 0: the same top classes, with the same probabilities"
    )


def test_classes_of_the_first_inputs_alone_are_shown_unless_all_are_asked_for() -> None:
    before, after = (tuple(Prediction(number, (cls,), (), (1.0,)) for number in range(12)) for cls in (0, 1))
    both = comparison([], predictions=(before, after))
    folded, full = (lines(both, full=full) for full in (False, True))
    assert folded[-1].endswith("more, --full shows all")
    assert sum("without edits:" in line for line in folded) < 10
    assert sum("without edits:" in line for line in full) == 12


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    name = "encoder.layers.encoder_layer_11.self_attention.out_proj.weight"
    changes = [change(name + str(number), 1.2345e-7, 2.3456e-9 * number, "gradient") for number in range(30)]
    predictions = tuple(Prediction(0, (1, 2, 3), (name, name, name), (0.4, 0.3, 0.2)) for _ in range(2))
    shown = lines(comparison(changes, predictions=(predictions[:1], predictions[1:])), width=width)
    assert max(map(len, shown)) <= width
