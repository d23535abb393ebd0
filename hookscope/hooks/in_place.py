"""What tells that a hooked tensor was modified in place later: by another view of its memory, or by an alias of it."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from hookscope.hooks.observed import GradientSite, SiteKey


class Aliased(torch.autograd.Function):
    """The same memory with the same version counter, as another tensor with another graph node.

    A view would be that, too, but if it is modified in place, autograd copies its gradient three times.
    """

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        """Return the alias."""
        return tensor.detach()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        """Return the gradient of the tensor, which is that of the alias."""
        return gradient

    @staticmethod
    def jvp(_: Any, tangent: Tensor) -> Tensor:
        """Return the tangent of the alias."""
        return tangent.view_as(tangent)


class Alias(NamedTuple):
    """An alias that is no view. If it is modified in place, autograd does not know that its original is, too."""

    key: SiteKey
    counter: Tensor  # shares its version counter, but none of its memory
    version: int  # when it was made
    node: Node
    original: tuple[Node, int]  # the node and output number that computed it


class View(NamedTuple):
    """A hooked view. If it is modified in place, the graph goes around the hook."""

    site: GradientSite[Any]
    counter: Tensor  # shares the view's version counter, but none of its memory
    version: int  # when the hook was put on the view
    node: Node | None  # that has the hook; None for a leaf
    base: tuple[Node, int] | None  # where the gradient of the view's base goes; None if it has no gradient
    strides: tuple[int, ...]
    offset: int  # of the view's first element in the base


def used_beside(aliases: Sequence[Alias], nodes: Mapping[Node, None]) -> set[SiteKey]:
    """Return for which aliases the original was used, or is the loss, after the alias was made."""
    originals = {alias.original: alias for alias in aliases}
    wrong = {alias.key for alias in aliases if next(iter(nodes), None) is alias.original[0]}
    for node in nodes:
        for edge in node.next_functions:
            alias = originals.get((edge[0], edge[1])) if edge[0] is not None else None
            if alias is not None and node is not alias.node and node._sequence_nr() > alias.node._sequence_nr():
                wrong.add(alias.key)
    return wrong


def version_counter(tensor: Tensor) -> Tensor:
    """Return a tensor with another's version counter alone: holding the other would hold its memory."""
    counter = tensor.detach()
    with suppress(RuntimeError):  # of some subclasses and devices a tensor takes no other's data
        counter.data = torch.empty(0)
    return counter


def view_of(site: GradientSite[Any], tensor: Tensor) -> View:
    """Describe a view that is about to be hooked."""
    counter, node, base = version_counter(tensor), tensor.grad_fn, tensor._base
    if node is None or base is None or base.grad_fn is None or tensor.layout != torch.strided or tensor.is_nested:
        return View(site, counter, tensor._version, node, None, (), 0)
    edge, offset = (base.grad_fn, base.output_nr), int(tensor.storage_offset() - base.storage_offset())
    return View(site, counter, tensor._version, node, edge, tensor.stride(), offset)
