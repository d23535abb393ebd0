"""Features of layers, pooled or whole, written as they come: memory does not grow with the inputs."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.commands.survey.channel_rows import real_floats
from hookscope.errors import UsageError
from hookscope.hooks.autograd import plain_arithmetic
from hookscope.parameters import arg
from hookscope.results.runs.atomic import whole_file
from hookscope.results.runs.tensors import SpooledTensor, TensorSpool, tensor_bytes
from hookscope.statistics.storage import is_dense, plain_array
from hookscope.text import printable, shape_text

Pool = Literal["avg", "max", "cls", "none"]
FeatureDtype = Literal["float32", "float16"]


def pooled(tensor: Tensor, channel_axis: int | None, pool: Pool, label: str) -> Tensor:
    """Return the features of a batch, (N, C) or whole, on the CPU; complex values as magnitudes.

    `pool` is the mean or the maximum over positions; "cls" for the first token of (N, T, D); "none" for all values.

    Raises:
        UsageError: If the output is not dense, or lacks the axes to pool.
    """
    if not is_dense(tensor):
        raise _unfit(label, "is sparse, ragged, empty or without memory. Leave this layer out.")
    with plain_arithmetic():
        values = real_floats(tensor)
        if pool == "none":
            return values.cpu().clone()
        if channel_axis is None:
            raise _unfit(label, f"has no axis of channels. Give {arg('pool')} none.", pool)
        if pool == "cls":
            if values.dim() != 3 or channel_axis != 2:
                raise _unfit(label, f"is no sequence of tokens but {shape_text(values.shape)}. Give avg.", pool)
            return values[:, 0].cpu().clone()
        axes = [axis for axis in range(1, values.dim()) if axis != channel_axis]
        if not axes:
            return values.cpu().clone()
        wide = torch.float32 if values.device.type == "mps" else torch.float64  # float32 may overflow in the sum
        return (values.mean(axes, dtype=wide) if pool == "avg" else values.amax(axes)).cpu()


def different_layers() -> UsageError:
    """Return the error for layers that some inputs do not pass."""
    return UsageError(f"{arg('features')}: different inputs pass through different layers. Name layers that all pass.")


def different_shapes(label: str, *shapes: tuple[int, ...]) -> UsageError:
    """Return the error for an output with these shapes, batch axis included, for different inputs."""
    one, other = (shape_text(shape[1:]) for shape in shapes)
    return _unfit(label, f"is {one} and {other} for different inputs. Give {arg('pool')} avg.")


def _unfit(label: str, problem: str, pool: str = "") -> UsageError:
    """Return the error for an output that cannot be written, or not be pooled by `pool`."""
    option = f"{arg('pool')} {pool}" if pool else arg("features")
    return UsageError(f"{option}: {printable(label)} {problem}")


@dataclass(slots=True)
class FeatureSpool:
    """Features of a chunk by label, until its file is written; `forget` drops a batch that failed."""

    pool: Pool
    dtype: FeatureDtype
    _spool: TensorSpool = field(default_factory=TensorSpool)
    _parts: dict[str, SpooledTensor] = field(default_factory=dict)
    _latest: dict[str, NDArray[Any]] = field(default_factory=dict)
    _input_count: int = 0

    def see(self, label: str, tensor: Tensor, channel_axis: int | None) -> None:
        """Take the features of a batch, in the hook."""
        values = plain_array(pooled(tensor, channel_axis, self.pool, label))
        with np.errstate(over="ignore"):
            stored = values.astype("<f4" if self.dtype == "float32" else "<f2", order="C")
        if (np.isinf(stored) & np.isfinite(values)).any():
            limit, remedy = "3.4e38", "Leave this layer out"
            if self.dtype == "float16":
                limit, remedy = "65,504", f"Give {arg('features_dtype')} float32"
            raise _unfit(label, f"exceeds {self.dtype}'s greatest number, {limit}. {remedy}.")
        self._latest[label] = stored

    def keep(self, count: int) -> None:
        """Keep the features of a batch of `count` inputs.

        Raises:
            UsageError: If an output lacks a row for each input, or changes its shape.
        """
        for label, values in self._latest.items():
            if values.ndim == 0 or values.shape[0] != count:
                raise _unfit(label, "has an axis 0 that does not count inputs. Choose another layer.")
            before = self._parts.get(label) or SpooledTensor(self.dtype, (0, *values.shape[1:]), ())
            if before.shape[1:] != values.shape[1:]:
                raise different_shapes(label, before.shape, values.shape)
            piece = self._spool.append(memoryview(values.data).cast("B"))
            shape = (before.shape[0] + count, *before.shape[1:])
            self._parts[label] = SpooledTensor(self.dtype, shape, (*before.pieces, piece))
        self._input_count += count
        self._latest.clear()

    def forget(self) -> None:
        """Drop features that were not kept."""
        self._latest.clear()

    def write(self, path: Path, labels: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Write the tensors of these labels as safetensors, and return their shapes.

        Raises:
            OSError: If the disk is full.
            UsageError: If some inputs did not pass a layer, which would shift its rows.
        """
        tensors = {label: self._parts[label] for label in labels if label in self._parts}
        if any(tensor.shape[0] != self._input_count for tensor in tensors.values()):
            raise different_layers()
        with whole_file(path) as file:
            file.writelines(tensor_bytes(tensors, self._spool))
        return {label: tensor.shape for label, tensor in tensors.items()}
