"""What CI servers read: the GitHub Action with its script, the workflows, the snippets for other servers."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema.validators import validator_for

ROOT = Path(__file__).parents[1]
ACTION = ROOT / "action.yml"
SCRIPT = ROOT / ".github" / "check-action.sh"
SNIPPETS = ROOT / "docs" / "ci"

NETWORKS = """
from torch import nn


class Sound(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.conv(x).mean((2, 3)))
"""


def read(path: Path) -> Any:
    return yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)


def test_the_page_about_ci_shows_the_files_and_names_what_the_action_takes_and_gives() -> None:
    page = (ROOT / "docs" / "in-ci.md").read_text(encoding="utf-8")
    for path in SNIPPETS.iterdir():
        assert f'title="{path.name}"\n{path.read_text(encoding="utf-8")}```' in page
    action = read(ACTION)
    for name, entry in (action["inputs"] | action["outputs"]).items():
        assert f"| `{name}` | {entry['description'].strip()} |" in page, name


def values(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("path", "schema"),
    [
        (ACTION, "github-actions"),
        *((path, "github-workflows") for path in sorted((ROOT / ".github" / "workflows").iterdir())),
        (SNIPPETS / "github.yml", "github-workflows"),
        (SNIPPETS / "gitlab.yml", "gitlab-ci"),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else value,
)
def test_every_file_keeps_to_the_schema_of_its_server(path: Path, schema: str) -> None:
    vendored = files("check_jsonschema") / "builtin_schemas" / "vendor" / f"{schema}.json"
    rules = json.loads(vendored.read_text(encoding="utf-8"))
    document = {"on" if key is True else key: value for key, value in values(path).items()}
    errors = list(validator_for(rules)(rules).iter_errors(document))
    assert errors == []


def test_the_snippet_for_pre_commit_is_a_configuration_of_the_hook_that_is_shipped(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pre_commit", "validate-config", str(SNIPPETS / "pre-commit.yaml")],
        env=os.environ | {"PRE_COMMIT_HOME": str(tmp_path)}, check=True,
    )  # fmt: skip
    [repository] = values(SNIPPETS / "pre-commit.yaml")["repos"]
    [hook], [shipped] = repository["hooks"], values(ROOT / ".pre-commit-hooks.yaml")
    assert {**hook, "language": "python", "description": shipped["description"]} == shipped


def test_the_commands_of_the_snippets_have_only_options_that_check_has() -> None:
    from typer.main import get_command

    from hookscope.cli.app import app

    expected = {name for param in get_command(app).commands["check"].params for name in param.opts}
    script = SCRIPT.read_text(encoding="utf-8")
    commands = [*values(SNIPPETS / "gitlab.yml")["check-weights"]["script"], *re.findall(r"options\+=\((.*)\)", script)]
    options = {word for command in commands for word in shlex.split(command) if word.startswith("--")}
    assert {"--junit", "--sarif", "--report", "--evidence", "--config", "--baseline"} <= options
    assert options <= expected


def test_inputs_reach_the_shell_as_variables_only() -> None:
    for step in read(ACTION)["runs"]["steps"]:
        assert "${{" not in step.get("run", "")


def test_the_script_reads_no_variable_that_the_action_does_not_set() -> None:
    steps = read(ACTION)["runs"]["steps"]
    options = {name for step in steps for name in step.get("env", {})}
    runner = {"GITHUB_ACTION_PATH", "GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "RUNNER_TEMP"}
    used = set(re.findall(r"\$\{?([A-Z_]+)", SCRIPT.read_text(encoding="utf-8")))
    assert used == options | runner
    inputs = {
        name for step in steps for text in step.get("env", {}).values() for name in re.findall(r"inputs\.(\S+)", text)
    }
    assert inputs <= read(ACTION)["inputs"].keys()


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The variables of a step, as GitHub's runner sets them, with the defaults of the action's inputs."""
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "net.py").write_text(NETWORKS, encoding="utf-8")
    (tmp_path / "checkout" / "text.pt").write_text("no weights", encoding="utf-8")
    (tmp_path / "summary.md").write_text("# Before\n", encoding="utf-8")
    inputs = read(ACTION)["inputs"]
    [check] = [step for step in read(ACTION)["runs"]["steps"] if step.get("id") == "check"]
    defaults = {name: read_input(text, inputs) for name, text in check["env"].items()}
    return {
        **os.environ,
        **defaults,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GITHUB_ACTIONS": "true",
        "GITHUB_ACTION_PATH": str(ROOT),
        "GITHUB_WORKSPACE": str(tmp_path / "checkout"),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "RUNNER_TEMP": str(tmp_path),
    }


def read_input(text: str, inputs: Mapping[str, Any]) -> str:
    [name] = re.findall(r"^\$\{\{ inputs\.(\S+) \}\}$", text)
    return str(inputs[name].get("default", ""))


def run_check(job: Mapping[str, str], **variables: str) -> tuple[int, dict[str, str], str]:
    """Run the step; return its exit code, the outputs, and what it prints."""
    ended = subprocess.run(
        ["bash", str(SCRIPT), "check"],
        cwd=job["GITHUB_WORKSPACE"],
        env={**job, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = Path(job["GITHUB_OUTPUT"]).read_text(encoding="utf-8").splitlines()
    return ended.returncode, dict(line.split("=", 1) for line in lines), ended.stdout + ended.stderr


@pytest.mark.exhaustive
def test_the_action_checks_each_line_and_tells_verdict_and_files(job: dict[str, str]) -> None:
    code, outputs, printed = run_check(
        job,
        CHECKPOINTS="net.py:Sound\n\n  text.pt  \n--trust\n$(touch pwned)",
        ARGUMENTS="--input-shape\n2,3,32,32\n",
        CONFIG="",
    )
    assert (code, outputs["exit-code"], outputs["verdict"]) == (3, "3", "error")  # text.pt is no weights file
    assert "net.py:Sound: passed" in printed
    for name in ("text.pt", "--trust", "$(touch pwned)"):  # each is a name, nothing else
        assert f"::error title=hookscope · {name}" in printed
    assert not (Path(job["GITHUB_WORKSPACE"]) / "pwned").exists()
    declared = read(ACTION)["outputs"]
    assert outputs.keys() - {"folder"} == declared.keys()
    for name in ("report", "summary", "sarif", "junit"):
        assert Path(outputs[name]).is_relative_to(outputs["folder"])
        assert Path(outputs[name]).stat().st_size
    written = Path(job["GITHUB_STEP_SUMMARY"]).read_text(encoding="utf-8")
    assert written == "# Before\n" + Path(outputs["summary"]).read_text(encoding="utf-8")
    assert "<!-- hookscope check: net.py:Sound text.pt --trust $(touch pwned) -->" in written


@pytest.mark.parametrize(("checkpoints", "code"), [("nothing/*.pt", 5), (" \n", 2)])
@pytest.mark.sample("nothing/*.pt")
def test_the_action_does_not_pass_what_checks_nothing(job: dict[str, str], checkpoints: str, code: int) -> None:
    ended, outputs, _ = run_check(job, CHECKPOINTS=checkpoints)
    assert (ended, outputs["exit-code"], outputs["verdict"]) == (code, str(code), "error")
    assert outputs["report"] == outputs["junit"] == outputs["summary"] == ""
    [run] = json.loads(Path(outputs["sarif"]).read_text(encoding="utf-8"))["runs"]
    assert not run["invocations"][0]["executionSuccessful"]


@pytest.mark.exhaustive
def test_a_failed_check_is_told_from_a_python_without_hookscope(job: dict[str, str]) -> None:
    broken = NETWORKS.replace(
        "super().__init__()", "super().__init__(); self.spoilt = nn.Parameter(0 * torch.tensor([torch.inf]))"
    )
    (Path(job["GITHUB_WORKSPACE"]) / "net.py").write_text(f"import torch\n{broken}", encoding="utf-8")
    code, outputs, _ = run_check(job, CHECKPOINTS="net.py:Sound", ARGUMENTS="--select\nnon-finite-parameter")
    assert (code, outputs["verdict"]) == (1, "failed")
    Path(job["GITHUB_OUTPUT"]).unlink()
    python = Path(job["RUNNER_TEMP"]) / "python"
    python.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    python.chmod(0o755)
    code, outputs, _ = run_check(job, CHECKPOINTS="net.py:Sound", PATH=f"{python.parent}:{job['PATH']}")
    assert (code, outputs["verdict"]) == (1, "error")
