"""From feature maps through a grid's file to the page: every value arrives where it belongs."""

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from hookscope.reporting.grids import draw_for_run, draw_grid, encode_png
from hookscope.reporting.html.pictures import Fidelity, Picture, shrink
from hookscope.reporting.palettes import ALL_ZERO, NON_FINITE
from hookscope.results.activations import FeatureMaps
from hookscope.results.runs.reading import read_run
from tests.reporting.stored import picture_png, report_html, row, write_run

Arrangement = Literal["maps", "frames", "tokens", "vector"]


def feature_maps(
    values: NDArray[np.float32], arrangement: Arrangement = "maps", extra: NDArray[np.float32] | None = None
) -> FeatureMaps:
    return FeatureMaps(0, "layer", "Conv2d", 0, arrangement, values, extra, len(values), values.shape)


def on_the_page(maps: FeatureMaps, **options: Any) -> Picture:
    image, grid = draw_for_run(maps, "grid.png", **options)
    picture = shrink(encode_png(image), grid, Fidelity())
    assert picture is not None
    return picture


def tiles_of(picture: Picture) -> NDArray[np.uint8]:
    """Return palette indices, (C, H, W)."""
    with Image.open(io.BytesIO(picture.png)) as image:
        canvas = np.asarray(image)
    height, width = picture.height, picture.width
    return np.stack(
        [
            canvas[top : top + height, left : left + width]
            for channel in range(picture.count)
            for top, left in [(channel // picture.columns * height, channel % picture.columns * width)]
        ]
    )


def levels(*shape: int) -> NDArray[np.float32]:
    """Return whole numbers from 0 to 240, both in every channel: each is its own level of the colour map."""
    values = np.random.default_rng(0).integers(0, 241, shape).astype(np.float32)
    flat = values.reshape(shape[0], -1)
    flat[:, 0], flat[:, -1] = 240, 0
    return values


@pytest.mark.parametrize("shape", [(1, 7, 7), (3, 224, 224), (64, 56, 56), (37, 5, 90), (130, 1, 40), (512, 2, 2)])
def test_every_value_of_every_channel_arrives(shape: tuple[int, int, int]) -> None:
    values = levels(*shape)
    assert np.array_equal(tiles_of(on_the_page(feature_maps(values))), values)


def test_frames_lie_side_by_side_without_what_parts_them() -> None:
    values = levels(6, 4, 9, 11)  # (C, T, H, W)
    picture = on_the_page(feature_maps(values, "frames"))
    assert picture.frames == 4
    assert np.array_equal(tiles_of(picture), np.concatenate(list(values.transpose(1, 0, 2, 3)), axis=2))


@pytest.mark.parametrize(("arrangement", "under"), [("maps", "inputs/000.png"), ("frames", "")])
def test_one_picture_of_the_input_lies_under_one_map_not_under_many_frames(
    tmp_path: Path, arrangement: Arrangement, under: str
) -> None:
    shape = (2, 4, 9, 11) if arrangement == "frames" else (2, 9, 11)
    image, grid = draw_for_run(feature_maps(levels(*shape), arrangement), "")
    grids = {"grid.png": (encode_png(image), grid)}
    run = write_run(tmp_path / "run", [row(0, "layer")], grids=grids, thumbnails=[picture_png()])
    assert f'data-input="{under}"' in report_html(read_run(run))


@pytest.mark.parametrize(("apart", "said"), [(1, "1 token apart"), (2, "2 tokens apart"), (0, "")])
def test_tokens_on_their_grid_arrive_and_those_apart_are_said_to_be_left_out(apart: int, said: str) -> None:
    values = levels(20, 14, 14)
    extra = np.full((apart, 20), 100, np.float32)
    picture = on_the_page(replace(feature_maps(values, "tokens", extra), shape=(196 + apart, 20)))
    assert np.array_equal(tiles_of(picture), values)
    notes = [part for part in picture.caption if "apart" in part]
    assert notes == ([f"not here but in the run's own grid: {said}, such as a class token"] if said else [])


def test_a_vector_arrives_as_cells() -> None:
    values = np.arange(241, dtype=np.float32)
    picture = on_the_page(feature_maps(values, "vector"))
    assert (picture.height, picture.width, picture.count) == (1, 1, 241)
    assert tiles_of(picture).ravel().tolist() == list(range(241))


def test_averaged_maps_arrive_as_they_are_drawn() -> None:
    values = np.full((2, 1, 40_000), 240, np.float32)  # too long for a canvas
    values[:, :, :20_000] = 0
    tiles = tiles_of(on_the_page(feature_maps(values)))
    assert tiles.shape[2] < 40_000
    assert set(tiles[:, :, : tiles.shape[2] // 2 - 1].ravel().tolist()) == {0}
    assert set(tiles[:, :, tiles.shape[2] // 2 + 1 :].ravel().tolist()) == {240}


def test_what_is_not_finite_and_what_is_all_zero_stays_marked() -> None:
    values = levels(4, 6, 6)
    values[1, 2, 3], values[2] = np.nan, 0
    tiles = tiles_of(on_the_page(feature_maps(values)))
    assert tiles[1, 2, 3] == NON_FINITE
    assert (tiles[2] == ALL_ZERO).all()


def test_the_caption_and_the_ends_of_the_colour_bar_come_along() -> None:
    picture = on_the_page(feature_maps(levels(3, 8, 8)), input_name="cat.jpg", scale="layer")
    assert picture.bar == ("0", "240")
    assert {"cat.jpg", "values 0 to 240", "one scale for all"} <= set(picture.caption)
    assert "64 channels" in on_the_page(feature_maps(levels(64, 8, 8))).caption
    with Image.open(io.BytesIO(encode_png(draw_grid(feature_maps(levels(3, 8, 8)), cmap="gray")))) as image:
        assert (image.getpalette() or [])[:3] == [0, 0, 0]
    colours = on_the_page(feature_maps(levels(3, 8, 8)), cmap="gray").colours
    with Image.open(io.BytesIO(base64.b64decode(colours.partition(",")[2]))) as line:
        assert [line.getpixel((at, 0)) for at in (0, line.width - 1)] == [(0, 0, 0), (255, 255, 255)]
