"""Fit edit expressions to the layers of one run, and count what they did."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from hookscope.errors import UsageError
from hookscope.hooks.interventions import Intervention
from hookscope.hooks.memory import missing_memory
from hookscope.hooks.patterns import OperationPattern, is_operation_pattern, parse_operation_pattern
from hookscope.inspection.edits import Edit, bind_edits, parsed_edits
from hookscope.statistics.channel_axis import AxisReader
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


def parameter_channel_axis(owner: nn.Module | str, parameter: Tensor) -> int | None:
    """Return which axis of a parameter, or of its gradient, counts output channels; None for a scalar."""
    transposed = isinstance(owner, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
    return int(transposed and parameter.dim() > 1) if parameter.dim() else None


def place_edits(
    edits: Sequence[str | Edit],
    network: nn.Module,
    execution_order: Callable[[], Sequence[str]] | None,
    axes: AxisReader,
    turn: Callable[[], int] = lambda: 0,
) -> PlacedEdits:
    """Return edits of a network, in the order in which they are to be applied, ready for `capture`.

    Args:
        edits: Expressions, or edits that have been parsed; none of parameters' values.
        network: The network.
        execution_order: As for `select_layers`.
        axes: Tells along each forward pass which axis counts channels.
        turn: Returns a number that moves the seeds of noise: noise is the same as long as it is.

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
                axis = parameter_channel_axis(maker, tensor)
            else:
                axis = None if tensor.is_nested else axes.channel_axis(maker, tuple(tensor.shape))
            edited = edit.moved(turn()).apply(tensor, axis)
            applications[edit.text] += edited is not tensor
            return edited

        assert edit.place != "value"  # noqa: S101 - `parameter_edits` applies those
        assert edit.place != "freeze"  # noqa: S101 - only a training has these
        return Intervention(edit.place, apply)

    by_name: dict[str, list[Intervention]] = {}
    layers: dict[str, list[str]] = {}
    for name, edit in bind_edits(others, network, execution_order):
        by_name.setdefault(name, []).append(intervention(edit))
        layers.setdefault(edit.text, []).append(name or "(model)")
    of_operations = [(parse_operation_pattern(edit.pattern), intervention(edit)) for edit in about_operations]
    for pattern, _ in of_operations:
        if pattern.call is not None:
            call = pattern.text.rpartition("#")[2]
            raise UsageError(f"An edit changes every call of an operation: leave out #{call}.")
    return PlacedEdits(by_name, of_operations, applications, layers)
