from contextlib import suppress

import pytest
import torch
from torch import nn

from hookscope.models.construction import parameter_count, seeded, skipped_initialisation
from tests.models.saved import draw, random_numbers_untouched, seed_all


def test_seeded_block_draws_what_manual_seed_gives() -> None:
    with seeded(11):
        inside = draw()
    seed_all(11)
    assert inside == draw()


@pytest.mark.parametrize("raises", [False, True])
def test_seeded_block_leaves_the_generators_as_they_were(raises: bool) -> None:
    with random_numbers_untouched(), suppress(KeyError), seeded(0):
        draw()
        if raises:
            raise KeyError


def test_seed_beyond_numpys_range_is_taken() -> None:
    with seeded(2**40 + 5):
        first = draw()
    with seeded(2**40 + 5):
        assert draw() == first


def test_skipped_initialisation_writes_no_parameter() -> None:
    weight = nn.Parameter(torch.full((4, 5), 7.0))
    with skipped_initialisation(), torch.no_grad():
        for fill in (nn.init.kaiming_normal_, nn.init.xavier_uniform_, nn.init.trunc_normal_, nn.init.zeros_):
            assert fill(weight) is weight
        nn.init.constant_(weight, 3.0)
        weight.normal_()
        weight.uniform_()
        weight.fill_(1.0)
        weight.zero_()
    assert torch.equal(weight, torch.full((4, 5), 7.0))


def test_skipped_initialisation_still_fills_buffers_and_loads_state_dicts() -> None:
    source = nn.BatchNorm1d(3)
    nn.init.constant_(source.weight, 5.0)
    with skipped_initialisation():
        norm = nn.BatchNorm1d(3)
        assert torch.equal(norm.running_mean, torch.zeros(3))
        assert torch.equal(norm.running_var, torch.ones(3))
        plain = nn.init.trunc_normal_(torch.full((50,), 100.0), a=-1.0, b=1.0)
        norm.load_state_dict(source.state_dict())
    assert plain.abs().max() <= 1
    assert torch.equal(norm.weight, torch.full((3,), 5.0))


def test_initialisation_is_as_before_after_the_block() -> None:
    before = nn.init.trunc_normal_
    with pytest.raises(KeyError), skipped_initialisation():
        raise KeyError
    assert nn.init.trunc_normal_ is before
    torch.manual_seed(0)
    weight = nn.Linear(3, 3).weight
    torch.manual_seed(0)
    assert torch.equal(weight, nn.Linear(3, 3).weight)


def test_parameter_count_counts_a_tied_parameter_once() -> None:
    first, second = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)
    second.weight = first.weight
    assert parameter_count(nn.Sequential(first, second, nn.BatchNorm1d(4))) == 3 * 4 + 4 + 4


def test_parameter_count_leaves_out_lazy_parameters() -> None:
    assert parameter_count(nn.Sequential(nn.LazyLinear(7), nn.Linear(7, 2))) == 7 * 2 + 2
