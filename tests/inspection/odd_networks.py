"""Small networks that make hooking hard: each does one thing that hook tools stumble over."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from tests.networks import Apply, Written, leaf, written


def linear() -> nn.Module:
    return nn.Linear(3, 3)


class Block(nn.Module):
    """Linear and tanh: a class that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Twice(nn.Module):
    """A leaf of a class that torch does not know."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


# --- hooks of the user's own ---


def with_full_backward_hook(where: str, middle: Callable[[], nn.Module] = Twice) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), middle(), nn.Linear(3, 1))
        model.get_submodule(where).register_full_backward_hook(lambda *_: None)
        return model

    return build


def with_backward_pre_hook() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), Twice(), nn.Linear(3, 1))
    model[1].register_full_backward_pre_hook(lambda _module, gradient: gradient)
    return model


def hooked_while_it_runs(net: Any, x: Tensor) -> Tensor:
    handle = net.block.register_forward_pre_hook(lambda _module, args: (args[0] * 2,))
    try:
        return net.block(x)
    finally:
        handle.remove()


def hooked_within_itself(net: Any, x: Tensor) -> Tensor:
    handle = net.register_forward_pre_hook(lambda _module, args: (args[0] * 2,))
    out = net.block(x)
    handle.remove()
    return out


# --- calls ---


def called_by_threads(net: Any, x: Tensor) -> Tensor:
    differentiable = torch.is_grad_enabled()

    def run(values: Tensor) -> Tensor:
        with torch.set_grad_enabled(differentiable):
            return net.part(values)

    with ThreadPoolExecutor(8) as pool:
        return torch.stack([*pool.map(run, [x.repeat(50, 50) + number for number in range(40)])])


def retried(net: Any, x: Tensor) -> Tensor:
    try:
        net.block(x[:, :2])
    except RuntimeError:
        return net.block(x)
    raise AssertionError


def copied_whole(net: Any, x: Tensor) -> Tensor:
    twin = copy.deepcopy(net)
    return twin.block(x) + net.block(x)


# --- what was passed through is overwritten ---


def original_used_after(net: Any, x: Tensor) -> Tensor:
    hidden = net.linear(x)
    return torch.sigmoid_(net.same(hidden)) + hidden * 3


def passed_through_twice(net: Any, x: Tensor) -> Tensor:
    first = net.same(net.linear(x))
    return torch.sigmoid_(net.other(first)) + first * 5


# --- objects ---


def asks_whether_an_output_is_an_input(net: Any, x: Tensor) -> Tensor:
    hidden = net.block(x)
    same = net.same(hidden)
    return same * 2 if same is hidden else same * 100


def compares_two_arguments(net: Any, x: Tensor) -> Tensor:
    hidden = net.block(x)
    return net.compares(net.same(hidden), hidden)


# --- in place ---


def overwritten_after_identity() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.ReLU(inplace=True), nn.Linear(3, 1))


def added_to_what_was_passed_through(net: Any, x: Tensor) -> Tensor:
    hidden = net.block(x)
    out = net.same(hidden * 1)
    out += hidden
    return out


def reshaped_in_place(net: Any, x: Tensor) -> Tensor:
    hidden = net.linear(x) * 1
    net.unsqueezes(hidden)
    return hidden.sum(0)


# --- names that look like labels ---


@dataclass
class Split:
    hidden: Tensor
    rest: Tensor


class Splits(nn.Module):
    """Returns an object with an attribute `hidden`, and has a part of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Split:
        return Split(self.hidden(x).tanh(), x * 2)


def calls_lookalikes(net: Any, x: Tensor) -> Tensor:
    """Call `r` twice, and the modules that are named as its second call, its output and its operation."""
    parts = net._modules
    split = parts["(model)"](net.r(net.r(x) * 2))
    last = split.hidden + parts["r#1"](x) * 3
    return last + parts["r:tanh"](parts["r[0]"](x)) + parts["(model):mul"](split.rest)


def lookalikes() -> nn.Module:
    model = Written(calls_lookalikes, r=Block())
    for name in ("r#1", "r[0]", "r:tanh", "(model):mul"):
        model.add_module(name, nn.Linear(3, 3))
    model.add_module("(model)", Splits())
    return model


def dotted_twin(*, first: bool) -> nn.Module:
    """Two different modules at the dotted name a.b: nested, and under a key with a dot."""
    model = Written(lambda net, x: net.a.b(x) + net._modules["a.b"](x * 2) * 3)
    if first:
        model._modules["a.b"] = nn.Linear(3, 3)
    model.a = nn.Module()
    model.a.b = nn.Linear(3, 3)
    if not first:
        model._modules["a.b"] = nn.Linear(3, 3)
    return model


def retried_leaf(net: Any, x: Tensor) -> Tensor:
    for width in (2, 3):
        with suppress(RuntimeError):
            result = net.linear(x[:, :width])
    return result


# --- views of another dtype, written to ---


def real_part_scaled(net: Any, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(net.linear(x))
    net.part(spectrum).mul_(2)
    return torch.fft.irfft(spectrum, n=3)


def pairs_scaled(net: Any, x: Tensor) -> Tensor:
    pairs = net.linear(x).repeat(1, 2).view(2, 3, 2) * 1
    net.part(pairs).mul_(2j)
    return pairs


# --- views that lose their history ---


class Same(torch.autograd.Function):
    """Returns a view of what it is given."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


def history_lost(views: Callable[[Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    """Write to a view without gradients, give it to modules, keep it, and return what does not depend on it."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.linear(x)
        view = views(hidden)
        with torch.no_grad():
            net.writes(view)
        net.reads(view)
        net.kept = view
        return hidden * 3

    return forward


def losing_history(views: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    writes, reads = leaf(lambda view: view.mul_(2)), leaf(without_gradients)
    return written(history_lost(views), linear=linear, writes=writes, reads=reads)


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.sum()


def made_without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x[:, :2]


LOST: dict[str, Callable[[], nn.Module]] = {
    "chunk, written without gradients": losing_history(lambda x: x.chunk(2, 1)[0]),
    "custom view, written without gradients": losing_history(Same.apply),
    "view of no_grad, written without gradients": losing_history(made_without_gradients),
}


# --- transforms and subclasses ---


def batched(net: Any, x: Tensor) -> Any:
    return torch.func.vmap(net.block)(x)


def over_batches(net: Any, x: Tensor) -> Any:
    """Give batches of signals (5, 1, 3) to a convolution, one for each of the inputs, which lie on the last axis."""
    batches = x[:, None, None].expand(2, 5, 1, 3).movedim(0, -1) * torch.arange(1, 6)[:, None, None, None]
    return torch.vmap(net.conv, in_dims=-1, out_dims=-1)(batches)


def pushed_forward(net: Any, x: Tensor) -> Any:
    return torch.func.jvp(net.block, (x,), (torch.ones_like(x),))[1]


def differentiated(net: Any, x: Tensor) -> Any:
    return torch.func.grad(lambda values: net.block(values).sum())(x)


def dual(net: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(net.block(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def without_tracking(transformed: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Scale what a linear layer returns by what a block returns inside a transform under `no_grad`."""

    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = transformed(net.block, x)
        return net.linear(x) * scale

    return written(forward, linear=linear, block=Block)


def used_inside_and_outside(transformed: Callable[[Callable[[Tensor], Tensor], Tensor], Any]) -> Any:
    """Give a plain tensor to a module inside a transform, and use it outside, too."""

    def forward(net: Any, x: Tensor) -> Tensor:
        hidden = net.linear(x)
        return transformed(lambda weight: (net.block(hidden) * weight).sum(), x).sum() + (hidden * 5).sum()

    return written(forward, linear=linear, block=Block)


class Refuses(Tensor):
    """Refuses whatever overrides `__torch_function__` may refuse."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.as_subclass:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise TypeError("refused")


def of_a_refusing_subclass() -> nn.Module:
    makes, unmakes = Apply(lambda x: (x * 2).as_subclass(Refuses)), Apply(lambda x: x.as_subclass(Tensor) * 3)
    return nn.Sequential(nn.Linear(3, 3), makes, nn.Identity(), unmakes)


# --- nested tensors ---


def ragged(layout: torch.layout) -> Callable[[Any, Tensor], Tensor]:
    """Give parts of different lengths, made of the rows of the input, to `part`, and pad them."""

    def forward(net: Any, x: Tensor) -> Tensor:
        rows = net.linear(x)
        parts = [rows, rows[:1] * 2]
        return torch.nested.to_padded_tensor(net.part(torch.nested.as_nested_tensor(parts, layout=layout)), padding=0.0)

    return forward


def of_torchs_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Dropout(), nn.Linear(4, 3), nn.Softmax(-1))


def written_in_place() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.ReLU(inplace=True))


# --- parameters ---


class WithParameter(nn.Module):
    def __init__(self, values: Tensor, *, trainable: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.values = nn.Parameter(values, requires_grad=trainable)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x)
        if self.values.layout != torch.strided:
            return (self.values @ hidden.t()).t()
        return hidden * self.values


class BareEmbedding(nn.Embedding):
    """Has the class of torch's layer and none of its attributes."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class BareLinear(nn.Linear):
    """Does its own work, and calls no constructor of torch's layer."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.rows, self.unused = nn.Parameter(torch.ones(3, 3)), BareEmbedding()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return input @ self.rows


def scripted_child() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.ReLU())), nn.Linear(3, 1))


def scripted_root() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))


def exported() -> nn.Module:
    return torch.export.export(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), (torch.ones(2, 3),)).module()


ODD: dict[str, Callable[[], nn.Module]] = {
    "full backward hook on a custom leaf": with_full_backward_hook("1"),
    "full backward hook on a container": with_full_backward_hook("1", Block),
    "backward pre-hook": with_backward_pre_hook,
    "pre-hook in forward": written(hooked_while_it_runs, block=Block),
    "pre-hook on itself in forward": written(hooked_within_itself, block=Block),
    "threads": written(called_by_threads, part=lambda: nn.Sequential(nn.Linear(150, 3), nn.Sequential(nn.ReLU()))),
    "retried": written(retried, block=Block),
    "deep copy of itself": written(copied_whole, block=Block),
    "asks is": written(asks_whether_an_output_is_an_input, block=Block, same=nn.Identity),
    "asks is of arguments": written(
        compares_two_arguments, block=Block, same=nn.Identity, compares=leaf(lambda x, y: x + y if x is y else x - y)
    ),
    "overwritten after identity": overwritten_after_identity,
    "added after identity": written(added_to_what_was_passed_through, block=Block, same=nn.Identity),
    "overwritten, original used after": written(original_used_after, linear=linear, same=nn.Identity),
    "overwritten, passed through twice": written(
        passed_through_twice, linear=linear, same=nn.Identity, other=nn.Dropout
    ),
    "reshaped in place": written(reshaped_in_place, linear=linear, unsqueezes=leaf(lambda x: x.unsqueeze_(0))),
    "lookalikes": lookalikes,
    "dotted twin first": lambda: dotted_twin(first=True),
    "retried leaf": written(retried_leaf, linear=linear),
    "real part written": written(real_part_scaled, linear=linear, part=leaf(lambda z: z.real)),
    "view_as_complex written": written(pairs_scaled, linear=linear, part=leaf(torch.view_as_complex)),
    **LOST,
    "vmap": written(batched, block=Block),
    "jvp": written(pushed_forward, block=Block),
    "torch.func.grad": written(differentiated, block=Block),
    "plain input inside vmap": used_inside_and_outside(lambda function, x: torch.vmap(function)(x)),
    "vmap under no_grad": without_tracking(lambda block, x: torch.vmap(block)(x)),
    "jvp under no_grad": without_tracking(lambda block, x: torch.func.jvp(block, (x,), (x,))[1]),
    "vmap over batches": written(over_batches, conv=lambda: nn.Conv1d(1, 2, 1)),
    "strided nested": written(ragged(torch.strided), linear=linear, part=of_torchs_layers),
    "jagged nested": written(ragged(torch.jagged), linear=linear, part=of_torchs_layers),
    "jagged nested, written in place": written(ragged(torch.jagged), linear=linear, part=written_in_place),
    "forward-mode derivatives": written(dual, block=Block),
    "refusing subclass": of_a_refusing_subclass,
    "integer parameter": lambda: WithParameter(torch.arange(3)),
    "sparse parameter": lambda: WithParameter(torch.eye(3).to_sparse(), trainable=True),
    "half parameter": lambda: WithParameter(torch.ones(3, dtype=torch.float16), trainable=True),
    "bare subclasses": lambda: nn.Sequential(BareLinear(), nn.Linear(3, 1)),
    "scripted child": scripted_child,
    "scripted root": scripted_root,
    "exported root": exported,
}
