"""Networks that change themselves while they run, each with what a hook tool could get wrong about it.

All take a (2, 4) tensor and return one, unless `ARGS` says otherwise.
"""

import functools
import math
import random
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

NETWORKS: dict[str, Callable[[], nn.Module]] = {}


def network(reason: str) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Add a network under a line that says what is hard about it."""

    def add(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        NETWORKS[reason] = build
        return build

    return add


class Stateful(nn.Module):
    """A linear layer, and something that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.prepare()

    def prepare(self) -> None:
        """Add what it remembers."""


# --- plain attributes ---


@network("a flag is set by the first call, which writes to parameters through .data")
class ActNorm(Stateful):
    def prepare(self) -> None:
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.initialised = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if not self.initialised:
            self.shift.data.copy_(-x.mean(0))
            self.scale.data.copy_(1 / (x.std(0) + 1e-6))
            self.initialised = True
        return (x + self.shift) * self.scale


@network("a counter and containers: a list, a deque, a set, a Counter, a defaultdict of lists, bytes, one in itself")
class Containers(Stateful):
    calls = 0

    def prepare(self) -> None:
        self.bank: list[Tensor] = []
        self.recent: deque[float] = deque([1.0, 2.0, 3.0], maxlen=3)  # forgets its oldest entry
        self.seen, self.counts, self.raw = {"first"}, Counter(first=2), bytearray(b"\x01")
        self.nested: defaultdict[str, list[int]] = defaultdict(list, first=[1])
        self.cache = OrderedDict(first=torch.tensor(2.0), second=torch.tensor(3.0))
        self.tree: dict[str, Any] = {"leaf": [0]}
        self.tree["root"] = self.tree

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.calls += 1
        self.bank.append(x.detach())
        self.recent.append(sum(self.recent))
        self.seen.add(str(len(self.seen)))
        self.counts["first"] += 1
        self.nested["first"].append(len(self.seen))
        self.nested["other"].append(1)
        self.raw[0] += 1
        name = next(iter(self.cache))
        self.cache.move_to_end(name)
        self.tree["root"]["leaf"].append(1)
        factors = (self.calls, self.recent[0], len(self.seen), self.raw[0], sum(self.nested["first"]))
        return x * math.prod(factors) * self.cache[name] * len(self.tree["leaf"]) + torch.stack(self.bank).sum(0)


@network("tensors in attributes, tuples, dicts, an array; a list, a dict and a momentum on layers of torch's own")
class PlainTensors(Stateful):
    def prepare(self) -> None:
        self.total, self.steps, self.norm = torch.zeros(4), np.zeros(2), nn.BatchNorm1d(4)
        self.pair = (torch.ones(2), {"weight": torch.ones(1)})
        self.norm.hits, self.linear.hits, self.linear.cache = 0, [], {}

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().mean(0)
        self.pair[0].mul_(2)
        self.pair[1]["weight"].data.add_(1)
        self.steps += 1
        self.norm.momentum = float(1 / self.steps[0])
        self.linear.hits.append(1)
        self.linear.cache[len(self.linear.cache)] = 2
        x = self.norm(self.linear(x)) * float(self.steps.sum()) * len(self.linear.hits) * len(self.linear.cache)
        return x + self.total + self.pair[0].sum() * self.pair[1]["weight"]


@network("random generators of its own")
class Generators(Stateful):
    def prepare(self) -> None:
        self.generators = [torch.Generator().manual_seed(1), random.Random(2), np.random.default_rng(3)]
        self.old = np.random.RandomState(4)
        self.default = torch.default_generator

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(4, generator=self.generators[0])
        return (
            self.linear(x) * noise * self.generators[1].random() * float(self.generators[2].random() + self.old.rand())
        )


@dataclass
class KeysAndValues:
    """A key-value cache."""

    keys: list[Tensor] = field(default_factory=list)
    length: int = 0


class Statistics:
    """An object of the network's own, without a dict."""

    __slots__ = ("calls", "mean")

    def __init__(self) -> None:
        self.mean = torch.zeros(4)


@network("objects of its own: a dataclass, one with slots, a namespace; a cached property, a cache by weak reference")
class Objects(Stateful):
    def prepare(self) -> None:
        self.cache, self.statistics, self.space = KeysAndValues(), Statistics(), types.SimpleNamespace(calls=0)
        self.sums: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self.made_by_no_constructor = [nn.Linear.__new__(nn.Linear)]

    @functools.cached_property
    def scale(self) -> Tensor:
        return self.linear.weight.detach().sum()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.cache.keys.append(x.detach())
        self.cache.length += 1
        self.statistics.mean.add_(x.detach().mean(0))
        self.statistics.calls = getattr(self.statistics, "calls", 0) + 1
        self.space.calls += 1
        self.sums[self.linear] = self.sums.get(self.linear, 0) + 1
        return x * self.cache.length * self.scale * self.sums[self.linear] + self.statistics.mean + self.space.calls


@network("state that the class keeps for all instances")
class ClassState(Stateful):
    calls = 0
    cache: dict[int, float] = {}  # noqa: RUF012 - this is the point

    def prepare(self) -> None:
        type(self).calls = 0
        self.cache.clear()

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        self.cache[self.calls] = 2.0
        return self.linear(x) * self.calls * len(self.cache)


@network("its dict of attributes is replaced, and its class changes")
class Becomes(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.__dict__ = {**self.__dict__, "calls": 1}
        self.__class__ = Became
        return x


class Became(Becomes):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * 3


# --- buffers ---


@network("rotary tables are registered anew as they grow, and a memory bank grows through .data, lengths beside them")
class Rotary(Stateful):
    def prepare(self) -> None:
        self.register_buffer("bank", torch.zeros(1, 4))
        self.length, self.size = 0, 1
        self.grow(1)

    def grow(self, length: int) -> None:
        self.register_buffer("cos", torch.arange(float(length)).cos(), persistent=False)
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.length:
            self.grow(len(x))
        x = self.linear(x) * self.get_buffer("cos")[: len(x), None]
        bank = self.get_buffer("bank")
        bank.data = torch.cat([bank.data, x.detach()])
        self.size += len(x)
        return x + bank[: self.size].sum(0)


@network("a buffer of another dtype and shape, a buffer gone, a new one, one of none, of truth values, empty, widened")
class ChangesBuffers(Stateful):
    def prepare(self) -> None:
        self.register_buffer("none", None)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("a", torch.ones(4))
        self.register_buffer("b", torch.ones(4))
        self.register_buffer("c", torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        self.a = self.get_buffer("a").double()[:, None]
        if "b" in self._buffers:
            del self.b
            self.register_buffer("d", torch.ones(3), persistent=False)
        self.c.t_()
        self.c[0, 1] += 1
        self.none = torch.ones(2)
        self.mask.logical_not_()
        self.empty = torch.empty(3, 0)
        self.count.data = self.count.double() + 1
        self.count.data = self.count.long()
        return self.linear(x) + len(self._buffers) + self.a.numel() + self.c.sum()


@network("sparse, quantised, nested, complex, half-precision and meta buffers")
class SpecialLayouts(Stateful):
    def prepare(self) -> None:
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("rows", torch.eye(3).to_sparse_csr())
        self.register_buffer("quantised", torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.quint8))
        self.register_buffer("nested", torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]))
        self.register_buffer("waves", torch.full((3,), complex(1, float("nan"))))
        self.register_buffer("halves", torch.ones(3, dtype=torch.float16))
        self.register_buffer("eighth", torch.ones(3).to(torch.float8_e4m3fn))
        self.register_buffer("nothing", torch.ones(3, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("sparse").mul_(2)
        self.get_buffer("rows").mul_(2)
        quantised = self.get_buffer("quantised")
        quantised.copy_(quantised.dequantize() + 1)
        for name in ("nested", "waves", "halves", "nothing"):
            self.get_buffer(name).mul_(2)
        self.get_buffer("eighth").data.copy_(torch.full((3,), 2.0))
        return self.linear(x) + self.get_buffer("halves").sum() + quantised.dequantize().sum()


class Refusing(Tensor):
    """A tensor whose every function raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{func} refused")


class RefusingBelow(Tensor):
    """One that refuses also what torch does under the hood."""

    @staticmethod
    def __new__(cls) -> Any:
        return Tensor._make_wrapper_subclass(cls, (2,))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{func} refused")


@network("buffers of subclasses that refuse every operation")
class Subclasses(Stateful):
    def prepare(self) -> None:
        self.register_buffer("refusing", torch.ones(2).as_subclass(Refusing))
        self.register_buffer("below", RefusingBelow())

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            self.get_buffer("refusing").add_(1)
            value = torch.ones(2) * self.get_buffer("refusing")
        return self.linear(x) * value.sum()


@network("a buffer joins the graph when it is written to")
class JoinsTheGraph(Stateful):
    def prepare(self) -> None:
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("view", torch.zeros(8)[:4])

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.get_buffer("mean").mul_(0.9).add_(0.1 * x.mean(0))
        self.get_buffer("view").add_(x.mean(0))
        return x - self.get_buffer("mean") + self.get_buffer("view")


@network("a buffer made in inference mode, and memory that is given back and taken again")
class Emptied(Stateful):
    def prepare(self) -> None:
        self.register_buffer("table", torch.arange(20_000.0))
        with torch.inference_mode():
            self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            self.get_buffer("count").add_(1)
        storage = self.get_buffer("table").untyped_storage()
        if storage.nbytes():
            x = x * self.get_buffer("table").mean()
        storage.resize_(0)
        return self.linear(x) * self.get_buffer("count").tolist()[0]


# --- parameters ---


@network("torch's own spectral and weight normalisation, the new and the old ones")
def normalised() -> nn.Module:
    layers: list[nn.Module] = [parametrizations.spectral_norm(nn.Linear(4, 4))]
    layers.append(parametrizations.weight_norm(nn.Linear(4, 4)))
    layers.append(nn.utils.spectral_norm(nn.Linear(4, 4)))
    layers.append(nn.utils.weight_norm(nn.Linear(4, 4)))
    return nn.Sequential(*layers)


class WritesThrough(nn.Module):
    """A parametrisation that writes to what it is given."""

    def forward(self, weight: Tensor) -> Tensor:
        weight.data.mul_(0.5)
        return weight


@network("a parametrisation that writes to the parameter, and one that is registered on the way")
class Parametrised(Stateful):
    def prepare(self) -> None:
        self.second = nn.Linear(4, 4)
        parametrize.register_parametrization(self.linear, "weight", WritesThrough())

    def forward(self, x: Tensor) -> Tensor:
        if not parametrize.is_parametrized(self.second):
            parametrize.register_parametrization(self.second, "weight", WritesThrough())
        return self.second(self.linear(x))


@network("parameters and modules are registered, replaced and dropped")
class Rebuilds(Stateful):
    def prepare(self) -> None:
        self.other, self.dropped = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.linear.bias = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if "dropped" in self._parameters:
            del self.dropped
            self.late = nn.Parameter(torch.ones(4))
            self.head = nn.Linear(4, 4)
            self.other = nn.Sequential(self.other, nn.Tanh())
            self.linear.weight = nn.Parameter(self.linear.weight.detach() * 2)
        return self.head(self.other(x * self.late))


@network("it adapts itself by an optimiser, toggles requires_grad, and leaves .grad of a backward pass of its own")
class Adapts(Stateful):
    def prepare(self) -> None:
        self.norm, self.energy = nn.LayerNorm(4), nn.Linear(4, 1)
        self.optimiser = torch.optim.Adam(self.norm.parameters(), lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            self.energy(inner).sum().backward()
            self.norm(self.linear(x.detach())).square().sum().backward()
        self.energy.requires_grad_(False)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return self.norm(self.linear(x)) + (inner.grad if inner.grad is not None else 0)


# --- hooks and modes ---


@network("a cast to double and back, hooks that it registers, removes and leaves, marks and hooks on its parameters")
class Hooks(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        weight.calls = getattr(weight, "calls", 0) + 1
        if weight.requires_grad:
            weight.register_hook(lambda gradient: gradient * 2)
        x = self.linear.double()(x.double()).float()
        self.linear.float()
        handle = self.linear.register_forward_hook(lambda _module, _args, output: output * 2)
        self.linear.register_forward_pre_hook(lambda _module, _args: None)
        x = self.linear(x)
        handle.remove()
        return x * weight.calls


@network("a layer that is cast to half precision for good")
class Cast(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear.half()(x.half()).float()


@network("gradients that are scaled, clipped and set to zero")
class WritesGradients(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.linear.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.7)
        nn.utils.clip_grad_norm_(self.linear.parameters(), 0.1)
        self.linear.zero_grad(set_to_none=False)
        return self.linear(x)


class Merging(nn.Linear):
    """A linear layer with a low-rank adapter, which eval mode merges into the weight as loralib does."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.down, self.up = nn.Parameter(torch.randn(2, 4) / 3), nn.Parameter(torch.randn(4, 2) / 3)
        self.merged = False

    def train(self, mode: bool = True) -> "Merging":
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (self.up @ self.down) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.merged else super().forward(x) + x @ self.down.t() @ self.up.t()


@network("adapters that eval mode merges into the weights, one of them frozen in eval mode")
def adapters() -> nn.Module:
    model = nn.Sequential(Merging(), nn.BatchNorm1d(4), Merging(), nn.Dropout())
    model[2].eval()
    return model


@network("a BatchNorm that never trains, and a drawing change of mode")
class Frozen(Stateful):
    def prepare(self) -> None:
        self.norm, self.jitter = nn.BatchNorm1d(4), 0.0

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.norm.eval()
        self.jitter += random.random()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) + self.jitter


@network("a scripted child with a counter, a list and a buffer that it replaces")
def scripted() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), torch.jit.script(Scripted()))


class Scripted(nn.Module):
    """What TorchScript keeps out of Python's sight."""

    seen: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.calls, self.seen, self.linear = 0, [1], nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.mean = self.mean + x.detach().mean(0)
        return self.linear(x) * self.calls + self.mean + len(self.seen)


@network("an exported child, which refuses to change its mode")
def exported() -> nn.Module:
    program = torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), (torch.ones(2, 4),))
    return nn.Sequential(nn.Linear(4, 4), program.module(), nn.Dropout(0.5))
