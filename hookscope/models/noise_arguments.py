"""Noise for the arguments of a network's forward: which there are, and which values they take."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from inspect import Parameter, signature

from torch import nn

from hookscope.errors import UsageError, nearest
from hookscope.hooks.selection import unwrap
from hookscope.models.input_spec import embedding_size, starts_with_embedding
from hookscope.parameters import arg
from hookscope.results.noise_shapes import WHOLE, NoiseShape
from hookscope.text import counted, printable

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def noise_arguments(
    shapes: Sequence[NoiseShape], module: nn.Module, *, named: Collection[str], others: int = 0
) -> tuple[NoiseShape, ...]:
    """Return noise with the dtypes and bounds that follow from the network.

    `named` are the names of arguments that are not noise; `others` counts the first arguments by position, which are
    pictures, tensors or files. Raises UsageError if forward has no such argument, or one is given twice.
    """
    if not shapes:
        return ()
    parameters: list[Parameter] | None = None
    with suppress(TypeError, ValueError):  # compiled code has no signature
        parameters = [*signature(unwrap(module).forward).parameters.values()]
    if parameters is not None:
        _check_signature(shapes, parameters, type(unwrap(module)).__name__, named, others)
    first = next((parameter.name for parameter in parameters or () if parameter.kind in _BY_POSITION), None)
    is_first = [not others and first is not None and shape.name == first for shape in shapes]
    by_position = [index for index, shape in enumerate(shapes) if not shape.name]
    if by_position and not others:
        is_first[by_position[0]] = True
    takes_tokens, size = starts_with_embedding(module), embedding_size(module)
    completed = []
    for shape, at_first in zip(shapes, is_first, strict=True):
        dtype = shape.dtype or ("int64" if takes_tokens and at_first else "")
        is_complete = shape.below is not None or not dtype
        completed.append(shape if is_complete else replace(shape, dtype=dtype, below=_default_bound(dtype, size)))
    return tuple(completed)


def _default_bound(dtype: str, size: int | None) -> int | None:
    """Return the number below which whole numbers are drawn by default; None for other dtypes.

    It is the size of the smallest embedding, so that all are indices into every embedding; without embeddings 256 for
    uint8, the dtype of pictures, else 2, for an index into anything.
    """
    if dtype not in WHOLE:
        return None
    return min(WHOLE[dtype], size or (WHOLE[dtype] if dtype == "uint8" else 2))


def _check_signature(
    shapes: Sequence[NoiseShape], parameters: Sequence[Parameter], network: str, taken: Collection[str], others: int
) -> None:
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    ]
    by_position = [parameter.name for parameter in parameters if parameter.kind in _BY_POSITION]
    kinds = {parameter.kind for parameter in parameters}
    by_name = [name for name in names if name not in by_position]
    takes = f"forward of {network} takes {', '.join(by_position) or 'no argument'}"
    takes += f", and by name {', '.join(by_name)}" if by_name else ""
    count = others + sum(not shape.name for shape in shapes)
    if count > max(len(by_position), others) and Parameter.VAR_POSITIONAL not in kinds:
        raise UsageError(f"{arg('input_shape')} is given {counted(count - others, 'time')} by position, but {takes}.")
    for name in filter(None, (shape.name for shape in shapes)):
        if name in taken:
            raise UsageError(f"{name} is given twice: with {arg('input')}, and with {arg('input_shape')}.")
        if name in by_position[:count]:
            raise UsageError(f"{arg('input_shape')} {name}: {name} is given by position already; {takes}.")
        if name not in names and Parameter.VAR_KEYWORD not in kinds:
            raise UsageError(f"{arg('input_shape')} {printable(name)}: {takes}.{nearest(name, names)}")
