"""Load the network of a checkpoint, and find its inputs."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from PIL.Image import Image
from torch import nn

from hookscope.checkpoints.checkpoint import FileOptions
from hookscope.errors import CheckpointError
from hookscope.hooks.selection import unwrap
from hookscope.inputs.batches import Batch, copy_of
from hookscope.inputs.labelled_files import LabelledFiles, find_labelled
from hookscope.inputs.noise import noise_inputs
from hookscope.inspection.device import move_to
from hookscope.inspection.given_inputs import Images
from hookscope.inspection.network import inspected_network
from hookscope.inspection.session import open_session
from hookscope.models.classes import with_classes
from hookscope.models.construction import LoadedModel, loaded_module
from hookscope.models.spec import load_model
from hookscope.options import InputOptions, taken
from hookscope.results.inputs import Preprocessing
from hookscope.results.noise_shapes import parse_noise_shapes
from hookscope.rules.settings import CheckSettings

_MOST_OF_DATA = 32  # labelled pictures in place of other inputs: enough for BatchNorm and dead channels
_NOISE_INPUTS = 2  # one would not show whether an output depends on its input, or on the rest of its batch


@dataclass(frozen=True, slots=True)
class Prepared:
    """A network on its device, and its inputs.

    Every call of `batches` reads the inputs again: the inputs of the settings, then the pictures of expectations, every
    path once. `data_batches` reads the labelled pictures of `data`.
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
) -> Prepared:
    """Load a network and find its inputs: pictures, which are not read yet, or seeded noise without pictures.

    A module stays on its device unless `device` names another; a weights file may run code only with `trust`.
    Raises HookscopeError if the network cannot be loaded, or its inputs are not found or not known.
    """
    began = time.perf_counter()
    loaded = with_classes(_load(model, settings, trust=trust), settings)
    if device is not None:
        move_to(loaded, device)
    batch_size = settings.batch_size
    if loaded.example_shape is not None:  # an exported program may take no other number of inputs
        batch_size = min(batch_size, loaded.example_shape[0])
    data = None if settings.data is None else find_labelled(settings.data, multi_label=settings.multi_label)
    shapes = () if settings.input_shape is None else parse_noise_shapes(settings.input_shape)
    images: Images = settings.images
    if isinstance(images, tuple):
        images = [*images, *(expectation.image for expectation in settings.expectations)]
    notes: tuple[str, ...] = ()
    if data is not None:
        notes = data.notes
        if isinstance(images, list) and not images and all(shape.name for shape in shapes):
            images = paths = data.spread(_MOST_OF_DATA)
            share = "all" if len(paths) == len(data.labels) else f"{len(paths)} of the {len(data.labels):,}"
            notes += (f"All other rules look at {share} labelled pictures, because no other inputs are given.",)
    if not isinstance(images, list) or images:
        shapes = tuple(shape for shape in shapes if shape.name)
    option = taken(InputOptions, settings, input_shape=shapes or None)
    session = open_session(loaded, images, option, began=began, seed=settings.seed, noise=_NOISE_INPUTS)
    loaded = replace(session.loaded, notes=(*notes, *session.loaded.notes))
    once = {id(file) if isinstance(file, Image) else file: file for file in session.inputs.files}
    inputs = replace(session.inputs, files=[*once.values()])
    named = (*inputs.named, *noise_inputs([shape for shape in inputs.noise if shape.name], settings.seed))
    labelled = replace(inputs, files=[*map(Path, data.labels)] if data else [], batch=None, noise=(), named=named)

    def batches() -> Iterator[Batch]:
        batch = inputs.batch and copy_of(inputs.batch)  # the network may overwrite it
        return replace(inputs, batch=batch).batches(batch_size)

    return Prepared(
        loaded,
        batches,
        inputs.input_count(),
        bool(inputs.noise),
        session.load_seconds,
        inputs.preprocessing,
        data,
        partial(labelled.batches, batch_size),
    )


def _load(model: str | nn.Module | LoadedModel, settings: CheckSettings, *, trust: bool | None) -> LoadedModel:
    if isinstance(model, str):
        names = map(tuple[str, ...], (settings.allow_missing, settings.allow_unexpected, settings.allow_global))
        return load_model(
            model,
            arch=settings.arch,
            model_arguments=settings.model_arg,
            seed=settings.seed,
            options=FileOptions(trust, settings.key, *names),
        )
    loaded = model if isinstance(model, LoadedModel) else replace(loaded_module(unwrap(model)), module=model)
    if inspected_network(loaded).placed[0] == "meta":
        empty = f"{loaded.info.name} holds shapes without values (on the meta device)"
        raise CheckpointError(f"{empty}; load its weights first.")
    return loaded
