"""Inputs as users pass them: paths, pictures, tensors, arguments by position or by name, or a file with them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL.Image import Image
from torch import Tensor

from hookscope.errors import HookscopeError, UsageError
from hookscope.inputs.batches import Batch
from hookscope.inputs.clips import Source, with_clips
from hookscope.inputs.find_files import find_inputs
from hookscope.inputs.loading import load_argument
from hookscope.inputs.named import NamedInput
from hookscope.inspection.network import as_batches, batch_of
from hookscope.parameters import arg
from hookscope.results.inputs import Preprocessing

_STORED_SUFFIXES = (".pt", ".pth", ".safetensors")  # files that may hold several tensors

Images = str | Path | Image | Tensor | Batch | Sequence[str | Path | Image] | tuple[Tensor, ...] | Mapping[str, Tensor]


def sources_of(images: Images, preprocessing: Preprocessing, notes: list[str]) -> tuple[list[Source], Batch | None]:
    """Return the files and pictures, or the batch; `notes` gets a sentence about skipped files."""
    sources = as_sources(images)
    if not isinstance(sources, list):
        return [], sources if isinstance(sources, Batch) else batch_of(sources, preprocessing)
    files: list[Source] = []
    for source in sources:
        if isinstance(source, Image):
            files.append(source)
        else:
            files += with_clips(str(source), find_inputs([str(source)], notes.append), preprocessing)
    return files, None


def by_position_and_name(
    images: Images, named: Mapping[str, Any] | Sequence[str]
) -> tuple[Images, Mapping[str, Any] | Sequence[str]]:
    """Return inputs by position and by name, where a mapping in place of `images` gives inputs by name."""
    if not isinstance(images, Mapping):
        return images, named
    if named and not isinstance(named, Mapping):
        raise UsageError(f"Inputs by name are given twice: as a mapping, and as texts with {arg('input')}.")
    return (), {**images, **(named if isinstance(named, Mapping) else {})}


def arguments_in_file(images: Images) -> tuple[Images, tuple[NamedInput, ...]]:
    """Return the arguments that a single file holds in place of the file, those by position and those by name.

    A tuple of tensors is arguments by position, as in Python, a dict of them arguments by name. Other contents and
    errors are left to the reading of inputs.
    """
    paths = list(images) if isinstance(images, list | tuple) else [images]
    path = Path(paths[0]) if len(paths) == 1 and isinstance(paths[0], str | Path) else None
    if path is None or path.suffix.lower() not in _STORED_SUFFIXES or not path.is_file():
        return images, ()
    try:
        content, record = load_argument(path, Preprocessing())
    except HookscopeError:
        return images, ()
    if isinstance(content, tuple) and content and all(isinstance(argument, Tensor) for argument in content):
        (first,) = as_batches(content[0])
        names = [record.name + part.name.removeprefix("tensor") for part in first.records]
        stored = replace(first.records[0], sha256=record.sha256)
        return replace(first, args=content, records=tuple(replace(stored, name=name) for name in names)), ()
    is_named = isinstance(content, dict) and all(isinstance(name, str) and name.isidentifier() for name in content)
    if is_named and content and all(isinstance(value, Tensor) for value in content.values()):
        named = (NamedInput(name, item, replace(record, shape=tuple(item.shape))) for name, item in content.items())
        return (), tuple(named)
    return images, ()


# Remedies for other objects, by class name: neither class is imported here.
_REMEDIES = {
    "ndarray": " torch.from_numpy makes a tensor of an array.",
    "DataLoader": " `hookscope.features` takes a loader; `hookscope.survey` takes the files behind it.",
}


def as_sources(images: Images) -> list[str | Path | Image] | Tensor | Batch:
    """Return inputs as a list of paths and pictures, or as one tensor or batch.

    A tuple of tensors is the arguments of one call, with the inputs on axis 0.

    Raises:
        UsageError: If it is something else.
    """
    if isinstance(images, Tensor | Batch):
        return images
    if isinstance(images, tuple) and images and all(isinstance(image, Tensor) for image in images):
        (first,) = as_batches(images[0])
        return replace(first, args=images)
    sources: list[Any] = list(images) if isinstance(images, list | tuple) else [images]
    for source in sources:
        if not isinstance(source, str | Path | Image | Tensor):
            remedy = _REMEDIES.get(type(source).__name__, "")
            raise UsageError(
                f"{type(source).__name__} is not an input: give paths and pictures, one tensor, or a tuple of "
                f"tensors for several arguments; {arg('input')} gives them by name.{remedy}"
            )
    if any(isinstance(source, Tensor) for source in sources):
        raise UsageError(
            "A tensor in a list is not an input: torch.stack makes one tensor of several inputs, and a tuple of "
            "tensors is several arguments."
        )
    return sources
