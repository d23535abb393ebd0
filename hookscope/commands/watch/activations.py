"""The activations of one watched step: hooks that are registered before its forward passes and removed after them."""

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hookscope.commands.watch.networks import WatchedNetwork
from hookscope.commands.watch.torch_calls import FORWARD, calls_under_way
from hookscope.hooks.calls import Hook
from hookscope.hooks.embedding_rows import RowsUsed, looks_up_rows, merge_rows
from hookscope.hooks.forward_hooks import Capture, observed
from hookscope.hooks.observed import ModuleCall, Observation
from hookscope.inspection.network import InspectedNetwork
from hookscope.inspection.rows import Rows, layer_rows, merge_observations
from hookscope.inspection.state.preservation import preserved
from hookscope.results.activations import LayerRow
from hookscope.results.table_rows import TableRows
from hookscope.results.training import WatchedLayer
from hookscope.rules.activations import SATURATED_BEYOND
from hookscope.statistics.channel_axis import AxisReader
from hookscope.statistics.reducer import Measured, Reducer
from hookscope.statistics.storage import gathered


@dataclass(slots=True)
class _Pass:
    training: bool
    input_count: int
    seen: list[Observation[Measured]]
    rows_used: Mapping[tuple[str, torch.device], Tensor]


@dataclass(slots=True)
class ForwardPasses:
    """The forward passes of one network while its hooks are registered.

    A pass counts if gradients are recorded when it begins; a validation under `no_grad` does not count. Recomputation
    by activation checkpointing is ignored. A pass counts only if its mode (train or eval) is the network's mode at the
    optimiser's step.
    """

    watched: WatchedNetwork
    failed: Callable[[Exception], None]
    counts_without_gradients: bool = False
    _inspected: InspectedNetwork | None = None
    _capture: Capture[Measured] | None = None
    _block: ExitStack = field(default_factory=ExitStack)
    _plain: Reducer = field(default_factory=Reducer)
    _bounded: Reducer = field(default_factory=lambda: Reducer(distributions=True))
    _axes: AxisReader = field(default_factory=AxisReader)
    _mode: bool = True
    _mode_of_step: bool = True
    _depth: int = 0
    _counts: bool = False
    _input_count: int = 0  # length of the batch axis, by the first output that has one
    _passes: list[_Pass] = field(default_factory=list)
    _listed: frozenset[str] = frozenset()
    _looks_up_rows: bool = False
    _rows_mode: RowsUsed | None = None
    _rows_used: Mapping[tuple[str, torch.device], Tensor] = field(default_factory=dict)

    def begin(self) -> None:
        """Register hooks; `end` removes them."""
        layers = self.watched.layers()
        self._inspected = self.watched.inspected()
        self._listed = frozenset(layers)
        self._passes = []
        self._depth = 0
        self._axes.restart()
        root = self.watched.network
        self._looks_up_rows = looks_up_rows(root)
        self._mode = self._mode_of_step = root.training
        self._block = ExitStack()
        self._block.enter_context(root.register_forward_pre_hook(Hook(self._pass_begins)))
        self._block.enter_context(root.register_forward_hook(Hook(self._pass_ends), always_call=True))
        # Rules judge the output of the network whether or not it is listed.
        everything = {**layers, "": root}
        self._capture = self._block.enter_context(
            observed(everything, self._observe, lambda: self._counts if self._depth else torch.is_grad_enabled())
        )

    def go_last(self) -> None:
        """Move the hooks behind those registered since; hooks stay where they are once a forward pass has begun."""
        if self._capture is not None and not self._passes and not self._capture.observations:
            self.end()
            self.begin()

    def step_begins(self) -> None:
        """Note the mode of the network when its optimiser steps: a validation may follow."""
        self._mode_of_step = self.watched.network.training

    def end(self) -> None:
        """Remove the hooks; the passes are kept until the next `begin`. A second call does nothing."""
        self._leave_rows_mode()  # an interrupt skips the hook that does so
        self._finish_pass()
        self._block.close()
        self._capture = None

    def rows(self) -> tuple[LayerRow, ...]:
        """Return the outputs of the passes in the mode of the step, including the network's own output."""
        if self._inspected is None:
            return ()
        rows = Rows()
        for forward in self._passes:
            if forward.training == self._mode_of_step:
                merge_observations(rows, forward.seen, forward.input_count)
        self._passes = []
        return layer_rows(self._inspected, rows)

    def tables(self) -> tuple[TableRows, ...]:
        """Return the rows looked up by passes in the mode of the step; waits for the device. Call it before `rows`."""
        used: dict[str, NDArray[np.bool_]] = {}
        for forward in self._passes:
            for (name, _), rows in forward.rows_used.items() if forward.training == self._mode_of_step else ():
                merge_rows(used, {name: rows.cpu().numpy()})
        return tuple(
            TableRows(name, rows.size, int(rows.sum()))
            for name, rows in used.items()
            if not self.watched.patterns or not self._listed.isdisjoint((name, name.rpartition(".")[0]))
        )

    def is_listed(self, row: LayerRow) -> bool:
        """Tell whether a row belongs to a selected layer and does not repeat another row."""
        return row.layer in self._listed and not row.duplicate_of

    def _pass_begins(self, _module: nn.Module, _args: object) -> None:
        if torch._C._current_graph_task_id() != -1:  # activation checkpointing recomputes
            return
        self._depth = calls_under_way(FORWARD, self.watched.network) or self._depth + 1
        if self._depth == 1:
            self._counts = self.counts_without_gradients or torch.is_grad_enabled()
            try:
                self._leave_rows_mode()
                self._finish_pass()
                if self._counts and self._looks_up_rows and self._may_enter_mode():
                    self._rows_mode = RowsUsed(self.watched.network, self.failed)
                    self._rows_mode.enter()
            except Exception as error:  # noqa: BLE001 - never into a training
                self.failed(error)
            self._mode = self.watched.network.training

    def _pass_ends(self, _module: nn.Module, _args: object, _output: object) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._depth = max(0, self._depth - 1)
            if self._depth == 0:
                self._leave_rows_mode()

    def _may_enter_mode(self) -> bool:
        """Tell whether a torch function mode may be entered: where it changes nothing that the training computes.

        Under a mode, compiled code would be compiled again, and torch's attention in eval mode runs other kernels.
        """
        dynamo = sys.modules.get("torch._dynamo.convert_frame")
        has_compiled = dynamo is not None and bool(dynamo.input_codes.seen)
        if torch.compiler.is_compiling() or has_compiled:
            return False
        return all(layer.training or not isinstance(layer, _FUSED_IN_EVAL) for layer in self.watched.network.modules())

    def _leave_rows_mode(self) -> None:
        mode, self._rows_mode = self._rows_mode, None
        if mode is not None:
            self._rows_used = mode.leave()

    def _finish_pass(self) -> None:
        if self._capture is None:
            return
        self._axes.restart()
        seen = self._capture.restart()
        if seen:
            self._passes.append(_Pass(self._mode, self._input_count, seen, self._rows_used))
        self._input_count, self._rows_used = 0, {}

    def _observe(self, call: ModuleCall, _slot: str, tensor: Tensor) -> Measured:
        try:
            if type(tensor) is not Tensor:
                tensor = gathered(tensor)
            if not self._input_count and tensor.dim() > 1:
                self._input_count = tensor.shape[0]
            axis = None if tensor.is_nested or call.vmapped else self._axes.channel_axis(call.maker, tensor.shape)
            reducer = self._bounded if type(call.module).__name__ in SATURATED_BEYOND else self._plain
            return reducer.reduce(tensor, axis)
        except Exception as error:  # noqa: BLE001 - never into a training
            self.failed(error)
            return _UNMEASURED


@dataclass(slots=True)
class EagerForward(ForwardPasses):
    """One additional forward pass of a compiled network at a watched step: hooks do not fire in compiled code.

    Before the first forward pass of the step the network runs once more, eagerly and without gradients, on a copy of
    its inputs. Random states, buffers and everything else that this changes are restored.
    """

    counts_without_gradients: bool = True
    _waiting: ExitStack = field(default_factory=ExitStack)

    def begin(self) -> None:
        """Wait for the first forward pass with gradients; `end` stops waiting."""
        self._passes = []
        self._waiting = ExitStack()
        module = self.watched.wrapped
        if isinstance(self.watched.network, torch.jit.ScriptModule):
            self.failed(RuntimeError("TorchScript is always compiled"))
            return
        compiled = module._compiled_call_impl
        if compiled is None:
            self._waiting.enter_context(module.register_forward_pre_hook(Hook(self._run), with_kwargs=True))
        else:  # compiled in place by `compile()`: the network's own hooks would be compiled too
            module._compiled_call_impl = torch._disable_dynamo(self._runs_before(compiled))  # type: ignore[attr-defined]
            self._waiting.callback(setattr, module, "_compiled_call_impl", compiled)

    def end(self) -> None:
        """Stop waiting. A second call does nothing."""
        self._waiting.close()

    def _may_enter_mode(self) -> bool:
        return True  # nothing runs compiled, and the results are not trained on

    def _runs_before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*args: Any, **keywords: Any) -> Any:
            self._run(self.watched.wrapped, args, keywords)
            return call(*args, **keywords)

        return observed

    def _run(self, _module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self._waiting.close()
        try:
            self._run_eagerly(args, keywords)
        except Exception as error:  # noqa: BLE001 - never into a training
            self.failed(error)

    def _run_eagerly(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        network = self.watched.network
        if _process_count() > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in network.modules()):
            raise RuntimeError("SyncBatchNorm waits for the other processes, which do not run eagerly")
        copies = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, keywords))
        mode: Any = "train" if network.training else "eval"
        eagerly = torch.compiler.set_stance("force_eager")
        with eagerly, preserved(network, 0, mode, differentiates=False), torch.no_grad():
            try:
                ForwardPasses.begin(self)
                network(*copies[0], **copies[1])
            finally:
                ForwardPasses.end(self)


def _process_count() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


_FUSED_IN_EVAL = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
_UNMEASURED = Reducer().reduce(torch.empty(0))


def watched_layer(row: LayerRow, prefix: str) -> WatchedLayer:
    """Return a row in the form of a watched step."""
    statistics = row.activation
    is_measured = statistics.unmeasured is None and statistics.nan_count is not None
    return WatchedLayer(
        label=f"{prefix}{row.label}",
        kind=row.kind,
        mean=statistics.mean,
        std=statistics.std,
        min=statistics.min,
        max=statistics.max,
        zero_fraction=statistics.zero_fraction,
        dead_channel_fraction=statistics.dead_channel_fraction,
        saturated_fraction=saturated_fraction(row),
        nonfinite_count=(statistics.nan_count or 0) + (statistics.inf_count or 0) if is_measured else None,
    )


def saturated_fraction(row: LayerRow) -> float | None:
    """Return the share of a bounded activation's outputs where the slope is nearly 0; None for other layers."""
    bounds, distribution = SATURATED_BEYOND.get(row.kind), row.activation.distribution
    return None if bounds is None or distribution is None else distribution.share_outside(*bounds)
