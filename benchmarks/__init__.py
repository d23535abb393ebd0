"""Measurements of hookscope's cost, as ratios taken in one run: `python -m benchmarks`."""
