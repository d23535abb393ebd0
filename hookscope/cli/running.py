"""What commands share that run a model: placing it, drawing into the run directory, and the record of the run."""

import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hookscope.cli.options import floating_dtype
from hookscope.errors import HookscopeError, ModelError, OutputError

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from hookscope.errors import ImageError
    from hookscope.inputs import Batch
    from hookscope.models import LoadedModel
    from hookscope.results import FeatureMaps, InputRecord, Preprocessing


# Inputs whose pictures a run keeps: as many as its report shows. Our choice.
_SHOWN_INPUTS = 32


@dataclass(frozen=True, slots=True)
class Feed:
    """What a model is given, as often as it is asked for.

    Attributes:
        paths: Pictures and tensor files; none means noise.
        preprocessing: How a picture becomes an input.
        noise_shape: Shape of the noise, batch axis first; None where there are files.
        seed: Of the noise.
        device: Where batches go.
        dtype: Of their floating-point tensors.
        finish: Done to each batch on its device, for example to add targets.
        pictures: What the network is given of the first inputs, as pictures by position; filled as batches are asked
            for.
    """

    paths: "Sequence[Path]"
    preprocessing: "Preprocessing"
    noise_shape: tuple[int, ...] | None
    seed: int
    device: "torch.device"
    dtype: "torch.dtype"
    finish: "Callable[[Batch], Batch] | None" = None
    pictures: "dict[int, Image.Image]" = field(default_factory=dict)

    def batches(self, size: int, on_error: "Callable[[ImageError], None] | None" = None) -> "Iterator[Batch]":
        """Yield batches of at most `size` inputs; files that cannot be used go to `on_error`."""
        from hookscope import inputs

        if self.noise_shape is not None:
            batches = iter([inputs.noise_batch(self.noise_shape, self.seed, self.preprocessing.kind)])
        else:
            batches = map(self._pictured, inputs.load_batches(self.paths, self.preprocessing, size, on_error))
        placed = (inputs.to_device(batch, self.device, self.dtype) for batch in batches)
        return map(self.finish, placed) if self.finish else placed

    def _pictured(self, batch: "Batch") -> "Batch":
        """Keep the first inputs that were pictures; a network that takes a list of them shows none."""
        import torch

        from hookscope.render.thumbnails import thumbnails

        values = batch.args[0]
        if batch.indices[0] < _SHOWN_INPUTS and isinstance(values, torch.Tensor):
            made = thumbnails(values.float().numpy(), self.preprocessing)
            for index, record, picture in zip(batch.indices, batch.records, made, strict=False):
                if record.size is not None and index < _SHOWN_INPUTS:
                    self.pictures[index] = picture
        return batch

    def write_pictures(self, folder: Path, input_count: int) -> list[str | None]:
        """Write the pictures into a run's folder; return for each input its path in there, None without one."""
        if self.pictures:
            (folder / "inputs").mkdir()
        names: list[str | None] = [None] * input_count
        for index, picture in self.pictures.items():
            name = names[index] = f"inputs/{index:03d}.png"
            picture.save(folder / name)
        return names


def pass_over(_error: HookscopeError) -> None:
    """Say nothing of an input that cannot be used: for runs besides the one that is reported, which says so."""


def place(loaded: "LoadedModel", where: "torch.device", dtype: str | None) -> "torch.dtype":
    """Move the network to its device and dtype; return the floating dtype that its inputs need."""
    import torch

    try:
        loaded.module.to(device=where, dtype=getattr(torch, dtype) if dtype else None)
    except (RuntimeError, TypeError) as error:  # out of memory, or a dtype that the device does not know
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"{loaded.info.name} cannot be moved to {where} in {dtype or 'its dtype'}: {reason}"
        ) from error
    return floating_dtype(loaded.module)


def keeper(tensors: "dict[str, list[torch.Tensor]]") -> "Callable[[str, torch.Tensor], None]":
    """Return an observer that copies every tensor it is given to the CPU."""

    def keep(label: str, tensor: "torch.Tensor") -> None:
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        elif tensor.is_sparse or tensor.is_nested:
            return  # safetensors holds strided tensors only
        tensors.setdefault(label, []).append(tensor.detach().to("cpu", copy=True).contiguous())

    return keep


def draw_grids(
    folder: Path,
    maps: "Sequence[FeatureMaps]",
    inputs: "Sequence[InputRecord]",
    row_count: int,
    *,
    cmap: str,
    scale: Literal["channel", "layer"],
) -> list[str]:
    """Draw the grids into `folder`; return their paths inside the run."""
    from hookscope.render import grids

    names = [f"grids/{grids.grid_name(each, row_count, input_count=len(inputs))}" for each in maps]

    def draw(each: "FeatureMaps", name: str) -> None:
        picture = grids.draw_grid(each, cmap=cmap, scale=scale, input_name=inputs[each.input_index].name)
        (folder / name).write_bytes(grids.encode_png(picture))

    if names:
        (folder / "grids").mkdir()
        # NumPy and zlib let go of the interpreter for most of the work.
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(draw, maps, names))
    return names


def save_tensors(path: Path, tensors: "Mapping[str, Sequence[torch.Tensor]]") -> None:
    """Write tensors by label, those of several batches joined, as safetensors; none at all writes nothing."""
    if not tensors:
        return
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(_joined(tensors), path)
    except SafetensorError as error:
        raise OutputError(
            f"Cannot write {path.name}: {error}. Free some space, or leave out --save-tensors."
        ) from error


def _joined(tensors: "Mapping[str, Sequence[torch.Tensor]]") -> "dict[str, torch.Tensor]":
    """Join each label's tensors over the batches, along axis 0; where shapes differ, number the batches instead."""
    import torch

    joined = {}
    for label, parts in tensors.items():
        if len(parts) == 1:
            joined[label] = parts[0]
        elif parts[0].dim() and len({part.shape[1:] for part in parts}) == 1:
            joined[label] = torch.cat(list(parts))
        else:
            joined.update({f"{label}@{number}": part for number, part in enumerate(parts)})
    return joined


def run_record(
    verb: str,
    preprocessing: "Preprocessing",
    patterns: Sequence[str],
    grids: Sequence[str],
    failures: Sequence[HookscopeError],
    details: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what `run.json` says.

    Args:
        verb: The command.
        preprocessing: What was done to pictures.
        patterns: As given with `--layer`.
        grids: Paths of the grids inside the run.
        failures: Inputs that could not be used.
        details: The result as a dict; its rows have files of their own and are left out.
    """
    import torch

    record = {
        "verb": verb,
        "command": shlex.join(["hookscope", *sys.argv[1:]]),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("hookscope", "torch", "torchvision", "numpy", "pillow")},
        },
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "patterns": list(patterns),
        "preprocessing": asdict(preprocessing),
        "unusable_inputs": [str(failure) for failure in failures],
        "grids": list(grids),
    }
    in_files = ("rows", "gradients", "parameters", "uncalled")
    return record | {name: value for name, value in details.items() if name not in in_files}


def count_text(count: int, noun: str) -> str:
    """Return a number with its noun: "1 grid", "36 grids"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
