"""A count sketch: 256 numbers of a tensor from which its distance to another tensor is estimated without either.

Each element is added, with a sign, to one of 256 sums. Both are hashed from the element's index in the tensor alone, so
that they are the same in every process, on every machine, and whatever the strides, the device or the threads:

    word(key, n)   the n-th output of SplitMix64 seeded with key, 64 bits
    element i      is element l = i mod 256 of block j = i div 256
    sign           -1 if bit l mod 64 of word(key, 8 j + l div 64) is set, else 1
    sum            (l + the highest 8 bits of word(key, 8 j + 4)) mod 256

Elements of one block never share a sum; two others share one with probability 1/256. That, and signs that are
independent of each other, is what the error of the estimates follows from: see `hookscope.results.sketches`.

A tensor of several inputs, (N, ...), is the sum of the sketches of its N slices, each with a key from the input's
number: it does not depend on how inputs are put into batches.

Source:
    Charikar, Chen, Farach-Colton 2002, "Finding frequent items in data streams"; Steele, Lea, Flood 2014, "Fast
    splittable pseudorandom number generators".
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.results.sketches import SKETCH_WIDTH
from hookscope.statistics.library import Sketcher
from hookscope.statistics.native import address_of_float32, load_kernel, useful_threads

# The seed is part of the format: another seed makes other sketches, which cannot be compared with these.
_SEED = 0x686F6F6B73636F70

_MASK = 2**64 - 1
_INCREMENT, _FACTORS, _SHIFTS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB), (30, 27, 31)
_WORDS, _SIGNS_IN_WORD = 8, 64
# This many elements are taken at a time where torch sketches them, in about 16 MB; the same on an accelerator, where
# starting an operation costs as much as reading megabytes.
_CHUNK, _CHUNK_THERE = 2**19, 2**21


def new_sketcher() -> Sketcher | None:
    """Return what sketches in compiled code, for one thread at a time; None if this installation has none."""
    kernel = load_kernel()
    return None if kernel is None else kernel.sketcher()


def sketch_slices(
    tensor: Tensor, inputs: Sequence[int] = (0,), sketcher: Sketcher | None = None
) -> NDArray[np.float64] | Tensor | None:
    """Return the sketch of a tensor that one pass over some inputs gave, without waiting for an accelerator.

    Args:
        tensor: Any shape, dtype, strides and device that lacks no memory, see `missing_memory`; only read. Complex
            elements count as two.
        inputs: The numbers of the inputs. If axis 0 of the tensor is as long, its slices are theirs; else the tensor
            counts as the first's.
        sketcher: From `new_sketcher`, to be used for many tensors; None for one of this call's own.

    Returns:
        The sketch for `finished`, float64, (256,): on an accelerator a tensor there. Sketches of several batches can be
        added. None if the tensor is sparse, ragged or without data.
    """
    keys = keys_of(tensor, inputs)
    sketcher = sketcher or new_sketcher()
    sums = _by_compiled_code(sketcher, tensor, keys)
    if sums is not None:
        return sums
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta:
        return None
    if not tensor.numel():
        return np.zeros(SKETCH_WIDTH)
    with torch.no_grad():
        values = _as_real(tensor.detach()).reshape(len(keys), -1)
        if values.is_cpu and values.dtype == torch.float32:
            sums = _by_compiled_code(sketcher, values.contiguous(), keys)
        return _by_torch(values, keys) if sums is None else sums


def finished(sketch: NDArray[np.float64] | Tensor | None) -> NDArray[np.float64] | None:
    """Return what `sketch_slices` gave as an array, (256,); None if an element was NaN or Inf."""
    if not isinstance(sketch, Tensor):  # compiled code has looked
        return sketch
    values = sketch.cpu().double().numpy()
    return values if np.isfinite(values).all() else None


def _as_real(values: Tensor) -> Tensor:
    """Return the elements in a dtype that can be summed; float32 stands for itself and for what it holds exactly."""
    if values.is_quantized:
        values = values.dequantize()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj()).flatten(-2)
    if not values.is_floating_point():
        return values.double()
    return values.float() if values.itemsize < 4 else values


def keys_of(tensor: Tensor, inputs: Sequence[int]) -> tuple[int, ...]:
    """Return the keys of a tensor's slices, or one for all of it: see `sketch_slices`."""
    if len(inputs) != 1 and (not tensor.dim() or tensor.size(0) != len(inputs)):
        inputs = inputs[:1] or (0,)
    return _keys(tuple(inputs))


@lru_cache(maxsize=1024)
def _keys(inputs: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_word(_SEED, number) for number in inputs)


def _word(key: int, at: int) -> int:
    mixed = (key + (at + 1) * _INCREMENT) & _MASK
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        mixed = (mixed ^ mixed >> shift) * factor & _MASK
    return mixed


def _by_compiled_code(sketcher: Sketcher | None, values: Tensor, keys: tuple[int, ...]) -> NDArray[np.float64] | None:
    """Sketch contiguous float32 values on the CPU; None for others, for too large ones, and without compiled code."""
    if sketcher is None or not values.is_contiguous() or not (address := address_of_float32(values)):
        return None
    count = values.numel()
    sketcher.with_keys(keys)
    return sketcher.sketch(address, count, useful_threads(count, torch.get_num_threads()))


def _by_torch(slices: Tensor, keys: tuple[int, ...]) -> Tensor:
    """Sketch values on any device, (N, n)."""
    precision = torch.float32 if slices.device.type == "mps" else torch.float64  # which has no float64
    total = torch.zeros(SKETCH_WIDTH, dtype=precision, device=slices.device)
    inputs = len(slices)
    per_chunk = max(1, (_CHUNK if slices.is_cpu else _CHUNK_THERE) // SKETCH_WIDTH // inputs)
    lanes = torch.arange(SKETCH_WIDTH, device=slices.device)
    for chunk, part in enumerate(torch.split(slices, per_chunk * SKETCH_WIDTH, 1)):
        blocks = -(-part.shape[1] // SKETCH_WIDTH)
        signs, places = _hashed(keys, chunk * per_chunk, per_chunk, slices.device)
        padded = torch.nn.functional.pad(part.to(precision), (0, blocks * SKETCH_WIDTH - part.shape[1]))
        signed = padded.view(inputs, blocks, SKETCH_WIDTH) * signs[:, :blocks]
        total += signed.gather(2, (lanes - places[:, :blocks]) & (SKETCH_WIDTH - 1)).sum((0, 1))
    return total


@lru_cache(maxsize=16)
def _hashed(keys: tuple[int, ...], first: int, blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the signs of blocks of each input, (N, B, 256), and the place of each block's first element, (N, B, 1)."""
    with torch.inference_mode(False), torch.no_grad():
        # Made there, one by one: what is copied to an accelerator waits for it.
        seeds = torch.stack([torch.full((1, 1), _signed(key), dtype=torch.int64, device=device) for key in keys])
        block = torch.arange(first, first + blocks, device=device).view(-1, 1)
        words = _words(seeds, block * _WORDS + torch.arange(SKETCH_WIDTH // _SIGNS_IN_WORD + 1, device=device))
        bits = words[..., :-1, None] >> torch.arange(_SIGNS_IN_WORD, device=device) & 1
        signs = (1 - 2 * bits).to(torch.int8).view(len(keys), blocks, SKETCH_WIDTH)
        return signs, words[..., -1:] >> 56 & (SKETCH_WIDTH - 1)


def _words(keys: Tensor, at: Tensor) -> Tensor:
    """Return `word(key, at)` as int64, whose arithmetic wraps around as that of unsigned integers does."""
    mixed = keys + (at + 1) * _signed(_INCREMENT)
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * _signed(factor)
    return mixed


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
