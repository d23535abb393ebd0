"""The kernel for GPUs, in Triton's interpreter on the CPU; whether it compiles, and what happens where it is wrong."""

import itertools
import math
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hookscope.results.distribution import bin_values
from hookscope.statistics import tiles
from hookscope.statistics.kept_values import kept_values
from hookscope.statistics.reducer import Pending, Reducer, agrees_with_cpu, collect
from hookscope.statistics.reduction import Reduction

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is missing")

FLOATS = list(tiles.FRACTIONS)
# Shapes and their channel axis; a tile has 4,096 values.
SHAPES: list[tuple[tuple[int, ...], int | None]] = [
    *(((), None), ((1,), 0), ((1, 1), 1), ((7,), None), ((1025,), 0), ((4096,), None), ((4097,), None)),
    *(((2, 3, 5), 2), ((64, 1, 65), 0), ((3, 40, 96), 2), ((2, 1000), 1), ((33, 129), 1), ((1, 3, 63, 65), 1)),
    *(((2, 5, 3, 4, 70), 1), ((50, 2, 9, 9), 1), ((1, 4099, 2), 1), ((3, 1, 4096), 1), ((1, 2, 4100), 1)),
]
KINDS = [
    "normal",
    "zeros",
    "constant",
    "far",
    "odd",
    "nothing finite",
    "subnormal",
    "huge and tiny",
    "one channel dead",
]
LAYOUTS = ["contiguous", "transposed", "cut", "channels last", "repeated", "behind an odd address"]


def interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process in which kernels run on the CPU."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), interpret) as pool:
        yield pool


def values_of(shape: tuple[int, ...], kind: str, dtype: torch.dtype, seed: int) -> Tensor:
    generator, limits = torch.Generator().manual_seed(seed), torch.finfo(dtype)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    pick = torch.rand(shape, generator=generator)
    odd = values.where(pick > 0.25, math.nan).where((pick < 0.5) | (pick > 0.6), math.inf)
    dead = torch.ones(shape)
    dead.select(min(1, dead.dim() - 1), 0).fill_(0) if shape else dead
    kinds = {
        "normal": values,
        "zeros": values.relu(),
        "constant": torch.full(shape, -0.1, dtype=torch.float64),
        "far": values + 1e4,
        "odd": odd.where((pick < 0.7) | (pick > 0.8), -math.inf),
        "nothing finite": odd.where(pick < 0.6, math.nan).where((pick < 0.25) | (pick > 0.5), -math.inf),
        "subnormal": values * limits.smallest_normal / 4,
        "huge and tiny": (values.clamp(-3, 3) / 3 * limits.max).where(pick > 0.5, limits.smallest_normal * 3),
        "one channel dead": values * dead,
    }
    return kinds[kind].to(dtype)


def laid_out(values: Tensor, layout: str) -> Tensor:
    """Return the same values, or fewer different ones, in another layout."""
    shape = values.shape
    if layout == "transposed" and len(shape) > 1:
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "cut":
        return torch.stack([values, values + 1], -1)[..., 0]
    if layout == "channels last" and len(shape) > 2:
        return values.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "repeated":
        return values.reshape(-1)[:1].reshape([1] * len(shape)).expand(shape)
    if layout == "behind an odd address":
        return torch.cat([values.reshape(-1)[:1], values.reshape(-1)])[1:].view(shape)
    return values


def reduced(tensor: Tensor, axis: int | None, inputs: int = 1) -> Reduction:
    """Reduce a tensor on the CPU by the kernel."""
    reducer = Reducer(distributions=True, keeps_values=True)
    header = Reduction(tuple(tensor.shape), str(tensor.dtype)[6:], tensor.numel(), axis)
    launched = reducer.tiles.launch(tensor, axis, inputs)
    assert launched is not None
    return collect([Pending(header, launched)])[0]


def differences(tensor: Tensor, axis: int | None, inputs: int) -> list[str]:
    """Compare with NumPy in float64; list what differs."""
    values = tensor.double().numpy()
    actual = reduced(tensor, axis, inputs)
    finite = values[np.isfinite(values)]
    expected: dict[str, Any] = {
        "finite_count": finite.size,
        "nan_count": int(np.isnan(values).sum()),
        "nonzero_count": int(np.count_nonzero(values)),
        "min": float(finite.min(initial=math.inf)),
        "max": float(finite.max(initial=-math.inf)),
    }
    found = [
        f"{name} {getattr(actual, name)} {value}" for name, value in expected.items() if getattr(actual, name) != value
    ]
    kept = kept_values(tensor, axis, inputs)
    found += ["kept"] * (not np.array_equal(actual.kept[0], kept, equal_nan=True) or actual.kept[0].dtype != kept.dtype)
    if axis is not None:
        by_channel = np.count_nonzero(np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1), axis=1)
        found += ["channels"] * (not np.array_equal(actual.channel_nonzero, by_channel))
    if not finite.size:
        return found + ["distribution"] * (actual.distribution is not None)
    for ours, theirs in zip(actual.distribution.binned(), bin_values(finite), strict=True):
        found += ["bins"] * (ours.dtype != theirs.dtype or not np.array_equal(ours, theirs))
    exponent = math.frexp(np.abs(finite).max())[1]
    scaled = np.ldexp(finite, -exponent)
    numbers = [actual.with_exponent(exponent).squared_deviations, actual.with_exponent(exponent).abs_sum]
    std, mean_abs = math.sqrt(numbers[0] / finite.size), numbers[1] / finite.size
    rounding = 1e-12 if tensor.dtype is torch.float64 else 1e-6
    rms = math.sqrt(np.square(scaled).mean())
    l2 = math.sqrt(actual.with_exponent(exponent).square_sum / finite.size)
    errors = {
        "mean": (math.ldexp(actual.mean, -exponent), scaled.mean(), rounding * (scaled.std() + 1e-3 * rms)),
        "std": (std, scaled.std(), rounding * scaled.std() + 1e-11 * rms),
        "abs": (mean_abs, np.abs(scaled).mean(), rounding * mean_abs),
        "l2": (l2, rms, rounding * rms),
    }
    found += [f"{name} {ours} {theirs}" for name, (ours, theirs, slack) in errors.items() if abs(ours - theirs) > slack]
    if finite.min() == finite.max():
        found += ["constant"] * ((actual.mean, actual.squared_deviations) != (finite[0], 0))
    return found


def all_differences(
    cases: list[tuple[tuple[tuple[int, ...], int | None], str, str, torch.dtype]],
) -> dict[str, list[str]]:
    found = {}
    for seed, ((shape, axis), kind, layout, dtype) in enumerate(cases):
        tensor = laid_out(values_of(shape, kind, dtype, seed), layout)
        assert tensor.shape == shape
        there = differences(tensor, axis, (1, 2, 3)[seed % 3])
        if dtype is torch.bfloat16 and kind == "subnormal":  # Triton's interpreter makes zeros of these
            there = [difference for difference in there if difference != "kept"]
        if there:
            found[f"{shape} {axis} {kind} {layout} {dtype} {seed}"] = there
    return found


CASES = list(itertools.product(SHAPES, KINDS, LAYOUTS, FLOATS))


def test_the_kernel_finds_what_numpy_finds(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(all_differences, CASES[::79]).result() == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(1, 5))
def test_the_kernel_finds_what_numpy_finds_in_many_cases(interpreter: ProcessPoolExecutor, part: int) -> None:
    assert interpreter.submit(all_differences, CASES[part::31]).result() == {}


def agreement(dtype: torch.dtype) -> bool:
    return agrees_with_cpu.__wrapped__(torch.device("cpu"), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_it_agrees_with_the_cpu(interpreter: ProcessPoolExecutor, dtype: torch.dtype) -> None:
    assert interpreter.submit(agreement, dtype).result()


class Fake:
    """A kernel that counts its launches, raises, or is wrong."""

    def __init__(self, kernel: Any = None, launch: Any = None) -> None:
        self.kernel, self.launch, self.launches = kernel, launch, 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.launches += 1
            if self.kernel is not None:
                self.kernel[grid](*args, **kwargs)
            if self.launch is not None:
                self.launch(*args)

        return launch


def fail(*_: Any) -> None:
    raise OSError("no compiler")


def agreements_of_broken_kernels() -> list[bool]:
    from hookscope.statistics import tile_kernel

    right = tile_kernel.reduce_tile

    def one_bin_more(_values: Tensor, _words: Tensor, counters: Tensor, *_: Any) -> None:
        counters[9000] += 1

    def another_mean(_values: Tensor, words: Tensor, *_: Any) -> None:
        tile_count = len(words) // 9
        words[5 * tile_count : 6 * tile_count] *= 1.001

    found = []
    for broken in (Fake(right), Fake(None, fail), Fake(right, one_bin_more), Fake(right, another_mean), Fake()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tile_kernel, "reduce_tile", broken)
            found.append(agreement(torch.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "hookscope.statistics.tile_kernel", None)  # as without Triton
        found.append(agreement(torch.float32))
    return found


def test_a_kernel_that_raises_or_is_wrong_or_missing_is_not_used(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(agreements_of_broken_kernels).result() == [True, False, False, False, False, False]


def test_it_takes_no_other_tensors() -> None:
    reducer = Reducer()
    for tensor in (
        torch.empty(0, 3),
        torch.ones(3, dtype=torch.int32),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.ones(3, dtype=torch.complex64).conj().imag,
    ):
        assert reducer.tiles.launch(tensor, None, 0) is None


def taken_inside_transforms() -> list[bool]:
    plain, taken = torch.randn(2, 3, 50), []

    def seen(x: Tensor) -> Tensor:
        taken.extend(Reducer().tiles.launch(tensor, 0, 0) is not None for tensor in (x, plain))
        return x.sum()

    torch.func.grad(seen)(plain)
    torch.vmap(seen)(plain)
    return taken


def test_it_takes_no_tensor_that_a_transform_wraps(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(taken_inside_transforms).result() == [False, False, False, True]


class Launches(TorchDispatchMode):
    """Counts operations that start work on a device: not views, and not allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        if not func.is_view and not func.overloadpacket.__name__.startswith("empty"):
            self.names.append(func.overloadpacket.__name__)
        return result


def launches(count: int) -> tuple[int, int]:
    """Return the launches for so many tensors, and for `collect`."""
    from hookscope.statistics import tile_kernel

    tensors = [torch.ones(1, 8, 12, 12 + index % 5) for index in range(count)]
    tensors += [torch.ones(1, 12, 12, 8).permute(0, 3, 1, 2)[..., ::2] for _ in range(count)]  # with gaps
    kernel = Fake()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_kernel, "reduce_tile", kernel)
        reducer = Reducer(distributions=True, keeps_values=True)
        header = Reduction((), "", 1, 1)
        for tensor in tensors:  # so that layouts are known: they are made on the CPU, and sent once
            Reducer(keeps_values=True).tiles.launch(tensor.contiguous() if tensor.stride(3) == 2 else tensor, 1, 1)
        kernel.launches = 0
        with Launches() as started:
            pending = [Pending(header, reducer.tiles.launch(tensor, 1, 1)) for tensor in tensors]
        for entry in pending:
            entry.held.words.zero_()
        with Launches() as finally_started:
            collect(pending)
    return len(started.names) + kernel.launches, len(finally_started.names)


def test_a_tensor_takes_one_launch_or_two_and_a_run_few(interpreter: ProcessPoolExecutor) -> None:
    few, at_the_end = interpreter.submit(launches, 10).result()
    assert few <= 10 + 20 + 1  # a tensor with gaps is copied; counters are zeroed for many
    many, still = interpreter.submit(launches, 100).result()
    assert many <= 100 + 200 + 4
    assert still == at_the_end < 6


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "target", [("cuda", 75, 32), ("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)], ids=str
)
def test_it_compiles_and_adds_no_floats_by_atomics(
    target: tuple[str, Any, int], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter accepts errors of types that the compiler refuses."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hookscope.statistics.tile_kernel import reduce_tile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
    pointers = {"values": f"*{names[dtype]}", "words": "*fp64", "counters": "*i32", "kept_at": "*i32"}
    sizes = dict.fromkeys(["count", "channels", "after", "kept_count", "bin_count"], "i32")
    constants = {"TILE": tiles._TILE, "FRACTION": tiles.FRACTIONS[dtype]}
    source = ASTSource(reduce_tile, {**pointers, **sizes, **dict.fromkeys(constants, "constexpr")}, constants)
    options = {"num_warps": tiles._WARPS, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget(*target), options=options)
    lines = compiled.asm["ttgir"].splitlines()
    atomics = [line for line in lines if "atomic_rmw" in line]
    assert len(atomics) == 3
    assert all("atomic_rmw add, relaxed" in line for line in atomics)
