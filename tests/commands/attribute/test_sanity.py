"""Sanity checks on networks that have learnt something, with maps that are right and maps that cannot be."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hookscope.commands.attribute.pixels import PIXEL_METHODS, ScoredBatch, map_of
from hookscope.commands.attribute.sanity import (
    Map,
    Numbers,
    class_check,
    completeness_check,
    correlations,
    deletion_check,
    deletions,
    randomised,
    rank_correlation,
    weights_check,
    weights_correlations,
)
from hookscope.errors import ModelError
from hookscope.results.attributions import Method
from tests.networks import batch_of

SIDE = 32


def shapes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return pictures of noise with one of three shapes somewhere, a disc, a bar or a cross, and which it is."""
    generator = torch.Generator().manual_seed(seed)
    pictures = 0.3 * torch.randn(count, 3, SIDE, SIDE, generator=generator)
    kinds = torch.randint(3, (count,), generator=generator)
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    for picture, kind in zip(pictures, kinds.tolist(), strict=True):
        y, x = torch.randint(6, SIDE - 6, (2,), generator=generator).tolist()
        down, right = (rows - y).abs(), (columns - x).abs()
        shape = [
            (down**2 + right**2) <= 20,
            (down <= 1) & (right <= 5),
            ((down <= 1) & (right <= 4)) | ((down <= 4) & (right <= 1)),
        ][kind]
        picture[:, shape] += 1.5
    return pictures, kinds


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 3),
    )
    optimiser = torch.optim.Adam(network.parameters(), 6e-3)
    pictures, kinds = shapes(800, 1)
    for _ in range(200):
        some = torch.randint(800, (64,))
        optimiser.zero_grad()
        F.cross_entropy(network(pictures[some]), kinds[some]).backward()
        optimiser.step()
    network.eval()
    pictures, kinds = shapes(200, 10_000)
    assert float((network(pictures).argmax(1) == kinds).float().mean()) > 0.9
    for parameter in network.parameters():
        parameter.grad = None
    return network


def maps_by(method: Method, network: nn.Module, pictures: Tensor, classes: Tensor) -> list[Map]:
    def score(output: object) -> Tensor:
        assert isinstance(output, Tensor)
        return output[torch.arange(len(classes)), classes]

    scored = ScoredBatch(network, batch_of(pictures, count=len(pictures)), score)
    return [*map_of(method, PIXEL_METHODS[method](scored).values).numpy()]


def edges(pictures: Tensor) -> list[Map]:
    """Return what a Sobel filter makes of pictures: a map that knows no network."""
    grey, kernel = pictures.mean(1, keepdim=True), torch.tensor([[1.0, 0, -1], [2, 0, -2], [1, 0, -1]])[None, None]
    across, down = F.conv2d(grey, kernel, padding=1), F.conv2d(grey, kernel.mT, padding=1)
    return [*(across**2 + down**2).sqrt()[:, 0].numpy()]


def noise(count: int, cells: int = SIDE) -> list[Map]:
    return [*np.random.default_rng(1).standard_normal((count, cells, cells)).astype(np.float32)]


def probability_of(network: nn.Module, classes: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda pictures: network(pictures).softmax(1)[torch.arange(len(classes)), classes]


def test_rank_correlation_is_spearmans_with_shared_ranks_for_equal_values() -> None:
    # Ranks 1 2.5 2.5 4 and 1 3 2 4: deviations -1.5 0 0 1.5 and -1.5 0.5 -0.5 1.5, so 4.5 / √(4.5 · 5).
    first, second = np.float32([[1, 2], [2, 9]]), np.float32([[-1, 5], [4, 6]])
    assert rank_correlation(first, second) == pytest.approx(4.5 / math.sqrt(22.5))
    assert rank_correlation(first, first**3) == pytest.approx(1)
    assert rank_correlation(first, -first) == pytest.approx(-1)
    # Without ties 1 - 6 Σd² / (n³ - n): ranks 1 2 3 4 5 and 2 1 4 3 5, Σd² = 4.
    assert rank_correlation(np.float32([[1, 2, 3, 4, 5]]), np.float32([[20, 1, 40, 30, 90]])) == pytest.approx(0.8)


@pytest.mark.parametrize("other", [np.zeros((2, 2)), np.full((2, 2), np.nan), np.array([[1, np.inf], [0, 2]])])
def test_maps_without_an_order_correlate_with_none(other: Map) -> None:
    ordered, other = np.float32([[1, 2], [3, 4]]), other.astype(np.float32)
    assert rank_correlation(ordered, other) == 0
    np.testing.assert_array_equal(correlations([ordered, other], [other, ordered]), [0, math.nan])


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_randomising_moves_values_of_the_last_layers_alone_and_of_a_copy(trained: nn.Module, share: float) -> None:
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    actual = randomised(trained, share, seed=3)
    assert all(torch.equal(value, before[name]) for name, value in trained.state_dict().items())
    moved = ["0", "2", "4", "8"] if share == 1 else ["2", "4", "8"]
    for name, value in actual.state_dict().items():
        assert torch.equal(value.flatten().sort().values, before[name].flatten().sort().values)
        assert torch.equal(value, before[name]) == (name.partition(".")[0] not in moved)
    again = randomised(trained, share, seed=3)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in actual.state_dict().items())


def test_large_layers_are_drawn_anew_with_the_same_mean_and_deviation() -> None:
    network = nn.Linear(1100, 1000, dtype=torch.float64)
    with torch.no_grad():
        network.weight.normal_(0.5, 2.0)
    actual = randomised(network, 1.0, seed=0)
    assert not torch.equal(actual.weight, network.weight)
    assert actual.weight.dtype == torch.float64
    # Of 1.1 million values the mean is known to 2 / √1.1e6 = 0.002, and the deviation to 0.0014.
    assert float(actual.weight.detach().mean()) == pytest.approx(float(network.weight.detach().mean()), abs=0.01)
    assert float(actual.weight.detach().std()) == pytest.approx(float(network.weight.detach().std()), abs=0.007)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_large_layer_without_a_deviation_is_shuffled(bad: float) -> None:
    network = nn.Linear(1100, 1000)
    with torch.no_grad():
        network.weight[0, 0] = bad
    actual = randomised(network, 1.0, seed=0).weight
    assert int((~actual.isfinite()).sum()) == 1
    assert not torch.equal(actual, network.weight)


def test_a_network_that_cannot_be_copied_is_said_in_one_line() -> None:
    network = nn.Linear(2, 2)
    network.lines = (letter for letter in "ab")  # type: ignore[assignment]
    with pytest.raises(ModelError, match=r"^Linear cannot be copied: TypeError: cannot pickle 'generator' object\.$"):
        randomised(network, 1.0, 0)


@pytest.mark.parametrize("method", ["gradient", "input-x-gradient"])
def test_gradients_pass_the_first_check_and_an_edge_detector_fails_it(trained: nn.Module, method: Method) -> None:
    pictures, kinds = shapes(8, 99)
    honest = weights_check(
        weights_correlations(
            trained,
            lambda network: maps_by(method, network, pictures, kinds),
            maps_by(method, trained, pictures, kinds),
            seed=0,
        )
    )
    assert honest.passed, honest
    planted = weights_check(weights_correlations(trained, lambda _: edges(pictures), edges(pictures), seed=0))
    assert not planted.passed
    assert planted.value == pytest.approx(1)
    assert "like those of an edge detector" in planted.meaning


def test_gradients_pass_the_second_check_and_mere_activations_fail_it(trained: nn.Module) -> None:
    pictures, kinds = shapes(8, 99)
    others = trained(pictures).detach().scatter(1, kinds[:, None], -torch.inf).argmax(1)
    honest = class_check(
        correlations(maps_by("gradient", trained, pictures, kinds), maps_by("gradient", trained, pictures, others))
    )
    assert honest.passed, honest
    activations = [*trained[:6](pictures).detach().mean(1).numpy()]
    planted = class_check(correlations(activations, activations))
    assert not planted.passed
    assert planted.value == pytest.approx(1)
    assert "why it chose this class" in planted.meaning


def enlarged(maps: Tensor) -> Tensor:
    return F.interpolate(maps[:, None].float(), SIDE, mode="bilinear", align_corners=False)[:, 0]


@pytest.mark.parametrize("cells", [4, SIDE])
def test_blurring_where_the_gradient_is_takes_the_class_away_and_blurring_where_noise_is_does_not(
    trained: nn.Module, cells: int
) -> None:
    pictures, kinds = shapes(40, 99)
    kinds = trained(pictures).detach().argmax(1)
    probability = probability_of(trained, kinds)
    honest = torch.tensor(np.abs(np.stack(maps_by("input-x-gradient", trained, pictures, kinds))))
    for maps in (honest, enlarged(F.adaptive_avg_pool2d(honest, 8))):
        actual = deletion_check(deletions(pictures, maps, probability, seed=0))
        assert actual.passed, actual
        assert actual.value < actual.compared_with[1] < actual.compared_with[0]
    planted = deletion_check(
        deletions(pictures, enlarged(torch.tensor(np.stack(noise(40, cells)))), probability, seed=0)
    )
    assert not planted.passed, planted


def test_deletion_blurs_a_tenth_and_puts_the_same_shape_elsewhere() -> None:
    seen: list[Tensor] = []

    def probability(pictures: Tensor) -> Tensor:
        seen.append(pictures.clone())
        return torch.full((1,), 0.5)

    picture = torch.rand(1, 3, 20, 30, generator=torch.Generator().manual_seed(0))
    values = np.zeros((20, 30), np.float32)
    values[4:10, 5:15] = 1  # 60 of 600 places
    deletions(picture, torch.as_tensor(values)[None], probability, seed=0)
    assert torch.equal(seen[0], picture)
    changed = [(each != picture).any(1)[0] for each in seen[1:]]
    assert torch.equal(changed[0], torch.as_tensor(values) == 1)
    assert all(int(tensor.sum()) == 60 for tensor in changed)
    assert len({tuple(each.flatten().tolist()) for each in changed[1:]}) > 5


def of_blurring(before: float, after: float, *at_random: float) -> Numbers:
    return np.array([[before], [after], *([each] for each in at_random)])


@pytest.mark.parametrize(
    ("actual", "passed", "words"),
    [
        # One tenth alone takes it away: 0.8 to 0.5, and one of four random places does more harm, 75% less.
        (of_blurring(0.8, 0.5, 0.78, 0.79, 0.4, 0.8), True, "from 0.80 to 0.50, blurring as much in random places to"),
        (of_blurring(0.8, 0.78, 0.5, 0.6, 0.7, 0.79), False, "it does more harm than 25% of the random places (at"),
        # What the map marks speaks against the target.
        (of_blurring(0.5, 0.9, 0.5, 0.5), False, "it does more harm than 0% of the random places"),
        # Nothing changes in two digits, and hardly in four: the case.
        (
            of_blurring(0.1217, 0.1212, 0.1216, 0.1216),
            None,
            "from 0.1217 to 0.1212, blurring as much in random places to 0.1216: only a fall by 5% or more would",
        ),
        # On the shipped cat blurring raises the probability, wherever it is.
        (
            of_blurring(0.39, 0.45, 0.51, 0.5),
            None,
            "from 0.39 to 0.45, blurring as much in random places to 0.51: only a fall",
        ),
    ],
)
def test_blurring_holds_fails_or_says_nothing(actual: Numbers, passed: bool | None, words: str) -> None:
    check = deletion_check(actual)
    assert check.passed is passed
    assert words in check.meaning


def test_completeness_passes_within_its_limit() -> None:
    assert completeness_check(0.004).passed
    failed = completeness_check(0.25)
    assert not failed.passed
    assert failed.meaning.startswith(
        "The values add up to the difference that the picture makes to the score, but for 25.00%"
    )
