"""Sketches against the formula of their module in Python's integers, and estimates against exact distances."""

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.results.sketches import (
    NORM_ERROR,
    RESOLUTION,
    SKETCH_WIDTH,
    SQUARE_ERROR,
    estimated_cosine,
    estimated_distance,
)
from hookscope.statistics import library, sketch
from hookscope.statistics.library import kernel_of
from hookscope.statistics.native import load_kernel
from hookscope.statistics.reducer import Reducer, collect
from hookscope.statistics.sketch import finished, sketch_slices
from tests.statistics.test_native import on_threads, variants

SEED = 0x686F6F6B73636F70
ROWS = 1000

compiled = pytest.mark.skipif(
    load_kernel() is None,
    reason="installed without the compiled library",
)


def word(key: int, at: int) -> int:
    mixed = (key + (at + 1) * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


def by_the_formula(values: list[float], number: int = 0) -> NDArray[np.float64]:
    key = word(SEED, number)
    sums = np.zeros(256)
    word_of = cache(partial(word, key))
    for index, value in enumerate(values):
        block, element = divmod(index, 256)
        sign = -1 if word_of(8 * block + element // 64) >> (element % 64) & 1 else 1
        sums[((word_of(8 * block + 4) >> 56) + element) % 256] += sign * value
    return sums


def sketched(tensor: Tensor) -> NDArray[np.float64]:
    found = finished(sketch_slices(tensor))
    assert found is not None
    return found


def whole_numbers(*shape: int) -> Tensor:
    """Return values that no order of summation rounds."""
    return torch.randint(-1000, 1000, shape, generator=torch.Generator().manual_seed(math.prod(shape))).float()


@pytest.fixture(params=["compiled", "torch"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(sketch, "load_kernel", lambda: None)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128, 255, 256, 257, 1000, 8191, 8192, 8193, 20001])
def test_a_sketch_is_what_its_formula_says(size: int) -> None:
    values = whole_numbers(size)
    np.testing.assert_array_equal(sketched(values), by_the_formula(values.tolist()))
    np.testing.assert_array_equal(sketched(values.double()), by_the_formula(values.tolist()))


@compiled
@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_variant_and_number_of_threads_gives_the_same(
    variant: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sketch, "load_kernel", lambda: kernel_of(variant))
    values = whole_numbers(3, 40_007)
    with on_threads(threads):
        found = sketch_slices(values, (4, 5, 7))
    numbers = zip(values.tolist(), (4, 5, 7), strict=True)
    np.testing.assert_array_equal(found, sum(by_the_formula(row, number) for row, number in numbers))


@compiled
def test_threads_change_no_more_than_the_last_digit_of_float64() -> None:
    values = torch.randn(400_009, generator=torch.Generator().manual_seed(1))
    with on_threads(1):
        alone = sketched(values)
    with on_threads(3):
        np.testing.assert_allclose(sketched(values), alone, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("either_way")
def test_the_layout_in_memory_does_not_matter() -> None:
    values = whole_numbers(2, 6, 9, 11)
    expected = sketched(values)
    wide = torch.zeros(2, 6, 9, 22)
    wide[..., ::2] = values
    others = {
        "channels last": values.to(memory_format=torch.channels_last),
        "with gaps": wide[..., ::2],
        "transposed": values.transpose(1, 3).contiguous().transpose(1, 3),
        "negated lazily": torch.complex(values, -values).conj().imag,
        "tracked": values.clone().requires_grad_(),
        "of other axes": values.reshape(2, -1),
        "float64": values.double(),
        "whole numbers": values.long(),
    }
    for name, other in others.items():
        np.testing.assert_array_equal(sketched(other), expected, err_msg=name)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_copy_in_another_dtype_is_as_far_as_its_rounding(dtype: torch.dtype) -> None:
    values = torch.randn(3, 40, 50, generator=torch.Generator().manual_seed(2))
    rounded = values.to(dtype)
    np.testing.assert_array_equal(sketched(rounded), sketched(rounded.float()))
    exact = float((values - rounded.float()).norm())
    assert estimated_distance(sketched(values), sketched(rounded)) == pytest.approx(exact, rel=4 * NORM_ERROR)
    assert estimated_distance(sketched(values), sketched(values.double())) <= RESOLUTION * float(values.norm())


@pytest.mark.usefixtures("either_way")
def test_complex_elements_count_as_two() -> None:
    values = torch.complex(whole_numbers(300), whole_numbers(300).flip(0))
    np.testing.assert_array_equal(sketched(values), sketched(torch.view_as_real(values)))
    np.testing.assert_array_equal(sketched(values.conj()), sketched(torch.view_as_real(values.conj().resolve_conj())))


@pytest.mark.usefixtures("either_way")
def test_batches_do_not_matter() -> None:
    values = whole_numbers(5, 3, 20, 20)

    def of(*sizes: int) -> NDArray[np.float64]:
        parts, begin = [], 0
        for part in values.split(sizes):
            parts.append(finished(sketch_slices(part, tuple(range(begin, begin + len(part))))))
            begin += len(part)
        return np.sum([part for part in parts if part is not None], axis=0)

    np.testing.assert_array_equal(of(1, 1, 1, 1, 1), of(5))
    np.testing.assert_array_equal(of(2, 3), of(5))


def test_equal_inputs_in_another_order_are_not_the_same() -> None:
    values = whole_numbers(2, 5000)
    swapped = finished(sketch_slices(values.flip(0), (0, 1)))
    exact = float((values - values.flip(0)).norm())
    found = finished(sketch_slices(values, (0, 1)))
    assert found is not None
    assert swapped is not None
    assert estimated_distance(found, swapped) == pytest.approx(exact, rel=4 * NORM_ERROR)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_there_is_no_estimate_of_what_is_not_finite(value: float) -> None:
    values = whole_numbers(3000)
    values[1234] = value
    assert finished(sketch_slices(values)) is None
    assert finished(sketch_slices(values.double())) is None


def test_there_is_no_sketch_of_what_is_sparse_ragged_or_without_data() -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for each in (torch.eye(3).to_sparse(), ragged, torch.ones(3, device="meta")):
        assert finished(sketch_slices(each)) is None


@pytest.mark.usefixtures("either_way")
def test_sums_that_overflow_float32_are_taken_in_float64() -> None:
    values = torch.full((100_000,), 3e38)
    assert estimated_distance(sketched(values), np.zeros(256)) == pytest.approx(
        3e38 * math.sqrt(100_000), rel=4 * NORM_ERROR
    )


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_counts_as_what_it_stands_for() -> None:
    values = torch.quantize_per_tensor(torch.randn(500), 0.1, 0, torch.qint8)
    np.testing.assert_array_equal(sketched(values), sketched(values.dequantize()))


def test_a_tensor_within_inference_mode_is_read_outside_of_it_too() -> None:
    with torch.inference_mode():
        values = whole_numbers(900).double()
        within = sketched(values)
    np.testing.assert_array_equal(sketched(values), within)


# What is estimated ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errors:
    """Relative errors of the squared norm over many rows."""

    bias: float
    spread: float


def errors_of(make: Callable[[torch.Generator], Tensor]) -> Errors:
    generator = torch.Generator().manual_seed(3)
    found = []
    for number in range(ROWS):
        difference = make(generator)
        estimate = finished(sketch_slices(difference, (number,)))
        assert estimate is not None
        found.append(float(estimate @ estimate) / float(difference.double().square().sum()) - 1)
    return Errors(float(np.mean(found)), float(np.std(found)))


def normal(generator: torch.Generator) -> Tensor:
    return torch.randn(6, 21, 37, generator=generator)


def one_column(generator: torch.Generator) -> Tensor:
    values = torch.zeros(90, SKETCH_WIDTH)
    values[:, 17] = torch.randn(90, generator=generator)
    return values


def one_column_of_equal_values(_: torch.Generator) -> Tensor:
    values = torch.zeros(90, SKETCH_WIDTH)
    values[:, 17] = 1
    return values


def two_columns(_: torch.Generator) -> Tensor:
    values = torch.zeros(90, SKETCH_WIDTH)
    values[:, 17] = values[:, 18] = 1
    return values


def every_sixteenth(_: torch.Generator) -> Tensor:
    values = torch.zeros(90 * SKETCH_WIDTH)
    values[::16] = 1
    return values


def one_channel(generator: torch.Generator) -> Tensor:
    values = torch.zeros(64, 28, 28)
    values[11] = torch.randn(28, 28, generator=generator)
    return values


def one_equal_channel_of_the_last_axis(_: torch.Generator) -> Tensor:
    values = torch.zeros(197, 192)
    values[:, 5] = 1
    return values


def constant(_: torch.Generator) -> Tensor:
    return torch.full((8, 14, 14), 1e-3)


def a_few_large_ones(generator: torch.Generator) -> Tensor:
    values = torch.randn(5000, generator=generator)
    values[torch.randperm(5000, generator=generator)[:6]] *= 300
    return values


def after_a_relu(generator: torch.Generator) -> Tensor:
    return torch.randn(16, 14, 14, generator=generator).relu()


@pytest.mark.parametrize(
    "make",
    [
        normal,
        one_column,
        one_column_of_equal_values,
        two_columns,
        every_sixteenth,
        one_channel,
        one_equal_channel_of_the_last_axis,
        constant,
        a_few_large_ones,
        after_a_relu,
    ],
)
def test_estimates_of_a_thousand_rows_are_within_their_stated_error(make: Callable[[torch.Generator], Tensor]) -> None:
    errors = errors_of(make)
    assert abs(errors.bias) < 4 * SQUARE_ERROR / math.sqrt(ROWS)
    assert errors.spread < 1.1 * SQUARE_ERROR  # the spread of a thousand is known to 3% or so


def test_up_to_256_elements_the_estimate_is_exact() -> None:
    first, second = whole_numbers(10, 25), whole_numbers(250).flip(0).reshape(10, 25)
    exact = float((first - second).double().norm())
    assert estimated_distance(sketched(first), sketched(second)) == pytest.approx(exact, rel=1e-12)


def test_distance_and_cosine_of_two_tensors_are_near_the_exact_ones() -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(50):
        first = torch.randn(40_000, generator=generator, dtype=torch.float64)
        second = first + 0.2 * torch.randn(40_000, generator=generator, dtype=torch.float64)
        norms = float(first.norm()), float(second.norm())
        exact = float((first - second).norm())
        a, b = sketched(first), sketched(second)
        assert estimated_distance(a, b) == pytest.approx(exact, rel=4 * NORM_ERROR)
        cosine = float(first @ second) / norms[0] / norms[1]
        error = SQUARE_ERROR * exact**2 / (2 * norms[0] * norms[1])
        assert estimated_cosine(a, b, norms) == pytest.approx(cosine, abs=4 * error)
        assert estimated_cosine(a, b) == pytest.approx(cosine, abs=0.02)


def test_equal_tensors_are_at_no_distance_and_zero_has_no_direction() -> None:
    one, zero = sketched(torch.ones(700)), np.zeros(SKETCH_WIDTH)
    assert estimated_distance(one, one.copy()) == 0
    assert estimated_cosine(one, one) == 1
    assert estimated_cosine(zero, one) is None


def test_a_change_far_below_one_part_in_a_million_is_not_made_up() -> None:
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(5))
    norm = float(values.norm())
    for share in (3e-6, 1e-4):
        changed = values.double() + share * torch.randn(300_000, generator=torch.Generator().manual_seed(6))
        exact = float((changed.float().double() - values.double()).norm())
        found = estimated_distance(*(sketched(each).astype(np.float32) for each in (values, changed.float())))
        assert found == pytest.approx(exact, rel=4 * NORM_ERROR, abs=RESOLUTION * norm)


def test_the_compiled_structure_is_as_python_describes_it() -> None:
    assert ctypes.sizeof(library._Sketch) == 7 * 8


@pytest.mark.parametrize(
    ("tensor", "inputs"),
    [
        (whole_numbers(1, 3, 9, 7), (5,)),
        (whole_numbers(4, 700), (4, 5, 6, 7)),
        (whole_numbers(3, 5, 8, 8), (2, 3)),  # axis 0 does not count the inputs
        (whole_numbers(2, 5, 8, 8).to(memory_format=torch.channels_last), (0, 1)),
        (whole_numbers(6, 40).T, tuple(range(40))),
        (whole_numbers(3, 1).expand(3, 50), (0, 1, 2)),
        (whole_numbers(), (9,)),
        (whole_numbers(2, 30).half(), (0, 1)),
    ],
    ids=["one", "four", "other axis", "channels last", "transposed", "expanded", "scalar", "half"],
)
def test_a_reduction_has_the_sketch_of_its_tensor(tensor: Tensor, inputs: tuple[int, ...]) -> None:
    reducer = Reducer(distributions=True, sketches=True)
    measured = reducer.reduce(tensor, 1 if tensor.dim() > 1 else None, inputs)
    reducer.settle()
    (reduction,) = collect([measured])
    rows = tensor.float().tolist() if tensor.dim() and len(tensor) == len(inputs) else [tensor.float().tolist()]
    flat = [torch.tensor(row).reshape(-1).tolist() for row in rows]
    numbers = zip(flat, inputs, strict=False)
    np.testing.assert_array_equal(reduction.sketch, sum(by_the_formula(row, number) for row, number in numbers))
