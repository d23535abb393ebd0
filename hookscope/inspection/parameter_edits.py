"""Edit the values of parameters, by expressions such as `param:conv1.weight:value:zero(channels=3)`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from hookscope.errors import UsageError
from hookscope.hooks.interrupts import finished, interrupts_between_blocks
from hookscope.hooks.memory import missing_memory
from hookscope.hooks.selection import unwrap
from hookscope.inspection.edit_placement import note_of_several, parameter_channel_axis
from hookscope.inspection.edits import Edit, bind_edits, parsed_edits
from hookscope.text import safe_text


@dataclass(frozen=True, slots=True)
class ParameterEdits:
    """Edits of parameters that have been applied to a network.

    Attributes:
        originals: Each edited parameter with a copy of what it held, in the order of the edits.
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
        return self.edit.moved(turn).apply(values, self.channel_axis)


def bound_to_parameters(network: nn.Module, bound: Sequence[tuple[str, Edit]]) -> tuple[BoundEdit, ...]:
    """Return edits of parameters, as `bind_edits` has bound them; UsageError if a parameter cannot be edited."""
    edits: list[BoundEdit] = []
    for name, edit in bound:
        parameter = network.get_parameter(name)
        if missing := missing_memory(parameter):
            raise UsageError(f"{edit.text!r} cannot change '{safe_text(name)}': {missing}.")
        owner = network.get_submodule(name.rpartition(".")[0])
        edits.append(BoundEdit(edit, name, parameter, parameter_channel_axis(owner, parameter)))
    return tuple(edits)


def edit_parameters(model: nn.Module, edits: Sequence[Edit]) -> ParameterEdits:
    """Write edited values into parameters: what shares their memory follows, as with `load_state_dict`.

    Raises:
        LayerNotFoundError: If an edit names no parameter.
        UsageError: If a parameter cannot be edited in this way, or does not have the channels; nothing is changed then.
    """
    network = unwrap(model)
    selected: dict[str, dict[int, str]] = {edit.text: {} for edit in edits}
    values: dict[int, Tensor] = {}
    for bound in bound_to_parameters(network, bind_edits(edits, network)):
        parameter = bound.parameter
        selected[bound.edit.text][id(parameter)] = bound.name
        before = values.get(id(parameter), parameter.detach())
        after = bound.edited(before)
        if after is not before:
            values[id(parameter)] = after
    originals = []
    for parameter in network.parameters():
        if id(parameter) in values:
            originals.append((parameter, parameter.detach().clone()))
            _write(parameter, values[id(parameter)])
    several = {text: [*names.values()] for text, names in selected.items() if len(names) > 1}
    unchanged = [text for text, names in selected.items() if values.keys().isdisjoint(names)]
    return ParameterEdits(
        tuple(originals),
        notes=tuple(note_of_several(text, names, "parameters") for text, names in several.items()),
        warnings=tuple(
            f"Edit '{safe_text(text)}' changed nothing: it matches no floating-point numbers." for text in unchanged
        ),
    )


def put_back(originals: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give parameters the values they had."""
    for parameter, values in reversed(originals):
        _write(parameter, values)


@contextmanager
def edited_parameters(model: nn.Module, edits: Sequence[Edit]) -> Iterator[ParameterEdits]:
    """Edit parameters for the length of a `with` block, see `edit_parameters`; afterwards they hold what they held."""
    with interrupts_between_blocks():
        made = edit_parameters(model, edits) if edits else ParameterEdits()
        try:
            yield made
        finally:
            finished(partial(put_back, made.originals))


def _write(parameter: Tensor, values: Tensor) -> None:
    with torch.inference_mode(parameter.is_inference()):
        parameter.data.copy_(values)
