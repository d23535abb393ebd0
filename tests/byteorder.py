"""Files as torch.save writes them on a machine that stores the most significant byte first."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def save_big_endian(content: Any, path: Path) -> Path:
    """Save a tensor, or dicts of them, with the bytes of each number in the other order, and say so in the file."""

    def swapped(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: swapped(each) for key, each in value.items()}
        if not isinstance(value, Tensor):
            return value
        width = value.element_size() // (2 if value.is_complex() else 1)
        numbers = value.detach().contiguous().view(-1).view(torch.uint8).reshape(-1, width)
        return numbers.flip(1).reshape(-1).view(value.dtype).reshape(value.shape)

    assert sys.byteorder == "little"
    with mock.patch.object(sys, "byteorder", "big"):
        torch.save(swapped(content), path)
    return path
