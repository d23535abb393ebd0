"""Statistics against NumPy in float64.

Tolerances. Counts, extremes, zero and dead-channel shares are exact. Sums are accumulated in the tensor's own
precision, at least float32, whose unit roundoff is 6e-8; sums of squares run over rows short enough to stay good to
1e-6, and the one-pass variance may lose a factor of eleven before the centred form takes over. Hence 1e-5 relative for
the mean absolute value, L2 and the standard deviation, and for the mean 1e-5 of the mean absolute value, since terms
of both signs cancel.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.masked import masked_tensor

import hookscope
from hookscope.errors import UsageError
from hookscope.results.distribution import Distribution, distribution_of, key_of
from hookscope.results.statistics import QUANTILE_LEVELS, TensorStatistics
from hookscope.statistics.reducer import Reducer, collect, summarise
from hookscope.statistics.reducer import tensor_statistics as measure
from hookscope.statistics.reduction import Reduction, merge
from hookscope.statistics.storage import is_dense
from tests.networks import Apply, Written

RELATIVE = 1e-5

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
EIGHT_BIT_FLOATS = [torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.uint8, torch.int16, torch.int64, torch.uint16, torch.uint64]


def reduce_tensor(tensor: Tensor, channel_axis: int | None = None) -> Reduction:
    return collect([Reducer(distributions=True).reduce(tensor, channel_axis)])[0]


def exact(tensor: Tensor) -> NDArray[np.float64]:
    """Return the values in float64, which holds every one of the narrower dtypes exactly."""
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return tensor.numpy().astype(np.float64)
    return tensor.detach().double().numpy()


def check(
    statistics: TensorStatistics, values: NDArray[np.float64], channel_axis: int | None = None, rounding: float = 0.0
) -> None:
    """Compare statistics with a plain float64 computation on `values`, which are right to a relative `rounding`."""
    finite = values[np.isfinite(values)]
    if not rounding:
        same_distribution(statistics.distribution, values)
    assert statistics.unmeasured is None
    assert statistics.element_count == values.size
    assert statistics.nan_count == np.isnan(values).sum()
    assert statistics.inf_count == np.isinf(values).sum()
    assert statistics.zero_fraction == (values == 0).sum() / values.size
    if channel_axis is not None:
        by_channel = np.moveaxis(values, channel_axis, 0).reshape(values.shape[channel_axis], -1)
        assert statistics.channel_axis == channel_axis
        assert statistics.channel_count == values.shape[channel_axis]
        assert statistics.dead_channel_count == (by_channel == 0).all(axis=1).sum()
    if not finite.size:
        for name in ("mean", "std", "min", "max", "mean_abs", "l2", "quantiles"):
            assert getattr(statistics, name) is None
        return
    # A power of two near the largest value, so that NumPy's squares neither overflow nor vanish.
    scale = 2.0 ** math.frexp(np.abs(finite).max())[1]
    scaled = finite / scale
    mean_abs = np.abs(scaled).mean() * scale
    assert statistics.min == pytest.approx(finite.min(), rel=rounding, abs=0)
    assert statistics.max == pytest.approx(finite.max(), rel=rounding, abs=0)
    assert statistics.mean_abs == pytest.approx(mean_abs, rel=RELATIVE, abs=0)
    assert statistics.mean == pytest.approx(scaled.mean() * scale, rel=0, abs=RELATIVE * mean_abs)
    assert statistics.l2 == pytest.approx(np.sqrt((scaled**2).sum()) * scale, rel=RELATIVE, abs=0)
    # NumPy's own mean of equal values may be off by a rounding, which is all that is left of such a deviation.
    floor = 1e-15 * np.abs(finite).max()
    assert statistics.std == pytest.approx(scaled.std() * scale, rel=RELATIVE, abs=floor)


def same_distribution(actual: Distribution | None, values: NDArray[np.float64]) -> None:
    """Compare a distribution with that of float64 values by its definition."""
    expected = distribution_of(values[np.isfinite(values)])
    if expected is None or actual is None:
        assert actual is expected
        return
    assert (actual.low, actual.high, actual.count) == (expected.low, expected.high, expected.count)
    assert (actual.values is None) == (expected.values is None)
    if actual.values is not None:
        assert np.array_equal(actual.values, expected.values)
    for ours, theirs in zip(actual.binned(), expected.binned(), strict=True):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)


def random_tensor(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


shapes = st.lists(st.integers(1, 40), min_size=0, max_size=4).filter(lambda shape: math.prod(shape) <= 60_000)
seeds = st.integers(0, 2**31)


# --- values ---


@settings(max_examples=150, deadline=None)
@given(shape=shapes, seed=seeds, dtype=st.sampled_from(FLOATS), zeros=st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_measures_random_values_of_any_shape(shape: list[int], seed: int, dtype: torch.dtype, zeros: float) -> None:
    tensor = random_tensor(shape, seed, dtype)
    tensor[torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)) < zeros] = 0
    axis = len(shape) // 2 if shape else None
    check(measure(tensor, axis), exact(tensor), axis)


@settings(max_examples=150, deadline=None)
@given(values=hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=8), elements=st.floats(width=32)))
@pytest.mark.exhaustive
def test_measures_any_float32_values(values: NDArray[np.float32]) -> None:
    check(measure(torch.from_numpy(values), 0), values.astype(np.float64), 0)


@pytest.mark.parametrize("count", [1, 8193, 65_536, 1_000_003])
@pytest.mark.parametrize("value", [-0.1, 3.7e4, 1e-25, 1e-42])
def test_constant_values_have_no_deviation_and_no_accumulated_error(value: float, count: int) -> None:
    statistics = measure(torch.full((count,), value))
    stored = float(np.float32(value))
    assert statistics.std == 0
    assert statistics.min == statistics.max == stored
    assert statistics.mean == pytest.approx(stored, rel=1e-6)
    assert statistics.mean_abs == pytest.approx(abs(stored), rel=1e-6)
    assert statistics.l2 == pytest.approx(abs(stored) * math.sqrt(count), rel=1e-6)


@pytest.mark.parametrize("count", [10, 8200, 100_003])
@pytest.mark.parametrize("mean", [30.0, -1e4, 1e6, 1.5e7])
def test_a_deviation_survives_a_huge_mean(mean: float, count: int) -> None:
    tensor = (mean + random_tensor([count], seed=count, dtype=torch.float64)).float()
    check(measure(tensor), exact(tensor))


@pytest.mark.parametrize("count", [64, 20_011])
@pytest.mark.parametrize("every", [3, 5000])
@pytest.mark.parametrize("value", [0.1, 7.85])
def test_a_deviation_of_two_neighbouring_floats(value: float, every: int, count: int) -> None:
    tensor = torch.full((count,), value)
    tensor[::every] = torch.nextafter(torch.tensor(value), torch.tensor(10.0))
    check(measure(tensor), exact(tensor))


@pytest.mark.parametrize("exponent", [-44, -25, -20, -17, -5, 15, 17, 19, 25, 37])
@pytest.mark.parametrize("count", [7, 8192, 100_003])
def test_squares_neither_vanish_nor_overflow(exponent: int, count: int) -> None:
    tensor = (random_tensor([count], seed=1, dtype=torch.float64).clamp(-9, 9) * 10.0**exponent).float()
    check(measure(tensor), exact(tensor))


@pytest.mark.parametrize("exponent", range(14, 20))
@pytest.mark.parametrize("count", [200_000])
def test_squares_that_are_all_large_do_not_overflow_together(exponent: int, count: int) -> None:
    tensor = random_tensor([count], seed=1).sign() * 9.9 * 10.0**exponent
    check(measure(tensor), exact(tensor))


SUBNORMAL = torch.tensor([1e-45, 0.0, 1e-42, -3e-40])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.full((50_000,), 0.1).index_fill(0, torch.tensor([17]), 1e12),  # which must not hide the rest
        torch.tensor([-6e4, 6e4], dtype=torch.float16).repeat(50_000),  # whose half-precision sum would overflow
        SUBNORMAL,
        torch.cat([SUBNORMAL, torch.ones(4)]),
        torch.tensor([[0.0], [2.0]]).expand(2, 5000),
    ],
    ids=["outlier", "half precision", "subnormal", "subnormal beside ones", "expanded"],
)
def test_measures_odd_values(tensor: Tensor) -> None:
    check(measure(tensor, 0), exact(tensor), 0)


@pytest.mark.parametrize("dtype", EIGHT_BIT_FLOATS, ids=str)
def test_measures_eight_bit_floats(dtype: torch.dtype) -> None:
    tensor = random_tensor([3, 700], seed=2).mul(3).to(dtype)
    statistics = measure(tensor, 0)
    assert statistics.dtype == str(dtype).removeprefix("torch.")
    check(statistics, exact(tensor.float()), 0)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_measures_integers(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    low, high = max(info.min, -(2**40)), min(info.max, 2**40)
    values = np.random.default_rng(3).integers(low, high, size=(4, 5, 60), endpoint=True)
    values[:, 2] = 0
    tensor = torch.from_numpy(values.astype(str(dtype).removeprefix("torch.")))
    check(measure(tensor, 1), exact(tensor), 1)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 2000), min_size=1, max_size=30),
    exponent=st.integers(-140, 110),
    poison=st.lists(st.sampled_from([complex(math.nan, 1), complex(1, math.nan), complex(-math.inf, 2)]), max_size=3),
)
def test_measures_complex_values_by_modulus(lengths: list[int], exponent: int, poison: list[complex]) -> None:
    directions = [3 + 4j, -4 + 3j, 5j, -5 + 0j]  # all of modulus 5
    values = [length * directions[index % 4] for index, length in enumerate(lengths)]
    moduli = [5.0 * length for length in lengths] + [abs(value) for value in poison]
    tensor = torch.tensor(values, dtype=torch.complex128) * 2.0**exponent
    tensor = torch.cat([tensor, torch.tensor(poison, dtype=torch.complex128)]).to(torch.complex64)
    expected = np.array(moduli)
    expected[: len(lengths)] *= 2.0**exponent
    check(measure(tensor, 0), expected, 0)


def test_a_modulus_may_exceed_what_its_parts_can_hold() -> None:
    largest = torch.finfo(torch.float32).max
    statistics = measure(torch.complex(torch.tensor([largest]), torch.tensor([largest])))
    assert statistics.inf_count == 0
    assert statistics.max == pytest.approx(math.sqrt(2) * largest)


@pytest.mark.parametrize("repeats", [1, 100_000])
def test_measures_conjugated_and_negated_views(repeats: int) -> None:
    tensor = torch.tensor([3 + 4j, -5j, 0j]).repeat(repeats).conj()
    check(measure(tensor), np.array([5.0, 5.0, 0.0] * repeats))
    check(measure(tensor.imag), np.array([-4.0, 5.0, 0.0] * repeats))


def test_negative_zero_is_a_zero() -> None:
    statistics = measure(torch.tensor([[-0.0, 0.0], [-0.0, 1.0]]), 1)
    assert (statistics.zero_fraction, statistics.dead_channel_count) == (0.75, 1)
    statistics = measure(torch.tensor([-0.0, -0.0, -1.0]))
    assert statistics.zero_fraction == 2 / 3


# --- values that are not finite ---


@settings(max_examples=150, deadline=None)
@given(
    shape=shapes.filter(lambda shape: math.prod(shape) > 0),
    seed=seeds,
    dtype=st.sampled_from([*FLOATS, torch.float8_e5m2]),
    poison=st.lists(st.sampled_from([math.nan, math.inf, -math.inf]), min_size=1, max_size=5),
)
def test_takes_statistics_over_the_finite_values(
    shape: list[int], seed: int, dtype: torch.dtype, poison: list[float]
) -> None:
    tensor = random_tensor(shape, seed)
    flat = tensor.view(-1)
    for offset, value in enumerate(poison):
        flat[(seed + 31 * offset) % flat.numel()] = value
    tensor = tensor.to(dtype)
    axis = len(shape) - 1 if shape else None
    check(measure(tensor, axis), exact(tensor.float() if tensor.itemsize == 1 else tensor), axis)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("count", [1, 5000, 70_000])
def test_without_finite_values_only_counts_remain(value: float, count: int) -> None:
    check(measure(torch.full((2, count), value), 0), np.full((2, count), value), 0)


# --- sizes ---


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 5), (3, 4, 0, 7)])
def test_an_empty_tensor_has_no_statistics_and_is_not_an_error(shape: tuple[int, ...]) -> None:
    statistics = measure(torch.empty(shape), 1 if len(shape) > 1 else None)
    assert (statistics.shape, statistics.element_count, statistics.unmeasured) == (shape, 0, None)
    assert statistics.mean is None
    assert statistics.std is None
    assert statistics.quantiles is None


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1, 1)])
@pytest.mark.parametrize("value", [0.0, -2.5])
def test_one_element_deviates_by_nothing(shape: tuple[int, ...], value: float) -> None:
    statistics = measure(torch.full(shape, value), 1 if len(shape) > 1 else None)
    assert statistics.shape == shape
    assert (statistics.mean, statistics.std, statistics.l2) == (value, 0, abs(value))
    assert statistics.quantiles == (value,) * len(QUANTILE_LEVELS)


@pytest.mark.parametrize("position", [0, 2**24 + 7])
def test_counts_stay_exact_beyond_the_integers_of_float32(position: int) -> None:
    tensor = torch.ones(1, 2**24 + 8)
    tensor[0, position] = 0  # leaves an odd number of ones, which float32 does not have
    pendings = [reduce_tensor(tensor, 0), reduce_tensor(torch.tensor([0.0, -1.0, 2.0]))]
    large, small = summarise(collect(pendings))
    assert large.zero_fraction == 1 / tensor.numel()
    assert (large.nan_count, large.inf_count, large.dead_channel_count) == (0, 0, 0)
    assert large.mean == pytest.approx(1, abs=RELATIVE)
    assert large.std == pytest.approx(1 / math.sqrt(tensor.numel()), rel=RELATIVE)
    assert large.l2 == pytest.approx(math.sqrt(tensor.numel() - 1), rel=RELATIVE)
    assert small.zero_fraction == 1 / 3


# --- memory layouts ---


@settings(max_examples=100, deadline=None)
@given(
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    seed=seeds,
    data=st.data(),
    dtype=st.sampled_from(FLOATS),
)
def test_the_order_in_memory_does_not_matter(
    shape: list[int], seed: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    tensor = random_tensor(shape, seed, dtype).relu()
    tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    for axis in range(tensor.dim()):
        if data.draw(st.booleans()):
            tensor = tensor.narrow(axis, tensor.shape[axis] // 2, tensor.shape[axis] - tensor.shape[axis] // 2)
    if data.draw(st.booleans()):
        tensor = tensor[..., ::2]
    if data.draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    axis = data.draw(st.integers(0, tensor.dim() - 1))
    check(measure(tensor, axis), exact(tensor), axis)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("to_layout", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_a_sparse_tensor_is_measured_with_the_zeros_it_implies(to_layout: str) -> None:
    dense = random_tensor([40, 50], seed=7) * (random_tensor([40, 50], seed=8) > 1)
    statistics = measure(getattr(dense, to_layout)(), 1)
    check(statistics, exact(dense))
    assert statistics.shape == (40, 50)
    assert statistics.channel_count is None


@pytest.mark.filterwarnings("ignore:Sparse")
def test_measures_block_sparse_and_hybrid_tensors_and_sums_entries_at_one_place_first() -> None:
    dense = torch.zeros(8, 6)
    dense[2:4, 0:3] = random_tensor([2, 3], seed=9)
    check(measure(dense.to_sparse_bsr((2, 3))), exact(dense))
    check(measure(dense.to_sparse(1), 1), exact(dense))
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, 0, 1]]), [1.0, 2.0, -3.0], (4,))
    assert not tensor.is_coalesced()
    check(measure(tensor), np.array([3.0, -3.0, 0.0, 0.0]))
    assert not tensor.is_coalesced()


@pytest.mark.filterwarnings("ignore:Sparse")
def test_the_zeros_of_a_huge_sparse_tensor_are_counted_without_being_stored() -> None:
    side = 2**20
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2], [5, 6, 7]]), [1.0, 2.0, 3.0], (side, side))
    reduction = reduce_tensor(tensor)
    assert [array.tolist() for array in reduction.distribution.binned()] == [
        [0, key_of(0), key_of(1), key_of(1) + 16],  # 1, 2 and 3, which is 2 and half of 2 more
        [side**2 - 3, 1, 1, 1],
    ]
    statistics = summarise([reduction])[0]
    assert statistics.element_count == side**2
    assert statistics.zero_fraction == 1 - 3 / side**2
    assert statistics.mean == pytest.approx(6 / side**2)
    assert statistics.quantiles == (0.0,) * len(QUANTILE_LEVELS)
    empty = measure(torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.int64), [], (side, side)))
    assert (empty.zero_fraction, empty.max, empty.std) == (1, 0, 0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_nested_tensor_is_measured_over_its_parts(layout: torch.layout) -> None:
    parts = [random_tensor([2, 3], 10), random_tensor([4, 3], 11)]
    tensor = torch.nested.nested_tensor(parts, layout=layout)
    statistics = measure(tensor)
    check(statistics, exact(torch.cat(parts)).reshape(-1))
    assert statistics.shape == (2, -1, 3)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_quantised_tensor_is_measured_by_the_values_it_stands_for(per_channel: bool) -> None:
    values = torch.tensor([[0.0, 0.52, -1.0], [2.0, 0.0, 0.24]])
    if per_channel:
        tensor = torch.quantize_per_channel(values, torch.tensor([0.5, 0.25]), torch.tensor([0, 0]), 0, torch.qint8)
        expected = np.array([[0.0, 0.5, -1.0], [2.0, 0.0, 0.25]])
    else:
        tensor = torch.quantize_per_tensor(values, 0.5, 10, torch.quint8)
        expected = np.array([[0.0, 0.5, -1.0], [2.0, 0.0, 0.0]])
    statistics = measure(tensor, 1)
    check(statistics, expected, 1)
    assert statistics.dtype == ("qint8" if per_channel else "quint8")


def test_a_meta_tensor_has_a_shape_and_a_reason() -> None:
    statistics = measure(torch.empty(2, 3, device="meta"), 1)
    assert (statistics.shape, statistics.dtype, statistics.element_count) == ((2, 3), "float32", 6)
    assert statistics.unmeasured == "a meta tensor holds no data"
    assert statistics.mean is None


def test_a_tensor_without_memory_of_its_own_is_not_read() -> None:
    with FakeTensorMode():
        tensor = torch.ones(2, 3)
    assert measure(tensor, 1).unmeasured == "RuntimeError: a FakeTensor has no memory of its own"


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_a_wrapper_is_not_dense_and_its_values_are_not_saved() -> None:
    class Masks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return masked_tensor(x, x > 0)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.masks, self.last = Masks(), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.masks(x).to_tensor(0.0))

    network, x = Network(), torch.tensor([[-1.0, 2.0]])
    assert is_dense(x)
    assert not is_dense(network.masks(x))
    run = hookscope.activations(network, x, layer="*", save_tensors=True)
    assert run["masks"].activation.unmeasured == "RuntimeError: a MaskedTensor has no memory of its own"
    assert "masks" not in run.tensors
    assert run.tensors["last"].tolist() == [[0.0, 2.0]]
    (row,) = [row for row in hookscope.diff(network, network, x, layer="*").rows if row.label == "masks"]
    assert row.measures is None, row


def test_a_tensor_that_a_container_overwrites_through_data_is_read_again() -> None:
    def doubles(net: Any, x: Tensor) -> Tensor:
        y: Tensor = net.child(x)
        y.data.mul_(2)  # no version counts this
        return y

    run = hookscope.activations(Written(doubles, child=Apply(lambda x: x + 1)), torch.ones(1, 2), layer="*")
    assert (run["child"].activation.mean, run["(model)"].activation.mean) == (2, 4)


def test_a_dtype_without_arithmetic_gives_the_reason_instead_of_raising() -> None:
    tensor = torch.zeros(2, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    statistics = measure(tensor)
    assert (statistics.shape, statistics.dtype) == ((2, 4), "float4_e2m1fn_x2")
    assert statistics.unmeasured
    assert "\n" not in statistics.unmeasured


@settings(max_examples=60, deadline=None)
@given(shape=shapes, seed=seeds, dtype=st.sampled_from([*FLOATS, *EIGHT_BIT_FLOATS, torch.int64]), cut=st.booleans())
def test_reading_a_tensor_never_changes_it(shape: list[int], seed: int, dtype: torch.dtype, cut: bool) -> None:
    memory = random_tensor([math.prod(shape)], seed).mul(1e4 if seed % 2 else 1).to(dtype)
    tensor = memory.view(shape)
    if cut and shape:
        tensor = tensor.transpose(0, -1)
    before, version = memory.view(torch.uint8).clone(), memory._version
    measure(tensor, 0 if shape else None)
    assert memory._version == version
    assert torch.equal(memory.view(torch.uint8), before)


def test_a_tensor_in_a_graph_is_read_without_adding_to_it() -> None:
    tensor = torch.ones(3, requires_grad=True) * 2
    measure(tensor, 0)
    assert tensor.grad_fn.name() == "MulBackward0"


# --- distributions ---


@pytest.mark.parametrize(("count", "dtype"), [(0, torch.float32), (5000, torch.float32), (7, torch.float64)])
def test_nothing_is_counted_that_was_not_asked_for(count: int, dtype: torch.dtype) -> None:
    reducer = Reducer()
    reductions = [reducer.reduce(random_tensor([count], 1, dtype)), reducer.reduce(torch.eye(3).to_sparse())]
    for reduction in collect(reductions):
        assert reduction.distribution is None
        assert summarise([reduction])[0].quantiles is None


# --- merging ---


def measure_merged(parts: Sequence[Tensor], channel_axis: int | None = 1) -> TensorStatistics:
    return summarise([functools.reduce(merge, [reduce_tensor(part, channel_axis) for part in parts])])[0]


@settings(max_examples=150, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 12), st.integers(1, 30)),
    seed=seeds,
    cuts=st.lists(st.integers(0, 9), max_size=4),
    poison=st.sampled_from([0.0, 0.1, 1.0]),
    scale=st.sampled_from([1e-25, 1.0, 1e4, 1e25]),
)
def test_merging_any_split_equals_measuring_the_whole(
    shape: tuple[int, int, int], seed: int, cuts: list[int], poison: float, scale: float
) -> None:
    tensor = random_tensor(shape, seed).relu() * scale
    tensor[:, 0] = 0
    generator = torch.Generator().manual_seed(seed)
    tensor[torch.rand(shape, generator=generator) < poison / 2] = math.nan
    tensor[torch.rand(shape, generator=generator) < poison / 2] = -math.inf
    edges = sorted({0, *(cut for cut in cuts if cut < shape[0]), shape[0]})
    parts = [tensor[start:stop] for start, stop in itertools.pairwise(edges)]
    statistics = measure_merged(parts)
    check(statistics, exact(tensor), 1)
    same_distribution(statistics.distribution, exact(tensor))


@pytest.mark.parametrize("scales", [(1e-20, 1e20), (1e20, 1e-20), (1.0, 1e10)])
def test_merging_values_of_different_magnitude(scales: tuple[float, float]) -> None:
    parts = [random_tensor([3, 4, 500], seed) * scale for seed, scale in enumerate(scales)]
    check(measure_merged(parts), exact(torch.cat(parts)), 1)


def test_a_deviation_survives_many_merges_around_a_huge_mean() -> None:
    parts = [(1e4 + random_tensor([1, 2, 700], seed, torch.float64)).float() for seed in range(40)]
    check(measure_merged(parts), exact(torch.cat(parts)), 1)


def test_channels_are_dropped_where_their_number_differs() -> None:
    parts = [random_tensor([1, 3, 4], 1), random_tensor([1, 5, 4], 2)]
    statistics = measure_merged(parts)
    assert (statistics.channel_axis, statistics.channel_count, statistics.dead_channel_count) == (None, None, None)
    check(statistics, np.concatenate([exact(part).reshape(-1) for part in parts]))


@pytest.mark.parametrize("empty_first", [False, True])
def test_an_empty_part_changes_nothing(empty_first: bool) -> None:
    parts = [random_tensor([2, 3], 1), torch.empty(0, 3)]
    if empty_first:
        parts.reverse()
    statistics = measure_merged(parts)
    assert statistics.shape == tuple(parts[0].shape)
    check(statistics, exact(torch.cat(parts)), 1)


def test_what_could_not_be_measured_once_stays_unmeasured() -> None:
    parts = [torch.ones(2, 3), torch.empty(2, 3, device="meta")]
    for statistics in (measure_merged(parts), measure_merged(parts[::-1])):
        assert statistics.unmeasured == "a meta tensor holds no data"
        assert statistics.mean is None


# --- one reducer for many tensors ---

KINDS = [
    ((3, 5), 1),
    ((2, 3, 4), 1),
    ((2, 3, 4), 2),
    ((3, 5), None),
    ((1, 64, 30, 30), 1),
    ((2, 5, 120, 110), 1),
    ((), None),
]


@settings(max_examples=40, deadline=None)
@given(
    tensors=st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            st.sampled_from([*FLOATS, torch.bool, torch.int64]),
            st.sampled_from(["plain", "zeros", "constant", "poisoned", "tiny", "huge", "far", "transposed"]),
        ),
        max_size=14,
    ),
    seed=seeds,
)
def test_tensors_in_a_row_do_not_disturb_each_other(
    tensors: list[tuple[tuple[tuple[int, ...], int | None], torch.dtype, str]], seed: int
) -> None:
    reducer = Reducer(distributions=True)
    reductions, expected = [], []
    for index, ((shape, axis), dtype, values) in enumerate(tensors):
        tensor = random_tensor(shape, seed + index, torch.float64)
        if values == "zeros":
            tensor = tensor.relu()
        elif values == "constant":
            tensor = torch.full(shape, 0.1, dtype=torch.float64)
        elif values == "poisoned" and tensor.numel() and dtype.is_floating_point:
            tensor.view(-1)[-1] = math.nan
        elif values == "far":
            tensor = tensor + 1e4
        elif values in ("tiny", "huge") and dtype in (torch.float32, torch.float64):
            tensor = tensor * (1e-25 if values == "tiny" else 1e25)
        tensor = tensor.to(dtype)
        if values == "transposed" and tensor.dim() > 1:
            tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
        expected.append((exact(tensor).copy(), axis))
        reductions.append(reducer.reduce(tensor, axis))
        tensor.zero_()  # as an in-place layer would a moment later
    for statistics, (reference, axis) in zip(summarise(collect(reductions)), expected, strict=True):
        check(statistics, reference, axis)


def test_a_reducer_serves_inside_and_outside_of_inference_mode() -> None:
    reducer, tensors = Reducer(distributions=True), [random_tensor([3, 5], 1), random_tensor([1, 3, 400, 400], 2)]
    with torch.inference_mode():
        reductions = [reducer.reduce(tensor, 1) for tensor in tensors]
        reductions += [reducer.reduce(tensor.clone(), 1) for tensor in tensors]
    reductions += [reducer.reduce(tensor, 1) for tensor in tensors]
    for index, statistics in enumerate(summarise(collect(reductions))):
        check(statistics, exact(tensors[index % 2]), 1)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_what_cannot_be_reduced_says_why(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error("out of memory\nmore about it")

    monkeypatch.setattr("hookscope.statistics.reducer.reduce_array", fail)
    assert measure(torch.ones(2).half()).unmeasured == f"{error.__name__}: out of memory"


def test_default_dtype_and_device_do_not_matter() -> None:
    tensor = random_tensor([3, 5], 1, torch.float32)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            statistics = measure(tensor, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    check(statistics, exact(tensor), 1)


# --- collecting ---


@pytest.mark.parametrize("scale", [1e160, 1e300, 1e-170, 1e-300, 2.0**-1060], ids=str)
@pytest.mark.parametrize("repeats", [1, 50_000])
def test_float64_values_whose_squares_it_cannot_hold_are_measured(scale: float, repeats: int) -> None:
    whole = torch.tensor([1.0, -2.0, 3.0, 0.0], dtype=torch.float64).repeat(repeats)
    values, count = whole * scale, whole.numel()
    near = 1e-4 if scale < 1e-308 else 1e-12  # there float64 has but a few digits
    std, l2 = 3.25**0.5, (14 * repeats) ** 0.5
    first, second = (reduce_tensor(case) for case in (values[: count // 4], values[count // 4 :]))
    zeros = merge(reduce_tensor(torch.zeros(count, dtype=torch.float64)), reduce_tensor(values))
    for statistics in summarise([reduce_tensor(values), merge(first, second), merge(second, first)]):
        actual = (statistics.mean, statistics.std, statistics.mean_abs, statistics.l2)
        assert [number / scale for number in actual] == pytest.approx([0.5, std, 1.5, l2], rel=near)
    (halved,) = summarise([zeros])
    assert halved.l2 / scale == pytest.approx(l2, rel=near)
    assert halved.std / scale == pytest.approx(1.6875**0.5, rel=near)
    modulus = measure(torch.complex(3 * values, 4 * values))
    assert modulus.l2 / scale == pytest.approx(5 * l2, rel=near)
    constant = measure(torch.full((count,), scale, dtype=torch.float64))
    assert (constant.std, constant.l2 / scale) == (0.0, pytest.approx(count**0.5, rel=near))
    both = merge(reduce_tensor(values), reduce_tensor(whole))
    assert summarise([both])[0].l2 == pytest.approx(l2 * math.hypot(scale, 1), rel=near)


def test_means_whose_difference_overflows_are_merged() -> None:
    size = 1.5e308
    values = torch.tensor([size, -size], dtype=torch.float64).repeat_interleave(40_000)
    statistics = measure(values)
    assert abs(statistics.mean) < 1e-12 * size
    assert statistics.std == pytest.approx(size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_channel_axis_counts_from_either_end(dtype: torch.dtype) -> None:
    tensor = random_tensor([4, 5, 6], 0, dtype).relu()
    assert measure(tensor, -1) == measure(tensor, 2)
    with pytest.raises(UsageError, match="shape 4x5x6 has no axis 3"):
        measure(tensor, 3)


def test_a_norm_beyond_float64_is_infinite_and_the_mean_is_not() -> None:
    statistics = measure(torch.tensor([1.5e308, -1.5e308, 1.5e308, 1.5e308], dtype=torch.float64))
    assert statistics.l2 == math.inf
    assert (statistics.mean, statistics.mean_abs) == pytest.approx((0.75e308, 1.5e308))
    assert statistics.std == pytest.approx(0.75**0.5 * 1.5e308)
