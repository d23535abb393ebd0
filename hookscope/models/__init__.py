"""Read the MODEL argument and load what it names.

`hookscope.models.zoo` is not imported here: torchvision takes as long to import as torch, and a user's own network
does without.
"""

from hookscope.models.classes import Classes, with_classes
from hookscope.models.construction import FileOptions, LoadedModel
from hookscope.models.input_spec import example_shape
from hookscope.models.python_source import load_function
from hookscope.models.spec import build_on_meta, load_model, parse_model

__all__ = [
    "Classes",
    "FileOptions",
    "LoadedModel",
    "build_on_meta",
    "example_shape",
    "load_function",
    "load_model",
    "parse_model",
    "with_classes",
]
