"""Draw noise for the arguments of a network, the same for equal seeds."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hookscope.inputs.batches import Batch, length_of
from hookscope.inputs.named import NamedInput
from hookscope.results.inputs import InputKind, InputRecord
from hookscope.results.noise_shapes import NoiseShape, NoiseShapes, parse_noise_shapes
from hookscope.text import shape_text


def noise_batch(shapes: NoiseShapes | Sequence[NoiseShape], seed: int, kind: InputKind = "image") -> Batch:
    """Draw inputs of a shape, or an argument for each of several shapes; raises as `parse_noise_shapes`.

    Values are standard normal, or uniform whole numbers if a shape has a bound. torch's global random state is left
    alone. `kind` decides how the first argument by position is passed. The list of pictures for detection, or else the
    first shape with an axis 0 longer than 1, sets the number of inputs; arguments of another length belong to all.
    """
    shapes = parse_noise_shapes(shapes)
    generator = torch.Generator().manual_seed(seed)
    pictures = next((shape.shape[0] for shape in shapes if kind == "detection" and not shape.name), 0)
    count = pictures or next((shape.shape[0] for shape in shapes if shape.shape[0] > 1), 1)
    args: list[object] = []
    kwargs: dict[str, object] = {}
    shared: set[str] = set()
    exact: set[str] = set()
    for shape in shapes:
        values = _drawn(shape, generator)
        place = shape.name or f"[{len(args)}]"
        exact |= {place} if shape.dtype else set()
        shared |= {place} if length_of(values) != count else set()
        if shape.name:
            kwargs[shape.name] = values
        elif kind == "detection" and not args:
            args.append(list(values))
        else:
            args.append(values)
    if kind == "flow" and len(args) == 1 and not kwargs:
        args.append(values.clone())  # a network that changes its input in place must not change both frames
    steps = tuple(_step(shape, seed, several=len(shapes) > 1) for shape in shapes)
    record = InputRecord("noise", None, None, shapes[0].shape[1:], steps)
    return Batch(tuple(args), tuple(range(count)), (record,) * count, kwargs, frozenset(shared), exact=frozenset(exact))


def noise_inputs(shapes: Sequence[NoiseShape], seed: int) -> tuple[NamedInput, ...]:
    """Draw inputs by name, to go with others."""
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for shape in shapes:
        record = InputRecord("noise", None, None, shape.shape, (_step(shape, seed, several=False),))
        inputs.append(NamedInput(shape.name, _drawn(shape, generator), record, is_exact=bool(shape.dtype)))
    return tuple(inputs)


def noise_and_named(
    shapes: Sequence[NoiseShape], named: Sequence[NamedInput], seed: int, *, with_others: bool
) -> tuple[tuple[NoiseShape, ...], tuple[NamedInput, ...]]:
    """Return the noise that is the input, and all inputs by name.

    Noise by name accompanies pictures, tensors or files if there are any; else it is part of the input.
    """
    by_position = any(not shape.name for shape in shapes)
    if not by_position and (with_others or any(entry.record is not None for entry in named)):
        return (), (*named, *noise_inputs(shapes, seed))
    return tuple(shapes), tuple(named)


def _drawn(noise: NoiseShape, generator: torch.Generator) -> Tensor:
    if noise.below is not None:
        dtype: torch.dtype = getattr(torch, noise.dtype)
        return torch.randint(noise.below, noise.shape, generator=generator, dtype=torch.int64, device="cpu").to(dtype)
    dtype = getattr(torch, noise.dtype or "float32")
    drawn = dtype if dtype.is_complex else torch.float32
    return torch.randn(noise.shape, generator=generator, dtype=drawn, device="cpu").to(dtype)


def _step(noise: NoiseShape, seed: int, *, several: bool) -> str:
    values = "standard normal noise" if noise.below is None else f"whole numbers below {noise.below}, drawn at random"
    dtype = f", {noise.dtype}" if noise.dtype and noise.dtype != "int64" else ""
    place = f"{noise.name or 'by position'} {shape_text(noise.shape)}: " if several or noise.name else ""
    return f"{place}{values}{dtype}, seed {seed}"
