"""Compare two networks one way in a process of its own; print by how many bytes memory grew.

`python -m benchmarks.children.two_networks WAY`: a way of `difference.WAYS`, or "two plain passes".
"""

import json
import sys

import torch

from benchmarks.children.memory import forget_peak, map_blocks, peak_bytes
from benchmarks.difference import WAYS, pair


def main() -> None:
    """Run once to load what is loaded then, run again, and print."""
    (way,) = sys.argv[1:]
    torch.set_num_threads(2)
    map_blocks()
    model, other, picture = pair(differ=True)

    def passes() -> None:
        with torch.no_grad():
            model(picture)
            other(picture)

    run = WAYS[way](model, other, picture) if way in WAYS else passes
    run()
    before = forget_peak()
    run()
    print(json.dumps({"growth_bytes": peak_bytes() - before}))


if __name__ == "__main__":
    main()
