"""Noise for several arguments on the command line, and what a person is told where one is missing."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.test_noise_inputs import SOURCE

COMMANDS = ["layers", "activations", "grads", "check", "attribute", "diff"]


@pytest.fixture
def ask(run: Run) -> Run:
    """Run a command with a network of this file, `diff` with it twice."""
    Path("two.py").write_text(SOURCE, encoding="utf-8")

    def run_command(command: str, name: str, *options: str) -> object:
        return run(command, *[f"two.py:{name}"] * (2 if command == "diff" else 1), *options)

    return run_command


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.sample("layers")
def test_commands(command: str, ask: Run) -> None:
    method = ["--method", "gradient", "--sanity", "none"] if command == "attribute" else []
    output = [] if command == "check" else ["--json"]
    shapes = ["--input-shape", "2,3,8,8", "--input-shape", "facts=2,5"]
    ended = ask(command, "Pictured", *shapes, *method, *output)
    assert ended.code == 0, ended
    if command == "layers":
        rows = {row["layer"]: row for row in json.loads(ended.stdout)["rows"]}
        assert rows["conv"]["input_shapes"] == [[2, 3, 8, 8]]
        assert rows["facts"]["output_shapes"] == [[2, 4]]


@pytest.mark.parametrize("command", ["layers", "check"])
@pytest.mark.sample("layers")
def test_a_missing_argument_is_named_with_the_options_that_give_it(command: str, ask: Run) -> None:
    ended = ask(command, "Pictured", "--input-shape", "2,3,8,8")
    assert ended.code == 6
    said = " ".join((ended.stdout if command == "check" else ended.stderr.splitlines()[-1]).split())
    assert "Give what is missing by name: --input facts=FILE, or --input-shape facts=SHAPE for noise" in said
    assert " ".join(f"{ended.stdout} {ended.stderr}".split()).count("missing 1 required") == 1


@pytest.mark.exhaustive
def test_check_takes_several_shapes_from_its_configuration(ask: Run) -> None:
    for shape in ("['2,3,8,8', 'facts=2,5']", "[[2, 3, 8, 8], [2, 5]]", "{ picture = [2, 3, 8, 8], facts = '2,5' }"):
        Path("hookscope.toml").write_text(f"[input]\nshape = {shape}\n", encoding="utf-8")
        ended = ask("check", "Pictured")
        assert (ended.code, "2 inputs" in ended.stdout) == (0, True), ended
    Path("hookscope.toml").write_text("[input]\nshape = { facts = '2,5:int46' }\n", encoding="utf-8")
    ended = ask("check", "Pictured")
    assert ended.code == 2
    assert ended.stderr == (
        "hookscope: error: hookscope.toml, line 2: shape in [input] is wrong: 'facts=2,5:int46': there is no dtype "
        "'int46'. Nearest: 'int64', 'int16', 'int8'.\n"
    )


def test_words_out_of_range_lead_to_the_bound(ask: Run) -> None:
    ended = ask("grads", "Words", "--input-shape", "4,9<60", "--input-shape", "4,5:float64")
    assert ended.code == 6
    assert "index out of range in self. If the input is noise: --input-shape SHAPE:int64<BOUND" in ended.stderr
