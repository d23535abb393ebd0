"""`hookscope.survey` over a folder, beside a loop over torch's DataLoader that only runs the network, and torchlens."""

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models import ResNet18_Weights

import hookscope
from benchmarks.activations import plain, wrapped_by_torchlens
from benchmarks.comparing import Ready, over_first, ready, timeable
from benchmarks.findings import Section, Work
from benchmarks.networks import seeded, statistics_of
from benchmarks.same_work import TOLERANCES, judge
from benchmarks.timing import Run, interleaved
from hookscope.inputs.batches import load_batches
from hookscope.inputs.find_files import find_inputs
from hookscope.results.inputs import Preprocessing
from hookscope.results.network import row_label
from hookscope.results.survey import Survey

_SAMPLES = Path(__file__).parents[1] / "sample_images"
_SIZE = (1500, 1000)  # of a photograph, width and height
_WORKERS = min(4, os.cpu_count() or 1)  # as many threads as hookscope reads with
_NETWORK, _COUNT, _BATCH_SIZE, _LAYER = "resnet18", 256, 32, "layer4"
_ROUNDS, _LENS_ROUNDS = 5, 1
_EVERY, _FEATURES = "hookscope, every layer", f"hookscope, features of {_LAYER}"
_WHOLE, _CHANNELS = "torchlens.aggregate, whole outputs", "torchlens.aggregate, mean and std of channels"
_EXTRACTED = f"torchlens.extract_dataset, {_LAYER}"
_LIMITS = {_EVERY: 1.25, _FEATURES: 1.10}

_NOTE = f"""\
JPEG photographs of {_SIZE[0]} × {_SIZE[1]} pixels, resized to 256, cropped to 224 and normalised. The loop reads them
with torchvision's transforms and {_WORKERS} workers, as many as hookscope has reading threads, and runs the network on
the same values, bit for bit. "{_EVERY}" is the default without the self-check: statistics and strongest inputs of every
channel, bins of every layer. torchlens has the same DataLoader and computes less: of "whole outputs" count, mean, std,
minimum and maximum, or, by eleven lines of ours, mean and std of channels. Both rows of {_LAYER} write the same pooled
outputs. The numbers of torchlens are compared with hookscope's."""

Channels = tuple[Tensor, Tensor]
"""Mean and std of the channels of an output, (C,) each."""


class ChannelMoments:
    """Mean and std of channels, axis 1, as `torchlens.aggregate` takes a statistic."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.name: str | None = None
        self.count, self.mean, self.squares = 0, torch.zeros((), dtype=torch.double), torch.zeros(())

    def update(self, value: Tensor) -> None:
        """Merge a batch, (N, C, ...), by the pairwise rule of Chan, Golub and LeVeque (1979)."""
        rows = value.detach().transpose(0, 1).flatten(1)
        std, mean = torch.std_mean(rows, 1, correction=0)
        more, shift = rows.shape[1], mean.double() - self.mean
        total = self.count + more
        self.mean = self.mean + shift * (more / total)
        self.squares = self.squares + std.double() ** 2 * more + shift**2 * (self.count * more / total)
        self.count = total

    def result(self) -> Channels:
        """Return mean and population std."""
        return self.mean, (self.squares / self.count).sqrt()


def measure() -> Section:
    """Measure a survey of every layer and one layer's features, and torchlens at both."""
    model, picture = seeded(_NETWORK)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "photographs")
        folder.mkdir()
        _write_photographs(folder)
        paths = find_inputs([str(folder)])
        written = Path(name, "features.safetensors")
        prepared = partial(hookscope.survey, batch_size=_BATCH_SIZE, workers=_WORKERS, resize=256, crop=224)
        survey = partial(prepared, model, folder, verify=False)
        features = partial(survey, layer=_LAYER, features=written)
        batches = partial(_batches_of, paths, _WORKERS)
        loop = partial(_plain_loop, model, batches)
        loop()
        features()
        actual = survey()
        assert isinstance(actual, Survey)
        same = _same_inputs(paths[:_BATCH_SIZE])
        pooled = load_file(written)[_LAYER]
        lens = Torchlens(deepcopy(model), picture, batches)
        ways = {
            f"DataLoader, {_WORKERS} workers": Ready(None, loop, _ROUNDS),
            _EVERY: Ready(same, survey, _ROUNDS),
            _FEATURES: Ready(same, features, _ROUNDS),
            _WHOLE: ready(_LENS_ROUNDS, partial(lens.whole_outputs, actual)),
            _CHANNELS: ready(_LENS_ROUNDS, partial(lens.channels, actual)),
            _EXTRACTED: ready(_LENS_ROUNDS, partial(lens.features, _LAYER, Path(name), pooled)),
        }
        around = dict.fromkeys((_WHOLE, _CHANNELS, _EXTRACTED), wrapped_by_torchlens)
        seconds = interleaved(*timeable(ways), warm=True, around=around)
    subject = f"{_NETWORK}, {_COUNT} pictures, {_BATCH_SIZE} at a time"
    return Section("hookscope.survey over a folder", _NOTE, tuple(over_first(subject, ways, seconds, _LIMITS)))


class _Photographs(Dataset[Tensor]):
    """Files as torchvision's documentation reads them."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self.prepare = ResNet18_Weights.IMAGENET1K_V1.transforms()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        with Image.open(self.paths[index]) as picture:
            prepared: Tensor = self.prepare(picture.convert("RGB"))
        return prepared


def _write_photographs(folder: Path) -> None:
    """Write JPEG photographs, each another part of a sample, enlarged."""
    samples = sorted(_SAMPLES.glob("*.jpg"))
    for index in range(_COUNT):
        with Image.open(samples[index % len(samples)]) as sample:
            share = 1 - 0.3 * index / _COUNT
            box = (0, 0, sample.width * share, sample.height * share)
            enlarged = sample.convert("RGB").resize(_SIZE, Image.Resampling.BICUBIC, box)
            enlarged.save(folder / f"{index}.jpg", quality=90)


def _batches_of(paths: list[Path], workers: int = 0) -> DataLoader[Tensor]:
    return DataLoader(_Photographs(paths), _BATCH_SIZE, num_workers=workers)


def _plain_loop(model: nn.Module, batches: Callable[[], Iterable[Tensor]]) -> None:
    for batch in batches():
        plain(model, batch)


def _same_inputs(paths: list[Path]) -> Work:
    """Compare what both read, bit for bit."""
    read = load_batches(paths, Preprocessing(resize=256), _BATCH_SIZE)
    ours, theirs = torch.cat([batch.args[0] for batch in read]), torch.cat(list(_batches_of(paths)))
    wrong = int((ours != theirs).flatten(1).any(1).sum())
    return Work("differs" if wrong else "same", len(paths), wrong)


class Torchlens:
    """What torchlens does over batches: each method prepares and runs a way, and judges its numbers."""

    def __init__(self, model: nn.Module, picture: Tensor, batches: Callable[[], Iterable[Tensor]]) -> None:
        """Keep the network, a batch to name its outputs by, and what reads all pictures."""
        self.model, self.picture, self.batches = model, picture, batches

    def whole_outputs(self, expected: Survey) -> tuple[Run, Work]:
        """Its own statistic of all values of an output, at every output of `expected`."""
        run = self._aggregate(expected, import_module("torchlens.stats").Spine)
        with wrapped_by_torchlens():
            actual = run()
        rows = {
            label: (tensor.mean, math.sqrt(tensor.m2 / tensor.count_finite), tensor.finite_min, tensor.finite_max)
            for label, tensor in actual.items()
        }
        return run, judge(rows, statistics_of(expected))

    def channels(self, expected: Survey) -> tuple[Run, Work]:
        """Mean and std of channels, at every output of `expected`."""
        run = self._aggregate(expected, ChannelMoments)
        with wrapped_by_torchlens():
            return run, judge_channels(run(), expected)

    def features(self, layer: str, folder: Path, expected: Tensor) -> tuple[Run, Work]:
        """The pooled outputs of a layer, in files."""
        extract = import_module("torchlens").extract_dataset
        site = self._sites([layer])[layer]

        def run() -> Tensor:
            with tempfile.TemporaryDirectory(dir=folder) as out:
                pictures = chain.from_iterable(self.batches())
                shards = extract(
                    self.model,
                    pictures,
                    {layer: site},
                    _BATCH_SIZE,
                    output_dir=Path(out, "run"),
                    progress=False,
                    pool="spatial_mean",
                )
                return torch.cat([load_file(shard)[layer] for shard in shards])

        with wrapped_by_torchlens():
            actual = run()
        allowed = TOLERANCES["cpu"] * expected.abs().amax()
        wrong = int(((actual - expected).abs() > allowed).any(1).sum())
        return run, Work("differs" if wrong else "same", len(expected), wrong)

    def _aggregate(self, survey: Survey, statistic: Callable[[], object]) -> Callable[[], Mapping[str, Any]]:
        aggregate = import_module("torchlens").aggregate
        sites = self._sites(row.label for row in survey)

        def run() -> Mapping[str, Any]:
            with torch.no_grad():
                actual = aggregate(self.model, self.batches(), {site: statistic() for site in sites.values()})
            return {label: actual[site] for label, site in sites.items()}

        return run

    def _sites(self, labels: Iterable[str]) -> dict[str, str]:
        """Return torchlens' names of outputs: by a module's own name it does not find one that is called twice."""
        with wrapped_by_torchlens(), torch.no_grad():
            log = import_module("torchlens").trace(self.model, self.picture)
            sites = {
                row_label(module_call.address, module_call.call_index - 1, ""): module_call.output_layers[0]
                for module_call in log.module_calls
            }
        return {label: sites[label] for label in labels}


def judge_channels(actual: Mapping[str, Channels], expected: Survey) -> Work:
    """Compare mean and std of all channels of an output, relative to its largest magnitude."""
    wrong = 0
    for row in expected:
        arrays, seen = row.channels.arrays, row.activation
        assert arrays is not None
        allowed = TOLERANCES["cpu"] * max(abs(seen.min or 0.0), abs(seen.max or 0.0))
        both = zip(actual[row.label], (arrays.mean, arrays.std), strict=True)
        wrong += any(((ours - torch.from_numpy(theirs)).abs() > allowed).any() for ours, theirs in both)
    return Work("differs" if wrong else "same", len(expected), wrong)
