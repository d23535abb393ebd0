"""The inputs of a step, to name the one that holds NaN or Inf when the loss does."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hookscope.commands.watch.networks import WatchedNetwork
from hookscope.hooks.calls import Hook
from hookscope.hooks.memory import missing_memory
from hookscope.hooks.observed import version_of
from hookscope.hooks.pytree import tensors_given
from hookscope.text import some_of

_MOST_CALLS = 100  # of a step that accumulates gradients


class StepInputs:
    """Remembers what networks are called with in a step, for as long as the training itself keeps it."""

    def __init__(self, networks: Iterable[WatchedNetwork], failed: Callable[[Exception], None]) -> None:
        """Remember nothing before `begin`; `failed` gets hookscope's own errors. Compiled networks are left out."""
        self._networks = [network.network for network in networks if not network.compiled]
        self._failed = failed
        self._handles: list[RemovableHandle] = []
        self._calls: deque[list[tuple[weakref.ref[Tensor], int]]] = deque(maxlen=_MOST_CALLS)

    def begin(self) -> None:
        """Begin a step: forget the inputs of the last one; the first call registers the hooks."""
        self._calls.clear()
        hook = Hook(self._called)
        for network in self._networks[len(self._handles) :]:
            self._handles.append(network.register_forward_pre_hook(hook, with_kwargs=True))

    def end(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _called(self, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        try:
            tensors = [tensor for _, tensor in tensors_given(args, kwargs) if tensor.is_floating_point()]
            self._calls.append([(weakref.ref(tensor), version_of(tensor)) for tensor in tensors])
        except Exception as error:  # noqa: BLE001 - never into a training
            self._failed(error)

    def not_finite(self) -> str:
        """Return which input holds NaN or Inf: "NaN: index 3 of the batch of 64"; "" for none that can be read."""
        for reference, version in (tensor for call in self._calls for tensor in call):
            tensor = reference()
            if tensor is None or version_of(tensor) != version or not _is_readable(tensor):
                continue
            finite = tensor.detach().isfinite()
            if not finite.all():
                value = "NaN" if tensor.detach().isnan().any() else "Inf"
                indices = [str(index) for index, row in enumerate(finite) if not row.all()]
                word = "indices" if indices[1:] else "index"
                return f"{value}: {word} {some_of(indices, 3)} of the batch of {len(tensor)}"
        return ""


def _is_readable(tensor: Tensor) -> bool:
    plain = tensor.layout == torch.strided and not tensor.is_nested and tensor.dim() > 0
    return plain and tensor.itemsize > 1 and not missing_memory(tensor)
