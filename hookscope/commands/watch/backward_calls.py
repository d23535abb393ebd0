"""Observe calls of `backward`: the loss, and the calling line of the script.

`Tensor.backward` looks up `torch.autograd.backward` at every call, so that function is replaced, for the life of the
process. A scaled loss may be divided before `backward`, so `GradScaler.scale` stores the scale in the metadata of the
node that it makes.
"""

import functools
import os
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import Node

from hookscope.commands.watch.transfers import number_of

_SCALE = "hookscope scale"

# Between `scale` and `backward` there are few nodes, such as a division by the number of accumulated batches.
_MOST_NODES = 8

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_HOOKSCOPE = f"{Path(__file__).parent.parent}{os.sep}"
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def observe_backward(before: Callable[[Tensor | None, str], None], after: Callable[[], None]) -> None:
    """Call `before` and `after` around every call of `backward`; they must not raise.

    `before` gets the loss and the place of the call, "train.py:9". The loss is None if `backward` was given a list, or
    gradients. Calls inside a backward pass, by reentrant checkpointing, are ignored.
    """
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def observed(tensors: Any, grad_tensors: Any = None, *args: Any, **keywords: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return backward(tensors, grad_tensors, *args, **keywords)
        before(_loss(tensors, grad_tensors), _place(sys._getframe(1)))
        backward(tensors, grad_tensors, *args, **keywords)
        after()
        return None

    # In a compiled step dynamo would trace into these calls instead of making them.
    torch.autograd.backward = torch._disable_dynamo(observed)  # type: ignore[attr-defined]
    scale = GradScaler.scale

    @functools.wraps(scale)
    def observed_scale(scaler: GradScaler, outputs: Any) -> Any:
        scaled = scale(scaler, outputs)
        if scaler.is_enabled():
            _mark(scaled, scaler)
        return scaled

    GradScaler.scale = observed_scale  # type: ignore[method-assign, assignment]


def value_of(loss: Tensor) -> float | Tensor:
    """Return the value of a loss, without the scale of a GradScaler."""
    scale = _scale_of(loss)
    return number_of(loss if scale is None else loss.detach() / scale)


def _loss(tensors: Any, gradients: Any) -> Tensor | None:
    if isinstance(tensors, list | tuple) and len(tensors) == 1:
        tensors = tensors[0]
    is_loss = isinstance(tensors, Tensor) and tensors.numel() == 1 and not tensors.is_complex() and gradients is None
    return tensors if is_loss else None


_scalers: set[int] = set()  # that have scaled a loss; without one, graphs are not searched


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


def _scale_of(loss: Tensor) -> Tensor | None:
    """Return the factor by which `GradScaler.scale` has multiplied a loss; None without one."""
    todo = [loss.grad_fn] if _scalers else []
    for node in todo:
        if node is None:
            continue
        scale = _metadata(node).get(_SCALE)
        if isinstance(scale, Tensor):
            return scale
        if len(todo) < _MOST_NODES:
            todo += [below for below, _ in node.next_functions]
    return None


def _place(frame: FrameType | None) -> str:
    """Return the innermost line of the script, "train.py:9", or else of a library."""
    library = ""
    while frame is not None:
        owner, name = _owner(frame.f_code.co_filename)
        if owner == "script":
            return f"{name}:{frame.f_lineno}"
        if owner == "library" and not library:
            library = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return library


@cache
def _owner(path: str) -> tuple[str, str]:
    """Return the owner of a file, "torch", "library" or "script", and the name of the file."""
    name = Path(path).name
    if path.startswith((_TORCH, _HOOKSCOPE)):
        return "torch", name
    return "library" if path.startswith(("<", *_LIBRARIES)) else "script", name
