"""The compiled pass against NumPy in float64, in every variant that this processor runs and with any number of threads.

Everything in test_statistics.py runs through it as well; what is imported from there runs a second time without it.
"""

import ctypes
import math
import platform
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hookscope.statistics import library, native
from hookscope.statistics.difference import squared_sums
from hookscope.statistics.library import Kernel, kernel_of, missing_because
from hookscope.statistics.native import FusedReducer, load_kernel
from hookscope.statistics.reducer import Reducer, summarise
from hookscope.statistics.reduction import Reduction
from tests.statistics.test_statistics import (  # noqa: F401 - its tests are collected a second time
    check,
    exact,
    random_tensor,
    same_distribution,
    test_a_deviation_of_two_neighbouring_floats,
    test_a_deviation_survives_a_huge_mean,
    test_constant_values_have_no_deviation_and_no_accumulated_error,
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
    actual = kernel_of(variant, torch._C.__file__) if variant else KERNEL
    assert actual is not None
    return actual if threads else replace(actual, runtime=None)


def fused_reducer(variant: str = "", threads: bool = True) -> FusedReducer:
    reducer = FusedReducer(distributions=True)
    reducer._kernel = kernel(variant, threads)
    return reducer


def assert_empty(reducer: FusedReducer) -> None:
    assert not reducer._tables.any()


def check_fused(reducer: FusedReducer, tensor: Tensor, channel_axis: int | None) -> None:
    fused = reducer.reduce(tensor, channel_axis)
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
@settings(max_examples=80, deadline=None)
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
@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((1, 64, 56, 56), 1), ((2, 197, 301), 2), ((3, 40_001), 1), ((1, 1, 65_537), 1), ((32_768,), None)],
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
@pytest.mark.parametrize("count", [1, 16, 17, 512, 513, 40_000])
@pytest.mark.parametrize("offset", [1])
def test_nothing_beside_the_tensor_is_read(variant: str, count: int, offset: int) -> None:
    memory = torch.full((count + 100,), math.nan)
    tensor = memory[offset : offset + count]
    tensor.copy_(random_tensor([count], seed=count))
    check_fused(fused_reducer(variant), tensor, 0)
    check_fused(fused_reducer(variant), tensor, None)


@compiled
@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("value", [-math.nan, -math.inf])
@pytest.mark.parametrize("count", [2, 33, 40_001])
def test_rare_values_are_left_to_numpy_wherever_they_are(variant: str, value: float, count: int) -> None:
    reducer = fused_reducer(variant)
    assert reducer.reduce(torch.full((5, count), value), 1) is None
    for position in {0, count // 2, count - 2, count - 1}:
        tensor = random_tensor([count], seed=position)
        tensor[position] = value
        assert reducer.reduce(tensor, 0) is None
        assert_empty(reducer)


@compiled
@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("value", [-0.0, 0.1, 1e-30, 3e38])
@pytest.mark.parametrize("shape", [(5, 700), (3, 1), (2, 40_001)])
def test_constant_values_gather_no_error(variant: str, value: float, shape: Sequence[int]) -> None:
    tensor = torch.full(shape, value)
    reduction = fused_reducer(variant).reduce(tensor, 1)
    single, count = tensor[0, 0].item(), tensor.numel()
    assert (reduction.mean, reduction.min, reduction.max) == (single, single, single)
    assert reduction.squared_deviations == 0
    assert (reduction.abs_sum, reduction.square_sum) == (abs(single) * count, single * single * count)
    assert reduction.nonzero_count == (count if value else 0)
    assert (reduction.channel_nonzero == (shape[0] if value else 0)).all()


@compiled
@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize(("magnitude", "spread"), [(1e-30, 1e-6), (1.0, 1e-1), (-1.0, 1e-6), (1e30, 1e-4)])
@pytest.mark.parametrize("count", [2, 17, 3_000, 40_003])
def test_values_near_a_large_mean_lose_no_digits(variant: str, magnitude: float, spread: float, count: int) -> None:
    tensor = ((1 + spread * random_tensor([count], seed=count, dtype=torch.float64)) * magnitude).float()
    reduction = fused_reducer(variant).reduce(tensor, 0)
    exactly = tensor.double().numpy()
    assert reduction.mean == pytest.approx(exactly.mean(), rel=1e-7)
    assert reduction.squared_deviations == pytest.approx(((exactly - exactly.mean()) ** 2).sum(), rel=1e-6)


@compiled
@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("magnitude", [1e-40, 1e-30, 1e16, 5e37])
@pytest.mark.parametrize("shape", [(2, 3), (2, 40_001)])
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
def test_other_tensors_are_left_to_others(tensor: Tensor) -> None:
    assert fused_reducer().reduce(tensor, 1) is None


@compiled
def test_parameters_and_dense_tensors_in_another_order_are_read_like_others() -> None:
    check_fused(fused_reducer(), torch.nn.Parameter(random_tensor([3, 400], seed=3)), 1)
    tensor = random_tensor([2, 6, 9, 11], seed=6).relu().to(memory_format=torch.channels_last)
    check_fused(fused_reducer(), tensor, 1)
    check_fused(fused_reducer(), random_tensor([40, 900], seed=1).relu().t(), 1)


@pytest.mark.parametrize(("left", "dtype"), [(0, torch.float32), (0.5, torch.float32), (0, torch.int32)])
@pytest.mark.parametrize("is_compiled", [pytest.param(True, marks=compiled), False], ids=["compiled", "torch"])
def test_memory_that_a_tensor_no_longer_has_is_not_read(
    left: float, dtype: torch.dtype, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_compiled:
        monkeypatch.setattr(native, "load_kernel", load_kernel.__wrapped__)
    reducer = Reducer(distributions=True, keeps_values=True)
    tensor = torch.ones(3, 700, 40, dtype=dtype)
    reducer.reduce(tensor, 1)
    storage = tensor.untyped_storage()
    storage.resize_(int(storage.nbytes() * left))
    reduction = reducer.reduce(tensor, 1)  # also where it has just been measured
    assert (reduction.shape, reduction.element_count, reduction.finite_count) == ((3, 700, 40), 84_000, 0)
    assert reduction.kept is None
    [statistics] = summarise([reduction])
    assert (statistics.unmeasured or "").startswith("its memory was freed or shrunk: ")
    assert (statistics.mean, statistics.l2, statistics.quantiles) == (None, None, None)
    assert native.square_sums([tensor]) == [None]
    assert squared_sums(tensor, torch.ones(3, 700, 40, dtype=dtype)) is None


@compiled
def test_values_that_another_thread_overwrites_meanwhile_harm_no_later_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load_kernel", load_kernel.__wrapped__)
    reducer = fused_reducer()
    tensor, other = random_tensor([100_000], seed=1), random_tensor([100_000], seed=2)
    patterns = [random_tensor([100_000], seed=3) * scale for scale in (1e-42, 0.0, 1e30, math.nan, math.inf)]
    is_done = threading.Event()

    def overwrite() -> None:
        while not is_done.is_set():
            for pattern in patterns:
                tensor.copy_(pattern)

    writer = threading.Thread(target=overwrite)
    writer.start()
    try:
        for _ in range(300):
            reducer.reduce(tensor, None)
            squared_sums(tensor, other)
            assert_empty(reducer)
    finally:
        is_done.set()
        writer.join()
    check_fused(reducer, other, 0)


@compiled
def test_other_threads_run_while_compiled_code_does() -> None:
    """One more turn of the other thread falls into one of the calls, each of which takes milliseconds."""
    values = torch.ones(4_000_000)
    reducer = fused_reducer(threads=False)
    turns, is_done = [0], threading.Event()

    def turn() -> None:
        while not is_done.is_set():
            turns[0] += 1

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        layout = native.layout_of(values.shape, values.stride(), None, 1)
        reducer._make_room(layout)
        address, reduce = values.data_ptr(), KERNEL.reduce
        gained = []
        for _ in range(40):
            before = turns[0]
            reduce(address, layout.address, reducer._results_address)
            gained.append(turns[0] - before)
    finally:
        is_done.set()
        thread.join()
    assert type(library._opened()[0]) is ctypes.CDLL
    assert max(gained) > 0


@pytest.fixture
def opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_opened", library._opened.__wrapped__)


@pytest.mark.usefixtures("opened_anew")
def test_a_missing_library_is_not_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "native.bin")
    assert load_kernel.__wrapped__() is None
    assert missing_because() == "it was installed without compiled code"
    assert FusedReducer(distributions=True).reduce(torch.randn(3, 4), 1) is None


@pytest.mark.usefixtures("opened_anew")
def test_what_is_no_library_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "native.bin")
    library.LIBRARY.write_bytes(b"none")
    assert load_kernel.__wrapped__() is None
    assert missing_because().startswith("native.bin cannot be loaded: ")


@compiled
@pytest.mark.usefixtures("opened_anew")
def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for source in library.SOURCES.glob("*.[ch]"):
        shutil.copy(source, tmp_path)
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    assert missing_because() == ""
    with (tmp_path / "native.h").open("a") as header:
        header.write("/* of a later version */\n")
    assert load_kernel.__wrapped__() is None
    assert missing_because() == "native.bin was compiled from other sources than those beside it"


@compiled
@pytest.mark.usefixtures("opened_anew")
def test_a_wheel_has_no_sources_to_compare_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "SOURCES", tmp_path)
    assert load_kernel.__wrapped__() is not None
