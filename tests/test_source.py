"""What must hold of the source itself, beside what ruff, mypy and import-linter look at."""

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import typer.main

from hookscope.cli.app import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted(typer.main.get_command(app).commands)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_a_page(command: str) -> None:
    registered = typer.main.get_command(app).commands[command]
    assert registered.help
    assert all(getattr(parameter, "help", None) for parameter in registered.params)
    page = ROOT / "docs" / "commands" / f"{command}.md"
    assert page.read_text(encoding="utf-8").startswith(f"# hookscope {command}\n")
    assert f"hookscope {command}" in README


def test_the_readme_opens_with_two_shell_commands() -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert [block.count("\n") for block in blocks[:2]] == [1, 1]
    assert "hookscope activations demo --layer conv" in blocks[0]
    assert "pytest" in blocks[1]


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len(README.encode()) <= 12_000


def test_every_exit_code_is_documented() -> None:
    from hookscope import errors

    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    codes |= {var.exit_code for var in vars(errors).values() if isinstance(var, type) and hasattr(var, "exit_code")}
    table = (ROOT / "docs" / "reference" / "exit-codes.md").read_text(encoding="utf-8")
    for code in codes:
        assert re.search(rf"\b{code}\b", table), code


def test_pinned_versions_have_no_urls_and_cover_what_is_required() -> None:
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert "//" not in pinned
    names = {
        re.split(r"[=<>~! ]", line)[0].lower().replace("_", "-") for line in pinned.splitlines() if line[:1].isalpha()
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    assert {re.split(r"[=<>~!\[ ]", each)[0].lower() for each in required} - {"hookscope"} <= names


def test_pages_count_the_rules_right() -> None:
    from hookscope.rules import RULES

    off = sum(rule.level == "off" for rule in RULES.values())
    assert f"up to {len(RULES)} rules" in README
    release = (ROOT / "docs" / "questions" / "release.md").read_text(encoding="utf-8")
    assert f"up to {len(RULES)} rules with stated limits; {off} of them are off" in release


def test_every_promise_is_held_by_tests_that_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    promises = [line for line in page.partition("## Promises")[2].partition("\n## ")[0].splitlines() if "::" in line]
    assert len(promises) >= 12
    for promise in promises:
        for path, name in re.findall(r"`(tests/[\w/.]+)::(\w+)`", promise):
            functions = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
            assert name in {function.name for function in functions if isinstance(function, ast.FunctionDef)}, promise


def test_no_variable_of_the_package_has_a_name_that_says_nothing() -> None:
    vague = {"each", "found", "told", "given", "known", "those", "what"}
    named = []
    for path in {*(ROOT / "hookscope").rglob("*.py")} - {ROOT / "hookscope" / "api.py"}:
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        bodies = [node.body for node in nodes if isinstance(node, ast.ClassDef)]
        fields = {id(item.target) for body in bodies for item in body if isinstance(item, ast.AnnAssign)}
        names = [node.arg for node in nodes if isinstance(node, ast.arg)]
        names += [
            node.id
            for node in nodes
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields
        ]
        named += [f"{path.name}: {name}" for name in vague.intersection(names)]
    assert named == []


def test_no_room_grows() -> None:
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["lines-of-rooms"]
    counts = Counter[str]()
    for path in {*(ROOT / "hookscope").rglob("*.py")} - {ROOT / "hookscope" / "api.py"}:  # which a script writes
        *rooms, _ = path.relative_to(ROOT / "hookscope").parts
        room = "/".join(rooms[: 2 if rooms[:1] == ["commands"] else 1]) or "hookscope"
        counts[room] += len(path.read_text(encoding="utf-8").splitlines())
    assert counts.keys() == limits.keys()
    assert {room: count for room, count in counts.items() if count > limits[room]} == {}


# What the glossary of CONTRIBUTING calls otherwise: findings, non-patch tokens, rows without an own row, the option.
GONE = re.compile(r"objection|off_picture|TokenPlaces|HistoryVerdict|TrainingVerdict|\bobjects to\b", re.IGNORECASE)


def test_the_glossary_has_one_word_for_each_idea() -> None:
    glossary = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("One word for each idea")[2]
    assert len(re.findall(r"^\| [a-z ]+ \|", glossary.partition("\n\nWhere to look")[0], re.MULTILINE)) >= 10
    files = [*(ROOT / "hookscope").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    assert [file.name for file in files if GONE.search(file.read_text(encoding="utf-8"))] == []
