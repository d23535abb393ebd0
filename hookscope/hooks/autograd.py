"""What autograd does with a tensor: whether it tracks it, and why not; copies it tracks, and arithmetic without it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def is_transformed(tensor: Tensor) -> bool:
    """Tell whether a tensor is one of a `torch.func` transform."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def can_require_grad(tensor: Tensor) -> bool:
    """Tell whether autograd would track what is computed from a tensor, if it required a gradient."""
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return differentiable and torch.is_grad_enabled() and not tensor.is_inference()


def why_untracked(tensor: Tensor, inputs: Sequence[tuple[str, Tensor]], module: nn.Module | None = None) -> str:
    """Return why autograd does not track a tensor that a module returned or was given; "" if it does."""
    reason = ""
    if is_transformed(tensor):
        return "it was computed inside a torch.func transform (vmap, grad, jvp)"
    if tensor.requires_grad and torch.is_grad_enabled():
        return reason
    if not (tensor.is_floating_point() or tensor.is_complex()):
        reason = f"{str(tensor.dtype).removeprefix('torch.')} values have no gradient"
    elif tensor.is_inference():
        reason = "it was computed in inference mode"
    elif not torch.is_grad_enabled():
        reason = "it was computed without gradients (no_grad)"
    elif module is None:
        reason = "nothing before it requires a gradient"
    elif any(given.requires_grad for _, given in inputs) or any(each.requires_grad for each in module.parameters()):
        reason = "it was cut off inside the module (no_grad or detach)"
    else:
        reason = "no parameter before it is trainable"
    return reason


def strided_copy(tensor: Tensor) -> Tensor:
    """Return a copy with the very strides, which `clone` may change along axes of size one."""
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
