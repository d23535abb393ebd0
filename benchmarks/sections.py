"""The sections there are, in the order in which they are measured, each apart: to add one is to add an entry."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context, set_start_method

import torch

from benchmarks import capture, checkpoints, gradients, growth, memory, page, processes, rendering, throughput
from benchmarks.findings import Section

THREADS = 2  # the design's, so that figures of different machines can be compared

SECTIONS: dict[str, dict[str, Callable[[], Section]]] = {
    "cpu": {
        "capture": partial(capture.measure, "cpu"),
        "gradients": partial(gradients.measure, "cpu"),
        "rendering": rendering.measure,
        "start-up": processes.measure_start_up,
        "whole command": processes.measure_whole_command,
        "check": processes.measure_check,
        "memory": memory.measure,
        "gradient memory": memory.measure_gradients,
        "checkpoint": checkpoints.measure,
        "growth": growth.measure,
        "throughput": throughput.measure,
        "page": page.measure,
    },
    "cuda": {
        "capture": partial(capture.measure, "cuda"),
        "gradients": partial(gradients.measure, "cuda"),
    },
}


def measure_apart(measure: Callable[[], Section]) -> Section:
    """Measure a section in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn"), _settle) as process:
        return process.submit(measure).result()


def _settle() -> None:
    """Have the process compute with as many threads everywhere, without TF32, and start its own as any other does."""
    set_start_method(None, force=True)  # it was spawned, and would spawn a DataLoader's workers
    torch.set_num_threads(THREADS)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
