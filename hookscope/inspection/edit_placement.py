"""Bind edit expressions to a network: to its layers and operations in a run, or to the values of its parameters.

A parameter's value is edited by expressions such as `param:conv1.weight:value:zero(channels=3)`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from hookscope.errors import UsageError
from hookscope.hooks.interrupts import finished, interrupts_between_blocks
from hookscope.hooks.interventions import Intervention
from hookscope.hooks.memory import missing_memory
from hookscope.hooks.patterns import OperationPattern, is_operation_pattern, parse_operation_pattern
from hookscope.hooks.selection import module_index, parameters_by_name, unwrap
from hookscope.inspection.edits import Edit, bind_edits, parsed_edits
from hookscope.statistics.channel_axis import AxisReader
from hookscope.statistics.storage import is_dense
from hookscope.text import safe_text, some_of


@dataclass(frozen=True, slots=True)
class PlacedEdits:
    """Edits ready for `capture`.

    Attributes:
        applications: How often each text has been applied so far, over all of its layers.
        layers: What each text selects, layers or parameters.
    """

    by_name: Mapping[str, Sequence[Intervention]]
    of_operations: Sequence[tuple[OperationPattern, Intervention]]
    applications: dict[str, int]
    layers: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count no application in a `with` block, whose passes are not reported."""
        before = {**self.applications}
        try:
            yield
        finally:
            self.applications.update(before)

    def warnings(self) -> tuple[str, ...]:
        """Return a sentence for each edit that was never applied."""
        reason = "its layer was not called where hooks see it, got no gradient, or has no floating-point numbers"
        never = (text for text, count in self.applications.items() if not count)
        return tuple(f"Edit '{safe_text(text)}' was never applied: {reason}." for text in never)

    def notes(self) -> tuple[str, ...]:
        """Return a sentence for each edit that selects several layers: a plain word may match more than expected."""
        return tuple(note_of_several(text, names) for text, names in self.layers.items() if len(names) > 1)


def note_of_several(text: str, names: Sequence[str], kind: str = "layers") -> str:
    """Return a sentence that names some of the layers or parameters that an edit changes."""
    return f"Edit '{safe_text(text)}' changes {len(names):,} {kind}: {some_of([*map(safe_text, names)], 3)}."


def parameter_channel_axis(layer: nn.Module | str, parameter: Tensor) -> int | None:
    """Return which axis of a parameter, or of its gradient, counts output channels; None where none does."""
    if isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d) and parameter.dim() > 1:
        return 1 if layer.groups == 1 else None  # axis 1 counts those of a single group
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return 1  # axis 0 counts words
    if type(layer).__name__ == "Conv1D" and parameter.dim() > 1:
        return 1  # transformers keeps it as (inputs, outputs)
    return 0 if parameter.dim() else None


def place_edits(
    edits: Sequence[str | Edit],
    network: nn.Module,
    execution_order: Callable[[], Sequence[str]] | None,
    axes: AxisReader,
    turns: Callable[[], tuple[int, ...]],
    done: Collection[tuple[str, int]] = (),
) -> PlacedEdits:
    """Return edits of a network, in the order in which they are to be applied, ready for `capture`.

    No edit may be of a parameter's value. `execution_order` is as for `select_layers`, `axes` tells along each forward
    pass which axis counts channels, and `turns` returns the `Edit.turns` of what is edited now. `done` has texts
    of edits, with the `id` of layers that they change already, through another network.

    Raises:
        LayerNotFoundError: If an edit names nothing.
        UsageError: If an expression is malformed.
    """
    parsed = parsed_edits(edits)
    about_operations = [edit for edit in parsed if is_operation_pattern(edit.pattern) and not edit.parameters_only]
    others = [edit for edit in parsed if edit not in about_operations]
    applications = {edit.text: 0 for edit in parsed}

    def intervention(edit: Edit) -> Intervention:
        def apply(maker: nn.Module | str, tensor: Tensor) -> Tensor:
            if missing := missing_memory(tensor):
                name = maker if isinstance(maker, str) else type(maker).__name__
                raise UsageError(f"{edit.text!r} cannot change a tensor of {name}: {missing}.")
            if edit.place == "parameter grad":
                edited = edit.apply(tensor, parameter_channel_axis(maker, tensor))
            else:
                axis = None if tensor.is_nested else axes.channel_axis(maker, tuple(tensor.shape))
                edited = replace(edit, turns=turns()).apply(tensor, axis)
            applications[edit.text] += edited is not tensor
            return edited

        assert edit.place != "value"  # noqa: S101 - `edit_parameters` applies those
        assert edit.place != "freeze"  # noqa: S101 - only a training has these
        return Intervention(edit.place, apply)

    modules = module_index(network)[0] if done else {}
    by_name: dict[str, list[Intervention]] = {}
    layers: dict[str, list[str]] = {}
    for name, edit in bind_edits(others, network, execution_order):
        if (edit.text, id(modules.get(name))) in done:
            continue
        by_name.setdefault(name, []).append(intervention(edit))
        layers.setdefault(edit.text, []).append(name or "(model)")
    of_operations = [(parse_operation_pattern(edit.pattern), intervention(edit)) for edit in about_operations]
    for pattern, _ in of_operations:
        if pattern.call is not None:
            raise UsageError(f"An edit changes every call of an operation: leave out #{pattern.call}.")
    return PlacedEdits(by_name, of_operations, applications, layers)


@dataclass(frozen=True, slots=True)
class ParameterEdits:
    """Edits of parameters that have been applied to a network.

    Attributes:
        originals: Each edited parameter with a copy of what it held.
        notes: A sentence for each edit that selects several parameters.
        warnings: A sentence for each edit that changed nothing.
    """

    originals: tuple[tuple[Tensor, Tensor], ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def split_edits(edits: Sequence[str | Edit]) -> tuple[list[Edit], list[Edit]]:
    """Return the edits of parameters' values, and the others; UsageError if an expression is malformed."""
    parsed = parsed_edits(edits)
    return [edit for edit in parsed if edit.place == "value"], [edit for edit in parsed if edit.place != "value"]


@dataclass(frozen=True, slots=True)
class BoundEdit:
    """An edit of one parameter's value.

    Attributes:
        channel_axis: Which axis of the parameter counts output channels.
    """

    edit: Edit
    name: str
    parameter: nn.Parameter
    channel_axis: int | None

    def edited(self, values: Tensor, turn: int = 0) -> Tensor:
        """Return edited values, or the same tensor where it holds no floating-point numbers; see `Edit`."""
        return replace(self.edit, turns=(turn,)).apply(values, self.channel_axis)


def bound_to_parameters(network: nn.Module, bound: Sequence[tuple[str, Edit]]) -> tuple[BoundEdit, ...]:
    """Return edits of parameters, as `bind_edits` has bound them; UsageError if a parameter cannot be edited."""
    edits, parameters = [], parameters_by_name(network)
    for name, edit in bound:
        parameter, layer = parameters[name]
        is_shared = edit.place == "value" and is_dense(parameter) and torch._debug_has_internal_overlap(parameter) == 1
        if problem := missing_memory(parameter) or ("its elements share memory" if is_shared else ""):
            raise UsageError(f"{edit.text!r} cannot change '{safe_text(name)}': {problem}.")
        edits.append(BoundEdit(edit, name, parameter, parameter_channel_axis(layer, parameter)))
    return tuple(edits)


def edit_parameters(model: nn.Module, edits: Sequence[Edit]) -> ParameterEdits:
    """Write edited values into parameters: what shares their memory follows, as with `load_state_dict`.

    Raises:
        LayerNotFoundError: If an edit names no parameter.
        UsageError: If a parameter cannot be edited in this way, or does not have the channels; nothing is changed then.
    """
    network = unwrap(model)
    bound_edits = bound_to_parameters(network, bind_edits(edits, network))
    values: dict[nn.Parameter, Tensor] = {}
    for bound in bound_edits:
        before = values.get(bound.parameter, bound.parameter.detach())
        after = bound.edited(before)
        if after is not before:
            values[bound.parameter] = after
    originals = tuple((parameter, parameter.detach().clone()) for parameter in values)
    _write(values.items())
    selected = {edit.text: [bound for bound in bound_edits if bound.edit.text == edit.text] for edit in edits}
    return ParameterEdits(
        originals,
        notes=tuple(
            note_of_several(text, [bound.name for bound in several], "parameters")
            for text, several in selected.items()
            if len(several) > 1
        ),
        warnings=tuple(
            f"Edit '{safe_text(text)}' changed nothing: it matches no floating-point numbers."
            for text, bounds in selected.items()
            if values.keys().isdisjoint(bound.parameter for bound in bounds)
        ),
    )


@contextmanager
def edited_parameters(model: nn.Module, edits: Sequence[Edit]) -> Iterator[ParameterEdits]:
    """Edit parameters for the length of a `with` block, see `edit_parameters`; afterwards they hold what they held."""
    with interrupts_between_blocks():
        made = edit_parameters(model, edits) if edits else ParameterEdits()
        try:
            yield made
        finally:
            finished(partial(_write, made.originals))


def _write(values: Iterable[tuple[Tensor, Tensor]]) -> None:
    for parameter, new in values:
        with torch.inference_mode(parameter.is_inference()):
            parameter.data.copy_(new)
