"""Options replace what they name, and nonsense is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from hookscope.errors import UsageError
from hookscope.inputs.preprocessing_options import assumed_preparation, preprocessing_from_options
from hookscope.options import PictureOptions
from hookscope.results.inputs import Preprocessing


def test_no_options_keep_everything():
    base = Preprocessing(source="weights")
    assert preprocessing_from_options(base, PictureOptions(resize=None, crop=None, mean=None, std=None)) is base


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"resize": "256"}, {"resize": 256}),
        ({"resize": "256x320"}, {"resize": (256, 320)}),
        ({"crop": "200"}, {"crop": (200, 200)}),
        ({"crop": "200x100"}, {"crop": (200, 100)}),
        ({"crop": "None"}, {"crop": None}),
        ({"mean": "0.5"}, {"mean": (0.5, 0.5, 0.5)}),
        ({"mean": "0.1, -0.2,3e-1"}, {"mean": (0.1, -0.2, 0.3)}),
        ({"mean": "none", "std": "none"}, {"mean": (), "std": ()}),
        ({"std": "0.1,0.2,0.3"}, {"std": (0.1, 0.2, 0.3)}),
    ],
)
def test_options_replace_what_they_name(options, expected):
    base = Preprocessing(source="ResNet34_Weights.IMAGENET1K_V1", frames=4)
    result = preprocessing_from_options(base, PictureOptions(**options))
    for name in Preprocessing.__dataclass_fields__:
        if name != "source":
            assert getattr(result, name) == expected.get(name, getattr(base, name))
    assert result.source == "options over ResNet34_Weights.IMAGENET1K_V1"


@pytest.mark.parametrize(
    "options",
    [{name: value} for name in ("resize", "crop") for value in ("0", "-1", "", "1x2x3", "224.5", "99999", "٣")]
    + [{name: value} for name in ("mean", "std") for value in ("a", "0.5,0.5", "nan", "1e50")]
    + [{"std": value} for value in ("-1", "0.5,0,0.5", "1e-60")],
    ids=str,
)
def test_nonsense_options_are_usage_errors_of_one_line(options):
    ((name, value),) = options.items()
    with pytest.raises(UsageError) as caught:
        preprocessing_from_options(Preprocessing(), PictureOptions(**options))
    message = str(caught.value)
    assert message.startswith(f"--{name} {value!r} ")
    assert "\n" not in message


def test_another_limit_of_pixels_changes_no_preprocessing():
    base = Preprocessing(source="weights")
    assert preprocessing_from_options(base, PictureOptions(max_pixels=99)) == replace(base, max_pixels=99)
    with pytest.raises(UsageError, match="--resize '10' is over the limit of 99 pixels"):
        preprocessing_from_options(base, PictureOptions(resize="10", max_pixels=99))
    with pytest.raises(UsageError, match="--max-pixels 0 is not possible: give 1 or more"):
        preprocessing_from_options(base, PictureOptions(max_pixels=0))


@pytest.mark.parametrize(("text", "axis"), [("0", 0), ("-1", -1), ("Auto", "auto"), ("none", "none")])
def test_the_batch_axis_is_a_number_or_a_word(text, axis):
    assert preprocessing_from_options(Preprocessing(), PictureOptions(batch_axis=text)) == Preprocessing(
        batch_axis=axis
    )


@pytest.mark.parametrize("text", ["first", "٣", "9999"])
def test_other_batch_axes_are_usage_errors(text):
    with pytest.raises(UsageError, match="is not an axis"):
        preprocessing_from_options(Preprocessing(), PictureOptions(batch_axis=text))


@pytest.mark.parametrize(
    ("options", "crop"),
    [
        ({"resize": "64"}, (64, 64)),
        ({"resize": "256"}, (224, 224)),
        ({"resize": "64x300"}, (64, 224)),
        ({"resize": "none"}, (224, 224)),
        ({"resize": "64", "crop": "96"}, (96, 96)),
    ],
)
def test_a_crop_that_nobody_named_pads_no_resized_picture(options, crop):
    assert preprocessing_from_options(Preprocessing(), PictureOptions(**options)).crop == crop


def test_a_preparation_that_nobody_named_is_said_of_pictures_alone():
    picture, tensor = Path("cat.jpg"), Path("batch.NPY")
    (both,) = assumed_preparation(Preprocessing(), [tensor, picture], PictureOptions())
    assert "resized to 224 and cropped to 224x224 (--resize, --crop)" in both
    assert "normalised as for ImageNet (--mean, --std)" in both
    (size,) = assumed_preparation(Preprocessing(), [picture], PictureOptions(mean="0.5", std=None))
    assert "--resize" in size
    assert "--mean" not in size
    (values,) = assumed_preparation(Preprocessing(), [picture], PictureOptions(crop="64"))
    assert "--resize" not in values
    assert "--mean" in values
    assert assumed_preparation(Preprocessing(), [picture], PictureOptions(resize="64", std="1")) == ()
    assert assumed_preparation(Preprocessing(), [tensor], PictureOptions()) == ()
    assert assumed_preparation(Preprocessing(source="ResNet18_Weights.DEFAULT"), [picture], PictureOptions()) == ()
