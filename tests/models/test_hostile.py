"""Reading hostile files as a library: the payloads are live, the lies are real, and neither gets through."""

import io
import math
import resource
import time
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hookscope.errors import CheckpointError, HookscopeError, UntrustedFileError
from hookscope.models.checkpoint import read_checkpoint
from hookscope.models.statedict import load_into
from tests.models import hostile
from tests.models.hostile import ASSEMBLED, EXPORTED, GOOD, PAYLOADS


def appears(canary: Path) -> bool:
    """Wait for what a payload creates, perhaps in a separate process."""
    deadline = time.monotonic() + 60
    while not canary.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    return canary.exists()


def load_carelessly(path: Path) -> None:
    """Unpickle whatever is in a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.load(path, weights_only=False)


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_payload_runs_when_it_is_unpickled(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "model.pt").write_bytes(hostile.torch_bytes({"w": PAYLOADS[name](canary)}))
    load_carelessly(tmp_path / "model.pt")
    assert appears(canary)


@pytest.mark.parametrize("name", ASSEMBLED)
def test_a_payload_in_other_instructions_runs_when_it_is_unpickled(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "model.pt").write_bytes(hostile.zip_bytes(hostile.torch_members(ASSEMBLED[name](canary))))
    load_carelessly(tmp_path / "model.pt")
    assert appears(canary)


@pytest.mark.parametrize("start", [b"", b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"])
def test_a_payload_in_a_tar_runs_when_it_is_unpickled(tmp_path: Path, start: bytes) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "model.pt").write_bytes(hostile.tar_bytes(canary, start))
    load_carelessly(tmp_path / "model.pt")
    assert appears(canary)


def test_torchscript_runs_when_it_is_loaded(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    content = hostile.torchscript_bytes(canary)
    assert not canary.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.load(io.BytesIO(content))
    assert canary.exists()


# The library would have to be built for this machine, with metadata of this version of torch.
@pytest.mark.parametrize("name", [name for name in EXPORTED if name != "a compiled library"])
def test_an_exported_program_runs_when_it_is_loaded(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    content = hostile.exported_bytes(lambda members: EXPORTED[name](members, canary))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.export.load(io.BytesIO(content))
        except Exception:  # noqa: BLE001 - the payload's result is not what belongs there, but it has run
            assert canary.exists()
    assert appears(canary)


@pytest.mark.parametrize("hide", [hostile.two_directories, hostile.two_zip64_records])
def test_python_and_torch_can_be_shown_different_weights(hide: Callable[..., bytes]) -> None:
    other = {name: tensor + 100 for name, tensor in GOOD.items()}
    content = hide(hostile.torch_members(), hostile.torch_members(other))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        shown = np.frombuffer(archive.read("archive/data/1"), np.float32)
    read = torch.load(io.BytesIO(content), weights_only=True)
    assert torch.equal(torch.tensor(shown), GOOD["0.bias"])
    assert torch.equal(read["0.bias"], other["0.bias"])


METHODS = ("items", "get", "__iter__", "update", "__len__")
TENSOR_METHODS = (*("detach", "isfinite", "numel", "untyped_storage", "dim", "copy_", "__torch_function__", "__len__"),)


def with_nan() -> "OrderedDict[str, torch.Tensor]":
    state = OrderedDict((name, tensor.clone()) for name, tensor in GOOD.items())
    state["0.bias"][2] = math.nan
    return state


def assert_nan_is_seen(state: Any) -> None:
    assert type(state) is OrderedDict
    assert list(state) == list(GOOD)
    actual = {name: torch.isnan(tensor).nonzero().flatten().tolist() for name, tensor in state.items()}
    assert actual == {name: [2] if name == "0.bias" else [] for name in GOOD}
    assert all(type(tensor) is torch.Tensor and not vars(tensor) for tensor in state.values())
    network = hostile.network()
    load_into(network, state, "model.pt")
    assert torch.isnan(network[0].bias).tolist() == [False, False, True, False]  # type: ignore[arg-type]


@pytest.mark.parametrize("method", METHODS)
def test_a_dict_cannot_hide_tensors(tmp_path: Path, method: str) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(hostile.with_shadows({method: "Counter"}, with_nan()))
    assert_nan_is_seen(read_checkpoint(path).state)


@pytest.mark.parametrize("method", TENSOR_METHODS)
def test_a_tensor_cannot_hide_its_values(tmp_path: Path, method: str) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(hostile.with_shadows({method: "set"}, with_nan(), on="0.bias"))
    assert_nan_is_seen(read_checkpoint(path).state)


FORMATS: dict[str, Callable[[Any], bytes]] = {
    "torch": hostile.torch_bytes,
    "legacy": hostile.legacy_bytes,
    "safetensors": hostile.safetensors_bytes,
}
SMALL = {"0.weight": torch.arange(6.0).reshape(2, 3) + 1, "0.bias": torch.arange(2.0) - 3}


def outcome(path: Path) -> str | dict[str, torch.Tensor]:
    """Read a damaged file: the name of the error with its code, or the tensors."""
    try:
        return dict(read_checkpoint(path).state)
    except HookscopeError as error:
        refusal = error
    assert str(refusal).isprintable()
    assert "weights_only" not in str(refusal)
    return f"{type(refusal).__name__} {refusal.exit_code}"


def same(state: object) -> bool:
    return (
        isinstance(state, dict)
        and state.keys() == SMALL.keys()
        and all(torch.equal(state[name], tensor) for name, tensor in SMALL.items())
    )


@contextmanager
def without_worker() -> Iterator[None]:
    """Read in this process, as where Python cannot fork: ten times quicker, and a crash would end the test run."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**31, before[1]))  # a damaged length can claim any memory
    try:
        with pytest.MonkeyPatch.context() as patch:
            for module in ("sandbox.worker", "reading"):
                patch.setattr(f"hookscope.checkpoints.{module}.CAN_FORK", False)
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def unforked() -> Iterator[None]:
    with without_worker():
        yield


def test_no_tensor_of_a_file_hides_its_methods_wherever_it_is(tmp_path: Path) -> None:
    weight, packed, moment, epoch = (torch.tensor([value]) for value in (1.0, math.nan, math.nan, 3.0))
    for tensor in (weight, packed, moment, epoch):
        for method in ("detach", "numel", "isfinite", "item"):
            setattr(tensor, method, torch.device)  # which torch's safe reader allows
    optimiser = {"state": {0: {"exp_avg": moment}}, "param_groups": []}
    state = {"weight": weight, "packed": (packed, None)}
    torch.save({"model": state, "optimizer": optimiser, "epoch": epoch}, tmp_path / "model.pt")
    read = read_checkpoint(tmp_path / "model.pt")
    assert read.training is not None
    assert read.training.counters == {"epoch": 3}
    [(_, stored)] = read.training.optimisers
    held = (read.state["weight"], read.state["packed"][0], stored["state"][0]["exp_avg"])
    assert [tensor.detach().item() for tensor in held] == pytest.approx([1, math.nan, math.nan], nan_ok=True)


@pytest.mark.usefixtures("unforked")
@pytest.mark.parametrize("name", FORMATS)
def test_a_file_cut_at_any_third_byte_is_called_broken(tmp_path: Path, name: str) -> None:
    whole, path = FORMATS[name](SMALL), tmp_path / "model.pt"
    path.write_bytes(whole)
    assert same(outcome(path))
    for length in range(0, len(whole), 3):
        path.write_bytes(whole[:length])
        assert outcome(path) == "CheckpointError 3", length


def test_a_file_cut_anywhere_is_called_broken_by_the_worker_as_well(tmp_path: Path) -> None:
    whole, path = hostile.torch_bytes(SMALL), tmp_path / "model.pt"
    for length in np.linspace(0, len(whole) - 1, 8, dtype=int):
        path.write_bytes(whole[:length])
        assert outcome(path) == "CheckpointError 3", length


@pytest.mark.usefixtures("unforked")
@pytest.mark.parametrize(("name", "count"), [("torch", 200), ("legacy", 200), ("safetensors", 100)])
@pytest.mark.exhaustive
def test_flipped_bits_end_well_and_change_no_weights_that_a_checksum_covers(
    tmp_path: Path, name: str, count: int
) -> None:
    whole, path = FORMATS[name](SMALL), tmp_path / "model.pt"
    generator = np.random.default_rng(7)
    ends = Counter[str]()
    for _ in range(count):
        position = int(generator.integers(len(whole)))
        path.write_bytes(hostile.flipped(whole, position, int(generator.integers(8))))
        outcome_found = outcome(path)
        if name == "torch":  # the other formats have no checksums
            assert isinstance(outcome_found, str) or same(outcome_found), position
        ends["read" if isinstance(outcome_found, dict) else outcome_found] += 1
    assert ends.keys() <= {"read", "CheckpointError 3", "UntrustedFileError 4"}
    assert ends["CheckpointError 3"] > count / 20
    assert ends["read"] > 0


STARTS: Sequence[bytes] = (
    b"PK\x03\x04",
    b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e",
    b"\x80\x02",
    b"\x80\x04\x95",
    b'\x20\0\0\0\0\0\0\0{"',
    b'{"weight_map": {"',
    b"c",
    b"",
)


@settings(max_examples=100)
@given(start=st.sampled_from(STARTS), rest=st.binary(max_size=300))
def test_bytes_behind_a_good_start_are_refused(
    tmp_path_factory: pytest.TempPathFactory, start: bytes, rest: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.pt"
    path.write_bytes(start + rest)
    with without_worker(), pytest.raises((CheckpointError, UntrustedFileError)) as caught:
        read_checkpoint(path)
    assert str(caught.value).isprintable()
