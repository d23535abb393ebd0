"""Files that name classes beside their tensors: the tensors are read, nothing is imported, and a gate says no."""

import argparse
import functools
import http
import json
import os
import pickle
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookscope
from tests.cli.conftest import Run
from tests.cli.test_hostile_files import assert_harmless
from tests.models import hostile
from tests.models.hostile import GOOD, Call, legacy_bytes, torch_bytes


@pytest.fixture
def vendornet(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package with a network, and another class; `monkeypatch.undo()` uninstalls it."""
    module = ModuleType("vendornet")

    class Net(nn.Sequential):
        pass

    class Settings(SimpleNamespace):
        pass

    for case in (Net, Settings):
        case.__module__, case.__qualname__ = "vendornet", case.__name__
        setattr(module, case.__name__, case)
    monkeypatch.setitem(sys.modules, "vendornet", module)
    return module


DATA: dict[str, tuple[object, str]] = {
    "Namespace": (argparse.Namespace(width=2, path=Path("x")), "argparse.Namespace"),
    "NumPy scalar": (np.float64(1), "numpy"),
    "NumPy array of objects": (np.array([None, "a"]), "numpy"),
    "random state of NumPy": (np.random.RandomState(1), "numpy.random"),
    "defaultdict": (defaultdict(int, a=1), "collections.defaultdict"),
    "layer of torch": (nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
}
OTHERS: dict[str, tuple[object, str]] = {
    "enum": (http.HTTPStatus.OK, "http.HTTPStatus"),
    "class": (argparse.ArgumentParser, "argparse.ArgumentParser"),
    "call": (Call(functools.lru_cache, 5), "functools.lru_cache"),
    "optimiser": (torch.optim.SGD([torch.ones(2)], 0.1), "torch.optim.sgd.SGD"),
    "name with GitHub's command": (Call(functools.lru_cache, "\n::error::x"), "functools.lru_cache"),
}
WRITERS: dict[str, Callable[[object], bytes]] = {
    "torch": torch_bytes,
    "legacy": legacy_bytes,
    "protocol 4": functools.partial(torch_bytes, protocol=4),
}
OLDER = ("torch", "legacy")


def listed(run: Run, *options: str) -> dict[str, Any]:
    ended = run("checkpoint", "model.pt", "--json", *options)
    assert ended.code == 0, ended
    assert_harmless(ended)
    return json.loads(ended.stdout)


@pytest.mark.parametrize(
    ("name", "writer"),
    [
        *((name, "protocol 4") for name in ("Namespace", "NumPy array of objects", "random state of NumPy")),
        *((name, "protocol 4") for name in ("layer of torch", "enum", "class", "call", "optimiser")),
        *(("call", writer) for writer in OLDER),
    ],
)
@pytest.mark.sample(
    "Namespace-protocol 4",
    "NumPy array of objects-protocol 4",
    "class-protocol 4",
    "call-protocol 4",
    "layer of torch-protocol 4",
)
def test_the_tensors_beside_it_are_listed_with_their_values(run: Run, tmp_path: Path, name: str, writer: str) -> None:
    state = {key: tensor.clone() for key, tensor in GOOD.items()}
    state["0.bias"][1] = float("nan")
    (tmp_path / "model.pt").write_bytes(WRITERS[writer]({"state_dict": state, "beside": (DATA | OTHERS)[name][0]}))
    actual = {tensor["key"]: tensor for tensor in listed(run, "--key", "state_dict")["parts"][0]["tensors"]}
    assert {key: (tuple(each["shape"]), each["nan_count"]) for key, each in actual.items()} == {
        key: (tuple(tensor.shape), int(torch.isnan(tensor).sum())) for key, tensor in state.items()
    }
    assert actual["2.weight"]["mean"] == pytest.approx(float(state["2.weight"].mean()), rel=1e-6)


def check(path: Path, *allowed: str, key: str | None = None) -> tuple[int, str]:
    """Check a file by itself; return the exit code and what is said."""
    report = hookscope.check(path, arch="none", key=key, allow_global=allowed)
    said = [*report.warnings, report.error or ""]
    assert all(each.isprintable() for each in said)
    return report.error_code or int(not report.passed), " ".join(said)


@pytest.mark.parametrize("name", DATA)
@pytest.mark.sample("Namespace", "NumPy array of objects", "layer of torch")
def test_a_gate_warns_of_plain_data(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.pt").write_bytes(torch_bytes({"state_dict": GOOD, "x": DATA[name][0]}))
    code, said = check(tmp_path / "model.pt", key="state_dict")
    assert code == 0, said
    assert "`torch.load(weights_only=True)` refuses this file" in said
    assert DATA[name][1] in said


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.sample("class", "call", "name with GitHub's command")
def test_a_gate_refuses_any_other_name_unless_it_is_allowed(tmp_path: Path, name: str) -> None:
    thing, dotted = OTHERS[name]
    path = tmp_path / "model.pt"
    path.write_bytes(torch_bytes({"state_dict": GOOD, "x": thing}))
    code, said = check(path, key="state_dict")
    assert code == 4
    assert dotted in said
    assert "`allow_global`" in said
    for allowed in (dotted, f"{dotted.partition('.')[0]}.*"):
        code, said = check(path, allowed, key="state_dict")
        assert code == 0, said
        assert "refuses this file" in said
    assert check(path, "other.*", key="state_dict")[0] == 4


NEVER = {
    "os.system": Call(os.system, "true"),
    "a call of what a call returned": Call(Call(getattr, Call(__import__, "os"), "system"), "true"),
    "inside a Namespace": argparse.Namespace(a=[Call(os.system, "true")]),
    "inside the state of a layer": nn.Sequential(nn.Linear(2, 2)),
    "behind another name": None,
}


@pytest.mark.parametrize("name", NEVER)
@pytest.mark.sample("os.system", "inside a Namespace", "behind another name")
def test_what_can_run_anything_is_never_allowed(run: Run, tmp_path: Path, name: str) -> None:
    thing = NEVER[name]
    if isinstance(thing, nn.Module):
        thing[0].extra = Call(os.system, "true")
    content = torch_bytes({**GOOD, "x": thing})
    if thing is None:
        named = b"\x80\x04\x8c\x09vendornet\x8c\x09os.system\x93\x8c\x04true\x85R."
        content = hostile.zip_bytes(hostile.torch_members(named))
    (tmp_path / "model.pt").write_bytes(content)
    for allowed in ((), ("*",), ("posix.system", "vendornet.os.system")):
        assert check(tmp_path / "model.pt", *allowed)[0] == 4
    assert run("checkpoint", "model.pt").code == 4
    assert run("layers", "model.pt", "--arch", "net.py:tiny").code == 4


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_a_pickled_module_whose_class_is_absent_gives_its_state_dict(
    run: Run, tmp_path: Path, vendornet: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = vendornet.Net(*hostile.network())
    network.load_state_dict(GOOD)
    content = WRITERS["protocol 4"]({"model": network, "settings": vendornet.Settings(a=1), "epoch": 3})
    (tmp_path / "model.pt").write_bytes(content)
    monkeypatch.delitem(sys.modules, "vendornet")
    document = listed(run)
    assert [tensor["key"] for tensor in document["parts"][0]["tensors"]] == list(GOOD)
    assert document["warnings"] == ["model.pt: skipped: 1 object of vendornet.Settings."]
    ended = run("layers", "model.pt", "--arch", "net.py:tiny")
    assert ended.code == 0, ended
    assert "refuses this file" in ended.stderr
    unknown = run("layers", "model.pt")  # without a network
    assert unknown.code == 5
    assert "--trust to run its own vendornet.Net" in unknown.stderr
    assert check(tmp_path / "model.pt")[0] == 4
    assert check(tmp_path / "model.pt", "vendornet.Net")[0] == 4  # Settings is not
    assert check(tmp_path / "model.pt", "vendornet.*")[0] == 0


@pytest.mark.exhaustive
def test_a_pickle_of_numpy_arrays_is_a_weights_file(run: Run, tmp_path: Path) -> None:
    for protocol in (2, 4):
        state = {name: tensor.numpy() for name, tensor in GOOD.items()}
        (tmp_path / "model.pt").write_bytes(pickle.dumps({"model": state, "__author__": "a lab"}, protocol))
        actual = listed(run)
        assert {tensor["key"]: (tensor["shape"], tensor["mean"]) for tensor in actual["parts"][0]["tensors"]} == {
            name: (list(tensor.shape), pytest.approx(float(tensor.mean()), rel=1e-6)) for name, tensor in GOOD.items()
        }
        assert run("layers", "model.pt", "--arch", "net.py:tiny").code == 0
        assert check(tmp_path / "model.pt")[0] == 0


def test_trust_runs_no_class_of_plain_data(run: Run, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(torch_bytes({"state_dict": GOOD, "n": Counter(a=1), "x": argparse.Namespace()}))
    ended = run("layers", "model.pt", "--arch", "net.py:tiny", "--trust")
    assert ended.code == 0, ended
    assert "nothing was imported" in " ".join(ended.stderr.split())
