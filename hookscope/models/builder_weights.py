"""Which weights a builder brings that loads some itself, compared with those of a file.

`load_state_dict(strict=False)` drops every name that does not fit without a word. The network then runs as it was
initialised, and nothing in it tells.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.models.construction import replaced
from hookscope.text import counted, printable, some_of

# Values of a parameter that are compared, and names that a sentence lists.
_COMPARED_VALUES = 1024
_LISTED_NAMES = 3


@contextmanager
def watched_loading() -> Iterator[list[str]]:
    """Collect the classes of the modules that get a state dict meanwhile."""
    loaded: list[str] = []
    load = nn.Module.load_state_dict

    def load_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        loaded.append(type(module).__name__)
        return load(module, *args, **kwargs)

    with replaced(nn.Module, "load_state_dict", load_state_dict):
        yield loaded


def samples(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the first values of each parameter."""
    return {
        name: _first(parameter).clone()
        for name, parameter in module.named_parameters()
        if not (nn.parameter.is_lazy(parameter) or parameter.is_meta)
    }


def kept_remark(built: Mapping[str, Tensor], module: nn.Module, name: str) -> list[str]:
    """Return how many parameters the builder had as they are now, in a sentence; nothing without any to compare.

    Parameters of one value, as normalisation layers begin with, are not counted.
    """
    now = {key: _first(parameter) for key, parameter in module.named_parameters() if key in built}
    telling = {key: values for key, values in now.items() if len(values) and bool((values != values[0]).any())}
    if not telling:
        return []
    differing = [key for key, values in telling.items() if not torch.equal(values, built[key])]
    equal = len(telling) - len(differing)
    total = counted(len(telling), "parameter")
    if not differing:
        return [f"{name} loads weights itself; as built, all of its {total} equal the file's."]
    changed = some_of([printable(key, 80) for key in differing], _LISTED_NAMES)
    return [f"{name} loads weights itself; as built, {equal} of its {total} equal the file's, and not {changed}."]


def _first(parameter: Tensor) -> Tensor:
    return parameter.detach().reshape(-1)[:_COMPARED_VALUES]
