"""Run compiled code as written, except where torch must trace: `torch.cond`, `map`, `scan`, flex attention.

These operators compile the functions that they are given. Traced, such a function gets every tensor that it uses as an
argument, parameters of layers among them; run as written, it uses parameters that then get no gradient. Hooks would be
traced with the layers. So where gradients are enabled an operator runs as without hookscope, and its inside is not
observed.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hookscope.hooks.callers import CALL, frames_around, is_operators, operator_around
from hookscope.hooks.calls import Hook
from hookscope.hooks.operations import OperationMode, forwards, run_networks


@contextmanager
def eager(traced: dict[str, None] | None = None) -> Iterator[None]:
    """Run compiled modules and functions as written: torch skips hooks that are added after compiling.

    Operators that torch traces are left to it where gradients are enabled; they are added to `traced`, such as "cond at
    net.py:14".
    """
    with ExitStack() as block:
        stance = None
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and importing it would cost a second
            forced = torch.compiler.set_stance("force_eager")
            block.enter_context(forced)
            stance = forced.prev  # the previous stance
        block.enter_context(operators_left_to_torch(traced, stance))
        yield


@contextmanager
def operators_left_to_torch(traced: dict[str, None] | None, stance: Any = None) -> Iterator[None]:
    """Take hooks away while an operator that torch traces runs, for the length of a `with` block.

    Args:
        traced: As in `eager`; None for the `traced` of the block around this one, which may be a watched training.
        stance: The compiler stance for what the operator compiles; None for the current one.
    """
    compile_ = torch.compile
    ours = compile_ if isinstance(compile_, _Compile) else _Compile(compile_)
    before = ours.stance, ours.traced
    try:
        torch.compile = cast("Any", ours)
        ours.stance = ours.stance or stance  # the outermost block's stance
        ours.traced = ours.traced if traced is None else traced
        yield
    finally:
        ours.stance, ours.traced = before
        torch.compile = compile_


class _Compile:
    """Replaces `torch.compile`, which operators call to trace the functions that they are given.

    Attributes:
        stance: As in `operators_left_to_torch`.
        traced: As in `eager`.
    """

    def __init__(self, compile_: Callable[..., Any]) -> None:
        self._compile = compile_
        self.stance: Any = None
        self.traced: dict[str, None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self._compile(*args, **kwargs)
        if not args or not is_operators(sys._getframe(1).f_code):
            return compiled
        return partial(self._run, args[0], compiled)

    def _run(self, function: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if not torch.is_grad_enabled() and not _is_nested(args):
            return run_networks(function, args, kwargs)  # nothing needs a gradient: hooks can see inside it
        operator = operator_around(frame)
        if operator is not None:
            self.traced[operator.place] = None
        with self._stance_before(), _without_hooks(frame), _without_modes() as mode:
            if mode is None or operator is None or operator.caller is None:
                return run_networks(compiled, args, kwargs)
            return mode.run(operator.name, compiled, args, kwargs, operator.caller)

    @contextmanager
    def _stance_before(self) -> Iterator[None]:
        was = self.stance
        if was is None:
            yield
            return
        skips = was.skip_guard_eval_unsafe
        with torch.compiler.set_stance(was.stance, skip_guard_eval_unsafe=skips, force_backend=was.backend):
            yield


forwards(_Compile._run)


def _is_nested(args: tuple[Any, ...]) -> bool:
    """Tell whether an argument holds a container in a container, which operators take only where they are traced."""
    containers = [argument for argument in args if isinstance(argument, tuple | list)]
    return any(isinstance(inner, tuple | list | dict) for container in containers for inner in container)


@contextmanager
def _without_hooks(frame: FrameType | None) -> Iterator[None]:
    """Take hookscope's hooks off the outermost module that is running, and put them back where they were."""
    calls = [around for around in frames_around(frame) if around.f_code is CALL]
    modules: list[nn.Module] = [*calls[-1].f_locals["self"].modules()] if calls else []
    registers: list[Any] = [hooks for module in modules for hooks in (module._forward_pre_hooks, module._forward_hooks)]
    held = [(hooks, {**hooks}) for hooks in registers if any(type(hook) is Hook for hook in hooks.values())]
    for hooks, before in held:
        for key, hook in before.items():
            if type(hook) is Hook:
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in held:
            now = {**hooks}
            hooks.clear()
            hooks.update({key: hook for key, hook in before.items() if type(hook) is Hook or key in now})
            hooks.update(now)


@contextmanager
def _without_modes() -> Iterator[OperationMode[Any] | None]:
    """Take hookscope's function modes off the stack, and put them back; yield the innermost that sees operations."""
    stack: list[TorchFunctionMode] = []
    while torch._C._len_torch_function_stack():
        stack.insert(0, torch._C._pop_torch_function_stack())
    ours = [mode for mode in stack if type(mode).__module__.startswith("hookscope.")]
    for mode in stack:
        if mode not in ours:
            torch._C._push_on_torch_function_stack(mode)
    try:
        yield next((mode for mode in reversed(ours) if isinstance(mode, OperationMode)), None)
    finally:
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        for mode in stack:
            torch._C._push_on_torch_function_stack(mode)
