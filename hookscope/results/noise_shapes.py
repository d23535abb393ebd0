"""Noise in place of inputs: shape, name, dtype and bound of each argument, as `--input-shape` gives them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, SupportsIndex

from hookscope.errors import UsageError, nearest
from hookscope.parameters import arg
from hookscope.text import number_in, printable

NoiseShapes = str | Sequence[int] | Sequence[str | Sequence[int]] | Mapping[str, str | Sequence[int]]
"""Values of `input_shape`: sizes (4, 20) or a text "4,20:int64<1000"; a list of these, one for each argument by
position; or a mapping from names of arguments to these."""

# 1 GiB of float32, more than any real input.
_MOST_VALUES = 2**28

# The largest bound of each integer dtype: one more than its largest value.
WHOLE: Mapping[str, int] = {
    "bool": 2,
    "uint8": 2**8,
    **{f"int{bits}": 2 ** (bits - 1) for bits in (8, 16, 32)},
    "int64": 2**63 - 1,  # the bound must fit int64
}
OTHER_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def noise_beside_pictures() -> str:
    """Return the message for a call with both pictures and noise in their place."""
    return (
        f"Give pictures or {arg('input_shape')}, not both: noise takes the place of pictures. For noise as another "
        f"argument, give {arg('input_shape')} NAME=SHAPE."
    )


_EXAMPLE = "Give sizes like 1,3,224,224, or tokens=4,20:int64<1000"
_FORM = re.compile(r"(?:(?P<name>[^=]*)=)?(?P<sizes>[^:<=]*)(?::(?P<dtype>[^<=]*))?(?:<(?P<below>[^=]*))?")


@dataclass(frozen=True, slots=True)
class NoiseShape:
    """Noise for one argument of a network.

    Attributes:
        shape: Batch axis first.
        name: Name of the argument; "" for the next by position.
        dtype: torch's name without the prefix; "" if it follows from the network.
        below: Upper bound of whole numbers, excluded; None if it follows from the network.
    """

    shape: tuple[int, ...]
    name: str = ""
    dtype: str = ""
    below: int | None = None

    @property
    def text(self) -> str:
        """In the form of `--input-shape`: "tokens=4,20:int64<1000"."""
        name, dtype = f"{self.name}=" if self.name else "", f":{self.dtype}" if self.dtype else ""
        below = "" if self.below is None else f"<{self.below}"
        return f"{name}{','.join(map(str, self.shape))}{dtype}{below}"


def parse_noise_shapes(specs: NoiseShapes | Sequence[NoiseShape]) -> tuple[NoiseShape, ...]:
    """Return the noise shapes that `--input-shape` gives, in order.

    Raises:
        UsageError: If one has a different form, a name comes twice, or there are too many values.
    """
    shapes = _several(specs)
    names = [shape.name for shape in shapes if shape.name]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise UsageError(f"{arg('input_shape')} {printable(twice)} is given twice.")
    if len(shapes) > 1 and sum(math.prod(shape.shape) for shape in shapes) > _MOST_VALUES:
        raise UsageError(f"{arg('input_shape')} has more than {_MOST_VALUES} values in all. Give smaller shapes.")
    return shapes


def _several(specs: Any) -> tuple[NoiseShape, ...]:
    if specs and isinstance(specs, Mapping):
        return tuple(_one(value, str(name)) for name, value in specs.items())
    is_list = isinstance(specs, Sequence) and not isinstance(specs, str) and bool(specs)
    if is_list and all(isinstance(spec, str | Sequence | NoiseShape) for spec in specs):
        return tuple(map(_one, specs))
    return (_one(specs),)


def _one(spec: Any, name: str = "") -> NoiseShape:
    if isinstance(spec, NoiseShape):
        return spec
    if isinstance(spec, str):
        return _checked(*_read(f"{name}={spec}" if name else spec))
    try:
        sizes = tuple(map(_size, spec))
    except TypeError as error:
        raise UsageError(f"{arg('input_shape')} {printable(str(spec), 80)!r} is not a shape. {_EXAMPLE}.") from error
    shape = NoiseShape(sizes, name)
    return _checked(shape, shape.text)


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise UsageError(f"{arg('input_shape')} {printable(str(value), 80)!r} is not a size. {_EXAMPLE}.")
    return index(value)


def _read(text: str) -> tuple[NoiseShape, str]:
    shown = f"{arg('input_shape')} {printable(text, 80)!r}"
    match = _FORM.fullmatch(text.strip())
    sizes = _whole(match["sizes"].split(",")) if match else None
    below = _whole([match["below"]]) if match and match["below"] is not None else ()
    if match is None or sizes is None or below is None:
        raise UsageError(f"{shown} is not a shape. {_EXAMPLE}.")
    name, dtype = match["name"], (match["dtype"] or "").strip().removeprefix("torch.")
    if match["dtype"] is not None and dtype not in {*WHOLE, *OTHER_DTYPES}:
        close = nearest(dtype, [*WHOLE, *OTHER_DTYPES]) or f" Known: {', '.join([*WHOLE, *OTHER_DTYPES])}."
        raise UsageError(f"{shown}: there is no dtype {printable(dtype)!r}.{close}")
    if name is not None and not name.strip():
        raise UsageError(f"{shown} has no name before '='. {_EXAMPLE}.")
    dtype = dtype or ("int64" if below else "")
    return NoiseShape(sizes, (name or "").strip(), dtype, below[0] if below else None), text


def _whole(texts: Sequence[str]) -> tuple[int, ...] | None:
    try:
        return tuple(number_in(text, int) for text in texts)
    except ValueError:  # also raised for thousands of digits
        return None


def _checked(noise: NoiseShape, text: str) -> NoiseShape:
    shown = repr(printable(text, 80))
    if noise.name and not noise.name.isidentifier():
        raise UsageError(f"{arg('input_shape')} {shown}: {printable(noise.name)!r} cannot be an argument. {_EXAMPLE}.")
    if not noise.shape:
        raise UsageError(f"{arg('input_shape')} {shown} has no batch axis. {_EXAMPLE}.")
    if min(noise.shape) < 1:
        raise UsageError(f"{arg('input_shape')} {shown} has a size below 1. {_EXAMPLE}.")
    if math.prod(noise.shape) > _MOST_VALUES:
        raise UsageError(f"{arg('input_shape')} {shown} has more than {_MOST_VALUES} values. Give a smaller shape.")
    if noise.below is not None:
        most = WHOLE.get(noise.dtype)
        if most is None:
            raise UsageError(
                f"{arg('input_shape')} {shown} has a bound, which is for whole numbers: leave out one of both."
            )
        if not 1 <= noise.below <= most:
            raise UsageError(f"{arg('input_shape')} {shown}: the bound of {noise.dtype} is 1 to {most}.")
    return noise


def noise_note(shapes: Sequence[NoiseShape]) -> tuple[str, ...]:
    """Return a note with the noise of each argument; () for a single shape without a name or dtype."""
    if all(not (shape.name or shape.dtype) for shape in shapes) and len(shapes) < 2:
        return ()
    return (f"Noise: {' · '.join(shape.text for shape in shapes)}.",)
