"""The network that a file names beside its weights: what training scripts and libraries write down. No torch is needed.

Everything here comes from a stranger, and is only a hint: a network counts if names and shapes fit it.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hookscope.checkpoints.unpickler import StandIn

# Keys of timm's and PyTorch's training scripts, timm's configurations and metadata, and scripts of many others.
_KEYS = ("architecture", "arch", "model_name", "backbone", "model", "net", "network")
_AROUND = ("pretrained_cfg", "args", "config", "cfg", "hyper_parameters", "hparams", "model_config", "meta", "opt")

_NAME = re.compile(r"(timm:|torchvision:|timm/)?(?P<name>[A-Za-z]\w{1,79})(\.\w{1,80})?", re.ASCII)


def told_architectures(content: object, metadata: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Return names of networks in what a file holds and in its metadata, without the tags of weights, each once."""
    names = dict.fromkeys(name for held in (metadata, content) for name in _names_in(held))
    return tuple(names)


def _names_in(held: object) -> Iterator[str]:
    if not isinstance(held, dict):
        return
    for place in (held, *(_entries_of(dict.get(held, key)) for key in _AROUND)):
        for key in _KEYS:
            value = dict.get(place, key)
            if isinstance(value, str) and (match := _NAME.fullmatch(value)):
                yield match["name"].lower()


def _entries_of(value: object) -> dict[Any, Any]:
    held = value.state if isinstance(value, StandIn) else value
    return held if isinstance(held, dict) else {}
