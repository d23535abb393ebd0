"""The network to inspect, without its wrappers, and its inputs as batches."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookscope.errors import HookscopeError, UnfitInputError, UsageError
from hookscope.hooks.observed import shape_of
from hookscope.hooks.selection import module_index, owned_parameters, unwrap
from hookscope.inputs.batches import Batch, length_of, part_of
from hookscope.inputs.pipeline import InputPipeline
from hookscope.inputs.tensors import with_inputs_first
from hookscope.inspection.state.held_values import dense_parts
from hookscope.models.construction import LoadedModel, loaded_module
from hookscope.results.inputs import InputRecord, Preprocessing
from hookscope.results.network import ModelInfo
from hookscope.statistics.storage import flat_bytes, plain_array
from hookscope.text import safe_text, shape_text


@dataclass(frozen=True, slots=True)
class InspectedNetwork:
    """A network, without the wrappers it came in, ready to be inspected.

    Attributes:
        modules: Every module once, by its first dotted name.
        aliases: Further names of those that have several.
        parameter_counts: Elements in the `owned_parameters` of each module, by its name.
        multi_label: As `LoadedModel.multi_label`.
    """

    network: nn.Module
    info: ModelInfo
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    modules: Mapping[str, nn.Module]
    aliases: Mapping[str, tuple[str, ...]]
    parameter_counts: Mapping[str, int]
    multi_label: bool = False

    def parameters(self) -> list[nn.Parameter]:
        """List every parameter once, as `network.parameters()` does, but without building names."""
        held = chain.from_iterable([module._parameters.values() for module in self.modules.values()])
        return [*{id(parameter): parameter for parameter in held if parameter is not None}.values()]

    @property
    def placed(self) -> tuple[str, str]:
        """Device and dtype of the first floating parameter, else buffer: ("cuda:0", "float32"), or ("cpu", "none")."""
        held = chain(self.network.parameters(), self.network.buffers())
        first = next((tensor for tensor in held if tensor.is_floating_point()), None)
        return ("cpu", "none") if first is None else (str(first.device), str(first.dtype).removeprefix("torch."))


def inspected_network(model: nn.Module | LoadedModel | InspectedNetwork) -> InspectedNetwork:
    """Return the network without its wrappers.

    Raises:
        UsageError: If a module of it is lazy.
    """
    if isinstance(model, InspectedNetwork):
        return model
    loaded = loaded_module(model)
    network = unwrap(loaded.module)
    modules, aliases = module_index(network)
    counts = count_parameters(modules)
    kinds = {*map(type, modules.values())}
    has_lists = any(issubclass(kind, nn.ParameterList | nn.ParameterDict) for kind in kinds)
    for name, module in modules.items():
        if has_lists or "parametrizations" in module._modules:  # else a module owns what it holds directly
            counts[name] = sum(parameter.numel() for parameter in owned_parameters(module))
    described = loaded.info, loaded.warnings, loaded.notes
    return InspectedNetwork(network, *described, modules, aliases, counts, multi_label=loaded.multi_label)


def model_digest(module: nn.Module) -> str:
    """Return a digest of a network's structure, parameters and buffers."""
    try:
        structure = repr(module)
    except Exception:  # noqa: BLE001 - code of the network's own may raise anything
        structure = repr([(name, type(child).__qualname__) for name, child in module.named_modules()])
    digest = hashlib.sha256(structure.encode())
    for name, tensor in sorted([*module.named_parameters(), *module.named_buffers()]):
        digest.update(f"{name} {tensor.dtype} {tuple(shape_of(tensor))}".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> Any:
    """Return the bytes of a tensor's values; for a sparse, nested or quantised tensor, those of its parts."""
    values = tensor.detach()
    if values.is_meta:
        return b""
    if values.layout == torch.strided and not (values.is_nested or values.is_quantized):
        return plain_array(flat_bytes(values)).data
    parts = [values.int_repr(), values.dequantize()] if values.is_quantized else dense_parts(values)
    return b"".join(part for tensor in parts for part in (repr(tensor.shape).encode(), bytes_of(tensor)))


def as_batches(inputs: Tensor | Batch | Iterable[Batch]) -> Iterable[Batch]:
    """Return inputs as batches; a tensor is one, with the inputs on axis 0; UsageError if it has none."""
    if isinstance(inputs, Tensor):
        count = length_of(inputs) if inputs.dim() else 1
        if not count:
            raise UsageError(f"A tensor of shape {shape_text(inputs.shape)} holds no input: axis 0 counts the inputs.")
        names = ["tensor"] if count == 1 else [f"tensor[{index}]" for index in range(count)]
        records = tuple(InputRecord(name, None, None, tuple(shape_of(inputs)[1:]), ()) for name in names)
        return [Batch((inputs,), tuple(range(count)), records)]
    return [inputs] if isinstance(inputs, Batch) else inputs


def batch_of(tensor: Tensor, preprocessing: Preprocessing) -> Batch:
    """Return a tensor as one batch; `preprocessing` tells which axis counts inputs, as of a tensor file."""
    return next(iter(as_batches(with_inputs_first(tensor, preprocessing))))


@dataclass(slots=True)
class BatchQueue:
    """Batches in order; `on_error` is called for each input that is left out; with None, none is left out."""

    _further: Iterator[Batch]
    on_error: Callable[[UnfitInputError], None] | None
    _next: deque[Batch] = field(default_factory=deque)
    _apart: list[str] = field(default_factory=list)
    indices: tuple[int, ...] = ()  # the batch handed out last

    @property
    def remarks(self) -> tuple[str, ...]:
        """A sentence about the batches that were taken apart, if there were any."""
        if len(self._apart) < 2:
            return tuple(f"The model raised on {batch}: they were run one by one." for batch in self._apart)
        others = f"{len(self._apart) - 1} other batch{'es' if len(self._apart) > 2 else ''}"
        return (f"The model raised on {self._apart[0]} and on {others}: their inputs were run one by one.",)

    def __iter__(self) -> Iterator[Batch]:
        """Hand out the batches until there are no more."""
        while (batch := self.peek()) is not None:
            self._next.popleft()
            self.indices = batch.indices
            yield batch
            del batch  # only the caller holds it now

    def peek(self, ahead: int = 0) -> Batch | None:
        """Return the batch that comes next, or one further `ahead`, without handing it out; None if there is none."""
        self._next.extend(islice(self._further, max(ahead + 1 - len(self._next), 0)))
        return self._next[ahead] if ahead < len(self._next) else None

    def set_aside(self, batch: Batch, reason: str, error: BaseException, *, takes_apart: bool = True) -> bool:
        """Leave out a batch of one input, or give the inputs of a larger one again; tell whether it is left out.

        The error loses its traceback: the tensors of the pass hang on that. Unless `takes_apart`, the whole of a larger
        batch is left out.
        """
        raised: BaseException | None = error
        while raised is not None:
            raised.__traceback__ = None
            raised = raised.__context__
        # Tensors that are no files have no names.
        names = [safe_text(record.name) for record in batch.records if record.sha256]
        count = len(batch.indices)
        if count == 1 or not takes_apart:
            self.leave_out(UnfitInputError(names, reason, batch.indices))
            return True
        self._next.extendleft(part_of(batch, index) for index in reversed(range(count)))
        span = f" ({names[0]} to {names[-1]})" if names else ""
        self._apart.append(f"a batch of {count} inputs{span}")
        return False

    def leave_out(self, error: UnfitInputError) -> None:
        """Report inputs that cannot be used; without an `on_error`, raise the error."""
        if self.on_error is None:
            raise error
        self.on_error(error)


def queue_of(inputs: Tensor | Batch | Iterable[Batch]) -> BatchQueue:
    """Return inputs as a queue of batches, of which none is left out unless they are such a queue already."""
    return inputs if isinstance(inputs, BatchQueue) else BatchQueue(iter(as_batches(inputs)), None)


def queued(inputs: InputPipeline, size: int, on_error: Callable[[HookscopeError], None] | None) -> BatchQueue:
    """Return inputs in batches of at most `size`; those that cannot be used go to `on_error`, or raise without it."""
    return BatchQueue(inputs.batches(size, on_error), on_error)


def count_parameters(modules: Mapping[str, nn.Module]) -> dict[str, int]:
    """Count the elements of the parameters that each module owns directly; one that it holds twice counts once.

    Raises:
        UsageError: If a module is lazy: its first input would give it parameters, so nothing could be restored.
    """
    registers = [held for module in modules.values() for held in (module._parameters, module._buffers)]
    if not _EAGER.issuperset(map(type, chain.from_iterable([held.values() for held in registers]))):
        for name, module in modules.items():
            tensors: list[Any] = [*module._parameters.values(), *module._buffers.values()]
            if any(map(is_lazy, tensors)):
                kind = f"{name or 'The model'} ({type(module).__name__})"
                remedy = "Run the model once where it is built."
                raise UsageError(f"{kind} is lazy: it has no parameters before its first input. {remedy}")
    sizes = {
        name: {id(parameter): parameter.numel() for parameter in module._parameters.values() if parameter is not None}
        for name, module in modules.items()
    }
    return {name: sum(of_module.values()) for name, of_module in sizes.items()}


_EAGER = frozenset({nn.Parameter, Tensor, type(None)})
