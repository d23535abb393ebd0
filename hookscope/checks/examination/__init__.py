"""Load a checkpoint's network, run it, and measure everything that the rules of `hookscope check` look at.

`prepare` loads, `examine` measures; `examine_layers` runs the same inputs again to draw a few layers.
"""

from hookscope.checks.examination.examining import examine, examine_layers
from hookscope.checks.examination.preparing import Prepared, prepare

__all__ = ["Prepared", "examine", "examine_layers", "prepare"]
