"""The sections there are, in the order in which they are measured: to add one is to add an entry."""

from collections.abc import Callable
from functools import partial

from benchmarks import capture, checkpoints, gradients, growth, memory, page, processes, rendering, throughput
from benchmarks.findings import Section

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
