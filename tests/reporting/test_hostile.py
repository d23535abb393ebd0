"""One text of unknown origin, wherever a result can hold one, through every renderer."""

import csv
import io
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from matplotlib import get_data_path
from matplotlib.ft2font import FT2Font
from rich.cells import cell_len
from rich.console import RenderableType

from hookscope.commands.check.page import checks_html
from hookscope.commands.conversion import summary
from hookscope.commands.notebook import result_html
from hookscope.reporting import tables, terminal
from hookscope.reporting.comparison import CHANGES
from hookscope.reporting.github import annotations, checks_to_markdown
from hookscope.reporting.grids import draw_for_run, encode_png
from hookscope.reporting.junit import checks_to_junit
from hookscope.reporting.layer_columns import gradient_columns, input_columns, layer_table_of, parameter_columns
from hookscope.results.activations import Activations, FeatureMaps, LayerRow, UncalledLayer, Verification
from hookscope.results.check import checks_to_json
from hookscope.results.comparison import Change, Comparison, Prediction
from hookscope.results.contents import CheckpointContents, StoredEntry, StoredPart, StoredTensor
from hookscope.results.findings import Finding
from hookscope.results.gradients import GradientRow, Gradients, InputGradients, LossRecord, ParameterRow
from hookscope.results.inputs import InputRecord
from hookscope.results.network import Failure, ModelInfo, ModuleRow, ModuleTable
from hookscope.results.runs.reading import StoredRun
from hookscope.results.runs.record import RunRecord
from hookscope.text import safe_text
from tests.reporting import checked
from tests.reporting.conftest import gradient_statistics, printed
from tests.reporting.html_page import Page
from tests.reporting.stored import HOSTILE_NAMES, report_html

NUMBERS = gradient_statistics((1, 4, 2, 2))

# Letters of every kind, and what commands to terminals, spreadsheets, pages, CI servers and path names are made of.
FORMULAS = set("=+-@\t\uff1d\uff0b\uff0d\uff20")
PIECES = (
    *("::error::", "##[", "=", "@", "+", "-", "<b>", "&", '"', "'", "[/]", "|", "`", "$x$", ";", "../", "猫"),
    *("\uff1d", "\t", "\n", "\r", "\x1b[31m", "\x00", "\u202e", "\ud800"),
)
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.characters()), max_size=8).map("".join)


def gradients(name: str) -> Gradients:
    numbers = replace(NUMBERS, unmeasured=name)
    return Gradients(
        model=model(name),
        inputs=(InputRecord(name, name, None, (3, 2, 2), (name,)),),
        loss=LossRecord(name, name, 1.0, (name,)),
        rows=(LayerRow(0, name, name, 1, name, 1, numbers, ("unmeasured",), (name,), name, (name,)),),
        gradients=(
            GradientRow(0, 0, name, name, 1, name, "output", "gradient", numbers, name, (name,), name, (name,)),
        ),
        parameters=(ParameterRow(0, f"{name}.weight", name, True, "gradient", numbers, 1.0, 0.5, (name,)),),
        uncalled=(UncalledLayer(name, name, 1, name),),
        predictions=(Prediction(0, (1,), (name,), (0.5,)),),
        verdicts=(Finding("dead-gradient", "fail", name, name),),
        warnings=(name,),
        notes=(name,),
        failure=Failure(name, name, (name,), name),
        verification=Verification("not repeatable", name),
    )


def model(name: str) -> ModelInfo:
    return ModelInfo(name, name, name, False, name, 7, arguments={name: name})


def activations(name: str) -> Activations:
    whole = gradients(name)
    shared = ("model", "inputs", "rows", "uncalled", "predictions", "warnings", "notes", "failure", "verification")
    return Activations(**{each: getattr(whole, each) for each in shared})


def feature_maps(name: str) -> FeatureMaps:
    return FeatureMaps(0, name, name, 0, "maps", np.ones((1, 2, 2), np.float32), None, 1, (1, 2, 2), name)


def contents(name: str) -> CheckpointContents:
    tensor = StoredTensor(name, (2,), name, 8, 1, 0, name)
    part = StoredPart(name, True, (tensor,), name, (name,))
    return CheckpointContents(name, name, name, 9, (part,), (StoredEntry(name, name, name),), {name: name}, (name,))


def comparison(name: str) -> Comparison:
    before, after = Prediction(0, (1,), (name,), (0.5,)), Prediction(0, (1,), (name,), (0.25,))
    change = Change(name, "activation", NUMBERS, replace(NUMBERS, l2=1.0))
    return Comparison((name,), (1.0, 2.0), ((before,), (after,)), (change, replace(change, after=NUMBERS)), 2)


def page(name: str) -> str:
    """Return the page of a run."""
    record = RunRecord(
        verb="grads",
        command=name,
        versions={name: name},
        platform=name,
        threads=1,
        patterns=(name,),
        settings={"edits": (name,)},
        overview=name,
    )
    return report_html(StoredRun(Path(), record, gradients(name)))


def inputs_alone(name: str) -> str:
    inputs = [InputGradients(name, 1.0, 1.0, {name: 1.0})]
    return tables.csv_text(input_columns(inputs), inputs)


TERMINAL: Mapping[str, Callable[[str, int], RenderableType]] = {
    "activations": lambda name, width: summary(activations(name), width=width, full=True),
    "warnings": lambda name, _: terminal.warnings_panel((name, name)),
    "verification": lambda name, width: summary(
        replace(gradients(name), verification=Verification("not repeatable", name)), width=width
    ),
    "failure": lambda name, _: terminal.failure_panel(Failure(name, name, (name,), name)),
    "modules": lambda name, width: summary(
        ModuleTable(model(name), (ModuleRow(name, name, 1, 1, 1, (), (), True, name),), notes=(name,)), width=width
    ),
    "gradients": lambda name, width: summary(
        replace(gradients(name), inputs_alone=(InputGradients(name, 1.0, 1.0, {name: 1.0}),)), width=width, full=True
    ),
    "comparison": lambda name, width: summary(comparison(name), width=width),
    "contents": lambda name, width: summary(contents(name), width=width),
    "check": lambda name, width: summary(checked.hostile(name), width=width),
}

CSV: Mapping[str, Callable[[str], str]] = {
    "rows": lambda name: tables.csv_text(*layer_table_of(activations(name))),
    "gradients": lambda name: tables.csv_text(gradient_columns(gradients(name)), gradients(name).gradients),
    "parameters": lambda name: tables.csv_text(parameter_columns(gradients(name)), gradients(name).parameters),
    "changes": lambda name: tables.csv_text(CHANGES, comparison(name).changes),
    "inputs": inputs_alone,
}

JSON: Mapping[str, Callable[[str], str]] = {
    "inspection": lambda name: gradients(name).to_json(),
    "rows": lambda name: activations(name).to_json(),
    "check": lambda name: checks_to_json([checked.hostile(name)]),
    "contents": lambda name: contents(name).to_json(),
}


HTML: Mapping[str, Callable[[str], str]] = {
    "report": page,
    "check": lambda name: checks_html([checked.hostile(name)]),
    "activations": lambda name: result_html(activations(name)),
    "gradients": lambda name: result_html(gradients(name)),
    "maps": lambda name: result_html(feature_maps(name)),
}

OTHER: Mapping[str, Callable[[str], str]] = {
    "markdown": lambda name: checks_to_markdown([checked.hostile(name)]),
    "junit": lambda name: checks_to_junit([checked.hostile(name)]),
    "github": lambda name: annotations([checked.hostile(name)]),
}


def hostile(test: Callable[..., None]) -> Callable[..., None]:
    for name in (*HOSTILE_NAMES, *checked.HOSTILE_NAMES, "".join(PIECES)):
        test = example(name=name)(test)
    health = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(deadline=None, max_examples=15, suppress_health_check=health)(given(name=TEXTS)(test))


def assert_harmless(text: str) -> None:
    assert all(line.isprintable() for line in text.split("\n"))
    assert "##[" not in text
    assert not re.search(r"^\s*::", text, re.MULTILINE)


@pytest.mark.parametrize("kind", TERMINAL)
@hostile
@pytest.mark.sample("inputs", "check")
def test_nothing_steers_a_terminal(kind: str, name: str) -> None:
    assert_harmless(printed(TERMINAL[kind](name, 2000), 2000))
    for width in (20, 40, 80, 200):
        for line in printed(TERMINAL[kind](name, width), width).split("\n"):
            assert cell_len(line) <= width
            assert line.isprintable()


@pytest.mark.parametrize("kind", CSV)
@hostile
def test_no_cell_is_a_formula_and_no_line_a_command(kind: str, name: str) -> None:
    text = CSV[kind](name)
    assert_harmless(text)
    header, *lines = csv.reader(io.StringIO(text))
    assert all(len(line) == len(header) for line in lines)
    numbers = r"-?[\d.]+(e[-+]?\d+)?"
    assert not [
        cell for line in (header, *lines) for cell in line if cell[:1] in FORMULAS and not re.fullmatch(numbers, cell)
    ]


@pytest.mark.parametrize("kind", JSON)
@hostile
def test_json_holds_the_text_exactly_and_no_command(kind: str, name: str) -> None:
    text = JSON[kind](name)
    assert text.isascii()
    assert_harmless(text)
    assert json.dumps(name.encode(errors="backslashreplace").decode()) in json.dumps(json.loads(text))


def tags(page: Page) -> list[tuple[str, ...]]:
    """Return elements and their attributes' names; not those of plots, which have room for some names only."""
    return [(element.tag, *element.attributes) for element in page.elements if element.tag not in {"path", "text"}]


@cache
def harmless_tags(kind: str, name: str) -> list[tuple[str, ...]]:
    return tags(Page(HTML[kind](name)))


def assert_no_tag(kind: str, name: str) -> None:
    text = HTML[kind](name)
    assert all(line.isprintable() for line in text.replace("\t", " ").split("\n"))
    page = Page(text)
    assert tags(page) == harmless_tags(kind, re.sub(r"[^.]", "x", name))
    assert sum(safe_text(name) in words for words in page.words) >= {"report": 15, "maps": 0}.get(kind, 10)


@pytest.mark.parametrize("kind", HTML)
@hostile
@pytest.mark.sample("gradients", "activations", "maps")
def test_no_text_becomes_a_tag(kind: str, name: str) -> None:
    assert_no_tag(kind, name)


@pytest.mark.parametrize("kind", HTML)
def test_markup_becomes_no_tag(kind: str) -> None:
    assert_no_tag(kind, "\"'></title></script><script>alert(1)</script><img src=x onerror=alert(1)>&lt;")


@pytest.mark.parametrize("kind", OTHER)
@hostile
def test_no_line_of_a_report_is_a_command_but_ours(kind: str, name: str) -> None:
    text = OTHER[kind](name)
    assert all(line.isprintable() for line in text.split("\n"))
    if kind == "junit":
        ET.fromstring(text)
    if kind == "github":
        assert all(re.match("::(error|warning|notice) title=", line) for line in text.splitlines())
    else:
        assert_harmless(text)


DEJAVU = FT2Font(str(Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"))).get_charmap()


@hostile
def test_pictures_draw_what_their_fonts_have(name: str) -> None:
    picture, grid = draw_for_run(feature_maps(name), "a.png", input_name=name)
    encode_png(picture)
    assert all(letter.isprintable() and ord(letter) in DEJAVU for part in grid.caption for letter in part)


def test_what_is_shown_is_what_it_is() -> None:
    shown = printed(TERMINAL["activations"]("\x1b[31m\u202e", 1000), 1000)
    assert safe_text("\x1b[31m\u202e") in shown
