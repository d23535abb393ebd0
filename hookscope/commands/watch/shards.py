"""Norms of a network whose parameters are sharded over processes, as by FSDP2 and tensor parallelism (DTensor).

Every process must take part in every sum, or the others wait forever. So the order of the sums depends only on the
count of steps. If a process fails to compute its part, it adds NaN instead.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hookscope.commands.watch import torch_calls
from hookscope.commands.watch.gradients import inner_optimizer, norms_of, parameters_of

FIRST_STEP = 3
"""The first step of an optimiser with sums. A process that takes it knows that all others have finished the first step,
in which every watched process registers in the store."""


def is_sharded(tensors: Iterable[Tensor]) -> bool:
    """Tell whether any of the tensors is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)


class Shards:
    """The state that optimisers of sharded networks share on one process."""

    def __init__(self, every: int) -> None:
        """Sum weights and updates at every `every`-th step of each optimiser."""
        self._every = every
        # None for an optimiser without sharded parameters: every step looks it up.
        self._norms: weakref.WeakKeyDictionary[Optimizer, ShardedNorms | None] = weakref.WeakKeyDictionary()
        self._keys: list[str] = []
        self._has_begun = False
        self.refusal = ""  # why no sums are taken

    def of(self, optimizer: Optimizer) -> "ShardedNorms | None":
        """Return the norms of an optimiser, from its first step on; None if it has no sharded parameters."""
        if optimizer in self._norms:
            return self._norms[optimizer]
        norms = None
        if inner_optimizer(optimizer) is optimizer and is_sharded(parameters_of(optimizer)):
            norms = ShardedNorms(self, self._every)
            self._keys = [f"hookscope/watches/{rank}" for rank in range(torch.distributed.get_world_size())]
            _store().set(self._keys[torch.distributed.get_rank()], "1")
        self._norms[optimizer] = norms
        return norms

    def norms_of(self, optimizer: Optimizer) -> "ShardedNorms | None":
        """Return the norms of an optimiser; None if it has no sharded parameters, or has not stepped."""
        return self._norms.get(optimizer)

    @property
    def is_active(self) -> bool:
        """Whether sums are taken: an optimiser has stepped often enough, and all processes take part."""
        return self._has_begun and not self.refusal

    def begin(self) -> None:
        """Start to take sums, if every process is watched."""
        if not self._has_begun and not _store().check(self._keys):
            self.refusal = "not every process runs under hookscope watch: norms of their shards cannot be added up"
        self._has_begun = True

    @torch.no_grad()
    def whole_norm(self, norm: Tensor) -> Tensor:
        """Return the whole norm for a sharded one that clipping computed; NaN if a process is lost.

        Every process must call it, as every process clips.
        """
        try:
            whole: Tensor = norm.full_tensor() if is_sharded([norm]) else norm  # type: ignore[attr-defined]
        except RuntimeError:
            self.refusal = LOST
            return torch.full((), torch.nan)
        return whole.detach()


LOST = "the processes cannot reach each other any more"


class ShardedNorms:
    """L2 norms of the whole parameters of one optimiser, their gradients and their updates at one step, by `id`.

    Attributes:
        weights: Norms before the step, at watched steps; empty at others.
        gradients: Norms at every step, for parameters with a gradient on this process.
        updates: Norms at watched steps.
        has_stepped: Whether the optimiser has stepped since a GradScaler was asked to step it.
    """

    def __init__(self, shards: Shards, every: int) -> None:
        """Begin before the first step."""
        self._shards = shards
        self._every = every
        self._step = 0
        self._depth = 0  # above 1 where a subclass calls its base's `step`
        self._parameters: Sequence[Tensor] = ()
        self._before: list[Tensor] = []
        self.has_stepped = False
        self.weights: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        self.updates: dict[int, Tensor] = {}

    @property
    def is_next_watched(self) -> bool:
        """Whether all norms of the next step will be known."""
        return not self._shards.refusal and self._step + 1 >= FIRST_STEP and (self._step + 1) % self._every == 0

    @torch.no_grad()
    def begin_step(self, optimizer: Optimizer) -> bool:
        """Count a step; at a watched one, sum the weights, and keep this process's part of them.

        Returns:
            False for a call inside another step of the same optimiser.
        """
        self._depth = torch_calls.calls_under_way(torch_calls.STEP, optimizer) or self._depth + 1
        if self._depth > 1:
            return False
        self.count()
        self.has_stepped = True
        self._parameters = parameters_of(optimizer)
        if self._step == FIRST_STEP:
            self._shards.begin()
        if self._is_watched():
            self.weights = self._summed(lambda: self._parameters)
            try:
                self._before = [local_part(parameter).clone() for parameter in self._parameters]
            except RuntimeError:  # no memory: updates will be NaN
                self._before = []
        return True

    def count(self) -> None:
        """Count a step, also one that GradScaler has skipped, on every process."""
        self._step += 1
        self.weights, self.gradients, self.updates = {}, {}, {}

    @torch.no_grad()
    def read_gradients(self, *, is_first: bool) -> None:
        """Sum the gradients before the optimiser changes them; with a closure, those of its first call."""
        if is_first and self._is_summed():
            summed = self._summed(
                lambda: [torch.zeros(0) if parameter.grad is None else parameter.grad for parameter in self._parameters]
            )
            if summed:
                self.gradients = {
                    id(tensor): summed[id(tensor)] for tensor in self._parameters if tensor.grad is not None
                }

    @torch.no_grad()
    def end_step(self) -> None:
        """At a watched step, sum the updates."""
        self._depth -= 1
        if self._depth:
            return
        if self._is_watched():
            before, self._before = self._before, []
            self.updates = self._summed(
                lambda: [local_part(after) - earlier for after, earlier in zip(self._parameters, before, strict=True)]
            )
        self._parameters = ()  # parameters that the script drops are freed

    def _is_summed(self) -> bool:
        return self._shards.is_active and self._step >= FIRST_STEP

    def _is_watched(self) -> bool:
        return self._is_summed() and self._step % self._every == 0

    def _summed(self, parts: Callable[[], Sequence[Tensor]]) -> dict[int, Tensor]:
        """Return norms over all processes, by `id` of the parameter, from squares in float64, where none overflows."""
        device = local_part(self._parameters[0]).device
        try:
            squares = norms_of([*map(local_part, parts())]).to(device).double().square()
        except Exception:  # noqa: BLE001 - the others wait for this process
            squares = torch.full((len(self._parameters),), torch.nan, dtype=torch.float64, device=device)
        for group, members in self._groups():
            part = squares[members]
            try:
                torch.distributed.all_reduce(part, group=group)
            except RuntimeError:  # another process is gone: the script will get its own error
                self._shards.refusal = LOST
                return {}
            squares[members] = part
        return dict(zip(map(id, self._parameters), squares.sqrt().unbind(), strict=True))

    def _groups(self) -> list[tuple[Any, list[int]]]:
        """Return the groups of processes that hold shards, with the positions of their parameters.

        Dimensions of a mesh that replicate are left out: there, each process has the whole tensor.
        """
        groups: dict[tuple[int, int], tuple[Any, list[int]]] = {}
        for position, parameter in enumerate(self._parameters):
            if is_sharded([parameter]):
                mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
                for dimension, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
                    if not placement.is_replicate():
                        entry = groups.setdefault((id(mesh), dimension), (mesh.get_group(dimension), []))
                        entry[1].append(position)
        return [*groups.values()]


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a parameter that this process holds: reading more would wait for the others."""
    return tensor.detach().to_local() if is_sharded([tensor]) else tensor.detach()  # type: ignore[attr-defined]


def _store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()
