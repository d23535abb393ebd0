"""The cost of a network's modules: multiply-adds, bytes held and saved, receptive fields, and time.

Separate passes measure them without disturbing each other: operations are counted as torch dispatches them, with
gradients, so that autograd saves what it saves in training; receptive fields are read from the graph of a pass whose
input requires a gradient; times are those of passes without either.
"""

import inspect
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode

from hookscope.errors import ModelError
from hookscope.hooks.autograd import history_is_lost
from hookscope.hooks.memory import parts_of
from hookscope.hooks.module_scopes import module_scopes
from hookscope.hooks.observed import shape_of
from hookscope.hooks.operations import forwards, run_networks
from hookscope.hooks.pytree import tensors_given, tensors_in
from hookscope.hooks.running import unfused
from hookscope.hooks.selection import module_index, unwrap
from hookscope.inputs.batches import copied
from hookscope.inspection.failures import reraise_internal
from hookscope.inspection.multiply_adds import formula_of, name_of
from hookscope.inspection.receptive_fields import ReceptiveFields
from hookscope.inspection.state.held_values import storages_of
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

    def copied(self) -> "Call":
        """Return it with copies of the arguments: the network may overwrite them."""
        return self._replace(args=copied(tuple(self.args)), kwargs=copied(dict(self.kwargs)))


def network_cost(call: Call, shapes: Call | None = None) -> NetworkCost:
    """Measure what one forward pass in eval mode costs; the network comes out as it went in.

    Args:
        call: The network where it runs, with one input.
        shapes: The same on the meta device, where receptive fields are found faster; None for `call` itself.

    Raises:
        ModelError: If the network raises.
    """
    call = call._replace(network=unwrap(call.network))
    modules, _ = module_index(call.network)
    counts, notes = _counted(call, modules)
    fields, remark = receptive_fields(call if shapes is None else shapes._replace(network=unwrap(shapes.network)))
    notes += [remark] if remark else []
    tensors = (*call.network.parameters(), *call.network.buffers())
    device = tensors[0].device if tensors else torch.device("cpu")
    times = _times(call, modules, device) if device.type != "meta" else {}
    if any(isinstance(module, nn.TransformerEncoderLayer) for module in modules.values()) and times:
        notes.append("nn.TransformerEncoderLayer runs unfused while it is timed.")
    rows = tuple(_rows(modules, counts, fields, times))
    return NetworkCost(
        input_shapes=tuple(tuple(shape_of(tensor)) for _, tensor in tensors_given(tuple(call.args), call.kwargs)),
        modules=rows,
        leaves=sum((row.own for row in rows if not modules[row.layer]._modules), CostSums()),
        outside=sum((row.own for row in rows if modules[row.layer]._modules), CostSums()),
        uncounted=tuple(UncountedOperation(name, count, layer) for name, (count, layer) in counts.uncounted.items()),
        pass_count=max(map(len, times.values()), default=0),
        device=str(device),
        thread_count=torch.get_num_threads(),
        notes=tuple(notes),
    )


def _rows(
    modules: Mapping[str, nn.Module],
    counts: "_Counts",
    fields: Mapping[tuple[str, int], ReceptiveField],
    times: Mapping[str, Sequence[float]],
) -> Iterator[ModuleCost]:
    counted: set[nn.Parameter] = set()
    for name, module in modules.items():
        computed = counts.inclusive[name]
        if name not in counts.entered:  # a ModuleList, or a module called as .forward(…)
            inside = [path for path in modules if path == name or not name or path.startswith(f"{name}.")]
            computed = sum((counts.own[path] for path in inside), Counter())
        own = {*module.parameters(recurse=False)} - counted  # a tied parameter belongs to the first module
        counted |= own
        yield ModuleCost(
            name,
            _sums([*module.parameters()], computed),
            _sums(own, counts.own[name]),
            counts.output_bytes.get(name),
            fields.get((name, 0)),
            median(times[name]) if name in times else None,
        )


def _sums(parameters: Collection[nn.Parameter], computed: Counter[str]) -> CostSums:
    return CostSums(
        computed["multiply_adds"],
        sum(parameter.numel() for parameter in parameters),
        sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        computed["saved"],
    )


# --- Which module runs ---


@dataclass(slots=True)
class _Running:
    """The calls in progress in each thread, the innermost last: the module's name, and when the call began."""

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
        """End the call of a module, and the calls inside it that raised before their hooks could run.

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
class _Counts:
    """The counts of a pass.

    Attributes:
        own: "multiply_adds" and "saved" bytes of each module without the modules inside it.
        inclusive: The same, with the modules that it calls.
        uncounted: For each operation without a formula, how often it was called, and by which module first.
    """

    running: _Running = field(default_factory=_Running)
    entered: set[str] = field(default_factory=set)
    own: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    inclusive: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    output_bytes: Counter[str] = field(default_factory=Counter)
    uncounted: dict[str, tuple[int, str]] = field(default_factory=dict)

    def enter(self, name: str) -> None:
        self.running.enter(name)
        self.entered.add(name)

    def leave(self, name: str, output: object) -> None:
        self.running.leave(name)
        with torch._C.DisableTorchFunctionSubclass():
            self.output_bytes[name] += sum(_bytes_of(tensor) for _, tensor in tensors_in(output))

    def lacks_formula(self, operation: str) -> None:
        calls, first = self.uncounted.get(operation, (0, self.running.innermost))
        self.uncounted[operation] = (calls + 1, first)

    def add(self, quantity: str, amount: int) -> None:
        self.own[self.running.innermost][quantity] += amount
        for name in {layer for layer, _ in self.running.stack}:
            self.inclusive[name][quantity] += amount


def _bytes_of(tensor: Tensor) -> int:
    if tensor.layout == torch.strided:
        return tensor.numel() * tensor.element_size()
    return sum(map(_bytes_of, parts_of(tensor) or ()))


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
        again = call.copied()
        with _CountingMode(counts):
            _run(again)
    return counts


def _run(call: Call) -> None:
    try:
        call.network(*call.args, **call.kwargs)
    except (Exception, SystemExit) as raised:  # noqa: BLE001 - the model's code may raise anything
        error = reraise_internal(raised)
        raise ModelError(f"the network raises {exception_line(error)}") from error


class _CountingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, counts: _Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(
        self, func: Any, _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it; one without a formula is taken apart if torch can."""
        keywords, name, formula = kwargs or {}, name_of(func), formula_of(func)
        if _ABOUT_SHAPES.fullmatch(name):  # tensors with a layout of their own answer these themselves
            return NotImplemented
        if formula is None and isinstance(func, torch._ops.OpOverload):
            with self:
                output = run_networks(func.decompose, args, keywords)
            if output is not NotImplemented:
                return output
        output = run_networks(func, args, keywords)
        try:
            count = None if formula is None else formula(args, output)
        except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError):  # nested tensors, keywords
            count = None
        if count is None:
            self._counts.lacks_formula(name)
        elif count:
            self._counts.add("multiply_adds", count)
        return output


forwards(inspect.unwrap(_CountingMode.__torch_dispatch__))  # torch has wrapped it
_ABOUT_SHAPES = re.compile(
    r"aten\.(sym_)?(is_contiguous|is_strides_like_format|is_non_overlapping_and_dense|size|stride|storage_offset|numel|dim)"
    r"|prim\.layout"
)


class _SavedStorages:
    """Adds up the memory that autograd saves: whole storages, each once, since a view keeps all of its storage."""

    def __init__(self, counts: _Counts, network: nn.Module) -> None:
        self._counts = counts
        self._known: dict[int, StorageWeakRef] = {}  # weak references keep addresses from being used again
        for tensor in (*network.parameters(), *network.buffers()):
            for storage in storages_of(tensor):
                self._is_new(storage)

    def pack(self, tensor: Tensor) -> Tensor:
        """Count the storages of a tensor that autograd is about to save."""
        with torch._C.DisableTorchFunctionSubclass():
            size = sum(storage.nbytes() for storage in storages_of(tensor) if self._is_new(storage))
            if size:
                self._counts.add("saved", size)
            return tensor.detach()  # without its graph, which would keep itself alive

    def _is_new(self, storage: torch.UntypedStorage) -> bool:
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return self._known.setdefault(reference.cdata, reference) is reference


# --- Receptive fields ---


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
    again = call.copied()

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
            kwargs = {key: tracked(value) for key, value in again.kwargs.items()}
            _run(again._replace(args=[*map(tracked, again.args)], kwargs=kwargs))
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
            again = call.copied()
            spent.clear()
            _run(again)
            for name, seconds in spent.items():
                times[name].append(seconds)
            whole += spent[""]
            if number + 1 >= _PASSES_AT_LEAST and whole > _SECONDS:
                break
    return dict(times)
