"""Read a recording into a waveform; soundfile decodes it, and soxr changes its sampling rate."""

from importlib import import_module
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from hookscope.errors import ImageError, UsageError
from hookscope.results.inputs import Waveform
from hookscope.text import counted, one_line

_MOST_SAMPLES = 2**28  # 1 GiB of float32: 97 minutes of 44,100 Hz
_LEAST_VARIANCE = 1e-7  # what transformers' Wav2Vec2FeatureExtractor adds to the variance


def is_recording(head: bytes) -> bool:
    """Tell whether a file begins as WAV or FLAC does."""
    return (head.startswith((b"RIFF", b"RF64")) and head[8:12] == b"WAVE") or head.startswith(b"fLaC")


def read_recording(file: BinaryIO, name: str, waveform: Waveform | None, steps: list[str]) -> tuple[torch.Tensor, int]:
    """Return a recording as float32, (C, L) or (L,) as `waveform` has it, and its sampling rate in Hz.

    `steps` gets a sentence for each thing done. Samples of whole numbers are scaled to -1 to 1. Raises ImageError if it
    is damaged, empty or too long, or has more or fewer channels than the network takes; UsageError if a package is
    missing.
    """
    samples, rate = _decoded(file, name)  # (L, C)
    channels = samples.shape[1]
    steps.append(f"{rate:,} Hz, {counted(channels, 'channel')}, {len(samples) / rate:.4g} s")
    if waveform is None:
        steps.append("sampling rate kept: the network's is not known")
        return torch.from_numpy(np.ascontiguousarray(samples.T)), rate
    if waveform.channels in (None, 1) and channels > 1:
        samples = samples.mean(1, keepdims=True, dtype=np.float64).astype(np.float32)
        steps.append(f"{channels} channels averaged to one")
    elif waveform.channels not in (None, channels):
        raise ImageError(
            f"Cannot use {name}: it has {counted(channels, 'channel')}, and the network takes {waveform.channels}."
        )
    if waveform.sampling_rate is None:
        steps.append("sampling rate kept: the network's is not known")
    elif waveform.sampling_rate != rate:
        samples = _resampled(samples, rate, waveform.sampling_rate, name)
        steps.append(f"resampled from {rate:,} to {waveform.sampling_rate:,} Hz (soxr)")
        rate = waveform.sampling_rate
    if waveform.is_normalised:
        wide = samples.astype(np.float64)
        samples = ((wide - wide.mean(0)) / np.sqrt(wide.var(0) + _LEAST_VARIANCE)).astype(np.float32)
        steps.append("normalised to mean 0 and variance 1")
    values = torch.from_numpy(np.ascontiguousarray(samples.T))
    return values[0] if waveform.channels is None else values, rate


def _decoded(file: BinaryIO, name: str) -> tuple[NDArray[np.float32], int]:
    soundfile = _package("soundfile", name)
    try:
        with soundfile.SoundFile(file) as sound:
            if sound.frames * sound.channels > _MOST_SAMPLES:
                raise ImageError(f"Cannot read {name}: over the limit of {_MOST_SAMPLES} samples. Cut it into parts.")
            samples, rate = sound.read(dtype="float32", always_2d=True), int(sound.samplerate)
    except (soundfile.SoundFileError, ValueError, RuntimeError, MemoryError) as error:
        raise ImageError(f"Cannot read {name}: not a recording, or damaged ({one_line(error)}).") from error
    if not len(samples) or rate < 1:
        raise ImageError(f"Cannot read {name}: it holds no sample.")
    return samples, rate


def _resampled(samples: NDArray[np.float32], rate: int, wanted: int, name: str) -> NDArray[np.float32]:
    resampled = _package("soxr", name).resample(samples, rate, wanted)
    if not len(resampled):
        raise ImageError(f"Cannot use {name}: at {wanted:,} Hz no sample is left. Give a longer recording.")
    return np.asarray(resampled, np.float32)


def _package(package: str, name: str) -> Any:
    try:
        return import_module(package)
    except (ImportError, OSError) as error:  # soundfile raises OSError where its library is missing
        raise UsageError(f"{name} is a recording, which needs more packages: pip install 'hookscope[audio]'") from error
