"""Inputs by name are numbers, pictures and tensors, and go along with the inputs that have no name."""

import hashlib

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hookscope.errors import ImageError, UsageError
from hookscope.inputs.batches import Batch, in_batches, part_of
from hookscope.inputs.loading import load_input
from hookscope.inputs.named import named_batch, named_inputs, read_named, with_named
from hookscope.results.inputs import InputRecord, Preprocessing
from tests.inputs.written import PLAIN, random_pixels, save, write_tensor


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x = -2.5e-3", -2.5e-3),
        ("on=true", True),
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
        (["=3"], "not of the form"),
        (["2x=3"], "not of the form"),
        (["a=1", "a=2"], "--input a is given twice"),
        (["mode=fast"], "mode=fast is neither a number nor a file. A text goes in quotes"),
        (["mode=a\0b"], "is neither a number nor a file"),
        (["a=-1,1:uint8"], "--input a=-1,1:uint8: not all of these are numbers of uint8"),
        (["a=0,2:bool"], "not all of these are numbers of bool"),
        (["a=1e999,2"], "not all of these are numbers of float32"),
        (["a=70000,2:float16"], "not all of these are numbers of float16"),
        (["a=1,2:int46"], "unknown dtype 'int46'. Nearest: 'int64'"),
    ],
)
def test_what_cannot_be_is_a_usage_error(texts, phrase):
    with pytest.raises(UsageError) as caught:
        read_named(texts, PLAIN)
    assert phrase in str(caught.value)
    assert "\n" not in str(caught.value)


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


VIEWS = [torch.arange(6.0).reshape(3, 2), torch.arange(12.0).reshape(3, 4)]


def test_files_of_several_tensors_are_containers_of_them(tmp_path):
    contents = {"list": VIEWS, "tuple": (*VIEWS,), "dict": {"x": VIEWS[0], "y": (VIEWS[1], 2, "mean", None)}}
    for name, content in contents.items():
        torch.save(content, tmp_path / f"{name}.pt")
        (named,) = read_named([f"views={tmp_path}/{name}.pt"], PLAIN)
        assert type(named.value) is type(content)
        assert (named.row_count, named.record.name) == (3, f"{tmp_path}/{name}.pt")
        assert named.text == f"views = {tmp_path}/{name}.pt, {name} of 2 tensors"
    assert torch.equal(named.value["x"], VIEWS[0])
    assert torch.equal(named.value["y"][0], VIEWS[1])
    assert named.value["y"][1:] == (2, "mean", None)
    save_file({"x": VIEWS[0], "y": VIEWS[1]}, tmp_path / "both.safetensors")
    (named,) = read_named([f"views={tmp_path}/both.safetensors"], PLAIN)
    assert {name: tensor.tolist() for name, tensor in named.value.items()} == {
        "x": VIEWS[0].tolist(),
        "y": VIEWS[1].tolist(),
    }


def endless():
    held = []
    held.append(held)
    return held


def shared():
    held = [torch.ones(1)]
    for _ in range(15):
        held = [held] * 10  # small in the file, 10^15 members when walked through
    return held


@pytest.mark.parametrize(
    ("content", "phrase"),
    [
        (endless(), "it nests deeper than 20"),
        (shared(), "holds more than 10,000 values"),
        ({"a": 1}, "it holds no tensor"),
        ([torch.ones(2), {1, 2}], "it holds a set. Save nothing but"),
        ([torch.ones(2), torch.eye(2).to_sparse()], "sparse"),
        ([torch.ones(2), torch.nn.Linear(1, 1)], "it holds a torch.nn.modules.linear.Linear. Save"),
    ],
    ids=["endless", "shared", "numbers", "set", "sparse", "module"],
)
def test_what_is_no_argument_is_refused(tmp_path, content, phrase):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(ImageError, match=phrase) as caught:
        read_named([f"views={tmp_path}/a.pt"], PLAIN)
    assert "\n" not in str(caught.value)


def test_each_tensor_in_a_container_goes_with_its_inputs():
    whole, single = torch.arange(10.0).reshape(2, 5), torch.tensor([[7.0, 8.0]])
    each = torch.arange(5)
    value = {"each": [each, each], "single": (single, "text"), "whole": whole}
    (named,) = named_inputs({"views": value}, PLAIN)
    batch = with_named(given(2, 1, 4), [named], input_count=5)
    views = batch.kwargs["views"]
    assert [part.tolist() for part in views["each"]] == [[1, 4], [1, 4]]
    assert views["each"][0] is views["each"][1]
    assert views["single"][0].tolist() == [[7, 8], [7, 8]]
    assert views["single"][1] == "text"
    assert torch.equal(views["whole"], whole)
    assert batch.shared == {"views['whole']"}
    assert part_of(batch, 1).kwargs["views"]["each"][0].tolist() == [4]
    assert torch.equal(part_of(batch, 1).kwargs["views"]["whole"], whole), "though it has as many rows as the batch"
    views["whole"].zero_()
    assert value["whole"].sum() == 45, "the network may overwrite it"


def test_lists_of_detection_networks_hold_one_picture_for_each_input():
    pictures = [torch.full((3, 2, 2), float(index)) for index in range(3)]
    (named,) = named_inputs({"images": pictures}, Preprocessing(kind="detection"))
    batch = named_batch([named])
    assert len(batch.indices) == 3
    parts = [part.kwargs["images"] for part in in_batches(batch, 2)]
    assert [[int(picture[0, 0, 0]) for picture in part] for part in parts] == [[0, 1], [2]]
    assert [tuple(picture.shape) for picture in part_of(batch, 2).kwargs["images"]] == [(3, 2, 2)]
    assert batch.records[2].shape == (3, 2, 2)
    one, more = named_inputs({"images": pictures[:1], "more": torch.ones(5, 2)}, Preprocessing(kind="detection"))
    assert len(named_batch([one, more]).indices) == 1, "not 5, four of them without a picture"


def test_paths_in_containers_stand_for_files(tmp_path):
    for index, view in enumerate(VIEWS):
        torch.save(view, tmp_path / f"{index}.pt")
    (named,) = named_inputs({"views": {"x": [tmp_path / "0.pt", tmp_path / "1.pt"]}}, PLAIN)
    assert all(map(torch.equal, named.value["x"], VIEWS))
    assert named.record.sha256 == hashlib.sha256((tmp_path / "0.pt").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("text", "row"),
    [("-1.5, 2e3", [-1.5, 2000]), (".5,+1.,", [0.5, 1])],
)
def test_numbers_with_commas_are_a_row_of_a_tensor(text: str, row: list[float]) -> None:
    (named,) = read_named([f"meta={text}"], Preprocessing())
    assert torch.equal(named.value, torch.tensor([row], dtype=torch.float32))
    batch = with_named(Batch((torch.ones(4, 2),), (0, 1, 2, 3), ()), [named], 4)
    assert torch.equal(batch.kwargs["meta"], torch.tensor([row] * 4, dtype=torch.float32))
