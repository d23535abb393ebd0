"""Load a checkpoint's network, run it, and measure everything that the rules of `hookscope check` look at.

`prepare` loads, `measure` measures; `measure_layers` runs the same inputs again to draw a few layers; `measure_file`
looks at a weights file without its network.
"""

from hookscope.checks.measuring.file_alone import measure_file
from hookscope.checks.measuring.network_passes import measure, measure_layers
from hookscope.checks.measuring.preparing import Prepared, prepare

__all__ = ["Prepared", "measure", "measure_file", "measure_layers", "prepare"]
