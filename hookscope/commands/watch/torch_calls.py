"""Observe calls of `clip_grad_norm_`, `clip_grad_value_` and `GradScaler.step`, and the first forward pass.

Scripts import the clipping functions by name, often before there is a listener, so replacing attributes of the module
would miss their calls. Both functions are wrappers that hold the inner function in a closure cell: the content of the
cell is replaced, and restored later.
"""

import functools
import os
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import CellType, GeneratorType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hookscope.commands.watch.gradients import norms_of, together

P = ParamSpec("P")
R = TypeVar("R")


class Listener(Protocol):
    """Is notified of calls; its methods must not raise."""

    def clips(self, parameters: Sequence[Tensor]) -> bool:
        """Tell whether `clipped` should be called for these parameters, which are about to be clipped."""

    def clipped(self, parameters: Sequence[Tensor], norm: Tensor) -> None:
        """Note that gradients were clipped; `norm` is their L2 norm before clipping."""

    def scaled_step_begins(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        """Note that a GradScaler is about to step; `scale` is the scale of the gradients, None if they are unscaled."""

    def scaled_step_ended(self, optimizer: Optimizer) -> None:
        """Note that a GradScaler has stepped, or has skipped the step."""


_listeners: list[Listener] = []
_undo: list[Callable[[], None]] = []


def listen(listener: Listener) -> None:
    """Notify `listener` of calls until `unlisten`."""
    if not _listeners:
        _install()
    _listeners.append(listener)


def unlisten(listener: Listener) -> None:
    """Stop notifying `listener`. A second call does nothing."""
    if listener in _listeners:
        _listeners.remove(listener)
        if not _listeners:
            while _undo:
                _undo.pop()()


def sees_clipping() -> bool:
    """Tell whether the clipping functions of this torch are wrappers, so that their calls can be observed."""
    return _wrapped(clip_grad.clip_grad_norm_) is not None and _wrapped(clip_grad.clip_grad_value_) is not None


def _install() -> None:
    for public in (clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_):
        cell = _wrapped(public)
        if cell is not None:
            original = cell.cell_contents
            cell.cell_contents = _observed_clipping(original, returns_norm=public is clip_grad.clip_grad_norm_)
            _undo.append(functools.partial(setattr, cell, "cell_contents", original))
    step = GradScaler.step
    GradScaler.step = _observed_step(step)  # type: ignore[method-assign]
    _undo.append(functools.partial(setattr, GradScaler, "step", step))


def _wrapped(function: Any) -> CellType | None:
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    cells = dict(zip(code.co_freevars, closure or (), strict=True)) if code is not None else {}
    return cells.get("func")


def _observed_clipping(clip: Callable[..., Any], *, returns_norm: bool) -> Callable[..., Any]:
    @functools.wraps(clip)
    def observed(parameters: Any, *args: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling():
            return clip(parameters, *args, **keywords)
        tensors, parameters = _kept(parameters)
        listening = [listener for listener in _listeners if listener.clips(tensors)]
        norm_type = keywords.get("norm_type", args[1] if len(args) > 1 else 2.0)
        is_known = returns_norm and float(norm_type) == 2
        before = _gradient_norm(tensors) if listening and not is_known else None
        result = clip(parameters, *args, **keywords)
        before = result.detach() if is_known else before
        for observer in listening:
            if before is not None:
                observer.clipped(tensors, before)
        return result

    return observed


def _observed_step(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def observed(scaler: GradScaler, optimizer: Optimizer, *args: Any, **keywords: Any) -> Any:
        if not scaler.is_enabled():
            return step(scaler, optimizer, *args, **keywords)
        for listener in _listeners:  # the first may add another listener
            listener.scaled_step_begins(optimizer, _scale_of(scaler, optimizer))
        try:
            return step(scaler, optimizer, *args, **keywords)
        finally:
            for observer in reversed([*_listeners]):
                observer.scaled_step_ended(optimizer)

    return observed


def _scale_of(scaler: GradScaler, optimizer: Optimizer) -> Tensor | None:
    """Return the scale that gradients still have, without waiting for the device."""
    try:
        if scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY:
            return None
        return scaler._get_scale_async()
    except (AttributeError, KeyError, AssertionError):  # private: other versions of torch may lack it
        return None


def _kept(parameters: Any) -> tuple[list[Tensor], Any]:
    """Return the parameters as a list, and as an argument that can still be iterated: a list uses up a generator."""
    if isinstance(parameters, Tensor):
        return [parameters], parameters
    tensors = list(parameters)
    if isinstance(parameters, GeneratorType):
        return tensors, (tensor for tensor in tensors)
    return tensors, parameters if isinstance(parameters, Sequence) else tensors


def _gradient_norm(parameters: Sequence[Tensor]) -> Tensor | None:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    with torch.no_grad():
        return torch.linalg.vector_norm(together(norms_of(gradients))) if gradients else None


def guarded(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R | None]:
    """Keep a method's errors out of the training; after the end, and in forked children, it does nothing."""

    @functools.wraps(method)
    def guarded_method(self: Any, *args: P.args, **keywords: P.kwargs) -> R | None:
        if self.is_closed or os.getpid() != self._process:
            return None
        records = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # `no_grad` costs several times as much, at every step
        try:
            return method(self, *args, **keywords)
        except Exception as error:  # noqa: BLE001 - never into a training
            self._give_up(error)
            return None
        finally:
            torch._C._set_grad_enabled(records)

    return guarded_method  # type: ignore[return-value]  # mypy: "self" by name


def as_written(method: Callable[P, R]) -> Callable[P, R]:
    """Return a hook that runs uncompiled, also inside a compiled step; torch._dynamo is imported only when it runs."""

    @functools.wraps(method)
    def hook(*args: P.args, **keywords: P.kwargs) -> R:
        return method(*args, **keywords)

    return torch._disable_dynamo(hook)  # type: ignore[attr-defined]


def before_first_forward(call: Callable[[], None]) -> None:
    """Call `call` before the first forward pass with gradients after an optimiser has been made.

    By then networks are wrapped and moved, and weights are loaded. A forward pass inside compiled code is not seen.
    """
    handles: list[RemovableHandle] = []
    ignored = ("ignore", re.compile("Using `torch.compile.* when there are global hooks"), UserWarning, None, 0)

    def forward_begins(_module: nn.Module, _args: object) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        while handles:
            handles.pop().remove()
            with suppress(ValueError):  # the script has set other filters
                warnings.filters.remove(ignored)  # type: ignore[attr-defined]
        call()

    made = Optimizer.__init__

    @functools.wraps(made)
    def observed(optimizer: Optimizer, *args: Any, **keywords: Any) -> None:
        made(optimizer, *args, **keywords)
        if not handles:
            handles.append(register_module_forward_pre_hook(forward_begins))
            warnings.filters.insert(0, ignored)  # type: ignore[attr-defined]  # of `torch.compile`, about our hook

    Optimizer.__init__ = observed  # type: ignore[method-assign, assignment]
