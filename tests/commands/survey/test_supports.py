"""Where no closed form tells what a position sees, its gradient does: nothing outside the box changes the value."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import hookscope
from hookscope.results.runs.reading import read_run
from hookscope.results.survey import ChannelPlace, Survey, SurveyRow
from tests.commands.survey.colours import write_pictures

SIDE = 32


class Mirrored(nn.Module):
    """Rows are looked up in reverse, which no closed form follows; then a kernel of 3, as before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 5, 3, padding=1)
        self.everywhere = nn.Conv2d(5, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.second(x[:, :, torch.arange(SIDE - 1, -1, -1)])
        return self.everywhere(x - x.mean((2, 3), keepdim=True))


@pytest.fixture(scope="module")
def survey(tmp_path_factory: pytest.TempPathFactory) -> Survey:
    folder = tmp_path_factory.mktemp("colours")
    write_pictures(folder, 4)
    made = hookscope.survey(Mirrored(), folder, resize="none", crop="none", mean="none", std="none", batch_size=4)
    assert made is not None
    return made


def places(row: SurveyRow) -> list[ChannelPlace]:
    return [ChannelPlace(top.input, channel.channel, top.position) for channel in row.channels for top in channel.top]


def test_nothing_outside_the_box_changes_the_value(survey: Survey) -> None:
    row, model = survey["second"], Mirrored().eval()
    assert row.receptive_field is None
    assert survey.supports is not None
    assert survey.pictures is not None
    actual = survey.supports(row, places(row))
    assert {*actual} == {*places(row)}
    pictures = dict(survey.pictures(sorted({each.input for each in actual})))
    seen: list[Tensor] = []
    model.second.register_forward_hook(lambda _module, _args, output: seen.append(output))
    for place, (top, left, bottom, right) in actual.items():
        y, x = place.position
        assert (top, bottom) == (max(0, SIDE - 3 - y), min(SIDE, SIDE + 2 - y))  # 5 rows about the mirrored one
        assert (left, right) == (max(0, x - 2), min(SIDE, x + 3))
        values = torch.from_numpy(pictures[place.input]).permute(2, 0, 1)[None].float() / 255
        other = torch.rand(values.shape)
        outside, inside = other.clone(), values.clone()
        outside[:, :, top:bottom, left:right] = values[:, :, top:bottom, left:right]
        inside[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
        with torch.no_grad():
            model(torch.cat([values, outside, inside]))
        value, same, changed = seen.pop()[:, place.channel, y, x].tolist()
        assert same == pytest.approx(value, abs=1e-6)
        assert changed != pytest.approx(value, abs=1e-3)


def test_where_all_of_the_input_counts_the_crop_is_the_whole_picture(survey: Survey, tmp_path: Path) -> None:
    assert survey.supports is not None
    row = survey["everywhere"]
    assert {*survey.supports(row, places(row)).values()} == {(0, 0, SIDE, SIDE)}
    survey.save(tmp_path / "run")
    is_whole = {survey.rows[sheet.row].label: sheet.is_whole for sheet in read_run(tmp_path / "run").record.crops}
    assert is_whole == {"first": False, "second": False, "everywhere": True}


@pytest.mark.parametrize("kind", ["tensor", "pictures"])
def test_inputs_in_memory_have_boxes_too(kind: str) -> None:
    values = torch.rand(5, 3, SIDE, SIDE)
    pictures = [Image.fromarray((255 * value).permute(1, 2, 0).byte().numpy()) for value in values]
    inputs: Any = {"tensor": values, "pictures": pictures}[kind]
    made = hookscope.survey(Mirrored(), inputs, layer="second", batch_size=2, resize="none", crop="none")
    assert made is not None
    assert made.supports is not None
    [row] = made.rows
    actual = made.supports(row, places(row)[:4])
    assert len(actual) == 4
    assert all(bottom - top <= 5 and right - left <= 5 for top, left, bottom, right in actual.values())


def test_receptive_fields_are_known_where_the_first_chunk_has_no_readable_input(tmp_path: Path) -> None:
    (tmp_path / "0.npy").write_bytes(b"\x93NUMPY, and no more")
    np.save(tmp_path / "1.npy", np.ones((3, 8, 8), np.float32))
    made = hookscope.survey(nn.Conv2d(3, 2, 5), tmp_path, chunk_size=1)
    assert made.rows[0].receptive_field is not None
    assert made.rows[0].receptive_field.size == (5, 5)
