import itertools
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw

from hookscope.errors import UsageError
from hookscope.reporting import grid_layout, grids, lettering, palettes
from hookscope.reporting.grids import draw_grid, encode_png, grid_name
from hookscope.results.activations import FeatureMaps

MAGENTA = (255, 0, 255)
GREY = (120, 124, 130)


def feature_maps(values: Any, arrangement: Any = "maps", **changes: Any) -> FeatureMaps:
    array = np.asarray(values, np.float32)
    given_fields = {
        "row": 7,
        "label": "layer1.0.conv2",
        "kind": "Conv2d",
        "input_index": 0,
        "arrangement": arrangement,
        "values": array,
        "extra_tokens": None,
        "channel_count": len(array),
        "shape": array.shape,
    }
    return FeatureMaps(**(given_fields | changes))


def pictures(image: Image.Image) -> list[NDArray[np.uint8]]:
    """Return the coloured parts of a picture from top to bottom, cut close: grid, strips, legend."""
    pixels = np.asarray(image)
    coloured = pixels <= palettes.ALL_ZERO
    rows = np.flatnonzero(coloured.any(axis=1))
    parts = []
    for part in np.split(rows, np.flatnonzero(np.diff(rows) > 8) + 1) if len(rows) else []:
        block = pixels[part[0] : part[-1] + 1]
        columns = np.flatnonzero((block <= palettes.ALL_ZERO).any(axis=0))
        parts.append(block[:, columns[0] : columns[-1] + 1])
    return parts


def enlarged(indices: ArrayLike, factor: int) -> NDArray[np.uint8]:
    return np.asarray(indices, np.uint8).repeat(factor, axis=0).repeat(factor, axis=1)


def palette_colours(image: Image.Image) -> NDArray[np.uint8]:
    palette = image.getpalette()
    assert palette is not None
    return np.array(palette, np.uint8).reshape(-1, 3)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every piece of text that gets drawn."""
    texts: list[str] = []
    write_lines = lettering.write_lines

    def recording(pen: ImageDraw.ImageDraw, lines: list[list[str]], *rest: Any) -> None:
        texts.extend(itertools.chain.from_iterable(lines))
        write_lines(pen, lines, *rest)

    monkeypatch.setattr(grids, "write_lines", recording)
    monkeypatch.setattr(lettering, "write_lines", recording)
    return texts


def drawn(text: str) -> NDArray[np.uint8]:
    """Return a line of text, light on black."""
    image = Image.new("L", (lettering.text_width([text], 20), lettering.line_height(20)))
    lettering.write_lines(ImageDraw.Draw(image), [[text]], 20, 255, 0, 1)
    return np.asarray(image)


# Two channels of 2 x 2: largest magnitudes 1 and 4.
SIGNED = np.array([[[-1, 0], [0.5, 1]], [[-4, -2], [2, 4]]])


def test_each_channel_of_a_signed_map_spans_the_palette_around_its_middle() -> None:
    # 80 pixels per value: 160 is the largest tile. Index 120 + 120 * value / maximum.
    (grid, _) = pictures(draw_grid(feature_maps(SIGNED)))
    assert grid.shape == (160, 160 + 2 + 160)
    np.testing.assert_array_equal(grid[:, :160], enlarged([[0, 120], [180, 240]], 80))
    np.testing.assert_array_equal(grid[:, 162:], enlarged([[0, 60], [180, 240]], 80))
    assert (grid[:, 160:162] == palettes.BACKGROUND).all()


def test_layer_scale_uses_one_range_for_all_channels() -> None:
    (grid, _) = pictures(draw_grid(feature_maps(SIGNED), scale="layer"))
    np.testing.assert_array_equal(grid[:, :160], enlarged([[90, 120], [135, 150]], 80))
    np.testing.assert_array_equal(grid[:, 162:], enlarged([[0, 60], [180, 240]], 80))


def test_a_map_without_negative_values_spans_the_palette_from_zero_to_its_maximum() -> None:
    image = draw_grid(feature_maps([[[2, 1], [4, 3]], [[0, 10], [5, 5]]]))
    (grid, _) = pictures(image)
    np.testing.assert_array_equal(grid[:, :160], enlarged([[120, 60], [240, 180]], 80))
    np.testing.assert_array_equal(grid[:, 162:], enlarged([[0, 240], [120, 120]], 80))
    viridis = mpl.colormaps["viridis"]
    expected = [viridis(share, bytes=True)[:3] for share in (0.5, 0.25, 1.0, 0.75)]
    np.testing.assert_array_equal(palette_colours(image)[[120, 60, 240, 180]], expected)


def test_a_diverging_map_has_zero_in_the_middle_of_values_that_are_never_negative() -> None:
    (grid, _) = pictures(draw_grid(feature_maps([[[0, 1], [2, 4]]]), cmap="coolwarm_r"))
    np.testing.assert_array_equal(grid, enlarged([[120, 150], [180, 240]], 80))


def test_a_signed_map_is_centred_in_a_sequential_colour_map_too() -> None:
    image = draw_grid(feature_maps(SIGNED), cmap="gray")
    np.testing.assert_array_equal(pictures(image)[0][:, :160], enlarged([[0, 120], [180, 240]], 80))
    np.testing.assert_array_equal(palette_colours(image)[[0, 240]], [(0, 0, 0), (255, 255, 255)])


@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1.0, 3.4e38])
def test_the_smallest_and_the_largest_magnitudes_span_the_palette(magnitude: float) -> None:
    signed = np.array([[[-magnitude, 0], [0, magnitude]]], np.float32)
    np.testing.assert_array_equal(pictures(draw_grid(feature_maps(signed)))[0], enlarged([[0, 120], [120, 240]], 80))
    positive = np.abs(signed)
    np.testing.assert_array_equal(pictures(draw_grid(feature_maps(positive)))[0], enlarged([[240, 0], [0, 240]], 80))


def test_values_round_to_the_nearest_level() -> None:
    levels = np.arange(241, dtype=np.float32)
    values = np.concatenate([levels, np.minimum(levels + 0.4375, 240), np.maximum(levels - 0.4375, 0)])
    (grid, _) = pictures(draw_grid(feature_maps(values.reshape(1, 3, 241))))
    np.testing.assert_array_equal(grid[::11, :], [levels, levels, levels])


def test_non_finite_values_are_magenta_and_counted_and_do_not_spoil_the_range(written: list[str]) -> None:
    values = [[[np.nan, 1], [-1, 0]], [[np.inf, -np.inf], [2, -2]], [[np.nan] * 2] * 2]
    image = draw_grid(feature_maps(values))
    grid = pictures(image)[0]
    np.testing.assert_array_equal(grid[:, :160], enlarged([[241, 240], [0, 120]], 80))
    np.testing.assert_array_equal(grid[:, 162:322], enlarged([[241, 241], [240, 0]], 80))
    np.testing.assert_array_equal(grid[:, 324:], enlarged([[241, 241], [241, 241]], 80))
    assert tuple(palette_colours(image)[241]) == MAGENTA
    assert "non-finite values in magenta: 7" in written
    assert "values -2 to 2" in written


@pytest.mark.parametrize("name", sorted(mpl.colormaps))
def test_marking_colours_never_occur_in_the_colour_map(name: str) -> None:
    palette, _, _ = palettes.grid_palette(name)
    colours = [tuple(colour) for colour in np.frombuffer(palette, np.uint8).reshape(256, 3)]
    assert colours[palettes.NON_FINITE] not in [*colours[:241], *colours[palettes.ALL_ZERO :]]
    assert colours[palettes.ALL_ZERO] not in [*colours[:242], *colours[palettes.BACKGROUND :]]


def test_a_colour_map_that_holds_magenta_gets_another_colour_for_non_finite_values(written: list[str]) -> None:
    image = draw_grid(feature_maps([[[np.nan, 1], [0, 0]]]), cmap="spring")  # from magenta to yellow
    assert tuple(palette_colours(image)[palettes.NON_FINITE]) == (0, 255, 0)
    assert "non-finite values in lime: 1" in written


def test_an_all_zero_channel_is_flat_grey_and_counted(written: list[str]) -> None:
    image = draw_grid(feature_maps([[[0, -0.0], [0, 0]], [[3, 3], [3, 3]], [[0, 0], [0, 1e-30]]]), scale="layer")
    grid = pictures(image)[0]
    assert (grid[:, :160] == palettes.ALL_ZERO).all()
    assert (grid[:, 162:322] == 240).all()  # constant, not zero: flat in the colour of its value
    assert (grid[:, 324:] == 0).all()  # nearly zero is not zero
    assert tuple(palette_colours(image)[palettes.ALL_ZERO]) == GREY
    assert "all-zero channels in grey: 1" in written


def test_zeros_beside_a_nan_are_not_an_all_zero_channel(written: list[str]) -> None:
    grid = pictures(draw_grid(feature_maps([[[0, np.nan], [0, 0]], [[1, 2], [3, 4]]])))[0]
    np.testing.assert_array_equal(grid[:, :160], enlarged([[0, 241], [0, 0]], 80))
    assert not [text for text in written if "all-zero" in text]


@pytest.mark.parametrize(
    ("count", "columns", "rows"),
    [(1, 1, 1), (2, 2, 1), (3, 3, 1), (7, 3, 3), (64, 8, 8), (128, 16, 8), (512, 32, 16), (2048, 64, 32), (61, 8, 8)],
)
def test_channels_lie_near_square_in_order(count: int, columns: int, rows: int) -> None:
    # Channel c has value c + 1 everywhere; on one scale its index is 240 * (c + 1) / count, rounded half up.
    values = np.ones((count, 40, 40)) * np.arange(1, count + 1)[:, None, None]
    grid = pictures(draw_grid(feature_maps(values), scale="layer"))[0]
    factor = min(160 // 40, (960 // columns - 2) // 40) or 1
    pitch = 40 * factor + 2
    assert grid.shape == (rows * pitch - 2, columns * pitch - 2)
    corners = np.full(rows * columns, palettes.BACKGROUND)
    corners[:count] = np.floor(np.arange(1, count + 1) / count * 240 + 0.5)
    np.testing.assert_allclose(grid[::pitch, ::pitch].ravel(), corners, atol=1 if count > 240 else 0)


def test_rows_are_numbered_by_their_first_channel(written: list[str]) -> None:
    draw_grid(feature_maps(np.ones((64, 8, 8))))
    assert [text for text in written if text.isdigit()][:8] == ["0", "8", "16", "24", "32", "40", "48", "56"]
    assert "64 channels, 8 per row" in written


@pytest.mark.parametrize(("height", "width"), [(7, 7), (1, 2), (14, 9), (31, 33), (1, 1000), (3, 300)])
def test_small_maps_are_enlarged_until_the_shorter_side_is_readable(height: int, width: int) -> None:
    values = np.random.default_rng(0).normal(size=(256, height, width))
    layout = grid_layout.plan((256, 1, height, width), single=False)
    assert min(height * layout.down, width * layout.across) >= 32
    grid = pictures(draw_grid(feature_maps(values)))[0]
    first = np.repeat(np.repeat(values[0], layout.down, 0), layout.across, 1) / np.abs(values[0]).max()
    tile = grid[: height * layout.down, : width * layout.across]
    np.testing.assert_allclose(tile, 120 + 120 * first, atol=0.501)


def test_frames_of_a_channel_lie_side_by_side_in_one_tile(written: list[str]) -> None:
    # One value per frame: 1, 2, 3 of 4 for the first channel; its own maximum is 4.
    clip = np.ones((2, 4, 40, 40)) * np.arange(1, 5)[None, :, None, None]
    grid = pictures(draw_grid(feature_maps(clip, "frames")))[0]
    # Tiles four times as wide as high: one above the other. 160 // 40 = 4 times as large.
    assert grid.shape == (160 + 6 + 160, 4 * 160 + 3)
    for frame, index in enumerate([60, 120, 180, 240]):
        assert (grid[:160, frame * 161 : frame * 161 + 160] == index).all()
    assert (grid[:160, 160::161] == palettes.BACKGROUND).all()
    assert "2 channels, 1 per row, 4 frames each, left to right" in written


def test_tokens_apart_from_the_grid_are_a_strip_of_their_own(written: list[str]) -> None:
    extra = np.array([[-1, 1, 0], [-4, 0, 2]], np.float32)
    maps = feature_maps(np.ones((3, 2, 2)), "tokens", extra_tokens=extra, shape=(6, 3))
    grid, first, second, _ = pictures(draw_grid(maps))
    assert set(np.unique(grid)) == {240, palettes.BACKGROUND}
    # Cells of 23 pixels and a gap of one.
    np.testing.assert_array_equal(first[:, ::24], np.tile([0, 240, 120], (23, 1)))
    np.testing.assert_array_equal(second[:, ::24], np.tile([0, 120, 180], (23, 1)))
    assert "token 2 of 2 apart from the grid, one cell per channel, 3 per row" in written
    assert "3 channels, each 2 x 2 tokens" in written
    grid, first, second, _ = pictures(draw_grid(maps, scale="layer"))
    assert set(np.unique(grid)) == {150, palettes.BACKGROUND}
    np.testing.assert_array_equal(first[0, ::24], [90, 150, 120])
    np.testing.assert_array_equal(second[0, ::24], [0, 120, 180])


def test_a_vector_is_a_strip_in_one_range(written: list[str]) -> None:
    (grid, _) = pictures(draw_grid(feature_maps([-2, 1, 0, 2], "vector")))
    assert grid.shape == (31, 4 * 32 - 1)
    np.testing.assert_array_equal(grid[:, ::32], np.tile([0, 180, 120, 240], (31, 1)))
    assert {"4 values", "values -2 to 2", "one scale for all", "-2", "2"} <= set(written)


def test_colour_bar_shows_every_level_and_the_ends_of_one_range(written: list[str]) -> None:
    legend = pictures(draw_grid(feature_maps(SIGNED), scale="layer"))[-1]
    np.testing.assert_array_equal(legend, np.tile(np.arange(241), (10, 1)))
    assert written[-3:] == ["-4", "0", "4"]


@pytest.mark.parametrize(
    ("values", "labels"), [(SIGNED, ["-max", "0", "+max"]), (np.abs(SIGNED), ["0", "max"])], ids=["signed", "positive"]
)
def test_colour_bar_is_labelled_relative_when_channels_have_their_own_ranges(
    values: ArrayLike, labels: list[str], written: list[str]
) -> None:
    draw_grid(feature_maps(values))
    assert written[-len(labels) :] == labels


def test_caption_says_what_is_drawn(written: list[str]) -> None:
    maps = feature_maps(np.ones((64, 7, 7)) * -0.5, shape=(512, 7, 7), channel_count=512, note="a remark")
    draw_grid(maps, input_name="cat.jpg")
    assert {
        "layer1.0.conv2",
        "Conv2d",
        "cat.jpg",
        "shape 512 x 7 x 7",
        "first 64 of 512 channels, 8 per row",
        "values -0.5 to -0.5",
        "each channel scaled to its own maximum",
        "a remark",
    } <= set(written)


@pytest.mark.parametrize(
    "label",
    [
        "",
        "a" * 5_000,
        "backbone.body.layer4.2.some_long_module_name." * 5 + "conv2",
        "line\nbreak\ttab\x00\x1b[31m\x7f",
        "\ud800\udfff",
        "猫" * 400,
        "\u202egnp.exe",
        " " * 1_000,
        "." * 1_000,
        "W" * 299,
    ],
)
def test_captions_of_any_text_stay_inside_the_picture(label: str) -> None:
    values = np.ones((2, 3, 3))
    image = draw_grid(feature_maps(values, label=label, kind=label, note=label), input_name=label)
    pixels = np.asarray(image)
    margins = np.concatenate(
        [pixels[:, :12].ravel(), pixels[:, -12:].ravel(), pixels[:12].ravel(), pixels[-12:].ravel()]
    )
    assert (margins == palettes.BACKGROUND).all()
    assert image.width == 480 + 2 * 14
    assert image.height < 2_000


def test_text_the_font_cannot_write_is_escaped() -> None:
    assert lettering.drawable("a\nb\x00\ud800猫\u202e\u0301", 100) == r"a\nb\x00\ud800\u732b\u202e\u0301"


def test_letters_of_latin_greek_and_cyrillic_are_drawn_each_as_another_shape() -> None:
    letters = "éàçøßñŁžőαβλΩяжщё·…"
    assert lettering.drawable(letters, 100) == letters
    shapes = {drawn(letter).tobytes() for letter in letters}
    assert len(shapes) == len(letters)
    assert drawn("\uffff").tobytes() not in shapes  # the box of a letter that is missing


def test_an_accent_apart_is_put_on_its_letter() -> None:
    assert lettering.drawable("cafe\u0301.jpg", 100) == "café.jpg"


def test_letters_of_both_fonts_stand_on_one_line() -> None:
    plain, accented = map(drawn, ("HEH", "HÉH"))
    bottoms = [int(np.flatnonzero((case > 128).any(axis=1)).max()) for case in (plain, accented)]
    assert abs(bottoms[0] - bottoms[1]) <= 1


@settings(deadline=None)
@given(st.text(), st.integers(10, 300))
@pytest.mark.exhaustive
def test_printable_text_is_short_and_plain(text: str, limit: int) -> None:
    printable = lettering.drawable(text, limit)
    assert len(printable) <= limit
    assert printable == "" or printable.isprintable()


@settings(deadline=None)
@given(
    st.lists(st.text(st.sampled_from([*map(chr, range(32, 127)), *"éßΩжя"]), max_size=60), max_size=5),
    st.sampled_from(["", " · "]),
    st.integers(60, 500),
)
def test_wrapping_loses_nothing_and_keeps_to_the_width(texts: list[str], separator: str, width: int) -> None:
    lines = lettering.wrap(texts, 13, width, separator)
    assert all(lettering.text_width(line, 13) <= width for line in lines)
    # A separator goes only where a line ends.
    joined = ["".join(line) for line in lines]
    if separator == "":
        assert "".join(joined) == "".join(texts)
    else:
        assert "".join(joined).replace(separator, "") == "".join(texts)


def test_text_is_broken_after_dots_slashes_and_spaces_where_it_can_be() -> None:
    width = lettering.text_width(["alpha.beta."], 13)
    lines = lettering.wrap(["alpha.beta.gamma"], 13, width, "")
    assert ["".join(line) for line in lines] == ["alpha.beta.", "gamma"]


def test_a_grid_over_the_limit_is_averaged_over_blocks_and_says_so(
    monkeypatch: pytest.MonkeyPatch, written: list[str]
) -> None:
    monkeypatch.setattr(grid_layout, "MAX_SIDE", 60)
    values = np.random.default_rng(0).random((1, 100, 95))
    image = draw_grid(feature_maps(values))
    (grid, _) = pictures(image)
    # Blocks of 2: 50 x 48, the last block of a row one value wide. The range stays that of the values themselves.
    expected = np.empty((50, 48))
    for row in range(50):
        for column in range(48):
            expected[row, column] = values[0, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].mean()
    np.testing.assert_allclose(grid, expected / values.max() * 240, atol=0.501)
    assert "each pixel the mean of 2 x 2 values" in written


def test_averaging_keeps_a_non_finite_value_in_sight(monkeypatch: pytest.MonkeyPatch, written: list[str]) -> None:
    monkeypatch.setattr(grid_layout, "MAX_SIDE", 60)
    values = np.ones((1, 100, 100))
    values[0, 3, 5], values[0, 10, 10], values[0, 10, 11] = np.nan, np.inf, -np.inf
    grid = pictures(draw_grid(feature_maps(values)))[0]
    assert sorted(zip(*np.nonzero(grid == palettes.NON_FINITE), strict=True)) == [(1, 2), (5, 5)]
    assert "non-finite values in magenta: 3" in written


@pytest.mark.parametrize(
    "shape",
    [
        (2048, 1, 112, 112),
        (65_536, 1, 60, 60),
        (65_536, 1, 1, 5_000),
        (1, 1, 30_000, 30_000),
        (4, 1, 1, 1_000_000),
        (4, 1, 1_000_000, 1),
        (16, 4_096, 7, 7),
        (3, 4_096, 1_000, 1_000),
    ],
)
def test_every_layout_keeps_to_the_limits(shape: tuple[int, ...]) -> None:
    layout = grid_layout.plan(shape, single=False)
    height, width = layout.pitch(shape)
    grid_height, grid_width = math.ceil(shape[0] / layout.columns) * height, layout.columns * width
    assert max(grid_height, grid_width) <= 16_384
    assert grid_height * grid_width <= 64_000_000


@pytest.mark.parametrize("count", [1, 59, 60, 61, 1_000, 25_088, 1_048_576])
def test_every_strip_keeps_to_the_limits(count: int) -> None:
    shape = (count, 1, 1, 1)
    layout = grid_layout.plan(shape, single=True)
    assert layout.fits(shape)
    assert layout.down == layout.across >= 4 - layout.gap


def test_channels_beyond_the_limit_are_left_out_and_the_caption_says_so(
    monkeypatch: pytest.MonkeyPatch, written: list[str]
) -> None:
    monkeypatch.setattr(grids, "_MAX_TILES", 12)
    draw_grid(feature_maps(np.ones((20, 2, 2))))
    draw_grid(feature_maps(np.ones((20, 3, 2, 2)), "frames"))
    monkeypatch.setattr(grids, "_MAX_CELLS", 7)
    draw_grid(feature_maps(np.ones(9), "vector"))
    text = "\n".join(written)
    assert "first 12 of 20 channels" in text
    assert "first 4 of 20 channels" in text
    assert "first 7 of 9 values" in text


@pytest.mark.parametrize(
    ("arrangement", "shape"),
    [
        ("maps", (0, 5, 5)),
        ("maps", (5, 0, 5)),
        ("maps", (5, 5, 0)),
        ("frames", (0, 0, 5, 5)),
        ("frames", (4, 0, 5, 5)),
        ("tokens", (4, 0, 0)),
        ("vector", (0,)),
    ],
)
def test_an_empty_activation_is_a_caption(arrangement: str, shape: tuple[int, ...], written: list[str]) -> None:
    image = draw_grid(feature_maps(np.empty(shape), arrangement))
    assert pictures(image) == []
    assert "no finite values" in written


def test_default_colour_maps_equal_those_of_matplotlib() -> None:
    for name, count in itertools.product(("viridis", "inferno", "coolwarm", "berlin"), (241, 256)):
        expected = mpl.colormaps[name](np.linspace(0, 1, count), bytes=True)[:, :3]
        np.testing.assert_array_equal(palettes.colour_levels(name, count), expected)


def test_diverging_maps_are_known_to_matplotlib() -> None:
    assert set(palettes._DIVERGING) <= set(mpl.colormaps)
    assert palettes.is_diverging("RdBu_r")
    assert not palettes.is_diverging("viridis_r")


def test_any_colour_map_of_matplotlib_can_be_named() -> None:
    grids.check_cmap("auto")
    grids.check_cmap("magma")
    image = draw_grid(feature_maps([[[0, 1], [2, 4]]]), cmap="magma")
    np.testing.assert_array_equal(
        palette_colours(image)[:241], mpl.colormaps["magma"](np.linspace(0, 1, 241), bytes=True)[:, :3]
    )


@pytest.mark.parametrize("raise_it", [grids.check_cmap, lambda name: draw_grid(feature_maps(SIGNED), cmap=name)])
def test_an_unknown_colour_map_is_one_short_line_with_the_nearest(raise_it: Any) -> None:
    with pytest.raises(UsageError, match=r"No colour map is called 'viridiss'\. Nearest: .*'viridis'"):
        raise_it("viridiss")
    for name in ("", "x" * 5_000, "a\nb", "\ud800", "AUTO"):
        with pytest.raises(UsageError) as raised:
            raise_it(name)
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 300


def test_default_colour_maps_need_neither_matplotlib_nor_torch() -> None:
    program = (
        "import sys, numpy as np\n"
        "from hookscope.reporting.grids import draw_grid, encode_png\n"
        "from hookscope.results.activations import FeatureMaps\n"
        "for sign in (1, -1):\n"
        "    values = np.full((2, 3, 3), sign, np.float32)\n"
        "    encode_png(draw_grid(FeatureMaps(0, 'a', 'b', 0, 'maps', values, None, 2, (2, 3, 3))))\n"
        "print([name for name in ('matplotlib', 'torch') if name in sys.modules])\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"


def test_grids_drawn_in_threads_equal_those_drawn_alone() -> None:
    generator = np.random.default_rng(0)
    all_maps = [feature_maps(generator.normal(size=(16, side, side)), label=f"layer{side}") for side in range(5, 25)]
    alone = [encode_png(draw_grid(maps)) for maps in all_maps]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda maps: encode_png(draw_grid(maps)), all_maps)) == alone


def test_values_in_any_memory_order_are_drawn_alike() -> None:
    channels_last = np.random.default_rng(0).normal(size=(6, 5, 4)).astype(np.float32)
    channels_last[1, 2, 3] = np.nan
    channels_last.setflags(write=False)  # drawing leaves values alone
    view = channels_last.transpose(2, 0, 1)
    assert not view.flags.c_contiguous
    assert encode_png(draw_grid(feature_maps(view))) == encode_png(draw_grid(feature_maps(np.ascontiguousarray(view))))


SIDES = st.integers(0, 40)
SHAPES = {
    "maps": st.tuples(st.one_of(st.integers(0, 70), st.just(2_048)), SIDES, SIDES),
    "tokens": st.tuples(st.integers(0, 200), SIDES, SIDES),
    "frames": st.tuples(st.integers(0, 20), st.integers(0, 9), SIDES, SIDES),
    "vector": st.tuples(st.integers(0, 3_000)),
}


@settings(deadline=None)
@given(st.data())
def test_any_shape_and_any_values_can_be_drawn(data: st.DataObject) -> None:
    arrangement = data.draw(st.sampled_from(sorted(SHAPES)))
    shape = data.draw(SHAPES[arrangement])
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    values = generator.choice(np.array([-2, -0.5, 0, 1e-45, 1, 3e38, np.nan, np.inf, -np.inf], np.float32), size=shape)
    if data.draw(st.booleans()):
        values = np.abs(np.nan_to_num(values))
    extra = None
    if arrangement == "tokens":
        extra = generator.normal(size=(data.draw(st.integers(0, 3)), shape[0])).astype(np.float32)
    maps = feature_maps(values, arrangement, extra_tokens=extra)
    image = draw_grid(maps, scale=data.draw(st.sampled_from(["channel", "layer"])))
    assert image.mode == "P"
    assert bool((np.asarray(image) == palettes.NON_FINITE).any()) == (not np.isfinite(values).all())
    assert bool(pictures(image)) == (values.size > 0 or (extra is not None and extra.size > 0))


@pytest.mark.parametrize(
    ("row", "label", "total", "input_index", "input_count", "expected"),
    [
        (7, "layer1.0.conv2", 36, 0, 1, "007-layer1.0.conv2.png"),
        (7, "layer1.0.conv2", 36, 2, 3, "007-layer1.0.conv2-input2.png"),
        (7, "layer1.0.conv2", 36, 0, 3, "007-layer1.0.conv2-input0.png"),
        (7, "x", 12_000, 3, 101, "00007-x-input003.png"),
        (999, "", 1_000, 0, 1, "999-unnamed.png"),
        (5, "x", 9, 4, 1, "005-x-input4.png"),
    ],
)
def test_grid_names_begin_with_the_row(
    row: int, label: str, total: int, input_index: int, input_count: int, expected: str
) -> None:
    maps = feature_maps([1.0], "vector", row=row, label=label, input_index=input_index)
    assert grid_name(maps, total, input_count=input_count) == expected


def test_grid_names_of_one_run_differ_and_sort_in_execution_order() -> None:
    made = [
        grid_name(feature_maps([1.0], "vector", row=row, label="x/" * 99, input_index=index), 1_200, input_count=12)
        for row in range(0, 1_200, 7)
        for index in range(12)
    ]
    assert made == sorted(set(made))


def test_a_caption_of_a_sequence_counts_its_rows(written: list[str]) -> None:
    draw_grid(feature_maps(np.ones((1, 6, 5), np.float32), shape=(5, 6), channel_count=6))
    assert "6 channels" in " ".join(written)
    assert "first" not in " ".join(written)


def test_a_line_does_not_end_between_a_number_and_its_seconds() -> None:
    width = lettering.text_width(["failed 0.6"], 13)
    assert lettering.wrap(["failed 0.6 s"], 13, width, "") == [["failed "], ["0.6 s"]]
