"""What is done to stored weights to damage them, by their names; each changes tensors where they lie."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

State = dict[str, Tensor]
Corruption = Callable[[State], object]


def in_memory(tensor: Tensor) -> Tensor:
    """Return the values in the order in which they lie in memory, and in a file."""
    return tensor.as_strided((tensor.numel(),), (1,))


def flip(name: str, bit: int, at: int = 1000, view: torch.dtype = torch.int32) -> Corruption:
    """Flip a bit of one value; bit 30 of float32 and 14 of float16 is the highest of the exponent."""

    def change(state: State) -> None:
        bits = in_memory(state[name]).view(view)
        bits[at % len(bits)] ^= 1 << bit

    return change


def initialise(name: str, how: Callable[[Tensor], object]) -> Corruption:
    return lambda state: how(state[name])


def uniform(weight: Tensor) -> None:
    """Initialise as torch's own layers do."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def reset(norm: str) -> Corruption:
    def change(state: State) -> None:
        for leaf, start in {"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1}.items():
            state[f"{norm}.{leaf}"].fill_(start)

    return change


def zero(name: str, begin: int, end: int) -> Corruption:
    return lambda state: in_memory(state[name])[begin:end].zero_()


def fill(name: str, value: float) -> Corruption:
    return lambda state: state[name].fill_(value)


def scale(name: str, factor: float) -> Corruption:
    return lambda state: state[name].mul_(factor)


def reverse(*names: str) -> Corruption:
    """Put the output channels of weights in reverse order."""
    return lambda state: [state[name].copy_(state[name].flip(0)) for name in names]


def transpose(name: str) -> Corruption:
    """Transpose a square matrix, or each kernel in height and width."""

    def change(state: State) -> None:
        state[name].copy_(state[name].mT.clone())

    return change


def swap(first: str, second: str) -> Corruption:
    """Swap two tensors, or all that two layers store."""

    def change(state: State) -> None:
        pairs = [(name, second + name[len(first) :]) for name in state if name == first or name.startswith(f"{first}.")]
        for one, other in pairs:
            before = state[one].clone()
            state[one].copy_(state[other])
            state[other].copy_(before)

    return change


def swap_classes(first: int, second: int, *names: str) -> Corruption:
    def change(state: State) -> None:
        for name in names:
            state[name][[first, second]] = state[name][[second, first]]

    return change


def kernels(state: State) -> list[Tensor]:
    return [tensor for tensor in state.values() if tensor.dim() > 1]


def round_to(bits: int) -> Corruption:
    """Round all weights to so many bits, with one scale for each."""

    def change(state: State) -> None:
        for kernel in kernels(state):
            quantum = kernel.abs().max() / (2 ** (bits - 1) - 1)
            kernel.copy_((kernel / quantum).round() * quantum)

    return change


def forget_scales(bits: int) -> Corruption:
    """Quantise all weights to so many bits, and leave the integers as they are."""

    def change(state: State) -> None:
        for kernel in kernels(state):
            kernel.mul_((2 ** (bits - 1) - 1) / kernel.abs().max()).round_()

    return change


def forget_signs(state: State) -> None:
    for kernel in kernels(state):
        kernel.abs_()


def prune(share: float) -> Corruption:
    """Make the smallest values of each weight zero."""

    def change(state: State) -> None:
        for kernel in kernels(state):
            kernel[kernel.abs() <= kernel.abs().flatten().kthvalue(int(share * kernel.numel())).values] = 0

    return change


def cast(dtype: torch.dtype, factor: float = 1.0) -> Corruption:
    """Store all weights, times a factor, in a smaller type, and read them as they were."""
    return lambda state: [kernel.copy_((kernel * factor).to(dtype)) for kernel in kernels(state)]


def every(leaf: str, how: Callable[[Tensor], object]) -> Corruption:
    """Change all tensors of that name, in whatever layer."""
    return lambda state: [how(tensor) for name, tensor in state.items() if name.rpartition(".")[2] == leaf]


def both(*corruptions: Corruption) -> Corruption:
    def change(state: State) -> None:
        for corruption in corruptions:
            corruption(state)

    return change


def block(name: str, begin: int, end: int, value: float) -> Corruption:
    return lambda state: in_memory(state[name])[begin:end].fill_(value)


def copy_layer(source: str, target: str) -> Corruption:
    return lambda state: state[target].copy_(state[source])
