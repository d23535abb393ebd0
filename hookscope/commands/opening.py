"""Open what a command is given: its network, with its options, and its inputs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hookscope import options
from hookscope.errors import UsageError
from hookscope.inputs.find_files import DEMO_PICTURE
from hookscope.models.names import DEMO

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

    from hookscope.checkpoints.checkpoint import FileOptions
    from hookscope.inspection.given_inputs import Images
    from hookscope.inspection.session import Session
    from hookscope.models.construction import LoadedModel

    Model = str | Path | nn.Module | ExportedProgram | LoadedModel

T = TypeVar("T")


def open_inputs(
    model: Model,
    images: Images,
    option: options.Activations | options.Grads | options.Attribute | options.Attention | options.Survey,
    **further: Any,
) -> Session:
    """Load a network, and find the inputs to run it over; further arguments are those of `open_session`."""
    from hookscope.inspection.session import open_session
    from hookscope.models.classes import with_classes

    began = time.perf_counter()
    images = images_or_demo(model, images, option)
    loaded = load(model, option, option)
    return open_session(with_classes(loaded, option), images, option, began=began, seed=option.seed, **further)


def images_or_demo(model: object, images: T, option: options.InputOptions | options.Survey) -> T | list[str]:
    """Return the inputs; for "demo" without any, the bundled photograph of a cat."""
    by_name = isinstance(option, options.InputOptions) and (option.input or option.input_shape)
    is_demo = isinstance(model, str) and model == DEMO and not isinstance(option, options.Grads)
    return [str(DEMO_PICTURE)] if is_demo and not (by_name or are_given(cast("Images", images))) else images


def load(model: Model, option: options.ModelOptions, run: options.RunOptions) -> LoadedModel:
    """Load what MODEL names and move it to its device; take a module as it is."""
    from hookscope.inspection.device import choose_device, move_to
    from hookscope.models.spec import load_model, needs_a_name

    is_named = isinstance(model, str | Path)
    if not is_named and (run.device != "auto" or run.dtype is not None):
        raise UsageError(needs_a_name())
    where = choose_device(run.device)
    loaded = load_model(
        model,
        weights=option.weights,
        arch=option.arch,
        model_arguments=option.model_arg,
        seed=run.seed,
        options=file_options(option),
    )
    if is_named:
        move_to(loaded, where, run.dtype)
    return loaded


def file_options(option: options.ModelOptions) -> FileOptions:
    """Return how weights files are read."""
    from hookscope.checkpoints.checkpoint import FileOptions

    return FileOptions(option.trust, option.key, tuple(option.allow_missing), tuple(option.allow_unexpected))


def are_given(images: Images) -> bool:
    """Tell whether there are any inputs."""
    return not isinstance(images, list | tuple) or bool(images)


def several(value: Any) -> list[Any]:
    """Return a single value as a list of one."""
    return list(value) if isinstance(value, list | tuple) else [value]
