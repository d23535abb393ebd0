"""Read the MODEL argument and load what it names."""

from typing import TYPE_CHECKING

from hookscope.models.checkpoint import Checkpoint, read_checkpoint
from hookscope.models.construction import FileOptions, LoadedModel
from hookscope.models.input_spec import example_shape, infer_channels, infer_input_shape
from hookscope.models.python_source import load_function
from hookscope.models.spec import ModelSpec, build_on_meta, load_model, parse_model
from hookscope.models.statedict import load_into

if TYPE_CHECKING:
    from hookscope.models.zoo import model_names

__all__ = [
    "Checkpoint",
    "FileOptions",
    "LoadedModel",
    "ModelSpec",
    "build_on_meta",
    "example_shape",
    "infer_channels",
    "infer_input_shape",
    "load_function",
    "load_into",
    "load_model",
    "model_names",
    "parse_model",
    "read_checkpoint",
]


def __getattr__(name: str) -> object:
    if name == "model_names":  # torchvision takes as long to import as torch, and a user's own network does without
        from hookscope.models.zoo import model_names  # noqa: PLC0415

        return model_names
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
