"""Autograd internals: whether a tensor is tracked, its graph, and the in-place modifications that hooks miss."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hookscope.hooks.memory import missing_memory
from hookscope.hooks.observed import GradientSite, SiteKey

T = TypeVar("T")

_HISTORY_LOST = "it is a view that was written to without gradients, so autograd has lost its history"


is_transformed: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
"""Tell whether a tensor is wrapped by a `torch.func` transform."""


def is_leaf(tensor: Tensor) -> bool:
    """Tell whether a tensor is a leaf of the graph; False if its history is lost, see `history_is_lost`."""
    return not history_is_lost(tensor) and tensor.is_leaf


def history_is_lost(tensor: Tensor) -> bool:
    """Tell whether autograd refuses to name what computed a tensor.

    It does for a view of an operation with several outputs, of a custom function or of a `no_grad` block, after the
    view was written to where gradients are disabled. The network itself may go on with the tensor if it does not
    differentiate it.
    """
    try:
        tensor.is_leaf  # noqa: B018 - to read it is the question
    except RuntimeError:
        return True
    return False


def can_require_grad(tensor: Tensor) -> bool:
    """Tell whether autograd would track operations on this tensor if it required a gradient."""
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return differentiable and torch.is_grad_enabled() and not tensor.is_inference() and not is_below_autograd()


def is_below_autograd() -> bool:
    """Tell whether an operator is running that autograd differentiates as a whole: nothing inside is tracked."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)


def why_untracked(tensor: Tensor, inputs: Sequence[tuple[str, Tensor]], maker: nn.Module | str | None = None) -> str:
    """Return why autograd does not track an input or output of a module or operation; "" if it does."""
    if is_transformed(tensor):
        return "it was computed inside a torch.func transform (vmap, grad, jvp)"
    if tensor.requires_grad and torch.is_grad_enabled():
        return _HISTORY_LOST if history_is_lost(tensor) else ""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        reason = f"{str(tensor.dtype).removeprefix('torch.')} values have no gradient"
    elif tensor.is_inference():
        reason = "it was computed in inference mode"
    elif is_below_autograd() and not torch.is_inference_mode_enabled():
        reason = "it was computed inside an operator that autograd differentiates as a whole"
    elif not torch.is_grad_enabled():
        reason = "it was computed without gradients (no_grad)"
    elif maker is None:
        reason = "nothing before it requires a gradient"
    elif isinstance(maker, str):
        cut = any(value.requires_grad for _, value in inputs)
        reason = "the operation cuts it off" if cut else "nothing before it requires a gradient"
    elif any(value.requires_grad for _, value in inputs) or any(weight.requires_grad for weight in maker.parameters()):
        reason = "it was cut off inside the module (no_grad or detach)"
    else:
        reason = "no parameter before it is trainable"
    return reason


def strided_copy(tensor: Tensor) -> Tensor:
    """Return a copy with identical strides; `clone` may change them along axes of size one.

    Raises:
        RuntimeError: If the memory of the tensor was freed.
    """
    if missing := missing_memory(tensor):
        raise RuntimeError(missing)
    copied = tensor.clone()
    if tensor.layout == torch.strided and not tensor.is_nested and copied.stride() != tensor.stride():
        steps = zip(copied.stride(), tensor.stride(), tensor.shape, strict=True)
        if all(ours == theirs for ours, theirs, size in steps if size > 1):
            strided = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            return strided.copy_(tensor)
    return copied


@contextmanager
def plain_arithmetic() -> Iterator[None]:
    """Switch off gradients and autocast, on all devices."""
    with torch.no_grad(), torch._C._DisableAutocast():
        yield


def observed_plainly(observe: Callable[..., T], *observed: object) -> T:
    """Call an observer without gradients and autocast: at every output and gradient, so with few other calls."""
    if torch._C._is_any_autocast_enabled():
        with plain_arithmetic():
            return observe(*observed)
    if not torch.is_grad_enabled():
        return observe(*observed)
    torch._C._set_grad_enabled(False)  # without a context manager, which would cost several calls
    try:
        return observe(*observed)
    finally:
        torch._C._set_grad_enabled(True)


class Aliased(torch.autograd.Function):
    """Alias a tensor: the same memory and version counter, with a new graph node.

    A view would also do, but if it is modified in place, autograd copies its gradient three times.
    """

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        """Return the alias."""
        return tensor.detach()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        """Pass the gradient through unchanged."""
        return gradient

    @staticmethod
    def jvp(_: Any, tangent: Tensor) -> Tensor:
        """Pass the tangent through unchanged."""
        return tangent.view_as(tangent)


class Alias(NamedTuple):
    """An alias that is not a view: autograd does not notice that modifying it in place modifies its original."""

    key: SiteKey
    counter: Tensor  # shares its version counter, but none of its memory
    version: int  # when it was made
    node: Node
    sequence: int  # its number in the order of calls; torch 2.11 forgets it when the alias is gone
    original: tuple[Node, int]  # the node and output number that computed it


class View(NamedTuple):
    """A hooked view: an in-place modification rebuilds its graph, which then bypasses the hook."""

    site: GradientSite[Any]
    counter: Tensor  # shares the view's version counter, but none of its memory
    version: int  # when the hook was put on the view
    node: Node | None  # where the hook is registered; None for a leaf
    base: tuple[Node, int] | None  # where the gradient of the view's base goes; None if it has no gradient
    dtype: torch.dtype
    strides: tuple[int, ...]
    offset: int  # of the view's first element behind the base's, in bytes: the real part of a complex base is a view
    conjugated: bool  # unlike its base
    negated: bool  # unlike its base

    def part_of(self, gradient: Tensor) -> Tensor:
        """Return the view's part of the gradient of its base, which has the strides of the base."""
        shape, strides = self.site.shape, self.strides
        if gradient.is_complex() and not self.dtype.is_complex:
            gradient = torch.view_as_real(gradient)
        begins = gradient.storage_offset() + self.offset // gradient.itemsize
        if self.dtype.is_complex and not gradient.is_complex():
            pairs = gradient.as_strided((*shape, 2), (*(2 * step for step in strides), 1), begins)
            part = torch.view_as_complex(pairs)
        else:
            part = gradient.as_strided(shape, strides, begins)
        part = part.conj() if self.conjugated else part
        return part.neg() if self.negated else part


def used_beside(aliases: Sequence[Alias], nodes: Mapping[Node, None]) -> set[SiteKey]:
    """Return the aliases whose original was used, or became the loss, after the alias was made."""
    originals = {alias.original: alias for alias in aliases}
    wrong = {alias.key for alias in aliases if next(iter(nodes), None) is alias.original[0]}
    for node in nodes:
        for edge in node.next_functions:
            alias = originals.get((edge[0], edge[1])) if edge[0] is not None else None
            if alias is not None and node is not alias.node and node._sequence_nr() > alias.sequence:
                wrong.add(alias.key)
    return wrong


def version_counter(tensor: Tensor) -> Tensor:
    """Return an empty tensor that shares the version counter of another, without keeping its memory alive."""
    counter = tensor.detach()
    with suppress(RuntimeError):  # some subclasses and devices refuse to swap data
        counter.data = torch.empty(0)
    return counter


def view_of(site: GradientSite[Any], tensor: Tensor) -> View:
    """Describe a view that is about to be hooked."""
    counter, node, base = version_counter(tensor), tensor.grad_fn, tensor._base
    view = View(site, counter, tensor._version, node, None, tensor.dtype, (), 0, conjugated=False, negated=False)
    if node is None or base is None or base.grad_fn is None or tensor.layout != torch.strided or tensor.is_nested:
        return view
    return view._replace(
        base=(base.grad_fn, base.output_nr),
        strides=tensor.stride(),
        offset=int(tensor.storage_offset() * tensor.itemsize - base.storage_offset() * base.itemsize),
        conjugated=tensor.is_conj() != base.is_conj(),
        negated=tensor.is_neg() != base.is_neg(),
    )


def graph_nodes(loss: Tensor) -> dict[Node, None]:
    """Return the graph nodes that a backward pass from a tensor would run, starting with its `grad_fn`."""
    if loss.grad_fn is None:
        return {}
    nodes: dict[Node, None] = {loss.grad_fn: None}
    waiting = [loss.grad_fn]
    while waiting:
        for following, _ in waiting.pop().next_functions:
            if following is not None and following not in nodes:
                nodes[following] = None
                waiting.append(following)
    return nodes


def graph_leaves(nodes: Iterable[Node]) -> list[Tensor]:
    """List the leaves that a backward pass through these nodes would give a gradient to."""
    ends = [node for node in nodes if not node.next_functions]
    return [leaf for node in ends if (leaf := getattr(node, "variable", None)) is not None]


def consumers(loss: Tensor, nodes: Mapping[SiteKey, Node]) -> dict[SiteKey, list[SiteKey | None]]:
    """Return the direct consumers of each output: the next outputs along the graph, and the loss.

    Args:
        loss: The loss that was differentiated.
        nodes: The node that computed each site's tensor. Sites of inputs are ignored. A container that returned its
            last child's tensor shares the child's node.

    Returns:
        Sites in the order of `nodes`, then None if the loss is a consumer. What is not in the graph, such as the inside
        of a reentrant checkpoint, is left out.
    """
    users = _users(loss)
    sites: dict[Node, list[SiteKey]] = {}
    for key, node in nodes.items():
        if key[3] == "output":
            sites.setdefault(node, []).append(key)
    places = {key: place for place, key in enumerate(nodes)}
    by_site: dict[SiteKey, list[SiteKey | None]] = {}
    for node, keys in sites.items():
        if node is loss.grad_fn or node in users:
            stops = _next_stops(node, users, sites)
            direct = sorted([key for reader in stops for key in sites.get(reader, ())], key=lambda key: places[key])
            by_loss = node is loss.grad_fn or any(reader not in sites for reader in stops)
            by_site |= dict.fromkeys(keys, [*direct, None] if by_loss else [*direct])
    return by_site


def _users(loss: Tensor) -> dict[Node, list[Node]]:
    users: dict[Node, list[Node]] = {}
    for node in graph_nodes(loss):
        for used, _ in node.next_functions:
            if used is not None:
                users.setdefault(used, []).append(node)
    return users


def _next_stops(node: Node, users: Mapping[Node, Iterable[Node]], stops: Mapping[Node, object]) -> list[Node]:
    """Return the first node of `stops` on each path from a node to the loss, and the loss for a path without one."""
    reached, seen, waiting = [], {node}, list(users.get(node, ()))
    while waiting:
        user = waiting.pop()
        if user in seen:
            continue
        seen.add(user)
        if user in stops or user not in users:
            reached.append(user)
        else:
            waiting += users[user]
    return reached
