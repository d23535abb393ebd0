"""Methods on the picture against closed forms, and that they leave nothing behind."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookscope
from hookscope.commands.attribute.pixels import (
    COMPLETENESS_LIMIT,
    FIRST_STEPS,
    MOST_STEPS,
    PIXEL_METHODS,
    ScoredBatch,
    map_of,
)
from hookscope.errors import UsageError
from hookscope.inputs.batches import Batch
from hookscope.results.attributions import Method
from tests.networks import batch_of


def of_class(index: int) -> Callable[[Any], Tensor]:
    return lambda output: output[:, index]


def scored_batch(network: nn.Module, pictures: Tensor, target: int = 1) -> ScoredBatch:
    return ScoredBatch(network.eval(), batch_of(pictures, count=len(pictures)), of_class(target))


def linear(channels: int = 3, side: int = 14) -> tuple[nn.Module, Tensor]:
    """Return a linear network, and its weights for class 1 as a picture."""
    torch.manual_seed(3)
    head = nn.Linear(channels * side * side, 4)
    return nn.Sequential(nn.Flatten(), head), head.weight.detach()[1].view(channels, side, side)


class Smooth(nn.Module):
    """softplus of a convolution, so that integrals take more than one step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(F.softplus(2 * self.conv(x)).mean((2, 3)))
        return output


class InPlace(nn.Module):
    """Overwrites its input, and every tensor after it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)
        nn.init.uniform_(self.head.weight)  # guided backpropagation lets only positive ones pass

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.sub_(0.5).relu_()).relu_()
        output: Tensor = self.head(x.mean((2, 3)))
        return output


def test_a_linear_network_is_explained_in_closed_form() -> None:
    network, weights = linear()
    pictures = torch.randn(2, 3, 14, 14, generator=torch.Generator().manual_seed(0))
    scored = scored_batch(network, pictures)
    each = weights.expand(2, -1, -1, -1)
    torch.testing.assert_close(PIXEL_METHODS["gradient"](scored).values, each)
    torch.testing.assert_close(PIXEL_METHODS["input-x-gradient"](scored).values, pictures * each)
    actual = PIXEL_METHODS["integrated-gradients"](scored)
    torch.testing.assert_close(actual.values, pictures * each)
    assert actual.gap is not None
    assert float(actual.gap.max()) < 1e-4
    torch.testing.assert_close(PIXEL_METHODS["smoothgrad"](scored).values, each)


def test_noise_is_a_share_of_each_pictures_range_and_an_even_picture_gets_none() -> None:
    class Cubes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x**3).sum((2, 3))

    pictures = torch.full((2, 2, 4, 4), 2.0)
    pictures[1, :, :2] = -2.0
    actual = PIXEL_METHODS["smoothgrad"](scored_batch(Cubes(), pictures)).values
    assert actual[0, 1].unique().tolist() == [12.0]  # 3 x^2, without noise
    # 3 (x^2 + deviation^2), with a deviation of 0.15 * 4.
    assert float(actual[1, 1].mean()) == pytest.approx(3 * (4 + 0.36), abs=0.5)


def test_occlusion_of_a_linear_network_is_the_mean_over_the_patches_that_cover_a_place() -> None:
    network, weights = linear()
    picture = torch.randn(1, 3, 14, 14, generator=torch.Generator().manual_seed(0))
    actual = PIXEL_METHODS["occlusion"](scored_batch(network, picture))
    # Patches of 14 // 7 = 2 in steps of 1: each takes weights times pixels away.
    falls = F.avg_pool2d((weights * picture[0]).sum(0)[None], 2, 1) * 4
    total, count = torch.zeros(14, 14), torch.zeros(14, 14)
    for row in range(13):
        for column in range(13):
            total[row : row + 2, column : column + 2] += falls[0, row, column]
            count[row : row + 2, column : column + 2] += 1
    torch.testing.assert_close(actual.values, (total / count).expand(1, 3, 14, 14), rtol=1e-4, atol=1e-4)
    assert actual.notes == ("Patches of 2x2 in steps of 1x1.",)


def test_integrated_gradients_take_more_steps_until_they_are_complete() -> None:
    scored = scored_batch(Smooth(), 3 * torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)))
    actual = PIXEL_METHODS["integrated-gradients"](scored)
    with torch.no_grad():
        pictures = scored.batch.args[0]
        span = scored.score(scored.network(pictures)) - scored.score(scored.network(torch.zeros_like(pictures)))
    assert actual.gap is not None
    assert float(actual.gap.max()) < COMPLETENESS_LIMIT
    torch.testing.assert_close(((actual.values.sum((1, 2, 3)) - span) / span).abs(), actual.gap)


@pytest.mark.exhaustive
def test_integrated_gradients_say_how_far_they_fall_short_where_no_number_of_steps_helps() -> None:
    class Steps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x.sum((1, 2, 3)), x.sum((1, 2, 3)) + 100 * (x.sum((1, 2, 3)) > 0.1)], 1)

    actual = PIXEL_METHODS["integrated-gradients"](scored_batch(Steps(), torch.full((1, 3, 8, 8), 0.01)))
    # The sum is 1.92 and the step, 100, has no gradient.
    assert actual.gap is not None
    torch.testing.assert_close(actual.gap, torch.tensor([100 / 101.92]))
    assert actual.notes == (f"Integrated from a picture of zeros, in {MOST_STEPS} steps at most.",)


def test_integrated_gradients_of_a_score_that_does_not_change_are_complete_only_if_they_add_up_to_nothing() -> None:
    class Even(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([0 * x.sum((1, 2, 3)), x[:, 0].sum((1, 2)) - x[:, 1].sum((1, 2))], 1)

    scored = scored_batch(Even(), torch.ones(1, 3, 2, 2))
    actual = PIXEL_METHODS["integrated-gradients"](scored)
    assert actual.gap is not None
    assert actual.gap.tolist() == [0]
    torch.testing.assert_close(actual.values[0, :, 0, 0], torch.tensor([1.0, -1, 0]))


def test_integrated_gradients_with_nan_are_not_said_to_be_complete() -> None:
    network, _ = linear()
    pictures = torch.ones(2, 3, 14, 14)
    pictures[0, 0, 3, 4] = torch.nan
    actual = PIXEL_METHODS["integrated-gradients"](scored_batch(network, pictures))
    assert actual.gap is not None
    assert actual.gap[0].isnan()
    assert float(actual.gap[1]) < 1e-4
    assert actual.notes == (f"Integrated from a picture of zeros, in {FIRST_STEPS} steps at most.",)
    run = hookscope.attribute(network, pictures[:1], method="integrated-gradients", sanity="none")
    assert run.sanity == ()


@pytest.mark.parametrize("method", PIXEL_METHODS)
def test_a_picture_gives_the_same_alone_and_among_others(method: Method) -> None:
    pictures = torch.rand(3, 3, 14, 14, generator=torch.Generator().manual_seed(2))
    pictures[1] *= 5
    network = InPlace()
    torch.manual_seed(0)
    together = PIXEL_METHODS[method](scored_batch(network, pictures)).values
    alone = []
    for index in range(3):
        torch.manual_seed(0)
        alone.append(PIXEL_METHODS[method](scored_batch(network, pictures[index : index + 1])).values)
    limits = {"rtol": 1.0, "atol": 0.2} if method == "smoothgrad" else {"rtol": 1e-4, "atol": 1e-6}  # other noise
    torch.testing.assert_close(together, torch.cat(alone), **limits)


@pytest.mark.parametrize("method", PIXEL_METHODS)
def test_the_network_is_never_given_more_inputs_than_the_batch_holds(method: Method) -> None:
    seen: list[int] = []

    class Counts(InPlace):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return super().forward(x)

    PIXEL_METHODS[method](scored_batch(Counts(), torch.rand(2, 3, 14, 14)))
    assert set(seen) == {2}


def test_detectors_are_given_a_list_of_pictures_and_others_their_further_inputs() -> None:
    class Takes(Smooth):
        def forward(self, x: Any, *, scale: Tensor | None = None) -> Tensor:
            output = super().forward(torch.stack(x) if isinstance(x, list) else x)
            return output if scale is None else output * scale[:, None]

    pictures, network = torch.rand(2, 3, 8, 8), Takes().eval()
    plain = PIXEL_METHODS["gradient"](scored_batch(network, pictures)).values
    listed = ScoredBatch(network, batch_of(list(pictures), count=2), of_class(1))
    assert torch.equal(PIXEL_METHODS["gradient"](listed).values, plain)
    record = batch_of(pictures, count=2)
    scaled = Batch(record.args, record.indices, record.records, {"scale": torch.tensor([2.0, 4.0])})
    actual = PIXEL_METHODS["gradient"](ScoredBatch(network, scaled, of_class(1))).values
    torch.testing.assert_close(actual, plain * torch.tensor([2.0, 4.0]).view(2, 1, 1, 1))


def test_half_precision_is_explained() -> None:
    network = InPlace().to(torch.bfloat16)
    for method, explain in PIXEL_METHODS.items():
        values = explain(scored_batch(network, torch.rand(1, 3, 14, 14, dtype=torch.bfloat16))).values
        assert torch.isfinite(map_of(method, values)).all()


@pytest.mark.parametrize("cut", [lambda x: x.detach()])
def test_a_network_that_cuts_the_gradient_off_says_what_to_do(cut: Callable[[Tensor], Tensor]) -> None:
    class Cuts(Smooth):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(cut(x))

    for method in ("gradient", "smoothgrad", "integrated-gradients"):
        with pytest.raises(UsageError, match=r"No gradient reaches the input: .*Use --method occlusion"):
            PIXEL_METHODS[method](scored_batch(Cuts(), torch.rand(1, 3, 8, 8)))
    assert float(PIXEL_METHODS["occlusion"](scored_batch(Cuts(), torch.rand(1, 3, 8, 8))).values.abs().max()) > 0


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (torch.rand(2), r"need one tensor as an argument: .* The network is given a tensor 2\.$"),
        (torch.rand(2, 3, 2, 2, 2, 2), "is given a tensor 2x3x2x2x2x2"),
        (torch.zeros(2, 7, dtype=torch.long), "whole numbers, 2x7, .* --method grad-cam --layer NAME"),
    ],
)
def test_inputs_without_places_or_gradients_are_refused_with_a_way_out(inputs: Tensor, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        PIXEL_METHODS["gradient"](scored_batch(Smooth(), inputs))


@pytest.mark.parametrize("method", PIXEL_METHODS)
def test_an_input_by_name_gives_the_maps_of_the_same_input_by_position(method: Method) -> None:
    class Scaled(InPlace):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            output = super().forward(x)
            return output if scale is None else output * scale

    x, scale = torch.rand(2, 3, 8, 8), torch.full((2, 1), 2.0)
    plain = hookscope.attribute(Scaled(), x, method=method, target=1)
    named = hookscope.attribute(Scaled(), {"scale": scale, "x": x}, method=method, target=1)
    for once, twice in zip(plain.maps, named.maps, strict=True):
        np.testing.assert_allclose(twice.values, 2 * once.values, rtol=1e-5, atol=1e-7)
    assert "deletion" in [check.name for check in named.sanity]


@pytest.mark.parametrize("method", ["integrated-gradients", "occlusion"])
def test_without_captum_one_line_says_what_to_install(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "captum", None)
    with pytest.raises(UsageError, match=r"^--method .* pip install 'hookscope\[attribute\]'$"):
        PIXEL_METHODS[method](scored_batch(Smooth(), torch.rand(1, 3, 8, 8)))


def test_maps_are_magnitudes_of_gradients_and_sums_of_shares() -> None:
    pixels = torch.tensor([1.0, -3.0, 0.5]).view(1, 3, 1, 1)
    assert map_of("gradient", pixels).item() == 3
    assert map_of("guided-backprop", pixels).item() == 3
    assert map_of("smoothgrad", pixels).item() == 3
    assert map_of("input-x-gradient", pixels).item() == -1.5
    assert map_of("integrated-gradients", pixels).item() == -1.5
    assert map_of("occlusion", torch.full((1, 3, 1, 1), -2.0)).item() == -2
