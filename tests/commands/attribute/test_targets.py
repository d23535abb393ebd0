"""Targets: how they are said, and the numbers that they are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hookscope.commands.attribute.scores import batch_targets, probabilities, runner_up
from hookscope.commands.attribute.targets import Wanted, read_targets
from hookscope.errors import HookscopeError, ModelError, ModelNotFoundError, UsageError
from hookscope.inputs.batches import Batch
from hookscope.results.inputs import InputRecord

NAMES = ("tabby, tabby cat", "tiger cat", "black-and-tan coonhound", "tan", "crane", "crane", "dog")


def inputs(count: int, *shapes: tuple[int, ...]) -> Batch:
    records = [InputRecord("a.png", None, None, shape, ()) for shape in shapes or [()] * count]
    return Batch((), tuple(range(count)), tuple(records))


def said(*texts: str, names: Sequence[str] = NAMES) -> list[tuple[int | None, int | None, int | None]]:
    return [(read_target.index, read_target.against, read_target.box) for read_target in read_targets(texts, names)]


def test_classes_are_names_synonyms_or_indices() -> None:
    assert said("tiger cat") == said("Tiger Cat ") == said("1") == [(1, None, None)]
    assert said("tabby") == said("tabby cat") == said("tabby, tabby cat") == [(0, None, None)]


def test_several_come_with_commas_or_one_by_one_and_names_may_hold_commas() -> None:
    assert said("tiger cat,dog") == said("tiger cat", "dog") == [(1, None, None), (6, None, None)]
    assert said("dog,tabby, tabby cat,1") == [(6, None, None), (0, None, None), (1, None, None)]


def test_what_is_said_twice_comes_once() -> None:
    assert said("dog,6", "dog") == [(6, None, None)]


def test_a_contrast_is_two_classes_with_a_hyphen_and_names_may_hold_hyphens() -> None:
    assert said("tabby-tiger cat") == [(0, 1, None)]
    assert said("black-and-tan coonhound") == [(2, None, None)]
    assert said("black-and-tan coonhound-dog") == [(2, 6, None)]
    assert said("6-0") == [(6, 0, None)]


def test_boxes_are_counted() -> None:
    assert said("box:0, BOX:12") == [(None, None, 0), (None, None, 12)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tigre cat", "The model knows no class 'tigre cat'. Nearest: 'tiger cat'"),
        ("dog-dog", "compares a class with itself"),
        ("crane", "Several classes are named 'crane': give one of 4, 5."),
        ("box:", "The model knows no class 'box:'"),
    ],
)
def test_what_is_no_target_is_refused_with_what_is_near(text: str, message: str) -> None:
    with pytest.raises(UsageError) as info:
        read_targets([text], NAMES)
    assert message in str(info.value)
    assert "\n" not in str(info.value)


def test_without_names_only_indices_are_known() -> None:
    assert said("7,3-2", names=()) == [(7, None, None), (3, 2, None)]
    with pytest.raises(UsageError, match="not an index from 0, and the model has no class names"):
        read_targets(["cat"], ())


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "targets.py"
    path.write_text(
        "def pair(output): return output[:, 0] + output[:, 1]\n"
        "def column(output): return output[:, :1]\n"
        "def whole(output): return output.sum()\n"
        "def number(output): return 3\n"
        "def counts(output): return output.argmax(1)\n"
        "def broken(output): raise KeyError('x')\n"
        "thing = 4\n"
    )
    return path


def test_a_function_of_the_output_is_a_target(functions: Path) -> None:
    output = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    wanted = read_targets([f"{functions}:pair", f"{functions}:column"], ())
    pair, column = batch_targets(output, inputs(2), wanted, None, (), None)
    assert pair.score(output).tolist() == [3, 9]
    assert column.score(output).tolist() == [1, 4]
    assert [(target.label, target.score, target.index) for target in pair.targets if target] == [
        ("targets.py:pair", 3, None),
        ("targets.py:pair", 9, None),
    ]


def test_functions_are_separated_by_commas_and_told_apart_by_their_folders(functions: Path) -> None:
    other = functions.parent / "other" / "targets.py"
    other.parent.mkdir()
    other.write_text("def pair(output): return output[:, 2]\n")
    wanted = read_targets([f"{functions}:pair,{other}:pair", f"dog,{functions}:column"], NAMES)
    assert [target.text for target in wanted] == ["targets.py:pair", "targets.py:pair", "dog", "targets.py:column"]
    output = torch.tensor([[1.0, 2.0, 3.0]])
    assert [float(target.function(output)) for target in wanted if target.function] == [3, 3, 1]


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        (
            "whole",
            UsageError,
            "returned scalar, but a target has to return one floating-point number per input",
        ),
        ("number", UsageError, "returned int, but"),
        ("counts", UsageError, "returned torch.int64 values, but"),
        ("broken", ModelError, "targets.py:broken raised KeyError: 'x'"),
        ("missing", ModelNotFoundError, "has no 'missing'"),
        ("thing", UsageError, "is an int, not a function"),
    ],
)
def test_other_functions_are_refused(functions: Path, name: str, kind: type[HookscopeError], message: str) -> None:
    with pytest.raises(kind) as info:
        batch_targets(torch.ones(2, 3), inputs(2), read_targets([f"{functions}:{name}"], ()), None, (), None)
    assert message in str(info.value)


# --- Scores of classes ---

LOGITS = torch.tensor([[0.0, 1.0, 3.0], [2.0, -1.0, 1.0]])


def test_without_a_target_the_best_classes_of_each_input_count() -> None:
    first, second = batch_targets(LOGITS, inputs(2), (), 2, ("a", "b", "c"), None)
    assert [(target.label, target.score, target.index) for target in first.targets if target] == [
        ("c", 3, 2),
        ("a", 2, 0),
    ]
    assert [target.label for target in second.targets if target] == ["b", "c"]
    expected = LOGITS.softmax(1)[[0, 1], [2, 0]].tolist()
    assert [target.probability for target in first.targets if target] == pytest.approx(expected)
    assert second.score(LOGITS).tolist() == [1, 1]
    assert len(batch_targets(LOGITS, inputs(2), (), 9, (), None)) == 3


def test_a_contrast_is_the_difference_of_two_scores() -> None:
    (target,) = batch_targets(LOGITS, inputs(2), [Wanted("2-0", 2, 0)], None, (), None)
    assert [(row.label, row.score, row.index, row.probability) for row in target.targets if row] == [
        ("class 2 - class 0", 3, None, None),
        ("class 2 - class 0", -1, None, None),
    ]


def test_probabilities_are_not_taken_for_logits() -> None:
    shares = LOGITS.softmax(1)
    (target,) = batch_targets(shares, inputs(2), [Wanted("0", 0)], None, (), None)
    assert [each.probability for each in target.targets if each] == pytest.approx(shares[:, 0].tolist())


@pytest.mark.parametrize(
    "shares",
    [
        torch.full((2, 3), 0.5185),  # a sigmoid's
        torch.tensor([[0.0, 1.0, 0.99], [0.2, 0.9, 0.97]]),  # several classes at once, of clamped scores
        torch.tensor([[0.25, 0.5, 0.2422], [0.125, 0.75, 0.1172]]),  # a softmax that was rounded: sums to 0.992
    ],
)
def test_values_of_0_to_1_that_do_not_sum_to_1_stay_as_they_are(shares: Tensor) -> None:
    (target,) = batch_targets(shares, inputs(2), [Wanted("1", 1)], None, (), None)
    assert [each.probability for each in target.targets if each] == pytest.approx(shares[:, 1].tolist())
    assert probabilities(shares, target, None).tolist() == pytest.approx(shares[:, 1].tolist())


def test_logits_of_a_linear_layer_may_lie_between_0_and_1() -> None:
    features = torch.eye(2, 4, requires_grad=True)
    logits = (
        torch.nn.functional.linear(features, torch.tensor([[0.2, 0.9, 0, 0], [0.6, 0.5, 0, 0]])).unsqueeze(1).squeeze(1)
    )  # in 0-1
    (target,) = batch_targets(logits, inputs(2), [Wanted("1", 1)], None, (), None)
    assert [each.probability for each in target.targets if each] == pytest.approx(logits.softmax(1)[:, 1].tolist())
    assert probabilities(logits.detach(), target, None).tolist() == pytest.approx(logits.softmax(1)[:, 1].tolist())
    (target,) = batch_targets(logits.sigmoid(), inputs(2), [Wanted("1", 1)], None, (), None)
    assert [each.probability for each in target.targets if each] == pytest.approx(logits.sigmoid()[:, 1].tolist())


def test_the_runner_up_is_the_best_class_but_the_target() -> None:
    (target,) = batch_targets(LOGITS, inputs(2), [Wanted("2", 2)], None, (), None)
    other = runner_up(LOGITS, target, None)
    assert other is not None
    assert [target.index for target in other.targets if target] == [1, 0]
    assert probabilities(LOGITS, target, None).tolist() == pytest.approx(LOGITS.softmax(1)[:, 2].tolist())
    (contrast,) = batch_targets(LOGITS, inputs(2), [Wanted("2-0", 2, 0)], None, (), None)
    assert runner_up(LOGITS, contrast, None) is None


def test_scores_may_be_one_of_several_outputs() -> None:
    output = {"aux": torch.zeros(2, 3), "features": torch.ones(2, 4), "logits": LOGITS}
    (main,) = batch_targets(output, inputs(2), (), None, (), None)
    assert [target.index for target in main.targets if target] == [2, 0]
    (other,) = batch_targets(output, inputs(2), (), None, (), "features")
    assert [target.score for target in other.targets if target] == [1, 1]
    assert (
        main.remark
        == "(model)['logits'] of shape 2x3 is explained, not (model)['aux'], (model)['features'] (--output-key)."
    )
    assert other.remark == "(model)['features'] of shape 2x4 is explained, not (model)['aux'], (model)['logits']."


def test_which_output_is_explained_is_said_only_where_there_are_several() -> None:
    def remarks(output: Any, wanted: Any = ()) -> set[str]:
        return {
            batch_target.remark
            for batch_target in batch_targets(output, inputs(2), wanted, None if wanted else 2, (), None)
        }

    assert remarks(LOGITS) == {""}
    assert remarks({"logits": LOGITS}) == {""}
    assert remarks({"logits": LOGITS, "ids": torch.ones(2, 3).long()}) == {""}
    # A tuple's first counts; a second one has no name.
    first = "(model)[0] of shape 2x3 is explained, not (model)[1] (--output-key)."
    assert remarks((LOGITS, torch.zeros(2, 3))) == {first}
    assert remarks((LOGITS, torch.zeros(2, 3)), [Wanted("2-0", 2, 0), Wanted("1", 1)]) == {first}


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (torch.ones(2, 5, 3), "holds no score per class for 2 inputs: give --target FILE.py:FUNCTION"),
        (torch.ones(3, 5), "holds no score per class for 2 inputs"),
        (torch.ones(2, 5).long(), "returns no floating-point numbers"),
        ({"a": torch.ones(2, 5, 3), "b": torch.ones(2, 3)}, "Or give --output-key: it has (model)['a'], (model)['b']."),
    ],
)
def test_outputs_without_scores_are_refused(output: Any, message: str) -> None:
    with pytest.raises(UsageError) as info:
        batch_targets(output, inputs(2), (), None, (), None)
    assert message in str(info.value)


def test_classes_and_boxes_that_there_are_not_are_refused() -> None:
    with pytest.raises(UsageError, match=r"is class 3, but \(model\) of shape 2x3 has 3 classes, counted from 0\."):
        batch_targets(LOGITS, inputs(2), [Wanted("3", 3)], None, (), None)
    with pytest.raises(UsageError, match="asks for a box, but the network returns no boxes"):
        batch_targets(LOGITS, inputs(2), [Wanted("box:0", box=0)], None, (), None)


# --- Scores of pixels ---


def test_of_pixels_the_scores_count_where_the_class_is_best() -> None:
    scores = torch.tensor([[[[1.0, 5.0]], [[2.0, 3.0]], [[-9.0, -9.0]]]])  # of classes 0, 1, 2 at two pixels
    zero, one, two = batch_targets(
        {"out": scores}, inputs(1), [Wanted(str(n), n) for n in range(3)], None, ("a", "b", "c"), None
    )
    assert [(row.label, row.score) for target in (zero, one, two) for row in target.targets if row] == [
        ("a, sum over 1 pixel", 5.0),
        ("b, sum over 1 pixel", 2.0),
        ("c, sum over all 2 pixels", -18.0),
    ]
    # Which pixels count stays the same for changed pictures.
    assert zero.score({"out": scores.flip(3)}).tolist() == [1.0]


def test_a_class_may_be_impossible_at_pixels_where_it_does_not_count() -> None:
    scores = torch.tensor([[[[-torch.inf, 5.0]], [[2.0, 3.0]]]])
    (target,) = batch_targets(scores, inputs(1), [Wanted("0", 0)], None, (), None)
    assert [row.score for row in target.targets if row] == [5.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_best_classes_of_pixels_are_those_that_win_the_most(dtype: torch.dtype) -> None:
    scores = torch.tensor([[[[9.0, 0.0, 0.0]], [[0.0, 1.0, 1.0]], [[0.0, 0.0, 0.0]]]], dtype=dtype)
    actual = batch_targets(scores, inputs(1), (), 2, ("a", "b", "c"), None)
    assert [row.label for target in actual for row in target.targets if row] == [
        "b, sum over 2 pixels",
        "a, sum over 1 pixel",
    ]


# --- Boxes ---


def boxes(*actual: tuple[int, float]) -> dict[str, Tensor]:
    labels, scores = zip(*actual, strict=True) if actual else ((), ())
    return {"boxes": torch.ones(len(actual), 4), "labels": torch.tensor(labels).long(), "scores": torch.tensor(scores)}


DETECTED = [boxes((1, 0.9), (2, 0.8), (1, 0.7)), boxes((2, 0.6))]
KINDS = ("background", "dog", "cat", "bird")


def test_a_box_is_said_by_its_number_or_is_the_best_of_a_class() -> None:
    number, dog = batch_targets(DETECTED, inputs(2), [Wanted("box:1", box=1), Wanted("dog", 1)], None, KINDS, None)
    assert [target and (target.label, round(target.score, 3), target.index) for target in number.targets] == [
        ("cat in box 1", 0.8, 2),
        None,
    ]
    assert [target and target.label for target in dog.targets] == ["dog in box 0", None]
    assert number.score(DETECTED).tolist() == pytest.approx([0.8, 0.0])
    # Another network may find less.
    assert number.score([boxes(), boxes()]).tolist() == [0, 0]


def test_a_box_lies_in_shares_of_its_own_input() -> None:
    pixels = [{**DETECTED[0], "boxes": torch.tensor([[5.0, 10, 20, 40]] * 3)}, DETECTED[1]]
    (target,) = batch_targets(pixels, inputs(2, (40, 20), (100, 50)), [Wanted("box:0", box=0)], None, KINDS, None)
    assert [each and each.box for each in target.targets] == [(0.25, 0.25, 1.0, 1.0), (0.02, 0.01, 0.02, 0.01)]


def test_without_a_target_the_best_boxes_count() -> None:
    actual = batch_targets(DETECTED, inputs(2), (), 2, KINDS, None)
    assert [[row and row.label for row in target.targets] for target in actual] == [
        ["dog in box 0", "cat in box 0"],
        ["cat in box 1", None],
    ]
    assert len(batch_targets(DETECTED, inputs(2), (), 5, KINDS, None)) == 3  # no input has more boxes


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Wanted("bird", 3), "The network found no 'bird'. It found dog, cat."),
        (Wanted("box:7", box=7), "There is no box 7: the network found 3 boxes, counted from 0."),
        (Wanted("dog-cat", 1, 2), "each box has the score of one class"),
    ],
)
def test_boxes_that_there_are_not_are_refused(wanted: Wanted, message: str) -> None:
    with pytest.raises(UsageError) as info:
        batch_targets(DETECTED, inputs(2), [wanted], None, KINDS, None)
    assert message in str(info.value)


def test_a_picture_without_boxes_has_no_target() -> None:
    with pytest.raises(UsageError, match="found no box, so there is none to explain"):
        batch_targets([boxes()], inputs(1), (), None, KINDS, None)
