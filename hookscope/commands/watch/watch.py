"""The watch of a training, which `hookscope.watch` returns."""

import atexit
import functools
import math
import os
import platform
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hookscope import options
from hookscope.commands.watch import torch_calls
from hookscope.commands.watch.activations import EagerForward, ForwardPasses, watched_layer
from hookscope.commands.watch.closing import Watched
from hookscope.commands.watch.edits import FittedEdits, TrainingEdits
from hookscope.commands.watch.gradients import can_be_measured, number_of, parameters_of, read_gradients
from hookscope.commands.watch.journal import Journal
from hookscope.commands.watch.judging import Judge
from hookscope.commands.watch.loss_graph import LossOperations, broken_input, operations_of, why_below_zero
from hookscope.commands.watch.losses import LossesToCome, lack_gradients
from hookscope.commands.watch.networks import (
    GraphLeaves,
    Networks,
    Optimizers,
    ParameterNames,
    WatchedNetwork,
    setting_text,
    watched_networks,
    watched_optimizers,
)
from hookscope.commands.watch.outside_writes import OutsideWrites
from hookscope.commands.watch.parameters import ParameterMeasurement
from hookscope.commands.watch.shards import ShardedNorms, Shards, is_sharded, local_part
from hookscope.commands.watch.stale_gradients import WatchedOptimizer
from hookscope.commands.watch.steps import ArrivedStep, StepInProgress
from hookscope.commands.watch.training_log import LAST_STEP
from hookscope.errors import UsageError
from hookscope.hooks.patterns import refuse_positions
from hookscope.inspection.run import unseen_activations
from hookscope.results.activations import LayerRow
from hookscope.results.table_rows import TableRows
from hookscope.results.training import (
    TrainingEnd,
    TrainingFinding,
    TrainingLog,
    TrainingStart,
    WatchedLayer,
    WatchedParameter,
    WatchedStep,
)
from hookscope.statistics.storage import without_float8
from hookscope.text import an, are, counted, exception_line, one_line

# After a step was watched because of a jump, jumps are ignored for this many steps: else every step of a restless run
# would be watched.
_REST = 10

# On an accelerator, the numbers of this many steps may be outstanding before the oldest is waited for.
_MOST_OUTSTANDING = 32


@dataclass(slots=True)
class InScript:
    """What the watches of a script share."""

    losses: LossesToCome = field(default_factory=LossesToCome)
    graphs: dict[str, Node] = field(default_factory=dict)  # last losses, by place
    last_step: int = 0  # where an earlier watch without a file ended
    shards: Shards | None = None
    counts: Watched = field(default_factory=Watched)
    note: str = ""  # on what the next watch cannot see


class Watch:
    """The watch of a training, as `hookscope.watch` returns it.

    It is a context manager: `with hookscope.watch(model, optimizer) as watch`.

    Attributes:
        out: Folder of the log; None without one.
        notes: Sentences on what cannot be measured in this training.
    """

    def __init__(
        self,
        model: Networks,
        optimizer: Optimizers,
        option: options.Watch,
        *,
        activations: bool = True,
        on_line: Callable[[str], None] | None = None,
        script: InScript | None = None,
    ) -> None:
        """Register the hooks; see `hookscope.watch`. `finish_if_complete` ends a step of a script."""
        layer, eager_forward = option.layer, option.eager_forward
        refuse_positions(layer)
        shared = script or InScript()
        self._process = os.getpid()
        self._is_closed = True
        if script is None:
            self._networks = watched_networks(model, layer)
            self._optimizers = watched_optimizers(optimizer, self._networks)
        else:  # found in a script, so they belong together; there may be no network
            self._networks = watched_networks(model, layer, sharded=shared.shards is not None) if model else ()
            self._optimizers = tuple(cast("Sequence[Optimizer]", optimizer))
        self._names = ParameterNames(self._networks, self._optimizers)
        self._edits = TrainingEdits(self._networks)
        fitted = self._edits.fit(option.edit)
        self._every = option.every
        self._patterns = tuple(layer)
        self.out = None if option.out is None else Path(option.out)
        self._passes = [
            EagerForward(network, functools.partial(self._failed_eagerly, network))
            if network.compiled
            else ForwardPasses(network, self._failed_in_forward)
            for network in self._networks
            if (eager_forward if network.compiled else activations)
        ]
        self.notes = self._blind_spots(shared.note, activations=activations and not eager_forward)
        self._sent: deque[StepInProgress] = deque()
        self._states = {id(member): WatchedOptimizer(member) for member in self._optimizers}
        self._outside = OutsideWrites(self._names.of)
        self._is_called = script is None
        self._stride = 1  # from one of the loop's own step numbers to the next
        self._last_call: Literal["", "backward", "step"] = ""  # since an optimiser stepped; "step" if both
        self._graphs = shared.graphs
        self._operations: dict[str, LossOperations] = {}
        self._broken: tuple[list[str] | None, str] | None = None  # bad weights and input, when a loss was not finite
        self._failure: Exception | None = None
        self._jump = ""
        self._rests_until = 0
        self._journal = Journal(self.out, resume=option.resume, on_line=on_line, counts=shared.counts)
        self._judge = Judge(
            self._networks,
            self._optimizers,
            self._names,
            self._journal,
            is_distributed=shared.shards is not None
            or any(isinstance(network.wrapped, DistributedDataParallel) for network in self._networks),
        )
        self._prepared = max(shared.last_step, self._journal.last_step)
        self._first = self._prepared + 1
        self._ended = self._prepared or -1  # the last step that has ended; a loop may begin with 0
        self._shards = shared.shards
        self._losses_to_come = shared.losses
        self._expected = {id(member) for member in self._optimizers}
        self._current = StepInProgress(self._first)
        self._begin(fitted)

    @torch_calls.guarded
    def step(self, loss: float | Tensor | None = None, *, step: int | None = None) -> None:
        """End a step: call this once per iteration of the loop, after `optimizer.step()`.

        If gradients are accumulated, the loss of an iteration without an optimiser step counts towards the mean of the
        next step.

        Args:
            loss: The loss: a number, or a tensor with one value, which is not waited for on an accelerator.
            step: The loop's own number of this step, greater than the one before; None to count on, from 1.
        """
        if self._current.is_called_early and self._current.stepped:
            self._finish_step(late=[*self._names.all.values()])
        if self._last_call == "backward":
            self._last_call = "step"
        value = self._loss_of(loss)
        if value is not None:
            self._current.losses.append(("", value))
            if isinstance(loss, Tensor) and loss.grad_fn is not None:
                self._graphs[""] = loss.grad_fn
                self._read_graphs()
        if self._current.stepped:
            if step is not None:
                self._renumber(step)
            self._finish_step()
        else:
            self._current.given_number = step

    @torch_calls.guarded
    def read_graph(self, loss: Tensor) -> None:
        """Read from its graph why the loss is below 0, if it has been so for some steps."""
        if self._judge.asks_below_zero:
            self._current.below_zero = why_below_zero(loss)

    @torch_calls.guarded
    def finish_if_complete(self) -> None:
        """End the step if every optimiser of the previous step has stepped; in the first step, every optimiser."""
        if self._current.stepped >= self._expected and not self._is_inside_a_step():
            self._finish_step()

    @torch_calls.guarded
    def finish_if_stepped(self, optimizer: Optimizer) -> None:
        """End the step if the optimiser, which is about to step, has already stepped in it."""
        if id(optimizer) in self._current.stepped and not self._states[id(optimizer)].depth:
            self._finish_step(late=parameters_of(optimizer))

    @property
    def edits(self) -> tuple[str, ...]:
        """The edits in force, `"fc:grad:clip-norm(1)"`; assign new edits to replace them from the next forward pass on.

        Without its edit, a frozen parameter is trained again. Weights keep the values that edits have given them.

        Raises:
            LayerNotFoundError: If an edit selects nothing.
            UsageError: If an edit is malformed, cannot be made in this training, or the watch is closed.
        """
        return self._edits.fitted.texts

    @edits.setter
    def edits(self, edits: str | Sequence[str]) -> None:
        if self._is_released:
            raise UsageError("The watch is closed: nothing can be edited any more.")
        self._put_in_force(self._edits.fit([edits] if isinstance(edits, str) else edits))

    def close(self) -> None:
        """Stop watching and editing, remove the hooks and close the file. A second call does nothing."""
        self.end("closed")

    def end(self, reason: str = "the process ended") -> None:
        """Close a watch, and note the reason in the file."""
        if os.getpid() != self._process:
            return
        if not self._is_closed:
            self._finish(reason)
        if not self._is_released:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end("closed" if error is None else exception_line(error))

    def __repr__(self) -> str:
        networks = ", ".join(network.name for network in self._networks)
        state = "closed" if self._is_closed else f"at step {self._current.number}"
        return f"<Watch of {networks}, {state}: {counted(self._judge.verdicts.count, 'open verdict')}>"

    @property
    def is_closed(self) -> bool:
        """Whether the watch has ended: closed, or stopped after an error in hookscope."""
        return self._is_closed

    @property
    def verdicts(self) -> tuple[TrainingFinding, ...]:
        """The beginnings and ends of verdicts, in order; the last 1,000."""
        return self._journal.verdicts

    @property
    def log(self) -> TrainingLog:
        """The last 200 steps, the last 20 watched steps, and `verdicts`; the file has all of them."""
        return self._journal.log(self._judge.ring.steps)

    # --- Beginning and ending ----------------------------------------------------------------------------------------

    def _begin(self, edits: FittedEdits) -> None:
        self._handles = []
        for state in self._states.values():
            before = functools.partial(self._before_step, state)
            after = functools.partial(self._after_step, state)
            # These hooks run last, after other hooks have changed the gradients.
            self._handles.append(state.optimizer.register_step_pre_hook(torch_calls.uncompiled(before)))
            self._handles.append(state.optimizer.register_step_post_hook(torch_calls.uncompiled(after)))
        self._is_closed = self._is_released = False
        torch_calls.listen(self)
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)
        start = TrainingStart(
            step=self._first,
            networks=tuple(network.name for network in self._networks),
            optimizers=tuple(map(setting_text, self._optimizers)),
            every=self._every,
            patterns=self._patterns,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={
                "hookscope": version("hookscope"),
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            notes=self.notes,
        )
        self._journal.add(start)
        self._put_in_force(edits)
        self._prepare()

    def _put_in_force(self, edits: FittedEdits) -> None:
        self._edits.step = self._current.number
        self._untried = self._edits.put_in_force(edits)
        self._outside.forget()
        self._edited = frozenset(self._names.of([gradient.parameter for gradient in (*edits.gradients, *edits.frozen)]))
        self._current.edited |= self._edited
        for passes in self._passes:
            passes.go_last()
        for note in edits.notes():
            self._journal.say_once(note, note)

    def _finish(self, reason: str) -> None:
        try:
            with torch.no_grad():
                if self._current.stepped:
                    self._finish_step()
                self._drain(wait=True)
        except Exception as error:  # noqa: BLE001 - the training goes on
            self._journal.say_failure(f"Watching ends: {exception_line(error)}. The training goes on.")
        self._end(reason)

    def _give_up(self, error: Exception) -> None:
        edited = " Its edits stay." if self.edits else ""
        self._journal.say_failure(
            f"Watching ends, because hookscope failed: {exception_line(error)}. The training goes on.{edited}"
        )
        self._end(exception_line(error))
        if not self.edits:
            self._release()

    def _release(self) -> None:
        self._is_released = True
        atexit.unregister(self._at_exit)
        self._edits.put_in_force(FittedEdits())
        for state in self._states.values():
            state.release()
        for handle in self._handles:
            handle.remove()

    def _end(self, reason: str) -> None:
        self._is_closed = True
        torch_calls.unlisten(self)
        for passes in self._passes:
            passes.end()
        self._journal.add(TrainingEnd(max(0, self._current.number - 1), one_line(reason, 1000)))

    def _failed_in_forward(self, error: Exception) -> None:
        # Hooks cannot be removed inside a forward pass; the next step removes them.
        self._failure = self._failure or error

    def _failed_eagerly(self, network: WatchedNetwork, error: Exception) -> None:
        self._passes = [passes for passes in self._passes if passes.watched is not network]
        why = f"its eager forward pass fails: {exception_line(error)}"
        self._journal.say_unseen(f"Activations of {network.name} are not watched, because {why}.")

    def _blind_spots(self, note: str, *, activations: bool) -> tuple[str, ...]:
        compiled = [network.name for network in self._networks if network.compiled]
        notes = [note] if note else []
        if compiled and activations:
            notes.append(
                f"{', '.join(compiled)} {are(len(compiled))} compiled, where hooks do not fire: activations are not "
                "watched, parameters, gradients and updates are."
            )
        for passes in self._passes:
            notes += unseen_activations(passes.watched.inspected().modules)
        if not torch_calls.sees_clipping():
            notes.append("This torch does not let clip_grad_norm_ be seen: norms before clipping are not known.")
        return tuple(notes)

    # --- What torch calls --------------------------------------------------------------------------------------------

    def _before_step(
        self, state: WatchedOptimizer, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Edit and read the gradients now, or after the closure of the step has run."""
        if os.getpid() != self._process:
            return None
        state.depth = torch_calls.calls_under_way(torch_calls.STEP, optimizer) or state.depth + 1
        if state.depth > 1:  # a subclass calls its base's `step`
            return None
        state.repeats = closure_of(args, kwargs) is None and bool(self._repeats_last_step(state))
        if state.repeats:
            self._edits.edit_gradients(optimizer)
            return None
        self._step_begins(state)
        return with_gradients(functools.partial(self._gradients_are_there, state), args, kwargs)

    @torch_calls.guarded
    def _repeats_last_step(self, state: WatchedOptimizer) -> bool:
        """Report a step with the gradients of the last one; return whether both belong to one iteration."""
        last = state.unscaled or state.unchanged_since()
        if last is None:
            return False
        is_same = id(state.optimizer) in self._current.stepped or not (self._is_called or self._losses_to_come.losses)
        state.has_stepped = True
        number = last.number if is_same else self._current.number
        self._judge.judge_repeat(number, last, type(state.optimizer).__name__)
        return is_same

    def _gradients_are_there(self, state: WatchedOptimizer, *, is_first: bool) -> None:
        self._edits.edit_gradients(state.optimizer)
        if is_first:
            shared = self._shared_norms([state.optimizer])
            self._read(state, shared[0].gradients if shared else None)

    def _is_inside_a_step(self) -> bool:
        return any(state.depth for state in self._states.values())

    def _add_stepped(self, optimizer: Optimizer) -> None:
        """Begin a step of an optimiser, or one that a GradScaler skips."""
        if id(optimizer) in self._current.stepped:  # `step` has not been called since
            self._finish_step(late=parameters_of(optimizer))
        self._current.stepped.add(id(optimizer))
        self._current.is_called_early |= self._last_call == "step"
        if self._current.measurement is not None:
            self._current.measurement.measure_weights()

    @torch_calls.guarded
    def _step_begins(self, state: WatchedOptimizer) -> None:
        optimizer = state.optimizer
        self._add_stepped(optimizer)
        state.has_stepped = True
        measurement = self._current.measurement
        outside = self._outside.step_begins(
            optimizer, self._current.number, self._optimizers, is_measured=measurement is not None
        )
        if outside is not None:
            self._current.outside.append(outside)
        if measurement is not None and not isinstance(optimizer, GraphLeaves):
            measurement.keep(id(optimizer), self._names.of(parameters_of(optimizer)))

    @torch_calls.guarded
    def _read(self, state: WatchedOptimizer, summed: Mapping[int, Tensor] | None) -> None:
        """Read the gradients, or take their norms `summed` over processes; add the losses that belong to the step."""
        step, optimizer = self._current, state.optimizer
        reading = step.readings[id(optimizer)] = read_gradients(optimizer, self._names.of, summed)
        if self._broken is not None and step.bad_weights is None:
            step.bad_weights, step.bad_input = self._broken
        self._broken = None
        if self._is_alone(optimizer):
            state.read(reading, step.number)
        step.losses += self._losses_to_come.taken()
        if summed is None:
            norms = reading.norms  # known at once on the CPU
            if isinstance(norms, Tensor):
                norms = [norms.sum().item()] if norms.is_cpu else []
            # Weights that were not finite are examined at every step until they are.
            is_suspect = not math.isfinite(sum(norms)) or self._judge.verdicts.stands("non-finite-weight")
            if step.bad_weights is None and is_suspect:
                step.bad_weights = self._bad_weights()
            self._read_graphs()
        if step.measurement is not None:
            for passes in self._passes:
                passes.step_begins()
            others = [] if len(step.readings) > 1 else self._names.not_optimised()
            step.measurement.measure_gradients([*reading.names, *others], reading.scale)

    def _is_alone(self, optimizer: Optimizer) -> bool:
        """Tell whether the optimiser is a real one, and its process has whole parameters."""
        return self._shards is None and not isinstance(optimizer, GraphLeaves)

    def _read_graphs(self) -> None:
        """Note the operations of losses: of each place once, and those of a step whose gradients are not finite."""
        for place, graph in self._graphs.items():
            if place not in self._operations or self._current.bad_weights is not None:
                self._operations[place] = operations_of(graph)
        self._graphs.clear()

    def _shared_norms(self, optimizers: Sequence[Optimizer]) -> list[ShardedNorms]:
        summed = [] if self._shards is None else map(self._shards.norms_of, optimizers)
        return [norms for norms in summed if norms is not None]

    def _after_step(self, state: WatchedOptimizer, optimizer: Optimizer, *_: object) -> None:
        if os.getpid() != self._process:
            return
        state.depth = max(0, state.depth - 1)
        if state.depth == 0:
            if not state.repeats:
                self._graphs.clear()
                self._losses_to_come.clear()  # losses of further calls of a closure, at intermediate weights
            self._edits.edit_values(optimizer)
            self._step_ends(state)
            self._end_if_called_early()

    @torch_calls.guarded
    def _step_ends(self, state: WatchedOptimizer) -> None:
        optimizer, is_again = state.optimizer, state.repeats
        state.ended()
        state.repeats = False
        if self._is_alone(optimizer):
            if not is_again:
                state.count_unreset()
            number = self._current.number
            following = self._ended + self._stride + 1  # the next number, if the loop counts on as before
            samples = number == self._first or following // self._every > self._prepared // self._every
            self._outside.step_ends(optimizer, number, samples=samples)
        if self._current.measurement is not None and not is_again:
            self._current.measurement.measure_updates(id(optimizer))

    @torch_calls.guarded
    def backward_begins(self, loss: Tensor | None, _place: str) -> None:
        """Look for NaN in weights and inputs, which the graph still holds, if the loss is not finite.

        A script may write to the weights between `backward` and the step of the optimiser.
        """
        self._last_call = "backward"
        if loss is None or not loss.is_cpu or self._judge.verdicts.stands("non-finite-loss"):
            return
        if not math.isfinite(number_of(loss)):
            weights: list[str] | None = self._bad_weights()
            if self._shards is not None:  # those of other processes are not known
                weights = weights or None
            causes = weights, broken_input(loss.grad_fn, self._names.of_one)
            self._broken = self._broken if self._broken and causes[0] else causes  # the first may have broken weights
        elif self._broken and lack_gradients(self.parameters()):  # the script skipped that batch
            self._broken = None

    def parameters(self) -> list[Tensor]:
        """List the parameters of all optimisers."""
        return [parameter for optimizer in self._optimizers for parameter in parameters_of(optimizer)]

    def backward_ended(self) -> None:
        """Do nothing; called by `torch_calls`."""

    def clips(self, parameters: Sequence[Tensor]) -> bool:
        """Tell whether the parameters that are being clipped are watched; called by `torch_calls`."""
        if self._is_closed or os.getpid() != self._process or not parameters or is_sharded(parameters):
            return False
        if not self._names.of_one(parameters[0]):
            return False
        # Nothing to clip: the optimiser has stepped with these gradients.
        for state in self._states.values():
            state.is_clipped_again = state.unchanged_since() is not None
        return True

    @torch_calls.guarded
    def clipped(self, parameters: Sequence[Tensor], norm: Tensor) -> None:
        """Note a norm before clipping; called by `torch_calls`."""
        members = frozenset(map(id, parameters))
        is_again = has_stepped = False
        for key, state in self._states.items():
            if not members.isdisjoint(map(id, parameters_of(state.optimizer))):
                is_again |= state.is_clipped_again
                has_stepped |= key in self._current.stepped
            if state.is_clipped_again:
                state.ended(is_changed=True)
                state.is_clipped_again = False
        if is_again:
            return
        # Clipped after the optimiser has stepped, and not in a closure: this belongs to the next step.
        if has_stepped and not self._is_inside_a_step():
            self._finish_step(late=parameters)
        self._current.clips.append((members, norm.clone().reshape(())))

    @torch_calls.guarded
    def scaled_step_begins(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        """Note that a GradScaler is about to step; called by `torch_calls`."""
        state = self._states.get(id(optimizer))
        if state is None:
            return
        state.has_stepped = False
        state.unscaled = state.unchanged_since() or state.unscaled
        for text in self._edits.fitted.of_scaled_gradients():
            self._journal.say_once(
                f"scaled {text}",
                f"Edit '{text}' gets gradients that the GradScaler has multiplied by its scale. With param: it gets "
                "unscaled gradients.",
            )
        if scale is not None and not getattr(optimizer, "_step_supports_amp_scaling", False):
            # Clipping came before unscaling; the gradients are unscaled before they reach the optimiser.
            mine = {id(parameter) for parameter in parameters_of(optimizer)}
            self._current.clips = [
                (members, norm / scale if members & mine else norm) for members, norm in self._current.clips
            ]

    @torch_calls.guarded
    def scaled_step_ended(self, optimizer: Optimizer) -> None:
        """Note that a GradScaler has stepped, or has skipped the step; called by `torch_calls`."""
        state = self._states.get(id(optimizer))
        if state is None:
            return
        was_unscaled_again, state.unscaled = state.unscaled is not None, None
        if not was_unscaled_again and not state.has_stepped:
            self._add_stepped(optimizer)
            self._current.skipped.add(id(optimizer))
            self._read(state, {} if self._shared_norms([optimizer]) else None)
        state.ended(is_changed=was_unscaled_again, scaler="stepped" if state.has_stepped else "skipped")
        self._end_if_called_early()

    @torch_calls.guarded
    def _end_if_called_early(self) -> None:
        """If `step` was called before the optimisers stepped, end the step once all of them have."""
        self._last_call = ""
        if self._current.is_called_early:
            if self._current.given_number is not None:
                self._renumber(self._current.given_number)
            if self._current.stepped >= self._states.keys():
                self._finish_step()

    # --- From step to step -------------------------------------------------------------------------------------------

    def _renumber(self, step: int) -> None:
        """Set the number of the step that ends to the loop's own number."""
        if isinstance(step, Integral) and not isinstance(step, bool) and self._ended < step <= LAST_STEP:
            number = int(step)
            if self._current.number == self._first:
                self._first = self._prepared = number
            else:
                self._stride = number - self._ended
            self._current.number = number
            return
        shown = f"{step}" if isinstance(step, Integral) else an(type(step).__name__)
        line = f"step() got {shown} as step: give whole numbers above that of the step before. Steps are counted on."
        self._journal.say_once("step", line)

    def _loss_of(self, loss: object) -> float | Tensor | None:
        if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
            self.read_graph(loss)
            return number_of(loss)
        if isinstance(loss, Real):
            return float(loss)
        if loss is not None:
            received = type(loss).__name__
            if isinstance(loss, Tensor):
                received = f"a tensor of {counted(loss.numel(), 'complex value' if loss.is_complex() else 'value')}"
            line = f"The loss is not watched: step() got {received}. Pass a number, or a tensor with one value."
            self._journal.say_once("loss", line)
        return None

    def _prepare(self, late: Sequence[Tensor] = ()) -> None:
        """Decide whether the next step is measured in full, and register the hooks for forward passes to come."""
        step = self._current
        shared = self._shared_norms(self._optimizers)
        # The loop's own numbers may leave out multiples of `every`.
        is_multiple = step.number // self._every > self._prepared // self._every
        self._prepared = step.number
        is_due = any(norms.is_next_watched for norms in shared) if shared else is_multiple
        if is_due:
            step.reason = "every"
        elif self._jump and self._shards is None and step.number >= self._rests_until:
            step.reason = self._jump
            self._rests_until = step.number + _REST
        self._jump = ""
        if not step.reason:
            return
        self._names.renew()
        step.measurement = ParameterMeasurement(self._listed_parameters())
        # Not at the first step: code that is compiled at its first call would be compiled with the hooks. Where the
        # forward pass of this step is over, the hooks would measure that of the next.
        over = {*map(id, late)}
        for passes in self._passes if step.number > self._first else ():
            if over.isdisjoint(id(parameter) for _, parameter in passes.watched.parameters()):
                passes.begin()

    def _listed_parameters(self) -> dict[str, torch.nn.Parameter]:
        if not self._patterns:
            return dict(self._names.all)
        selected = [layer for network in self._networks for layer in network.layers().values()]
        listed = {id(parameter) for layer in selected for parameter in layer.parameters()}
        return {name: tensor for name, tensor in self._names.all.items() if id(tensor) in listed}

    def _finish_step(self, late: Sequence[Tensor] = ()) -> None:
        """End a step and begin the next; the forward pass of the next step through `late` parameters is over."""
        if self._failure is not None:
            raise self._failure
        step = self._current
        if step.measurement is not None:
            for passes in self._passes:
                passes.end()
        self._expected, self._ended = step.stepped, step.number
        step.edits = self._edits.end_step()
        step.unreset = max(state.unreset_count for state in self._states.values())
        if self._operations:
            step.operations = {at: self._operations[at] for at, _ in step.losses if at in self._operations}
        if self._untried:
            self._say_idle_edits(step)
        step.send()
        self._sent.append(step)
        self._current = StepInProgress(step.number + 1, edited=self._edited, is_belated=bool(late))
        self._edits.step = step.number + 1
        arrived = self._drain(wait=step.measurement is not None)
        if step.measurement is not None and arrived is not None:
            shared = self._shared_norms([optimizer for optimizer in self._optimizers if id(optimizer) in step.stepped])
            rows = step.measurement.finish(shared)
            if rows or not shared:
                self._finish_watched(step, arrived, rows)
        self._prepare(late)

    def _say_idle_edits(self, step: StepInProgress) -> None:
        """Report edits that changed nothing in the first step in which they were in force."""
        if step.skipped:
            return
        for text, count in step.edits:
            if text in self._untried and not count:
                reason = "did not run, got no gradient, is in no optimizer, or holds no dense floating-point numbers"
                line = f"Edit '{text}' changed nothing at step {step.number}: what it selects {reason}."
                self._journal.say_once(f"not made {text}", line)
        self._untried.clear()

    def _drain(self, *, wait: bool) -> ArrivedStep | None:
        """Process the steps whose numbers have arrived, or all with `wait`; return the last."""
        arrived = None
        while self._sent and (wait or self._sent[0].is_complete or len(self._sent) > _MOST_OUTSTANDING):
            arrived = self._sent.popleft().arrived()
            self._journal.add(arrived.record)
            self._jump = self._judge.judge(arrived) or self._jump
        return arrived

    def _finish_watched(self, step: StepInProgress, arrived: ArrivedStep, rows: tuple[WatchedParameter, ...]) -> None:
        layers: list[WatchedLayer] = []
        tables: list[TableRows] = []
        outputs: dict[str, tuple[LayerRow, ...]] = {}
        trained = {id(parameter) for reading in step.readings.values() for parameter in reading.parameters}
        for passes in self._passes if step.number > self._first else ():
            tables += [replace(table, name=f"{passes.watched.prefix}{table.name}") for table in passes.tables()]
            layer_rows = outputs[passes.watched.prefix] = passes.rows()
            layers += [watched_layer(row, passes.watched.prefix) for row in layer_rows if passes.is_listed(row)]
            # The other network of a GAN may not run in a step.
            if not layer_rows and any(id(parameter) in trained for _, parameter in passes.watched.parameters()):
                name = passes.watched.prefix.removesuffix(".") or passes.watched.name
                again = "the step before it ended only when an optimizer stepped again"
                cause = "step() comes before optimizer.step()" if step.is_called_early else again
                line = (
                    f"The forward pass of {name} was over when step {step.number} began, because {cause}: at such "
                    "steps its activations are not watched."
                    if step.is_belated
                    else f"No forward pass of {name} was seen at step {step.number}: it is compiled, not called as a "
                    "module, or ran before the step began. At such steps its activations are not watched."
                )
                self._journal.say_unseen(line, f"no forward {name} {step.is_belated}")
        watched = WatchedStep(step.number, step.reason, rows, tuple(layers), tuple(tables))
        self._journal.add(watched)
        self._judge.judge_watched(watched, arrived, outputs)

    def frozen_in_optimizers(self) -> list[str]:
        """Return the frozen parameters that are in an optimiser, except those that edits freeze."""
        held = chain.from_iterable(map(parameters_of, self._optimizers))
        frozen = [parameter for parameter in held if not parameter.requires_grad]
        return [name for name in self._names.of(frozen) if name not in self._edited]

    def _bad_weights(self) -> list[str]:
        held_by_optimizers = chain.from_iterable(map(parameters_of, self._optimizers))
        everything = {id(tensor): tensor for tensor in (*self._names.all.values(), *held_by_optimizers)}
        held = filter(can_be_measured, everything.values())
        broken = [tensor for tensor in held if not without_float8(local_part(tensor)).isfinite().all()]
        return self._names.in_order(self._names.of(broken))


def with_gradients(
    call: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call `call` now, or after every call of a step's closure, which computes the gradients.

    Returns:
        The arguments of the step with a wrapped closure; None without a closure.
    """
    closure = closure_of(args, kwargs)
    if closure is None:
        call(is_first=True)
        return None
    calls = 0

    @functools.wraps(closure)
    def watched() -> Any:
        nonlocal calls
        loss = closure()
        calls += 1
        call(is_first=calls == 1)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": watched}
    return (args[0], watched, *args[2:]), kwargs


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the closure that a step was called with; None without one."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None


def _close_at_exit(watch: "weakref.ref[Watch]") -> None:
    alive = watch()
    if alive is not None:
        alive.end()
