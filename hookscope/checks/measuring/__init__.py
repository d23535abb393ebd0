"""Load a checkpoint's network, run it, and measure everything that the rules of `hookscope check` look at.

`prepare` loads, `measure` measures; `measure_layers` runs the same inputs again to draw a few layers.
"""

from hookscope.checks.measuring.measuring import measure, measure_layers
from hookscope.checks.measuring.preparing import Prepared, prepare

__all__ = ["Prepared", "measure", "measure_layers", "prepare"]
