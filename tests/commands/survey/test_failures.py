"""Planted failures are named with their reason; of inputs like the others nothing is said beyond the stated rate."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from torch import Tensor, nn

import hookscope
from hookscope.commands.survey.classified_inputs import ClassifiedInputs, correlations
from hookscope.commands.survey.describe import answer, describe_survey
from hookscope.commands.survey.describe_failures import describe_failures
from hookscope.commands.survey.failures import departure_p_values, explained
from hookscope.commands.survey.judged_inputs import GRID, InputJudge, JudgedInputs
from hookscope.commands.survey.measure_chunk import MeasuredInput
from hookscope.commands.survey.plan import ChunkFolder
from hookscope.commands.survey.run_survey import merge_survey
from hookscope.inputs.batches import Batch, load_batches
from hookscope.inputs.labelled_files import LabelledFiles
from hookscope.reporting.run_facts import size_words
from hookscope.results.failures import FailedInput
from hookscope.results.inputs import InputRecord, Preprocessing, Region
from hookscope.results.runs.reading import read_run
from hookscope.results.survey import Survey
from tests.commands.survey.colours import Colours, square, write_pictures
from tests.results.same import assert_same

AS_STORED: dict[str, Any] = {"resize": "32x32", "crop": "none", "mean": "none", "std": "none"}
USUAL: dict[str, Any] = {**AS_STORED, "by_class": True, "batch_size": 16, "chunk_size": 50}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """180 pictures that are classified right, and four planted ones that are not."""
    folder = tmp_path_factory.mktemp("colours")
    write_pictures(folder, 60)
    random = np.random.default_rng(5)
    planted = {
        "green/dark.png": (square("green", random) * 0.03).astype(np.uint8),
        "red/swapped.png": square("green", random),
        "red/inverted.png": 255 - square("red", random),
        "green/crop.png": random.normal(40, 8, (8, 40, 3)).clip(0, 255).astype(np.uint8),  # of the ground alone
    }
    for name, pixels in planted.items():
        Image.fromarray(pixels).save(folder / name)
    return folder


@pytest.fixture(scope="module")
def survey(data: Path) -> Survey:
    made = hookscope.survey(Colours(), data, **USUAL)
    assert made is not None
    return made


def failed(survey: Survey, name: str) -> FailedInput:
    assert survey.failures is not None
    return next(each for each in survey.failures.inputs if Path(each.name).stem == name)


def kinds(each: FailedInput) -> list[str]:
    return [out.kind for out in each.outside]


def test_a_darkened_picture_is_named(survey: Survey) -> None:
    dark = failed(survey, "dark")
    assert (dark.label, dark.taken_for) == ("green", "blue")
    assert kinds(dark)[0] == "dark"
    assert not dark.is_like_other
    assert dark.outside[0].value < 0.01
    assert dark.outside[0].low > 0.2


def test_an_inverted_picture_is_named(survey: Survey) -> None:
    assert kinds(failed(survey, "inverted")) == ["inverted", "bright"]


def test_a_bad_crop_is_named(survey: Survey) -> None:
    assert {"wide", "other layout"} <= {*kinds(failed(survey, "crop"))}
    assert next(out.value for out in failed(survey, "crop").outside if out.kind == "wide") == 5


def test_a_swapped_label_is_named_with_its_true_class_near(survey: Survey) -> None:
    swapped = failed(survey, "swapped")
    assert swapped.outside == ()
    assert swapped.is_like_other
    assert swapped.leaves_at == "smooth"  # the first layer, whose means are those of the colours
    assert swapped.p_value == pytest.approx(1 / 61)
    assert [neighbour.label for neighbour in swapped.neighbours] == ["green"] * 3


def test_nothing_else_is_wrong_and_the_accuracy_is_that_of_check(data: Path, survey: Survey) -> None:
    assert survey.failures is not None
    assert survey.accuracy is not None
    assert {Path(each.name).stem for each in survey.failures.inputs} == {"dark", "inverted", "crop", "swapped"}
    checked = hookscope.check(Colours(), data=data, select="accuracy", **AS_STORED).accuracy
    assert checked is not None
    assert (survey.accuracy.right, survey.accuracy.count, survey.accuracy.interval) == (180, 184, checked.interval)
    assert {class_name.label: class_name for class_name in survey.accuracy.classes} == {
        class_name.label: class_name for class_name in checked.classes
    }
    assert [each.name for each in survey.accuracy.worst] == [each.name for each in checked.worst]
    for ours, theirs in zip(survey.accuracy.worst, checked.worst, strict=True):
        assert ours.probability == pytest.approx(theirs.probability, rel=1e-5)
        assert ours.label_probability == pytest.approx(theirs.label_probability, rel=1e-3, abs=1e-9)


def test_the_text_the_page_and_the_run_say_why(survey: Survey, tmp_path: Path) -> None:
    text = " ".join(str(survey).split())
    assert "180 of 184 labelled pictures (97.8%) are classified right, and of all such pictures 94.5% to" in text
    assert "nowhere unlike green: its label may be wrong, or it shows both. Nearest at head:" in text
    assert "At most 3.9% of ordinary inputs lie outside" in text  # 7/181
    survey.save(tmp_path / "run", crops=0)
    stored = read_run(tmp_path / "run")
    assert stored.result.failures == survey.failures
    assert stored.result.accuracy == survey.accuracy
    assert len(stored.record.wrong) == 4
    page = hookscope.report(tmp_path / "run", tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count('alt="the input and those with near features"') == 4
    assert "its picture is inverted (correlation with the mean picture -1.00" in page


def test_shards_find_the_same_reasons_bit_for_bit(data: Path, survey: Survey, tmp_path: Path) -> None:
    for share in ("2/3", "3/3", "1/3"):
        assert hookscope.survey(Colours(), data, **USUAL, chunks=tmp_path / "c", shard=share) is None
    merged = merge_survey(ChunkFolder(tmp_path / "c"))
    assert merged.accuracy == survey.accuracy
    assert merged.failures is not None
    assert [each.outside for each in merged.failures.inputs] == [each.outside for each in survey.failures.inputs]  # type: ignore[union-attr]
    assert "merging has no network" in merged.failures.remarks[0]
    resumed = hookscope.survey(Colours(), data, **USUAL, chunks=tmp_path / "c", resume=True)
    assert resumed is not None
    assert resumed.resumed_count == 4
    assert resumed.failures == survey.failures


@pytest.mark.parametrize("workers", [1, 7])
@pytest.mark.sample("1")
def test_any_number_of_readers_gives_the_same_bits(data: Path, survey: Survey, workers: int) -> None:
    actual = hookscope.survey(Colours(), data, **USUAL, workers=workers)
    assert actual is not None
    assert actual.failures == survey.failures
    assert_same(actual.rows, survey.rows)


def test_labels_that_are_no_classes_are_a_note(tmp_path: Path) -> None:
    write_pictures(tmp_path, 2)
    network = nn.Sequential(Colours(), nn.Linear(3, 5))
    survey = hookscope.survey(network, tmp_path, **USUAL)
    assert survey is not None
    assert survey.accuracy is None
    assert any(
        "Whether inputs are classified right is not known. The label 'blue' is no class" in note
        for note in survey.notes
    )


@pytest.mark.parametrize("chunk_size", [2, 6])
def test_class_scores_whose_number_differs_between_inputs_are_a_note(chunk_size: int, tmp_path: Path) -> None:
    class Padded(Colours):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.pad(super().forward(x), (0, int(x.mean() > 0.5)))

    for number in range(6):
        Image.new("RGB", (8, 8), (255 * (number == 5),) * 3).save(tmp_path / f"{number}.png")
    listed = tmp_path / "labels.csv"
    listed.write_text("path,label\n" + "".join(f"{number}.png,{number % 3}\n" for number in range(6)))
    usual = {**USUAL, "batch_size": 1, "chunk_size": chunk_size, "resize": "8x8"}
    survey = hookscope.survey(Padded(), listed, **usual)
    assert survey is not None
    assert survey.accuracy is None
    [note] = [note for note in survey.notes if note.startswith("Whether inputs are classified right is not known.")]
    assert note.endswith("The number of class scores differs between inputs.")


def test_class_names_tell_the_order_that_folders_do_not(data: Path) -> None:
    network = Colours()
    with torch.no_grad():
        for values in (network.head.weight, network.head.bias):
            values.copy_(values.flip(0))  # red, green, blue
    by_folder = hookscope.survey(network, data, **USUAL)
    named = hookscope.survey(network, data, **USUAL, classes=["red", "green", "blue"])
    assert by_folder is not None
    assert named is not None
    assert by_folder.accuracy is not None
    assert named.accuracy is not None
    assert named.accuracy.right == 180
    assert by_folder.accuracy.right < 70
    assert "are the classes in the order of the labels? `classes` names them." in " ".join(str(by_folder).split())
    # All green ones but the planted two, and the inverted red one, which looks blue.
    assert answer(by_folder)[0].startswith("61 of 184 labelled pictures (33.2%) are classified right")
    assert describe_survey(by_folder).level == ""


def test_of_few_inputs_nothing_is_said(tmp_path: Path) -> None:
    write_pictures(tmp_path, 5)
    Image.fromarray(square("green", np.random.default_rng(0))).save(tmp_path / "red" / "swapped.png")
    survey = hookscope.survey(Colours(), tmp_path, **USUAL)
    assert survey is not None
    assert survey.failures is not None
    [only] = survey.failures.inputs
    assert (only.outside, only.leaves_at) == ((), "")
    assert [neighbour.label for neighbour in only.neighbours] == ["green"] * 3
    text = " ".join(str(survey).split())
    assert "Wrong inputs, most confident first: no reason found in what could be looked at " in text
    assert "No reason found" not in text
    assert "Ranges of pictures were not checked: too few are classified right (15)" in text
    assert "that needs at least 19 inputs of the class that are classified right" in text


def test_ranges_of_pictures_are_not_missed_for_inputs_that_are_no_pictures(tmp_path: Path) -> None:
    for number in range(8):
        path = tmp_path / "ab"[number % 2] / f"{number}.npy"
        path.parent.mkdir(exist_ok=True)
        np.save(path, np.eye(2, dtype=np.float32)[(number % 2) ^ (number == 5)])
    network = nn.Linear(2, 2, bias=False)
    nn.init.eye_(network.weight)
    survey = hookscope.survey(network, tmp_path, by_class=True, batch_axis="none")
    assert (survey.accuracy.right, survey.accuracy.count) == (7, 8)
    [remark] = survey.failures.remarks
    assert remark.startswith("The layer where an input leaves its class was not searched for")


def test_a_picture_of_one_colour_has_no_layout() -> None:
    plain = nn.functional.adaptive_avg_pool2d(torch.full((1, 1, 30, 30), 0.3), GRID).flatten(1).numpy()
    assert len({*plain[0].tolist()}) > 1  # means over areas of two sizes are rounded differently
    slope = np.arange(GRID * GRID, dtype=np.float64)
    layouts = np.concatenate([plain, plain + 0.1 * slope, -slope[None]]).astype(np.float32)
    np.testing.assert_allclose(correlations(layouts, slope), [np.nan, 1, -1])
    assert np.isnan(correlations(layouts, plain[0].astype(np.float64))).all()


def test_scaling_is_undone_for_the_pictures_of_a_batch_that_has_tensors_too() -> None:
    labelled = LabelledFiles("", {"a": ("0",), "b": ("1",)}, in_folders=False)
    judge = InputJudge(labelled, ("0", "1"), (), Preprocessing(mean=(0.5,) * 3, std=(0.25,) * 3))
    regions = {"a": Region(0, 0, 8, 8, 8, 8), "b": None}
    records = tuple(InputRecord(name, None, None, (3, 8, 8), (), region) for name, region in regions.items())
    judge.add(Batch((torch.full((2, 3, 8, 8), -0.4),), (0, 1), records), torch.eye(2))
    judged = judge.result()
    assert judged is not None
    np.testing.assert_allclose(judged.looks[:, 0], [-0.4 * 0.25 + 0.5, -0.4])
    np.testing.assert_allclose(judged.layouts[:, 0], [0.4, -0.4], rtol=1e-6)


def test_the_sides_of_a_photograph_are_those_of_the_upright_one(tmp_path: Path) -> None:
    turned, path = Image.Exif(), tmp_path / "turned.jpg"
    turned[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (30, 20)).save(path, exif=turned)
    preprocessing = Preprocessing(resize=(8, 8), crop=None)
    judge = InputJudge(LabelledFiles("", {str(path): ("0",)}, in_folders=False), ("0", "1"), (), preprocessing)
    [batch] = load_batches([path], preprocessing, 1, lambda error: pytest.fail(str(error)))
    judge.add(batch, torch.eye(2)[:1])
    judged = judge.result()
    assert judged is not None
    assert judged.looks[0, 2] == 20 / 30
    assert size_words(batch.records[0]) == "20 × 30 pixels, to the network as 3x8x8"


@pytest.mark.parametrize("score", [torch.inf, torch.nan])
def test_scores_that_are_not_finite_are_the_most_confident_mistakes(score: float) -> None:
    records = tuple(InputRecord(name, name, None, (2,), ()) for name in "abc")
    judge = InputJudge(
        LabelledFiles("", dict.fromkeys("abc", ("0",)), in_folders=False), ("0", "1"), (), Preprocessing()
    )
    judge.add(Batch((torch.zeros(3, 2),), (0, 1, 2), records), torch.tensor([[0.0, 9.0], [0.0, score], [0.0, 8.0]]))
    judged = judge.result()
    assert judged is not None
    classified = ClassifiedInputs.empty(("0", "1"), (), "", judged)
    classified.add([MeasuredInput(number, name, name, 0) for number, name in enumerate("abc")], judged, 0)
    assert [wrong.name for wrong in classified.worst] == ["b", "a", "c"]
    wrong = explained(classified, classified.accuracy().worst, [judged], None, 1)
    [pictures, _] = describe_failures(wrong, ()).parts
    assert pictures.pictures[0].name == "b: 0, scores with NaN or Inf"


def test_an_input_like_its_class_leaves_it_as_rarely_as_stated() -> None:
    random = np.random.default_rng(0)
    trials, left = 400, 0
    for _ in range(trials):
        layers = [random.standard_normal((30, size)).astype(np.float32) for size in (3, 8, 20)]
        layers.append(np.abs(layers[0]) @ np.ones((3, 4), np.float32))  # that depends on an earlier one
        left += bool(departure_p_values([layer[0] for layer in layers], [layer[1:] for layer in layers]).min() <= 0.05)
    assert left / trials <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / trials)


@pytest.mark.exhaustive
def test_an_input_like_those_that_are_right_lies_outside_as_rarely_as_stated() -> None:
    random = np.random.default_rng(2)
    count, trials, outside = 140, 800, 0
    for _ in range(trials):
        inputs = [MeasuredInput(number, f"{number}", "", 0) for number in range(count + 1)]
        judged = JudgedInputs(
            taken_for=np.array([0] * count + [1]),
            probabilities=np.full((count + 1, 2), 0.5),
            is_right=np.array([True] * count + [False]),
            looks=random.standard_normal((count + 1, 3)),
            layouts=random.standard_normal((count + 1, 64)).astype(np.float32),
            class_count=2,
        )
        classified = ClassifiedInputs.empty(("a", "b"), ("a", "b"), "", judged)
        classified.add(inputs, judged, 0)
        assert classified.range_rate == 7 / 141
        outside += bool(classified.outside([judged])[0])
    assert outside / trials <= 7 / 141 + 3 * np.sqrt(0.05 * 0.95 / trials)


class Chance(Colours):
    """Answers wrong where one pixel of the ground is bright, which says nothing about the colour."""

    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        return torch.where((x[:, :1, 0, 0] > 48 / 255), scores.roll(1, 1), scores)


@pytest.mark.exhaustive
def test_of_healthy_pictures_that_are_wrong_by_chance_hardly_anything_is_said(tmp_path: Path) -> None:
    said = actual = 0
    for seed in range(5):
        folder = tmp_path / str(seed)
        write_pictures(folder, 60, seed)
        survey = hookscope.survey(Chance(), folder, layer=("smooth", "compare", "pool"), **USUAL)
        assert survey is not None
        assert survey.failures is not None
        actual += len(survey.failures.inputs)
        said += sum(bool(each.outside or each.leaves_at) for each in survey.failures.inputs)
    rate = 0.05 + 7 / 140
    assert actual == 5 * 8
    assert said / actual <= rate + 3 * np.sqrt(rate * (1 - rate) / actual)
