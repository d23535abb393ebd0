"""Tensor files made to harm: none runs anything, and each is refused in bounded time and memory."""

import os
import resource
import time
from pathlib import Path

import pytest
import torch

from hookscope.errors import ImageError
from hookscope.inputs.loading import load_input, read_tensor
from hookscope.results.inputs import Preprocessing
from tests.models import hostile
from tests.models.hostile import EXPORTED, PAYLOADS, Storage, View

ENCODE = b"c_codecs\nencode\n"
MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"
MIB = 2**20


def one_view(count: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> bytes:
    """A torch file of one tensor with any shape over a storage of four bytes that claims `count` elements."""
    content = hostile.torch_pickle(View(Storage("0", count), shape, stride, offset))
    return hostile.zip_bytes(hostile.torch_members(content, {"0": bytes(4)}))


# What each would do to a careless reader, and what the refusal says.
HOSTILE = {
    "takes 8 GiB": (hostile.raw_torch(b"c__builtin__\nbytearray\n" + hostile.number(2**33) + b"\x85R"), "misread"),
    "encodes for minutes": (
        hostile.raw_torch(
            ENCODE
            + hostile.unicode_opcode("".join(map(chr, range(0x1000, 0xA000))) * 2)
            + hostile.unicode_opcode("punycode")
            + b"\x86R"
        ),
        "misread",
    ),
    "shows memory that nothing was written to": (hostile.raw_torch(b"ctorch\nFloatTensor\nK\x04\x85R"), "misread"),
    "claims more elements than it has": (one_view(10**9, (10**9,), (1,)), "should have 4000000000 bytes but has 4"),
    "expands four bytes to four terabytes": (one_view(1, (10**6, 10**6), (0, 0)), "expanded tensor"),
    "begins behind its storage": (one_view(1, (1,), (1,), 10**9), "damaged"),
    "unpacks to 2 GiB": (hostile.zip_bytes([*hostile.torch_members(), hostile.bomb("archive/data/x")]), "compressed"),
    "overflows its size": (hostile.raw_safetensors({"a": hostile.tensor_entry(0, 4, (2**62, 8))}, bytes(4)), "damaged"),
}


def refusal(path: Path) -> str:
    """Read a file both ways; return what is said about it as an input."""
    with pytest.raises(ImageError) as target:
        read_tensor(path)
    with pytest.raises(ImageError) as caught:
        load_input(path, Preprocessing())
    assert str(caught.value) == str(target.value)
    assert str(caught.value).isprintable()
    assert "weights_only" not in str(caught.value)
    assert "--trust" not in str(caught.value), "which is for the model"
    return str(caught.value)


def peak_bytes() -> int:
    """Most memory that this process, or one it has waited for, has had at once."""
    used = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return max(used) * 1024


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.sample(
    "takes 8 GiB",
    "claims more elements than it has",
    "begins behind its storage",
    "unpacks to 2 GiB",
    "overflows its size",
)
def test_a_hostile_tensor_file_is_refused_in_bounded_time_and_memory(tmp_path: Path, name: str) -> None:
    content, phrase = HOSTILE[name]
    (tmp_path / "input.pt").write_bytes(content)
    before, start = peak_bytes(), time.process_time() + sum(os.times()[2:4])
    with pytest.raises(ImageError, match=phrase):
        load_input(tmp_path / "input.pt", Preprocessing())
    assert time.process_time() + sum(os.times()[2:4]) - start < 15, "seconds of processor time, children's included"
    assert peak_bytes() - before < 1024 * MIB
    refusal(tmp_path / "input.pt")


@pytest.mark.parametrize("write", [hostile.torch_bytes, hostile.legacy_bytes])
def test_no_payload_runs(tmp_path: Path, write: object) -> None:  # read as weights are
    canary = tmp_path / "canary"
    (tmp_path / "input.pt").write_bytes(write({"x": PAYLOADS["os.system"](canary)}))  # type: ignore[operator]
    assert "can run code; save the tensor alone" in refusal(tmp_path / "input.pt")
    assert not canary.exists()


def test_no_program_runs(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    change = EXPORTED["pickled sample inputs"]
    programs = (
        hostile.torchscript_bytes(canary),
        hostile.tar_bytes(canary, MAGIC),
        hostile.exported_bytes(lambda members: change(members, canary)),
    )
    for content in programs:
        (tmp_path / "input.pt").write_bytes(content)
        assert "can run code" in refusal(tmp_path / "input.pt")
        assert not canary.exists()


def test_a_tensor_stays_what_it_was_when_its_file_changes(tmp_path: Path) -> None:
    values = torch.arange(12.0).reshape(3, 2, 2)
    for write in (hostile.torch_bytes, hostile.legacy_bytes, lambda tensor: hostile.safetensors_bytes({"a": tensor})):
        path = tmp_path / "input.pt"
        path.write_bytes(write(values))
        tensor = read_tensor(path)
        path.write_bytes(bytes(path.stat().st_size))
        os.truncate(path, 0)
        assert torch.equal(tensor, values)


def test_a_tensor_file_is_read_after_a_network_has_run_in_several_threads(tmp_path: Path) -> None:
    torch.save(torch.ones(3, 400, 400), tmp_path / "input.pt")
    torch.set_num_threads(2)
    try:
        torch.nn.functional.conv2d(torch.ones(1, 3, 256, 256), torch.ones(8, 3, 3, 3)).sum()
        tensor, _ = load_input(tmp_path / "input.pt", Preprocessing())
    finally:
        torch.set_num_threads(1)
    assert torch.equal(tensor, torch.ones(3, 400, 400))
