"""What `--input-shape` and `input_shape` may be, and each mistake in one line."""

from typing import Any

import numpy as np
import pytest
import torch

from hookscope.errors import UsageError
from hookscope.results.noise_shapes import NoiseShape, parse_noise_shapes

TOKENS = NoiseShape((4, 20), "tokens", "int64", 1000)

FORMS: list[tuple[Any, tuple[NoiseShape, ...]]] = [
    ("4,20", (NoiseShape((4, 20)),)),
    ([4, 20], (NoiseShape((4, 20)),)),
    (torch.Size([4, 20]), (NoiseShape((4, 20)),)),
    ((np.int64(4), np.int64(20)), (NoiseShape((4, 20)),)),
    ("3", (NoiseShape((3,)),)),
    ("2,5:float64", (NoiseShape((2, 5), "", "float64"),)),
    ("2,5:torch.float64", (NoiseShape((2, 5), "", "float64"),)),
    ("tokens=4,20:int64<1000", (TOKENS,)),
    ("tokens=4,20<1000", (TOKENS,)),
    (["tokens=4,20:int64<1000", "meta=4,5"], (TOKENS, NoiseShape((4, 5), "meta"))),
    ([(4, 20), "2,5:float64"], (NoiseShape((4, 20)), NoiseShape((2, 5), "", "float64"))),
    ({"tokens": "4,20:int64<1000", "meta": (4, 5)}, (TOKENS, NoiseShape((4, 5), "meta"))),
    ((TOKENS,), (TOKENS,)),
]


@pytest.mark.parametrize(("inputs", "meant"), FORMS, ids=[str(index) for index, _ in enumerate(FORMS)])
def test_every_form_means_what_it_says(inputs: Any, meant: tuple[NoiseShape, ...]) -> None:
    assert parse_noise_shapes(inputs) == meant


@pytest.mark.parametrize(
    "shape", [TOKENS, NoiseShape((2, 5)), NoiseShape((1,), "", "float16"), NoiseShape((2, 5), "m")]
)
def test_its_text_means_the_same(shape: NoiseShape) -> None:
    assert parse_noise_shapes(shape.text) == (shape,)


MISTAKES: list[tuple[Any, str]] = [
    ("", "is not a shape"),
    ("4,x", "'4,x' is not a shape"),
    ("4,20:int46", "there is no dtype 'int46'. Nearest: 'int64'"),
    ("4,20<x", "is not a shape"),
    ("4,20:float32<9", "a bound, which is for whole numbers"),
    ("4,20:bool<3", "the bound of bool is 1 to 2"),
    ("4,20:int8<129", "the bound of int8 is 1 to 128"),
    ("4,20<0", "the bound of int64 is 1 to"),
    ("=4,20", "has no name before '='"),
    ("a b=4,20", "'a b' cannot be an argument"),
    ("0,20", "has a size below 1"),
    ("65536,4097", "has more than 268435456 values"),
    (f"{'9' * 5000},2", "is not a shape"),
    (["16384,16384", "m=1"], "more than 268435456 values in all"),
    (["m=1,2", "m=1,2"], "--input-shape m is given twice"),
    ((), "has no batch axis"),
    ({}, "has no batch axis"),
    ([4, "2,3"], "'2,3' is not a size"),
    ([2, 3, "x"], "'x' is not a size"),
    ((4.5, 2), "'4.5' is not a size"),
    ((True, 2), "'True' is not a size"),
    ({"m": "n=1,2"}, "is not a shape"),
    ("\x1b[31m=1", "cannot be an argument"),
]


@pytest.mark.parametrize(("inputs", "words"), MISTAKES, ids=[str(index) for index, _ in enumerate(MISTAKES)])
def test_a_mistake_is_one_line(inputs: Any, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_noise_shapes(inputs)
    message = str(raised.value)
    assert words in message
    assert message.startswith("--input-shape")
    assert len(message.splitlines()) == 1
    assert message.isprintable()
