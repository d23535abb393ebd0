"""A bug of ours is never blamed on the model: every third function of ours that a run calls raises in turn."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.cli.conftest import Run

NETWORK = """
import random

import numpy as np
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.same = nn.Identity()

    def forward(self, x, scale):
        return torch.relu_(self.same(self.conv(x))) * scale, x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(3, 4)

    def forward(self, x):
        y, x = self.block(x, scale=torch.ones(()))
        return self.head((x + y).mean((2, 3)))


class Slots:
    __slots__ = ("calls",)


class Remembers(Net):
    calls = 0

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("moved", torch.zeros(2))
        self.register_buffer("sparse", torch.zeros(2).to_sparse())
        self.slots, self.array, self.lists = Slots(), np.zeros(2), [1]
        self.generators = [torch.Generator(), random.Random(0), np.random.default_rng(0), np.random.RandomState(0)]
        self.slots.calls = 0
        self.graph = torch.ones(2, requires_grad=True) * 2

    def forward(self, x):
        self.mean += 1
        self.moved.data = torch.ones(3)
        self.sparse.add_(torch.ones(2).to_sparse())
        self.array += 1
        self.lists.append(2)
        self.slots.calls += 1
        type(self).calls += 1
        self.graph.detach_()
        self.head.weight.grad = torch.ones_like(self.head.weight)
        self.head.bias.requires_grad_(False)
        torch.rand(1, generator=self.generators[0]), self.generators[1].random()
        self.generators[2].random(), self.generators[3].rand()
        return super().forward(x)
"""

# Code that runs while the model does, or on what it returned.
ROOMS = ("hookscope.hooks.", "hookscope.inspection.", "hookscope.statistics.")
# Of these, what runs for gradients alone.
GRADIENTS = (
    *("hookscope.hooks.autograd", "hookscope.hooks.gradient_hooks", "hookscope.hooks.tensor_gradients"),
    *("hookscope.inspection.backward", "hookscope.inspection.differentiation", "hookscope.inspection.gradient_rows"),
    "hookscope.inspection.losses",
)
# It calls the loss, which may be the user's.
NOT_OURS = {"hookscope.inspection.differentiation._loss_of"}

COMMANDS = (
    (ROOMS, ("activations", "planted.py:Net", "picture.npy", "--layer", "*")),
    (GRADIENTS, ("grads", "planted.py:Net", "picture.npy", "--layer", "*", "--inputs")),
    (("hookscope.inspection.state.",), ("activations", "planted.py:Remembers", "picture.npy", "--no-verify")),
    (("hookscope.commands.attribute.",), ("attribute", "planted.py:Net", "picture.npy", "--top", "2")),
    (
        ("hookscope.commands.diff.",),
        ("diff", "planted.py:Net", "other.py:Net", "picture.npy", "--shadow", "--ops", "--grads"),
    ),
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(NETWORK, "utf-8")
    (tmp_path / "other.py").write_text(NETWORK.replace("self.head", "self.end"), "utf-8")
    np.save(tmp_path / "picture.npy", np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32))


def functions_in(holder: Any, module: str) -> Iterator[FunctionType]:
    """Yield the functions that a module, or a class in it, defines."""
    for held in [*vars(holder).values()]:
        inner = getattr(held, "fget", None) or getattr(held, "__func__", held)  # properties, static methods
        value = getattr(inner, "__wrapped__", inner)  # caches and context managers
        if isinstance(value, FunctionType) and value.__module__ == module:
            yield value
        elif isinstance(value, type) and value.__module__ == module and value is not holder:
            yield from functions_in(value, module)


def called_by(run: Run, command: tuple[str, ...], modules: list[ModuleType]) -> list[FunctionType]:
    """Return the functions of ours that a command calls, each once."""
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    sys.setprofile(note)
    threading.setprofile(note)
    try:
        assert run(*command).code == 0
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    actual = {id(each): each for module in modules for each in functions_in(module, module.__name__)}
    return [each for each in actual.values() if each.__code__ in codes and not each.__code__.co_freevars]


@contextmanager
def planted(function: FunctionType) -> Iterator[None]:
    """Let a function raise wherever it has been imported to."""

    def bug(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    sound = function.__code__
    function.__code__ = bug.__code__.replace(co_filename=sound.co_filename)
    try:
        yield
    finally:
        function.__code__ = sound
        while torch._C._len_torch_function_stack():  # it may be what takes a mode off
            torch._C._pop_torch_function_stack()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of what runs a thread
@pytest.mark.parametrize(("rooms", "command"), COMMANDS, ids=lambda each: each[0])
@pytest.mark.exhaustive
def test_a_bug_in_any_function_is_ours(run: Run, rooms: tuple[str, ...], command: tuple[str, ...]) -> None:
    run(*command)  # loads what is loaded when it is needed
    modules = [module for name, module in sys.modules.items() if name.startswith(rooms)]
    codes: dict[int, list[str]] = {}
    for function in called_by(run, command, modules)[::3]:
        with planted(function):
            ended = run(*command)
        codes.setdefault(ended.code, []).append(f"{function.__module__}.{function.__qualname__}")
    blamed = {name for code, names in codes.items() if code not in {0, 70} for name in names}
    assert blamed <= NOT_OURS
    assert len(codes[70]) > 4 * len(codes.get(0, []))  # of the others, some look at what may raise anything
