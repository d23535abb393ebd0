"""Ctrl-C at any moment of a run, also while state is restored: the network and the process come out as they went in."""

import _thread
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.hooks.interrupts import finished, interrupts_between_blocks
from hookscope.inspection.state.preservation import preserved
from tests.fork_server import ForkServer
from tests.networks import Apply

ROOT = Path(__file__).parents[2]

X = torch.linspace(-1, 1, 6).view(2, 3)


def without_gradients(values: Tensor) -> Tensor:
    with torch.no_grad():
        return values * 2


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.ReLU(inplace=True), Apply(without_gradients)
    return nn.Sequential(*layers, nn.Linear(4, 1)).train()


RUNS: dict[str, Callable[[nn.Module], object]] = {
    "activations": lambda model: hookscope.activations(model, X.clone(), layer="*", ops=True),
    "gradients": lambda model: hookscope.grads(model, X.clone(), loss="sum", layer="*", inputs=True),
    "gradients in train mode": lambda model: hookscope.grads(model, X.clone(), loss="sum", layer="*", mode="train"),
    "layers": lambda model: hookscope.layers(model, input_shape=(2, 3)),
}


def state(model: nn.Module) -> dict[str, Any]:
    """Return what a run promises to restore, as plain values."""
    numpys = np.random.get_state()
    return {
        "modes": [module.training for module in model.modules()],
        "hooks": [[len(module._forward_hooks), len(module._forward_pre_hooks)] for module in model.modules()],
        "values": {name: tensor.tolist() for name, tensor in model.state_dict().items()},
        "gradients": [None if parameter.grad is None else parameter.grad.tolist() for parameter in model.parameters()],
        "trainable": [parameter.requires_grad for parameter in model.parameters()],
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": (numpys[1].tolist(), numpys[2]),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "modes of functions": torch._C._len_torch_function_stack(),
        "overrides": torch._C._is_torch_function_enabled(),
        "autocast": torch._C._is_any_autocast_enabled(),
        "handler": signal.getsignal(signal.SIGINT),
    }


class Interruption:
    """Sends SIGINT at the n-th moment at which Python would run a handler of signals: where calls begin and end."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0

    def profile(self, frame: FrameType, event: str, _arg: object) -> None:
        module = str(frame.f_globals.get("__name__")).partition(".")[0]
        if event.startswith("c_") or module not in ("hookscope", "torch", "contextlib"):
            return
        self.count += 1
        if self.count == self.at:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    def interrupts(self, function: Callable[[], object]) -> bool:
        profile = self.profile  # held: CPython calls it once more where a collection sets it back before a call of it
        try:
            try:
                sys.setprofile(profile)
                function()
            finally:
                sys.setprofile(None)  # where Python may first run the handler of one that came at the very end
        except KeyboardInterrupt:
            return True
        return False


def assert_restored_at(moments: range, run: Callable[[nn.Module], object]) -> None:
    reached = raised = 0
    for at in moments:
        model = network()
        before = state(model)
        interruption = Interruption(at)
        raised += interruption.interrupts(lambda model=model: run(model))
        reached += interruption.count >= at
        after = state(model)
        changed = [name for name in before if before[name] != after[name]]
        assert changed == [], f"interrupted at moment {at}"
    assert reached > 0.5 * len(moments)  # a run has fewer moments once caches are filled
    assert raised > 0.7 * reached  # Python ignores one in a generator that nobody needs any more


def moments_of(run: Callable[[nn.Module], object]) -> int:
    run(network())  # the first run imports and fills caches
    count, model = Interruption(at=-1), network()
    count.interrupts(lambda: run(model))
    return count.count


def at_some_moments(name: str) -> None:
    last = moments_of(RUNS[name])
    assert_restored_at(range(1, last, last // 25), RUNS[name])


def at_many_moments(name: str) -> None:
    first = range(1, 200, 7)  # where the handler is set
    assert_restored_at(first, RUNS[name])
    last = moments_of(RUNS[name])
    assert_restored_at(range(200, last, 211), RUNS[name])
    last = moments_of(RUNS[name])
    assert_restored_at(range(last - 100, last, 4), RUNS[name])  # where it is set back


def assert_passes_in_its_own_process(fork_server: ForkServer, function: Callable[[str], None], name: str) -> None:
    """Run one of the two functions where an interrupt that comes too late fails a test, and ends no others."""
    program = f"from tests.inspection.test_interrupts import {function.__name__} as run; run({name!r})"
    ended = fork_server.run("-c", program, cwd=ROOT, environment=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.sample("layers", "gradients in train mode")
def test_an_interrupt_at_some_moments_leaves_everything_as_it_was(name: str, fork_server: ForkServer) -> None:
    assert_passes_in_its_own_process(fork_server, at_some_moments, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["activations", "gradients in train mode"])
def test_an_interrupt_at_many_moments_leaves_everything_as_it_was(name: str, fork_server: ForkServer) -> None:
    assert_passes_in_its_own_process(fork_server, at_many_moments, name)


class RaisedWhileRestoring:
    """Raises KeyboardInterrupt itself, as debuggers and time limits do, at the n-th line that restores something."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0

    def trace(self, frame: FrameType, event: str, _arg: object) -> Any:
        around: FrameType | None = frame
        while event == "call" and around is not None and around.f_code is not finished.__code__:
            around = around.f_back
        if around is None:
            return None
        if event == "line" and frame.f_code is not finished.__code__:
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.trace

    def interrupts(self, function: Callable[[], object]) -> bool:
        before = sys.gettrace()
        try:
            sys.settrace(self.trace)
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


@pytest.mark.parametrize("name", [*RUNS, "edited weights"])
@pytest.mark.sample("edited weights")
def test_restoring_is_finished_before_an_interrupt_that_is_raised_within_it(name: str) -> None:
    run = {
        **RUNS,
        "edited weights": lambda model: hookscope.activations(model, X.clone(), edit=["param:0.weight:value:scale(2)"]),
    }[name]
    count = RaisedWhileRestoring(at=-1)
    run(network())
    count.interrupts(partial(run, network()))
    for at in range(1, count.count, max(1, count.count // 5)):
        model = network()
        before = state(model)
        interruption = RaisedWhileRestoring(at)
        assert interruption.interrupts(partial(run, model)) or interruption.count < at
        after = state(model)
        assert [part for part in before if before[part] != after[part]] == [], f"interrupted at line {at}"


def test_an_interrupt_in_the_block_is_not_held() -> None:
    reached: list[str] = []

    def block() -> None:
        with preserved(network(), seed=0):
            signal.raise_signal(signal.SIGINT)
            reached.append("the end")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert reached == []


class Hangs:
    """Its exit waits for an interrupt, as that of a pool of threads that never end."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_raised: object) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            pass


@pytest.mark.parametrize("module", ["hookscope.hooks.hangs", "torch.hangs"])
def test_what_hangs_can_still_be_interrupted(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setattr("hookscope.hooks.interrupts._HELD_SECONDS", 0.2)
    code = compile("with hangs: pass", "<test>", "exec")
    began = time.monotonic()
    names = {"__name__": module, "hangs": Hangs()}
    timer = threading.Timer(0.2, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt), interrupts_between_blocks():
        exec(code, names)
    assert 0.3 < time.monotonic() - began < 30


def test_a_handler_of_the_users_own_is_called_once_and_kept() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: seen.append(number))
    try:
        with interrupts_between_blocks():
            signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGINT]
        Interruption(at=300).interrupts(lambda: RUNS["gradients"](network()))
        time.sleep(0.05)
        assert seen == [signal.SIGINT] * 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_there_is_nothing_to_hold() -> None:
    handlers: list[object] = []

    def run() -> None:
        with interrupts_between_blocks():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
