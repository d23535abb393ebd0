import os
import re
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import numpy as np
import pytest
import torchvision
import typer.main

from hookscope.cli import app as app_module
from tests.cli.conftest import CAT, Ended, Run, assert_refused
from tests.fork_server import ForkServer

COMMANDS = (
    *("activations", "attention", "attribute", "check", "checkpoint", "diff", "doctor", "grads", "history", "layers"),
    *("models", "report", "survey", "watch"),
)


def test_these_are_all_commands() -> None:
    assert tuple(sorted(typer.main.get_command(app_module.app).commands)) == COMMANDS


@pytest.mark.parametrize("command_line", [(), *((command,) for command in COMMANDS)], ids=lambda line: line or "none")
@pytest.mark.sample("none", "command_line3", "command_line6", "command_line9")
def test_help_has_examples_and_does_not_load_torch(python: Run, command_line: tuple[str, ...]) -> None:
    script = (
        "import sys; from hookscope.cli.app import run; code = run(sys.argv[1:]);"
        "heavy = {'torch', 'torchvision', 'numpy', 'matplotlib', 'PIL', 'rich'} & sys.modules.keys();"
        "sys.exit(f'loaded {heavy}' if heavy else code)"
    )
    ended = python("-c", script, *command_line, "--help")
    assert (ended.code, ended.stderr) == (0, "")
    example = " ".join(["\n  hookscope", *command_line])
    assert ended.stdout.count(example) >= 3
    assert "{" not in ended.stdout.splitlines()[0], "a required argument stands as it is"
    assert max(map(len, ended.stdout.splitlines())) <= 100  # of 80 columns only an example may need more


def test_help_names_every_command_and_every_exit_code(run: Run) -> None:
    ended = run("--help")
    assert ended.code == 0
    for word in (*COMMANDS, "0 done", "2 usage", "3 ", "4 ", "5 ", "6 ", "70 "):
        assert word in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("activations", "demo", str(CAT), "--mean", "0_5"), "--mean '0_5' is not a list of numbers."),
        (("activations", "demo", "--input-shape", "1,3,2_24,224"), "--input-shape '1,3,2_24,224' is not a shape."),
        (("activations", "demo", "--input", "x=1_5,2"), "--input x=1_5,2 is neither a number nor a file."),
        (("activations", "demo", "--input", "x=1_5"), "--input x=1_5 is neither a number nor a file."),
        (("grads", "demo", "--limit", "vanishing=1_5"), "--limit 'vanishing=1_5' has no number."),
        (("diff", "demo", "demo", "--fail-over", "rel>1_5"), "--fail-over 'rel>1_5': '1_5' is not a number."),
        (("attention", "demo", "--head", "3", "--head", "1_5"), "--head '3 1_5' is not a number: leave out"),
        (("check", "a.pt", "--timeout", "1_5"), "--timeout '1_5' is not a number: leave out the underscore."),
    ],
)
def test_python_s_underscore_is_no_part_of_a_number(arguments: tuple[str, ...], said: str, run: Run) -> None:
    ended = run(*arguments)
    assert (ended.code, ended.stderr[: len("hookscope: error: ") + len(said)]) == (2, f"hookscope: error: {said}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("activations", "demo", "cat.jpg", "--max-channels", "lots"),
            "--max-channels 'lots' should be a valid integer.",
        ),
        (("attribute", "demo", "cat.jpg", "--top", "0"), "--top '0' should be greater than or equal to 1."),
        (("grads", "demo", "cat.jpg", "--mode", "training"), "--mode 'training' is not one of 'eval', 'train'."),
        (("activations", "demo", "cat.jpg", "--size", "64"), "No such option: --size. Did you mean --resize?"),
        (("attribute", "demo", "cat.jpg", "--class", "3"), "No such option: --class. Did you mean --target?"),
        (("grads", "demo", "--gpu"), "No such option: --gpu. Did you mean --device?"),
        (("grads", "demo", "--verify"), "No such option: --verify. Did you mean --no-verify?"),
        (("activations", "--model", "demo", "cat.jpg"), "--model is not an option: MODEL is given without one."),
        (("activations", "demo", "--image", "cat.jpg"), "--image is not an option: IMAGE is given without one."),
        (
            ("watch", "train.py", "--momentum", "0.9"),
            "No such option: --momentum. Arguments of the script follow --: `hookscope watch train.py -- --lr 0.1`.",
        ),
        (
            ("watch", "train.py", "--evry", "3"),
            (
                "No such option: --evry. Did you mean --every? Arguments of the script follow --: `hookscope watch "
                "train.py -- --lr 0.1`."
            ),
        ),
        (
            ("survey", "demo", "photos", "--input-shape", "3"),
            (
                "No such option: --input-shape. A survey takes files; put several arguments of forward as a dict or a "
                "tuple in one .pt file."
            ),
        ),
    ],
)
def test_a_wrong_value_and_an_option_of_another_tool_are_answered_with_what_fits_here(
    arguments: tuple[str, ...], said: str, run: Run
) -> None:
    ended = run(*arguments)
    assert ended.code == 2
    assert ended.stderr == f"hookscope: error: {said} See `hookscope {arguments[0]} --help`.\n"


@pytest.mark.parametrize(
    ("launcher", "said"),
    [
        ("torchrun", "'torchrun' is not a script. Give `torchrun OPTIONS -m hookscope watch train.py`."),
        ("/usr/bin/python3", "'python3' is not a script. Give the script alone: `hookscope watch train.py`."),
    ],
)
def test_a_launcher_before_the_script_is_told_its_place(launcher: str, said: str, run: Run) -> None:
    ended = run("watch", launcher, "--nproc-per-node", "2", "train.py")
    assert (ended.code, ended.stderr) == (2, f"hookscope: error: {said}\n")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("activations", "demo", "nope.jpg"), 3, "Cannot read 'nope.jpg': no such file. Check the path."),
        (("grads", "demo", str(CAT), "--resize", "big"), 2, "--resize 'big' is not a size."),
        (("diff", "demo", "net.py", str(CAT)), 2, "MODEL 'net.py' needs the name"),
    ],
)
@pytest.mark.exhaustive
def test_what_needs_no_network_is_refused_before_torch_is_loaded(
    arguments: tuple[str, ...], code: int, said: str, python: Run
) -> None:
    script = (
        "import sys; from hookscope.cli.app import run; code = run(sys.argv[1:]);"
        "sys.exit('loaded torch' if 'torch' in sys.modules else code)"
    )
    assert_refused(python("-c", script, *arguments), code, f"hookscope: error: {said}")


@pytest.mark.parametrize("image", ["missing.jpg", "missing/*.jpg", ""])
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("resnet43", "No model is called 'resnet43'."),
        ("timm:resnet43", "timm has no network 'resnet43'."),
        ("nt.py:painted", "nt.py does not exist"),
        ("net.py:paintd", "net.py has no 'paintd'. Nearest: 'painted'."),
        ("nett:painted", "No module 'nett'"),
        ("missing.pt", "missing.pt does not exist"),
    ],
)
def test_people_hear_of_a_misspelt_model_before_a_missing_picture(
    model: str, said: str, image: str, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text("def painted(): ...\n", encoding="utf-8")
    ended = run("activations", model, *filter(None, [image]))
    assert ended.stderr.startswith(f"hookscope: error: {said}")


def test_a_command_that_does_not_exist_is_answered_with_the_nearest_or_with_all(run: Run) -> None:
    typo = run("activation", "demo", "cat.jpg")
    assert typo.code == 2
    assert typo.stderr == (
        "hookscope: error: No such command 'activation'. Did you mean 'activations', 'attention'? "
        "See `hookscope --help`.\n"
    )
    missing = run("demo", "cat.jpg")
    assert missing.code == 2
    assert missing.stderr.startswith("hookscope: error: No such command 'demo'. Commands are activations, grads, ")
    assert set(COMMANDS) <= set(missing.stderr.replace(",", " ").replace(".", " ").split())


STRICT = """
import torch
from torch import nn


def healthy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


def dead():
    network = healthy()
    network.insert(1, nn.ReLU())
    nn.init.constant_(network[0].bias, -100.0)
    return network


class LinearAttention(nn.Module):
    def forward(self, x):
        return x @ (x.transpose(1, 2) @ x)


class Attends(nn.Module):
    def __init__(self, hides):
        super().__init__()
        self.attn = nn.MultiheadAttention(3, 1, batch_first=True)
        self.last = LinearAttention() if hides else nn.Identity()

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)
        return self.last(self.attn(tokens, tokens, tokens)[0])


def attends():
    return Attends(False)


def hides():
    return Attends(True)
"""


@pytest.mark.parametrize(
    ("verb", "sound", "broken"),
    [("activations", "healthy", "dead"), ("survey", "healthy", "dead"), ("attention", "attends", "hides")],
)
def test_strict_fails_where_there_is_a_problem_and_nothing_else_does(
    verb: str, sound: str, broken: str, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "networks.py").write_text(STRICT, encoding="utf-8")
    np.save(tmp_path / "inputs.npy", np.random.default_rng(0).random((30, 3, 8, 8), np.float32))
    small = ("inputs.npy",) if verb == "survey" else (CAT, "--resize", "8", "--crop", "8")
    codes = [
        run(verb, f"networks.py:{network}", *small, *strict).code
        for network in (sound, broken)
        for strict in ((), ("--strict",))
    ]
    assert codes == [0, 0, 0, 1]


def test_too_few_inputs_to_call_a_channel_dead_are_no_problem(run: Run, tmp_path: Path) -> None:
    (tmp_path / "networks.py").write_text(STRICT, encoding="utf-8")
    ended = run("survey", "networks.py:dead", CAT, "--resize", "8", "--crop", "8", "--strict")
    assert ended.code == 0
    assert "too few inputs to call a channel dead" in " ".join(ended.stdout.split())


def test_the_version_is_the_packages(run: Run) -> None:
    assert run("--version").stdout == f"hookscope {version('hookscope')}\n"


@pytest.mark.parametrize(
    ("options", "used"),
    [({}, {"GOMP_SPINCOUNT": "1000"}), ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"})],
)
def test_threads_that_wait_let_go_of_their_cores_unless_the_user_says_otherwise(
    environment: dict[str, str], python: Run, options: dict[str, str], used: dict[str, str]
) -> None:
    script = (
        "import os, sys; from hookscope.cli import app;"
        "app.run = lambda _: print({name: os.environ[name] for name in sys.argv[1:] if name in os.environ}) or 0;"
        "app.main()"
    )
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    without = {name: value for name, value in environment.items() if name not in names}
    ended = python("-c", script, *names, env=without | options)
    assert (ended.code, ended.stdout, ended.stderr) == (0, f"{used}\n", "")


def test_the_installed_script_is_this_command_line() -> None:
    [script] = entry_points(group="console_scripts", name="hookscope")
    assert script.load() is app_module.main


def test_no_command_at_all_shows_the_help_as_a_usage_error(run: Run) -> None:
    ended = run()
    assert ended.code == 2
    assert "Commands:" in ended.stdout


@pytest.mark.parametrize("arguments", [("activation",), ("--verbose",), ("models", "one", "two"), ("layers", "--json")])
def test_wrong_usage_is_one_line_that_names_the_help(run: Run, arguments: tuple[str, ...]) -> None:
    assert_refused(run(*arguments), 2, "--help`.")


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (("activations", "demo", "cat.jpg", "--report", "--out", "run"), "--report", "--out"),
        (("check", "--sarif", "--jobs", "2", "a.pt"), "--sarif", "--jobs"),
        (("grads", "demo", "--loss", "-l", "conv"), "--loss", "-l"),
        (("activations", "demo", "cat.jpg", "--out", "--no-grids"), "--out", "--no-grids"),
        (("activations", "demo", "cat.jpg", "--layer"), "--layer", ""),
        (("watch", "-m", "--", "train.py"), "-m", ""),
    ],
)
def test_the_name_of_an_option_is_no_value_of_the_one_before(
    run: Run, arguments: tuple[str, ...], name: str, value: str
) -> None:
    ended = run(*arguments)
    assert ended.code == 2
    following = f"; '{value}' is the next option" if value else ""
    assert ended.stderr == f"hookscope: error: {name} needs a value{following}.\n"


def test_no_option_only_repeats_a_default() -> None:
    commands = typer.main.get_command(app_module.app).commands
    parameters = [param for command in commands.values() for param in command.params]
    pairs = [param.opts for param in parameters if param.opts and param.secondary_opts and param.default is not None]
    assert pairs == []


def test_an_option_takes_any_value_after_its_equals_sign(run: Run) -> None:
    ended = run("layers", "resnet18", "--layer=--full")
    assert ended.code == 5
    assert "No layer matches '--full'" in ended.stderr


@pytest.mark.parametrize("hostile", ["a\nb", "\x1b[31m\u202ered"])
def test_what_a_user_gives_is_shown_harmlessly(run: Run, hostile: str) -> None:
    ended = run("models", hostile)
    assert ended.code == 5
    assert len(ended.stderr.splitlines()) == 1
    assert "\x1b" not in ended.stderr
    assert "\u202e" not in ended.stderr


@pytest.fixture
def ended_by(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `hookscope models`, in which an error is raised."""

    def raised_in(error: BaseException) -> Ended:
        def raise_error(_pattern: str | None) -> list[str]:
            raise error

        monkeypatch.setattr("hookscope.models.names.model_names", raise_error)
        return run("models")

    return raised_in


@pytest.mark.parametrize("bug", [ZeroDivisionError, EOFError])
def test_a_bug_keeps_its_traceback_and_has_an_exit_code_of_its_own(ended_by: Run, bug: type[Exception]) -> None:
    ended = ended_by(bug())
    assert ended.code == 70
    assert bug.__name__ in ended.stderr
    assert "raise_error" in ended.stderr
    assert "bug in hookscope" in ended.stderr.splitlines()[-1]


def test_an_interruption_is_no_bug(ended_by: Run) -> None:
    ended = ended_by(KeyboardInterrupt())
    assert (ended.code, ended.stdout, ended.stderr) == (130, "", "")


def test_the_names_of_models_are_listed_one_per_line(run: Run) -> None:
    assert run("models").stdout.splitlines() == ["demo", *torchvision.models.list_models()]
    ended = run("models", "vit_?_16")
    assert (ended.code, ended.stdout, ended.stderr) == (0, "vit_b_16\nvit_l_16\n", "")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("hookscope act", ["activations"]),
        ("hookscope check good", []),  # a file, which the shell knows best
        ("hookscope layers net.py:build --layer layer1", []),  # somebody's code is not run for a key
        ("hookscope layers resnet18 --layer layer4.1.c", ["layer4.1.conv1", "layer4.1.conv2"]),
        ("hookscope grads resnet18 cat.jpg --layer type:m", ["type:maxpool2d"]),
    ],
)
def test_completion_completes_commands_networks_and_layers(
    environment: dict[str, str], fork_server: ForkServer, tmp_path: Path, typed: str, offered: list[str]
) -> None:
    asked = {"_HOOKSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    (tmp_path / "net.py").write_text("raise SystemExit('run')", encoding="utf-8")
    script = "from hookscope.cli.app import main; main()"
    ended = fork_server.run("-c", script, cwd=tmp_path, environment=environment | asked)
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (0, offered, "")


def test_an_installed_completion_completes_in_a_real_bash(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "hookscope"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m hookscope "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{environment.get('PATH', os.environ['PATH'])}"
    root = str(Path(__file__).parents[2])
    arguments = environment | {"HOME": str(tmp_path), "PATH": path, "PYTHONPATH": root}
    script = """
hookscope --install-completion bash >/dev/null && . ~/.bashrc
COMP_WORDS=(hookscope activations vit_l) COMP_CWORD=2
_hookscope_completion hookscope
echo "${COMPREPLY[@]}"
"""
    arguments["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"  # it depends on who runs the tests
    ended = subprocess.run(
        ["bash", "-c", script], env=arguments, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (0, ["vit_l_16", "vit_l_32"], "")


# --- Streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("descriptor", [1, 2])
@pytest.mark.sample("1")
def test_a_closed_stream_is_like_the_null_device(started: Run, descriptor: int) -> None:
    done, failed = (started(option, preexec_fn=lambda: os.close(descriptor)) for option in ("--version", "--verbose"))
    assert (done.code, failed.code) == (0, 2)
    assert done.stdout.startswith("" if descriptor == 1 else "hookscope ")
    assert "Traceback" not in failed.stderr
    assert len(failed.errors) == (1 if descriptor == 1 else 0)


@pytest.mark.parametrize(("argument", "unbuffered"), [("--help", ""), ("models", "1")])
def test_stdout_on_a_full_disk_is_one_line_and_exit_code_3(
    started: Run, environment: dict[str, str], argument: str, unbuffered: str
) -> None:
    with Path("/dev/full").open("w") as full:
        ended = started(argument, stdout=full, env=environment | {"PYTHONUNBUFFERED": unbuffered})
    assert ended.code == 3
    assert ended.stderr == "hookscope: error: Standard output cannot be written: No space left on device.\n"


def test_a_closed_pipe_is_exit_code_141_without_a_word(started: Run) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = started("--help", stdout=writer)
    os.close(writer)
    assert (ended.code, ended.stderr) == (141, "")


@pytest.mark.parametrize("command", ["activations", "attribute", "check", "diff", "grads", "history", "survey"])
def test_the_short_help_has_a_dozen_options_and_counts_those_of_the_long_one(command: str, run: Run) -> None:
    short, whole = (
        [line.strip().split("  ")[0] for line in run(command, flag).stdout.splitlines() if line.startswith("  -")]
        for flag in ("-h", "--help")
    )
    assert 9 <= len(short) <= 15
    assert set(short) < set(whole)
    assert f"All {len(whole)} options: hookscope {command} --help\n" in run(command, "-h").stdout


@pytest.mark.parametrize(
    ("command", "choices"),
    [
        ("activations", ["--scale <channel|layer>", "--dtype <float32|float64|float16|bfloat16>"]),
        ("diff", ["--reference <float64>", "--mode-b <eval|train>", "--format <text|github|markdown>"]),
        ("survey", ["--pool <avg|max|cls|none>", "--features-dtype <float32|float16>"]),
    ],
)
def test_the_help_lists_the_choices_of_an_option_and_no_type_of_an_argument(
    command: str, choices: list[str], run: Run
) -> None:
    text = run(command, "--help").stdout
    assert [choice for choice in choices if choice not in text] == []
    assert "<str>" not in text


@pytest.mark.parametrize("command", ["layers", "report"])
def test_a_help_that_is_short_is_the_same_by_either_name(command: str, run: Run) -> None:
    assert run(command, "-h") == run(command, "--help")


@pytest.mark.parametrize("command", ["activations", "attribute", "check", "report"])
def test_every_option_stands_under_a_heading(command: str, run: Run) -> None:
    sections: dict[str, list[str]] = {}
    for line in run(command, "--help").stdout.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            heading = line
        elif line.startswith("  -"):
            sections.setdefault(heading, []).append(line)
    assert len(sections) >= 2
    assert [line.split()[:2] for line in sections["Other options:"]] == [["-h,", "--help"]]


@pytest.mark.parametrize(
    ("missing", "installed", "arguments"),
    [
        ("efficientnet_lite_pytorch", "'hookscope[demo]'", ("layers", "demo")),
        ("timm", "'hookscope[timm]'", ("models", "timm:resnet*")),
        ("transformers", "'hookscope[transformers]'", ("layers", "./vit")),
        ("captum", "'hookscope[attribute]'", ("attribute", "net.py:tiny", CAT, "--method", "occlusion", "--target=0")),
        ("textual_image", "'hookscope[show]'", ("activations", "net.py:tiny", CAT, "--show")),
        ("tensorboard", "'hookscope[tensorboard]'", ("activations", "net.py:tiny", CAT, "--tensorboard", "logs")),
        ("pillow_heif", "pillow-heif", ("activations", "net.py:tiny", "photo.heic")),
    ],
)
def test_an_error_about_a_missing_package_ends_with_the_command_that_installs_it(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    missing: str,
    installed: str,
    arguments: tuple[object, ...],
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit" / "config.json").write_text('{"model_type": "vit"}', encoding="utf-8")
    (tmp_path / "photo.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(16))
    ended = run(*arguments)
    assert ended.code == (3 if missing == "pillow_heif" else 2)
    assert re.search(rf"more packages?: pip install {re.escape(installed)}$", ended.errors[-1])


OUT_OF_MEMORY: dict[str, Exception] = {
    "Python's": MemoryError(),
    "the loader's": ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    "torch's": RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
    ),
    "behind another": ImportError("Importing the numpy C-extensions failed."),
}


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_want_of_memory_is_one_line_and_no_bug(ended_by: Run, kind: str) -> None:
    error = OUT_OF_MEMORY[kind]
    error.__cause__ = MemoryError() if kind == "behind another" else None
    assert_refused(ended_by(error), 3, "not enough memory")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit address space")
def test_a_command_that_cannot_import_what_it_needs_says_so(environment: dict[str, str], python: Run) -> None:
    script = (
        "import resource, sys; from hookscope.cli.app import main;"
        "resource.setrlimit(resource.RLIMIT_AS, (300 * 2**20,) * 2);"
        "sys.argv = ['hookscope', 'layers', 'demo']; main()"
    )
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    assert_refused(python("-c", script, env=environment | one_thread), 3, "not enough memory")


@pytest.mark.parametrize(
    ("option", "hinted"),
    [("--meta", True), ("--output-key", False), ("--no-cost", False), ("--method", False), ("--wieghts", False)],
)
def test_an_option_that_is_misspelt_or_of_other_commands_is_not_taken_for_an_argument_of_the_network(
    run: Run, option: str, hinted: bool
) -> None:
    ended = run("attention", "net.py:tiny", option, "2,3")
    assert ended.code == 2
    assert f"No such option: {option}" in ended.stderr
    assert ("If it is an argument of forward, write --input" in ended.stderr) == hinted
    assert ("Did you mean --weights?" in ended.stderr) == (option == "--wieghts")
