"""Low-rank adapters (LoRA) by the names and values of their tensors. No torch is needed.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021: B A is added to a weight, B starts as 0.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hookscope.text import counted, printable, some_of

# As peft, loralib, diffusers and kohya's scripts name them; in a network that holds its adapters, peft adds the
# adapter's name.
_DOWN = ("lora_A", "lora_embedding_A", "lora_down", "lora.down")
_UP = ("lora_B", "lora_embedding_B", "lora_up", "lora.up")
_NAME = re.compile(
    rf"(?:(?P<path>.*)[._])?(?P<side>{'|'.join(map(re.escape, (*_DOWN, *_UP)))})(?P<adapter>\.[^.]+)?(?:\.weight)?"
)
_ALPHA = ".alpha"

# What else an adapter may hold for its layer: magnitudes of DoRA, the scale, a bias.
_OTHER_PARTS = re.compile(r"(.*\.)?(lora[^.]*(\..+)?|alpha|dora_scale|bias)")

_LISTED_TARGETS = 6  # layers that a sentence lists


class NamedShape(NamedTuple):
    """The facts of a stored tensor by which adapters are recognised."""

    key: str
    shape: tuple[int, ...]
    is_zero: bool


class Adapters(NamedTuple):
    """The halves of adapters among tensors, by layer and adapter; `other_count` is the number of other tensors."""

    down: Mapping[tuple[str, str], NamedShape]
    up: Mapping[tuple[str, str], NamedShape]
    zero_scales: frozenset[str]
    other_count: int

    @property
    def halves(self) -> tuple[str, ...]:
        """The names of halves without their other half."""
        return tuple(sorted((self.down.get(key) or self.up[key]).key for key in self.down.keys() ^ self.up.keys()))

    @property
    def idle(self) -> tuple[str, ...]:
        """The names of the halves and scales that are zero, if every adapter has one; else ()."""
        names = []
        for key in self.down.keys() & self.up.keys():
            zeros = [half.key for half in (self.up[key], self.down[key]) if half.is_zero]
            if key[0] in self.zero_scales:
                zeros.append(f"{key[0]}{_ALPHA}")
            if not zeros:
                return ()
            names += zeros
        return tuple(sorted(names))


def adapters_in(tensors: Iterable[NamedShape]) -> Adapters:
    """Return the adapters among tensors."""
    down: dict[tuple[str, str], NamedShape] = {}
    up: dict[tuple[str, str], NamedShape] = {}
    zero_scales, others = set[str](), 0
    for tensor in tensors:
        match = _NAME.fullmatch(tensor.key) if tensor.shape else None
        if match is not None:
            (down if match["side"] in _DOWN else up)[match["path"] or "", match["adapter"] or ""] = tensor
        elif not tensor.key.endswith(_ALPHA):
            others += 1
        elif tensor.is_zero:
            zero_scales.add(tensor.key.removesuffix(_ALPHA))
    return Adapters(down, up, frozenset(zero_scales), others)


def is_adapter(names: Iterable[str]) -> bool:
    """Tell whether tensors are adapters alone, without the weights of the adapted layers."""
    unique = {*names}
    halves = {name: match["path"] or "" for name in unique if (match := _NAME.fullmatch(name))}
    layers = {*halves.values()}
    lengths = {len(layer) for layer in layers}  # a name made to be slow has a million dots
    for name in unique - halves.keys():
        inside = [length for length in lengths if length == 0 or name[length : length + 1] == "."]
        rests = (name[length:].removeprefix(".") for length in inside if name[:length] in layers)
        if not all(map(_OTHER_PARTS.fullmatch, rests)):
            return False
    return bool(layers)


def adapter_remark(name: str, tensors: Iterable[NamedShape]) -> str:
    """Return a sentence about the low-rank adapters among tensors: rank, layers, what is untrained; "" for none."""
    adapters = adapters_in(tensors)
    down, up, halves = adapters.down, adapters.up, adapters.halves
    whole = down.keys() & up.keys()
    if not (whole or halves):
        return ""
    owner = "its" if len(halves) == 1 else "their"
    lack = f"{counted(len(halves), 'LoRA tensor')} without {owner} other half" if halves else ""
    if not whole:
        return f"{printable(name)}: {lack}."
    ranks = sorted({down[key].shape[0] for key in whole})
    targets = sorted({printable(_target(path), 40) for path, _ in whole if path})
    layers = f" for {some_of(targets, _LISTED_TARGETS)}" if targets else ""
    base = "" if adapters.other_count else "; it needs the network that it was trained on"
    untrained = "; every lora_B is 0 (untrained)" if all(half.is_zero for half in up.values()) else ""
    return (
        f"{printable(name)}: {counted(len(whole), 'LoRA adapter')} of rank {', '.join(map(str, ranks))}{layers}"
        f"{base}{untrained}{lack and f'; {lack}'}."
    )


def _target(layer: str) -> str:
    """Return the end of a layer's name that says which it is: "q_proj", but "mlp.0", and "layer 0" for a number."""
    *_, last = parts = layer.split(".")
    named = next((at for at in reversed(range(len(parts))) if not parts[at].isdigit()), None)
    return f"layer {last}" if named is None else ".".join(parts[named:])
