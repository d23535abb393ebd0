"""Tell which files of a DeepSpeed checkpoint hold weights, and which a process's part of them. No torch is needed.

Source: deepspeed/runtime/engine.py (`_save_checkpoint`, `_save_zero_checkpoint`) and utils/zero_to_fp32.py.
"""

import math
from typing import Any

from hookscope.checkpoints.nested import TensorLike
from hookscope.checkpoints.unpickler import StandIn
from hookscope.text import are, counted

_CONSOLIDATE = (
    "put the parts together with DeepSpeed's `python zero_to_fp32.py CHECKPOINT_FOLDER OUTPUT_FOLDER`, and give what "
    "it writes"
)


def part_of_zero(content: object) -> str:
    """Return why one process's part of a ZeRO checkpoint cannot be used as weights; "" for any other file.

    ZeRO-3 spreads the parameters over the processes: the file of their names has empty tensors. All stages spread the
    optimiser's state, with the parameters in float32.
    """
    if not isinstance(content, dict) or "ds_version" not in content:
        return ""
    optimiser = dict.get(content, "optimizer_state_dict")
    if isinstance(optimiser, dict) and "zero_stage" in optimiser:
        stage = _number_text(dict.get(optimiser, "zero_stage"))
        count = _number_text(dict.get(optimiser, "partition_count"))
        whose = f"of {count} processes" if count else "of the processes"
        where = (
            _CONSOLIDATE if stage == "3" else "the weights are in mp_rank_00_model_states.pt beside it; give that file"
        )
        return f"is the optimiser's state of one {whose} of a DeepSpeed ZeRO{stage and f'-{stage}'} checkpoint; {where}"
    empty, total = _empty_count(content)
    if not empty:
        return ""
    return (
        f"is the part of one process of a DeepSpeed ZeRO-3 checkpoint: {empty} of its {counted(total, 'tensor')} "
        f"{are(empty)} empty, and the values are in the files *_optim_states.pt; {_CONSOLIDATE}"
    )


def model_parallel_remark(content: object) -> str:
    """Return a remark about a file that holds the part of one of several model-parallel processes; "" for others."""
    if not isinstance(content, dict) or "ds_version" not in content:
        return ""
    count = dict.get(content, "mp_world_size")
    if type(count) is not int or count < 2:
        return ""
    return f"it holds the weights of one of {count} model-parallel processes of DeepSpeed, each of which has a file"


def _number_text(value: object) -> str:
    """Return a number from 0 to 999,999 as text, also the first of a list, or an enum's; "" for anything else."""
    if type(value) is list and value:  # the list may hold itself
        value = value[0]
    if isinstance(value, StandIn) and len(value.arguments) == 1:
        value = value.arguments[0]
    return str(value) if type(value) is int and 0 <= value < 10**6 else ""


def _empty_count(content: dict[Any, Any]) -> tuple[int, int]:
    module, groups = dict.get(content, "module"), dict.get(content, "param_shapes")
    if not isinstance(module, dict):
        return 0, 0
    sizes: dict[Any, Any] = {}
    for group in groups if isinstance(groups, list | tuple) else [groups]:
        sizes |= dict(dict.items(group)) if isinstance(group, dict) else {}
    tensors = {name: value for name, value in dict.items(module) if isinstance(value, TensorLike)}
    empty = 0
    for name, tensor in tensors.items():
        size = sizes.get(name) if isinstance(name, str) else None
        numbers = [number for number in size if type(number) is int and number >= 0] if isinstance(size, tuple) else [0]
        empty += 0 in tuple(tensor.shape) and math.prod(numbers) > 0
    return empty, len(tensors)
