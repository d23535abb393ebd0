"""The watch of a training, which `hookscope.watch` returns."""

import atexit
import functools
import math
import os
import platform
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hookscope.errors import UsageError
from hookscope.hooks.patterns import refuse_positions
from hookscope.results.activations import LayerRow
from hookscope.results.runs.training_log import TrainingLogFile, TrainingRecord
from hookscope.results.training import (
    TrainingEnd,
    TrainingLog,
    TrainingStart,
    TrainingStep,
    TrainingVerdict,
    WatchedLayer,
    WatchedStep,
)
from hookscope.text import counted, exception_line, one_line, safe_text
from hookscope.watching import rules, torch_calls
from hookscope.watching.activations import ForwardPasses, watched_layer
from hookscope.watching.closing import Watched
from hookscope.watching.eager_forward import EagerForward
from hookscope.watching.edits import FittedEdits, TrainingEdits
from hookscope.watching.gradients import norms_of, parameters_of, read_gradients
from hookscope.watching.idle import IdleParameters
from hookscope.watching.networks import (
    GraphLeaves,
    Networks,
    Optimizers,
    ParameterNames,
    WatchedNetwork,
    setting_text,
    watched_networks,
    watched_optimizers,
)
from hookscope.watching.parameters import ParameterMeasurement, ParameterNumbers
from hookscope.watching.resets import GradientResets
from hookscope.watching.ring import Jump, Ring
from hookscope.watching.rules import Objection
from hookscope.watching.shards import ShardedNorms, Shards, is_sharded
from hookscope.watching.steps import ArrivedStep, HeardLoss, SentStep, StepInProgress
from hookscope.watching.transfers import Transfer, number_of
from hookscope.watching.verdicts import Verdicts

# Watched steps and verdicts kept in memory; the file has all of them.
_KEPT_WATCHED = 20
_KEPT_VERDICTS = 1_000

# After a step was watched because of a jump, jumps are ignored for this many steps: else every step of a restless run
# would be watched.
_REST = 10

# On an accelerator, the numbers of this many steps may be outstanding before the oldest is waited for.
_MOST_ON_THEIR_WAY = 32

P = ParamSpec("P")
R = TypeVar("R")


def _guarded(method: Callable[Concatenate["Watch", P], R]) -> Callable[Concatenate["Watch", P], R | None]:
    """Keep hookscope's own errors out of the training: an error prints a line and ends the watch."""

    @functools.wraps(method)
    def guarded(self: "Watch", *args: P.args, **keywords: P.kwargs) -> R | None:
        if self._is_closed or os.getpid() != self._process:
            return None
        records = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # `no_grad` costs several times as much, at every step
        try:
            return method(self, *args, **keywords)
        except Exception as error:  # noqa: BLE001 - never into a training
            self._give_up(error)
            return None
        finally:
            torch._C._set_grad_enabled(records)

    return cast("Callable[Concatenate[Watch, P], R | None]", guarded)


class Watch:
    """The watch of a training, as `hookscope.watch` returns it.

    It is a context manager: `with hookscope.watch(model, optimizer) as watch`.

    Attributes:
        out: Folder of the log; None without one.
        notes: Sentences on what cannot be measured in this training.
    """

    def __init__(  # noqa: PLR0913 - the options of `hookscope.watch`
        self,
        model: Networks,
        optimizer: Optimizers,
        *,
        every: int,
        out: Path | None,
        layer: Sequence[str],
        activations: bool,
        eager_forward: bool,
        resume: bool,
        on_line: Callable[[str], None] | None,
        edits: Sequence[str],
        heard: list[HeardLoss] | None = None,
        last_step: int = 0,
        shards: Shards | None = None,
        seen: Watched | None = None,
    ) -> None:
        """Register the hooks; see `hookscope.watch`.

        The other arguments are for a script, which does not call `step`: losses arrive in `heard` and belong to the
        next step of an optimiser, and `finish_if_complete` ends a step. `last_step` is that of an earlier watch
        without a file, `shards` has the norms of sharded networks, and `seen` counts over several watches.
        """
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(f"every={every!r} is not a positive whole number: give, for example, every=100.")
        refuse_positions(layer)
        self._process = os.getpid()
        self._is_closed = True
        if heard is None:
            self._networks = watched_networks(model, layer)
            self._optimizers = watched_optimizers(optimizer, self._networks)
        else:  # found in a script, so they belong together; there may be no network
            self._networks = watched_networks(model, layer, sharded=shards is not None) if model else ()
            self._optimizers = tuple(cast("Sequence[Optimizer]", optimizer))
        self._names = ParameterNames(self._networks, self._optimizers)
        self._edits = TrainingEdits(self._networks)
        fitted = self._edits.fit(edits)
        self._every = every
        self._patterns = tuple(layer)
        self._on_line = on_line or _to_stderr
        self.out = out
        self.notes = self._blind_spots(activations=activations and not eager_forward)
        self._passes = [
            EagerForward(each, functools.partial(self._failed_eagerly, each))
            if each.compiled
            else ForwardPasses(each, self._failed_in_forward)
            for each in self._networks
            if (eager_forward if each.compiled else activations)
        ]
        self._ring = Ring()
        self._verdicts = Verdicts()
        self._sent: deque[SentStep] = deque()
        self._depths: dict[int, int] = {}
        self._stepping: set[int] = set()
        self._idle = IdleParameters()
        self._counted: set[str] = set()  # networks, by prefix, whose gradients have been more than rounding
        self._frozen_at_first = {name for name, each in self._names.all.items() if not each.requires_grad}
        self._known_at_first = frozenset(self._names.all)
        self._skips = 0
        self._resets = GradientResets()
        self._was_broken = False
        self._failure: Exception | None = None
        self._said: set[str] = set()
        self._jump = ""
        self._rests_until = 0
        self._kept_watched: deque[WatchedStep] = deque(maxlen=_KEPT_WATCHED)
        self._kept_verdicts: deque[TrainingVerdict] = deque(maxlen=_KEPT_VERDICTS)
        self._starts: tuple[TrainingStart, ...] = ()
        self._ends: tuple[TrainingEnd, ...] = ()
        self._file = None if out is None else TrainingLogFile(out, resume=resume, warn=self._say)
        self._first = 1 + max(last_step, self._file.last_step if self._file is not None else 0)
        self._shards = shards
        self._seen = seen or Watched()
        self._heard = [] if heard is None else heard
        self._expected = {id(each) for each in self._optimizers}
        self._current = StepInProgress(self._first)
        self._begin(fitted)

    def step(self, loss: float | Tensor | None = None) -> None:
        """End a step: call this once per iteration of the loop, after `optimizer.step()`.

        If gradients are accumulated, the loss of an iteration without an optimiser step counts towards the mean of the
        next step.

        Args:
            loss: The loss: a number, or a tensor with one value, which is not waited for on an accelerator.
        """
        self._depths.clear()  # of a step that raised
        self._stepped(loss)

    @_guarded
    def finish_if_complete(self) -> None:
        """End the step if every optimiser of the previous step has stepped; in the first step, every optimiser."""
        if self._current.stepped >= self._expected and not any(self._depths.values()):
            self._finish_step()

    @_guarded
    def finish_if_stepped(self, optimizer: Optimizer) -> None:
        """End the step if the optimiser, which is about to step, has already stepped in it."""
        if id(optimizer) in self._current.stepped and not self._depths.get(id(optimizer)):
            self._finish_belatedly()

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
        self._close("closed")

    def end(self, reason: str = "the process ended") -> None:
        """Close a watch that the script left open."""
        self._close(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close("closed" if error is None else exception_line(error))

    def __repr__(self) -> str:
        networks = ", ".join(each.name for each in self._networks)
        state = "closed" if self._is_closed else f"at step {self._current.number}"
        return f"<Watch of {networks}, {state}: {counted(self._verdicts.count, 'open verdict')}>"

    @property
    def is_closed(self) -> bool:
        """Whether the watch has ended: closed, or stopped after an error in hookscope."""
        return self._is_closed

    @property
    def verdicts(self) -> tuple[TrainingVerdict, ...]:
        """The beginnings and ends of verdicts, in order; the last 1,000."""
        return tuple(self._kept_verdicts)

    @property
    def log(self) -> TrainingLog:
        """The last 200 steps, the last 20 watched steps, and `verdicts`; the file has all of them."""
        return TrainingLog(self._starts, tuple(self._ring), tuple(self._kept_watched), self.verdicts, self._ends)

    # --- Beginning and ending ----------------------------------------------------------------------------------------

    def _begin(self, edits: FittedEdits) -> None:
        before, after = _as_written(self._before_step), _as_written(self._after_step)
        # These hooks run last, after other hooks have changed the gradients.
        handles = [each.register_step_pre_hook(before) for each in self._optimizers]
        handles += [each.register_step_post_hook(after) for each in self._optimizers]
        self._handles = handles
        self._is_closed = self._is_released = False
        torch_calls.listen(self)
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)
        start = TrainingStart(
            step=self._first,
            networks=tuple(each.name for each in self._networks),
            optimizers=tuple(map(setting_text, self._optimizers)),
            every=self._every,
            patterns=self._patterns,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={
                "hookscope": version("hookscope"),
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
        )
        self._starts = (start,)
        self._write(start)
        for note in self.notes:
            self._say(note)
        self._put_in_force(edits)
        self._prepare()

    def _put_in_force(self, edits: FittedEdits) -> None:
        self._edits.step = self._current.number
        self._edits.put_in_force(edits)
        self._edited = frozenset(self._names.of([each.parameter for each in (*edits.gradients, *edits.frozen)]))
        self._current.edited |= self._edited
        self._untried = {*edits.texts}
        for each in self._passes:
            each.go_last()
        for note in edits.notes():
            self._say_once(note, note)

    def _close(self, reason: str) -> None:
        if os.getpid() != self._process:
            return
        if not self._is_closed:
            self._finish(reason)
        if not self._is_released:
            self._release()

    def _finish(self, reason: str) -> None:
        try:
            with torch.no_grad():
                if self._current.stepped:
                    self._finish_step()
                self._drain(wait=True)
        except Exception as error:  # noqa: BLE001 - the training goes on
            self._say(f"Watching ends: {exception_line(error)}. The training goes on.")
        self._end(reason)

    def _give_up(self, error: Exception) -> None:
        edited = " Its edits stay." if self.edits else ""
        self._say(f"Watching ends, because hookscope failed: {exception_line(error)}. The training goes on.{edited}")
        self._end(exception_line(error))
        if not self.edits:
            self._release()

    def _release(self) -> None:
        """Remove all hooks and edits from networks and optimisers."""
        self._is_released = True
        atexit.unregister(self._at_exit)
        self._edits.put_in_force(FittedEdits())
        self._resets.release()
        for handle in self._handles:
            handle.remove()

    def _end(self, reason: str) -> None:
        self._is_closed = True
        torch_calls.unlisten(self)
        for each in self._passes:
            each.end()
        end = TrainingEnd(max(0, self._current.number - 1), one_line(reason, 1000))
        self._ends = (end,)
        self._write(end)
        if self._file is not None:
            self._file.close()

    def _failed_in_forward(self, error: Exception) -> None:
        # Hooks cannot be removed inside a forward pass; the next step removes them.
        self._failure = self._failure or error

    def _failed_eagerly(self, network: WatchedNetwork, error: Exception) -> None:
        """Go on without the activations of a compiled network whose eager forward pass fails."""
        self._passes = [each for each in self._passes if each.watched is not network]
        reason = f"its eager forward pass fails: {exception_line(error)}."
        self._say(f"Activations of {network.name} are not watched, because {reason}")

    def _blind_spots(self, *, activations: bool) -> tuple[str, ...]:
        compiled = [each.name for each in self._networks if each.compiled]
        notes = []
        if compiled and activations:
            are = "is" if len(compiled) == 1 else "are"
            notes.append(
                f"{', '.join(compiled)} {are} compiled, where hooks do not fire: activations are not watched, "
                "parameters, gradients and updates are."
            )
        if not torch_calls.sees_clipping():
            notes.append("This torch does not let clip_grad_norm_ be seen: norms before clipping are not known.")
        return tuple(notes)

    # --- What torch calls --------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Edit and read the gradients now, or after the closure of the step has run."""
        if os.getpid() != self._process:
            return None
        key = id(optimizer)
        self._depths[key] = self._depths.get(key, 0) + 1
        if self._depths[key] > 1:  # a subclass calls its base's `step`
            return None
        self._step_begins(optimizer)
        return with_gradients(functools.partial(self._gradients_are_there, optimizer), args, kwargs)

    def _gradients_are_there(self, optimizer: Optimizer, *, is_first: bool) -> None:
        self._edits.edit_gradients(optimizer)
        if is_first:
            self._read(optimizer)

    @_guarded
    def _step_begins(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._current.stepped:  # `step` has not been called since
            self._finish_belatedly()
        self._current.stepped.add(id(optimizer))
        self._stepping.add(id(optimizer))
        measurement = self._current.measurement
        if measurement is not None:
            measurement.measure_weights()
            if not isinstance(optimizer, GraphLeaves):
                measurement.keep(id(optimizer), self._names.of(parameters_of(optimizer)))

    @_guarded
    def _read(self, optimizer: Optimizer) -> None:
        step = self._current
        shared = self._shared_norms([optimizer])
        known = shared[0].gradients if shared else None
        reading = read_gradients(optimizer, self._names.of, known)
        step.readings[id(optimizer)] = reading
        self._take_heard()
        if step.measurement is not None:
            for each in self._passes:
                each.step_begins()
            others = [] if len(step.readings) > 1 else self.not_optimised()
            step.measurement.measure_gradients([*reading.names, *others], reading.scale)
        norms = reading.norms
        if isinstance(norms, Tensor):
            norms = [norms.sum().item()] if norms.is_cpu else []
        if known is None and step.bad_weights is None and not math.isfinite(sum(norms)):
            step.bad_weights = self._bad_weights(optimizer)

    def _shared_norms(self, optimizers: Sequence[Optimizer]) -> list[ShardedNorms]:
        """Return the norms summed over processes, for optimisers with sharded parameters."""
        shards = self._shards
        return [] if shards is None else [norms for each in optimizers if (norms := shards.known(each)) is not None]

    def _after_step(self, optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if os.getpid() != self._process:
            return
        key = id(optimizer)
        self._depths[key] = max(0, self._depths.get(key, 1) - 1)
        if self._depths[key] == 0:
            self._heard.clear()  # losses of further calls of a closure, at intermediate weights
            self._edits.edit_values(optimizer)
            self._step_ends(optimizer)

    @_guarded
    def _step_ends(self, optimizer: Optimizer) -> None:
        if self._shards is None and not isinstance(optimizer, GraphLeaves):
            self._resets.stepped(optimizer)
        if self._current.measurement is not None:
            self._current.measurement.measure_updates(id(optimizer))

    def _take_heard(self) -> None:
        self._current.losses += self._heard
        self._heard.clear()

    def clips(self, parameters: Sequence[Tensor]) -> bool:
        """Tell whether the parameters that are being clipped are watched; called by `torch_calls`."""
        if self._is_closed or os.getpid() != self._process or not parameters or is_sharded(parameters):
            return False
        return self._names.knows(parameters[0])

    @_guarded
    def clipped(self, parameters: Sequence[Tensor], norm: Tensor) -> None:
        """Note a norm before clipping; called by `torch_calls`."""
        members = frozenset(id(each) for each in parameters)
        # Clipped after the optimiser has stepped: this belongs to the next step.
        if self._optimizers_of(members) & self._current.stepped:
            inside = any(self._depths.get(id(each), 0) for each in self._optimizers)  # in a closure
            if not inside:
                self._finish_belatedly()
        self._current.clips.append((members, norm.clone().reshape(())))

    @_guarded
    def scaled_step_begins(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        """Note that a GradScaler is about to step; called by `torch_calls`."""
        if id(optimizer) not in map(id, self._optimizers):
            return
        self._stepping.discard(id(optimizer))
        for text in self._edits.fitted.of_scaled_gradients():
            self._say_once(
                f"scaled {text}",
                f"Edit '{text}' gets gradients that the GradScaler has multiplied by its scale. With param: it gets "
                "unscaled gradients.",
            )
        if scale is not None and not getattr(optimizer, "_step_supports_amp_scaling", False):
            # Clipping came before unscaling; the gradients are unscaled before they reach the optimiser.
            mine = {id(each) for each in parameters_of(optimizer)}
            self._current.clips = [
                (members, norm / scale if members & mine else norm) for members, norm in self._current.clips
            ]

    @_guarded
    def scaled_step_ended(self, optimizer: Optimizer) -> None:
        """Note that a GradScaler has stepped, or has skipped the step; called by `torch_calls`."""
        if id(optimizer) in map(id, self._optimizers) and id(optimizer) not in self._stepping:
            self._step_begins_skipped(optimizer)

    def _step_begins_skipped(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._current.stepped:
            self._finish_belatedly()
        self._current.stepped.add(id(optimizer))
        self._current.skipped = True
        self._take_heard()
        known: dict[int, Tensor] | None = {} if self._shared_norms([optimizer]) else None
        self._current.readings[id(optimizer)] = read_gradients(optimizer, self._names.of, known)

    # --- From step to step -------------------------------------------------------------------------------------------

    @_guarded
    def _stepped(self, loss: float | Tensor | None) -> None:
        value = self._loss_of(loss)
        if value is not None:
            self._current.losses.append(("", value))
        if self._current.stepped:
            self._finish_step()

    def _loss_of(self, loss: object) -> float | Tensor | None:
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return number_of(loss)
        if isinstance(loss, int | float):
            return float(loss)
        if loss is not None:
            what = f"a tensor of {counted(loss.numel(), 'value')}" if isinstance(loss, Tensor) else type(loss).__name__
            line = f"The loss is not watched: step() got {what}. Pass a number, or a tensor with one value."
            self._say_once("loss", line)
        return None

    def _prepare(self) -> None:
        """Decide whether the next step is measured in full, and register the hooks for its forward passes."""
        step = self._current
        shared = self._shared_norms(self._optimizers)
        is_due = any(norms.is_next_watched for norms in shared) if shared else step.number % self._every == 0
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
        # Not at the first step: code that is compiled at its first call would be compiled with the hooks.
        if step.number > self._first:
            for each in self._passes:
                each.begin()

    def _listed_parameters(self) -> dict[str, torch.nn.Parameter]:
        if not self._patterns:
            return dict(self._names.all)
        layers = {f"{each.prefix}{name}" for each in self._networks for name in each.layers()}
        return {name: each for name, each in self._names.all.items() if layers.intersection(_modules_around(name))}

    def _finish_step(self) -> None:
        if self._failure is not None:
            raise self._failure
        step = self._current
        if step.measurement is not None:
            for each in self._passes:
                each.end()
        self._expected = step.stepped
        step.edits = self._edits.end_step()
        step.unreset = self._resets.missing
        if self._untried:
            self._say_what_was_not_made(step)
        self._sent.append(step.sent())
        self._current = StepInProgress(step.number + 1, edited=self._edited)
        self._edits.step = step.number + 1
        arrived = self._drain(wait=step.measurement is not None)
        if step.measurement is not None and arrived is not None:
            shared = self._shared_norms([each for each in self._optimizers if id(each) in step.stepped])
            numbers = step.measurement.finish(shared)
            if step.measurement.parameters or not shared:
                self._finish_watched(step, arrived, numbers)
        self._prepare()

    def _finish_belatedly(self) -> None:
        """End a step after the forward pass of the next step has run."""
        self._finish_step()
        self._current.is_belated = True

    def _say_what_was_not_made(self, step: StepInProgress) -> None:
        """Report edits that changed nothing in the first step in which they were in force."""
        if step.skipped:
            return
        for text, count in step.edits:
            if text in self._untried and not count:
                reason = "its layer did not run, or got no gradient"
                self._say_once(f"not made {text}", f"Edit '{text}' changed nothing at step {step.number}: {reason}.")
        self._untried.clear()

    def _drain(self, *, wait: bool) -> ArrivedStep | None:
        """Process the steps whose numbers have arrived, or all with `wait`; return the last."""
        arrived = None
        while self._sent and (wait or self._sent[0].is_complete or len(self._sent) > _MOST_ON_THEIR_WAY):
            arrived = self._sent.popleft().arrived()
            self._take_in(arrived)
        return arrived

    def _take_in(self, arrived: ArrivedStep) -> None:
        """Write a step, and judge it by the rules for every step."""
        record = arrived.record
        self._write(record)
        self._seen.add_step(record)
        is_broken = not arrived.is_finite and not record.skipped
        broken = self._in_network_order(arrived.broken) if is_broken or record.skipped else []
        # The scale of a GradScaler may make Inf, but never NaN.
        has_nan_loss = record.skipped and record.loss is not None and math.isnan(record.loss)
        not_finite: list[Objection] = []
        if is_broken or has_nan_loss:
            bad_weights = arrived.step.bad_weights
            not_finite = rules.first_not_finite(
                record, self._ring, broken, len(arrived.norms), bad_weights, is_distributed=self._is_distributed()
            )
        loss_jump, norm_jump = self._ring.add(record)
        diverging = rules.diverging_loss(record.loss, self._ring.growth(record.loss))
        has_more_zeros = not record.skipped and self._idle.count(arrived)
        became_broken = is_broken and not self._was_broken
        if not record.skipped:
            self._was_broken = is_broken
        self._skips = self._skips + 1 if record.skipped else 0
        unreset = arrived.step.unreset
        unusual = is_broken or loss_jump or diverging or norm_jump or self._skips or unreset or self._idle.any
        if not unusual and not self._verdicts.count:  # as at nearly every step
            return
        found: dict[str, list[Objection]] = {
            name: [each for each in not_finite if each.rule == name] for name in _NOT_FINITE
        }
        found["loss-jump"] = rules.jump_objection("loss-jump", "loss", loss_jump)
        found["loss-diverges"] = diverging
        found["gradient-jump"] = rules.jump_objection("gradient-jump", "gradient norm", norm_jump)
        found["skipped-steps"] = rules.skipped_steps(self._skips, broken[-1] if broken else "")
        found["gradients-not-reset"] = rules.gradients_not_reset(unreset)
        if not record.skipped:
            found["unused-parameter"] = rules.idle_parameters("unused-parameter", self._idle.without)
            found["dead-gradient"] = rules.idle_parameters("dead-gradient", self._idle.zero)
            found["frozen-parameter"] = rules.newly_frozen(self._idle.newly_frozen)
        # At a step with NaN or Inf only the first cause is reported; the other rules are not judged as passed.
        unjudged = [name for name in _NOT_FINITE if (is_broken or has_nan_loss) and not found[name]]
        for name in [each for each in found if each not in unjudged]:
            self._judge(record.step, name, found[name])
        if reason := _reason_to_look(loss_jump, norm_jump, became_broken=became_broken, has_more_zeros=has_more_zeros):
            self._jump = reason

    def _is_distributed(self) -> bool:
        return self._shards is not None or any(
            isinstance(each.given, DistributedDataParallel) for each in self._networks
        )

    def _finish_watched(self, step: StepInProgress, arrived: ArrivedStep, numbers: ParameterNumbers) -> None:
        """Write and judge the measurements of a watched step."""
        assert step.measurement is not None  # noqa: S101
        parameters = step.measurement.parameters
        rows = tuple(numbers.row(name, each) for name, each in parameters.items())
        layers: list[WatchedLayer] = []
        seen: dict[str, tuple[LayerRow, ...]] = {}
        for each in self._passes if step.number > self._first else ():
            found = seen[each.watched.prefix] = each.rows()
            layers += [watched_layer(row, each.watched.prefix) for row in found if each.is_listed(row)]
            if not found and self._has_gradient(each.watched, step):
                name = each.watched.name
                line = (
                    f"The forward pass of {name} was over when step {step.number} began, because an optimizer steps "
                    "several times per iteration: at such steps its activations are not watched."
                    if step.is_belated
                    else f"No forward pass of {name} was seen at step {step.number}: it is compiled, or not called as "
                    "a module. Its activations are not watched."
                )
                self._say_once(f"no forward {name} {step.is_belated}", line)
        watched = WatchedStep(step.number, step.reason, rows, tuple(layers))
        self._kept_watched.append(watched)
        self._seen.add_watched(watched)
        self._write(watched)
        judged = {name: list[Objection]() for name in rules.WATCHED_RULES} if any(seen.values()) else {}
        for network in self._networks:
            found = seen.get(network.prefix, ())
            if found:
                for name, objections in rules.judged_layers(network.inspected().info, found, network.prefix).items():
                    judged[name] += objections
            if arrived.is_finite and not _has_no_gradient(arrived.record) and not judged.get("non-finite-activation"):
                told = self._judged_gradients(network, found, parameters, numbers, arrived.record.loss)
                for name, objections in told.items():
                    judged.setdefault(name, []).extend(objections)
        if not arrived.record.skipped:
            shapes = {name: tuple(each.shape) for name, each in parameters.items()}
            judged["large-update"] = rules.large_updates(rows, shapes) if arrived.is_finite else []
        judged["unoptimised-parameter"] = self._unoptimised()
        for name, objections in judged.items():
            self._judge(step.number, name, objections)

    def _has_gradient(self, network: WatchedNetwork, step: StepInProgress) -> bool:
        """Tell whether an optimiser of a network stepped; the other network of a GAN may not run in a step."""
        trained = {id(each) for reading in step.readings.values() for each in reading.parameters}
        return any(id(each) in trained for _, each in network.parameters())

    def _judged_gradients(
        self,
        network: WatchedNetwork,
        layers: Sequence[LayerRow],
        parameters: Mapping[str, Tensor],
        numbers: ParameterNumbers,
        loss: float | None,
    ) -> dict[str, list[Objection]]:
        inspected = network.inspected()
        kinds = {name: type(module).__name__ for name, module in inspected.modules.items()}
        found = [
            numbers.result_row(index, name, own_name, kinds.get(own_name.rpartition(".")[0], ""), parameters[name])
            for index, (name, own_name) in enumerate(
                (name, name.removeprefix(network.prefix)) for name, _ in network.parameters() if name in parameters
            )
        ]
        is_adaptive = any(type(each) is not torch.optim.SGD for each in self._optimizers)
        names = rules.gradient_rules(has_counted=network.prefix in self._counted, is_adaptive=is_adaptive)
        judged = rules.judged_parameters(inspected.info, layers, found, loss, network.prefix, names)
        if not judged.get("zero-gradient"):
            self._counted.add(network.prefix)
        return judged

    def _unoptimised(self) -> list[Objection]:
        """Return the objections to parameters that were unfrozen or added since the start and have no optimiser."""
        new = [
            name for name in self.not_optimised() if name in self._frozen_at_first or name not in self._known_at_first
        ]
        message = "'{}' is trainable now, but is in no watched optimizer: add it with add_param_group."
        return [rules.objection("unoptimised-parameter", name, None, message.format(name)) for name in new]

    def not_optimised(self) -> list[str]:
        """Return the trainable parameters that are in no watched optimiser."""
        held = {id(each) for optimizer in self._optimizers for each in parameters_of(optimizer)}
        return [name for name, each in self._names.all.items() if each.requires_grad and id(each) not in held]

    def frozen_in_optimizers(self) -> list[str]:
        """Return the frozen parameters that are in an optimiser, except those that edits freeze."""
        frozen = [each for one in self._optimizers for each in parameters_of(one) if not each.requires_grad]
        return [name for name in self._names.of(frozen) if name not in self._edited]

    def _bad_weights(self, optimizer: Optimizer) -> list[str]:
        held = [each for each in parameters_of(optimizer) if each.is_floating_point() or each.is_complex()]
        norms = Transfer(norms_of([each.detach() for each in held])).read()
        names = self._names.of([each for each, norm in zip(held, norms, strict=True) if not math.isfinite(norm)])
        return self._in_network_order(names)

    def _in_network_order(self, names: Sequence[str]) -> list[str]:
        if len(names) < 2:
            return [*names]
        order = {name: position for position, name in enumerate(self._names.all)}
        return sorted(names, key=lambda name: order.get(name, len(order)))

    def _optimizers_of(self, members: frozenset[int]) -> set[int]:
        return {id(each) for each in self._optimizers if any(id(one) in members for one in parameters_of(each))}

    # --- Writing and speaking ----------------------------------------------------------------------------------------

    def _judge(self, step: int, rule: str, objections: Sequence[Objection]) -> None:
        if not objections and not self._verdicts.stands(rule):
            return
        for verdict in self._verdicts.judged(step, rule, objections):
            self._kept_verdicts.append(verdict)
            self._seen.add_verdict(verdict)
            self._write(verdict)
            ended = " ended" if verdict.state == "ended" else ""
            self._say(f"step {verdict.step}: {verdict.rule}{ended}: {verdict.message}")

    def _write(self, record: TrainingRecord) -> None:
        if self._file is not None:
            self._file.append(record)

    def _say_once(self, what: str, line: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._say(line)

    def _say(self, line: str) -> None:
        self._on_line(safe_text(line))


def with_gradients(
    call: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call `call` now, or after every call of the closure of a step, before which the gradients are stale.

    Returns:
        The arguments of the step with a wrapped closure; None without a closure.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
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


_NOT_FINITE = ("non-finite-weight", "non-finite-loss", "non-finite-gradient")


def _reason_to_look(
    loss_jump: Jump | None, norm_jump: Jump | None, *, became_broken: bool, has_more_zeros: bool
) -> str:
    """Return the reason to watch the next step in full; "" without one."""
    if became_broken:
        return "non-finite"
    if loss_jump is not None:
        return "loss"
    if norm_jump is not None:
        return "gradient norm"
    return "zero gradient" if has_more_zeros else ""


def _has_no_gradient(record: TrainingStep) -> bool:
    """Tell whether a step has no gradients that can be judged."""
    return record.skipped or not record.gradient_norm


def _as_written(method: Callable[P, R]) -> Callable[P, R]:
    """Return a hook that runs uncompiled, also inside a compiled step."""

    def hook(*args: P.args, **keywords: P.kwargs) -> R:
        return method(*args, **keywords)

    return torch.compiler.disable(hook)  # type: ignore[no-any-return, no-untyped-call]


def _modules_around(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _to_stderr(line: str) -> None:
    try:
        sys.stderr.write(f"hookscope.watch: {line}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # closed, or none
        return


def _close_at_exit(watch: "weakref.ref[Watch]") -> None:
    alive = watch()
    if alive is not None:
        alive.end()
