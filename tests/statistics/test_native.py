"""The compiled pass against NumPy in float64, in every variant that this processor runs and with any number of threads.

Everything in test_measure.py runs through it as well; what is imported from there below runs a second time without it.
"""

import gc
import math
import platform
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hookscope.statistics import Reading, Reducer, Reduction, background_reduction, collect, native, summarise
from hookscope.statistics.native import FusedReducer, Kernel, kernel_of, load_kernel
from tests.statistics.test_statistics import (
    check,
    exact,
    random_tensor,
    same_distribution,
    test_a_deviation_of_two_neighbouring_floats,
    test_a_deviation_survives_a_huge_mean,
    test_an_outlier_does_not_hide_the_rest,
    test_constant_values_have_no_deviation_and_no_accumulated_error,
    test_many_small_tensors_overflow_the_stage_unharmed,
    test_measures_any_float32_values,
    test_measures_random_values_of_any_shape,
    test_squares_neither_vanish_nor_overflow,
    test_squares_that_are_all_large_do_not_overflow_together,
    test_takes_statistics_over_the_finite_values,
    test_tensors_in_a_row_do_not_disturb_each_other,
    test_the_order_in_memory_does_not_matter,
)

__all__ = [
    "test_a_deviation_of_two_neighbouring_floats",
    "test_a_deviation_survives_a_huge_mean",
    "test_an_outlier_does_not_hide_the_rest",
    "test_constant_values_have_no_deviation_and_no_accumulated_error",
    "test_many_small_tensors_overflow_the_stage_unharmed",
    "test_measures_any_float32_values",
    "test_measures_random_values_of_any_shape",
    "test_squares_neither_vanish_nor_overflow",
    "test_squares_that_are_all_large_do_not_overflow_together",
    "test_takes_statistics_over_the_finite_values",
    "test_tensors_in_a_row_do_not_disturb_each_other",
    "test_the_order_in_memory_does_not_matter",
]

KERNEL = load_kernel()

compiled = pytest.mark.skipif(KERNEL is None, reason="installed without the compiled library")


@pytest.fixture(autouse=True, scope="module")
def _without_library() -> Iterator[None]:
    """Let torch measure in the imported tests; those below bring the kernel they test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "load_kernel", lambda: None)
        patch.setattr(background_reduction, "load_kernel", lambda: None)
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
    assert reducer._tables is not None
    assert not reducer._tables.any()


def check_fused(reducer: FusedReducer, tensor: Tensor, channel_axis: int | None) -> None:
    fused = reducer.reduce(tensor, channel_axis)
    assert fused is not None
    check_reduction(fused.reduction(), tensor, channel_axis)
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
    fused = fused_reducer(variant).reduce(tensor, 1)
    assert fused is not None
    single, count = tensor[0, 0].item(), tensor.numel()
    reduction = fused.reduction()
    assert (reduction.mean, reduction.min, reduction.max) == (single, single, single)
    assert reduction.squared_deviations == 0
    assert (reduction.abs_sum, reduction.square_sum) == (abs(single) * count, single * single * count)
    assert reduction.nonzero_count == (count if value else 0)
    assert reduction.channel_nonzero is not None
    assert (reduction.channel_nonzero == (shape[0] if value else 0)).all()


@compiled
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_constant_values_that_are_not_finite_are_left_to_torch(value: float) -> None:
    assert fused_reducer().reduce(torch.full((5, 700), value), 1) is None


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
def test_room_for_bins_never_runs_out() -> None:
    reducer = fused_reducer()
    magnitudes = torch.arange(2**14, 0x7F7FFFFF, 2**17, dtype=torch.int32).view(torch.float32)
    tensor = torch.cat([magnitudes, -magnitudes])
    found = [reducer.reduce(tensor, None) for _ in range(40)]
    assert len({id(each.block) for each in found if each}) > 1
    for each in found:
        assert each is not None
        same_distribution(each.distribution, exact(tensor))


@compiled
@pytest.mark.parametrize("threads", [1, 2])
def test_gradients_of_more_bins_than_there_is_room_for_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(background_reduction, "load_kernel", lambda: KERNEL)
    magnitudes = torch.arange(2**14, 0x7F7FFFFF, 2**17, dtype=torch.int32).view(torch.float32)
    tensors = [torch.cat([magnitudes, -magnitudes])] * 40
    with on_threads(threads):
        reading = Reading(tensors, [], distributions=True)
        reading.run(lambda: None, lambda: None)
    found = [each for each in reading.reductions() if each is not None]
    assert 0 < len(found) < 40
    for each in found:
        same_distribution(each.distribution, exact(tensors[0]))


@compiled
@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_values_that_vary_little_and_cannot_be_squared_are_left_to_torch(magnitude: float) -> None:
    assert fused_reducer().reduce(magnitude * (1 + random_tensor([3, 400], seed=2) * 1e-3), 1) is None


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
def test_parameters_are_read_like_other_tensors() -> None:
    values = random_tensor([3, 400], seed=3)
    found = fused_reducer().reduce(torch.nn.Parameter(values), 1)
    assert found is not None
    check_reduction(found.reduction(), values, 1)


@compiled
def test_dense_tensors_in_another_order_are_read_in_theirs() -> None:
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


MANY = [
    random_tensor([64, 3, 7, 7], seed=1),
    torch.ones(64),
    torch.zeros(64),
    random_tensor([300, 1000], seed=2).relu(),
    random_tensor([40, 900], seed=3).t(),
    random_tensor([1000], seed=4) * 1e-3 + 1e4,
    random_tensor([7], seed=5).detach(),
]
NOT_READ = [
    torch.tensor([1.0, math.nan]),
    random_tensor([50], seed=6).double(),
    random_tensor([50], seed=7)[::2],
    torch.empty(0),
    torch.empty(3, device="meta"),
]


@compiled
@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("threads", [1, 2, 5, 40])
@pytest.mark.parametrize("with_runtime", [True, False])
def test_many_tensors_are_read_beside_other_work(
    monkeypatch: pytest.MonkeyPatch, variant: str, threads: int, with_runtime: bool
) -> None:
    monkeypatch.setattr(background_reduction, "load_kernel", lambda: kernel(variant, with_runtime))
    caller = threading.get_ident()
    tensors = [*MANY, *NOT_READ, *MANY]
    with on_threads(threads):
        reading = Reading(tensors, [*NOT_READ, *MANY], distributions=True)
        result, reduced = reading.run(lambda: (threading.get_ident(), sum(range(10_000))), reading.reductions)
    assert result == (caller, 49_995_000)
    assert [each is None for each in reduced] == [False] * len(MANY) + [True] * len(NOT_READ) + [False] * len(MANY)
    for each, tensor in zip(reduced, tensors, strict=True):
        if each is not None:
            check_reduction(each.reduction(), tensor, None)
    sums = reading.square_sums()
    assert sums[: len(NOT_READ)] == [None] * len(NOT_READ)
    assert sums[len(NOT_READ) :] == pytest.approx([square_sum(tensor) for tensor in MANY], rel=1e-13, abs=0)


@compiled
@pytest.mark.parametrize("variant", variants())
def test_every_large_tensor_is_reduced_before_what_follows(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    monkeypatch.setattr(background_reduction, "load_kernel", lambda: kernel(variant, True))
    tensors = [random_tensor([3, 200_003], seed=seed) for seed in range(12)]
    expected = [float(tensor.double().sum()) for tensor in tensors]
    with on_threads(2):
        for _ in range(20):
            reading = Reading(tensors, tensors, distributions=True)

            def means(reading: Reading = reading) -> list[float]:
                return [each.reduction().mean * 600_009 for each in reading.reductions() if each is not None]

            _, found = reading.run(lambda: None, means)
            assert found == pytest.approx(expected, abs=1e-2)
            assert reading.square_sums() == pytest.approx([square_sum(tensor) for tensor in tensors], rel=1e-13)


@compiled
@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("with_runtime", [True, False])
def test_squares_are_summed_where_float32_could_not_hold_them(
    monkeypatch: pytest.MonkeyPatch, variant: str, threads: int, with_runtime: bool
) -> None:
    monkeypatch.setattr(background_reduction, "load_kernel", lambda: kernel(variant, with_runtime))
    extremes = [torch.full((37,), 3e38), torch.full((100, 33), 1e-40), -random_tensor([31], seed=10) * 1e-30]
    rare = [torch.tensor([1.0] * 40 + [value]) for value in (math.nan, math.inf, -math.inf)]
    rare += [tensor.flip(0) for tensor in rare]
    tensors = [*MANY, *extremes, *rare, *NOT_READ[1:]]
    with on_threads(threads):
        reading = Reading([], tensors)
        assert reading.run(lambda: 3, lambda: 4) == (3, 4)
    sums = reading.square_sums()
    finite = len(MANY) + len(extremes)
    expected = [square_sum(tensor) for tensor in tensors[:finite]]
    assert sums[:finite] == pytest.approx(expected, rel=1e-13, abs=0)
    assert sums[finite:] == [None] * (len(tensors) - finite)
    assert reading.reductions() == []


def square_sum(tensor: Tensor) -> float:
    return float((tensor.detach().numpy().astype(np.float64) ** 2).sum())


@compiled
def test_torch_may_compute_while_many_tensors_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_reduction, "load_kernel", kernel)
    left, right = random_tensor([300, 400], seed=8), random_tensor([400, 500], seed=9)
    expected = left @ right
    reading = Reading(MANY * 20, MANY * 20, distributions=True)
    first, second = reading.run(lambda: left @ right, lambda: left @ right)
    assert torch.allclose(first, expected)
    assert torch.allclose(second, expected)
    assert torch.equal(left @ right, expected)
    assert None not in reading.reductions()
    assert None not in reading.square_sums()


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("tensors", [MANY, NOT_READ, []])
@pytest.mark.parametrize("first", [True, False])
def test_what_the_other_work_raises_arrives(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, tensors: Sequence[Tensor], first: bool
) -> None:
    monkeypatch.setattr(background_reduction, "load_kernel", lambda: KERNEL)
    called = []

    def fail() -> None:
        raise error

    work = (fail, lambda: called.append(2)) if first else (lambda: called.append(1), fail)
    with pytest.raises(type(error)) as caught:
        Reading(tensors, tensors).run(*work)
    assert caught.value is error
    assert called == ([] if first else [1])


@compiled
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_no_thread_waits_for_what_is_never_listed(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(background_reduction, "load_kernel", lambda: KERNEL)
    listed: list[int] = []

    def address(tensor: Tensor) -> int:
        if listed:
            raise KeyboardInterrupt
        listed.append(tensor.data_ptr())
        return listed[0]

    monkeypatch.setattr(background_reduction, "address_of", address)
    called = []
    with on_threads(threads), pytest.raises(KeyboardInterrupt):
        Reading(MANY, MANY).run(lambda: called.append(1), lambda: called.append(2))
    assert called == []


@compiled
def test_a_reading_goes_with_its_last_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_reduction, "load_kernel", lambda: KERNEL)
    tensor = torch.ones(1000)
    reading = Reading([tensor], [tensor])
    reading.run(lambda: None, lambda: None)
    held = weakref.ref(reading)
    gc.disable()
    try:
        del reading
        assert held() is None  # no cycle holds it, and with it gradients
    finally:
        gc.enable()


def test_without_the_library_nothing_is_read_beside_other_work() -> None:
    reading = Reading(MANY, MANY[1:])
    assert reading.run(lambda: 3, lambda: 4) == (3, 4)
    assert reading.reductions() == [None] * len(MANY)
    assert reading.square_sums() == [None] * (len(MANY) - 1)


def test_a_missing_library_is_not_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "native.bin")
    assert load_kernel.__wrapped__() is None
    assert FusedReducer(distributions=True).reduce(torch.randn(3, 4), 1) is None
