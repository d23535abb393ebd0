"""Tensor files are passed as they are, or refused in one clear line."""

import hashlib
import os
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hookscope.errors import ImageError
from hookscope.inputs.batches import load_batches
from hookscope.inputs.loading import load_input
from hookscope.results.inputs import Preprocessing
from tests.byteorder import save_big_endian
from tests.inputs.written import failure, write_tensor
from tests.models.hostile import Call

TENSOR_NAMES = ["a.npy", "a.safetensors", "a.pt", "a.pth"]  # .pth stands for torch's format before 1.6 here


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in TENSOR_NAMES), ("a.npy", torch.float64), ("a.pt", torch.float16)],
)
def test_tensor_files_pass_unprocessed_as_float32(tmp_path, name, dtype):
    values = torch.linspace(-3, 3, 24).reshape(3, 2, 4).to(dtype)
    path = write_tensor(tmp_path / name, values)
    tensor, record = load_input(path, Preprocessing())
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor, values.float())
    assert record.size is None
    assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    converted = f"{str(dtype).removeprefix('torch.')} converted to float32"
    expected = ("tensor passed without preprocessing",)
    assert record.steps == (expected if dtype == torch.float32 else (*expected, converted))


@pytest.mark.parametrize(
    ("name", "dtype"), [("a.npy", torch.int64), ("a.safetensors", torch.bool), ("a.pt", torch.complex64)]
)
def test_tensor_files_of_other_dtypes_keep_them(tmp_path, name, dtype):
    values = torch.arange(6).reshape(1, 2, 3).to(dtype)
    tensor, _ = load_input(write_tensor(tmp_path / name, values), Preprocessing())
    assert tensor.dtype == dtype
    assert torch.equal(tensor, values)


def test_a_tensor_file_of_a_big_endian_machine_has_its_values(tmp_path):
    values = torch.linspace(-3, 3, 24).reshape(2, 3, 4)
    tensor, _ = load_input(save_big_endian(values, tmp_path / "x.pt"), Preprocessing())
    assert torch.equal(tensor, values)


@pytest.mark.parametrize("dtype", [">f4", "<f2", np.longdouble, np.clongdouble, ">i2"])
def test_numpy_arrays_of_any_byte_order_and_width(tmp_path, dtype):
    values = np.arange(12).reshape(3, 2, 2).astype(dtype)
    np.save(tmp_path / "a.npy", np.asfortranarray(values))
    tensor, _ = load_input(tmp_path / "a.npy", Preprocessing())
    assert tensor.tolist() == np.arange(12).reshape(3, 2, 2).tolist()


def test_code_in_a_numpy_file_does_not_run(tmp_path):
    np.save(tmp_path / "a.npy", np.array([Call(os.mkdir, str(tmp_path / "canary"))], dtype=object), allow_pickle=True)
    assert "Cannot read" in failure(tmp_path / "a.npy")
    assert not (tmp_path / "canary").exists()


def test_other_contents_of_tensor_files_are_named(tmp_path):
    torch.save({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "a.pt")
    by_name = "an input of several tensors goes by name: --input NAME=FILE"
    assert f"it holds a dict, not one plain tensor; {by_name}" in failure(tmp_path / "a.pt")
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "a.safetensors")
    assert f"it holds 2 tensors, not one; {by_name}" in failure(tmp_path / "a.safetensors")
    save_file({}, tmp_path / "b.safetensors")
    assert "it holds 0 tensors" in failure(tmp_path / "b.safetensors")
    np.save(tmp_path / "a.npy", np.array(["text"]))
    assert "is not numeric" in failure(tmp_path / "a.npy")
    np.savez(tmp_path / "a.npz", np.ones(3))
    assert "is a NumPy .npz archive of arrays" in failure(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("tensor", "phrase"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.ones(3, 2, 2, device="meta"), "data-less"),
        (torch.ones(1).expand(3, 400, 400), "expanded"),
        (torch.tensor(1.0), "shape () is not an input"),
        (torch.ones(3, 0, 4), "shape (3, 0, 4) is not an input"),
    ],
    ids=["sparse", "meta", "expanded", "scalar", "empty"],
)
def test_tensors_that_are_no_input_are_refused(tmp_path, tensor, phrase):
    torch.save(tensor, tmp_path / "a.pt")
    assert phrase in failure(tmp_path / "a.pt")


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float4_e2m1fn_x2", "bits8", "uint16"])
def test_tensors_of_rare_dtypes_are_inputs_or_refused(tmp_path, name):
    stored = torch.zeros(3, 2, 2, dtype=torch.uint8)
    dtype = getattr(torch, name)
    torch.save(stored.view(dtype) if dtype.itemsize == 1 else stored.to(dtype), tmp_path / "a.pt")
    try:
        tensor, _ = load_input(tmp_path / "a.pt", Preprocessing())
    except ImageError as error:
        assert "a.pt" in str(error)  # noqa: PT017 - either is right
    else:
        assert tensor.shape == (3, 2, 2)
        list(load_batches([tmp_path / "a.pt"] * 2, Preprocessing(), on_error=lambda _error: None))


def test_a_flipped_bit_in_a_torch_file_is_found(tmp_path):
    values = torch.arange(300, dtype=torch.float32).reshape(3, 10, 10)
    torch.save(values, tmp_path / "a.pt")
    content = bytearray((tmp_path / "a.pt").read_bytes())
    content[content.find(struct.pack("<3f", 1, 2, 3)) + 1] ^= 16
    (tmp_path / "a.pt").write_bytes(content)
    assert torch.load(tmp_path / "a.pt", weights_only=True).shape == (3, 10, 10), "torch itself does not notice"
    assert "damaged or truncated: its member a/data/0 is not intact" in failure(tmp_path / "a.pt")


def test_a_numpy_header_may_not_claim_more_than_the_file_holds(tmp_path):
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000), }"
    header = header.ljust(117) + b"\n"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64))
    assert "truncated or corrupt" in failure(tmp_path / "a.npy")
