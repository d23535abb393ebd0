"""The sections there are, in the order in which they are measured, each apart: to add one is to add an entry."""

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import (
    attention,
    attribution,
    capture,
    checkpoints,
    cost,
    difference,
    gradients,
    growth,
    memory,
    operations,
    page,
    processes,
    public_calls,
    rendering,
    survey,
    throughput,
    training,
)
from benchmarks.findings import Section

THREADS = 2  # the design's, so that figures of different machines can be compared

SECTIONS: dict[str, dict[str, Callable[[], Section]]] = {
    "cpu": {
        "activations": partial(public_calls.measure_activations, keeps_memory=True),
        "grads": partial(public_calls.measure_gradients, keeps_memory=True),
        "attribute, diff and check": public_calls.measure_others,
        "activations, malloc as it is": partial(public_calls.measure_activations, keeps_memory=False),
        "grads, malloc as it is": partial(public_calls.measure_gradients, keeps_memory=False),
        "capture": partial(capture.measure, "cpu"),
        "operations": operations.measure,
        "gradients": partial(gradients.measure, "cpu"),
        "gradients of timm": gradients.measure_timm,
        "attention": attention.measure,
        "attribution": attribution.measure,
        "difference": difference.measure,
        "rendering": rendering.measure,
        "start-up": processes.measure_start_up,
        "whole command": processes.measure_whole_command,
        "whole commands": processes.measure_commands,
        "check": processes.measure_check,
        "memory": memory.measure,
        "gradient memory": memory.measure_gradients,
        "checkpoint": checkpoints.measure,
        "cost": cost.measure,
        "growth": growth.measure,
        "throughput": throughput.measure,
        "survey": survey.measure,
        "page": page.measure,
        "training": training.measure,
        "training, steps not watched": training.measure_off_step,
        "training, start": training.measure_start,
        "training on two processes": training.measure_two_processes,
    },
    "cuda": {
        "activations": partial(public_calls.measure_activations, keeps_memory=True, device="cuda"),
        "grads": partial(public_calls.measure_gradients, keeps_memory=True, device="cuda"),
        "capture": partial(capture.measure, "cuda"),
        "gradients": partial(gradients.measure, "cuda"),
    },
}


def measure_apart(device: str, name: str) -> Section:
    """Measure a section in a separate process.

    It is no worker process: torchlens refuses to run in one, and a DataLoader's own workers start otherwise there.

    Raises:
        subprocess.CalledProcessError: If it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "section")
        command = [sys.executable, "-m", "benchmarks.children.section", device, name, str(found)]
        subprocess.run(command, cwd=processes.ROOT, check=True)
        section = pickle.loads(found.read_bytes())
        assert isinstance(section, Section)
        return section
