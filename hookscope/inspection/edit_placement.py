"""Fit edit expressions to the layers of one run, and count what they did."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from hookscope.errors import UsageError
from hookscope.hooks.interventions import Intervention
from hookscope.hooks.memory import missing_memory
from hookscope.hooks.patterns import OperationPattern, is_operation_pattern, parse_operation_pattern
from hookscope.hooks.selection import select_layers
from hookscope.inspection.edits import Edit, bind_edits, parse_edit
from hookscope.statistics.channel_axis import AxisReader
from hookscope.text import safe_text

_NAMED = 3  # layers that a note names


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
        return tuple(
            f"Edit '{safe_text(text)}' was never applied: its layer did not run, or got no gradient."
            for text, count in self.applications.items()
            if not count
        )

    def notes(self) -> tuple[str, ...]:
        """Return a sentence for each edit that selects several layers: a plain word may match more than expected."""
        return tuple(
            f"Edit '{safe_text(text)}' changes {len(names)} layers: {', '.join(map(safe_text, names[:_NAMED]))}"
            f"{', …' if len(names) > _NAMED else '.'}"
            for text, names in self.layers.items()
            if len(names) > 1
        )


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
    parsed = [parse_edit(edit) if isinstance(edit, str) else edit for edit in edits]
    parameters = dict(network.named_parameters(remove_duplicate=False)) if parsed else {}
    about_operations = [edit for edit in parsed if is_operation_pattern(edit.pattern) and not edit.parameters_only]
    others = [edit for edit in parsed if edit not in about_operations]
    bound = bind_edits(others, lambda pattern: list(select_layers(network, [pattern], execution_order)), [*parameters])
    applications = {edit.text: 0 for edit in parsed}

    def channel_axis(edit: Edit, maker: nn.Module | str, tensor: Tensor) -> int | None:
        if edit.place == "parameter grad":
            return parameter_channel_axis(maker, tensor)
        return None if tensor.is_nested else axes.channel_axis(maker, tuple(tensor.shape))

    def intervention(edit: Edit) -> Intervention:
        def apply(maker: nn.Module | str, tensor: Tensor) -> Tensor:
            if missing := missing_memory(tensor):
                name = maker if isinstance(maker, str) else type(maker).__name__
                raise UsageError(f"{edit.text!r} cannot change a tensor of {name}: {missing}.")
            edited = edit.moved(turn()).apply(tensor, channel_axis(edit, maker, tensor))
            applications[edit.text] += edited is not tensor
            return edited

        assert edit.place != "value"  # noqa: S101 - `parameter_edits` applies those
        assert edit.place != "freeze"  # noqa: S101 - only a training has these
        return Intervention(edit.place, apply)

    by_name: dict[str, list[Intervention]] = {}
    layers: dict[str, list[str]] = {}
    tied: set[tuple[int, str]] = set()
    for name, edit in bound:
        if edit.place == "parameter grad":
            if (key := (id(parameters[name]), edit.text)) in tied:  # one gradient under several names
                continue
            tied.add(key)
        by_name.setdefault(name, []).append(intervention(edit))
        layers.setdefault(edit.text, []).append(name or "(model)")
    of_operations = [(parse_operation_pattern(edit.pattern), intervention(edit)) for edit in about_operations]
    if one_call := next((pattern.text for pattern, _ in of_operations if pattern.call is not None), None):
        raise UsageError(f"An edit changes every call of an operation: leave out #{one_call.rpartition('#')[2]}.")
    return PlacedEdits(by_name, of_operations, applications, layers)
