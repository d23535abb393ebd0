"""Tokens that do not come from the picture, though they may be as many: words, and the queries of a decoder."""

import inspect
import re
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from hookscope.hooks.attention import ModuleInput

_WORDS = "words, which have no place on a picture; for patches give --tokens prefix=1,grid=HEIGHTxWIDTH"
_DECODER = "tokens of a decoder, which have no place on the picture"

# The names that forward has for what a decoder looks at.
_MEMORY = re.compile(r"memory|context|encoder", re.IGNORECASE)
_NO_MEMORY = re.compile(r"position|pos$|mask", re.IGNORECASE)


class OffPicture(NamedTuple):
    """Why the queries, and the keys, of an attention are not of the picture; "" where they may be."""

    queries: str
    keys: str


def off_picture(
    running: Sequence[ModuleInput], queries: int, keys: int, grids: Sequence[tuple[int, int]]
) -> OffPicture:
    """Tell which tokens of an attention are not those of the picture, by what the running modules were given.

    Args:
        running: The modules that run, the innermost first.
        queries: Number of queries.
        keys: Number of keys.
        grids: Sizes of maps that convolutions have returned.
    """
    # The layer of a decoder is one to three modules out from its attention.
    decoder = next((found for each in running[1:4] if (found := _decoder(each, grids)) is not None), None)
    if decoder is None:
        return OffPicture(*(_WORDS if _are_words(running, each) else "" for each in (queries, keys)))
    looks_at_memory = any(each is decoder.memory for each in _tensors(running[0]))
    return OffPicture(
        _DECODER if queries == decoder.own_tokens else "",
        _DECODER if keys == decoder.own_tokens and not looks_at_memory else "",
    )


class _Decoder(NamedTuple):
    """How many tokens of its own a layer of a decoder was given, and those of the picture that it looks at."""

    own_tokens: int
    memory: Tensor


def _decoder(given: ModuleInput, grids: Sequence[tuple[int, int]]) -> _Decoder | None:
    if sum(_is_sequence(each) for each in _tensors(given)) < 2:
        return None
    names = [*islice(inspect.signature(given.module.forward).parameters, len(given.args)), *given.kwargs]
    values = [*given.args, *given.kwargs.values()]
    tokens = next(each for each in values if _is_sequence(each))
    for name, each in zip(names, values, strict=False):
        is_memory = _MEMORY.search(name) and not _NO_MEMORY.search(name)
        if is_memory and _is_sequence(each) and each is not tokens:
            for axis in (1, 0):  # (N, T, D), or (T, N, D) as torch's own layers take it
                if any(each.shape[axis] - high * wide in (0, 1) for high, wide in grids if high * wide > 1):
                    return _Decoder(tokens.shape[axis], each)
    return None


def _are_words(running: Sequence[ModuleInput], count: int) -> bool:
    """Tell whether tokens are those of an integer input, (N, T), and not of a picture that a module inside was given.

    Modules that are given tokens themselves decide nothing: they are given integers for positions and masks.
    """
    for each in running:
        tensors = _tensors(each)
        if any(_is_sequence(tensor) for tensor in tensors):
            continue
        if any(_is_integer(tensor) and tensor.dim() == 2 and tensor.shape[1] == count for tensor in tensors):
            return True
        if any(tensor.is_floating_point() and tensor.dim() >= 4 for tensor in tensors):
            return False
    return False


def _is_sequence(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3


def _tensors(given: ModuleInput) -> list[Tensor]:
    return [each for each in (*given.args, *given.kwargs.values()) if isinstance(each, Tensor)]


def _is_integer(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.element_size() > 1
