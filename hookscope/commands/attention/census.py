"""Find modules that compute attention by their names, to report those whose attention was not seen."""

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import nn

from hookscope.results.attention import UnseenBlock
from hookscope.results.network import row_label

_NAMES = ("attn", "attention", "self_attn", "self_attention")
_ATTENTION = re.compile(r"attn|attention|attnetion|MLA$|MSA$", re.IGNORECASE)
# Gates over channels or places compute no attention over tokens.
_GATES = re.compile(
    r"squeeze|excite|gate|cbam|\bse\b|semodule|ecamodule|globalcontext|selectivekernel|splitatt|radix", re.IGNORECASE
)
_NOT_OVER_TOKENS = re.compile(
    rf"{_GATES.pattern}|channel|spatial|output|dropout|drop$|norm|embed|bias|mlp|linear$|softmax", re.IGNORECASE
)

CANNOT_BE_SEEN = (
    "no softmax over keys that torch functions show (linear attention, a softmax written out or over another axis than "
    "the last, or a custom kernel)"
)


class Refusal(NamedTuple):
    """A module that computed something like attention, which cannot be shown.

    Attributes:
        kind: Its class.
        is_attention: Whether it called torch's attention; otherwise it called a softmax, perhaps over channels.
    """

    kind: str
    reason: str
    is_attention: bool = False


def attention_modules(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that are attention by their class, or by their own name if they hold other modules."""
    matches = {}
    for name, module in modules.items():
        kind = type(module).__name__
        last = name.rpartition(".")[2]
        by_class = _ATTENTION.search(kind) and not _NOT_OVER_TOKENS.search(kind)
        by_name = last in _NAMES and any(module.children())
        is_container = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
        if name and (by_class or (by_name and not is_container and not _NOT_OVER_TOKENS.search(kind))):
            matches[name] = module
    return matches


def unseen_blocks(
    candidates: Mapping[str, nn.Module], called: Collection[str], seen: Collection[str], refused: Mapping[str, Refusal]
) -> tuple[UnseenBlock, ...]:
    """Return the innermost modules that ran, look like attention, and showed none.

    Refused ones are counted if they are inside a candidate, are called attention, or have called torch's.
    """
    ran = [name for name in candidates if name in called]
    unseen: dict[str, UnseenBlock] = {}
    for name in ran:
        has_candidates_inside = any(other != name and _inside(other, name) for other in ran)
        if has_candidates_inside or any(_is_part(name, block) for block in seen):
            continue
        reason = next((refused[block].reason for block in refused if _is_part(name, block)), CANNOT_BE_SEEN)
        unseen[name] = UnseenBlock(row_label(name, 0, ""), type(candidates[name]).__name__, reason)
    for name, (kind, reason, calls_attention) in refused.items():  # such as DaViT's over channels
        is_called_so = _ATTENTION.search(kind) or name.rpartition(".")[2] in _NAMES
        is_attention = calls_attention or (is_called_so and (name or not seen))  # a network may end in a softmax
        if is_attention and not _GATES.search(kind) and not any(_is_part(name, block) for block in (*unseen, *seen)):
            unseen[name] = UnseenBlock(row_label(name, 0, ""), kind, reason)
    return tuple(unseen.values())


def _inside(name: str, other: str) -> bool:
    return name == other or name.startswith(f"{other}.")


def _is_part(name: str, other: str) -> bool:
    """Tell whether one of two modules is inside the other."""
    return _inside(name, other) or _inside(other, name)
