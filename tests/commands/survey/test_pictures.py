"""What excites a channel is shown as the network saw it, wherever the input came from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import hookscope

UNPREPARED = {"resize": "none", "crop": "none", "mean": "none", "std": "none"}


@pytest.mark.parametrize("source", ["folder", "opened", "decoded", "tensor", "file of arguments"])
def test_every_listed_input_is_found_again(tmp_path: Path, source: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    (tmp_path / "data").mkdir()
    paths = [tmp_path / "data" / f"{number}.png" for number in range(4)]
    for path, picture in zip(paths, pixels, strict=True):
        Image.fromarray(picture).save(path)
    tensor = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    torch.save((tensor,), tmp_path / "arguments.pt")
    inputs: dict[str, Any] = {
        "folder": tmp_path / "data",
        "tensor": tensor,
        "file of arguments": tmp_path / "arguments.pt",
    }
    inputs["decoded"] = [Image.fromarray(picture) for picture in pixels]
    if source == "opened":
        inputs["opened"] = [Image.open(path) for path in paths]
        for picture in inputs["opened"]:
            picture.load()  # which closes the file
    network = nn.Sequential(nn.Conv2d(3, 1, 3), nn.AdaptiveAvgPool2d(1))  # the second has no receptive field
    survey = hookscope.survey(network, inputs[source], **UNPREPARED)  # type: ignore[arg-type]
    assert survey.pictures is not None
    names = [survey.names[number] for number in range(4)]
    survey.save(tmp_path / "run")
    pictures = dict(survey.pictures(names))
    for name, picture in zip(names, pixels, strict=True):
        np.testing.assert_array_equal(pictures[name], picture)


def test_pictures_in_memory_are_found_again_after_a_file_with_several_inputs(tmp_path: Path) -> None:
    torch.save(torch.rand(3, 3, 8, 8), tmp_path / "three.pt")
    pictures = [Image.new("RGB", (8, 8), (shade,) * 3) for shade in (10, 20, 30)]
    survey = hookscope.survey(nn.Conv2d(3, 1, 3), [tmp_path / "three.pt", *pictures], **UNPREPARED)  # type: ignore[arg-type]
    assert survey.pictures is not None
    shades = {name: shown.mean() for name, shown in survey.pictures([*survey.names.values()]) if "three" not in name}
    assert shades == {"picture[0]": 10, "picture[1]": 20, "picture[2]": 30}


@pytest.mark.parametrize("fault", ["closed", "cut short"])
def test_an_opened_picture_that_cannot_be_read_is_left_out(tmp_path: Path, fault: str) -> None:
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for path in paths:
        Image.effect_noise((16, 16), 50).convert("RGB").save(path)
    if fault == "cut short":
        paths[0].write_bytes(paths[0].read_bytes()[:200])
    pictures = [Image.open(path) for path in paths]
    if fault == "closed":
        pictures[0].close()
    survey = hookscope.survey(nn.Conv2d(3, 1, 3), pictures, **UNPREPARED)  # type: ignore[arg-type]
    for picture in pictures:
        picture.close()
    assert survey.input_count == 1
    assert "Cannot read" in survey.unusable[0].message
