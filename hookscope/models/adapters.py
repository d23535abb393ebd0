"""Low-rank adapters (LoRA) by the names and values of their tensors. No torch is needed.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021: B A is added to a weight, B starts as 0.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from hookscope.text import counted, printable, some_of

# As peft, loralib, diffusers and kohya's scripts name them; in a network that holds its adapters, peft adds the
# adapter's name.
_DOWN = ("lora_A", "lora_embedding_A", "lora_down", "lora.down")
_UP = ("lora_B", "lora_embedding_B", "lora_up", "lora.up")
_NAME = re.compile(
    rf"(?:(?P<path>.*)\.)?(?P<side>{'|'.join(map(re.escape, (*_DOWN, *_UP)))})(?P<adapter>\.[^.]+)?(?:\.weight)?"
)

# Layers that a sentence lists.
_LISTED_TARGETS = 6


class NamedShape(NamedTuple):
    """A stored tensor, as far as adapters are known by it."""

    key: str
    shape: tuple[int, ...]
    is_zero: bool


def adapter_remark(name: str, tensors: Iterable[NamedShape]) -> str:
    """Return a sentence about the low-rank adapters among tensors: rank, layers, what is untrained; "" for none."""
    down: dict[tuple[str, str], NamedShape] = {}
    up: dict[tuple[str, str], NamedShape] = {}
    others = 0
    for each in tensors:
        found = _NAME.fullmatch(each.key) if each.shape else None
        if found is None:
            others += not each.key.endswith(".alpha")  # the scale of an adapter
        else:
            (down if found["side"] in _DOWN else up)[found["path"] or "", found["adapter"] or ""] = each
    whole, halves = down.keys() & up.keys(), down.keys() ^ up.keys()
    if not (whole or halves):
        return ""
    owner = "its" if len(halves) == 1 else "their"
    lack = f"{counted(len(halves), 'LoRA tensor')} without {owner} other half" if halves else ""
    if not whole:
        return f"{printable(name)}: {lack}."
    ranks = sorted({down[each].shape[0] for each in whole})
    targets = sorted({printable(path.rpartition(".")[2], 40) for path, _ in whole if path})
    layers = f" for {some_of(targets, _LISTED_TARGETS)}" if targets else ""
    base = "" if others else "; it needs the network that it was trained on"
    untrained = "; every lora_B is 0: untrained" if all(each.is_zero for each in up.values()) else ""
    return (
        f"{printable(name)}: {counted(len(whole), 'LoRA adapter')} of rank {', '.join(map(str, ranks))}{layers}"
        f"{base}{untrained}{lack and f'; {lack}'}."
    )
