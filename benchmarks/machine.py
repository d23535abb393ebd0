"""Say what machine this is, and which versions are installed."""

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.findings import Machine

PEERS = (
    *("captum", "grad-cam", "nnsight", "pytest-torch", "timm", "torch-module-monitor", "torchcam", "torchextractor"),
    *("torchinfo", "torchlens", "transformers", "wandb"),
)
_STANDS_ON = ("hookscope", "torch", "torchvision", "numpy", "matplotlib", "safetensors")


def describe(device: str) -> Machine:
    """Describe this machine with torch's threads as they are set."""
    versions = {}
    for package in (*_STANDS_ON, *PEERS):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return Machine(
        _processor(),
        os.cpu_count() or 1,
        torch.get_num_threads(),
        device,
        torch.cuda.get_device_name() if device == "cuda" else "",
        f"{platform.system()} {platform.machine()}",
        platform.python_version(),
        versions,
    )


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
