"""What a run keeps of its inputs, as pictures: what the network saw."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.conftest import CAT, Run, record_of


@pytest.mark.parametrize("verb", ["activations", "grads"])
def test_a_picture_is_kept_as_the_network_saw_it(run: Run, tmp_path: Path, verb: str) -> None:
    ended = run(verb, "net.py:tiny", CAT, "--resize", "none", "--crop", 64, "--out", "out")
    assert ended.code == 0
    assert record_of(tmp_path / "out")["thumbnails"] == ["inputs/000.png"]
    with Image.open(CAT) as source, Image.open(tmp_path / "out" / "inputs" / "000.png") as kept:
        left, top = round((source.width - 64) / 2), round((source.height - 64) / 2)
        expected = np.asarray(source.convert("RGB").crop((left, top, left + 64, top + 64)))
        assert np.array_equal(np.asarray(kept), expected)
