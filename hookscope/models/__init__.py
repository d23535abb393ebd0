"""Read the MODEL argument and load what it names.

Nothing is imported here until it is used: the names that MODEL accepts can be had without torch, and a user's own
network without torchvision, which takes as long to import as torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hookscope.models.construction import FileOptions, LoadedModel
    from hookscope.models.spec import build_on_meta, load_model, parse_model

__all__ = ["FileOptions", "LoadedModel", "build_on_meta", "load_model", "parse_model"]

_HOMES = {
    **dict.fromkeys(("FileOptions", "LoadedModel"), "construction"),
    **dict.fromkeys(("build_on_meta", "load_model", "parse_model"), "spec"),
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hookscope.models' has no attribute {name!r}")
    value: object = getattr(import_module(f"hookscope.models.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
