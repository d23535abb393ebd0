"""Files that tests of inputs write, and what reading them gives."""

import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from hookscope.errors import ImageError
from hookscope.inputs.loading import load_input
from hookscope.results.inputs import Preprocessing

SAMPLES = Path(__file__).parents[2] / "sample_images"

# Nothing but scaling to 0-1.
PLAIN = Preprocessing(resize=None, crop=None, mean=(), std=())
PLAIN_GREY = Preprocessing(channels=1, resize=None, crop=None, mean=(), std=())


def random_pixels(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def save(path: Path, pixels: np.ndarray, **options: object) -> Path:
    Image.fromarray(pixels).save(path, **options)
    return path


def as_input(pixels: np.ndarray, white: float = 255) -> torch.Tensor:
    """Return (H, W, C) pixels as (C, H, W) float32, each value divided in float32."""
    return torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32) / np.float32(white))


def load_steps(path: Path, preprocessing: Preprocessing = PLAIN) -> str:
    return "; ".join(load_input(path, preprocessing)[1].steps)


def failure(path: Path, preprocessing: Preprocessing = PLAIN) -> str:
    with pytest.raises(ImageError) as caught:
        load_input(path, preprocessing)
    message = str(caught.value)
    assert message.isprintable(), "one line, no control characters"
    assert len(message) < 700
    return message


def tiff(values: np.ndarray, bits: int, order: str = "<", photometric: int = 1, sample_format: int = 1) -> bytes:
    """Return an uncompressed one-strip TIFF, written from the TIFF 6.0 specification.

    `values` is (H, W), or (H, W, 2) for greyscale multiplied by the alpha beside it.
    """
    height, width, *samples = values.shape
    if bits == 12:
        rows = ["".join(f"{value:012b}" for value in row) for row in values.tolist()]
        rows = [row.ljust(-(-len(row) // 8) * 8, "0") for row in rows]
        data = b"".join(int(row, 2).to_bytes(len(row) // 8, "big") for row in rows)
    else:
        data = values.astype(values.dtype.newbyteorder(order)).tobytes()
    tags = [
        (256, width),
        (257, height),
        (258, bits),
        (259, 1),
        (262, photometric),
        (273, 8),
        (277, (samples or [1])[0]),
    ]
    tags += [(278, height), (279, len(data))] + ([(338, 1)] if samples else []) + [(339, sample_format)]
    directory = b"".join(struct.pack(order + "HHII", tag, 4, 1, value) for tag, value in tags)
    magic = b"II" if order == "<" else b"MM"
    header = magic + struct.pack(order + "HI", 42, 8 + len(data))
    return header + data + struct.pack(order + "H", len(tags)) + directory + b"\0\0\0\0"


def write_tensor(path: Path, tensor: torch.Tensor) -> Path:
    if path.suffix == ".npy":
        np.save(path, tensor.numpy())
    elif path.suffix == ".safetensors":
        save_file({"anything": tensor}, path)
    else:
        torch.save(tensor, path, _use_new_zipfile_serialization=path.suffix == ".pt")
    return path


def write_all(folder: Path, sizes: list[tuple[int, int]]) -> list[Path]:
    return [save(folder / f"{i}.png", random_pixels(*size, seed=i)) for i, size in enumerate(sizes)]


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("hookscope-reader")]


def join_readers() -> None:
    """Wait until no thread reads; one that does not end fails the test."""
    for reader in readers():
        reader.join(60)
        assert not reader.is_alive()
