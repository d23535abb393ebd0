"""Watch the training of an unchanged script: find what it trains at the first step, and watch it."""

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hookscope import options
from hookscope.commands.watch import torch_calls
from hookscope.commands.watch.closing import closing_line
from hookscope.commands.watch.discovery import found_text, graph_of, living, networks_of, optimizers_among
from hookscope.commands.watch.edits import parse_training_edit
from hookscope.commands.watch.gradients import inner_optimizer, parameters_of
from hookscope.commands.watch.networks import GraphLeaves, is_compiled
from hookscope.commands.watch.shards import FIRST_STEP, ShardedNorms, Shards, is_sharded
from hookscope.commands.watch.watch import InScript, Watch, with_gradients
from hookscope.errors import EXIT_BUG, HookscopeError, UsageError
from hookscope.rules.rule import listed
from hookscope.text import exception_line, in_words

# A script that has called `backward` this often without a living optimiser has none. The first call may be a trial.
_WITHOUT_OPTIMIZER = 2

# The value of `every` for processes other than the first: they edit, but do not measure.
_NEVER = 2**62

# Losses kept until the first step of an optimiser.
_KEPT_LOSSES = 1_000

# Norms before clipping kept until the watch begins: one for each optimiser.
_KEPT_CLIPS = 8

_SHARDED = (
    "The network is sharded: its modules gather and free parameters around each call, so hooks stay off them and "
    "activations are not watched. Norms begin at step {}."
)
_IN_COMPILED_CODE = "The loss comes out of compiled code, where hooks do not fire: activations are not watched."


class ScriptWatch:
    """Watches the trainings of a script, one `Watch` at a time."""

    def __init__(self, option: options.Watch, folder: str | None, say: Callable[[str], None]) -> None:
        """Register hooks in torch, which has just been imported.

        Raises:
            UsageError: If an edit is malformed.
        """
        self._option, self._folder = option, folder
        edits = [*map(parse_training_edit, option.edit)]
        self._edits_layers = not all(edit.parameters_only for edit in edits)
        self._print = say
        self._process = os.getpid()
        self.is_closed = False
        self._watch: Watch | None = None
        self._watched: dict[int, Optimizer] = {}
        self._retired: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._shared = InScript()
        self._clipped: list[tuple[Sequence[Tensor], Tensor]] = []
        self._places: dict[str, None] = {}
        self._found = ""
        self._waiting: list[str] = []
        self._leaves: GraphLeaves | None = None
        self._backward_count = 0
        self._shards = Shards(option.every)
        self._may_be_sharded = True  # false once an unsharded network is found
        self._is_compiled = False
        self._said: set[str] = set()
        self._speaks = True
        self.started_count = 0  # processes that the script has started and that may train
        _observe_starts(self._process_starts)
        register_optimizer_step_pre_hook(torch_calls.uncompiled(self._before_step))
        register_optimizer_step_post_hook(torch_calls.uncompiled(self._after_step))
        torch_calls.listen(self)
        if self._option.edit:
            torch_calls.before_first_forward(self._find_before_forward)

    @property
    def has_watched(self) -> bool:
        """Whether a training was seen, or the reason was printed."""
        return self._watch is not None or self.is_closed

    @property
    def ends_badly(self) -> bool:
        """Whether a problem or no step was seen, or hookscope failed; False for all processes but the first."""
        counts = self._shared.counts
        return self._speaks and not _rank() and (counts.problems > 0 or not counts.steps or counts.has_failed)

    def _give_up(self, error: Exception) -> None:
        self.is_closed = self._shared.counts.has_failed = True
        self._found = ""
        if isinstance(error, HookscopeError):
            self._end_if_not_edited(str(error), error.exit_code)
            self._say(f"Not watched: {error}")
        else:
            self._end_if_not_edited(f"hookscope failed: {exception_line(error)}", EXIT_BUG)
            self._say(f"Watching ends, because hookscope failed: {exception_line(error)}. The training goes on.")

    def end(self, reason: str, *, has_failed: bool = False) -> None:
        """End the watch because the script ends, and print the last line. A second call does nothing.

        With `has_failed`, an exception ended the script: if there was no step, no line is needed.
        """
        watch = self._watch
        if watch is None or os.getpid() != self._process:
            return
        watch.end(reason)
        if self.is_closed:
            return
        self.is_closed = True
        self._announce()
        if self._speaks and (self._shared.counts.steps or not has_failed):
            self._print(closing_line(self._shared.counts, folder=self._folder, started=self.started_count))

    # --- What torch calls --------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        self._watch_if_new(optimizer)
        # This must run even after a failure: the other processes wait for it.
        norms = self._norms_of(optimizer) if self._may_be_sharded else None
        if norms is None:
            return None
        if self._watch is not None:
            self._watch.finish_if_stepped(optimizer)
        return with_gradients(norms.read_gradients, args, keywords) if norms.begin_step(optimizer) else None

    def _norms_of(self, optimizer: Optimizer) -> ShardedNorms | None:
        return self._shards.of(optimizer) if os.getpid() == self._process else None

    def _after_step(self, optimizer: Optimizer, _args: object, _keywords: object) -> None:
        norms = self._norms_of(optimizer) if self._may_be_sharded else None
        if norms is not None:
            norms.end_step()
        self._finish()

    @torch_calls.guarded
    def _watch_if_new(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._watched and inner_optimizer(optimizer) is optimizer:
            self._may_be_sharded = True
            self._watch_new(optimizer)

    def _process_starts(self, module: str) -> None:
        # Workers of a DataLoader and servers of shared objects train nothing.
        if os.getpid() == self._process and not module.startswith(("torch.utils.data.", "multiprocessing.managers")):
            self.started_count += 1

    @torch_calls.guarded
    def _find_before_forward(self) -> None:
        fresh = [optimizer for optimizer in optimizers_among(living()[1]) if id(optimizer) not in self._watched]
        if fresh and (self._watch is None or fresh[-1] not in self._retired):
            self._watch_new(fresh[-1], step_begins=True)

    @torch_calls.guarded
    def backward_begins(self, loss: Tensor | None, place: str) -> None:
        """Note a loss, and the place of the call; called by `torch_calls`."""
        if loss is None:
            self._say_once(f"{place} calls backward on several values, or with gradients: its loss is not seen.")
            return
        if self._watch is None:
            del self._shared.losses.losses[:-_KEPT_LOSSES]
        elif self._watch.is_closed:
            return
        if self._edits_layers and self._watch is not None and self._backward_count < _WITHOUT_OPTIMIZER:
            self._backward_count += 1
            self._is_compiled = graph_of(loss)[1]
            self._refuse_compiled()
        if self._watch is not None:
            self._watch.read_graph(loss)
        self._places[place] = None
        parameters = graph_of(loss)[0] if self._watch is None else self._watch.parameters()
        self._shared.losses.backward_begins((place, torch_calls.value_of(loss)), parameters)
        if loss.grad_fn is not None:
            self._shared.graphs[place] = loss.grad_fn
        if self._leaves is not None:
            self._leaves.param_groups[0]["params"] = graph_of(loss)[0]
        elif self._watch is None and self._backward_count < _WITHOUT_OPTIMIZER:
            self._backward_count += 1
            leaves, self._is_compiled = graph_of(loss)
            if self._backward_count == _WITHOUT_OPTIMIZER and leaves and not optimizers_among(living()[1]):
                self._leaves = GraphLeaves(leaves, {})

    @torch_calls.guarded
    def backward_ended(self) -> None:
        """Note the gradients, and end a step of a script without an optimiser; called by `torch_calls`."""
        self._shared.losses.backward_ended()
        if self._leaves is not None:
            self._leaves.step()

    def clips(self, parameters: Sequence[Tensor]) -> bool:
        """Tell whether a clipping must be kept for a later watch; called by `torch_calls`."""
        if is_sharded(parameters):  # every process must return the same, even after a failure
            return self._shards.is_active and os.getpid() == self._process
        return not self.is_closed and (self._watch is None or not self._watch.clips(parameters))

    def clipped(self, parameters: Sequence[Tensor], norm: Tensor) -> None:
        """Note a norm before clipping; called by `torch_calls`."""
        if is_sharded(parameters):
            norm = self._shards.whole_norm(norm)
        self._keep_clipped(parameters, norm)

    @torch_calls.guarded
    def _keep_clipped(self, parameters: Sequence[Tensor], norm: Tensor) -> None:
        if is_sharded(parameters):
            if self._watch is not None and not norm.isnan():
                self._watch.clipped(parameters, norm)
            return
        self._clipped = [*self._clipped[1 - _KEPT_CLIPS :], (parameters, norm.clone())]

    def scaled_step_begins(self, optimizer: Optimizer, _scale: Tensor | None) -> None:
        """Find what is trained, even if the first steps are skipped; called by `torch_calls`."""
        self._watch_if_new(optimizer)
        norms = self._norms_of(optimizer)
        if norms is not None:
            norms.has_stepped = False

    def scaled_step_ended(self, optimizer: Optimizer) -> None:
        """End a step that was skipped; called by `torch_calls`."""
        norms = self._norms_of(optimizer)
        if norms is not None and not norms.has_stepped:
            norms.count()
        self._finish()

    # --- From one training to the next -------------------------------------------------------------------------------

    def _watch_new(self, optimizer: Optimizer, *, step_begins: bool = False) -> None:
        """Watch what a new optimiser trains: the first one of the script, or one of a later training.

        `step_begins` tells that nothing of the step has been computed yet.
        """
        last_step = self._let_go()
        if optimizer in self._retired:  # an earlier training goes on, so its other optimisers may too
            self._retired.clear()
        is_first = self._speaks = not _rank()
        if not is_first and not self._option.edit:
            self.is_closed = True
            return
        if self._option.edit and is_sharded(parameters_of(optimizer)):
            raise UsageError("the network is sharded: each process has only a part of every parameter.")
        self._refuse_compiled()
        modules, others = living()
        optimizers = [optimizer]
        if isinstance(optimizer, GraphLeaves):  # found at the second step, from its second loss
            last_step = max(last_step, self._backward_count - 1)
            del self._shared.losses.losses[:-1]
        else:
            optimizers = [
                candidate
                for candidate in optimizers_among(others)
                if candidate is optimizer or candidate not in self._retired
            ]
            self._leaves = None
        self._places = dict.fromkeys(place for place, _ in self._shared.losses.losses)
        parameters = [parameter for watched in optimizers for parameter in parameters_of(watched)]
        networks = networks_of(parameters, modules)
        sharded = is_sharded(parameters)
        hides_layers = self._is_compiled and not any(map(is_compiled, networks))  # in a compiled function
        option = replace(self._option, resume=True, eager_forward=self._option.eager_forward and not sharded)
        note = _SHARDED.format(last_step + FIRST_STEP) if sharded else _IN_COMPILED_CODE if hides_layers else ""
        if not is_first:
            option = replace(option, every=_NEVER, out=None, eager_forward=False)
        self._found = found_text(networks, optimizers)  # from now on lines wait
        self._watch = Watch(
            tuple(networks),
            optimizers,
            option,
            activations=is_first and not note,
            on_line=self._say,
            script=replace(self._shared, last_step=last_step, shards=self._shards if sharded else None, note=note),
        )
        self._watched = {id(watched): watched for watched in optimizers}
        self._may_be_sharded = sharded
        self._found += f", from step {self._watch.log.starts[0].step:,} on"
        for clipped, norm in self._clipped:
            self._watch.clipped(clipped, norm)
        self._clipped = []
        if self._option.edit:
            begin = "its forward pass" if step_begins else "the step of its optimizer: its forward pass had begun"
            self._say(f"Edits are made from step {last_step + 1} on, beginning with {begin}.")
        frozen = self._watch.frozen_in_optimizers()
        if frozen:
            self._say(f"In an optimizer, but frozen (requires_grad is False): {listed(frozen)}.")

    def _refuse_compiled(self) -> None:
        if self._edits_layers and self._is_compiled:
            raise UsageError(
                "the loss comes out of compiled code, where hooks of layers do not fire. Train without torch.compile, "
                "or edit parameters, with param:."
            )

    def _end_if_not_edited(self, why: str, code: int) -> None:
        """End this process if the edits are not in force: it must not go on training without them."""
        is_refused = self._edits_layers and self._is_compiled
        if not self._option.edit or (self._watch is not None and self._watch.edits and not is_refused):
            return
        if self._watch is not None:
            self._watch.end(why)
        self._print(f"The training ends, because its edits cannot be made: {why}")
        raise SystemExit(code)

    def _let_go(self) -> int:
        """End the current watch; return its last step. Objects that the script dropped are freed."""
        watch, self._watch = self._watch, None
        if watch is None:
            return 0
        watch.end("another optimizer stepped")
        self._announce()
        self._retired.update(self._watched.values())
        self._watched.clear()
        last_step = watch.log.ends[-1].step
        vars(watch).clear()  # its parts refer to each other, and to objects that the script may have dropped
        return last_step

    @torch_calls.guarded
    def _finish(self) -> None:
        if self._watch is None:
            return
        if self._shards.refusal:
            self._say_once(f"Norms are not known: {self._shards.refusal}.")
        self._watch.finish_if_complete()
        if self._found and (self._watch.is_closed or self._watch.log.steps):
            self._announce()

    def _announce(self) -> None:
        """Print what was found, and the lines held back until then: the place of a loss is known after a step."""
        subject, self._found = self._found, ""
        if subject:
            places = [*self._places]
            where = f"loss{'es' if len(places) > 1 else ''} at {in_words(places)}" if places else "loss not seen"
            waiting, self._waiting = self._waiting, []
            for line in (f"watching {subject}, {where}", *waiting):
                self._say(line)

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _say(self, line: str) -> None:
        if not self._speaks or _rank():  # only the first process prints
            return
        if self._found:
            self._waiting.append(line)
        else:
            self._print(line)


def _observe_starts(call: Callable[[str], None]) -> None:
    """Call `call` with the module of a process's function whenever multiprocessing has started a process."""
    start = BaseProcess.start

    @wraps(start)
    def observed(process: BaseProcess) -> None:
        module = getattr(getattr(process, "_target", None), "__module__", None) or ""
        start(process)
        call(module)

    BaseProcess.start = observed  # type: ignore[method-assign, assignment]


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
