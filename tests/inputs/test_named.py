"""Inputs by name are numbers, pictures and tensors, and go along with the inputs that have no name."""

import numpy as np
import pytest
import torch

from hookscope.errors import ImageError, UsageError
from hookscope.inputs import Batch, load_input, named_batch, read_named, with_named
from hookscope.results.inputs import InputRecord
from tests.inputs.written import PLAIN, random_pixels, save, write_tensor


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("sr=16000", 16000),
        ("x = -2.5e-3", -2.5e-3),
        ("on=true", True),
        ("off=False", False),
        ("mask=none", None),
        ("size=(2, 3)", (2, 3)),
        ("mode='fast'", "fast"),
    ],
)
def test_literals_are_what_python_makes_of_them(text, value):
    (named,) = read_named([text], PLAIN)
    assert (named.value, named.record) == (value, None)
    assert type(named.value) is type(value)
    assert named.text == f"{named.name} = {value!r}"


def test_tensor_files_stay_as_they_are_and_pictures_get_a_batch_axis(tmp_path):
    values = torch.arange(12.0).reshape(1, 3, 4)
    stored = write_tensor(tmp_path / "b.npy", values)
    write_tensor(tmp_path / "t.safetensors", torch.tensor(7))
    picture = save(tmp_path / "a.png", random_pixels(4, 5))
    b, t, image = read_named([f"b={stored}", f"t={tmp_path}/t.safetensors", f"image={picture}"], PLAIN)
    assert torch.equal(b.value, values)
    assert (t.value.shape, t.value.item()) == ((), 7)
    assert torch.equal(image.value[0], load_input(picture, PLAIN)[0])
    assert b.text == f"b = {stored}, float32 1x3x4"
    assert b.record.name == str(stored)


@pytest.mark.parametrize(
    ("texts", "phrase"),
    [
        (["sr"], "--input 'sr' is not of the form NAME=VALUE"),
        (["sr="], "not of the form"),
        (["=3"], "not of the form"),
        (["2x=3"], "not of the form"),
        (["a=1", "a=2"], "--input a is given twice"),
        (["mode=fast"], "mode=fast is neither a number nor a file. A text goes in quotes"),
        (["mode=" + "x" * 300], "is neither a number nor a file"),
        (["mode=a\0b"], "is neither a number nor a file"),
    ],
)
def test_what_cannot_be_is_a_usage_error(texts, phrase):
    with pytest.raises(UsageError) as caught:
        read_named(texts, PLAIN)
    assert phrase in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_an_error_of_that_file(tmp_path):
    with pytest.raises(ImageError, match=r"missing\.npy'.*no such file"):
        read_named([f"b={tmp_path}/missing.npy"], PLAIN)
    (tmp_path / "words").write_text("no picture")
    with pytest.raises(ImageError, match="is not a JPEG"):
        read_named([f"b={tmp_path}/words"], PLAIN)


def given(count: int, *indices: int) -> Batch:
    record = InputRecord("x", None, None, (2,), ())
    return Batch((torch.zeros(count, 2),), indices or tuple(range(count)), (record,) * count)


def test_rows_go_with_their_inputs_single_ones_with_all_and_others_stay_whole(tmp_path):
    write_tensor(tmp_path / "each.npy", torch.arange(10.0).reshape(5, 2))
    write_tensor(tmp_path / "one.npy", torch.tensor([[8.0, 9.0]]))
    write_tensor(tmp_path / "mask.npy", torch.eye(2))
    named = read_named([f"{name}={tmp_path}/{name}.npy" for name in ("each", "one", "mask")] + ["n=3"], PLAIN)
    batch = with_named(given(2, 1, 4), named, input_count=5)
    assert batch.kwargs["each"].tolist() == [[2, 3], [8, 9]]
    assert batch.kwargs["one"].tolist() == [[8, 9], [8, 9]]
    assert batch.kwargs["mask"].tolist() == [[1, 0], [0, 1]]
    assert batch.kwargs["n"] == 3
    assert batch.shared == {"mask"}
    batch.kwargs["mask"].zero_()
    batch.kwargs["one"].zero_()
    assert with_named(given(1), named, 5).kwargs["one"].tolist() == [[8, 9]], "the network may overwrite it"


def test_names_alone_make_a_batch_of_as_many_inputs_as_the_first_tensor_has(tmp_path):
    ids, mask = np.arange(6).reshape(2, 3), np.ones((2, 3), np.float32)
    np.save(tmp_path / "ids.npy", ids)
    np.save(tmp_path / "mask.npy", mask)
    batch = named_batch(read_named([f"ids={tmp_path}/ids.npy", f"mask={tmp_path}/mask.npy", "sr=2"], PLAIN))
    assert (batch.args, batch.indices) == ((), (0, 1))
    assert torch.equal(batch.kwargs["ids"], torch.from_numpy(ids))
    assert [record.name for record in batch.records] == [
        f"{tmp_path}/ids.npy with mask.npy[0]",
        f"{tmp_path}/ids.npy with mask.npy[1]",
    ]
    assert batch.records[0].steps[-1] == "by name: sr = 2"
    (record,) = named_batch(read_named(["sr=2"], PLAIN)).records
    assert (record.name, record.steps) == ("by name", ("by name: sr = 2",))
