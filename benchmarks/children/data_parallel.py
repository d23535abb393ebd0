"""One of two processes that train together, plainly and watched in turns; the first prints both as JSON."""

import json
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.timing import interleaved
from benchmarks.training import COMPARED, ROUNDS, STEPS, Loop, plain, same_weights, watched


def main() -> None:
    """Train with and without a watch on the first process, as `hookscope watch` has it."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    is_first = distributed.get_rank() == 0

    def begin(network: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
        return watched(network, optimizer, every=100) if is_first else plain(network, optimizer)

    loops = {"plain": Loop(plain, DistributedDataParallel), "every=100": Loop(begin, DistributedDataParallel)}
    for loop in loops.values():
        loop.go_on(COMPARED)
    equal = same_weights(*(loop.network for loop in loops.values()))

    def turn(loop: Loop) -> None:
        distributed.barrier()
        loop.go_on(STEPS)

    seconds = interleaved({name: partial(turn, loop) for name, loop in loops.items()}, ROUNDS, warm=True)
    if is_first:
        print(json.dumps({"seconds": seconds, "count": equal.wanted, "differing": equal.wrong}))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
