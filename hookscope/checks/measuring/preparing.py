"""Load the network of a checkpoint, and find its inputs."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from PIL.Image import Image
from torch import Tensor, nn

from hookscope.checks.settings import CheckSettings
from hookscope.errors import UsageError
from hookscope.hooks.selection import unwrap
from hookscope.inputs import (
    Batch,
    LabelledFiles,
    NamedInput,
    assumed_preparation,
    copy_of,
    count_inputs,
    find_inputs,
    find_labelled,
    in_batches,
    load_batches,
    named_batch,
    named_count,
    named_inputs,
    noise_and_named,
    noise_batch,
    noise_count,
    preprocessing_from_options,
    to_device,
    with_named,
    without_named_frame,
)
from hookscope.inputs.clips import Source, with_clips
from hookscope.inspection.device import move_to
from hookscope.inspection.given_inputs import arguments_in_file
from hookscope.inspection.network import batch_of, inspected_network
from hookscope.models import FileOptions, LoadedModel, example_shape, load_model, with_classes
from hookscope.models.input_spec import default_preprocessing, shape_option, time_first_warning
from hookscope.models.noise_arguments import noise_arguments
from hookscope.results.inputs import Preprocessing
from hookscope.results.noise_shapes import NoiseShape, noise_note, parse_noise_shapes

# How many of the labelled pictures every layer is measured with where no others are given. A few batches,
# enough for the rules about BatchNorm and dead channels.
_MOST_OF_DATA = 32

# Two inputs at least: whether an output depends on its input, and whether a batch gives what its members give alone,
# cannot be seen with one.
_NOISE_INPUTS = 2


@dataclass(frozen=True, slots=True)
class Prepared:
    """A network on its device, and its inputs.

    `batches` reads the inputs anew, in the same order, as often as it is called. Pictures of settings come first, then
    those of expectations, each path once: the input of an expectation has `str(expectation.image)` as its name.
    `data_batches` reads the labelled pictures of `data`, and `preprocessing` is how pictures become inputs.
    """

    loaded: LoadedModel
    batches: Callable[[], Iterator[Batch]]
    input_count: int
    is_noise: bool = False
    load_seconds: float = 0.0
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    data: LabelledFiles | None = None
    data_batches: Callable[[], Iterator[Batch]] = lambda: iter(())


def prepare(
    model: str | nn.Module | LoadedModel,
    settings: CheckSettings,
    *,
    trust: bool | None = False,
    device: torch.device | None = None,
    given: Batch | Tensor | None = None,
) -> Prepared:
    """Load a network and find its inputs: pictures, which are not read yet, or seeded noise where there are none.

    `given` are inputs in place of those of the settings.

    A network that is given stays on its device unless another is named; a weights file may run code only with `trust`.

    Raises:
        HookscopeError: As `load_model` and `find_inputs` raise it, if the network cannot be loaded, a folder of
            pictures is empty, or it is not known what input the network takes.
    """
    began = time.perf_counter()
    loaded = with_classes(_load(model, settings, trust=trust), settings.classes, multi_label=settings.multi_label)
    if device is not None:
        move_to(loaded, device)
    preprocessing = preprocessing_from_options(loaded.preprocessing, settings)
    images, in_file = arguments_in_file(settings.images)
    given = images if isinstance(images, Batch) else given
    named = (*in_file, *named_inputs(settings.named, preprocessing))
    preprocessing = without_named_frame(preprocessing, named)
    batch_size = settings.batch_size
    if batch_size < 1:
        raise UsageError(f"A batch of {batch_size} inputs is not possible. Give a batch size of 1 or more.")
    if loaded.example_shape is not None:  # an exported program may take no other number of inputs
        batch_size = min(batch_size, loaded.example_shape[0])
    expected = [expectation.image for expectation in settings.expectations]
    notes: list[str] = []
    found = _found(() if images is not settings.images else settings.images, preprocessing, notes.append)
    data = None if settings.data is None else find_labelled(settings.data, multi_label=settings.multi_label)
    paths = [*found, *(each for each in dict.fromkeys(expected) if each not in found)]
    if data is not None:
        notes += data.notes
        if not paths and given is None and all(each.name for each in _shapes(settings)):
            paths = [*data.spread(_MOST_OF_DATA)]
            share = "all" if len(paths) == len(data.labels) else f"{len(paths)} of the {len(data.labels):,}"
            notes.append(f"All other rules look at {share} labelled pictures, because no other inputs are given.")
    if loaded.info.sha256:  # weights of a file, which were trained on something
        notes += assumed_preparation(loaded.preprocessing, paths, settings)
    others = len(given.args) if isinstance(given, Batch) else int(given is not None or bool(paths))
    shapes, extra, drawn = _noise(settings, loaded, preprocessing, named, others)
    notes += drawn
    loaded = replace(
        loaded, notes=(*notes, *loaded.notes), warnings=(*loaded.warnings, *time_first_warning(loaded.module))
    )
    is_noise = False
    read: Callable[[], Iterator[Batch]]
    if given is not None:
        batch = batch_of(given, preprocessing) if isinstance(given, Tensor) else given
        read, count = lambda: in_batches(copy_of(batch), batch_size), len(batch.indices)
    elif paths:
        read, count = partial(load_batches, paths, preprocessing, batch_size), count_inputs(paths, preprocessing)
    elif shapes:
        noise = partial(noise_batch, shapes, settings.seed, preprocessing.kind)
        read, count, is_noise = lambda: in_batches(noise(), batch_size), noise_count(shapes), True
    else:
        alone, extra = extra, ()
        read, count = lambda: in_batches(named_batch(alone), batch_size), named_count(alone)
    placed = partial(_placed, read, extra, count, loaded.module)
    labelled = partial(load_batches, [*map(Path, data.labels)] if data else [], preprocessing, batch_size)
    with_data = _noise(settings, loaded, preprocessing, named, 1)[1] if data else ()
    data_batches = partial(_placed, labelled, with_data, len(data.labels) if data else 0, loaded.module)
    return Prepared(loaded, placed, count, is_noise, time.perf_counter() - began, preprocessing, data, data_batches)


def _found(
    images: Sequence[Path | Image], preprocessing: Preprocessing, on_skip: Callable[[str], None]
) -> list[Source]:
    """Return pictures and the files that paths stand for, in order, each path once."""
    found: list[Source] = []
    for each in images:
        if isinstance(each, Image):
            found.append(each)
        else:
            inside = with_clips(str(each), find_inputs([str(each)], on_skip), preprocessing)
            found += [path for path in inside if path not in found]
    return found


def _load(model: str | nn.Module | LoadedModel, settings: CheckSettings, *, trust: bool | None) -> LoadedModel:
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, nn.Module):
        return LoadedModel(model, inspected_network(model).info, default_preprocessing(unwrap(model)))
    return load_model(
        model,
        arch=settings.arch,
        model_arguments=settings.model_arguments,
        seed=settings.seed,
        options=FileOptions(
            trust, settings.key, settings.allow_missing, settings.allow_unexpected, settings.allow_global
        ),
    )


def _shapes(settings: CheckSettings) -> tuple[NoiseShape, ...]:
    return () if settings.shape is None else parse_noise_shapes(settings.shape)


def _noise(
    settings: CheckSettings,
    loaded: LoadedModel,
    preprocessing: Preprocessing,
    named: tuple[NamedInput, ...],
    others: int,
) -> tuple[tuple[NoiseShape, ...], tuple[NamedInput, ...], tuple[str, ...]]:
    """Return the noise that is the input, all inputs by name, and a sentence about noise.

    Where `others` are the first arguments, noise by position is left out.
    """
    shapes = tuple(each for each in _shapes(settings) if each.name or not others)
    if not shapes and not others and all(each.record is None for each in named):
        known = loaded.example_shape or example_shape(unwrap(loaded.module), preprocessing)
        if known is None:
            raise UsageError(
                f"{loaded.info.name} has an unknown input shape: give pictures or tensor files to run on, "
                f"or noise with {shape_option(loaded.module)}."
            )
        shapes = (NoiseShape((max(_NOISE_INPUTS, known[0]), *known[1:])),)
    shapes = noise_arguments(shapes, loaded.module, given=[each.name for each in named], others=others)
    drawn = noise_note(shapes) if settings.shape is not None else ()
    return (*noise_and_named(shapes, named, settings.seed, with_others=others > 0), drawn)


def _placed(
    read: Callable[[], Iterator[Batch]], named: Sequence[NamedInput], count: int, module: nn.Module
) -> Iterator[Batch]:
    """Read batches, with inputs by name, for the network: on its device, floating-point tensors in its dtype."""
    first = next(
        (each for each in module.parameters() if each.is_floating_point()),
        torch.empty(0, dtype=torch.float32, device="cpu"),
    )
    batches = (with_named(batch, named, count) if named else batch for batch in read())
    return (to_device(batch, first.device, first.dtype) for batch in batches)
