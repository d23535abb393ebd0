"""A folder of pictures is one clip for networks that take clips."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import hookscope
from hookscope.errors import ImageError

# Pixels as they are, from 0 to 1.
AS_THEY_ARE = {"resize": "none", "crop": "none", "mean": "none", "std": "none"}


class Moving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.conv, self.head = nn.Conv3d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, clip: Tensor) -> Tensor:  # (N, C, T, H, W)
        scores: Tensor = self.head(self.conv(clip).mean((2, 3, 4)))
        return scores


def write_frames(folder: Path, count: int, size: tuple[int, int] = (12, 10)) -> Tensor:
    """Write different frames; return them as one clip, (C, T, H, W), 0 to 1."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(count)
    frames = random.integers(0, 256, (count, size[1], size[0], 3), np.uint8)
    for number, frame in enumerate(frames):
        Image.fromarray(frame).save(folder / f"{number}.png")  # "10.png" comes after "9.png"
    return torch.from_numpy(frames).permute(3, 0, 1, 2) / 255


def test_a_folder_is_one_clip_with_the_numbers_of_plain_pytorch(tmp_path: Path) -> None:
    clip, model = write_frames(tmp_path / "walk", 11), Moving().eval()
    run = hookscope.activations(model, str(tmp_path / "walk"), **AS_THEY_ARE, layer="*")
    assert run["conv"].shape == (1, 4, 9, 8, 10)
    assert run["(model)"].l2 == pytest.approx(model(clip[None]).norm().item(), rel=1e-5)
    (record,) = run.inputs
    assert (record.name, record.shape) == (str(tmp_path / "walk"), (3, 11, 10, 12))
    assert "one clip of 11 frames, 0.png to 10.png" in record.steps
    assert "walk: one clip of 11 frames (walk/* for a clip of each picture)" in " ".join(str(run).split())


def test_a_folder_between_the_frames_of_a_clip_does_not_cut_it(tmp_path: Path) -> None:
    outer, inner = write_frames(tmp_path / "walk", 4), write_frames(tmp_path / "walk" / "1", 3)
    run = hookscope.activations(Moving().eval(), str(tmp_path / "walk"), **AS_THEY_ARE, layer="*")
    assert [(record.name, record.shape) for record in run.inputs] == [
        (str(tmp_path / "walk"), tuple(outer.shape)), (str(tmp_path / "walk" / "1"), tuple(inner.shape))
    ]  # fmt: skip


def test_a_frame_that_has_changed_is_measured_again(tmp_path: Path) -> None:
    write_frames(tmp_path / "in" / "walk", 4)
    arguments = {**AS_THEY_ARE, "chunks": tmp_path / "c"}
    hookscope.survey(Moving().eval(), str(tmp_path / "in"), **arguments)
    same = hookscope.survey(Moving().eval(), str(tmp_path / "in"), **arguments, resume=True)
    Image.new("RGB", (12, 10)).save(tmp_path / "in" / "walk" / "2.png")
    changed = hookscope.survey(Moving().eval(), str(tmp_path / "in"), **arguments, resume=True)
    assert same is not None
    assert changed is not None
    assert (same.resumed_count, changed.resumed_count) == (1, 0)


@pytest.mark.exhaustive
def test_each_folder_in_a_folder_is_a_clip(tmp_path: Path) -> None:
    first, second = write_frames(tmp_path / "in" / "a", 4), write_frames(tmp_path / "in" / "b", 5)
    folder, model = str(tmp_path / "in"), Moving().eval()
    expected = torch.cat([model(first[None]), model(second[None])])
    run = hookscope.activations(model, folder, **AS_THEY_ARE, layer="*")
    assert [tensor.shape for tensor in run.inputs] == [(3, 4, 10, 12), (3, 5, 10, 12)]
    assert run["(model)"].l2 == pytest.approx(expected.norm().item(), rel=1e-5)
    assert "2 inputs, folders as clips" in str(run)
    gradients = hookscope.grads(model, folder, **AS_THEY_ARE, loss="sum")
    assert [tensor.shape for tensor in gradients.inputs] == [tensor.shape for tensor in run.inputs]
    report = hookscope.check(model, images=folder, **AS_THEY_ARE)
    assert (report.error, [tensor.shape for tensor in report.inputs]) == ("", [(3, 4, 10, 12), (3, 5, 10, 12)])
    compared = hookscope.diff(model, model, folder, **AS_THEY_ARE)
    assert len(compared.inputs) == 2


def test_frames_of_different_sizes_are_refused_with_the_option_that_helps(tmp_path: Path) -> None:
    write_frames(tmp_path / "walk", 2)
    Image.new("RGB", (14, 10)).save(tmp_path / "walk" / "9.png")
    with pytest.raises(ImageError, match=r"its frames become 10x12 and 10x14 .*Give `resize`") as raised:
        hookscope.activations(Moving(), str(tmp_path / "walk"), **AS_THEY_ARE)
    assert len(str(raised.value).splitlines()) == 1


def test_a_network_of_pictures_takes_each_picture(tmp_path: Path) -> None:
    write_frames(tmp_path / "walk", 3)
    run = hookscope.activations(nn.Conv2d(3, 2, 3), str(tmp_path / "walk"), **AS_THEY_ARE)
    assert len(run.inputs) == 3
