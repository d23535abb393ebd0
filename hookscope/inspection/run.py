"""What runs over activations and over gradients have in common: what they begin with, gather and report."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import nn

from hookscope.hooks.forward_hooks import Capture
from hookscope.hooks.selection import select_from
from hookscope.inspection.edit_placement import PlacedEdits, place_edits
from hookscope.inspection.edits import Edit
from hookscope.inspection.execution import execution_order
from hookscope.inspection.failures import failure_message, locate, reraise_internal
from hookscope.inspection.network import BatchQueue, InspectedNetwork
from hookscope.inspection.rows import Key, Recorder, Row, predictions
from hookscope.inspection.state.preservation import Preserved
from hookscope.inspection.verification import Outcome, verification_warnings, verify_outcome
from hookscope.results.activations import Verification
from hookscope.results.comparison import Prediction
from hookscope.results.inputs import InputRecord
from hookscope.results.network import Failure
from hookscope.statistics import Measured


@dataclass(frozen=True, slots=True)
class Break:
    """How a batch broke off.

    Attributes:
        failure: Where; None if no module raised.
        overwritten: Whether a tensor was overwritten that the backward pass needed.
    """

    message: str
    failure: Failure | None = None
    error: BaseException | None = None
    overwritten: bool = False


@dataclass(slots=True, kw_only=True)
class Run:
    """One run: what is fixed, and what has been gathered so far.

    Attributes:
        state: A place in the run to go back to.
        captured: What the hooks have seen in the latest pass.
        output_key: Which of several outputs holds the class scores; None for the only one.
        verify: Whether the first batch is to be compared to a pass without hooks.
        rows: What each (layer, call, slot) has shown.
        best: The best classes of the inputs that ran.
        verification: How the comparison ended; None before it, or without one.
    """

    inspected: InspectedNetwork
    queue: BatchQueue
    selected: Mapping[str, nn.Module]
    edits: PlacedEdits
    recorder: Recorder
    state: Preserved
    captured: Capture[Measured]
    output_key: str | None
    verify: bool
    rows: dict[Key, Row] = field(default_factory=dict)
    records: list[InputRecord] = field(default_factory=list)
    best: list[Prediction] = field(default_factory=list)
    verification: Verification | None = None

    def broken(self, raised: BaseException) -> Break:
        """Describe what the model raised in its forward pass; an error of ours is raised again."""
        error = reraise_internal(raised)
        failure = locate(self.inspected.modules, error)
        return Break(failure_message(self.inspected.info.name, failure, error), failure, error)

    def predict(self, output: object, places: Sequence[int]) -> None:
        """Note the best classes of a batch whose inputs have these positions in the run."""
        self.best += predictions(output, self.inspected.info.categories, places, self.output_key)

    def warnings(self, own: Iterable[str] = ()) -> tuple[str, ...]:
        """Return what a reader must see, each sentence once, with `own` after those about the network."""
        verification = verification_warnings(self.verification, self.inspected.info.name)
        everything = (*self.inspected.warnings, *own, *verification, *self.edits.warnings(), *self.queue.remarks)
        return tuple(dict.fromkeys(everything))


def choose(
    inspected: InspectedNetwork,
    queue: BatchQueue,
    layers: Sequence[str],
    edits: Sequence[str | Edit],
    recorder: Recorder,
) -> tuple[dict[str, nn.Module], PlacedEdits]:
    """Return the layers that patterns select, and the edits ready for `capture`.

    Raises:
        LayerNotFoundError: If a pattern or an edit selects nothing.
        UsageError: If a pattern or an edit is malformed.
    """

    def order() -> list[str]:
        return execution_order(inspected.network, queue)

    selected = select_from(inspected.modules, inspected.aliases, layers, order)
    return selected, place_edits(edits, inspected.network, order, recorder)


def verified(
    run: Run,
    hooked: Outcome,
    began: Preserved,
    forward: Callable[[], Outcome],
    hooks: Callable[[Mapping[str, nn.Module]], AbstractContextManager[object]],
) -> Verification:
    """Compare the outcome of the first batch to that without hooks; the run then goes on as if nothing had been.

    `began` leads back to where the batch began, `forward` runs it, and `hooks` puts hooks on some of the layers, to
    find out whose make a difference.
    """
    run.state.mark()  # to go on from here
    layers = [*dict.fromkeys(seen.layer for seen in run.captured.observations)]

    def with_hooks(chosen: Sequence[str]) -> Outcome:
        began.rewind()
        with run.captured.detached(), hooks({layer: run.inspected.modules[layer] for layer in chosen}):
            return forward()

    try:
        return verify_outcome(hooked, layers, with_hooks)
    finally:
        run.state.rewind()
