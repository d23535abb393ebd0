import io
import pickle
import subprocess
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hookscope.checkpoints.pickle_scan import survey_pickle


def saved(content: object, protocol: int = 2) -> tuple[bytes, dict[str, int]]:
    """Return the pickle that torch.save writes, and the sizes of its storages."""
    buffer = io.BytesIO()
    torch.save(content, buffer, pickle_protocol=protocol)
    with zipfile.ZipFile(buffer) as archive:
        sizes = {i.filename.partition("/data/")[2]: i.file_size for i in archive.infolist() if "/data/" in i.filename}
        return archive.read("archive/data.pkl"), sizes


class Call:
    """Pickles as a call of any function with any arguments."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


CONTENTS: dict[str, Callable[[], object]] = {
    "state dict": lambda: nn.BatchNorm2d(3).state_dict(),
    "dtypes": lambda: {
        str(d): torch.ones(3).to(d) for d in (torch.half, torch.bfloat16, torch.int8, torch.bool, torch.cdouble)
    },
    "new dtypes": lambda: {"a": torch.ones(2).to(torch.float8_e4m3fn), "b": torch.ones(2, dtype=torch.uint16)},
    "views of one storage": lambda: dict(zip("abc", torch.arange(12.0).split(4), strict=True)),
    "empty and scalar": lambda: {"a": torch.ones(0, 3), "b": torch.tensor(1.0)},
    "sparse": lambda: {"a": torch.eye(3).to_sparse(), "b": torch.eye(3).to_sparse_csr()},
    "quantised": lambda: {"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
    "parameter": lambda: {"a": nn.Parameter(torch.ones(2))},
    "meta": lambda: {"a": torch.ones(2, device="meta")},
    "python's own": lambda: {
        "a": b"\xff",
        "b": bytearray(b"x"),
        "c": {1},
        "d": 1j,
        "e": (None, True, 1.5),
        "f": Counter("ab"),
    },
    "torch's own": lambda: {
        "a": torch.Size([1]),
        "b": torch.device("cpu"),
        "c": torch.float32,
        "d": torch.Generator().get_state(),
    },
}


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:Sparse CSR", "ignore:Sparse invariant")
def test_what_torch_saves_needs_no_import_and_claims_what_it_has(name: str) -> None:
    body, sizes = saved(CONTENTS[name]())
    survey = survey_pickle(io.BytesIO(body))
    assert survey.imports == ()
    assert survey.storages == sizes
    assert survey.protocol == 2
    assert not survey.truncated
    assert not survey.malformed


def test_imports_are_named_once_each_in_order() -> None:
    body, _ = saved({"a": Path, "b": partial, "c": Path, "d": OrderedDict()})
    assert survey_pickle(io.BytesIO(body)).imports == ("pathlib.Path", "functools.partial")


@pytest.mark.parametrize("protocol", range(6))
def test_names_are_todays_in_every_protocol(protocol: int) -> None:
    body = pickle.dumps([subprocess.Popen, eval], protocol)  # protocol 2 spells them commands.Popen, __builtin__.eval
    assert survey_pickle(io.BytesIO(body)).imports == ("subprocess.Popen", "builtins.eval")
    assert survey_pickle(io.BytesIO(body)).protocol == (protocol if protocol > 1 else 0)


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_called(tmp_path: Path, protocol: int) -> None:
    body = pickle.dumps(Call(Path.touch, tmp_path / "canary"), protocol)
    survey_pickle(io.BytesIO(body))
    assert not list(tmp_path.iterdir())
    pickle.loads(body)
    assert list(tmp_path.iterdir())  # it would have


@pytest.mark.parametrize(
    "call",
    [
        Call(bytearray, 10**12),
        Call(__import__("codecs").encode, "text", "punycode"),
        Call(torch.Tensor, 4),
        Call(torch.FloatTensor, 4),
        Call(torch._utils._rebuild_tensor_v2, 5, 0, (1,), (1,), False, OrderedDict()),
        Call(torch._tensor._rebuild_from_type_v2, torch.FloatTensor, torch.Tensor, (4,), {}),
    ],
)
def test_calls_that_torch_allows_but_never_writes_are_malformed(call: Call) -> None:
    body = pickle.dumps({"w": call}, 2)
    survey = survey_pickle(io.BytesIO(body))
    assert survey.imports == ()
    assert survey.malformed


@pytest.mark.parametrize(
    "pid",
    [
        "0",
        ("storage", torch.FloatStorage, "0", "cpu"),
        ("module", torch.FloatStorage, "0", "cpu", 1),
        ("storage", torch.Tensor, "0", "cpu", 1),
        ("storage", torch.FloatStorage, 0, "cpu", 1),
        ("storage", torch.FloatStorage, "é", "cpu", 1),
        ("storage", torch.FloatStorage, "0", "cpu", -1),
        ("storage", torch.FloatStorage, "0", "cpu", True),
        ("storage", torch.FloatStorage, "0", "cpu", 1.0),
    ],
)
def test_storages_named_as_torch_never_does_are_malformed(pid: object) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            return pid if obj == "here" else None

    buffer = io.BytesIO()
    Pickler(buffer, 2).dump({"w": "here"})
    assert survey_pickle(io.BytesIO(buffer.getvalue())).malformed


def test_every_cut_is_truncated() -> None:
    body, _ = saved(nn.Linear(2, 2).state_dict())
    for length in range(len(body)):
        survey = survey_pickle(io.BytesIO(body[:length]))
        assert survey.truncated, length
        assert survey.imports == ()


def test_nonsense_is_malformed_and_never_raises() -> None:
    for body in (b".junk", b"\x80\x02(.", b"\x80\x02h\x05.", b"ccollections\nOrderedDict\n)R}b(s.", b"\xff\xff"):
        assert survey_pickle(io.BytesIO(body)).malformed, body


def test_pickles_one_after_another_are_read_one_by_one() -> None:
    file = io.BytesIO(pickle.dumps([1, "a"], 2) + pickle.dumps({"b": Path}, 2) + b"rest")
    assert survey_pickle(file).content == [1, "a"]
    assert survey_pickle(file).imports == ("pathlib.Path",)
    assert file.read() == b"rest"
