"""Pickles changed instruction by instruction: what torch's safe reader loads is listed as it is, or refused."""

import argparse
import io
import itertools
import math
import pickle
import pickletools
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookscope.checkpoints import unpickler
from hookscope.errors import HookscopeError
from hookscope.models import contents
from hookscope.models.checkpoint import read_checkpoint
from hookscope.models.contents import list_contents
from tests.models import hostile
from tests.models.hostile import Storage, View
from tests.models.test_hostile import without_worker

Listed = Counter[tuple[tuple[int, ...], str, int]]
"""How many tensors there are of a shape, a dtype and a number of elements that are not finite."""

BASE = torch.arange(6.0).reshape(2, 3)


def _contents() -> list[object]:
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    state = network.state_dict()
    state["0.weight"][0, 0] = math.nan
    shared = torch.arange(12.0)
    shared[3] = math.inf
    return [
        state,
        {"a": shared[2:8], "b": shared.view(3, 4).t(), "c": nn.Parameter(BASE), "step": 3, "names": ["x", ("y", 1.5)]},
        OrderedDict(w=BASE.half(), n=torch.tensor([1, 2]), inner={"model": {"w": BASE}}),
        torch.optim.Adam(network.parameters()).state_dict() | {"w": BASE.double()},
    ]


# Instructions, with what they take from the stack and the memo as it may be.
FRAGMENTS = [
    *(b"b", b"0", b"2", b"R", b"\x81", b"s", b"a", b"t", b"u", b"e", b"\x85", b"\x86", b"\x87", b"(", b")", b"}", b"]"),
    *(b"}b", b")b", b"Nb", b"(b", b"]b", b"K\x00K\x01\x86b", b"}K\x01K\x02sb", b"N}\x86b", b"0}", b"2b", b"\x88", b"N"),
    *(bytes([0x68, memo]) for memo in range(24)),  # BINGET
    *(bytes([0x71, memo]) for memo in range(24)),  # BINPUT
    *(bytes([0x68, memo]) + b"b" for memo in range(24)),
    *(bytes([0x4B, number]) for number in (0, 1, 2, 3, 4, 6, 255)),
    *(
        b"J\xff\xff\xff\xff",
        b"G\x7f\xf0\0\0\0\0\0\0",
        b"cbuiltins\nset\n",
        b"ccollections\nCounter\n",
        b"ctorch\nTensor\n",
    ),
    *(b"ctorch\nFloatStorage\n", b"ctorch\nHalfStorage\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nSize\n"),
    *(b"ctorch._utils\n_rebuild_parameter\n", b"ccollections\nOrderedDict\n)R", b"ctorch._utils\n_rebuild_tensor\n"),
]


def _instructions(body: bytes) -> list[bytes]:
    starts = [position for _, _, position in pickletools.genops(body)] + [len(body)]
    return [body[start:end] for start, end in itertools.pairwise(starts)]


def _mutated(body: bytes, generator: np.random.Generator, fragments: Sequence[bytes] = FRAGMENTS) -> bytes:
    parts = _instructions(body)
    for _ in range(int(generator.integers(1, 4))):
        at, other = (int(generator.integers(1, len(parts) - 1)) for _ in range(2))
        fragment = fragments[int(generator.integers(len(fragments)))]
        match int(generator.integers(6)):
            case 0:
                parts.insert(at, fragment)
            case 1:
                parts[at] = fragment
            case 2:
                del parts[at]
            case 3:
                parts[at], parts[other] = parts[other], parts[at]
            case 4:
                parts.insert(at, parts[other])
            case _:
                part = bytearray(parts[at])
                part[int(generator.integers(len(part)))] ^= 1 << int(generator.integers(8))
                parts[at] = bytes(part)
    return b"".join(parts)


def _tensors(content: object) -> Iterator[Tensor]:
    """Every place at which a tensor is, but each dict and list once."""
    seen: set[int] = set()
    waiting = [content]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Tensor):
            yield Tensor.detach(part)
        elif isinstance(part, dict | list | tuple) and id(part) not in seen:
            seen.add(id(part))
            waiting += [*(dict.values(part) if isinstance(part, dict) else part)]


def loaded_by_torch(content: bytes) -> Listed | None:
    """Return what torch's safe reader loads; None if it refuses."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception:  # noqa: BLE001 - whatever it runs into
        return None
    return Counter(
        (
            tuple(tensor.shape),
            str(tensor.dtype)[6:],
            int((~torch.isfinite(tensor)).sum()) if tensor.numel() < 1e6 else -1,
        )
        for tensor in _tensors(loaded)
    )


def listed(path: Path) -> Listed | None:
    """Return what hookscope lists; None if it refuses."""
    try:
        actual = list_contents(path).tensors
    except HookscopeError:
        return None
    return Counter((tensor.shape, tensor.dtype, (tensor.nan_count or 0) + (tensor.inf_count or 0)) for tensor in actual)


@pytest.fixture(autouse=True)
def without_recognition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not look for the network: these are of none."""
    monkeypatch.setattr(contents, "recognise", lambda _shapes: ())
    monkeypatch.setattr(contents, "nearest_network", lambda _: "")


ROUNDS = [pytest.param(seed, count, id=f"{count} from {seed}") for seed, count in ((0, 150), (1, 300))]


@pytest.mark.sample("150 from 0")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("seed", "count"), ROUNDS)
def test_what_torch_loads_of_a_mutated_pickle_is_listed_so_or_refused(tmp_path: Path, seed: int, count: int) -> None:
    generator, path = np.random.default_rng(seed), tmp_path / "model.pt"
    originals = [hostile.torch_members(content) for content in _contents()]
    loads, agrees = 0, 0
    for number in range(count):
        members = originals[number % len(originals)]
        body = next(member.body for member in members if member.name.endswith("data.pkl"))
        mutated = _mutated(body, generator)
        if mutated == body:
            continue
        whole = hostile.zip_bytes(hostile.changed(members, "data.pkl", body=mutated))
        path.write_bytes(whole)
        expected = loaded_by_torch(whole)
        with without_worker():
            actual = listed(path)
        if expected is None:
            continue
        loads += 1
        if actual is not None:
            assert actual == expected, mutated
            agrees += 1
    assert loads > count / 20  # or nothing was compared
    assert agrees > loads / 3


def _foreign_contents() -> list[tuple[object, bool]]:
    """What names classes that torch refuses, and whether it is in torch's format."""
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    arrays = {name: tensor.numpy() for name, tensor in network.state_dict().items()}
    state = network.state_dict()
    return [
        (network, True),
        ({"model": network, "args": argparse.Namespace(a=Path("x"), b=np.float32(1))}, True),
        ({"model": state, "best": np.float64(0.5), "a": np.ones((2, 3)), "n": defaultdict(list, a=[1])}, True),
        ({"model": arrays, "state": np.random.RandomState(0)}, False),
    ]


FOREIGN_FRAGMENTS = [
    *(b"cos\nsystem\n", b"cbuiltins\nexec\n", b"cbuiltins\neval\n", b"cargparse\nNamespace\n", b"cvendornet\nNet\n"),
    *(b"X\x04\0\0\0true\x85R", b"X\x04\0\0\0true\x85\x81", b"ios\nsystem\n", b"o", b"Q", b"N}\x92", b"\x93"),
    *(b"X\x0c\0\0\0__setstate__", b"X\x08\0\0\0__dict__", b"X\x0b\0\0\0_parameters", b"X\x08\0\0\0_modules"),
    *(b"cnumpy\nndarray\n", b"cnumpy._core.multiarray\n_reconstruct\n", b"cnumpy\ndtype\n", b"B\x04\0\0\0\0\0\0\0"),
]

_watching: list[list[str]] = []


def _note_event(event: str, arguments: tuple[object, ...]) -> None:
    if _watching and event in ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn"):
        _watching[-1].append(f"{event} {arguments}")


@pytest.mark.sample("150 from 0")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("seed", "count"), ROUNDS)
def test_nothing_that_a_mutated_pickle_names_is_looked_up_or_called(tmp_path: Path, seed: int, count: int) -> None:
    sys.addaudithook(_note_event)  # for good, but it writes down nothing outside of this test
    generator, path = np.random.default_rng(seed), tmp_path / "model.pt"
    originals = [(content, in_torch, pickle.dumps(content, 2)) for content, in_torch in _foreign_contents()]
    read, events = 0, list[str]()
    for number in range(count):
        content, in_torch, plain = originals[number % len(originals)]
        members = hostile.torch_members(content) if in_torch else []
        body = next((member.body for member in members if member.name.endswith("data.pkl")), plain)
        mutated = _mutated(body, generator, FRAGMENTS + FOREIGN_FRAGMENTS)
        if mutated == body:
            continue
        whole = hostile.zip_bytes(hostile.changed(members, "data.pkl", body=mutated)) if in_torch else mutated
        path.write_bytes(whole)
        codes = []
        _watching.append(events)
        for reader in (list_contents, read_checkpoint):
            try:
                with without_worker():
                    reader(path)
                read += 1
            except HookscopeError as error:
                codes.append(error.exit_code)
        _watching.clear()
        assert set(codes) <= {2, 3, 4}, mutated  # 2: several weights
        assert not events, mutated
    assert read > count / 6


FIELDS = b"K\x02K\x02\x86X\x07\0\0\0float32K\x02K\x01\x86X\x01\0\0\0bK\x00K\x00X\x06\0\0\0Tensor"

STATES: dict[str, bytes] = {
    "an empty dict": b"}",
    "None": b"N",
    "a tuple of a dict and None": b"}N\x86",
    "fields in a tuple": b"(" + FIELDS + b"t",
    "fields in a list": b"](" + FIELDS + b"e",
}


def _built(target: bytes, state: bytes) -> bytes:
    """A file of one tensor, `w`, whose values hold a NaN, with a BUILD of `state` on what `target` made."""
    bias = View(Storage("b", 4), (4,), (1,))
    values = np.array([1, math.nan, 2, 3], np.float32).tobytes()
    body = hostile.torch_pickle({"w": bias})
    assert body.count(target) == 1
    at = body.index(target) + len(target)
    return hostile.zip_bytes(hostile.torch_members(body[:at] + state + b"b" + body[at:], {"b": values}))


TARGETS = {
    "the tensor": b"tq\x0cRq\r",
    "the storage": b"Q",
    "the class of the storage": b"ctorch\nFloatStorage\nq\x04",
    "the function that makes tensors": b"ctorch._utils\n_rebuild_tensor_v2\nq\x02",
}


@pytest.mark.parametrize(
    ("target", "state"),
    [
        ("the tensor", "an empty dict"),
        ("the storage", "None"),
        ("the storage", "fields in a list"),
        ("the class of the storage", "a tuple of a dict and None"),
        ("the class of the storage", "fields in a tuple"),
        ("the function that makes tensors", "fields in a list"),
    ],
)
def test_a_state_for_a_stand_in_changes_no_number(tmp_path: Path, target: str, state: str) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(_built(TARGETS[target], STATES[state]))
    expected = loaded_by_torch(path.read_bytes())
    actual = listed(path)
    assert actual is None or actual == expected == Counter({((4,), "float32", 1): 1})


def test_the_file_without_the_state_is_listed_with_its_nan(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(hostile.tensor_file({"w": View(Storage("b", 2), (2,), (1,))}, {"b": b"\0\0\xc0\x7f" * 2}))
    assert listed(path) == loaded_by_torch(path.read_bytes()) == Counter[Any]({((2,), "float32", 2): 1})


def test_the_documents_say_of_every_instruction_what_it_may_do() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    table = page[page.index("| instructions | effect |") :].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines()[2:]]
    message = [name for names, _ in rows for name in names.split(", ")]
    assert sorted(message) == sorted(opcode.name for opcode in pickletools.opcodes)
    refused = {name for names, effect in rows if effect == "An error" for name in names.split(", ")}
    read = {opcode.name for opcode in pickletools.opcodes if opcode.code.encode("latin-1") in unpickler._HANDLERS} | {
        "STOP"
    }
    assert refused == {opcode.name for opcode in pickletools.opcodes} - read
