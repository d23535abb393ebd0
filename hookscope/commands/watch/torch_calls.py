"""Observe calls of `backward`, of the clipping functions and `GradScaler`, and the first forward pass.

`Tensor.backward` looks up `torch.autograd.backward` at every call, so that function is replaced. A scaled loss may be
divided before `backward`, so `GradScaler.scale` stores the scale in the metadata of the node that it makes.

Scripts import the clipping functions by name, often before there is a listener, so replacing attributes of the module
would miss their calls. The functions are wrappers that hold the inner function in a closure cell: the content of the
cell is replaced, and restored later.
"""

import functools
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import CellType, CodeType, FrameType, GeneratorType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hookscope.commands.watch.gradients import HALF, norms_of, number_of

P = ParamSpec("P")
R = TypeVar("R")

_CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_")

_SCALE = "hookscope scale"

# Between `scale` and `backward` there are few nodes, such as a division by the number of accumulated batches.
_MOST_NODES = 8

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_HOOKSCOPE = f"{Path(__file__).parents[2]}{os.sep}"
STEP = Optimizer.profile_hook_step(Optimizer.step).__code__  # torch's wrapper around every `step`
FORWARD = nn.Module._call_impl.__code__
_RUNS_SCRIPTS = str(Path(__file__).with_name("script.py"))
_STANDARD = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_INSTALLED = {"site-packages", "dist-packages"}


class Listener(Protocol):
    """Is notified of calls; its methods must not raise."""

    def backward_begins(self, loss: Tensor | None, place: str) -> None:
        """Note a call of `backward`, at "train.py:9"; the loss is None if `backward` gets a list, or gradients."""

    def backward_ended(self) -> None:
        """Note that `backward` has returned."""

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
    return all(_wrapped(getattr(clip_grad, name, None)) is not None for name in _CLIPPING)


def _install() -> None:
    for name in _CLIPPING:
        cell = _wrapped(getattr(clip_grad, name, None))
        if cell is not None:
            original = cell.cell_contents
            cell.cell_contents = _observed_clipping(original, returns_norm=name == "clip_grad_norm_")
            _undo.append(functools.partial(setattr, cell, "cell_contents", original))
    for owner, name, observed in (
        (GradScaler, "step", _observed_step),
        (GradScaler, "scale", _observed_scale),
        (torch.autograd, "backward", _observed_backward),
    ):
        original = getattr(owner, name)
        setattr(owner, name, observed(original))
        _undo.append(functools.partial(setattr, owner, name, original))


def _wrapped(function: Any) -> CellType | None:
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    cells = dict(zip(code.co_freevars, closure or (), strict=True)) if code is not None else {}
    return cells.get("func")


def _observed_clipping(clip: Callable[..., Any], *, returns_norm: bool) -> Callable[..., Any]:
    @functools.wraps(clip)
    def observed(parameters: Any, *args: Any, **keywords: Any) -> Any:
        # clip_grad_norm_ calls _clip_grads_with_norm_, through a wrapper of torch's.
        if torch.compiler.is_compiling() or sys._getframe(2).f_globals is vars(clip_grad):
            return clip(parameters, *args, **keywords)
        tensors, parameters = _listed_and_iterable(parameters)
        listening = [listener for listener in _listeners if listener.clips(tensors)]
        norm_type = keywords.get("norm_type", args[1] if len(args) > 1 else 2.0)
        is_known = returns_norm and float(norm_type) == 2 and not any(map(_has_half_gradient, tensors))
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


def _observed_scale(scale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scale)
    def observed(scaler: GradScaler, outputs: Any) -> Any:
        scaled = scale(scaler, outputs)
        if scaler.is_enabled():
            _mark(scaled, scaler)
        return scaled

    return observed


def _observed_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def observed(tensors: Any, grad_tensors: Any = None, *args: Any, **keywords: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # inside a backward pass, by reentrant checkpointing
            backward(tensors, grad_tensors, *args, **keywords)
            return
        loss, place = _loss(tensors, grad_tensors), _place(sys._getframe(1))
        for listener in [*_listeners]:
            listener.backward_begins(loss, place)
        backward(tensors, grad_tensors, *args, **keywords)
        for listener in [*_listeners]:
            listener.backward_ended()

    # In a compiled step dynamo would trace into these calls instead of making them.
    return torch._disable_dynamo(observed)  # type: ignore[attr-defined]


def _scale_of(scaler: GradScaler, optimizer: Optimizer) -> Tensor | None:
    """Return the scale that gradients still have, without waiting for the device."""
    try:
        if scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY:
            return None
        return scaler._get_scale_async()
    except (AttributeError, KeyError, AssertionError):  # private: other versions of torch may lack it
        return None


def _listed_and_iterable(parameters: Any) -> tuple[list[Tensor], Any]:
    """Return the parameters as a list, and in a form that can still be iterated: listing uses up a generator."""
    if isinstance(parameters, Tensor):
        return [parameters], parameters
    tensors = list(parameters)
    if isinstance(parameters, GeneratorType):
        return tensors, (tensor for tensor in tensors)
    return tensors, parameters if isinstance(parameters, Sequence) else tensors


def _has_half_gradient(parameter: Tensor) -> bool:
    """Tell whether torch would round the norm of a gradient to three digits; sharded gradients are left to torch."""
    return type(parameter.grad) is Tensor and parameter.grad.dtype in HALF


def _gradient_norm(parameters: Sequence[Tensor]) -> Tensor | None:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    with torch.no_grad():
        return norms_of([norms_of(gradients)])[0] if gradients else None


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


def uncompiled(method: Callable[P, R]) -> Callable[P, R]:
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
            warnings.filters.insert(0, ignored)  # type: ignore[attr-defined]  # torch.compile warns about our hook

    Optimizer.__init__ = observed  # type: ignore[method-assign, assignment]


def value_of(loss: Tensor) -> float | Tensor:
    """Return the value of a loss, without the scale of a GradScaler."""
    nodes = nodes_of(loss.grad_fn, _MOST_NODES) if _scalers else ()
    scale = next((_metadata(node)[_SCALE] for node in nodes if is_loss_scale(node)), None)
    return number_of(loss if scale is None else loss.detach() / scale)


def _loss(tensors: Any, gradients: Any) -> Tensor | None:
    if isinstance(tensors, list | tuple) and len(tensors) == 1:
        tensors = tensors[0]
    is_loss = isinstance(tensors, Tensor) and tensors.numel() == 1 and not tensors.is_complex() and gradients is None
    return tensors if is_loss else None


_scalers: set[int] = set()  # ids of those that scaled a loss; if empty, graphs are not searched


def _mark(scaled: Any, scaler: GradScaler) -> None:
    if isinstance(scaled, Tensor):
        if scaled.grad_fn is not None:
            _scalers.add(id(scaler))
            _metadata(scaled.grad_fn)[_SCALE] = scaler._scale
    elif isinstance(scaled, list | tuple):
        for loss in scaled:
            _mark(loss, scaler)


def is_loss_scale(node: Node) -> bool:
    """Tell whether a node is the multiplication by `GradScaler.scale`."""
    return bool(_scalers) and _SCALE in _metadata(node)


def _metadata(node: Node) -> dict[str, Any]:
    return node.metadata  # type: ignore[return-value]  # torch has it as a property, and declares a method


def nodes_of(loss: Node | None, most: int = 100_000) -> Iterator[Node]:
    """Yield nodes of the graph of a loss, from the loss backwards; `most` is enough for some thousand layers."""
    todo = [] if loss is None else [loss]
    seen = {*todo}
    for node in todo:
        yield node
        below = dict.fromkeys(child for child, _ in node.next_functions if child is not None and child not in seen)
        if len(seen) < most:
            seen.update(below)
            todo += below


def calls_under_way(code: CodeType, owner: object) -> int:
    """Return how many calls of a method, `STEP` or `FORWARD`, are on the stack; compiled calls are not found.

    A counter alone would stay too high after a call that was interrupted.
    """
    frame: FrameType | None = sys._getframe()
    count = 0
    while frame is not None:
        count += frame.f_code is code and frame.f_locals.get("self") is owner
        frame = frame.f_back
    return count


def _place(frame: FrameType | None) -> str:
    """Return the innermost line of the script, "train.py:9", or else of a library."""
    library = ""
    while frame is not None and frame.f_code.co_filename != _RUNS_SCRIPTS:
        owner, name = _owner(frame.f_code.co_filename)
        if owner == "script":
            return f"{name}:{frame.f_lineno}"
        if owner == "library" and not library:
            library = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return library


@functools.cache
def _owner(path: str) -> tuple[str, str]:
    """Return the owner of a file, "torch", "library" or "script", and the name of the file."""
    name, folders = Path(path).name, Path(path).parts[:-1]
    if path.startswith((_TORCH, _HOOKSCOPE)):
        return "torch", name
    is_library = path.startswith(("<", *_STANDARD)) or not _INSTALLED.isdisjoint(folders)
    return "library" if is_library else "script", name
