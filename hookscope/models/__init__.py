"""Read the MODEL argument and load what it names.

Nothing is imported here until it is used: the names that MODEL accepts can be had without torch, and a user's own
network without torchvision, which takes as long to import as torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hookscope.models.classes import Classes, with_classes
    from hookscope.models.construction import FileOptions, LoadedModel
    from hookscope.models.input_spec import example_shape
    from hookscope.models.spec import build_on_meta, load_model, parse_model

__all__ = [
    "Classes",
    "FileOptions",
    "LoadedModel",
    "build_on_meta",
    "example_shape",
    "load_model",
    "parse_model",
    "with_classes",
]

_HOMES = {
    "classes": ("Classes", "with_classes"),
    "construction": ("FileOptions", "LoadedModel"),
    "input_spec": ("example_shape",),
    "spec": ("build_on_meta", "load_model", "parse_model"),
}
_HOME_BY_NAME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    home = _HOME_BY_NAME.get(name)
    if home is None:
        raise AttributeError(f"module 'hookscope.models' has no attribute {name!r}")
    value: object = getattr(import_module(f"hookscope.models.{home}"), name)
    globals()[name] = value
    return value
