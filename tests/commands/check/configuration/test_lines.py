import tomllib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookscope.commands.check.configuration.document import KeyPath, line_of

Draw = Callable[[st.SearchStrategy[Any]], Any]

# Everything that could be taken for the end of a string, a bracket or a key.
_MULTILINE = st.lists(
    st.sampled_from(["plant = 1\n", "[t]\n", '"" ', '\\" ', '\\""" ', "\\\\", "''' ", "#\n", "]", "{"])
).map("".join)
_LITERAL_LINES = st.lists(st.sampled_from(["plant = 1\n", "[[t]]\n", "'' ", '""" ', "\\", "#\n", "}"])).map("".join)
_SCALARS = st.one_of(
    st.sampled_from(["1", "-2.5e-3", "true", "1979-05-27T07:32:00Z", "''", '""', '""""""', "''''''"]),
    st.text("a#[]{}'=, ").map('"{}"'.format),
    st.lists(st.sampled_from(['\\"', "\\\\", "#", "[", "a"])).map(lambda parts: f'"{"".join(parts)}"'),
    st.text('a#[]{}"=\\, ').map("'{}'".format),
    st.tuples(_MULTILINE, st.sampled_from(["", '"', '""'])).map(lambda parts: f'"""{parts[0]}{parts[1]}"""'),
    st.tuples(_LITERAL_LINES, st.sampled_from(["", "'", "''"])).map(lambda parts: f"'''{parts[0]}{parts[1]}'''"),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda values: st.one_of(
        st.lists(values, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.lists(values, max_size=3).map(lambda items: "[\n" + "".join(f'  {item}, # ] "\n\n' for item in items) + "]"),
        st.lists(values, max_size=3).map(
            lambda items: "{ " + ", ".join(f'"i {n}" = {item}' for n, item in enumerate(items)) + " }"
        ),
    ),
    max_leaves=4,
)
_FILLERS = st.sampled_from(["\n", "# plant = 1\n", "# ''' [ { \"\"\" \\\n", "   \n", "\t# ]\n"])


@st.composite
def documents(draw: Draw) -> tuple[str, dict[KeyPath, int]]:
    """Draw a TOML document, with the line of each of its keys and tables."""
    text, lines = "", {}
    table: KeyPath = ()
    groups = rows = -1
    for number in range(draw(st.integers(1, 8))):
        text += "".join(draw(st.lists(_FILLERS, max_size=2)))
        line = text.count("\n") + 1
        kind = draw(st.sampled_from(["key", "key", "dotted", "quoted", "table", "subtable", "array", "inner array"]))
        if kind in ("inner array", "subtable") and groups < 0:
            kind = "array"
        if kind == "table":
            table = (f"t{number}", "x y")
            text += f'  [ t{number} . "x y" ]  # ]\n'
        elif kind == "array":
            groups, rows = groups + 1, -1
            table = ("group", groups)
            text += "[[group]]\n"
        elif kind == "inner array":
            rows += 1
            table = ("group", groups, "row", rows)
            text += "[['group'.row]]\n"
        elif kind == "subtable":
            table = ("group", groups, f"s{number}")
            text += f"[group.s{number}]\n"
        else:
            key, path = {
                "key": (f"k{number}", (f"k{number}",)),
                "dotted": (f"d{number} . e.'f g'", (f"d{number}", "e", "f g")),
                "quoted": (f'"q#[{number}"', (f"q#[{number}",)),
            }[kind]
            comment = draw(st.sampled_from(["", ' # " [']))
            text += f"{key} = {draw(_VALUES)}{comment}\n"
            lines[(*table, *path)] = line
            continue
        lines[table] = line
    return text, lines


@given(documents())
def test_every_key_and_table_of_any_document_is_found_on_its_line(document: tuple[str, dict[KeyPath, int]]) -> None:
    text, lines = document
    tomllib.loads(text)  # else the test would be of something that is not TOML
    assert {path: line_of(text, path) for path in lines} == lines


@pytest.mark.parametrize(
    ("text", "path", "line"),
    [
        ("a = 1", ("a",), 1),
        ("\n\n[a.b.c]\n[a]\nd = 1\n", ("a", "b"), 3),
        ("\n\n[a.b.c]\n[a]\nd = 1\n", ("a", "d"), 5),
        ("a.b = 1\na.c = 2\n", ("a",), 1),
        ("a.b = 1\na.c = 2\n", ("a", "c"), 2),
        ("\na = [\n  { b = 1 },\n  { c = 2 },\n]\n", ("a", 1, "c"), 2),
        ("[[a]]\nb = 1\n[[a]]\nb = 2\n[a.c]\nd = 3\n", ("a", 1, "b"), 4),
        ("[[a]]\nb = 1\n[[a]]\nb = 2\n[a.c]\nd = 3\n", ("a", 1, "c", "d"), 6),
        ("[[a]]\n[[a.b]]\n[[a]]\n[[a.b]]\nc = 1\n[[a.b]]\nc = 2\n", ("a", 1, "b", 1, "c"), 7),
    ],
)
def test_what_creates_a_key_is_where_it_stands(text: str, path: KeyPath, line: int) -> None:
    assert line_of(text, path) == line


def test_a_long_list_costs_no_more_than_its_length() -> None:
    # Quadratic work would take hours, and run into the time limit of every test.
    text = "a = [\n" + "  { b = ']' },\n" * 50_000 + "]\nc = 1\n"
    assert line_of(text, ("c",)) == 50_003
