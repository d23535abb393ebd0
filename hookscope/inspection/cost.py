"""What the modules of a network cost: multiply-adds, what they hold and save, what their cells see, and their time.

Each is found in a pass of its own, which disturbs no other: operations are counted as torch dispatches them, with
gradients, so that autograd saves what it saves in training; receptive fields are read from the graph of a pass whose
input requires a gradient; times are those of passes without either.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from hookscope.errors import ModelError
from hookscope.hooks.autograd import history_is_lost
from hookscope.hooks.module_scopes import module_scopes
from hookscope.hooks.observed import shape_of
from hookscope.hooks.pytree import tensors_given, tensors_in
from hookscope.hooks.running import unfused
from hookscope.hooks.selection import module_index, unwrap
from hookscope.inspection.execution import copied_inputs
from hookscope.inspection.failures import reraise_internal
from hookscope.inspection.multiply_adds import is_known, multiply_adds, name_of
from hookscope.inspection.receptive_fields import ReceptiveFields
from hookscope.inspection.state.preservation import preserved
from hookscope.results.cost import CostSums, ModuleCost, NetworkCost, ReceptiveField, UncountedOperation
from hookscope.text import exception_line

# At least so many passes are timed, and more while all of them together take less than `_SECONDS`. No warm-up is
# needed: the pass that counts operations runs before.
_PASSES_AT_LEAST = 3
_PASSES_AT_MOST = 9
_SECONDS = 1.0


class Call(NamedTuple):
    """A network and what to call it with."""

    network: nn.Module
    args: Sequence[object]
    kwargs: Mapping[str, object]


def network_cost(call: Call, shapes: Call | None = None, *, timed: bool = True) -> NetworkCost:
    """Measure what one forward pass in eval mode costs; the network comes out as it went in.

    Args:
        call: The network where it runs, with one input.
        shapes: The same on the meta device, where receptive fields are found faster; None for `call` itself.
        timed: Whether to time the modules.

    Raises:
        ModelError: If the network raises.
    """
    call = call._replace(network=unwrap(call.network))
    modules, _ = module_index(call.network)
    counts, notes = _counted(call, modules)
    fields, remark = _fields_of(call if shapes is None else shapes._replace(network=unwrap(shapes.network)))
    notes += [remark] if remark else []
    first = next(
        (tensor for module in modules.values() for tensor in module._parameters.values() if tensor is not None), None
    )
    device = torch.device("cpu") if first is None else first.device
    timed = timed and device.type != "meta"
    times = _times(call, modules, device) if timed else {}
    if any(isinstance(module, nn.TransformerEncoderLayer) for module in modules.values()) and timed:
        notes.append("nn.TransformerEncoderLayer runs unfused while it is timed.")
    rows = tuple(_rows(modules, counts, fields, times))
    leaves, outside = CostSums(), CostSums()
    for name, row in zip(modules, rows, strict=True):
        if modules[name]._modules:
            outside += row.own
        else:
            leaves += row.own
    return NetworkCost(
        input_shapes=tuple(tuple(shape_of(tensor)) for _, tensor in tensors_given(tuple(call.args), call.kwargs)),
        modules=rows,
        leaves=leaves,
        outside=outside,
        uncounted=tuple(UncountedOperation(name, count, layer) for name, (count, layer) in counts.uncounted.items()),
        pass_count=max(map(len, times.values()), default=0),
        device=str(device),
        thread_count=torch.get_num_threads(),
        notes=tuple(notes),
    )


def _rows(
    modules: Mapping[str, nn.Module],
    counts: "_Counts",
    fields: Mapping[str, ReceptiveField],
    times: Mapping[str, Sequence[float]],
) -> Iterator[ModuleCost]:
    held = _own_parameters(modules)
    for name, module in modules.items():
        inside = [path for path in modules if path == name or not name or path.startswith(f"{name}.")]
        sums = _sums(held[name], counts.own[name])
        if name in counts.entered:
            computed = counts.inclusive[name]
        else:  # a ModuleList, or a module whose forward was called by name
            computed = _Computed(
                sum(counts.own[path].multiply_adds for path in inside), sum(counts.own[path].saved for path in inside)
            )
        parameters = {id(parameter): parameter for parameter in module.parameters()}
        yield ModuleCost(
            name,
            _sums([*parameters.values()], computed),
            sums,
            counts.output_bytes.get(name),
            fields.get(name),
            median(times[name]) if name in times else None,
        )


def _own_parameters(modules: Mapping[str, nn.Module]) -> dict[str, list[nn.Parameter]]:
    """Return the parameters that each module holds itself; one that is tied belongs to the first."""
    seen: set[int] = set()
    held: dict[str, list[nn.Parameter]] = {}
    for name, module in modules.items():
        parameters = {
            id(parameter): parameter
            for parameter in module._parameters.values()
            if parameter is not None and id(parameter) not in seen
        }
        seen |= parameters.keys()
        held[name] = [*parameters.values()]
    return held


def _sums(parameters: Sequence[nn.Parameter], computed: "_Computed") -> CostSums:
    return CostSums(
        computed.multiply_adds,
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        computed.saved,
    )


# --- Which module runs ---


@dataclass(slots=True)
class _Running:
    """The calls that run in each thread, the innermost last: the module, and when it began."""

    _by_thread: defaultdict[int, list[tuple[str, float]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def stack(self) -> list[tuple[str, float]]:
        return self._by_thread[get_ident()]

    @property
    def innermost(self) -> str:
        return self.stack[-1][0] if self.stack else ""

    def enter(self, name: str) -> None:
        self.stack.append((name, time.perf_counter()))

    def leave(self, name: str) -> float:
        """End the call of a module, and those inside of it that raised before their hooks could run.

        Returns when the call began.
        """
        stack, began = self.stack, 0.0
        while stack:
            top, began = stack.pop()
            if top == name:
                break
        return began


# --- Counting ---


@dataclass(slots=True)
class _Computed:
    multiply_adds: int = 0
    saved: int = 0


@dataclass(slots=True)
class _Counts:
    """What a pass has shown.

    Attributes:
        own: Of each module without those inside it.
        inclusive: Of each module with what it calls.
        uncounted: For each operation without a formula, how often it was called, and by which module first.
    """

    running: _Running = field(default_factory=_Running)
    entered: set[str] = field(default_factory=set)
    own: defaultdict[str, _Computed] = field(default_factory=lambda: defaultdict(_Computed))
    inclusive: defaultdict[str, _Computed] = field(default_factory=lambda: defaultdict(_Computed))
    output_bytes: dict[str, int] = field(default_factory=dict)
    uncounted: dict[str, tuple[int, str]] = field(default_factory=dict)

    def enter(self, name: str) -> None:
        self.running.enter(name)
        self.entered.add(name)

    def leave(self, name: str, output: object) -> None:
        self.running.leave(name)
        with torch._C.DisableTorchFunctionSubclass():
            total = sum(_bytes_of(tensor) for _, tensor in tensors_in(output))
        self.output_bytes[name] = self.output_bytes.get(name, 0) + total

    def computes(self, operation: Any, count: int | None) -> None:
        layer = self.running.innermost
        if count is None:
            name = name_of(operation)
            calls, first = self.uncounted.get(name, (0, layer))
            self.uncounted[name] = (calls + 1, first)
        elif count:
            for computed in self._concerned():
                computed.multiply_adds += count

    def saves(self, size: int) -> None:
        for computed in self._concerned():
            computed.saved += size

    def _concerned(self) -> Iterator[_Computed]:
        yield self.own[self.running.innermost]
        for name in {layer for layer, _ in self.running.stack}:
            yield self.inclusive[name]


def _bytes_of(tensor: Tensor) -> int:
    if tensor.layout == torch.strided:
        return tensor.numel() * tensor.element_size()
    return sum(map(_bytes_of, _parts_of(tensor)))


def _parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor without a storage of its own consists of."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [getattr(tensor, name) for name in names]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def _counted(call: Call, modules: Mapping[str, nn.Module]) -> tuple[_Counts, list[str]]:
    """Run the network once with gradients, or without where it raises with them, and count."""
    try:
        return _count(call, modules, with_gradients=True), []
    except ModelError as error:
        counts = _count(call, modules, with_gradients=False)
        return counts, [f"Bytes saved for the backward pass are missing: with gradients, {error}"]


def _count(call: Call, modules: Mapping[str, nn.Module], *, with_gradients: bool) -> _Counts:
    counts = _Counts()
    saved = _SavedStorages(counts, call.network)
    with (
        preserved(call.network, seed=0),
        unfused(),
        module_scopes(modules, counts.enter, counts.leave),
        torch.set_grad_enabled(with_gradients),
        saved_tensors_hooks(saved.pack, lambda tensor: tensor),
    ):
        args, kwargs = copied_inputs(call.args, call.kwargs)
        with _CountingMode(counts):
            _run(call.network, args, kwargs)
    return counts


def _run(network: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    try:
        network(*args, **kwargs)
    except (Exception, SystemExit) as raised:  # noqa: BLE001 - the model's code may raise anything
        error = reraise_internal(raised)
        raise ModelError(f"the network raises {exception_line(error)}") from error


class _CountingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation that torch dispatches, and lets it run."""

    supports_higher_order_operators = True

    def __init__(self, counts: _Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(
        self, func: Any, _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it; one without a formula is taken apart if torch can."""
        keywords = kwargs or {}
        name = name_of(func)
        if name in _ABOUT_SHAPES:  # tensors with a layout of their own answer these themselves
            return NotImplemented
        if not is_known(func) and isinstance(func, torch._ops.OpOverload):
            with self:
                output = func.decompose(*args, **keywords)
            if output is not NotImplemented:
                return output
        output = func(*args, **keywords)
        try:
            count = multiply_adds(func, args, output)
        except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError):  # nested tensors, keywords
            count = None
        self._counts.computes(func, count)
        return output


_ABOUT_SHAPES = frozenset(
    f"{space}{name}"
    for space in ("aten.", "aten.sym_")
    for name in (
        *("is_contiguous", "is_strides_like_format", "is_non_overlapping_and_dense", "size", "stride"),
        *("storage_offset", "numel", "dim"),
    )
) | {"prim.layout"}


class _SavedStorages:
    """Adds up the memory that autograd saves; several views of one memory keep all of it, once."""

    def __init__(self, counts: _Counts, network: nn.Module) -> None:
        self._counts = counts
        self._known: dict[int, StorageWeakRef] = {}  # weak references keep addresses from being used again
        for tensor in (*network.parameters(), *network.buffers()):
            for storage in _storages_of(tensor):
                self._is_new(storage)

    def pack(self, tensor: Tensor) -> Tensor:
        """Note what is saved, which goes on to be saved."""
        with torch._C.DisableTorchFunctionSubclass():
            size = sum(storage.nbytes() for storage in _storages_of(tensor) if self._is_new(storage))
            if size:
                self._counts.saves(size)
            return tensor.detach()  # without its graph, which would hold itself

    def _is_new(self, storage: torch.UntypedStorage) -> bool:
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return self._known.setdefault(reference.cdata, reference) is reference


def _storages_of(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    parts = _parts_of(tensor)
    if parts:
        for part in parts:
            yield from _storages_of(part)
        return
    try:
        yield tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # inside a `torch.func` transform for one
        return


# --- Receptive fields ---


def _fields_of(call: Call) -> tuple[dict[str, ReceptiveField], str]:
    """Return the receptive fields of modules by name, as those of their first calls; or why they are missing."""
    fields, missing = receptive_fields(call)
    return {name: region for (name, number), region in fields.items() if not number}, missing


def receptive_fields(call: Call) -> tuple[dict[tuple[str, int], ReceptiveField], str]:
    """Return the receptive fields of calls of modules whose output is a map of the only picture.

    They are keyed by the module's name and the number of the call in a pass. If the network raises, there are none, and
    the second value is the reason, a sentence.
    """
    arguments = [*call.args, *call.kwargs.values()]
    pictures = [argument for argument in arguments if isinstance(argument, Tensor) and argument.is_floating_point()]
    pictures = [picture for picture in pictures if picture.dim() - 2 in (1, 2, 3)]
    convolutions = {len(module.kernel_size) for module in call.network.modules() if isinstance(module, _ConvNd)}
    if len(pictures) != 1 or pictures[0].dim() - 2 not in (convolutions or {2}):
        return {}, ""
    modules, _ = module_index(call.network)
    tree = ReceptiveFields(pictures[0].dim() - 2, by_weights=False)
    nodes: dict[tuple[str, int], Any] = {}
    counts: Counter[str] = Counter()
    args, kwargs = copied_inputs(call.args, call.kwargs)

    def tracked(value: object) -> object:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() != pictures[0].dim():
            return value
        return value.requires_grad_() * 1  # no leaf: the network may overwrite it

    def note(name: str, output: object) -> None:
        tensors = tensors_in(output)
        if tensors and tensors[0][1].requires_grad and not history_is_lost(tensors[0][1]):
            nodes[name, counts[name]] = tensors[0][1].grad_fn
        counts[name] += 1

    try:
        with preserved(call.network, seed=0), module_scopes(modules, lambda _name: None, note), torch.enable_grad():
            _run(call.network, [*map(tracked, args)], {key: tracked(value) for key, value in kwargs.items()})
    except ModelError as error:
        return {}, f"Receptive fields are missing: with gradients of the input, {error}"
    fields = {place: tree.of(node) for place, node in nodes.items() if node is not None}
    return {
        place: ReceptiveField(
            tuple(line.high - line.low + 1 for line in region.lines),
            tuple(line.step for line in region.lines),
            tuple((line.low + line.high) / 2 for line in region.lines),
            region.at_least,
        )
        for place, region in fields.items()
        if region is not None
    }, ""


# --- Time ---


def _times(call: Call, modules: Mapping[str, nn.Module], device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of each module that runs, in each of several passes without gradients."""
    finish: Callable[[], object] = (lambda: None) if device.type == "cpu" else torch.accelerator.synchronize
    running = _Running()
    spent: defaultdict[str, float] = defaultdict(float)
    times: defaultdict[str, list[float]] = defaultdict(list)

    def enter(name: str) -> None:
        finish()
        running.enter(name)

    def leave(name: str, _output: object) -> None:
        finish()
        now = time.perf_counter()
        spent[name] += now - running.leave(name)

    with preserved(call.network, seed=0), torch.no_grad(), module_scopes(modules, enter, leave):
        whole = 0.0
        for number in range(_PASSES_AT_MOST):
            args, kwargs = copied_inputs(call.args, call.kwargs)
            spent.clear()
            _run(call.network, args, kwargs)
            for name, seconds in spent.items():
                times[name].append(seconds)
            whole += spent[""]
            if number + 1 >= _PASSES_AT_LEAST and whole > _SECONDS:
                break
    return dict(times)
