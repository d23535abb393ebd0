"""Checksums of a weights file, compared by several threads at once."""

import zipfile
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch

from hookscope.checkpoints.fileformat import check_checksums, open_regular
from hookscope.errors import CheckpointError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save({f"weight{number}": torch.arange(1000.0) + number for number in range(60)}, tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


def test_an_intact_file_is_intact_each_time(saved: Path) -> None:
    for _ in range(20):
        check_checksums(partial(open_regular, saved), "weights.pt")


def test_each_damaged_member_is_found(saved: Path) -> None:
    intact = saved.read_bytes()
    for number in range(0, 60, 10):
        value = (torch.arange(1000.0) + number).numpy().tobytes()
        at = intact.index(value) + 2000
        damaged = intact[:at] + bytes([intact[at] ^ 1]) + intact[at + 1 :]
        with pytest.raises(CheckpointError, match=rf"its member weights/data/{number} is not intact"):
            check_checksums(partial(BytesIO, damaged), "weights.pt")


METHODS = {"deflate": zipfile.ZIP_DEFLATED, "bzip2": zipfile.ZIP_BZIP2, "LZMA": zipfile.ZIP_LZMA}


@pytest.mark.parametrize("method", METHODS)
def test_a_compressed_member_damaged_anywhere_is_named_or_reads_as_before(method: str) -> None:
    packed = BytesIO()
    content = bytes(np.random.default_rng(0).integers(0, 50, 3000, np.uint8))
    with zipfile.ZipFile(packed, "w", METHODS[method]) as archive:
        archive.writestr("code.py", content)
    intact = packed.getvalue()
    check_checksums(partial(BytesIO, intact), "script.pt")
    begin, end = intact.index(b"code.py") + 7, intact.index(b"PK\x01\x02")
    refused = 0
    for at in range(begin, end, 20):
        damaged = intact[:at] + bytes([intact[at] ^ 0x11]) + intact[at + 1 :]
        said = ""
        try:
            check_checksums(partial(BytesIO, damaged), "script.pt")
        except CheckpointError as error:
            said = str(error)
        if said:
            assert said.startswith("script.pt is damaged or truncated: its member code.py is not intact")
            refused += 1
        else:  # bits that a decompressor ignores
            with zipfile.ZipFile(BytesIO(damaged)) as archive:
                assert archive.read("code.py") == content
    assert refused > (end - begin) / 20 * 0.9
