"""Load a checkpoint's network, run it, and measure everything that the rules of `hookscope check` look at.

`prepare` loads, `measure` measures; `measure_layers` runs the same inputs again to draw a few layers; `measure_file`
looks at a weights file without its network, `measure_state` at a state dict.
"""

from hookscope.commands.check.measuring.file_alone import (
    STATE_DICT,
    measure_file,
    measure_read,
    measure_state,
    read_file_alone,
)
from hookscope.commands.check.measuring.network_passes import measure, measure_layers
from hookscope.commands.check.measuring.preparing import Prepared, prepare

__all__ = [
    "STATE_DICT",
    "Prepared",
    "measure",
    "measure_file",
    "measure_layers",
    "measure_read",
    "measure_state",
    "prepare",
    "read_file_alone",
]
