"""Maps of signals and volumes: found where a network looks, and equal to those of pictures of height or depth one."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from captum.attr import LayerGradCam
from torch import Tensor, nn

import hookscope
from hookscope.commands.attribute.input_places import InputPlaces, places_of
from hookscope.commands.attribute.sanity import _blurred, resized
from hookscope.errors import UsageError
from hookscope.inspection.receptive_fields import ReceptiveFields
from hookscope.results.attributions import AttributionMap, Method, Target
from hookscope.results.concentration import Box, concentration
from hookscope.results.inputs import InputRecord
from tests.commands.attribute.small_network import Small
from tests.networks import Written

CAMS: tuple[Method, ...] = ("grad-cam", "grad-cam++", "layer-cam", "hires-cam")
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Looking(nn.Module):
    """Scores what two convolutions find in one window, or block, of its input, and nothing else."""

    def __init__(self, window: tuple[slice, ...], size: tuple[int, ...], channels: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        convolution = CONVOLUTIONS[len(size)]
        self.first, self.second = convolution(channels, 6, 3, padding=1), convolution(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 3)
        mask = torch.zeros(size)
        mask[window] = 1
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        actual = F.softplus(self.second(F.relu(self.first(x)))) * self.mask
        return self.head(actual.flatten(2).mean(2) * 20)


def mass_inside(each: AttributionMap, window: tuple[slice, ...], reach: int = 2) -> float:
    """Return which share of a map's magnitude lies in a window and as many steps around it as two kernels reach."""
    magnitude = np.abs(each.values.astype(np.float64))
    around = tuple(slice(max(part.start - reach, 0), part.stop + reach) for part in window)
    return float(magnitude[around].sum() / magnitude.sum())


CASES = {
    "signal": ((slice(60, 75),), (120,)),
    "volume": ((slice(2, 6), slice(8, 12), slice(1, 5)), (10, 14, 12)),
}


def test_a_window_of_a_signal_and_a_block_of_a_volume_are_found() -> None:
    for case, method in (("signal", "layer-cam"), ("signal", "occlusion"), ("volume", "gradient")):
        found_by(case, method)


def found_by(case: str, method: Method) -> None:
    window, size = CASES[case]
    network, inputs = Looking(window, size), torch.randn(2, 2, *size, generator=torch.Generator().manual_seed(1))
    options = {"layer": "second"} if method in CAMS else {}
    result = hookscope.attribute(network, inputs, method=method, sanity="none", **options)
    assert all(heat_map.values.shape == size == heat_map.size for heat_map in result.maps)
    least = 0.6 if method == "occlusion" else 0.999
    assert all(mass_inside(heat_map, window) > least for heat_map in result.maps)
    if method == "occlusion":  # to a patch
        assert all(mass_inside(heat_map, window, 5) > 0.95 for heat_map in result.maps)


def flat_twin(network: nn.Sequential, axes: int) -> nn.Sequential:
    """Return a network of Conv2d that computes over pictures of height one what this one computes over signals, or of
    Conv3d over volumes of depth one."""
    twin: list[nn.Module] = []
    for layer in network:
        if isinstance(layer, nn.Conv1d | nn.Conv2d):
            kernel, stride, pad = ((1, *v) for v in (layer.kernel_size, layer.stride, layer.padding))
            other = CONVOLUTIONS[axes](layer.in_channels, layer.out_channels, kernel, stride, (0, *pad[1:]))
            other.load_state_dict({"weight": layer.weight.data.unsqueeze(2), "bias": layer.bias.data})
            twin.append(other)
        elif isinstance(layer, nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d):
            twin.append((nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[axes - 2](1))
        elif isinstance(layer, nn.MaxPool1d | nn.MaxPool2d):
            twin.append((nn.MaxPool2d, nn.MaxPool3d)[axes - 2]((1, *[2] * (axes - 1))))
        else:
            twin.append(layer)
    return nn.Sequential(*twin)


def classifier(axes: int) -> nn.Sequential:
    torch.manual_seed(2)
    convolution = CONVOLUTIONS[axes]
    pool, mean = ((nn.MaxPool1d, nn.AdaptiveAvgPool1d), (nn.MaxPool2d, nn.AdaptiveAvgPool2d))[axes - 1]
    return nn.Sequential(
        *(convolution(2, 6, 5, stride=2, padding=2), nn.ReLU(), pool(2), convolution(6, 8, 3, padding=1), nn.ReLU()),
        *(mean(1), nn.Flatten(), nn.Linear(8, 4)),
    )


@pytest.mark.parametrize(
    ("axes", "method"),
    [*((1, method) for method in CAMS), (2, "grad-cam"), (2, "gradient"), (1, "guided-backprop")],
)
def test_maps_equal_those_of_inputs_with_one_more_axis_of_length_one(axes: int, method: Method) -> None:
    network = classifier(axes).eval()
    inputs = torch.randn(2, 2, *(64, 40)[:axes], generator=torch.Generator().manual_seed(3))
    twin = flat_twin(network, axes + 1).eval()
    assert torch.allclose(network(inputs), twin(inputs.unsqueeze(2)), atol=1e-6)
    ours = hookscope.attribute(network, inputs, method=method, sanity="none")
    theirs = hookscope.attribute(twin, inputs.unsqueeze(2), method=method, sanity="none")
    for one, other in zip(ours.maps, theirs.maps, strict=True):
        assert np.allclose(one.values, other.values[0], atol=1e-6)
        assert one.extent == pytest.approx((*other.extent[1 : axes + 1], *other.extent[axes + 2 :]))
        assert one.target.score == pytest.approx(other.target.score, rel=1e-5)


@pytest.mark.parametrize("axes", [1, 3])
def test_grad_cam_is_captums(axes: int) -> None:
    torch.manual_seed(4)
    convolution = CONVOLUTIONS[axes]
    network = nn.Sequential(
        convolution(1, 4, 3), nn.ReLU(), convolution(4, 5, 3), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)
    )
    inputs = torch.randn(2, 1, *(9, 8, 10)[:axes])
    network.eval()(inputs)
    ours = hookscope.attribute(network, inputs, target=1, layer="2", sanity="none")
    theirs = LayerGradCam(network, network[2]).attribute(inputs, 1, relu_attributions=True)
    for place, heat_map in enumerate(ours.maps):
        assert torch.allclose(torch.as_tensor(heat_map.values), theirs[place, 0].float(), atol=1e-6)


def test_an_input_without_channels_and_one_with_channels_last_have_maps_over_time() -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter, self.head = nn.Conv1d(1, 4, 8, stride=4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.filter(x.unsqueeze(1)).relu().mean(2))

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0].mean(1))

    torch.manual_seed(6)
    raw, recurrent = torch.randn(2, 400), torch.randn(2, 30, 6)
    by_layer = hookscope.attribute(Raw(), raw, batch_axis=0, sanity="none").maps[0]
    # Windows of 8 in steps of 4: the first lies around 3.5, so the map begins 2 before it, at 1.5 + 0.5 of 400.
    assert by_layer.values.shape == (99,)
    network = Recurrent().eval()
    of_steps = hookscope.attribute(network, recurrent, method="gradient", target=0, sanity="none").maps[0]
    leaf = recurrent.clone().requires_grad_()
    (expected,) = torch.autograd.grad(network(leaf)[:, 0].sum(), leaf)
    assert np.allclose(of_steps.values, expected[0].abs().amax(1), atol=1e-7)
    assert of_steps.pixels is not None
    assert np.allclose(of_steps.pixels, expected[0].T, atol=1e-7)
    assert hookscope.attribute(network, recurrent, sanity="none").maps[0].values.shape == (30,)


class ChannelsLast(Small):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 3, 1, 2))


@pytest.mark.parametrize("method", ["grad-cam", "gradient"])
def test_pictures_with_channels_last_have_the_maps_of_those_with_channels_first(method: Method) -> None:
    torch.manual_seed(0)
    network, last, pictures = Small(), ChannelsLast(), torch.randn(2, 3, 20, 28)
    last.load_state_dict(network.state_dict())
    first = hookscope.attribute(network, pictures, method=method)
    other = hookscope.attribute(last, pictures.permute(0, 2, 3, 1).contiguous(), method=method, batch_axis=0)
    for one, another in zip(first.maps, other.maps, strict=True):
        np.testing.assert_allclose(one.values, another.values, atol=1e-6)
    assert [(half.share, half.region) for half in other.halves if half] == [
        (pytest.approx(half.share), half.region) for half in first.halves if half
    ]
    assert [check.value for check in other.sanity] == pytest.approx([check.value for check in first.sanity], abs=1e-5)


def test_tokens_have_a_map_at_their_embedding() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.bent, self.head = nn.Embedding(20, 6), nn.Tanh(), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.bent(self.words(x))[:, 4])  # looks at the fifth word alone

    torch.manual_seed(7)
    words = torch.randint(0, 20, (2, 9))
    with pytest.raises(UsageError, match=r"given whole numbers, 2x9, .* what its embedding returns, .* `layer` words"):
        hookscope.attribute(Tagger(), words, batch_axis=0)
    options = {"layer": "words", "method": "hires-cam", "sanity": "none", "batch_axis": 0}
    network = Tagger()
    result = hookscope.attribute(network, words, **options)
    (one, _) = result.maps
    assert result.notes == ()  # whole numbers have no gradient, so none is missed
    assert one.values.shape == (9,)
    assert [*np.flatnonzero(one.values)] == [4]
    (named, _) = hookscope.attribute(network, input={"x": words}, **options).maps
    assert np.array_equal(named.values, one.values)


@pytest.mark.parametrize("method", ["grad-cam", "gradient"])
def test_complex_numbers_are_not_called_whole(method: str) -> None:
    class Magnitude(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.conv(x.abs()).mean((2, 3))
            return output

    pictures = torch.ones(1, 1, 6, 6, dtype=torch.complex64)
    with pytest.raises(UsageError, match=r"given complex numbers, 1x1x6x6, for which no map is made: .* `layer` NAME"):
        hookscope.attribute(Magnitude(), pictures, method=method)
    assert hookscope.attribute(Magnitude(), pictures, layer="conv", sanity="none").maps[0].layer == "conv"


def test_words_beside_a_volume_have_a_drawing_of_their_own(tmp_path: Path) -> None:
    parts = {"blocks": nn.Conv3d(3, 8, 2, 2), "words": nn.Embedding(30, 8), "head": nn.Linear(8, 3)}
    network = Written(lambda net, x, ids: net.head(net.blocks(x).mean((2, 3, 4)) * net.words(ids).mean(1)), **parts)
    inputs = {"x": torch.rand(1, 3, 4, 8, 12), "ids": torch.randint(0, 30, (1, 7))}
    looks = hookscope.attribute(network, input=inputs, layer=["blocks", "words"], sanity="none")
    assert [heat_map.values.shape for heat_map in looks.maps] == [(2, 4, 6), (7,)]
    assert len([*(looks.save(tmp_path / "run") / "overlays").iterdir()]) == 2


@pytest.mark.parametrize(
    ("shape", "tokens", "message"),
    [
        ((2, 3, 64), "grid=4x4", "`tokens` grid=4x4 does not fit a signal: give grid=LENGTH"),
        ((2, 3, 4, 8, 12), "grid=3x4", "does not fit a volume: give grid=DEPTHxHEIGHTxWIDTH"),
        ((2, 3, 16, 16), "grid=2x2x4", "does not fit a picture: give grid=HEIGHTxWIDTH"),
    ],
)
def test_tokens_on_a_grid_of_other_axes_than_the_input_are_refused(
    shape: tuple[int, ...], tokens: str, message: str
) -> None:
    cut = CONVOLUTIONS[len(shape) - 2](3, 8, 2, 2)
    network = Written(lambda net, x: net.head(net.mix(net.cut(x).flatten(2).mT).mean(1)), cut=cut)
    network.mix, network.head = nn.Linear(8, 8), nn.Linear(8, 3)
    with pytest.raises(UsageError, match=message):
        hookscope.attribute(network, torch.rand(shape), tokens=tokens, sanity="none")


@pytest.mark.parametrize(
    ("first", "shape", "expected"),
    [
        (nn.Conv1d(6, 4, 3), (2, 6, 30), InputPlaces((30,), 1)),
        (nn.Conv1d(6, 4, 3), (2, 30, 6), InputPlaces((30,), 2)),  # it is transposed before
        (nn.LSTM(6, 4), (2, 30, 6), InputPlaces((30,), 2)),
        (nn.Linear(6, 4), (2, 30, 6), InputPlaces((30,), 2)),
        (nn.Linear(180, 4), (2, 6, 30), InputPlaces((30,), 1)),  # behind Flatten
        (nn.Conv2d(3, 4, 3), (2, 3, 8, 9), InputPlaces((8, 9), 1)),
        (nn.Conv3d(3, 4, 3), (2, 3, 8, 9, 7), InputPlaces((8, 9, 7), 1)),
        (nn.Linear(30, 4), (2, 30), InputPlaces((30,), None)),
    ],
)
def test_the_first_layer_says_which_axis_counts_channels(
    first: nn.Module, shape: tuple[int, ...], expected: InputPlaces
) -> None:
    inputs = torch.randn(shape)
    places = places_of(first, inputs)
    assert places == expected
    assert torch.equal(places.as_given(places.by_channel(inputs)), inputs)


def test_cells_of_signals_and_volumes_lie_in_the_middle_of_what_they_see() -> None:
    def ones(*size: int) -> Tensor:
        return torch.ones(4, 2, *size)

    signal = torch.rand(1, 2, 64, requires_grad=True)
    field = ReceptiveFields(1).of(F.max_pool1d(F.conv1d(signal, ones(5), stride=2, padding=1), 2).grad_fn)
    assert field is not None
    assert [line[:2] for line in field.lines] == [(2.0, 4.0)]  # (5-1)/2 - 1 = 1 and half a step of 2 on
    volume = torch.rand(1, 2, 16, 16, 16, requires_grad=True)
    after = F.avg_pool3d(F.conv3d(volume, ones(3, 1, 5), stride=(1, 2, 2), padding=(1, 0, 0)), 2)
    field = ReceptiveFields(3).of(after.grad_fn)
    assert field is not None
    assert [line[:2] for line in field.lines] == [(0.5, 2.0), (1.0, 4.0), (3.0, 4.0)]
    raw = torch.rand(1, 64, requires_grad=True)
    field = ReceptiveFields(1, channel_axis=None).of(F.conv1d(raw.unsqueeze(1), torch.ones(4, 1, 3)).grad_fn)
    assert field is not None
    assert [line[:2] for line in field.lines] == [(1.0, 1.0)]
    last = torch.rand(1, 64, 2, requires_grad=True)
    turned = F.conv1d(last.transpose(1, 2), ones(3)).transpose(1, 2)
    field = ReceptiveFields(1, channel_axis=2).of(turned.grad_fn)
    assert field is not None
    assert (field.axes, field.lines[0][:2]) == ((-2,), (1.0, 1.0))


@pytest.mark.parametrize(("cells", "size"), [((5,), (20,)), ((3, 4), (9, 16)), ((2, 3, 4), (8, 9, 16))])
def test_maps_that_cover_the_input_are_enlarged_as_torch_interpolates(
    cells: tuple[int, ...], size: tuple[int, ...]
) -> None:
    maps = torch.rand(2, *cells)
    whole = (*[0.0] * len(cells), *[1.0] * len(cells))
    mode = ("linear", "bilinear", "trilinear")[len(cells) - 1]
    expected = F.interpolate(maps[:, None], size, mode=mode, align_corners=False)[:, 0]
    assert torch.allclose(resized(maps, size, [whole, whole]), expected, atol=1e-6)


def test_a_map_beside_its_input_is_shifted_there() -> None:
    # Two cells of length 10 over an input of 20 that lies 5 further on: its first place is that of the first cell.
    (actual,) = resized(torch.tensor([[0.0, 10.0]]), (20,), [(-0.25, 0.75)])
    assert torch.allclose(actual, ((torch.arange(20) + 0.5).clamp(0, 10)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blurring_is_a_sum_with_gaussian_weights_over_repeated_edges(dtype: torch.dtype) -> None:
    lines = torch.randn(2, 3, 40).to(dtype)
    weights = np.exp(-(np.arange(-10, 11) ** 2) / (2 * 5**2))  # a deviation of an eighth, up to twice that
    padded = np.pad(lines.double().numpy(), [(0, 0), (0, 0), (10, 10)], mode="edge")
    expected = np.lib.stride_tricks.sliding_window_view(padded, 21, -1) @ (weights / weights.sum())
    assert _blurred(lines).dtype == dtype
    np.testing.assert_allclose(
        _blurred(lines).double().numpy(), expected, atol=1e-5 if dtype == torch.float32 else 1e-2
    )


@pytest.mark.parametrize("size", [(40,), (12, 16), (6, 8, 10)])
def test_blurring_keeps_what_is_the_same_everywhere_and_flattens_the_rest(size: tuple[int, ...]) -> None:
    assert torch.allclose(_blurred(torch.full((1, 2, *size), 3.0)), torch.full((1, 2, *size), 3.0), atol=1e-5)
    noise = torch.randn(1, 2, *size)
    assert _blurred(noise).std() < 0.6 * noise.std()


def map_of(values: np.ndarray, size: tuple[int, ...]) -> AttributionMap:
    axes = values.ndim
    extent = (*[0.0] * axes, *[1.0] * axes)
    return AttributionMap(0, Target("a", 1.0), "", values.astype(np.float32), extent, None, size)


def test_half_of_a_map_lies_in_the_smallest_interval_or_box_that_holds_it() -> None:
    record = InputRecord("tensor", None, None, (1, 100), ())
    values = np.zeros(50)
    values[10:13], values[40] = 2, 3
    actual = concentration(map_of(values, (100,)), record)
    assert actual is not None
    # 2, 2 and 2 beside 3 elsewhere: of 9 the smallest that holds 4.5 are the three cells.
    assert (actual.region, actual.share) == (Box((20.0,), (26.0,), (100,)), pytest.approx(0.06))
    block = np.zeros((6, 8, 10))
    block[1:3, 4:6, 7:9] = 1
    block[5, 0, 0] = 0.5
    actual = concentration(map_of(block, (12, 16, 20)), record)
    assert actual is not None
    assert isinstance(actual.region, Box)
    assert actual.share <= 8 / 480
    inside = zip((1, 4, 7), actual.region.begin, actual.region.end, (3, 6, 9), strict=True)
    assert all(2 * low <= begin < end <= 2 * high for low, begin, end, high in inside)
    assert actual.words.startswith("planes 2 to ")
    assert concentration(map_of(np.zeros(5), (5,)), record) is None


def test_deletion_works_on_signals_and_volumes() -> None:
    for case, (window, size) in CASES.items():
        network, inputs = (
            Looking(window, size),
            torch.randn(4, 2, *size, generator=torch.Generator().manual_seed(8)) * 4,
        )
        checks = hookscope.attribute(network, inputs, method="gradient").sanity
        (deletion,) = [check for check in checks if check.name == "deletion"]
        before, at_random = deletion.compared_with
        assert abs(before - deletion.value) > abs(before - at_random)
        assert f"the {case} that" in deletion.meaning


def test_dense_scores_of_voxels_are_explained_by_their_sum() -> None:
    torch.manual_seed(9)
    network = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 1)).eval()
    inputs = torch.randn(1, 1, 5, 6, 7)
    (one,) = hookscope.attribute(network, inputs, target=1, layer="1", method="hires-cam", sanity="none").maps
    scores = network(inputs).detach()
    chosen = scores.argmax(1) == 1
    assert one.target.score == pytest.approx(float((scores[:, 1] * chosen).sum()), rel=1e-5)


def test_a_layer_whose_places_are_not_the_inputs_is_refused_with_the_reason() -> None:
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.head(self.conv(x.view(-1, 1, 8, 8)).mean((2, 3)))
            return output

    with pytest.raises(UsageError, match="returns 1x4x6x6, which has 2 axes of place where the input has 1"):
        hookscope.attribute(Spectrum(), torch.randn(1, 1, 64), layer="conv", batch_axis=0)
    with pytest.raises(UsageError, match="returns a map of the signal with more than one place"):
        hookscope.attribute(Spectrum(), torch.randn(1, 1, 64), batch_axis=0)
