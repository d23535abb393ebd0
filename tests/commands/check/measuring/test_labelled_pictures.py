"""What a network says of labelled pictures: the same as a plain loop over them."""

import gc
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookscope
from hookscope.commands.check.measuring.labelled_pictures import classes_of
from hookscope.errors import UsageError
from hookscope.results.accuracy import Accuracy
from hookscope.results.check import CheckReport
from tests.commands.check.measuring.squares import COLOURS, draw_squares, read_squares, trained_on

PLAIN = {"resize": "none", "crop": "none", "mean": "none", "std": "none"}


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("squares") / "val"
    draw_squares(folder)
    return folder


@pytest.fixture(scope="module")
def network(squares: Path) -> nn.Module:
    return trained_on(squares)


def check(network: nn.Module, data: Path, **changes: Any) -> CheckReport:
    """Check a network by the rules about labelled pictures alone."""
    options = {**PLAIN, "select": "*accuracy*", "classes": sorted(COLOURS), **changes}
    return hookscope.check(network, data=data, **options)


def accuracy_of(network: nn.Module, data: Path, **changes: Any) -> Accuracy:
    report = check(network, data, **changes)
    assert report.accuracy is not None, report.error
    return report.accuracy


def scores(values: torch.Tensor) -> nn.Module:
    """Return a network that gives these scores, (K,), for every picture."""

    class Says(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return values.repeat(len(x), 1) + 0 * x.mean()

    return Says()


class Varying(nn.Module):
    """Returns a class score more for each batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = getattr(self, "count", 3) + 1
        return torch.zeros(len(x), self.count) + 0 * x.mean()


def test_the_accuracy_is_that_of_a_plain_loop(network: nn.Module, squares: Path) -> None:
    pictures, classes = read_squares(squares)
    with torch.no_grad():
        taken = torch.cat([network(picture[None]) for picture in pictures]).argmax(1)
    accuracy = accuracy_of(network, squares)
    assert (accuracy.right, accuracy.count) == (int((taken == classes).sum()), 80)
    assert accuracy.right == 72  # two of each colour show another
    for index, class_name in enumerate(accuracy.classes):
        mine = taken[classes == index]
        assert (class_name.label, class_name.indices, class_name.count) == (sorted(COLOURS)[index], (index,), len(mine))
        assert class_name.right == int((mine == index).sum())
        assert class_name.mistaken_count == int((mine != index).sum())
    assert [class_name.mistaken_for for class_name in accuracy.classes] == ["green", "red", "white", "blue"]


def test_the_worst_pictures_are_those_of_which_the_network_is_surest(network: nn.Module, squares: Path) -> None:
    pictures, classes = read_squares(squares)
    with torch.no_grad():
        shares = network(pictures).softmax(1)
    margin = shares.max(1).values - shares[torch.arange(80), classes]
    worst = accuracy_of(network, squares).worst
    assert len(worst) == 8
    wrong = (shares.argmax(1) != classes).nonzero().flatten()
    surest = sorted((float(margin[each]) for each in wrong), reverse=True)[:8]
    assert [one.probability - one.label_probability for one in worst] == pytest.approx(surest, abs=1e-5)  # type: ignore[operator]
    assert {Path(each.name).stem for each in worst} == {"18", "19"}
    assert all(row.taken_for != row.label and row.sha256 for row in worst)


def test_nothing_of_the_network_changes_and_it_is_run_in_eval_mode(squares: Path) -> None:
    modes = []

    class Spy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            modes.append((self.training, torch.is_grad_enabled()))
            return nn.functional.pad(self.norm(x).mean((2, 3)), (0, 1))

    spy = Spy()
    before = {name: value.clone() for name, value in spy.state_dict().items()}
    accuracy_of(spy, squares)
    assert spy.training
    assert {training for training, _ in modes} == {False}
    assert all(torch.equal(value, before[name]) for name, value in spy.state_dict().items())


def test_a_score_that_is_nan_is_wrong_and_equal_scores_are_of_the_first_class(squares: Path) -> None:
    broken = accuracy_of(scores(torch.tensor([float("nan"), 0.0, 0.0, 0.0])), squares, select=["accuracy", "forward"])
    assert broken.right == 0
    assert (broken.worst[0].taken_for, broken.worst[0].probability) == ("NaN", None)
    even = accuracy_of(scores(torch.zeros(4)), squares)
    assert [class_name.right for class_name in even.classes] == [20, 0, 0, 0]


def test_a_score_of_infinity_has_no_probability_and_comes_first(squares: Path) -> None:
    class OneInf(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.tensor([4.0, 0.0, 0.0, 0.0]).repeat(len(x), 1) + 0 * x.mean()
            rows[-1, 1] = math.inf  # in the last picture of each batch
            return rows

    worst = accuracy_of(OneInf(), squares, select=["accuracy", "forward"]).worst
    e = math.exp(4)
    shares = [(picture.taken_for, picture.probability, picture.label_probability) for picture in worst]
    infinite = [share for share in shares if share[0] == "green"]
    assert infinite
    assert shares[: len(infinite)] == [("green", None, None)] * len(infinite)
    assert all(share[1:] == pytest.approx((e / (e + 3), 1 / (e + 3))) for share in shares[len(infinite) :])


def test_scores_that_are_probabilities_are_shown_as_they_are(squares: Path) -> None:
    said = accuracy_of(scores(torch.tensor([0.75, 0.125, 0.125, 0.0])), squares).worst[0]
    assert (said.taken_for, said.probability, said.label, said.label_probability) == ("blue", 0.75, "white", 0.0)


@pytest.mark.parametrize(
    ("break_network", "message", "code"),
    [
        (lambda: nn.Flatten(0), "the network returned no row of class scores", 2),
        (lambda: scores(torch.zeros(1)), "the network has one score per input", 2),
        (Varying, "The number of class scores differs between inputs", 2),
        (lambda: scores(torch.zeros(3)), "The label 'blue' is no class of the network, which has 3 classes", 2),
    ],
)
def test_what_cannot_be_judged_is_one_line(
    squares: Path, break_network: Callable[[], nn.Module], message: str, code: int
) -> None:
    report = check(break_network(), squares)
    assert message.casefold() in report.error.casefold()
    assert (report.error_code, "\n" in report.error) == (code, False)


def test_a_network_that_raises_on_a_picture_names_it(squares: Path) -> None:
    class Fussy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if float(x.mean()) > 0.4:
                raise ValueError("too bright")
            return nn.functional.pad(x.mean((2, 3)), (0, 1))

    report = check(Fussy(), squares, images=[squares / "blue"])
    assert report.exit_code == 6
    assert "red/16.png' and the inputs after it" in report.error  # the batch with the first white one
    assert "ValueError: too bright" in report.error


def test_all_other_rules_look_at_a_few_of_the_pictures_unless_others_are_given(
    network: nn.Module, squares: Path
) -> None:
    report = check(network, squares, select=())
    assert len(report.inputs) == 32
    assert len({Path(each.name).parent for each in report.inputs}) == 4
    assert (
        "All other rules look at 32 of the 80 labelled pictures, because no other inputs are given." in report.warnings
    )
    assert len(check(network, squares, images=[squares / "red"]).inputs) == 20
    noise = check(network, squares, input_shape=(2, 3, 12, 12))
    assert {each.name for each in noise.inputs} == {"noise"}
    assert noise.accuracy is not None


def test_labels_in_a_csv_file_may_be_indices(network: nn.Module, squares: Path) -> None:
    lines = [f"{squares}/{name}/{number}.png,{index}" for index, name in enumerate(COLOURS) for number in range(20)]
    path = squares.parent / "labels.csv"
    path.write_text("\n".join(lines), encoding="utf-8")
    accuracy = accuracy_of(network, path)
    assert (accuracy.right, accuracy.count, accuracy.mapping) == (72, 80, "labels are indices of classes")


@pytest.mark.exhaustive
def test_memory_does_not_grow_with_the_number_of_pictures(tmp_path: Path) -> None:
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for number in range(60):
            np.save(tmp_path / label / f"{number}.npy", np.full((3, 64, 64), number, np.float32))
    alive: list[int] = []

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 1)  # says that a file of three axes is one picture

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some objects say that they are deprecated when they are asked
                held = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
            alive.append(sum(tensor.numel() for tensor in held if tensor.shape[-2:] == (64, 64)))
            return self.conv(x).mean((2, 3))

    report = check(Counts(), tmp_path, classes=["a", "b"], images=[tmp_path / "a" / "0.npy"])
    assert report.accuracy is not None, report.error
    assert len(alive) > 15
    # A batch of eight, a copy of it, and eight pictures read ahead; how many of these depends on the threads.
    assert max(alive) <= 24 * 3 * 64 * 64


# Which classes labels mean


NAMES = ("tabby cat", "crane", "crane", "10")


def test_labels_are_names_whatever_their_case_and_spaces() -> None:
    expected, how = classes_of(["Tabby_Cat", "crane"], NAMES, 4, in_folders=True)
    assert expected == {"Tabby_Cat": (0,), "crane": (1, 2)}
    assert how == "labels are names of classes"


def test_numbers_are_names_before_they_are_indices() -> None:
    assert classes_of(["10"], NAMES, 4, in_folders=True)[0] == {"10": (3,)}
    assert classes_of(["3", "01"], NAMES, 4, in_folders=False)[0] == {"3": (3,), "01": (1,)}


def test_numbers_in_folders_are_indices_and_it_is_said_where_sorting_would_differ() -> None:
    labels = [str(index) for index in range(11)]
    expected, how = classes_of(labels, (), 11, in_folders=True)
    assert expected["10"] == (10,)
    assert how == "labels are indices of classes, not in sorted order, where '10' is class 2"
    assert classes_of(labels[:10], (), 10, in_folders=True)[1] == "labels are indices of classes"
    how = "labels are indices of classes, not in sorted order, where '01' is class 0"
    assert classes_of(["1", "01"], (), 2, in_folders=True) == ({"1": (1,), "01": (1,)}, how)


def test_as_many_folders_as_classes_are_sorted() -> None:
    wordnet = ["n02124075", "n01440764", "n04266014"]
    expected, how = classes_of(wordnet, ("tench", "Egyptian cat", "space shuttle"), 3, in_folders=True)
    assert expected == {"n01440764": (0,), "n02124075": (1,), "n04266014": (2,)}
    assert how == "folders in sorted order: 'n01440764' is class 0, 'tench'"
    for labels, in_folders in ((wordnet[:2], True), (wordnet, False)):
        with pytest.raises(UsageError, match=r"'n02124075' is no class of the network, which has 3 classes: none has"):
            classes_of(labels, ("tench", "Egyptian cat", "space shuttle"), 3, in_folders=in_folders)


def test_a_label_that_is_no_class_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"'taby cat' is no class .* not 2\. Nearest: 'tabby cat'"):
        classes_of(["crane", "taby cat"], NAMES, 4, in_folders=True)
    with pytest.raises(UsageError, match=r"'4' is no class .* its names of classes are not known \(--classes FILE\)"):
        classes_of(["1", "4"], (), 4, in_folders=False)
    with pytest.raises(
        UsageError, match=r"'4' is no class .*, which has 4 classes: names are known for 2, indices are"
    ):
        classes_of(["1", "4"], NAMES[:2], 4, in_folders=False)
    with pytest.raises(UsageError, match=r"has 1 class: .* for sorted order labels must be folders\."):
        classes_of(["a"], (), 1, in_folders=False)
