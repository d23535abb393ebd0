"""Load a checkpoint's network, run it, and measure everything that the rules of `hookscope check` look at."""
