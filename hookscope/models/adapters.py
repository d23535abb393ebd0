"""Low-rank adapters (LoRA) by the names and values of their tensors. No torch is needed.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021: B A is added to a weight, B starts as 0.
"""

import re
from collections.abc import Sequence

from hookscope.results.contents import StoredTensor
from hookscope.text import printable, some_of

# As the library peft names them, alone or, in a network that holds its adapters, with the adapter's name behind.
_DOWN = re.compile(r"(?:.*\.)?(?P<target>[^.]+)\.lora_A(\.[^.]+)?\.weight")
_UP = re.compile(r".+\.lora_B(\.[^.]+)?\.weight")

# Our choice: layers that a sentence lists.
_LISTED_TARGETS = 6


def adapter_remark(name: str, tensors: Sequence[StoredTensor]) -> str:
    """Return a sentence about the low-rank adapters among tensors: rank, layers, whether untrained; "" for none."""
    down = [(found["target"], each) for each in tensors if (found := _DOWN.fullmatch(each.key)) and each.shape]
    up = [each for each in tensors if _UP.fullmatch(each.key)]
    if not (down and up):
        return ""
    ranks = sorted({each.shape[0] for _, each in down})
    targets = sorted({printable(target, 40) for target, _ in down})
    alone = len(down) + len(up) == len(tensors)
    base = "; it needs the network that it was trained on" if alone else ""
    untrained = all(each.min == 0 == each.max and not (each.nan_count or each.inf_count) for each in up)
    return (
        f"{printable(name)}: {len(down)} LoRA adapters of rank {', '.join(map(str, ranks))} for "
        f"{some_of(targets, _LISTED_TARGETS)}{base}{'; every lora_B is 0: untrained' if untrained else ''}."
    )
