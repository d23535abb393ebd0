import json
import math
import re
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hookscope.text import (
    an,
    exception_line,
    figure,
    one_line,
    percent_text,
    printable,
    safe_text,
    slug,
    strict_json,
    told_apart,
)

# All code points, lone surrogates included, which `st.text()` leaves out.
anything = st.text(st.characters(exclude_categories=[]))


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("two\nlines\r", r"two\nlines\r"),
        ("tab\tnul\0bell\a", r"tab\tnul\x00bell\x07"),
        ("\u202egnp.exe\u2066", r"\u202egnp.exe\u2066"),
        ("zero\u200bwidth\ufeff", r"zero\u200bwidth\ufeff"),
        ("line\u2028separator", r"line\u2028separator"),
        ("caf\udce9", r"caf\udce9"),
        ("tag\U000e0041", r"tag\U000e0041"),
        ("::error::x", r"\x3a:error::x"),
        ("a  ::stop-commands::", r"a  \x3a:stop-commands::"),
        ("x##[error]y", r"x\x23#[error]y"),
    ],
)
def test_text_that_steers_a_terminal_or_a_log_is_spelled_out(hostile: str, shown: str) -> None:
    assert safe_text(hostile) == shown


@pytest.mark.parametrize(
    "name", ["layer1.0.conv1", "Ünïcödé.カタカナ", "C:\\models\\x.pt", "[red]x[/]", "std::vector ## [x]", "😀", ""]
)
def test_ordinary_text_stays_as_it_is(name: str) -> None:
    assert safe_text(name) == name


@given(anything)
def test_safe_text_is_one_printable_line_and_stays_so(text: str) -> None:
    safe = safe_text(text)
    assert safe.isprintable()
    assert len(safe.splitlines()) <= 1
    assert safe_text(safe) == safe
    safe.encode()


@given(st.text(st.sampled_from(":# [a\n\t\x1b\u2003"), max_size=12))
def test_no_line_a_renderer_could_make_is_a_workflow_command(text: str) -> None:
    safe = safe_text(text)
    assert "##[" not in safe
    assert not re.search(r"(^|\s)::", safe)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("layer1.0.conv1#1['out']", "layer1.0.conv1-1-out"),
        ("../../etc/passwd", "etc-passwd"),
        ("net.py:build", "net.py-build"),
        ("...", "unnamed"),
        ("", "unnamed"),
        ("カタカナ", "カタカナ"),
        ("-rf", "rf"),
        (".hidden", "hidden"),
        ("a/b\\c:d\x00e\nf", "a-b-c-d-e-f"),
        ("\ud800x", "x"),
        ("a" * 100 + "z" * 100, "a" * 39 + "--" + "z" * 39),
    ],
)
def test_a_slug_keeps_what_a_file_name_may_hold(text: str, name: str) -> None:
    assert slug(text) == name


@given(anything, st.integers(min_value=8, max_value=100))
@example("\U00010000000²", 8)  # no letter of its start fits
def test_a_slug_is_always_one_safe_part_of_a_path(text: str, max_bytes: int) -> None:
    name = slug(text, max_bytes)
    assert PurePosixPath(name).parts == (name,)
    assert name not in (".", "..")
    assert re.fullmatch(r"[\w][\w.-]*", name)
    assert len(name.encode()) <= max_bytes
    assert slug(name, max_bytes) == name


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=40)
@given(st.dictionaries(st.text(), json_values))
def test_json_gives_back_what_went_in(document: dict[str, Any]) -> None:
    text = strict_json(document)
    assert text.isascii()
    assert text.endswith("}\n")
    assert json.loads(text) == document
    assert list(json.loads(text)) == list(document)


def test_json_has_nan_and_infinities_as_texts_and_no_lone_surrogate() -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = strict_json({"a": float("nan"), "b": [float("inf"), {"\ud800": "x\udfff"}], "c": float("-inf")})
    read = json.loads(text, parse_constant=refuse)
    assert read == {"a": "NaN", "b": ["Infinity", {r"\ud800": r"x\udfff"}], "c": "-Infinity"}


def test_json_takes_numpy_numbers_tuples_and_paths() -> None:
    document = {"a": np.float32(0.5), "b": np.int64(3), "c": (1, 2), "d": PurePosixPath("x/y"), "e": True}
    assert json.loads(strict_json(document)) == {"a": 0.5, "b": 3, "c": [1, 2], "d": "x/y", "e": True}


def test_json_has_one_key_and_one_list_item_a_line() -> None:
    document = {"seed": 7, "model": {"name": "x", "shape": [1, 2]}, "rows": [{"a": 1}, {"a": 2}], "none": []}
    assert strict_json(document).splitlines() == [
        "{",
        '  "seed": 7,',
        '  "model": {"name": "x", "shape": [1, 2]},',
        '  "rows": [',
        '    {"a": 1},',
        '    {"a": 2}',
        "  ],",
        '  "none": []',
        "}",
    ]


def test_printable_text_is_one_line_without_control_characters() -> None:
    shown = printable("a\nb\x1b[31m\u202e\ud800é")
    assert shown == r"a\nb\x1b[31m\u202e\ud800é"
    assert printable("x" * 500, 10) == "x" * 9 + "…"


def test_a_message_is_one_line_and_never_empty() -> None:
    assert one_line(OSError("odd\n::error::\x1b[31m" + "x" * 500), 20) == r"odd \x3a:error::\x1b[31mx…"
    assert one_line(KeyError()) == "KeyError"


def test_json_holds_no_command_of_a_ci_runner_and_reads_back_the_same() -> None:
    text = strict_json({"message": "a ##[error] b", "list": ["##["]})
    assert "##[" not in text
    assert json.loads(text) == {"message": "a ##[error] b", "list": ["##["]}


def test_the_line_of_an_exception_is_its_type_and_first_line() -> None:
    assert exception_line(ValueError("one\ntwo\x1b[2J")) == "ValueError: one"
    assert exception_line(ValueError("\x1b[2J")) == "ValueError: \\x1b[2J"
    assert exception_line(KeyError()) == "KeyError"


def test_the_article_of_a_name_is_that_of_its_first_sound() -> None:
    names = [
        "int",
        "OrderedDict",
        "Upsample",
        "Unflatten",
        "LSTM",
        "MLP",
        "Linear",
        "ResNet",
        "UNet",
        "dict",
        "torch.Size",
    ]
    assert [an(name).removesuffix(f" {name}") for name in names] == ["an"] * 6 + ["a"] * 5


def test_probabilities_are_told_apart() -> None:
    assert told_apart((0.41, 0.0127, 0.38)) == ["0.41", "0.0127", "0.38"]
    assert told_apart((0.1217, 0.1212, 0.1216)) == ["0.1217", "0.1212", "0.1216"]
    assert told_apart((0.25, 0.25, 0.0)) == ["0.25", "0.25", "0.00"]
    assert told_apart((0.5, 0.5 + 1e-12)) == ["0.500000", "0.500000"]


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.0, 2, "0"),
        (-0.0, 2, "0"),
        (1580.4, 3, "1,580"),
        (0.0534, 2, "0.053"),
        (0.999, 2, "1"),
        (-120.0, 2, "-120"),
        (5.3, 2, "5.3"),
        (1e-4, 2, "1e-4"),
        (6.44e-10, 2, "6.4e-10"),
        (8.3e9, 2, "8.3e9"),
        (999_999.0, 2, "1e6"),
        (float("inf"), 2, "Inf"),
        (float("-inf"), 2, "-Inf"),
        (float("nan"), 2, "NaN"),
    ],
)
def test_a_number_is_written_as_people_write_it(value: float, digits: int, text: str) -> None:
    assert figure(value, digits) == text


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 6))
def test_a_written_number_is_the_number_to_so_many_digits(value: float, digits: int) -> None:
    assert float(figure(value, digits).replace(",", "")) == float(f"{value:.{digits}g}")


@pytest.mark.parametrize(
    ("fraction", "decimals", "shown"),
    [
        (None, 1, "-"),
        (math.nan, 1, "NaN"),
        (0.0, 1, "0%"),
        (1e-9, 1, "<0.1%"),
        (0.0011, 1, "0.1%"),
        (0.4375, 1, "43.8%"),
        (0.99999, 1, ">99.9%"),
        (1.0, 1, "100%"),
        (1.25, 1, "125.0%"),  # of a gap, which may be larger than the whole
        (0.004, 0, "<1%"),
        (0.996, 0, ">99%"),
        (0.125, 2, "12.50%"),
        (0.00001, 2, "<0.01%"),
    ],
)
def test_only_an_exact_fraction_is_called_nothing_or_all(fraction: float | None, decimals: int, shown: str) -> None:
    assert percent_text(fraction, decimals) == shown
