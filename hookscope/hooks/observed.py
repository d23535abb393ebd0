"""What hooks observe: calls of modules and operations, their outputs, and gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")

Role = Literal["output", "input"]

SiteKey = tuple[str, int, str, Role]
"""(layer, call, slot, role)."""


RowKey = tuple[str, int, str]
"""(layer, call, slot)."""


class Operation(NamedTuple):
    """A torch function, tensor method or operator that a module's own forward code calls.

    Attributes:
        name: Name of the torch function, shared by operators and in-place variants: "add" for `+`, `+=` and `add_`.
        owner: Dotted name of the module whose forward calls it.
        source: The line that calls it, "net.py:14"; "" if that is not Python code of the network.
        constants: Numbers, texts and slices among its arguments, with their paths as in `ModuleCall.inputs`.
    """

    name: str
    owner: str
    source: str
    constants: tuple[tuple[str, object], ...] = ()


class ModuleCall(NamedTuple):
    """One call of one module, or of one operation.

    Attributes:
        layer: The module's name in the `layers` of `capture`; "MODULE:NAME" for an operation.
        module: The module; for an operation, the module whose forward calls it.
        call: 0 for the first call since the start or `Capture.restart`, 1 for the second.
        inputs: Input tensors as (path, tensor): "[0]" is the first argument, "['mask']" a keyword. An in-place module
            has already overwritten them.
        operation: The operation; None for a call of the module itself.
        vmapped: How many axes of its output are those of `torch.vmap`, which come first.
        slots: Paths of the tensors in its output, if there are several.
    """

    layer: str
    module: nn.Module
    call: int
    inputs: Sequence[tuple[str, Tensor]]
    operation: Operation | None = None
    vmapped: int = 0
    slots: Sequence[str] = ()

    @property
    def maker(self) -> nn.Module | str:
        """What computed the output: the module, or the operation's name."""
        return self.module if self.operation is None else self.operation.name


class Observation(NamedTuple, Generic[T]):
    """What was observed of one output tensor.

    Attributes:
        place: The layer, as `ModuleCall.layer`, the number of the call, and the path inside a nested output, "" for a
            plain tensor.
        value: The return value of `observe`; None if the module returned no tensor.
        passed_through: Whether the output is an unchanged input; not detected for inference tensors.
        in_place: Whether the module overwrote an input; for inference tensors known only for torch's own activations.
        duplicate_of: Key of the row that first showed this tensor in the forward pass, if it is passed through and
            unmodified since; else None.
        operation: The operation; None for a module.
        sources: The origin of each input tensor, in order, if operations are observed: the place that showed it, the
            name of a parameter or buffer, "input" for an input of the network, "" for anything else.
        vmapped: As in `ModuleCall`.
    """

    place: RowKey
    value: T | None
    passed_through: bool
    in_place: bool
    duplicate_of: RowKey | None
    operation: Operation | None = None
    sources: tuple[RowKey | str, ...] = ()
    vmapped: int = 0

    @property
    def layer(self) -> str:
        """The layer of its place."""
        return self.place[0]

    @property
    def call(self) -> int:
        """The number of the call of its place."""
        return self.place[1]

    @property
    def slot(self) -> str:
        """The slot of its place."""
        return self.place[2]


@dataclass(slots=True)
class GradientSite(Generic[T]):
    """One output or input of one call of a module, and its gradient.

    Attributes:
        call: 0 for its first call in the forward pass, 1 for its second.
        slot: Path inside a nested output, "" for a plain tensor; inside the arguments, "[0]" for the first.
        role: "output" for grad_output, "input" for grad_input.
        shape: The tensor's; -1 for a ragged axis; () if there is none.
        dtype: The tensor's; None if there is none.
        untracked: Why autograd does not track the tensor; "" if it does.
        arrival: Position in the order in which gradients arrived, from 0; None without a gradient.
        value: The observer's return value for the gradient; None without a gradient.
        operation: The operation that returned the tensor; None for the module.
    """

    layer: str
    module: nn.Module
    call: int
    slot: str
    role: Role
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    untracked: str
    arrival: int | None = None
    value: T | None = None
    operation: Operation | None = None

    @property
    def maker(self) -> nn.Module | str:
        """As `ModuleCall.maker`."""
        return self.module if self.operation is None else self.operation.name

    @property
    def key(self) -> SiteKey:
        """The identity of the site within one pass."""
        return (self.layer, self.call, self.slot, self.role)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's shape, (parts, -1) for a nested one."""
    return (tensor.size(0), -1) if tensor.is_nested else tensor.shape


def version_of(tensor: Tensor) -> int:
    """Return a number that changes whenever a tensor is written to; -1 for an inference tensor, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def physical(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """Return what `torch.func` transforms have wrapped in a tensor, and its axes of `vmap`, the outermost first."""
    axes: list[int] = []
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            inserted = functorch.maybe_get_bdim(tensor)
            axes = [inserted, *(axis + (axis >= inserted) for axis in axes)]
        tensor = functorch.get_unwrapped(tensor)
    return tensor, axes


def physical_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor as rows have it: inside `vmap` with its axes in front."""
    held, axes = physical(tensor)
    return (*(held.size(axis) for axis in axes), *shape_of(tensor)) if axes else shape_of(held)
