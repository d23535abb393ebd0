"""Watch the gradient at each time step of the inputs of recurrent layers and attention.

Their inputs are replaced by aliases, so that only the path through the layer counts, and the gradient exists even if
nothing before the layer requires one. One number is kept for each step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hookscope.hooks.autograd import Aliased, is_transformed
from hookscope.hooks.memory import PLAIN_TENSORS

_RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)
_CELLS = (nn.RNNCell, nn.LSTMCell, nn.GRUCell)

STEPPED: frozenset[type[nn.Module]] = frozenset({*_RECURRENT, *_CELLS, nn.MultiheadAttention})
"""Modules whose time axis is known. Subclasses may do anything with their inputs."""

_UNBATCHED_AXES = 2  # (T, D)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments by position and by name."""


class StepGradient(NamedTuple):
    """The gradient that arrived at one input of one call.

    Attributes:
        largest: Greatest magnitude of each step over all inputs and features, (T,), on the gradient's device. Squares
            of vanishing gradients would underflow.
    """

    layer: str
    kind: str
    call: int
    dtype: torch.dtype
    largest: Tensor


@dataclass(slots=True)
class StepWatch:
    """Replaces inputs by aliases, and records their gradients: the last call's gradient comes first."""

    gradients: list[StepGradient] = field(default_factory=list)

    def with_aliases(
        self, layer: str, call: int, module: nn.Module, inputs: Arguments, is_listening: Callable[[], bool]
    ) -> Arguments:
        """Return the arguments with aliases in place of the watched inputs.

        Attention is watched at its keys and values, and at the query if that is the same tensor: a position that
        nothing attends to gets no gradient there, while a query that the loss leaves out is no fault.
        """
        if not torch.is_grad_enabled():
            return inputs
        args, kwargs = inputs
        names = ("query", "key", "value") if isinstance(module, nn.MultiheadAttention) else ("input",)
        by_name = {name: value for name, value in (*zip(names, args, strict=False), *kwargs.items()) if name in names}
        record = partial(self._record, layer, type(module).__name__, call, is_listening)
        # One for each object: attention tests whether the query is the key.
        watched = {id(by_name[name]): by_name[name] for name in names[-2:] if name in by_name}
        aliases = {key: _alias_with_hook(value, module, record) for key, value in watched.items()}
        by_name = {name: aliases.get(id(value), value) for name, value in by_name.items()}
        args = (*(by_name[name] for name, _ in zip(names, args, strict=False)), *args[len(names) :])
        return args, {name: by_name.get(name, value) for name, value in kwargs.items()}

    def _record(
        self,
        layer: str,
        kind: str,
        call: int,
        is_listening: Callable[[], bool],
        reduce: Callable[[Tensor], Tensor],
        gradient: Tensor,
    ) -> None:
        if is_listening() and gradient.numel():
            with torch.no_grad():
                self.gradients.append(StepGradient(layer, kind, call, gradient.dtype, reduce(gradient.detach())))


def _alias_with_hook(
    value: Any, module: nn.Module, record: Callable[[Callable[[Tensor], Tensor], Tensor], None]
) -> Any:
    """Return an alias of an input with a hook; the input itself if it can have no gradient."""
    is_packed = isinstance(value, PackedSequence)
    tensor = value.data if is_packed else value
    if not _can_be_watched(tensor, module):
        return value
    # It shares memory and version counter, and has a graph node of its own.
    alias: Any = Aliased.apply(tensor if tensor.requires_grad else tensor.detach().requires_grad_())
    steps = partial(_packed_steps, value.batch_sizes) if is_packed else partial(_steps, _time_axis(module, value))
    alias.register_hook(partial(record, steps))
    return PackedSequence(alias, *value[1:]) if is_packed else alias


def _can_be_watched(value: object, module: nn.Module) -> bool:
    """Tell whether an input can be made to receive a gradient without changing anything else."""
    if type(value) not in PLAIN_TENSORS or not isinstance(value, Tensor):
        return False
    if not value.is_floating_point() or value.is_inference() or value.is_nested or is_transformed(value):
        return False
    return value.requires_grad or any(parameter.requires_grad for parameter in module.parameters())


def _time_axis(module: nn.Module, value: Tensor) -> int | None:
    """Return the axis of an input that counts steps; None for cells, which take one."""
    if isinstance(module, _CELLS):
        return None
    batch_first = isinstance(module, (*_RECURRENT, nn.MultiheadAttention)) and module.batch_first
    return 1 if batch_first and value.dim() > _UNBATCHED_AXES else 0


def _steps(axis: int | None, gradient: Tensor) -> Tensor:
    if axis is None:
        return gradient.abs().amax().reshape(1)
    return gradient.movedim(axis, 0).flatten(1).abs().amax(1)


def _packed_steps(batch_sizes: Tensor, gradient: Tensor) -> Tensor:
    """Return the greatest magnitude of each step, (T,), in a packed gradient, (sum of batch sizes, D)."""
    steps = torch.repeat_interleave(torch.arange(len(batch_sizes)), batch_sizes).to(gradient.device)
    return gradient.new_zeros(len(batch_sizes)).scatter_reduce_(0, steps, gradient.abs().amax(1), "amax")


def by_layer(gradients: Sequence[StepGradient]) -> Mapping[str, StepGradient]:
    """Join the calls of each layer, in the order in which they were made, to one sequence of steps."""
    calls: dict[str, dict[int, StepGradient]] = {}
    for gradient in gradients:
        earlier = calls.setdefault(gradient.layer, {}).get(gradient.call)
        same = earlier is not None and earlier.largest.shape == gradient.largest.shape  # of keys and of values
        largest = torch.maximum(earlier.largest, gradient.largest) if earlier is not None and same else gradient.largest
        calls[gradient.layer][gradient.call] = gradient._replace(largest=largest)
    return {
        layer: of_calls[min(of_calls)]._replace(
            largest=torch.cat([of_calls[call].largest for call in sorted(of_calls)])
        )
        for layer, of_calls in calls.items()
    }
