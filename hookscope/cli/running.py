"""What commands share that run a model: placing it, drawing into the run directory, and the record of the run."""

import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hookscope.cli.console import report
from hookscope.cli.options import floating_dtype, parse_shape
from hookscope.errors import HookscopeError, ModelError, OutputError, UnfitInputError, UsageError, gravest

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from hookscope.errors import ImageError
    from hookscope.inputs import Batch, NamedInput
    from hookscope.models import LoadedModel
    from hookscope.results.activations import Activations, FeatureMaps
    from hookscope.results.comparison import Comparison
    from hookscope.results.gradients import Gradients
    from hookscope.results.grids import Grid
    from hookscope.results.inputs import InputRecord, Preprocessing


# Inputs whose pictures a run keeps: as many as its report shows. Our choice.
_SHOWN_INPUTS = 32


@dataclass(frozen=True, slots=True)
class Feed:
    """What a model is given, as often as it is asked for.

    Attributes:
        paths: Pictures and tensor files.
        preprocessing: How a file becomes an input.
        noise_shape: Shape of the noise, batch axis first; None for none.
        seed: Of the noise.
        device: Where batches go.
        dtype: Of their floating-point tensors.
        finish: Done to each batch on its device, for example to add targets.
        named: Inputs by name, for every batch; without files and noise, all there is.
        pictures: What the network is given of the first inputs, as pictures; filled as batches are asked for.
    """

    paths: "Sequence[Path]"
    preprocessing: "Preprocessing"
    noise_shape: tuple[int, ...] | None
    seed: int
    device: "torch.device"
    dtype: "torch.dtype"
    finish: "Callable[[Batch], Batch] | None" = None
    named: "Sequence[NamedInput]" = ()
    pictures: "dict[InputRecord, Image.Image]" = field(default_factory=dict)

    def batches(self, size: int, on_error: "Callable[[ImageError], None] | None" = None) -> "Iterator[Batch]":
        """Yield batches of at most `size` inputs; files that cannot be used go to `on_error`."""
        from hookscope import inputs

        batches: Iterator[Batch]
        if self.paths:
            batches = map(self._pictured, inputs.load_batches(self.paths, self.preprocessing, size, on_error))
        elif self.noise_shape is not None:
            batches = iter([inputs.noise_batch(self.noise_shape, self.seed, self.preprocessing.kind)])
        else:
            batches = inputs.in_batches(inputs.named_batch(self.named), size)
        if self.named and (self.paths or self.noise_shape is not None):
            total = self.input_count() if any(each.row_count > 1 for each in self.named) else 1
            batches = (inputs.with_named(batch, self.named, total) for batch in batches)
        placed = (inputs.to_device(batch, self.device, self.dtype) for batch in batches)
        return map(self.finish, placed) if self.finish else placed

    def input_count(self) -> int:
        """Return how many inputs there are, unusable ones counted; tensor files are read for that."""
        from hookscope.inputs import count_inputs

        if self.paths:
            return count_inputs(self.paths, self.preprocessing)
        return 1 if self.noise_shape is None else self.noise_shape[0]

    def _pictured(self, batch: "Batch") -> "Batch":
        """Keep the first inputs that were pictures; a network that takes a list of them shows none."""
        import torch

        from hookscope.render.thumbnails import thumbnails

        values = batch.args[0]
        if len(self.pictures) < _SHOWN_INPUTS and isinstance(values, torch.Tensor):
            made = thumbnails(values.float().numpy(), self.preprocessing)
            for record, picture in zip(batch.records[:_SHOWN_INPUTS], made, strict=False):
                if record.size is not None:
                    self.pictures[record] = picture
        return batch

    def write_pictures(self, folder: Path, records: "Sequence[InputRecord]") -> list[str | None]:
        """Write the pictures of a run's first inputs into its folder; return for each its path there, or None."""
        names: list[str | None] = [None] * len(records)
        for index, record in enumerate(records[:_SHOWN_INPUTS]):
            if record in self.pictures:
                (folder / "inputs").mkdir(exist_ok=True)
                name = names[index] = f"inputs/{index:03d}.png"
                self.pictures[record].save(folder / name)
        return names


def ignore_error(_error: HookscopeError) -> None:
    """Say nothing of an input that cannot be used: for runs besides the one that is reported, which says so."""


def find_files(
    images: "Sequence[str]", named: Sequence[str], notes: list[str], otherwise: str
) -> "tuple[list[Path], str]":
    """Return the files that arguments stand for, and the name of the first input, for the run directory.

    Args:
        images: Files, folders and globs.
        named: As given with `--input`.
        notes: Gets a sentence about files that were skipped.
        otherwise: The name where no input is a file.
    """
    from hookscope.inputs import find_inputs

    paths = find_inputs(images, notes.append) if images else []
    values = [value for _, _, value in (text.partition("=") for text in named)]
    by_name = [Path(value) for value in values if os.path.isfile(value)]  # noqa: PTH113 never raises
    return paths, next((path.name for path in [*paths, *by_name]), otherwise)


def feed_of(
    loaded: "LoadedModel",
    paths: "Sequence[Path]",
    named: Sequence[str],
    *,
    device: "torch.device",
    dtype: str | None,
    seed: int,
    noise: bool = False,
    input_shape: str | None = None,
    finish: "Callable[[Batch], Batch] | None" = None,
    **options: Any,
) -> Feed:
    """Place the network, and return what it is given.

    Args:
        loaded: The network.
        paths: Pictures and tensor files.
        named: As given with `--input`.
        device: Where both go.
        dtype: As given with `--dtype`.
        seed: Of noise.
        noise: Whether it is given noise where there are no files, or an `input_shape`.
        input_shape: As given with `--input-shape`.
        finish: As in `Feed`.
        options: For `preprocessing_from_options`.

    Raises:
        UsageError: If an option cannot be right, or it is not known what input the network takes.
        ImageError: If an input by name cannot be read.
        ModelError: If the network cannot be moved.
    """
    from hookscope import inputs

    preprocessing = inputs.preprocessing_from_options(loaded.preprocessing, **options)
    by_name = inputs.read_named(named, preprocessing)
    preprocessing = inputs.without_named_frame(preprocessing, by_name)
    noise = noise and not paths and (input_shape is not None or all(each.record is None for each in by_name))
    shape = _noise_shape(input_shape, loaded, preprocessing) if noise else None
    return Feed(paths, preprocessing, shape, seed, device, place(loaded, device, dtype), finish, by_name)


def _noise_shape(input_shape: str | None, loaded: "LoadedModel", preprocessing: "Preprocessing") -> tuple[int, ...]:
    """Return the shape of noise that is given, or that the network takes.

    Raises:
        UsageError: If it is not a shape, or the network does not tell.
    """
    from hookscope.models import example_shape

    shape = parse_shape(input_shape) if input_shape else example_shape(loaded.module, preprocessing)
    if shape is None:
        raise UsageError(f"{loaded.info.name} does not tell what input it takes: give IMAGE or --input-shape.")
    return shape


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


@dataclass(slots=True)
class TensorCollector:
    """Copies tensors to the CPU; those of a batch that the model raised on are dropped.

    Attributes:
        advance: Called after each batch with the number of inputs finished.
        tensors: By label, one of each batch.
    """

    advance: Callable[[int], None] = lambda _finished: None
    tensors: "dict[str, list[torch.Tensor]]" = field(default_factory=dict)
    _latest: "list[tuple[str, torch.Tensor]]" = field(default_factory=list)
    _finished: int = 0

    def collect(self, label: str, tensor: "torch.Tensor") -> None:
        """Copy a tensor, for as long as its batch may still fail."""
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        elif tensor.is_sparse or tensor.is_nested:
            return  # safetensors holds strided tensors only
        self._latest.append((label, tensor.detach().to("cpu", copy=True).contiguous()))

    def end_batch(self, finished: int) -> None:
        """Take over what came since the last call if inputs have been finished since: `finished` counts them."""
        if finished > self._finished:
            self.end()
        self._latest.clear()
        self._finished = finished
        self.advance(finished)

    def end(self) -> None:
        """Take over what came since the last batch."""
        for label, tensor in self._latest:
            self.tensors.setdefault(label, []).append(tensor)
        self._latest.clear()


def unreported(error: ModelError, failures: "Sequence[HookscopeError]") -> bool:
    """Tell whether an error that ended a run is none of those that were reported for single inputs."""
    return all(getattr(each, "reason", None) != str(error) for each in failures)


Run = TypeVar("Run", "Activations", "Gradients")


def compared(
    plain: "Run | None", edited: "Run", edits: Sequence[str], *, repeats: bool
) -> "tuple[Run, Comparison | None]":
    """Return a run with edits as it is shown, and what differs from that without them.

    Args:
        plain: Without edits; None if there are none.
        edited: With them. It is verified as that without them was.
        edits: Expressions.
        repeats: Whether to keep rows that repeat another.

    Returns:
        The run with edits, and the comparison if both runs are of the same inputs.
    """
    from hookscope.inspection.comparison import compare
    from hookscope.results.repeats import fold_repeats, repeated

    shown: Run = edited if repeats else fold_repeats(edited)
    if plain is None:
        return shown, None
    shown = replace(shown, verification=plain.verification)
    if plain.inputs != edited.inputs:
        sentence = "Nothing is compared: the model raised on other inputs with the edits than without."
        return replace(shown, warnings=(*shown.warnings, sentence)), None
    return shown, compare(plain, edited, edits, () if repeats else repeated(edited))


def report_all(failures: "Sequence[HookscopeError]") -> int:
    """Print every failure, one line for all inputs that the model raised on alike; return the gravest exit code."""
    lines: list[HookscopeError] = []
    names: dict[str, list[str]] = {}
    for failure in failures:
        if isinstance(failure, UnfitInputError) and failure.names:
            if failure.reason not in names:
                lines.append(failure)
            names.setdefault(failure.reason, []).extend(failure.names)
        else:
            lines.append(failure)
    merged = (
        UnfitInputError(names[each.reason], each.reason) if isinstance(each, UnfitInputError) and each.names else each
        for each in lines
    )
    return gravest([report(each) for each in merged])


def draw_grids(
    folder: Path,
    maps: "Sequence[FeatureMaps]",
    inputs: "Sequence[InputRecord]",
    row_count: int,
    *,
    cmap: str,
    scale: Literal["channel", "layer"],
) -> "list[Grid]":
    """Draw the grids into `folder`; return what each shows, and where."""
    from hookscope.render import grids

    names = [f"grids/{grids.grid_name(each, row_count, input_count=len(inputs))}" for each in maps]

    def draw(each: "FeatureMaps", name: str) -> "Grid":
        input_name = inputs[each.input_index].name
        picture, grid = grids.draw_for_run(each, name, cmap=cmap, scale=scale, input_name=input_name)
        (folder / name).write_bytes(grids.encode_png(picture))
        return grid

    if not names:
        return []
    (folder / "grids").mkdir()
    # NumPy and zlib let go of the interpreter for most of the work.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(draw, maps, names))


def save_tensors(path: Path, tensors: "Mapping[str, Sequence[torch.Tensor]]", labels: AbstractSet[str]) -> None:
    """Write the tensors that have these labels, those of several batches joined; without any, write nothing."""
    tensors = {label: parts for label, parts in tensors.items() if label in labels}
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
    feed: Feed,
    patterns: Sequence[str],
    grids: "Sequence[Grid]",
    failures: Sequence[HookscopeError],
    details: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what `run.json` says.

    Args:
        verb: The command.
        feed: What the model was given.
        patterns: As given with `--layer`.
        grids: As `draw_grids` returns them.
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
        "preprocessing": asdict(feed.preprocessing),
        "named_inputs": {each.name: asdict(each.record) if each.record else each.value for each in feed.named},
        "unusable_inputs": [text for failure in failures for text in _one_by_one(failure)],
        "grids": [asdict(grid) for grid in grids],
    }
    in_files = ("rows", "gradients", "parameters", "uncalled")
    return record | {name: value for name, value in details.items() if name not in in_files}


def _one_by_one(failure: HookscopeError) -> list[str]:
    """Return what a failure says of each of its inputs."""
    if isinstance(failure, UnfitInputError) and failure.names:
        return [f"{name}: {failure.reason}" for name in failure.names]
    return [str(failure)]
