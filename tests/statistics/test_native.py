"""The compiled pass against NumPy in float64, in every variant that this processor runs and with any number of threads.

Everything in test_statistics.py runs through it as well; what is imported from there runs a second time without it.
"""

import math
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hookscope.hooks.observed import ModuleCall
from hookscope.statistics import Measured, Reducer, Reduction, collect, native, summarise
from hookscope.statistics.native import FusedReducer, Kernel, kernel_of, load_kernel
from tests.statistics.test_statistics import (  # noqa: F401 - its tests are collected a second time
    check,
    exact,
    random_tensor,
    same_distribution,
    test_a_deviation_of_two_neighbouring_floats,
    test_a_deviation_survives_a_huge_mean,
    test_constant_values_have_no_deviation_and_no_accumulated_error,
    test_many_small_tensors_overflow_the_stage_unharmed,
    test_measures_any_float32_values,
    test_measures_odd_values,
    test_measures_random_values_of_any_shape,
    test_squares_neither_vanish_nor_overflow,
    test_squares_that_are_all_large_do_not_overflow_together,
    test_takes_statistics_over_the_finite_values,
    test_tensors_in_a_row_do_not_disturb_each_other,
    test_the_order_in_memory_does_not_matter,
)

KERNEL = load_kernel()

compiled = pytest.mark.skipif(KERNEL is None, reason="installed without the compiled library")


@pytest.fixture(autouse=True, scope="module")
def _without_library() -> Iterator[None]:
    """Let torch measure in the imported tests; those below bring the kernel they test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "load_kernel", lambda: None)
        yield


def variants() -> list[str]:
    capability = torch.backends.cpu.get_cpu_capability()
    reach = {"AVX2": 2, "AVX512": 3}.get(capability, 1)
    return ["default", "avx2", "avx512"][:reach]


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def kernel(variant: str = "", threads: bool = True) -> Kernel:
    found = kernel_of(variant) if variant else KERNEL
    assert found is not None
    return found if threads else found._replace(runtime=None)


def fused_reducer(variant: str = "", threads: bool = True) -> FusedReducer:
    reducer = FusedReducer(distributions=True)
    reducer._kernel = kernel(variant, threads)
    return reducer


def assert_empty(reducer: FusedReducer) -> None:
    assert not reducer._tables.any()


def check_fused(reducer: FusedReducer, tensor: Tensor, channel_axis: int | None) -> None:
    fused = reducer.reduce(tensor, channel_axis)
    assert fused is not None
    check_reduction(fused, tensor, channel_axis)
    assert_empty(reducer)


def check_reduction(reduction: Reduction, tensor: Tensor, channel_axis: int | None) -> None:
    check(summarise([reduction])[0], exact(tensor), channel_axis)
    if channel_axis is not None:
        expected = np.moveaxis(exact(tensor) != 0, channel_axis, 0).reshape(tensor.shape[channel_axis], -1).sum(1)
        assert (reduction.channel_nonzero == expected).all()


@pytest.mark.skipif(
    sys.platform not in ("linux", "darwin") or platform.machine() not in ("x86_64", "aarch64", "arm64"),
    reason="the library is not compiled for this kind of machine",
)
def test_the_library_is_there_and_finds_torchs_threads() -> None:
    assert KERNEL is not None, "install hookscope again: pip install -e ."
    assert KERNEL.runtime is not None or sys.platform == "darwin"


@compiled
@pytest.mark.parametrize("variant", variants())
@settings(max_examples=120, deadline=None)
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=4).filter(lambda shape: 1 < math.prod(shape) <= 60_000),
    axis=st.integers(0, 3),
    zeros=st.sampled_from([0.0, 0.5, 0.99]),
    shift=st.sampled_from([0.0, -1.0, 1e4]),
    scale=st.sampled_from([1e-10, 1.0, 1e10]),
    seed=st.integers(0, 2**31),
)
def test_every_variant_agrees_with_float64(
    variant: str, shape: Sequence[int], axis: int, zeros: float, shift: float, scale: float, seed: int
) -> None:
    tensor = ((random_tensor(shape, seed, torch.float64) + shift) * scale).float()
    tensor[torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)) < zeros] = 0
    check_fused(fused_reducer(variant), tensor, axis if axis < len(shape) else None)


@compiled
@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("threads", [1, 2, 5, 40])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((1, 64, 56, 56), 1),
        ((2, 3, 150, 151), 1),
        ((2, 197, 301), 2),
        ((3, 40_001), 1),
        ((70_000,), 0),
        ((1, 1, 65_537), 1),
        ((32_768,), None),
    ],
)
def test_threads_share_a_tensor_without_losing_any_of_it(
    variant: str, threads: int, shape: Sequence[int], axis: int | None
) -> None:
    with on_threads(threads):
        check_fused(fused_reducer(variant), random_tensor(shape, 1).relu(), axis)
        check_fused(fused_reducer(variant), random_tensor(shape, 2), axis)
        check_fused(fused_reducer(variant, threads=False), random_tensor(shape, 3).relu(), axis)


@compiled
@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 31, 511, 512, 513, 1040, 8191, 40_000])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_nothing_beside_the_tensor_is_read(variant: str, count: int, offset: int) -> None:
    memory = torch.full((count + 100,), math.nan)
    tensor = memory[offset : offset + count]
    tensor.copy_(random_tensor([count], seed=count))
    check_fused(fused_reducer(variant), tensor, 0)
    check_fused(fused_reducer(variant), tensor, None)


@compiled
@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("count", [2, 33, 40_001])
def test_rare_values_are_left_to_torch_wherever_they_are(variant: str, value: float, count: int) -> None:
    reducer = fused_reducer(variant)
    assert reducer.reduce(torch.full((5, count), value), 1) is None
    for position in {0, count // 2, count - 2, count - 1}:
        tensor = random_tensor([count], seed=position)
        tensor[position] = value
        assert reducer.reduce(tensor, 0) is None
        assert_empty(reducer)


@compiled
@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("value", [0.0, -0.0, 0.1, -0.1, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize("shape", [(5, 700), (3, 1), (2, 40_001)])
def test_constant_values_gather_no_error(variant: str, value: float, shape: Sequence[int]) -> None:
    tensor = torch.full(shape, value)
    reduction = fused_reducer(variant).reduce(tensor, 1)
    single, count = tensor[0, 0].item(), tensor.numel()
    assert (reduction.mean, reduction.min, reduction.max) == (single, single, single)
    assert reduction.squared_deviations == 0
    assert (reduction.abs_sum, reduction.square_sum) == (abs(single) * count, single * single * count)
    assert reduction.nonzero_count == (count if value else 0)
    assert reduction.channel_nonzero is not None
    assert (reduction.channel_nonzero == (shape[0] if value else 0)).all()


@compiled
@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, -1.0, 1e30])
@pytest.mark.parametrize("spread", [1e-1, 1e-4, 1e-6])
@pytest.mark.parametrize("count", [2, 17, 3_000, 40_003])
def test_values_near_a_large_mean_lose_no_digits(variant: str, magnitude: float, spread: float, count: int) -> None:
    tensor = ((1 + spread * random_tensor([count], seed=count, dtype=torch.float64)) * magnitude).float()
    reduction = fused_reducer(variant).reduce(tensor, 0)
    exactly = tensor.double().numpy()
    assert reduction.mean == pytest.approx(exactly.mean(), rel=1e-7)
    assert reduction.squared_deviations == pytest.approx(((exactly - exactly.mean()) ** 2).sum(), rel=1e-6)


@compiled
@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("magnitude", [1e-40, 1e-37, 1e-30, 1e-16, 1e14, 1e16, 1e30, 5e37])
@pytest.mark.parametrize("shape", [(2, 3), (5, 700), (2, 40_001)])
def test_values_that_float32_cannot_square_are_scaled(variant: str, magnitude: float, shape: Sequence[int]) -> None:
    tensor = (random_tensor(shape, seed=1, dtype=torch.float64) * magnitude).float()
    check_fused(fused_reducer(variant), tensor, 1)
    check_fused(fused_reducer(variant), tensor.relu(), 1)
    tensor[0, 0] = 1.0  # one that can be squared hides the rest, if they are small
    check_fused(fused_reducer(variant), tensor, 1)


@compiled
@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("threads", [1, 5])
def test_every_bin_of_float32_is_counted_in_the_right_place(variant: str, threads: int) -> None:
    """Two values of each bin, its smallest and its largest, and zeros of both signs among them."""
    first = torch.arange(0, 0x7F800000, 2**18, dtype=torch.int32)  # by the first 14 bits
    subnormal = torch.arange(1, 2**18, dtype=torch.int32)
    magnitudes = torch.cat([first, first + (2**18 - 1), subnormal]).view(torch.float32)
    tensor = torch.cat([magnitudes, -magnitudes, torch.zeros(100)])
    with on_threads(threads):
        check_fused(fused_reducer(variant), tensor[torch.randperm(tensor.numel())], None)


@compiled
def test_reductions_keep_their_numbers_when_others_follow() -> None:
    reducer = fused_reducer()
    tensors = [random_tensor([2, channels, 900], seed=channels).relu() for channels in (3, 40, 1, 40)]
    found = [reducer.reduce(tensor, 1) for tensor in tensors]
    for each, tensor in zip(found, tensors, strict=True):
        check_reduction(each, tensor, 1)
        same_distribution(each.distribution, exact(tensor))


@compiled
@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).double(),
        torch.randn(3, 4).half(),
        torch.randn(3, 8)[:, ::2],
        torch.randn(3, 1).expand(3, 4),
        torch.empty(0, 3),
        torch.empty(3, 4, device="meta"),
        torch.randn(3, 4).to_sparse(),
        torch.randn(3, 4).as_subclass(type("Other", (Tensor,), {})),
        torch.randn(3, 4).to_mkldnn(),
        torch.randn(3, 4, dtype=torch.complex64).conj().imag,
        torch._efficientzerotensor((3, 4)),
    ],
    ids=[
        *("double", "half", "gaps", "expanded", "empty", "meta", "sparse", "subclass", "mkldnn", "negated"),
        "without memory",
    ],
)
def test_other_tensors_are_left_to_torch(tensor: Tensor) -> None:
    assert fused_reducer().reduce(tensor, 1) is None


@compiled
def test_parameters_and_dense_tensors_in_another_order_are_read_like_others() -> None:
    check_fused(fused_reducer(), torch.nn.Parameter(random_tensor([3, 400], seed=3)), 1)
    tensor = random_tensor([2, 6, 9, 11], seed=6).relu().to(memory_format=torch.channels_last)
    check_fused(fused_reducer(), tensor, 1)
    check_fused(fused_reducer(), random_tensor([40, 900], seed=1).relu().t(), 1)


@compiled
def test_a_tensor_inside_a_function_transform_is_measured_by_torch() -> None:
    assert KERNEL is not None
    reducer = Reducer(distributions=True)
    reducer._fused = fused_reducer()
    reductions = []

    def observed(tensor: Tensor) -> Tensor:
        reductions.append(reducer.reduce(tensor.detach(), 0))
        return tensor.sum()

    values = random_tensor([3, 50], seed=1)
    torch.func.grad(observed)(values)
    reducer.settle()
    check(summarise(collect(reductions))[0], exact(values), 0)


def odd_tensors() -> dict[str, Callable[[], Tensor]]:
    values = random_tensor([2, 6, 5, 7], seed=0)
    return {
        "usual": lambda: values,
        "zeros": values.relu,
        "all zero": lambda: torch.zeros(2, 6, 5, 7),
        "constant": lambda: torch.full((2, 6, 5, 7), 3.5),
        "channels last": lambda: values.to(memory_format=torch.channels_last),
        "large": lambda: random_tensor([1, 64, 56, 56], seed=1).relu(),
        "5,000 channels": lambda: random_tensor([3, 5000], seed=2).relu(),
        "NaN": lambda: values.clone().index_fill_(0, torch.tensor([1]), math.nan),
        "Inf": lambda: values.clone().index_fill_(1, torch.tensor([1]), math.inf),
        "huge": lambda: values * 1e30,
        "large mean": lambda: values + 1e4,
        "gaps": lambda: values[:, :, ::2],
        "empty": lambda: torch.empty(0, 6),
        "scalar": lambda: torch.tensor(2.0),
        "float64": values.double,
        "integers": lambda: torch.arange(24).view(2, 12),
        "bfloat16": values.bfloat16,
        "parameter": lambda: torch.nn.Parameter(values),
        "with graph": lambda: torch.nn.Parameter(values) * 2,
        "sparse": lambda: values.relu().to_sparse(),
        "negated": lambda: torch._neg_view(values),
        "meta": lambda: values.to("meta"),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
    }


@compiled
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse")
@pytest.mark.parametrize("name", odd_tensors())
def test_compiled_code_reduces_in_hooks_as_python_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load_kernel", load_kernel.__wrapped__)
    tensor = odd_tensors()[name]()
    network = torch.nn.Identity()
    for axis in (None, *range(min(tensor.dim(), 2))):
        found = []
        for fastest in (True, False):
            reducer = Reducer()
            axes = SimpleNamespace(channel_axis=lambda *_, axis=axis: axis)
            in_python = partial(observed_by, reducer, axis)
            reduce = reducer.fastest() if fastest else reducer.reduce
            observe = reducer.observer("observe", in_python, axes, {}, {}) if fastest else in_python
            call = ModuleCall("", network, 0, [("[0]", tensor)])
            measured = [reduce(tensor, axis, (0,)), reduce(tensor, axis, (0,)), observe(call, "", tensor.clone())]
            reducer.settle()
            found.append([repr(each) for each in summarise(collect(measured))])
        assert found[0] == found[1]


@compiled
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse")
@pytest.mark.parametrize("readable", [True, False], ids=["read by compiled code", "without its way to memory"])
def test_one_reducer_reduces_odd_tensors_in_turn(readable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that torch raises on when it is asked where their values lie come between others, and come twice."""
    monkeypatch.setattr(native, "load_kernel", load_kernel.__wrapped__)
    if not readable:
        monkeypatch.setattr(native, "_reader", lambda: 0)
    tensors = [make() for make in odd_tensors().values()] * 2
    found = []
    for fastest in (True, False):
        reducer = Reducer()
        reduce = reducer.fastest() if fastest else reducer.reduce
        assert (reduce != reducer.reduce) == (fastest and readable)
        measured = [reduce(tensor, None, (0,)) for tensor in tensors]
        reducer.settle()
        found.append([repr(each) for each in summarise(collect(measured))])
    assert found[0] == found[1]


def observed_by(reducer: Reducer, axis: int | None, _call: ModuleCall, _slot: str, tensor: Tensor) -> Measured:
    return reducer.reduce(tensor, axis)


@compiled
def test_a_tensor_that_comes_again_is_read_once_unless_it_was_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load_kernel", load_kernel.__wrapped__)
    reduce = Reducer().fastest()
    tensor = random_tensor([2, 3], seed=0)
    first = reduce(tensor, 1, (0,))
    assert reduce(tensor, 1, (0,)) is first
    assert reduce(tensor, 0, (0,)) is not first
    tensor.mul_(2)
    assert reduce(tensor, 1, (0,)) != first
    assert "built-in" in repr(reduce)


def test_a_missing_library_is_not_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "native.bin")
    assert load_kernel.__wrapped__() is None
    assert FusedReducer(distributions=True).reduce(torch.randn(3, 4), 1) is None
