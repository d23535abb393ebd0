"""Every option is declared once, and editors read the functions that are made from there."""

import re
from dataclasses import fields
from pathlib import Path

import jedi
import numpy as np
import pytest
import torch
import typer.main
import typer.testing

import hookscope
from hookscope.cli.options import with_options
from hookscope.cli.sections import METAVARS_OF_NUMBERS, SectionedCommand
from hookscope.options import (
    LAYERS,
    MOST_USED,
    Activations,
    Attention,
    Attribute,
    Check,
    Diff,
    Grads,
    History,
    LayerOptions,
    Layers,
    Survey,
    Watch,
    any_given,
    group,
    in_help,
    is_given,
    on_command_line,
    option,
    taken,
    text_type,
)
from tests.api_functions import API, written


@group(LAYERS)
class Sliced(LayerOptions):
    """Options of a command that cuts."""

    slices: int = option(2, "N  Cut each layer into N slices.", bounds=(1, 9))


def cut(model: str, *, option: Sliced) -> None:
    """Cut MODEL."""
    typer.echo(f"{model} {option.slices} {option.layer} {option.ops}")


def test_an_option_is_added_by_one_field() -> None:
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=SectionedCommand)(with_options(cut))
    run = typer.testing.CliRunner().invoke
    assert run(app, ["a", "--layer", "x", "--layer", "y", "--slices", "3"]).output == "a 3 ('x', 'y') False\n"
    assert run(app, ["a", "--slices", "10"]).exit_code == 2
    shown = " ".join(run(app, ["--help"]).output.split())
    assert "Layers: -l, --layer PATTERN" in shown
    assert "--slices N Cut each layer into N slices. [default: 2; 1 to 9] Other options" in shown


@pytest.mark.parametrize(
    "kind", [Activations, Attention, Attribute, Check, Diff, Grads, History, Layers, Survey, Watch]
)
def test_numbers_and_nothing_else_have_a_metavar_of_numbers(kind: type) -> None:
    for field in fields(kind):
        metavar = on_command_line(field).help.rpartition("  ")[0].split(" ")[-1]
        is_number = re.search(r"\b(int|float)\b", str(text_type(field))) is not None
        assert (metavar in METAVARS_OF_NUMBERS) == is_number, field.name


@pytest.mark.parametrize("kind", [Activations, Attention, Attribute, Check, Diff, Grads, Survey])
def test_a_long_help_begins_with_about_a_dozen_options_and_a_short_one_as_it_is(kind: type) -> None:
    headings = [heading for _, heading in in_help(kind)]
    count = headings.count(MOST_USED)
    assert 8 <= count <= 15
    assert headings[:count] == [MOST_USED] * count
    assert sorted(each.name for each, _ in in_help(kind)) == sorted(field.name for field in fields(kind))
    assert MOST_USED not in [heading for _, heading in in_help(Sliced)]


def test_values_from_python_are_settled_and_refused_by_the_same_field() -> None:
    assert Sliced(layer="x").layer == ("x",)
    assert Sliced(layer=["x", "y"]).layer == ("x", "y")
    assert is_given(Sliced(layer="x"), "layer")
    assert not any_given(Sliced(layer=[]), Sliced)
    assert vars(taken(LayerOptions, Sliced(ops=True, slices=3))) == {"layer": (), "ops": True}
    with pytest.raises(hookscope.UsageError, match=r"^--slices 0 is not possible: give 1 or more\.$"):
        Sliced(slices=0)
    with pytest.raises(hookscope.UsageError, match=r"^--slices takes a whole number, not type str\.$"):
        Sliced(slices="2")
    with pytest.raises(hookscope.UsageError, match="ndarray is not an input"):
        hookscope.activations(torch.nn.Identity(), np.ones(3))
    with pytest.raises(hookscope.UsageError, match="mean"):
        hookscope.activations(torch.nn.Identity(), torch.ones(1, 3, 4, 4), mean=np.array([0.1, 0.2, 0.3]))


def test_the_functions_are_those_that_the_options_give() -> None:
    assert API.read_text(encoding="utf-8") == written(), "run `python -m tests.api_functions`"


def test_an_editor_lists_all_arguments_with_types() -> None:
    name = "diff"
    project = jedi.Project(Path(hookscope.__file__).parents[1])
    script = jedi.Script(f"from hookscope.api import {name}\n{name}(", project=project)
    (signature,) = script.get_signatures(2, len(name) + 1)
    listed = {param.name: param.description for param in signature.params}
    options = getattr(hookscope.options, name.title())
    assert set(listed) >= {field.name for field in fields(options) if field.metadata["option"].is_python}
    assert listed["seed"] == "param seed: int=0"
    assert listed["layer"] == "param layer: Texts=()"


def test_bounds_hold_for_every_number_and_are_included() -> None:
    assert Attribute(seed=2**63 - 1).seed == 2**63 - 1
    for wrong in ({"seed": 2**63}, {"top": np.int64(0)}, {"batch_size": 0}):
        with pytest.raises(hookscope.UsageError, match="is not possible: give"):
            Attribute(**wrong)
    with pytest.raises(hookscope.UsageError, match="--head -1 is not possible: give 0 or more"):
        Attention(head=[0, -1])
