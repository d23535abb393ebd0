"""Run a model over its inputs and gather what its layers did: the pipeline behind `hookscope activations`."""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from hookscope.errors import ModelError, UsageError
from hookscope.hooks import ModuleCall, Observation, capture, tensors_in
from hookscope.inputs import Batch
from hookscope.layers import module_index, select_layers, unwrap
from hookscope.layout import AxisReader, arrange
from hookscope.measure import Pending, Reducer, Reduction, Staged, collect, merge, summarise
from hookscope.models import LoadedModel
from hookscope.models.building import seeded
from hookscope.results import (
    Failure,
    FeatureMaps,
    Flag,
    InputRecord,
    Inspection,
    LayerRow,
    ModelInfo,
    ModuleRow,
    Prediction,
    TensorStatistics,
    UncalledLayer,
    row_label,
)

# A layer is flagged from this share of dead channels on. Our choice: after a ReLU a few are dead for any one picture.
_DEAD_FRACTION = 0.5

Key = tuple[str, int, str]
"""(layer, call, slot)."""


class ForwardError(ModelError):
    """The model raised in its forward pass.

    Attributes:
        inspection: What was seen until then; its `failure` says where it broke off.
    """

    def __init__(self, message: str, inspection: Inspection) -> None:
        """Carry the partial inspection with the message."""
        super().__init__(message)
        self.inspection = inspection


@dataclass(slots=True)
class _Row:
    """What one (layer, call, slot) has shown so far."""

    reduction: Reduction | None
    in_place: bool
    passed_through: bool
    shape_varies: bool = False


@dataclass(frozen=True, slots=True)
class _Kept:
    """One input's activation, cloned in the hook."""

    key: Key
    input_index: int
    values: Tensor
    channel_axis: int | None
    channel_count: int
    shape: tuple[int, ...]
    grids: tuple[tuple[int, ...], ...]
    note: str


@dataclass(slots=True)
class _Recorder:
    """The observer given to `capture`: reduces every output, and clones what is to be drawn."""

    grids_for: int
    max_channels: int | None
    on_tensor: Callable[[str, Tensor], None] | None
    reducer: Reducer = field(default_factory=Reducer)
    axes: AxisReader = field(default_factory=AxisReader)
    kept: list[_Kept] = field(default_factory=list)
    indices: tuple[int, ...] = ()
    _latest: tuple[weakref.ref[Tensor], int, int | None, Reduction | Staged | Pending] | None = None

    def start(self, indices: tuple[int, ...]) -> None:
        """Begin a forward pass over the inputs at `indices`."""
        self.axes = AxisReader()
        self.indices = indices
        self._latest = None

    def observe(self, call: ModuleCall, slot: str, tensor: Tensor) -> Reduction | Staged | Pending:
        """Reduce one output in the hook."""
        axis = None if tensor.is_nested else self.axes.channel_axis(call.module, tuple(tensor.shape))
        if self.on_tensor is not None:
            self.on_tensor(row_label(call.layer, call.call, slot), tensor)
        if self.grids_for > min(self.indices, default=0) and tensor.layout == torch.strided and tensor.numel():
            self._keep((call.layer, call.call, slot), tensor, axis)
        if tensor.is_inference():
            return self.reducer.reduce(tensor, axis)
        # A container usually returns the very tensor that its last child has just returned.
        version = tensor._version
        if self._latest is not None:
            reference, latest_version, latest_axis, reduction = self._latest
            if reference() is tensor and latest_version == version and latest_axis == axis:
                return reduction
        reduction = self.reducer.reduce(tensor, axis)
        self._latest = (weakref.ref(tensor), version, axis, reduction)
        return reduction

    def _keep(self, key: Key, tensor: Tensor, axis: int | None) -> None:
        """Clone the slices that belong to the inputs to be drawn."""
        count, note = len(self.indices), ""
        if tensor.dim() == 0:
            tensor = tensor.reshape(1)
        if tensor.shape[0] != count:
            if tensor.dim() == 3 and tensor.shape[1] == count:  # (T, N, D)
                tensor = tensor.transpose(0, 1)
            else:
                note = f"element 0 of {tensor.shape[0]}: axis 0 is not the batch"
        for index, values in zip(self.indices, tensor, strict=False):
            if index >= self.grids_for:
                break
            shape = tuple(values.shape)
            channel_count = values.numel() if axis is None else shape[axis - 1]
            if self.max_channels is not None and axis is not None:
                values = values.narrow(axis - 1, 0, min(self.max_channels, channel_count))  # noqa: PLW2901
            grids = tuple(self.axes.grids)
            self.kept.append(_Kept(key, index, values.detach().clone(), axis, channel_count, shape, grids, note))
            if note:
                break


def inspect(
    model: nn.Module | LoadedModel,
    inputs: Tensor | Batch | Iterable[Batch],
    layers: Sequence[str] = (),
    *,
    grids_for: int = 0,
    max_channels: int | None = None,
    seed: int = 0,
    on_tensor: Callable[[str, Tensor], None] | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Inspection:
    """Run a model over its inputs in eval mode, without gradients, and report on the outputs of its layers.

    The model comes out as it went in: modes, buffers, hooks, gradients and random states are restored, also after an
    exception. Statistics are taken at the moment a layer returns, before an in-place layer can overwrite its output.

    Args:
        model: The network, on its device, or what `load_model` returned.
        inputs: A tensor with the batch on axis 0, one batch, or any number of batches; on the model's device.
        layers: Patterns as for `--layer`; none means every leaf.
        grids_for: Keep feature maps for drawing, for this many inputs from the first.
        max_channels: Keep at most this many channels of each, the first ones; None keeps all.
        seed: Seeds the random numbers the forward pass may draw.
        on_tensor: Called in the hook with each output's label and the output itself; clone what must outlive the call.
        on_batch: Called after each batch with the number of inputs finished.

    Returns:
        What was seen.

    Raises:
        LayerNotFoundError: If a pattern selects nothing.
        ForwardError: If the model raised; carries what was seen until then.
        UsageError: If a pattern is malformed.
    """
    if isinstance(model, LoadedModel):
        network, info, warnings = unwrap(model.module), model.info, model.warnings
    else:
        network = unwrap(model)
        info, warnings = None, ()
    modules, aliases = module_index(network)
    _refuse_lazy(modules)
    info = info or _anonymous(network, modules)
    batches = iter(_as_batches(inputs))
    first = next(batches, None)
    selected = select_layers(
        network, layers, lambda: [] if first is None else list(_first_calls(network, first.args)[0])
    )

    recorder = _Recorder(grids_for, max_channels, on_tensor)
    rows: dict[Key, _Row] = {}
    records: list[InputRecord] = []
    predictions: list[Prediction] = []
    error: BaseException | None = None
    began = time.perf_counter()
    with preserved(network, seed), capture(network, selected, recorder.observe) as captured:
        batch = first
        while batch is not None:
            recorder.start(batch.indices)
            records.extend(batch.records)
            try:
                with torch.no_grad():
                    output = network(*batch.args)
            except (Exception, SystemExit) as raised:  # noqa: BLE001 - the model's code may raise anything
                error = _the_models_own(raised)
            recorder.reducer.settle()
            _absorb(rows, captured.restart())
            if error is not None:
                break
            predictions.extend(_predictions(output, info.categories, batch.indices))
            if on_batch is not None:
                on_batch(len(records))
            batch = next(batches, None)
    seconds = time.perf_counter() - began

    failure = None if error is None else _locate(modules, error)
    layer_rows = _layer_rows(modules, aliases, rows)
    parameter = next((p for p in network.parameters() if p.is_floating_point()), None)
    inspection = Inspection(
        model=info,
        inputs=tuple(records),
        rows=layer_rows,
        uncalled=_uncalled(modules, selected, captured.called, broke_off=failure is not None),
        feature_maps=_feature_maps(layer_rows, recorder.kept),
        predictions=tuple(predictions),
        warnings=(*warnings, *_fast_path_warning(modules, selected)),
        failure=failure,
        seed=seed,
        device=str(parameter.device) if parameter is not None else "cpu",
        dtype=str(parameter.dtype).removeprefix("torch.") if parameter is not None else "none",
        timings={"forward": seconds},
    )
    if failure is not None:
        raise ForwardError(_broke_off(info.name, failure), inspection) from error
    return inspection


def _as_batches(inputs: Tensor | Batch | Iterable[Batch]) -> Iterable[Batch]:
    if isinstance(inputs, Tensor):
        shape = tuple(inputs.shape[1:])
        count = inputs.shape[0] if inputs.dim() else 1
        record = InputRecord("tensor", None, None, shape, ())
        return [Batch((inputs,), tuple(range(count)), (record,) * count)]
    return [inputs] if isinstance(inputs, Batch) else inputs


def _refuse_lazy(modules: Mapping[str, nn.Module]) -> None:
    """Refuse lazy modules: their first input would give them parameters, so nothing could be restored."""
    for name, module in modules.items():
        tensors = (*module._parameters.values(), *module._buffers.values())
        if any(tensor is not None and is_lazy(tensor) for tensor in tensors):
            raise UsageError(
                f"{name or 'The model'} ({type(module).__name__}) is lazy: it has no parameters before its first "
                f"input. Run the model once where it is built."
            )


def _anonymous(network: nn.Module, modules: Mapping[str, nn.Module]) -> ModelInfo:
    """Describe a module that came without a description."""
    kind = type(network).__name__
    parameters = {
        id(each): each for module in modules.values() for each in module._parameters.values() if each is not None
    }
    parameter_count = sum(each.numel() for each in parameters.values())
    return ModelInfo(kind, kind, "as given", random=False, sha256=None, parameter_count=parameter_count)


@contextmanager
def preserved(network: nn.Module, seed: int) -> Iterator[None]:
    """Put the network in eval mode and seed random numbers for the block, and restore everything after it.

    Restored are each module's mode (not only the root's: a BatchNorm frozen in eval stays so), buffers, parameter
    gradients and `requires_grad`, and the states of the random generators of torch, NumPy and Python. Plain attributes
    that a forward pass assigns are the model's own business.

    Args:
        network: The model to run inside the block.
        seed: For all of these generators.
    """
    modes = [(module, module.training) for module in network.modules()]
    with torch.no_grad():
        buffers = [
            (module, name, buffer, None if buffer is None else buffer.clone())
            for module, _ in modes
            for name, buffer in module._buffers.items()
        ]
    gradients = [
        (parameter, parameter.grad, parameter.requires_grad)
        for module, _ in modes
        for parameter in module._parameters.values()
        if parameter is not None
    ]
    cuda = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        with seeded(seed), torch.random.fork_rng(devices=cuda):
            if cuda:
                torch.cuda.manual_seed_all(seed)
            if any(training for _, training in modes):
                network.eval()
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        _restore_buffers([module for module, _ in modes], buffers)
        for parameter, gradient, requires_grad in gradients:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
            if parameter.grad is not gradient:
                parameter.grad = gradient


def _restore_buffers(
    modules: Sequence[nn.Module], buffers: Sequence[tuple[nn.Module, str, Tensor | None, Tensor | None]]
) -> None:
    """Put back each (module, name, buffer, values before), and drop buffers that were registered since."""
    known = {(id(module), name) for module, name, _, _ in buffers}
    for module in modules:
        for name in [name for name in module._buffers if (id(module), name) not in known]:
            delattr(module, name)
    for module, name, buffer, values in buffers:
        module._buffers[name] = buffer
        if buffer is not None and values is not None and not _equal(buffer, values):
            with torch.inference_mode(buffer.is_inference()), torch.no_grad():
                buffer.copy_(values)


def _equal(first: Tensor, second: Tensor) -> bool:
    """Tell whether two tensors hold the same values; where that cannot be told (meta, sparse), say no.

    Version counters would not do: a write through `.data` does not move them.
    """
    try:
        return torch.equal(first, second)
    except (RuntimeError, NotImplementedError):
        return False


def _absorb(rows: dict[Key, _Row], observations: Sequence[Observation[Reduction | Staged | Pending]]) -> None:
    """Merge one forward pass into the rows; new ones are appended in execution order."""
    reductions = iter(collect([seen.value for seen in observations if seen.value is not None]))
    for seen in observations:
        reduction = None if seen.value is None else next(reductions)
        key = (seen.layer, seen.call, seen.slot)
        row = rows.get(key)
        if row is None:
            rows[key] = _Row(reduction, seen.in_place, seen.passed_through)
        elif row.reduction is None or reduction is None:
            row.reduction = row.reduction or reduction
        else:
            row.shape_varies |= row.reduction.shape[1:] != reduction.shape[1:]
            row.reduction = merge(row.reduction, reduction)


def _layer_rows(
    modules: Mapping[str, nn.Module], aliases: Mapping[str, tuple[str, ...]], rows: Mapping[Key, _Row]
) -> tuple[LayerRow, ...]:
    measured = iter(summarise([row.reduction for row in rows.values() if row.reduction is not None]))
    result = []
    for index, ((layer, call, slot), row) in enumerate(rows.items()):
        module = modules[layer]
        statistics = TensorStatistics((), "none", 0) if row.reduction is None else next(measured)
        result.append(
            LayerRow(
                index,
                layer,
                type(module).__name__,
                call,
                slot,
                _own_parameter_count(module),
                statistics,
                _flags(row, statistics),
                aliases.get(layer, ()),
            )
        )
    return tuple(result)


def _own_parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module._parameters.values() if parameter is not None)


def _flags(row: _Row, statistics: TensorStatistics) -> tuple[Flag, ...]:
    constant = statistics.min is not None and statistics.min == statistics.max and statistics.element_count > 1
    flags: dict[Flag, bool] = {
        "not a tensor": row.reduction is None,
        "unmeasured": statistics.unmeasured is not None,
        "non-finite": bool(statistics.nan_count or statistics.inf_count),
        "all zero": constant and statistics.min == 0,
        "constant": constant and statistics.min != 0,
        "dead channels": not constant and (statistics.dead_channel_fraction or 0) >= _DEAD_FRACTION,
        "in-place": row.in_place,
        "pass-through": row.passed_through,
        "shape varies": row.shape_varies,
    }
    return tuple(flag for flag, holds in flags.items() if holds)


def _uncalled(
    modules: Mapping[str, nn.Module], selected: Mapping[str, nn.Module], called: set[str], *, broke_off: bool
) -> tuple[UncalledLayer, ...]:
    result = []
    for name, module in selected.items():
        if name in called:
            continue
        parent = modules[name.rpartition(".")[0]]
        if broke_off:
            reason = "the forward pass broke off before it"
        elif isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
            reason = f"a {type(module).__name__} is not called itself, its items are"
        elif isinstance(parent, nn.MultiheadAttention):
            reason = f"{type(parent).__name__} uses its weight directly; select that module instead"
        else:
            reason = "the forward pass did not call it in eval mode, or used its weight directly"
        result.append(UncalledLayer(name, type(module).__name__, _own_parameter_count(module), reason))
    return tuple(result)


def _fast_path_warning(modules: Mapping[str, nn.Module], selected: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Say so when hooks change which kernels run: torch's fused encoder layer steps aside for hooks."""
    fused = [module for module in modules.values() if isinstance(module, nn.TransformerEncoderLayer)]
    hooked = {id(module) for module in selected.values()} if fused else set()
    if torch.backends.mha.get_fastpath_enabled() and any(
        id(part) in hooked for each in fused for part in each.modules()
    ):
        return ("nn.TransformerEncoderLayer runs unfused while hooked: its values differ in the last digits.",)
    return ()


def _feature_maps(rows: Sequence[LayerRow], kept: Sequence[_Kept]) -> tuple[FeatureMaps, ...]:
    by_key = {(row.layer, row.call, row.slot): row for row in rows}
    result = []
    for item in kept:
        row = by_key[item.key]
        values = item.values.dequantize() if item.values.is_quantized else item.values
        values = (values.abs() if values.is_complex() else values).float().cpu()
        arrangement, drawn, extra, remark = arrange(values, item.channel_axis, item.grids)
        result.append(
            FeatureMaps(
                row.index,
                row.label,
                row.kind,
                item.input_index,
                arrangement,
                drawn.numpy(),
                None if extra is None else extra.numpy(),
                item.channel_count,
                item.shape,
                "; ".join(text for text in (item.note, remark) if text),
            )
        )
    return tuple(sorted(result, key=lambda maps: (maps.row, maps.input_index)))


def _predictions(output: object, categories: Sequence[str], indices: Sequence[int]) -> list[Prediction]:
    """Return the five best classes per input, if the output is one row of logits per input over the categories."""
    if not categories or not isinstance(output, Tensor) or output.shape != (len(indices), len(categories)):
        return []
    probabilities, classes = output.float().softmax(1).topk(min(5, len(categories)))  # (N, 5)
    return [
        Prediction(index, tuple(best), tuple(categories[number] for number in best), tuple(shares))
        for index, best, shares in zip(indices, classes.tolist(), probabilities.tolist(), strict=True)
    ]


def _locate(modules: Mapping[str, nn.Module], error: BaseException) -> Failure:
    """Find the innermost module on the traceback: every module call leaves a frame there, hooked or not."""
    names = {id(module): name for name, module in modules.items()}
    module = modules[""]
    inputs: list[tuple[str, Tensor]] = []
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        running = frame.f_locals.get("self")
        if frame.f_code.co_name == "_call_impl" and isinstance(running, nn.Module) and id(running) in names:
            module = running
            inputs = tensors_in(frame.f_locals.get("args")) + tensors_in(frame.f_locals.get("kwargs"))
        trace = trace.tb_next
    shapes = tuple(f"{path} {tuple(tensor.shape)}" for path, tensor in inputs)
    lines = str(error).strip().splitlines()
    return Failure(
        names[id(module)],
        type(module).__name__,
        shapes,
        f"{type(error).__name__}: {lines[0] if lines else 'no message'}",
    )


def _the_models_own(error: BaseException) -> BaseException:
    """Return the error if the model raised it; one that comes out of a hook is ours, and is raised again."""
    trace = error.__traceback__.tb_next if error.__traceback__ else None  # the first frame is the call of the model
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
            raise error
        trace = trace.tb_next
    return error


def _broke_off(model: str, failure: Failure) -> str:
    inputs = ", ".join(failure.input_shapes) or "no tensor"
    return (
        f"{model} raised in its forward pass at {failure.layer or '(model)'} ({failure.kind}), given {inputs}: "
        f"{failure.error}"
    )


def list_modules(
    model: nn.Module, args: Sequence[object] | None, layers: Sequence[str] = ()
) -> tuple[tuple[ModuleRow, ...], Failure | None]:
    """List every module with its parameters and the shapes that one forward pass gives it.

    Args:
        model: The network; on the meta device the pass costs next to nothing and computes shapes alone.
        args: Positional arguments of its forward, on the same device; None lists without shapes.
        layers: Patterns as for `--layer`, to mark what they select.

    Returns:
        One row per module in the order of `named_modules()`, and where the pass broke off if it did: rows then hold
        the shapes of what was reached.

    Raises:
        LayerNotFoundError: If a pattern selects nothing.
        UsageError: If a pattern is malformed.
    """
    network = unwrap(model)
    modules, aliases = module_index(network)
    _refuse_lazy(modules)
    passes, failure = _first_calls(network, args) if args is not None else ({}, None)
    selected = select_layers(network, layers, lambda: list(passes))
    rows = []
    for name, module in modules.items():
        seen = passes.get(name)
        rows.append(
            ModuleRow(
                name,
                type(module).__name__,
                _own_parameter_count(module),
                sum(parameter.numel() for parameter in module.parameters()),
                seen.call_count if seen else 0,
                seen.input_shapes if seen else (),
                tuple(seen.output_shapes) if seen else (),
                name in selected,
                f"also {', '.join(aliases[name])}" if name in aliases else "",
            )
        )
    return tuple(rows), failure


@dataclass(slots=True)
class _FirstCall:
    """Shapes of a module's first call, and how often it was called."""

    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: list[tuple[int, ...]]
    call_count: int


def _first_calls(network: nn.Module, args: Sequence[object]) -> tuple[dict[str, _FirstCall], Failure | None]:
    """Run the network once; return what its modules took and gave, in the order in which they first finished."""

    def shapes(call: ModuleCall, _slot: str, tensor: Tensor) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        return tuple(tuple(given.shape) for _, given in call.inputs), tuple(tensor.shape)

    failure = None
    with preserved(network, seed=0), capture(network, dict(network.named_modules()), shapes) as captured:
        try:
            with torch.no_grad():
                network(*tree_map_only(Tensor, _copy, tuple(args)))  # it may overwrite what it is given
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the model's code may raise anything
            _the_models_own(error)
            failure = _locate(dict(network.named_modules()), error)
    passes: dict[str, _FirstCall] = {}
    for seen in captured.observations:
        inputs, output = seen.value or ((), ())
        known = passes.setdefault(seen.layer, _FirstCall(inputs, [], 0))
        known.call_count = max(known.call_count, seen.call + 1)
        if seen.call == 0 and seen.value is not None:
            known.output_shapes.append(output)
    return passes, failure


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
