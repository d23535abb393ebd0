"""Pictures per second over a folder, beside a loop over torch's DataLoader that does nothing else."""

import os
import tempfile
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models import ResNet34_Weights

from benchmarks.comparing import Budget, Ready, over_first, timeable
from benchmarks.findings import Measurement, Section, Work
from benchmarks.networks import seeded
from benchmarks.timing import interleaved
from hookscope.inputs import find_inputs, load_batches, to_device
from hookscope.inspection.forward import inspect
from hookscope.results.inputs import Preprocessing

SAMPLES = Path(__file__).parent.parent / "sample_images"
_SIZE = (1500, 1000)  # of a photograph, width and height
WORKERS = min(4, os.cpu_count() or 1)  # as many threads as hookscope reads with
_LIGHT = "layer4"
# (network, pictures at a time, pictures in all)
_SUBJECTS = (("resnet18", 8, 96), ("resnet34", 8, 96), ("resnet18", 32, 96))
_ROUNDS = 5
_BUDGET: dict[str, Budget] = {"hookscope": (1.10, None)}
_PREPROCESSING = Preprocessing(resize=256)  # the rest is what torchvision's weights ask for

_NOTE = f"""\
A folder of JPEG photographs of {_SIZE[0]} × {_SIZE[1]} pixels, resized to 256, cropped to 224 and normalised. The loop
has {WORKERS} worker processes, as many as hookscope has reading threads, torchvision's transforms and a plain forward;
its workers are started in each round, as a run over a folder starts them. Both give the network the same values, bit
for bit. "hookscope" takes statistics of every module call, "hookscope, {_LIGHT}" of one block's output."""


class _Photographs(Dataset[Tensor]):
    """Files as torchvision's documentation reads them."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self.prepare = ResNet34_Weights.IMAGENET1K_V1.transforms()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        with Image.open(self.paths[index]) as picture:
            prepared: Tensor = self.prepare(picture.convert("RGB"))
        return prepared


def write_photographs(folder: Path, count: int) -> None:
    """Write JPEG photographs, each another part of a sample, enlarged."""
    samples = sorted(SAMPLES.glob("*.jpg"))
    for index in range(count):
        with Image.open(samples[index % len(samples)]) as sample:
            share = 1 - 0.3 * index / count
            box = (0, 0, sample.width * share, sample.height * share)
            enlarged = sample.convert("RGB").resize(_SIZE, Image.Resampling.BICUBIC, box)
            enlarged.save(folder / f"{index}.jpg", quality=90)


def measure(device: str = "cpu") -> Section:
    """Measure every subject; pictures are read and prepared on the CPU, and the network is on `device`."""
    with tempfile.TemporaryDirectory() as name:
        write_photographs(Path(name), max(count for *_, count in _SUBJECTS))
        paths = find_inputs([name])
        measurements = [each for subject in _SUBJECTS for each in _measure_subject(*subject, paths, device)]
    return Section("Pictures per second over a folder", _NOTE, tuple(measurements))


def _measure_subject(network: str, batch_size: int, count: int, paths: list[Path], device: str) -> list[Measurement]:
    model, _ = seeded(network, device)
    chosen = paths[:count]
    work = same_inputs(chosen, batch_size)
    ways = {
        f"DataLoader, {WORKERS} workers": Ready(None, lambda: bare_loop(model, chosen, batch_size, WORKERS), _ROUNDS),
        "DataLoader, no workers": Ready(None, lambda: bare_loop(model, chosen, batch_size, 0), _ROUNDS),
        f"hookscope, {_LIGHT}": Ready(work, lambda: inspected(model, chosen, batch_size, [_LIGHT]), _ROUNDS),
        "hookscope": Ready(work, lambda: inspected(model, chosen, batch_size, ["*"]), _ROUNDS),
    }
    subject = f"{network}, {count} pictures, {batch_size} at a time"
    return over_first(subject, ways, interleaved(*timeable(ways)), _BUDGET)


def bare_loop(model: nn.Module, paths: list[Path], batch_size: int, workers: int) -> None:
    """Run a network over files as a script would."""
    device = next(model.parameters()).device
    with torch.no_grad():
        for batch in batches_of(paths, batch_size, workers, pin_memory=device.type == "cuda"):
            output = model(batch.to(device, non_blocking=True))
    output.cpu()  # wait for an accelerator


def batches_of(paths: list[Path], batch_size: int, workers: int = 0, *, pin_memory: bool = False) -> DataLoader[Tensor]:
    """Return what reads files as torchvision's documentation does, (N, 3, 224, 224)."""
    return DataLoader(_Photographs(paths), batch_size, num_workers=workers, pin_memory=pin_memory)


def inspected(model: nn.Module, paths: list[Path], batch_size: int, layers: list[str]) -> None:
    """Run it over them with statistics of its layers."""
    device = next(model.parameters()).device
    batches = load_batches(paths, _PREPROCESSING, batch_size)
    inspect(model, (to_device(batch, device, torch.float32) for batch in batches), layers)


def same_inputs(paths: list[Path], batch_size: int) -> Work:
    """Compare what both read, bit for bit."""
    ours = torch.cat([batch.args[0] for batch in load_batches(paths, _PREPROCESSING, batch_size)])
    theirs = torch.cat(list(batches_of(paths, batch_size)))
    wrong = int((ours != theirs).flatten(1).any(1).sum())
    return Work("differs" if wrong else "same", len(paths), wrong)
