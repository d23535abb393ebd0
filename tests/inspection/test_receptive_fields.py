"""Where the cells of a map lie: closed forms for small networks, and for large ones the pixels that move a cell."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models

import hookscope
from hookscope.inspection.cost import Call, network_cost
from hookscope.inspection.receptive_fields import ReceptiveField, ReceptiveFields
from hookscope.reporting.overlays import resampled
from hookscope.results.cost import ReceptiveField as CostField
from hookscope.results.inputs import Region
from tests import networks as small


def field_of(compute: Callable[[Tensor], Tensor], size: tuple[int, int] = (32, 48)) -> ReceptiveField | None:
    picture = torch.rand(1, 3, *size, requires_grad=True)
    return ReceptiveFields().of(compute(picture).grad_fn)


def lines_of(compute: Callable[[Tensor], Tensor]) -> list[tuple[float, float]]:
    """Return (start, step) of rows and columns."""
    field = field_of(compute)
    return [(line.start, line.step) for line in field.lines]


def filters(*size: int) -> Tensor:
    return torch.ones(4, 3, *size)


@pytest.mark.parametrize(
    ("compute", "rows", "columns"),
    [
        # The middle of the first window is (size - 1) * dilation / 2 - padding.
        (lambda x: F.conv2d(x, filters(3, 3), stride=2, padding=1), (0, 2), (0, 2)),
        (lambda x: F.conv2d(x, filters(5, 3), stride=(4, 1), padding=(2, 0)), (0, 4), (1, 1)),
        (lambda x: F.max_pool2d(x, 2), (0.5, 2), (0.5, 2)),
        (lambda x: F.adaptive_avg_pool2d(x, (8, 8)), (1.5, 4), (2.5, 6)),
        # TensorFlow's "same": more below and at the right.
        (lambda x: F.conv2d(F.pad(x, (0, 1, 0, 1)), filters(3, 3), stride=2), (1, 2), (1, 2)),
        # Two pixels for each: around a quarter before and a quarter behind.
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (-0.25, 0.5), (-0.25, 0.5)),
        # Torch steps by the factor, though 32 and 48 pixels become 12 and 19.
        (lambda x: F.interpolate(x, scale_factor=0.4, mode="bilinear"), (0.75, 2.5), (0.75, 2.5)),
        (lambda x: F.conv_transpose2d(x, torch.ones(3, 4, 2, 2), stride=2), (-0.25, 0.5), (-0.25, 0.5)),
        (lambda x: (x * 1)[:, 1:].relu_(), (0, 1), (0, 1)),
        (lambda x: x[:, :, -100:] * 2, (0, 1), (0, 1)),
        (lambda x: x[:, :, 1::2, -8:] * 2, (1, 2), (40, 1)),
        (lambda x: F.pad(x, (-3, 2, 4, -1)), (-4, 1), (3, 1)),  # negative padding cuts off
        (lambda x: x.permute(0, 2, 3, 1).relu().permute(0, 3, 1, 2)[..., 3:], (0, 1), (3, 1)),
        # A gate has a factor for each channel, and no place; a branch without its own shift halves that of the other.
        (lambda x: F.avg_pool2d(x, 2) + F.conv2d(x, torch.ones(3, 3, 3, 3), stride=2, padding=1), (0.25, 2), (0.25, 2)),
    ],
)
def test_places_are_those_of_the_closed_form(
    compute: Callable[[Tensor], Tensor], rows: tuple[float, float], columns: tuple[float, float]
) -> None:
    assert lines_of(compute) == [pytest.approx(rows), pytest.approx(columns)]


def test_a_kernel_looks_where_its_weights_are() -> None:
    kernel = torch.zeros(2, 3, 3, 5)
    kernel[0, 1, 2, 0] = -4.0  # 16 of 25, in the last row and first column; 9 of 25 in the first row and last column
    kernel[1, 2, 0, 4] = 3.0
    rows, columns = lines_of(lambda x: F.conv2d(x, kernel, stride=2, padding=(1, 0)))
    assert rows == pytest.approx((2 * 16 / 25 - 1, 2))
    assert columns == pytest.approx((4 * 9 / 25, 2))
    # A kernel of zeros looks nowhere: its middle stands.
    assert lines_of(lambda x: F.conv2d(x, kernel * 0, stride=2, padding=1)) == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.roll(3, 2),
        lambda x: (x * 1)[..., :32].mT.relu_(),
        lambda x: x.reshape(1, 3, 4, 8, 6, 8).mean((3, 5)),
        lambda x: F.adaptive_avg_pool2d(x, 7),
        lambda x: x.mT @ x,
        lambda x: x.flatten(2),
    ],
)
def test_where_values_are_moved_nothing_is_known(compute: Callable[[Tensor], Tensor]) -> None:
    assert field_of(compute) is None


def strided(kernel: int, padding: int, count: int) -> nn.Module:
    """Return a network whose first score is the mean of a map that averages the picture."""
    layers: list[nn.Module] = []
    for place in range(count):
        layers.append(nn.Conv2d(1 if place else 3, 1, kernel, stride=2, padding=padding, bias=False))
        nn.init.constant_(layers[-1].weight, 1 / kernel**2)
    head = nn.Linear(1, 2)
    nn.init.constant_(head.weight, 1.0)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


@pytest.mark.parametrize(
    ("kernel", "padding", "count", "places"),
    [
        (3, 1, 5, [(32, 32), (64, 96), (100, 120), (96, 64)]),  # a stretch lies 15.6 pixels to the lower right
        (2, 0, 4, [(32, 32), (64, 96), (100, 120), (96, 64)]),  # here a stretch is right
        (5, 0, 4, [(64, 64), (96, 96), (100, 112)]),  # loses 30 pixels at every side
    ],
)
@pytest.mark.parametrize("layer", [(), "{last}"])
def test_the_map_of_a_square_lies_on_the_square(
    kernel: int, padding: int, count: int, places: list[tuple[int, int]], layer: str | tuple[()]
) -> None:
    network = strided(kernel, padding, count)
    names = layer.format(last=count - 1) if layer else ()
    for top, left in places:
        picture = torch.zeros(1, 3, 224, 224)
        picture[:, :, top : top + 32, left : left + 32] = 1
        looks = hookscope.attribute(network, picture, target=0, layer=names, sanity="none")
        drawn = np.concatenate([rows for _, rows in resampled(looks.maps[0], Region(0, 0, 224, 224, 224, 224))])
        y, x = np.mgrid[:224, :224] + 0.5
        actual = (float((drawn * case).sum() / drawn.sum()) for case in (y, x))
        assert [*actual] == pytest.approx([top + 16, left + 16], abs=1.6), "a twentieth of a cell"
        assert not looks.notes


def test_swins_lie_at_their_patches_and_what_moves_values_is_stretched_and_says_so() -> None:
    for width, right in ((96, 1), (80, 96 / 80)):  # three patches of 32 pixels, the last one padded
        swin = hookscope.attribute(small.small_swin(), torch.randn(1, 3, 64, width), sanity="none")
        assert swin.maps[0].extent == pytest.approx((0, 0, 1, right), abs=0.01)
        assert not any("cannot be computed" in note for note in swin.notes)

    class Rolls(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs.roll(1, 2)

    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), Rolls(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )
    rolled = hookscope.attribute(network, torch.randn(1, 3, 8, 8), layer="1", sanity="none")
    assert rolled.maps[0].extent == (0, 0, 1, 1)
    assert any("where its cells lie cannot be computed" in note for note in rolled.notes)


# --- How much of the picture a cell sees ---


def windows_of(compute: Callable[[Tensor], Tensor], *size: int) -> list[tuple[float, float]]:
    """Return (first, last) pixel of the first cell's window along each axis."""
    picture = torch.rand(1, 3, *(size or (32, 48)), requires_grad=True)
    field = ReceptiveFields(picture.dim() - 2, by_weights=False).of(compute(picture).grad_fn)
    return [(line.low, line.high) for line in field.lines]


@pytest.mark.parametrize(
    ("compute", "windows"),
    [
        (lambda x: F.conv2d(x, filters(3, 5), stride=2, padding=(1, 0)), [(-1, 1), (0, 4)]),
        (lambda x: F.max_pool2d(F.conv2d(x, filters(3, 3), stride=2), 3, 2), [(0, 6), (0, 6)]),
        # Branches of another size: the smallest window around both.
        (lambda x: F.conv2d(x, torch.ones(3, 3, 5, 5), padding=2) + F.conv2d(x, torch.ones(3, 3, 1, 1)), [(-2, 2)] * 2),
        (lambda x: F.conv2d(x[..., 3:], torch.ones(3, 3, 1, 2)) + x[..., 1:-3], [(0, 0), (1, 4)]),
        # Five weights of a transposed convolution of stride 2 meet three cells at most.
        (lambda x: F.conv_transpose2d(x, torch.ones(3, 4, 5, 2), stride=2), [(-2, 0), (-0.25, -0.25)]),
        (lambda x: F.pixel_unshuffle(x, 4), [(0, 3)] * 2),
        (lambda x: nn.Linear(3, 5)(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).relu(), [(0, 0)] * 2),
    ],
)
def test_windows_are_those_of_the_closed_form(
    compute: Callable[[Tensor], Tensor], windows: list[tuple[float, float]]
) -> None:
    assert windows_of(compute) == [pytest.approx(window) for window in windows]


def test_sequences_and_clips_have_fields_too() -> None:
    assert windows_of(lambda x: F.max_pool1d(F.conv1d(x, filters(4), stride=3), 2), 40) == [(0, 6)]
    assert windows_of(lambda x: F.avg_pool3d(F.conv3d(x, filters(1, 3, 5), padding=(0, 1, 2)), 2), 6, 8, 10) == [
        (0, 1),
        (-1, 2),
        (-2, 3),
    ]
    sequence = torch.rand(1, 40, 3, requires_grad=True)  # its channels come last
    moved = F.conv1d(sequence.transpose(1, 2), filters(4))
    assert ReceptiveFields(1, by_weights=False).of(moved.grad_fn) is None


def seen_by_gradients(network: nn.Module, size: tuple[int, ...]) -> tuple[list[int], Tensor, Tensor]:
    """Return how many pixels along each axis move the middle cell of positive weights, the picture and the output."""
    for parameter in network.parameters():
        nn.init.uniform_(parameter, 0.5, 1.0)
    picture = torch.rand(1, 2, *size, dtype=torch.float64, requires_grad=True)
    output = network.double().eval()(picture * 1)
    middle = tuple(cells // 2 for cells in output.shape[2:])
    (gradient,) = torch.autograd.grad(output[(0, 0, *middle)], picture, retain_graph=True)
    moves = gradient[0].abs().sum(0) > 0
    extents = []
    for axis in range(len(size)):
        along = moves.any(dim=[number for number in range(len(size)) if number != axis]) if len(size) > 1 else moves
        places = along.nonzero().flatten()
        extents.append(int(places[-1] - places[0]) + 1)
    return extents, picture, output


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(number, marks=pytest.mark.exhaustive) for number in range(4, 10))]
)
def test_cells_see_as_many_pixels_as_the_closed_form_says(seed: int) -> None:
    """Random stacks of convolutions and pooling, in one to three axes, against the pixels that have a gradient."""
    draw = np.random.default_rng(seed)
    axes = int(draw.integers(1, 4))
    kinds = {1: (nn.Conv1d, nn.AvgPool1d), 2: (nn.Conv2d, nn.AvgPool2d), 3: (nn.Conv3d, nn.AvgPool3d)}[axes]
    layers: list[nn.Module] = []
    for _ in range(3):
        if draw.random() < 0.25:
            layers.append(kinds[1](int(draw.integers(1, 4)), stride=int(draw.integers(1, 3))))
            continue
        kernel = tuple(int(integer) for integer in draw.integers(1, 5, axes))
        dilation = tuple(int(integer) for integer in draw.integers(1, 3, axes))
        layers.append(
            kinds[0](2, 2, kernel, int(draw.integers(1, 3)), dilation=dilation, groups=int(draw.integers(1, 3)))
        )
    size = (96,) if axes == 1 else (72, 80) if axes == 2 else (44, 46, 48)
    extents, _, output = seen_by_gradients(nn.Sequential(*layers), size)
    field = ReceptiveFields(axes, by_weights=False).of(output.grad_fn)
    assert [line.high - line.low + 1 for line in field.lines] == extents
    assert not field.at_least


@pytest.mark.parametrize(("size", "stride", "dilation"), [(5, 2, 1), (3, 2, 2), (4, 3, 2), (3, 4, 1)])
def test_a_transposed_convolution_sees_its_widest_window(size: int, stride: int, dilation: int) -> None:
    layer = nn.ConvTranspose1d(1, 1, size, stride, dilation=dilation, bias=False)
    nn.init.ones_(layer.weight)
    picture = torch.rand(1, 1, 30, requires_grad=True)
    output = layer(picture * 1)
    widest = 0
    for cell in range(output.shape[2]):
        (gradient,) = torch.autograd.grad(output[0, 0, cell], picture, retain_graph=True)
        places = gradient[0, 0].nonzero().flatten()
        widest = max(widest, int(places[-1] - places[0]) + 1 if len(places) else 0)
    field = ReceptiveFields(1, by_weights=False).of(output.grad_fn)
    assert field.lines[0].high - field.lines[0].low + 1 == widest


@pytest.mark.parametrize(
    ("compute", "at_least"),
    [
        (lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(), True),  # a gate
        (lambda x: F.group_norm(x, 3), True),
        (lambda x: F.layer_norm(x, x.shape[1:]), True),
        (lambda x: x + (x.flatten(2) @ x.flatten(2).mT @ x.flatten(2)).view(x.shape), True),  # attention
        (lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (3,)), False),  # over the channels of a place
        (lambda x: F.batch_norm(x, None, None, training=True), True),
    ],
)
def test_what_else_enters_makes_the_window_a_lower_bound(compute: Callable[[Tensor], Tensor], at_least: bool) -> None:
    field = field_of(lambda x: compute(F.conv2d(x, torch.ones(3, 3, 3, 3))).relu())
    assert field.at_least == at_least


def field_at(network: nn.Module, layer: str, *size: int) -> CostField:
    return network_cost(Call(network, [torch.empty(1, 3, *size, device="meta")], {}))[layer].receptive_field


@pytest.mark.parametrize(
    ("build", "layer", "size"),
    [
        # Araujo, Norris and Sim, 2019, and its tables.
        (models.vgg16, "features.30", 212),
        (models.resnet18, "layer4", 435),
        (models.efficientnet_b0, "features", 851),
    ],
)
@pytest.mark.sample("vgg16")
def test_known_networks_have_the_published_fields(build: Callable[..., nn.Module], layer: str, size: int) -> None:
    with torch.device("meta"):
        network = build(weights=None).eval()
    for side in (224, 64):  # no matter how large the picture is: it may see less than its window
        field = field_at(network, layer, side, side)
        assert field.size == (size, size)
        assert field.stride == (32, 32)
        assert field.at_least == (build is models.efficientnet_b0)
