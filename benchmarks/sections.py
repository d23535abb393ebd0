"""The sections there are, in the order in which they are measured, each apart: to add one is to add an entry."""

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import (
    activations,
    attention,
    attribution,
    checkpoints,
    cost,
    difference,
    gradients,
    memory,
    page,
    processes,
    rendering,
    survey,
    training,
)
from benchmarks.findings import Section

THREADS = 2  # the design's, so that figures of different machines can be compared

SECTIONS: dict[str, dict[str, Callable[[], Section]]] = {
    "cpu": {
        "activations": activations.measure,
        "grads": gradients.measure,
        "attention": attention.measure,
        "attribute": attribution.measure,
        "diff": difference.measure,
        "survey": survey.measure,
        "memory": memory.measure,
        "training": training.measure,
        "training on two processes": training.measure_two_processes,
        "training, steps not watched": training.measure_off_step,
        "training, start": training.measure_start,
        "commands": processes.measure_commands,
        "check": processes.measure_check,
        "checkpoint": checkpoints.measure,
        "cost": cost.measure,
        "rendering": rendering.measure,
        "page": page.measure,
        "start-up": processes.measure_start_up,
    },
    "cuda": {
        "activations": partial(activations.measure, "cuda"),
        "grads": partial(gradients.measure, "cuda"),
    },
}


def measure_apart(device: str, name: str) -> Section:
    """Measure a section in a separate process.

    It is no worker process: torchlens refuses to run in one, and a DataLoader's own workers start otherwise there.

    Raises:
        subprocess.CalledProcessError: If it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "section")
        command = [sys.executable, "-m", "benchmarks.children.section", device, name, str(path)]
        subprocess.run(command, cwd=processes.ROOT, check=True)
        section = pickle.loads(path.read_bytes())
        assert isinstance(section, Section)
        return section
