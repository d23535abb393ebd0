"""`hookscope check` as CI runs it: a separate process, real checkpoints, exit codes, reports."""

import base64
import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file

from hookscope.checkpoints.find_checkpoints import find_checkpoints
from hookscope.errors import NothingMatchedError
from hookscope.rules import RULES
from tests.checkpoints.sandbox.test_sandbox import is_running, wait_until
from tests.cli.conftest import Ended, Run, names_below, table
from tests.fork_server import ForkServer
from tests.models.hostile import Call

PLANTED = "features.2.block.0.0"

CONFIG = """
[input]
shape = [2, 3, 64, 64]
"""

NETWORKS = """
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn


class Sound(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.conv(x).mean((2, 3)))


def crashes():
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves():
    os._exit(0)


def hangs():
    Path("hanging").write_text(str(os.getpid()))
    time.sleep(600)


def tells_threads():
    print("threads", os.environ.get("OMP_NUM_THREADS"))
    return Sound()


def raises():
    raise RuntimeError("cannot be built\\n::error::injected")


class Greedy(Sound):
    def forward(self, x):
        return super().forward(x) + torch.zeros(2**28).sum()


class Talks(Sound):
    def __init__(self):
        super().__init__()
        print("::error::built")

    def forward(self, x):
        print("ran")
        return super().forward(x)


class Hostile(Sound):
    def __init__(self):
        super().__init__()
        self.add_module("x\\n::error::injected", nn.Conv2d(3, 8, 3))

    def forward(self, x):
        return self.head((self.conv(x) + getattr(self, "x\\n::error::injected")(x)).mean((2, 3)))
"""

HOSTILE_LAYER = "x\n::error::injected"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to work in: a sound network, one with NaN in a weight, networks of all tempers, a configuration."""
    folder = tmp_path_factory.mktemp("check")
    (folder / "hookscope.toml").write_text(CONFIG, encoding="utf-8")
    (folder / "net.py").write_text(NETWORKS, encoding="utf-8")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        state = torchvision.models.mobilenet_v3_small().state_dict()
    torch.save(state, folder / "good.pt")
    state[f"{PLANTED}.weight"][3, 2, 0, 0] = torch.nan
    torch.save(state, folder / "broken.pt")
    content = (folder / "good.pt").read_bytes()
    (folder / "cut.pt").write_bytes(content[: len(content) // 2])
    torch.save({"w": torch.ones(2), "x": Call(exec, "1")}, folder / "module.pt")
    return folder


@pytest.fixture(scope="module")
def check(command: Run, folder: Path) -> Run:
    """Run `hookscope check` in the folder, outside GitHub's runner."""

    def run_check(*arguments: object, **options: Any) -> Ended:
        return command("check", *arguments, cwd=folder, **options)

    return run_check


@pytest.fixture(scope="module", autouse=True)
def _no_runner(environment: dict[str, str]) -> None:
    for name in [text for text in environment if text.startswith("GITHUB_") or text == "CI_JOB_NAME"]:
        environment.pop(name, None)


def report_of(ended: Ended) -> dict[str, Any]:
    """Read the JSON report on a single checkpoint."""
    [report] = json.loads(ended.stdout)["checkpoints"]
    return report


def sarif_run(log: Path) -> dict[str, Any]:
    """Read the run of a SARIF log."""
    [run] = json.loads(log.read_text(encoding="utf-8"))["runs"]
    return run


def statuses(report: dict[str, Any]) -> dict[str, str]:
    return {rule["rule"]: rule["status"] for rule in report["outcomes"]}


def no_traceback(ended: Ended) -> bool:
    return "Traceback" not in ended.stdout + ended.stderr


# One checkpoint


def test_a_sound_checkpoint_passes_quietly(check: Run) -> None:
    ended = check("good.pt")
    assert ended.code == 0
    assert "good.pt: passed" in ended.stdout
    assert "mobilenet_v3_small" in ended.stdout
    assert "FAIL" not in ended.stdout
    assert ended.stderr == ""


def test_a_pattern_over_layers_must_fit_one_of_the_networks(check: Run, tmp_path: Path) -> None:
    config = tmp_path / "layers.toml"
    for pattern, code, said in (
        ("head", 0, ""),
        ("features.0.0", 0, ""),
        ("haed", 5, "matches no layer. Nearest: 'head'"),
    ):
        config.write_text(f"{CONFIG}[[layers]]\npattern = '{pattern}'\ndead-channels = 'fail'\n", encoding="utf-8")
        ended = check("net.py:Sound", "good.pt", "--config", config, "--format", "json")
        errors = [report["error"] for report in json.loads(ended.stdout)["checkpoints"]]
        assert (ended.code, ended.stderr) == (code, "")
        assert all(bool(error) == bool(said) for error in errors)
        assert said in errors[0]


def test_a_nan_fails_the_check_and_the_report_says_where(check: Run, tmp_path: Path) -> None:
    junit, evidence = tmp_path / "reports" / "junit.xml", tmp_path / "evidence"
    ended = check("broken.pt", "--format", "json", "--junit", junit, "--evidence", evidence)
    assert ended.code == 1
    report = report_of(ended)
    places = {rule["rule"]: [finding["where"] for finding in rule["findings"]] for rule in report["outcomes"]}
    assert places["non-finite-parameter"] == [f"{PLANTED}.weight"]
    assert places["non-finite-activation"] == [PLANTED]

    suite = ET.parse(junit).getroot().find("testsuite")
    failing = [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None]
    assert set(failing) >= {"non-finite-parameter", "non-finite-activation"}
    assert names_below(junit.parent) == {"junit.xml"}

    [kept] = evidence.iterdir()
    assert report["evidence"] == str(kept)
    assert json.loads((kept / "report.json").read_bytes())["checkpoints"][0]["checkpoint"] == "broken.pt"
    rows = table(kept / "rows.csv")
    assert {row["layer"] for row in rows} >= {PLANTED}
    assert {row["layer"] for row in rows} <= {where for place in places.values() for where in place} | {"(model)", ""}
    pictures = list((kept / "grids").glob("*.png"))
    assert len(pictures) == len(rows)
    for picture in pictures:
        with Image.open(picture) as image:
            image.verify()


def test_the_report_page_holds_every_verdict_and_the_pictures_of_what_failed(check: Run, tmp_path: Path) -> None:
    page, evidence = tmp_path / "report.html", tmp_path / "evidence"
    ended = check("broken.pt", "net.py:Sound", "--format", "json", "--evidence", evidence, "--report", page)
    assert ended.code == 1
    assert len(json.loads(ended.stdout)["checkpoints"]) == 2
    assert f"Report: {page} (" in "".join(ended.stderr.splitlines())
    text = page.read_text(encoding="utf-8")
    assert "2 checkpoints: 1 failed, 1 passed" in text
    assert 'href="#document-2">net.py:Sound</a>' in text
    shown = [base64.b64decode(each) for each in re.findall(r'src="data:image/png;base64,([^"]+)"', text)]
    assert shown == [path.read_bytes() for path in sorted(evidence.glob("*/grids/*.png"))]
    assert shown
    assert f'alt="Feature maps of {PLANTED}: Conv2d, ' in text
    assert names_below(tmp_path) >= {"report.html"}
    assert not [name for name in names_below(tmp_path) if name.startswith(".report")]

    again = check("net.py:Sound", "--report", page)
    assert again.code == 0
    assert again.stdout.splitlines()[-1].startswith(f"Report: {page} (")
    assert "net.py:Sound: passed" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("checkpoint", "code", "says"),
    [
        ("cut.pt", 3, "cut.pt"),
        ("module.pt", 4, "--trust"),
        ("resnet17", 5, "resnet18"),
        ("net.py:raises", 6, "cannot be built"),
    ],
)
def test_what_cannot_be_checked_has_its_own_exit_code(check: Run, checkpoint: str, code: int, says: str) -> None:
    ended = check(checkpoint, columns=200)
    assert ended.code == code
    assert says in ended.stdout
    assert "could not be checked" in ended.stdout or "failed" in ended.stdout
    assert not any(line.startswith("::") for line in ended.stdout.splitlines())
    assert no_traceback(ended)


@pytest.mark.exhaustive
def test_one_set_of_weights_is_chosen_and_run_over_the_pictures_that_are_named(check: Run, folder: Path) -> None:
    state = torch.load(folder / "good.pt")
    torch.save({"student": torch.load(folder / "broken.pt"), "teacher": state}, folder / "training.ckpt")
    Image.new("RGB", (70, 60), "teal").save(folder / "teal.png")
    Image.linear_gradient("L").convert("RGB").save(folder / "grey.png")
    refused = check("training.ckpt", columns=200)
    assert refused.code == 2
    assert "choose with --key" in refused.stdout
    pictures = ("--images", "teal.png", "--images", "gr*.png", "--resize", 48, "--crop", "32x40")
    ended = check("training.ckpt", "--key", "teacher", *pictures, "--format", "json")
    assert ended.code == 0
    assert [(each["name"], each["shape"]) for each in report_of(ended)["inputs"]] == [
        ("teal.png", [3, 32, 40]),
        ("grey.png", [3, 32, 40]),
    ]
    assert check("training.ckpt", "--key", "student", *pictures).code == 1


def test_weights_of_another_network_fail_the_check(check: Run) -> None:
    ended = check("good.pt", "--arch", "resnet34", "--format", "json")
    assert ended.code == 1
    assert statuses(report_of(ended))["architecture"] == "fail"


def test_a_model_that_prints_leaves_json_alone(check: Run) -> None:
    ended = check("net.py:Talks", "--format", "json")
    assert ended.code == 0
    assert report_of(ended)["passed"]
    assert "ran" in ended.stderr


@pytest.mark.exhaustive
def test_torch_is_never_imported_by_the_command_itself(folder: Path, python: Run) -> None:
    program = (
        "import sys; from hookscope.cli.app import run; code = run(sys.argv[1:]);"
        "sys.exit(99 if {'torch', 'torchvision', 'matplotlib'} & set(sys.modules) else code)"
    )
    (folder / "bare").mkdir()
    assert python("-c", program, "check", "../net.py:raises", cwd=folder / "bare").code == 6


# Many checkpoints


@pytest.mark.exhaustive
def test_others_finish_whatever_ends_one_worker(check: Run) -> None:
    names = ("good.pt", "net.py:crashes", "broken.pt", "net.py:leaves")
    ended = check(*names, "--jobs", 2, "--format", "json")
    assert ended.code == 3
    reports = json.loads(ended.stdout)["checkpoints"]
    assert [report["checkpoint"] for report in reports] == list(names)
    good, crashed, broken, left = reports
    assert (good["exit_code"], broken["exit_code"]) == (0, 1)
    assert "SIGSEGV" in crashed["error"]
    assert "exit code 0" in left["error"]
    for report in (crashed, left):
        assert report["error_code"] == 3
        assert "pass" not in statuses(report).values()
        assert set(statuses(report)) == set(RULES)
    assert no_traceback(ended)


@pytest.mark.exhaustive
def test_a_worker_out_of_time_is_an_error_of_its_own(check: Run, folder: Path) -> None:
    ended = check("net.py:hangs", "net.py:Sound", "--timeout", 5, "--format", "json")
    assert ended.code == 3
    late, sound = json.loads(ended.stdout)["checkpoints"]
    assert "not finish within 5 s" in late["error"]
    assert "--timeout" in late["error"]
    assert sound["passed"]
    assert not is_running(int((folder / "hanging").read_text(encoding="utf-8")))


def test_a_network_that_takes_too_much_memory_is_an_error_of_its_own(check: Run) -> None:
    ended = check("net.py:Greedy", "net.py:Sound", "--memory", 0.5, "--format", "json")
    assert ended.code == 3
    greedy, sound = json.loads(ended.stdout)["checkpoints"]
    assert "memory" in greedy["error"]
    assert sound["passed"]


def test_the_most_severe_exit_code_decides(check: Run) -> None:
    ended = check("broken.pt", "module.pt", "cut.pt", "--format", "json", "--jobs", 2)
    assert [report["exit_code"] for report in json.loads(ended.stdout)["checkpoints"]] == [1, 4, 3]
    assert ended.code == 4


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.exhaustive
def test_interrupting_leaves_nothing_behind(
    folder: Path, environment: dict[str, str], number: signal.Signals, code: int
) -> None:
    witness = folder / "hanging"
    witness.unlink(missing_ok=True)
    with subprocess.Popen(
        [sys.executable, "-m", "hookscope", "check", "net.py:hangs", "--junit", "late.xml", "--evidence", "late"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        try:
            assert wait_until(lambda: witness.exists() and witness.read_text(encoding="utf-8") != "")
            worker = int(witness.read_text(encoding="utf-8"))
            assert is_running(worker)
            running.send_signal(number)
            stdout, stderr = running.communicate(timeout=600)
        finally:
            running.kill()
    assert running.returncode == code
    assert stdout == stderr == b""
    assert wait_until(lambda: not is_running(worker))
    assert not {"late.xml", "late"} & {path.name for path in folder.iterdir()}


# Which checkpoints


def test_a_folder_stands_for_the_weights_files_below_it(tmp_path: Path) -> None:
    for name in ("epoch10.pt", "epoch2.pt", "deep/er/x.safetensors", ".git/x.pt", ".x.pt", "notes.txt", "cat.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    paths = find_checkpoints([str(tmp_path)])
    assert [Path(each).relative_to(tmp_path).as_posix() for each in paths] == [
        "deep/er/x.safetensors",
        "epoch2.pt",
        "epoch10.pt",
    ]


def test_globs_are_expanded_and_each_file_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.pt", "a.pt", "[x].pt"):
        Path(name).touch()
    assert find_checkpoints(["b.pt", "*.pt", "demo"]) == ["b.pt", "[x].pt", "a.pt", "demo"]
    assert find_checkpoints(["[x].pt"]) == ["[x].pt"]
    assert find_checkpoints([""]) == [""]  # as from a variable of the shell that is not set; not the current folder


def test_a_folder_that_a_deep_glob_matches_stands_for_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/a/kept/2.pt", "runs/b/deep/kept/inner/10.pt", "runs/b/notes.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    for source in ("runs/**/kept", "runs/**/", "runs/**/*.pt", "runs**"):
        assert find_checkpoints([source]) == ["runs/a/kept/2.pt", "runs/b/deep/kept/inner/10.pt"], source


def test_a_folder_whose_files_cannot_be_looked_at_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat, closed = os.stat, tmp_path / "closed"

    def denied(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if isinstance(path, str | Path) and Path(path).parent == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *args, **kwargs)

    for name in ("closed/model.safetensors", "open/model.safetensors"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    monkeypatch.setattr(os, "stat", denied)
    expected = [str(tmp_path / name / "model.safetensors") for name in ("closed", "open")]
    assert find_checkpoints([str(tmp_path)]) == expected


@pytest.mark.parametrize("broken", [False, True])
def test_shards_count_once_as_their_index(tmp_path: Path, *, broken: bool) -> None:
    for name in ("m-1.safetensors", "m-2.safetensors", "other.safetensors"):
        (tmp_path / name).touch()
    index = tmp_path / "m.safetensors.index.json"
    weight_map = {"a": "m-1.safetensors", "b": "m-2.safetensors"}
    index.write_text(json.dumps({"weight_map": 3 if broken else weight_map}), encoding="utf-8")
    names = ["m-1.safetensors", "m-2.safetensors", "m.safetensors.index.json", "other.safetensors"]
    expected = [str(tmp_path / name) for name in (names if broken else names[2:])]
    assert find_checkpoints([str(tmp_path)]) == expected
    assert find_checkpoints([str(tmp_path / name) for name in names]) == expected


def test_a_folder_or_glob_without_checkpoints_matches_nothing(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for source in (str(tmp_path), str(tmp_path / "*.pt")):
        with pytest.raises(NothingMatchedError):
            find_checkpoints([source])


# Formats


def test_hostile_names_inject_nothing(
    command: Run, folder: Path, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = {"conv": torch.nn.Conv2d(3, 8, 3), HOSTILE_LAYER: torch.nn.Conv2d(3, 8, 3), "head": torch.nn.Linear(8, 5)}
    network = torch.nn.Module()
    for name, layer in layers.items():
        network.add_module(name, layer)
    state = network.state_dict()
    state[f"{HOSTILE_LAYER}.weight"].fill_(torch.nan)
    torch.save(state, tmp_path / "named.pt")
    junit, summary, evidence = (tmp_path / name for name in ("junit.xml", "summary.md", "evidence"))
    monkeypatch.setitem(environment, "GITHUB_ACTIONS", "true")
    monkeypatch.setitem(environment, "GITHUB_STEP_SUMMARY", str(summary))
    options = ("--arch", "net.py:Hostile", "--junit", junit, "--evidence", evidence)
    ended = command("check", tmp_path / "named.pt", *options, cwd=folder)
    assert ended.code == 1
    commands = [line for line in (ended.stdout + ended.stderr).splitlines() if line.lstrip().startswith("::")]
    assert any("non-finite-parameter" in line for line in commands)
    assert all(line.startswith(("::error title=hookscope", "::warning title=hookscope")) for line in commands)
    assert "injected" in summary.read_text(encoding="utf-8")
    assert not any(line.startswith("::") for line in summary.read_text(encoding="utf-8").splitlines())
    assert ET.parse(junit).getroot().tag == "testsuites"
    [kept] = evidence.iterdir()
    assert not any(line.startswith("::") for line in (kept / "rows.csv").read_text(encoding="utf-8").splitlines())


def test_on_github_annotations_follow_the_text_and_the_summary_is_added_to(
    command: Run, folder: Path, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("# Before\n", encoding="utf-8")
    monkeypatch.setitem(environment, "GITHUB_ACTIONS", "true")
    monkeypatch.setitem(environment, "GITHUB_STEP_SUMMARY", str(summary))
    ended = command("check", "cut.pt", cwd=folder)
    assert ended.code == 3
    lines = ended.stdout.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("::error "))
    assert all(line.startswith(("::error ", "::warning ")) for line in lines[first:])
    assert any("cut.pt" in line for line in lines[:first])
    written = summary.read_text(encoding="utf-8")
    assert written.startswith("# Before\n")
    assert "cut.pt" in written
    plain = command("check", "cut.pt", "--format", "text", cwd=folder)
    assert "::error" not in plain.stdout
    assert summary.read_text(encoding="utf-8") == written


def test_markdown_begins_with_the_same_line_whenever_the_same_job_runs(
    command: Run, folder: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(environment, "GITHUB_WORKFLOW", "Release")
    monkeypatch.setitem(environment, "GITHUB_JOB", "weights")
    for run in ("1", "2"):
        monkeypatch.setitem(environment, "GITHUB_RUN_ID", run)
        ended = command("check", "cut.pt", "cut.p?", "--format", "markdown", cwd=folder)
        assert ended.stdout.splitlines()[0] == "<!-- hookscope check: Release / weights: cut.pt cut.p? -->"


@pytest.mark.exhaustive
def test_sarif_holds_the_findings_with_the_rules_and_their_explanations(check: Run, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "check.sarif"
    assert check("broken.pt", "--sarif", log).code == 1
    run = sarif_run(log)
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == [*RULES, "examination"]
    [rule] = [rule for rule in run["tool"]["driver"]["rules"] if rule["id"] == "dead-channels"]
    explained = check("--explain", "dead-channels", columns=10_000).stdout
    assert explained.splitlines() == rule["help"]["text"].splitlines()
    assert {result["ruleId"] for result in run["results"]} == {
        "non-finite-parameter",
        "non-finite-activation",
        "untrained-norm",
    }
    for result in run["results"]:
        assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "broken.pt"
    before = log.read_bytes()
    check("broken.pt", "--sarif", log)
    assert log.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [(("nothing/*.pt",), 5, "nothing/*.pt"), ((), 2, "Missing CHECKPOINT"), (("net.py:crashes",), 3, "SIGSEGV")],
)
@pytest.mark.exhaustive
def test_sarif_of_a_run_that_checked_nothing_is_not_clean(
    check: Run, tmp_path: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    log = tmp_path / "check.sarif"
    log.write_text('{"of a run before": "which passed"}', encoding="utf-8")
    assert check(*arguments, "--sarif", log).code == code
    run = sarif_run(log)
    [invocation] = run["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (False, code)
    [error] = [each for each in invocation["toolExecutionNotifications"] if each["level"] == "error"]
    assert says in error["message"]["text"]
    [result] = run["results"]
    assert says in result["message"]["text"]
    [location] = result["locations"]
    where = "net.py" if "net.py:crashes" in arguments else "hookscope.toml"
    assert location["physicalLocation"]["artifactLocation"]["uri"] == where


def test_sarif_of_a_run_that_a_bug_ends_is_not_clean(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hookscope.cli.app import run

    log = tmp_path / "check.sarif"
    seen: list[bool] = []

    def planted(*_arguments: object, **_options: object) -> None:
        seen.append(sarif_run(log)["invocations"][0]["executionSuccessful"])  # what a killed run leaves
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("hookscope.cli.check_workers.run_jobs", planted)
    monkeypatch.chdir(folder)
    assert run(["check", "good.pt", "--sarif", str(log)]) == 70
    assert seen == [False]
    [invocation] = sarif_run(log)["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (False, 70)
    assert "planted" in invocation["toolExecutionNotifications"][0]["message"]["text"]
    assert "this is a bug in hookscope" in capsys.readouterr().err


def test_on_github_sarif_is_relative_to_the_checkout_and_the_workflow_stands_in_for_files_outside(
    command: Run, folder: Path, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "checkout"
    (checkout / ".github" / "workflows").mkdir(parents=True)
    (checkout / ".github" / "workflows" / "ci.yml").touch()
    (checkout / "models").mkdir()
    (checkout / "models" / "cut.pt").write_bytes((folder / "cut.pt").read_bytes())
    monkeypatch.setitem(environment, "GITHUB_WORKSPACE", str(checkout))
    monkeypatch.setitem(environment, "GITHUB_WORKFLOW_REF", "octo/cat/.github/workflows/ci.yml@refs/heads/main")
    log = tmp_path / "check.sarif"
    assert command("check", "cut.pt", folder / "cut.pt", "--sarif", log, cwd=checkout / "models").code == 3
    places = [result["locations"][0]["physicalLocation"]["artifactLocation"] for result in sarif_run(log)["results"]]
    assert [place["uri"] for place in places] == ["models/cut.pt", ".github/workflows/ci.yml"]


# Baselines


def test_a_baseline_is_written_and_held_to(check: Run, folder: Path, tmp_path: Path) -> None:
    baseline = tmp_path / "baseline.json"
    ended = check("good.pt", "--baseline", baseline, "--update-baseline")
    assert ended.code == 0
    assert str(baseline) in ended.stderr.replace("\n", "")
    same = check("good.pt", "--baseline", baseline, "--format", "json")
    assert same.code == 0
    assert statuses(report_of(same))["drift"] == "pass"
    state = torch.load(folder / "good.pt")
    halved = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    torch.save(halved, tmp_path / "halved.pt")
    copy = check(tmp_path / "halved.pt", "--baseline", baseline, "--format", "json")
    assert statuses(report_of(copy))["drift"] == "pass"
    state[f"{PLANTED}.weight"].mul_(3)
    torch.save(state, tmp_path / "drifted.pt")
    junit = tmp_path / "junit.xml"
    options = ("--select", "drift", "--junit", junit, "--evidence", tmp_path / "evidence")
    other = check(tmp_path / "drifted.pt", "--baseline", baseline, "--format", "json", *options)
    assert other.code == 1
    [drift] = [rule for rule in report_of(other)["outcomes"] if rule["rule"] == "drift"]
    [finding] = drift["findings"]
    assert finding["where"] == PLANTED
    assert finding["followed_by"][0] == "features.2.block.0.1"
    assert finding["followed_by"][-1] == "(model)"
    assert f" {len(finding['followed_by'])} more layers follow: " in finding["message"]
    assert ET.parse(junit).getroot().get("failures") == "1"
    failed = ET.parse(junit).find(".//failure")
    assert failed.get("message") == finding["message"]
    [rows] = (tmp_path / "evidence").glob("*/rows.csv")
    assert len(rows.read_text(encoding="utf-8").splitlines()) == 1 + 1 + len(finding["followed_by"])


def test_a_baseline_of_an_earlier_hookscope_is_refused_in_one_line(check: Run, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('{"schema_version": 2}', encoding="utf-8")
    ended = check("good.pt", "--baseline", tmp_path / "old.json")
    assert ended.code == 2
    assert "an earlier hookscope wrote it (schema version 2, this one reads 8)" in ended.errors[0]
    assert "Write a new one with `hookscope check --update-baseline`." in ended.errors[0]


def test_a_baseline_is_not_written_from_what_does_not_run(check: Run, tmp_path: Path) -> None:
    baseline = tmp_path / "baseline.json"
    baseline.write_text('{"before": 1}', encoding="utf-8")
    ended = check("cut.pt", "--baseline", baseline, "--update-baseline")
    assert ended.code == 3
    assert baseline.read_text(encoding="utf-8") == '{"before": 1}'
    assert "not written" in ended.errors[0]


# Mistakes


@pytest.mark.parametrize("options", [("--junit",), ("--sarif",), ("--update-baseline", "--baseline")])
def test_a_checkpoint_is_never_replaced(check: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    weights = tmp_path / "weights.pt"
    torch.save({"0.weight": torch.ones(2, 2)}, weights)
    before = weights.read_bytes()
    ended = check(weights, *options, weights)
    assert (ended.code, weights.read_bytes()) == (3, before)
    assert f"it holds something else, and is not replaced. Name another file with {options[-1]}." in ended.errors[0]
    notes = tmp_path / "notes.txt"
    notes.write_text("Remember the milk.", encoding="utf-8")
    assert check(weights, *options, notes).code == 3
    assert notes.read_text(encoding="utf-8") == "Remember the milk."


@pytest.mark.parametrize("options", [("--junit", "--sarif"), ("--report", "--junit"), ("--baseline", "--sarif")])
def test_two_options_do_not_write_one_file(check: Run, tmp_path: Path, options: tuple[str, str]) -> None:
    ended = check("good.pt", options[0], tmp_path / "both", options[1], tmp_path / "sub" / ".." / "both")
    assert (ended.code, [*tmp_path.iterdir()]) == (2, [])
    assert "name the same file" in ended.errors[0]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 2, "Missing CHECKPOINT"),
        (("good.pt", "--update-baseline"), 2, "--baseline"),
        (("good.pt", "broken.pt", "--update-baseline", "--baseline", "b.json"), 2, "one checkpoint"),
        (("good.pt", "--baseline", "missing.json"), 2, "missing.json"),
        (("good.pt", "--config", "missing.toml"), 2, "missing.toml"),
        (("good.pt", "--config", "net.py"), 2, "net.py"),
        (("good.pt", "--select", "dead-chanels"), 2, "dead-channels"),
        (("good.pt", "--limit", "dead-chanels.max-fraction=0.5"), 2, "Nearest: 'dead-channels.max-fraction'"),
        (("good.pt", "--limit", "dead-channels.most=0.5"), 2, "Give one of dead-channels.max-fraction."),
        (("good.pt", "--limit", "integrity.most=0.5"), 2, "The rule integrity has no limits."),
        (("good.pt", "--limit", "vanishing=1e-6"), 2, "In `check` it is vanishing-gradient.min-ratio."),
        (("good.pt", "--limit", "saturated_fraction=1"), 2, "In `check` it is saturated-activation.max-fraction."),
        (("good.pt", "--limit", "=1"), 2, "names no limit. Give RULE.LIMIT=VALUE"),
        (("good.pt", "--limit", "dead-channels.max-fraction"), 2, "has no number"),
        (("good.pt", "--limit", "dead-channels.max-fraction=1.1"), 2, "is not between 0 and 1"),
        (("good.pt", "--limit", "dead-layer.min-values=x"), 2, "for example, --limit dead-layer.min-values=1024."),
        (("good.pt", "--limit", "outlier-weight.max-ratio=-1"), 2, "is not a positive, finite number"),
        (("good.pt", "--limit", "accuracy.min-fraction=0.9"), 2, "accuracy needs labelled pictures (--data FOLDER)"),
        (("good.pt", "--limit", "drift.max-difference=0.1", "--ignore", "drift"), 2, "--limit"),
        (("good.pt", "--limit", "dead-filter.max-fraction=0.1", "--ignore", "dead-*"), 2, "--select dead-filter"),
        (("--explain", "dead-chanels"), 2, "dead-channels"),
        (("good.pt", "--junit", "good.pt/junit.xml"), 3, "good.pt"),
        (("good.pt", "--junit", "."), 3, "folder"),
        (("good.pt", "--sarif", "good.pt/check.sarif"), 3, "good.pt"),
        (("good.pt", "--report", "good.pt"), 3, "not a hookscope report"),
        (("good.pt", "--report", "good.pt/report.html"), 3, "not a directory"),
        (("good.pt", "--evidence", "good.pt"), 3, "Name another folder with --evidence"),
        (("good.pt", "--update-baseline", "--baseline", "good.pt/b.json"), 3, "good.pt"),
        (("good.pt", "--format", "github"), 3, "GITHUB_STEP_SUMMARY"),
    ],
)
def test_mistakes_are_told_before_any_work(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    says: str,
) -> None:
    from hookscope.cli.app import run

    def refuse(*_arguments: object, **_options: object) -> None:
        pytest.fail("work has begun")

    monkeypatch.setattr("hookscope.cli.check_workers.run_jobs", refuse)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "good.pt/summary.md")
    monkeypatch.chdir(folder)
    before = names_below(folder)
    assert run(["check", *arguments]) == code
    captured = capsys.readouterr()
    [line] = captured.err.splitlines()
    assert line.startswith("hookscope: error: ")
    assert says in line
    assert names_below(folder) == before


def test_a_report_that_cannot_be_written_in_the_end_is_an_error_and_the_rest_is_there(
    check: Run, tmp_path: Path
) -> None:
    ended = check("net.py:Sound", "--junit", "/dev/full", "--report", tmp_path / "report.html")
    assert ended.code == 3
    assert "net.py:Sound: passed" in ended.stdout
    assert "/dev/full" in ended.errors[0]
    assert names_below(tmp_path) == {"report.html"}


@pytest.mark.exhaustive
def test_a_limit_decides_where_a_rule_objects(run: Run, tmp_path: Path) -> None:
    weight = torch.ones(8, 4) + torch.rand(8, 4)
    weight[[1, 5]] = 0  # 2 of 8 filters: 25%, which is the limit itself
    torch.save({"fc.weight": weight, "fc.bias": torch.rand(8)}, tmp_path / "model.pt")

    def findings(*options: str) -> set[str]:
        ended = run("check", str(tmp_path / "model.pt"), "--arch", "none", "--format", "json", *options)
        return {name for name, status in statuses(report_of(ended)).items() if status in ("warn", "fail")}

    assert findings() == set()
    assert findings("--limit", "dead-filter.max-fraction=0.24", "--limit", "outlier-weight.max-ratio=9") == {
        "dead-filter"
    }


def test_a_bug_is_reported_as_one_and_injects_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from hookscope.cli.app import run

    monkeypatch.setattr("hookscope.cli.check_workers._PRELOAD", ("net_that_is_not\n::error::injected",))
    monkeypatch.chdir(folder)
    assert run(["check", "net.py:Sound", "--format", "json"]) == 70
    captured = capfd.readouterr()
    [report] = json.loads(captured.out)["checkpoints"]
    assert report["error_code"] == 70
    assert "bug in hookscope" in captured.err.splitlines()[-1]
    assert not any(line.startswith("::") for line in captured.err.splitlines())


# What needs no checkpoint


def test_init_writes_a_configuration_once(run: Run, tmp_path: Path) -> None:
    assert run("check", "--init").code == 0
    written = (tmp_path / "hookscope.toml").read_text(encoding="utf-8")
    from hookscope.commands.check.configuration.default_file import default_text
    from hookscope.commands.check.configuration.reading import read_settings

    assert written == default_text()
    read_settings(None, tmp_path)
    (tmp_path / "hookscope.toml").write_text("mine", encoding="utf-8")
    ended = run("check", "--init")
    assert ended.code == 3
    assert "exists" in ended.errors[0]
    assert (tmp_path / "hookscope.toml").read_text(encoding="utf-8") == "mine"


def test_a_rule_is_explained_by_name(run: Run) -> None:
    ended = run("check", "--explain", "drift")
    assert (ended.code, ended.stdout.startswith("drift")) == (0, True)


def test_rules_of_history_are_explained_too(run: Run) -> None:
    ended = run("check", "--explain", "norm-jump")
    assert ended.code == 0
    assert " ".join(ended.stdout.split()).startswith(
        "norm-jump, a rule of `hookscope history`, reports that a norm grew by a factor of 10"
    )


# From pre-commit and pytest


@pytest.mark.exhaustive
def test_as_a_pre_commit_hook(folder: Path, environment: dict[str, str], python: Run, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()

    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=repository, check=True, capture_output=True)

    shipped = (Path(__file__).parents[2] / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
    assert "entry: hookscope check\n" in shipped
    assert "language: python\n" in shipped
    # As shipped, but with this installation instead of one from the network.
    hook = shipped.replace("language: python", "language: system").replace(
        "entry: hookscope check", f"entry: {sys.executable} -m hookscope check"
    )
    indented = "".join(f"      {line}\n" for line in hook.splitlines())
    config = f"repos:\n  - repo: local\n    hooks:\n{indented}"
    (repository / ".pre-commit-config.yaml").write_text(config, encoding="utf-8")
    (repository / "hookscope.toml").write_text(CONFIG, encoding="utf-8")
    (repository / "notes.txt").touch()
    for name in ("good", "broken"):
        (repository / f"{name}.pt").write_bytes((folder / f"{name}.pt").read_bytes())
    git("init", "--quiet")
    git("add", "--all")
    variables = environment | {"PRE_COMMIT_HOME": str(tmp_path / "home")}
    done = python("-m", "pre_commit", "run", cwd=repository, env=variables)
    assert done.code == 1
    assert "good.pt: passed" in done.stdout
    assert "broken.pt: failed" in done.stdout


@pytest.mark.exhaustive
def test_from_pytest_in_three_lines(
    folder: Path, environment: dict[str, str], fork_server: ForkServer, tmp_path: Path
) -> None:
    (tmp_path / "hookscope.toml").write_text(CONFIG, encoding="utf-8")
    for name in ("good", "broken"):
        test = (
            "import hookscope\n"
            "def test_the_checkpoint_is_sound():\n"
            f"    hookscope.check({str(folder / f'{name}.pt')!r}).raise_for_failure()\n"
        )
        (tmp_path / f"test_{name}.py").write_text(test, encoding="utf-8")
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    done = fork_server.run(*arguments, cwd=tmp_path, environment=environment)
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert f"{PLANTED}.weight" in done.stdout
    assert "check_results.py" not in done.stdout


@pytest.mark.parametrize("name", ["x.npy", "x.safetensors"])
def test_inputs_that_are_given_as_a_checkpoint_lead_to_images(run: Run, tmp_path: Path, name: str) -> None:
    pictures = torch.rand(2, 3, 8, 8)
    np.save(tmp_path / "x.npy", pictures.numpy())
    save_file({"x": pictures}, tmp_path / "x.safetensors")
    result = run("check", name)
    text = " ".join(result.stdout.split())
    assert "If it holds inputs, name the network first, then this file (in `check`: --images)." in text
    assert result.code not in (0, 1) or "failed" in text
    save_file({"conv.weight": pictures, "conv.bias": torch.rand(2)}, tmp_path / "weights.safetensors")
    assert "--images" not in run("check", "weights.safetensors").stdout
