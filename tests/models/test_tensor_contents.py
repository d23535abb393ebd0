"""Statistics of stored values: against NumPy's of each element."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hookscope.models import tensor_contents
from hookscope.models.tensor_contents import Values, values_of_tensor

EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 16 elements, so that small tensors are read in several."""
    monkeypatch.setattr(tensor_contents, "PIECE_ELEMENTS", 16)


def assert_values(actual: Values | None, elements: np.ndarray) -> None:
    """Hold what was found against NumPy's statistics of float64 or complex128 elements."""
    assert actual is not None
    nans = np.isnan(elements)
    infs = np.isinf(elements) & ~nans
    finite = elements[~nans & ~infs]
    finite = np.abs(finite) if np.iscomplexobj(finite) else finite
    assert actual[:3] == (nans.sum(), infs.sum(), (elements == 0).sum())
    if not finite.size:
        assert actual[3:] == (None,) * 4
        return
    assert (actual.min, actual.max) == (finite.min(), finite.max())
    size = max(abs(finite.min()), abs(finite.max()))
    assert actual.mean == pytest.approx(finite.mean(), abs=1e-6 * size)
    assert actual.std == pytest.approx(finite.std(), rel=1e-5, abs=1e-6 * size)


def planted(shape: tuple[int, ...], dtype: torch.dtype, nans: list[int], infs: list[int]) -> torch.Tensor:
    tensor = torch.linspace(-1, 1, torch.Size(shape).numel()).to(dtype)
    tensor[infs] = float("-inf")
    tensor[nans] = float("nan")
    tensor[7] = 0
    return tensor.reshape(shape)


def plain(tensor: torch.Tensor) -> np.ndarray:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.to(wide).flatten().numpy()


def test_the_extremes_of_large_whole_numbers_are_exact() -> None:
    actual = values_of_tensor(torch.tensor([2**62 + 1, 2**62 + 3, -(2**62) - 1]))
    assert (actual.min, actual.max) == (-(2**62) - 1, 2**62 + 3)
    actual = values_of_tensor(torch.tensor([2**63 + 1, 2**64 - 1], dtype=torch.uint64))
    assert (actual.min, actual.max) == (2**63 + 1, 2**64 - 1)


@pytest.mark.parametrize("dtype", [*EIGHT_BITS, torch.float16, torch.bfloat16])
def test_every_pattern_of_bits_is_read_as_torch_reads_it(dtype: torch.dtype) -> None:
    integers = torch.int8 if dtype.itemsize == 1 else torch.int16
    limits = torch.iinfo(integers)
    patterns = torch.arange(limits.min, limits.max + 1).to(integers).view(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_contents, "PIECE_ELEMENTS", 2**14)
        assert_values(values_of_tensor(patterns), patterns.float().double().numpy())


def test_opposite_infinities_do_not_cancel_and_a_nan_in_either_part_is_one() -> None:
    assert values_of_tensor(torch.tensor([float("inf"), float("-inf")])) == Values(0, 2, 0)
    parts = torch.tensor([complex(math.inf, math.nan), complex(math.nan, 0), complex(0, -math.inf), 3 + 4j])
    assert values_of_tensor(parts) == Values(2, 1, 0, 5, 5, 5, 0)


def test_little_spread_about_a_large_mean_is_not_lost() -> None:
    tensor = (1e6 + torch.arange(64) % 2).float()
    assert values_of_tensor(tensor) == Values(0, 0, 0, 1e6, 1e6 + 1, pytest.approx(1e6 + 0.5), pytest.approx(0.5))


@settings(max_examples=60, deadline=None)
@given(
    st.permutations([0, 1, 2]),
    st.lists(st.slices(6), min_size=3, max_size=3),
    st.sets(st.integers(0, 6 * 5 * 7 - 1), max_size=30),
)
def test_views_show_their_own_elements_alone(order: list[int], slices: list[slice], nans: set[int]) -> None:
    whole = planted((6, 5, 7), torch.float32, nans=sorted(nans), infs=[])
    forward = [slice(step.start, step.stop, abs(step.step or 1)) for step in slices]
    view = whole.permute(order)[tuple(forward)]
    assert_values(values_of_tensor(view), plain(view))


def test_an_expanded_tensor_shows_each_element_so_often_however_large_it_is() -> None:
    expanded = torch.tensor([[float("nan")], [1.0], [0.0]]).expand(3, 5)
    assert values_of_tensor(expanded) == Values(5, 0, 5, 0, 1, 0.5, 0.5)
    assert values_of_tensor(torch.ones(1).expand(10**12)) == Values(0, 0, 0, 1, 1, 1, 0)
    sparse = torch.sparse_coo_tensor(
        [[0, 1, 2]], torch.ones(1).expand(3), (4,), is_coalesced=True, check_invariants=True
    )
    assert values_of_tensor(sparse) == Values(0, 0, 1, 0, 1, 0.75, math.sqrt(3) / 4)


@pytest.mark.parametrize(
    "view",
    [torch.ones(100, 100)[::50, ::50], torch.ones(30).as_strided((20, 10), (1, 1))],
    ids=["apart", "overlapping"],
)
def test_a_view_too_scattered_is_not_read(view: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    assert values_of_tensor(view) == Values(0, 0, 0, 1, 1, 1, 0)
    monkeypatch.setattr(tensor_contents, "_GATHER_BYTES_LIMIT", 100 if view.numel() > 9 else 10)
    assert values_of_tensor(view) is None
