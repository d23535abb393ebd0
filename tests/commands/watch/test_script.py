"""`hookscope watch train.py`: scripts run as without it, to the bit, and faults in them are named."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import hookscope
from hookscope.cli.app import run
from hookscope.commands.watch.training_log import read_training
from tests.commands.watch.conftest import ENVIRONMENT, Forked
from tests.commands.watch.training_scripts import HEAD, SCRIPTS
from tests.fork_server import Finished, ForkServer

# What is found, and the step at which a fault is planted and the place it is seen at first.
FOUND = {
    "plain": "watching Net (SGD, lr 0.1), from step 1 on, loss at train.py:32",
    "gan": "watching Generator (Adam, lr 0.001) and Discriminator (SGD, lr 0.1), from step 1 on, losses at train.py:38 "
    "and train.py:42",
    "accumulated": "watching Net (AdamW, lr 0.001), from step 1 on, loss at train.py:32",
    "lbfgs": "watching Sequential (LBFGS, lr 0.1), from step 1 on, loss at train.py:34",
    "scaled": "watching Net (SGD, lr 0.1), from step 1 on, loss at train.py:35",
    "by-hand": "watching Net (no optimizer: loss and gradients only), from step 2 on, loss at train.py:32",
    "subclassed": "watching Net (Halving, lr 0.1), from step 1 on, loss at train.py:38",
    "workers": "watching Net (SGD, lr 0.1), from step 1 on, loss at train.py:46",
    "compiled": "watching Net (AdamW, lr 0.001), from step 1 on, loss at train.py:32",
    "compiled-step": "watching Net (AdamW, lr 0.001), from step 1 on, loss at train.py:33",
    "partly-optimised": "watching Net (SGD, lr 0.1), from step 1 on, loss not seen",
}
VARIANTS = {
    name if not variant else f"{name}-{variant}": (name, variant)
    for name in SCRIPTS
    for variant in {"workers": ["fork"], "compiled": ["aot_eager"], "compiled-step": ["aot_eager"]}.get(name, [""])
}

NOTHING = "No training was seen: {} in this process"


def python(*arguments: object, folder: Path, environment: Mapping[str, str] = ENVIRONMENT) -> Finished:
    """Run a fresh Python, which has not imported torch."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, env=dict(environment), capture_output=True, text=True, check=False, timeout=600
    )
    return Finished(done.returncode, done.stdout, done.stderr, 0)


def said(done: Finished) -> list[str]:
    """Return the lines of the watch."""
    lines = done.stderr.splitlines()
    return [line.removeprefix("hookscope watch: ") for line in lines if line.startswith("hookscope watch: ")]


def without_watch(done: Finished) -> str:
    """Return what the script itself has written on stderr."""
    return "".join(line for line in done.stderr.splitlines(True) if not line.startswith("hookscope watch: "))


def runs_of(
    variant: str, folder: Path, fork_server: ForkServer, *, break_at: int = 0, watched_only: bool = False
) -> tuple[Finished, list[list[torch.Tensor]]]:
    """Run a script plainly and watched; return how the watched run ended, and what both have saved."""
    name, argument = VARIANTS[variant]
    (folder / "train.py").write_text(SCRIPTS[name])
    forked = partial(fork_server.run, cwd=folder, environment=ENVIRONMENT)
    watch = [
        "-m",
        "hookscope",
        "watch",
        "train.py",
        "--every",
        "4",
        "--out",
        "run",
        "--",
        "watched.pt",
        break_at,
        argument,
    ]
    done = forked(*watch)
    assert done.returncode == 0, done.stderr
    names = ["watched.pt"]
    if not watched_only:
        plain = forked("train.py", "plain.pt", break_at, argument)
        assert plain.returncode == 0, plain.stderr
        names.append("plain.pt")
    return done, [torch.load(folder / name) for name in names]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.sample("plain", "gan", "scaled")
def test_weights_and_random_numbers_are_those_of_the_plain_run(
    variant: str, tmp_path: Path, fork_server: ForkServer
) -> None:
    done, (watched, plain) = runs_of(variant, tmp_path, fork_server)
    assert len(watched) == len(plain) > 3
    assert all(map(torch.equal, watched, plain))
    assert FOUND[VARIANTS[variant][0]] in said(done)
    if variant.startswith("compiled"):
        assert {OF_COMPILED_NETWORKS, IN_COMPILED_CODE} & {*said(done)}
    log = read_training(tmp_path / "run")
    count = {"scaled": 24, "workers": 6}.get(VARIANTS[variant][0], 12)
    first = 2 if variant == "by-hand" else 1
    assert [step.step for step in log.steps] == [*range(first, count + 1)]
    assert {watched_step.step for watched_step in log.watched} >= {*range(4, count + 1, 4)}
    unoptimised = [("unoptimised-parameter", "first.0.bias")] if variant == "partly-optimised" else []
    assert [(verdict.rule, verdict.where) for verdict in log.verdicts] == unoptimised


@pytest.mark.parametrize(
    "variant",
    [
        *("plain", "gan", "accumulated", "lbfgs", "scaled", "by-hand"),
        *("workers-fork", "partly-optimised"),
    ],
)
@pytest.mark.sample("plain")
def test_a_planted_fault_is_named_at_its_step(variant: str, tmp_path: Path, fork_server: ForkServer) -> None:
    step = 3 if variant.startswith("workers") else 7
    done, _ = runs_of(variant, tmp_path, fork_server, break_at=step, watched_only=True)
    first = next(
        verdict for verdict in read_training(tmp_path / "run").verdicts if verdict.rule != "unoptimised-parameter"
    )
    if variant == "partly-optimised":
        assert (first.step, first.rule) == (step, "non-finite-gradient")
    else:
        assert (first.step, first.rule) == (step, "non-finite-loss")
    assert any(line.startswith(f"step {first.step}: {first.rule}: ") for line in said(done))


MEASURED = (
    HEAD
    + """
import json
network = Net()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
told = []
for step in range(1, 6):
    losses = []
    for part in range(2):
        given, labels = batch(step)
        loss = F.cross_entropy(network(given), labels)
        loss.backward()
        losses.append(loss.item())
    penalty = 0.01 * sum(each.square().sum() for each in network.parameters())
    penalty.backward()
    before = torch.cat([each.grad.flatten() for each in network.parameters()]).double().norm().item()
    nn.utils.clip_grad_norm_(network.parameters(), 0.5)
    told.append([sum(losses), penalty.item(), before])
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps(told))
"""
)


def test_losses_are_summed_by_the_line_that_calls_backward(tmp_path: Path, forked: Forked) -> None:
    (tmp_path / "train.py").write_text(MEASURED)
    arguments = ["-m", "hookscope", "watch", "train.py", "--out", "run", "--", "x.pt", "0"]
    done = forked(*arguments)
    assert "watching Net (SGD, lr 0.1), from step 1 on, losses at train.py:36 and train.py:39" in said(done)
    steps = read_training(tmp_path / "run").steps
    for step, (loss, penalty, norm) in zip(steps, json.loads(done.stdout), strict=True):
        assert step.losses == (
            ("train.py:36", pytest.approx(loss, rel=1e-5)),
            ("train.py:39", pytest.approx(penalty, rel=1e-5)),
        )
        assert step.loss == pytest.approx(loss + penalty, rel=1e-5)
        assert step.norm_before_clipping == pytest.approx(norm, rel=1e-4)
        assert step.gradient_norm == pytest.approx(0.5, rel=1e-3)

    arguments = ["-m", "hookscope", "report", "run", "--tensorboard", "logs", "--quiet"]
    assert forked(*arguments).returncode == 0
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [scalar.value for scalar in events.Scalars("loss/train.py:39")] == pytest.approx(
        [dict(step.losses)["train.py:39"] for step in steps], rel=1e-6
    )


ONE_AFTER_ANOTHER = """
import torch
for loss_of in (torch.square, torch.abs):
    layer = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        loss = loss_of(layer(torch.ones(2, 3))).mean()
        if loss_of is torch.square:
            loss.backward()
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_the_places_of_losses_are_those_of_the_training_that_begins(tmp_path: Path, forked: Forked) -> None:
    (tmp_path / "train.py").write_text(ONE_AFTER_ANOTHER)
    assert said(forked("-m", "hookscope", "watch", "train.py"))[:2] == [
        "watching Linear (SGD, lr 0.1), from step 1 on, loss at train.py:9",
        "watching Linear (SGD, lr 0.1), from step 4 on, loss at train.py:11",
    ]


# Three steps each; a script prints the losses whose gradients its optimiser steps with.
SEVERAL_BACKWARDS = """
import json
import torch
layer = torch.nn.Linear(3, 1)
parameters = [*layer.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.01)
counted = []
def loss_of(x):
    return (layer(x) - 1).square().mean()
for number in range(6):
    x = torch.rand(4, 3) + number
    WAY
    optimizer.step()
    optimizer.zero_grad()
    counted.append(sum(map(float, stepped)))
print(json.dumps(counted))
"""
WAYS = {
    "other inputs are found first": """
    x.requires_grad_()
    loss_of(x).backward()
    optimizer.zero_grad()
    stepped = [loss_of((x + x.grad.sign()).detach())]
    stepped[0].backward()
""",
    "other weights are found first": """
    loss_of(x).backward()
    moves = [parameter.grad.clone() for parameter in parameters]
    optimizer.zero_grad(set_to_none=False)
    with torch.no_grad():
        torch._foreach_add_(parameters, moves)
    stepped = [loss_of(x)]
    stepped[0].backward()
    with torch.no_grad():
        torch._foreach_sub_(parameters, moves)
""",
    "a batch is skipped": """
    stepped = [loss_of(x)]
    stepped[0].backward()
    if number % 2:
        optimizer.zero_grad()
        continue
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
""",
    "gradients are mixed": """
    stepped, kept = [loss_of(x), loss_of(x * 2)], []
    for loss in stepped:
        loss.backward()
        kept.append([parameter.grad for parameter in parameters])
        optimizer.zero_grad()
    for parameter, first, second in zip(parameters, *kept):
        parameter.grad = first / 2 + second
""",
    "gradients are added up, the first of them 0": """
    stepped = [loss_of(x).relu() * 0 + 3, loss_of(x)]
    for loss in stepped:
        loss.backward()
""",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sample("other weights are found first", "gradients are mixed")
def test_the_loss_of_a_step_is_of_the_gradients_it_steps_with(tmp_path: Path, forked: Forked, way: str) -> None:
    (tmp_path / "train.py").write_text(SEVERAL_BACKWARDS.replace("\n    WAY\n", WAYS[way]))
    done = forked("-m", "hookscope", "watch", "train.py", "--out", "run")
    losses = [step.loss for step in read_training(tmp_path / "run").steps]
    assert losses == pytest.approx(json.loads(done.stdout), rel=1e-5)


NOT_SEEN = (
    HEAD
    + """
network = Net()
more = nn.Linear(3, 3)
network.unused = nn.Linear(3, 3)
network.first[0].bias.requires_grad_(False)
optimizer = torch.optim.SGD([*network.first.parameters(), *network.head.parameters()], lr=0.1)
for step in range(1, 4):
    given, labels = batch(step)
    losses = F.cross_entropy(network(given), labels, reduction="none")
    BACKWARD
    optimizer.step()
    optimizer.zero_grad()
"""
)
UNOPTIMISED = (
    "step 1: unoptimised-parameter: 'unused.weight' is trainable, but in no watched optimizer: add it to one, or "
    "freeze it. The same for 1 more: 'unused.bias'."
)
UNMEASURED = (
    "1 problem in 3 steps, at step 1: unoptimised-parameter. None was measured in full, so activations, "
    "weights and updates were not judged: try --every 1."
)
BACKWARDS = {
    "list": "torch.autograd.backward([losses.mean(), losses.sum() * 0])",
    "vector": "losses.backward(torch.full((16,), 1 / 16))",
    "grad": "parameters = [each for each in optimizer.param_groups[0]['params'] if each.requires_grad]\n"
    "    for each, found in zip(parameters, torch.autograd.grad(losses.mean(), parameters)): each.grad = found",
}


@pytest.mark.parametrize("how", BACKWARDS)
@pytest.mark.sample("vector")
def test_losses_that_cannot_be_told_are_said_not_to_be_seen(tmp_path: Path, forked: Forked, how: str) -> None:
    (tmp_path / "train.py").write_text(NOT_SEEN.replace("BACKWARD", BACKWARDS[how]))
    arguments = ["-m", "hookscope", "watch", "train.py", "--out", "run", "--", "x.pt", "0"]
    done = forked(*arguments)
    line = "train.py:35 calls backward on several values, or with gradients: its loss is not seen."
    assert said(done) == [
        *([line] if how != "grad" else []),
        "watching Net (SGD, lr 0.1), from step 1 on, loss not seen",
        "In an optimizer, but frozen (requires_grad is False): 'first.0.bias'.",
        UNOPTIMISED,
        f"{UNMEASURED} Not judged: the loss. As a page: hookscope report run",
    ]
    steps = read_training(tmp_path / "run").steps
    assert [step.loss for step in steps] == [None] * 3
    assert all(step.gradient_norm for step in steps)


COMPILED_PARTS = (
    HEAD
    + """
network, compiled, lossy = Net(), sys.argv[3], F.cross_entropy
model = network
if compiled == "in place":
    network.compile(backend="aot_eager")
elif compiled == "a part":
    network.first = torch.compile(network.first, backend="aot_eager")
elif compiled == "a function":
    model = torch.compile(lambda given: network(given), backend="aot_eager")
elif compiled == "the loss":
    lossy = torch.compile(lossy, backend="aot_eager")
optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
for step in range(1, 4):
    given, labels = batch(step)
    lossy(model(given), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)
IN_COMPILED_CODE = "The loss comes out of compiled code, where hooks do not fire: activations are not watched."
OF_COMPILED_NETWORKS = (
    "Net is compiled, where hooks do not fire: activations are not watched, parameters, gradients and updates are."
)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("compiled", "line"),
    [
        *((case, OF_COMPILED_NETWORKS) for case in ("in place", "a part")),
        ("a function", IN_COMPILED_CODE),
        ("the loss", None),
    ],
)
def test_activations_in_compiled_code_are_said_not_to_be_watched(
    tmp_path: Path, forked: Forked, compiled: str, line: str | None
) -> None:
    (tmp_path / "train.py").write_text(COMPILED_PARTS)
    done = forked("-m", "hookscope", "watch", "train.py", "--every", "3", "--", "x.pt", "0", compiled)
    assert [each for each in said(done) if "compiled" in each] == ([] if line is None else [line])
    seen, activations = "", ""
    if line is not None:
        seen, activations = "what was seen of ", "activations and "
    last = f"No problems in {seen}3 steps (1 measured in full). Not judged: {activations}whether the loss falls."
    assert said(done)[-1] == f"{last} For a page: --out DIR."


# --- As Python runs it -----------------------------------------------------------------------------------------------

ABOUT = """
    import builtins, gc, pickle, sys
    assert "torch" not in sys.modules
    print(sorted(globals()), __doc__, __package__, __cached__, type(__loader__), __builtins__ is builtins)
    print(__annotations__, sys.excepthook is sys.__excepthook__, sys.flags, gc.get_threshold())
    count: int = 1
    print(__annotations__, sys.modules["__main__"].__dict__ is globals())
    class Here: pass
    print(__name__, __file__, sys.argv, sys.path[0], __spec__, pickle.loads(pickle.dumps(Here())).__class__ is Here)
    print(sys.modules["__main__"].Here is Here)
"""


def scripted(folder: Path, source: str) -> None:
    (folder / "train.py").write_text(textwrap.dedent(source))


@pytest.mark.parametrize("arguments", [["--lr", "0.1", "--", "-x"], []])
def test_a_script_sees_what_it_sees_under_python(tmp_path: Path, arguments: list[str]) -> None:
    scripted(tmp_path, ABOUT)
    plain = python("train.py", *arguments, folder=tmp_path)
    watched = python("-m", "hookscope", "watch", "train.py", "--", *arguments, folder=tmp_path)
    assert (watched.returncode, watched.stdout) == (0, plain.stdout)
    subject = NOTHING.format("the script did not import torch")
    assert said(watched) == [f"{subject}. Processes that a script starts are not watched."]


ENDINGS = {
    "exit code": "sys.exit(3)",
    "exit text": "sys.exit('no data')",
    "error": "def f(): return 1 / 0\nf()",
    "chain": "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('b') from error",
    "context": "def f():\n    try:\n        {}['a']\n    except KeyError:\n        [][1]\nf()",
    "group": "raise ExceptionGroup('two', [ValueError(1), TypeError(2)])",
    "interrupt": "import signal; signal.raise_signal(signal.SIGINT)",
    "terminated": "import signal; signal.raise_signal(signal.SIGTERM)",
    "own hook": "sys.excepthook = lambda *e: print(e[0], e[2].tb_frame.f_code.co_filename)\n1 / 0",
    "at exit": "import atexit\natexit.register(lambda: print(sys.modules['__main__'].x))\nx = 5",
    "syntax": "x = = 1",
    "arguments": "import argparse; argparse.ArgumentParser().parse_args(['--nope'])",
    "thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.sample("error", "interrupt", "syntax")
def test_a_script_ends_as_under_python(tmp_path: Path, ending: str) -> None:
    scripted(tmp_path, "import sys\nprint('begin', flush=True)\n" + ENDINGS[ending])
    plain = python("train.py", folder=tmp_path)
    watched = python("-m", "hookscope", "watch", "train.py", folder=tmp_path)
    assert watched.returncode == plain.returncode
    assert watched.stdout == plain.stdout
    assert without_watch(watched) == plain.stderr


@pytest.mark.parametrize("name", ["package", "package.train"])
def test_a_module_runs_as_under_python(tmp_path: Path, name: str) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sibling.py").write_text("VALUE = 5\n")
    source = textwrap.dedent(ABOUT).replace("__spec__", "__spec__.name") + "from .sibling import VALUE\n"
    for file in ("__main__.py", "train.py"):
        (package / file).write_text(source)
    plain = python("-m", name, "--lr", "1", folder=tmp_path)
    watched = python("-m", "hookscope", "watch", "-m", name, "--", "--lr", "1", folder=tmp_path)
    assert (watched.returncode, watched.stdout) == (0, plain.stdout)


TRAINED = """
    import sys
    import torch
    network = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for step in range(3):
        network(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    ENDING
"""

STRICT = """
    import torch
    torch.manual_seed(0)
    network = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss = network(torch.randn(8, 4)).square().mean()
        (loss * FACTOR).backward()
        optimizer.step()
    ENDING
"""


@pytest.mark.parametrize(
    ("factor", "ending", "code"),
    [
        ("1.0", "print('done')", 0),
        ("1.0", "raise SystemExit", 0),
        ("float('nan')", "print('done')", 1),
        ("float('nan')", "raise SystemExit", 1),
        ("float('nan')", "raise SystemExit(3)", 3),
        ("[][0]", "print('done')", 1),
    ],
    ids=["good", "exits", "nan", "nan exits", "nan fails", "raises"],
)
@pytest.mark.sample("good", "nan")
def test_strict_fails_where_a_problem_was_seen(
    tmp_path: Path, forked: Forked, factor: str, ending: str, code: int
) -> None:
    scripted(tmp_path, STRICT.replace("FACTOR", factor).replace("ENDING", ending))
    strict, plain = (forked("-m", "hookscope", "watch", *options, "train.py") for options in (["--strict"], []))
    assert strict.returncode == code
    assert plain.returncode == (0 if code == 1 and factor != "[][0]" else code)
    assert (strict.stdout, strict.stderr) == (plain.stdout, plain.stderr)


@pytest.mark.exhaustive
@pytest.mark.parametrize("source", ["import torch\nprint('done')", "print('done')"])
def test_strict_fails_where_no_training_was_seen(tmp_path: Path, forked: Forked, source: str) -> None:
    scripted(tmp_path, source)
    done = forked("-m", "hookscope", "watch", "--strict", "train.py")
    assert (done.returncode, done.stdout) == (1, "done\n")
    assert said(done)[0].startswith("No training was seen")


# In the backward pass, then in the forward pass: a traceback of both.
RAISING = """try:
        torch.zeros(2).sum().backward()
    except RuntimeError:
        network(torch.randn(8, 5))"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ending", "code", "reason"),
    [
        ("sys.exit(3)", 3, "the process ended"),
        ("raise KeyboardInterrupt", 1, "KeyboardInterrupt"),
        (RAISING, 1, "RuntimeError: addmm: mat1 and mat2 shapes cannot be multiplied (8x5 and 4x2)"),
        ("import signal; signal.raise_signal(signal.SIGTERM)", -15, None),
    ],
)
def test_a_training_that_breaks_off_keeps_its_steps_and_its_ending(
    tmp_path: Path, forked: Forked, ending: str, code: int, reason: str | None
) -> None:
    scripted(tmp_path, TRAINED.replace("ENDING", ending))
    start = partial(python, folder=tmp_path) if ending is RAISING else forked  # a traceback: Python's own
    watched = start("-m", "hookscope", "watch", "train.py", "--out", "run")
    assert watched.returncode == code
    if ending is RAISING:  # no line of a traceback is one of hookscope's
        assert without_watch(watched) == start("train.py").stderr
    log = read_training(tmp_path / "run")
    assert [step.step for step in log.steps] == [1, 2, 3]
    if reason is not None:
        assert [end.reason for end in log.ends] == [reason]


def test_a_script_that_first_asks_whether_torch_is_there_is_watched(tmp_path: Path) -> None:
    asks = 'import importlib.util\nassert importlib.util.find_spec("torch")\n'
    training = "import torch\nnet = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    training += "for _ in range(3):\n    net(torch.ones(1, 2)).sum().backward()\n    optimizer.step()\n"
    (tmp_path / "train.py").write_text(asks + training, encoding="utf-8")
    assert "in 3 steps" in said(python("-m", "hookscope", "watch", "train.py", folder=tmp_path))[-1]


CAUGHT = """
    import torch
    network = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for iteration in range(6):
        def closure():
            if iteration == 2:
                raise MemoryError
            optimizer.zero_grad()
            loss = network(torch.ones(3, 4)).square().mean()
            loss.backward()
            return loss
        try:
            optimizer.step(closure)
        except MemoryError:
            pass
"""


def test_steps_after_one_that_raised_and_was_caught_are_watched(tmp_path: Path, forked: Forked) -> None:
    scripted(tmp_path, CAUGHT)
    watched = forked("-m", "hookscope", "watch", "train.py", "--out", "run")
    losses = [step.loss for step in read_training(tmp_path / "run").steps]
    assert [loss is None for loss in losses] == [False, False, True, False, False, False]
    assert "6 steps" in said(watched)[-1]


RAISING_AT_A_LOOKUP = """
    import torch
    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 2)
        def forward(self, words):
            return self.head(self.table(torch.cat([words])))
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for words in (torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), torch.tensor(0)):
        network(words).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_network_that_raises_at_a_step_measured_in_full_shows_no_frame_of_hookscope(tmp_path: Path) -> None:
    scripted(tmp_path, RAISING_AT_A_LOOKUP)
    watched = python("-m", "hookscope", "watch", "train.py", "--every", "1", folder=tmp_path)
    frames = [line for line in without_watch(watched).splitlines() if line.startswith("  File")]
    assert any("in forward" in frame and "train.py" in frame for frame in frames)
    assert not any(str(Path(hookscope.__file__).parent) in frame for frame in frames)


def test_the_loss_of_an_installed_trainer_is_at_its_line(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(textwrap.dedent(RAISING_AT_A_LOOKUP).replace(", torch.tensor(0))", ")"))
    run_as_installed = f"""
import sys, sysconfig
sysconfig.get_path = lambda name: {str(tmp_path)!r}
sys.argv = ["hookscope", "watch", "-m", "trainer"]
from hookscope.cli.app import main
main()
"""
    watched = python("-c", run_as_installed, folder=tmp_path)
    assert watched.returncode == 0, watched.stderr
    assert said(watched)[0].endswith("loss at trainer.py:12")


STARTED = """
    import multiprocessing, subprocess, sys, torch
    def train(*_):
        network = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        network(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    if __name__ == "__main__":
        HOW
"""
JOINED = "each = {}(target=train); each.start(); each.join()"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("how", "count"),
    [
        ("torch.multiprocessing.spawn(train)", 1),
        (JOINED.format("multiprocessing.get_context('fork').Process"), 1),
        ("multiprocessing.Pool(2).map(train, range(2))", 2),
        ("import os\n        if not os.fork(): train(); sys.exit()\n        os.wait()", 0),
    ],
)
def test_training_in_processes_that_a_script_starts_is_said_not_to_be_watched(
    tmp_path: Path, forked: Forked, how: str, count: int
) -> None:
    scripted(tmp_path, STARTED.replace("HOW", how))
    done = forked("-m", "hookscope", "watch", "train.py")
    assert done.returncode == 0, done.stderr
    (line,) = said(done)
    assert line.startswith(NOTHING.format("no optimizer stepped"))
    if not count:
        assert line.endswith(". Processes that a script starts are not watched.")
    else:
        others = "the process that it started is" if count == 1 else f"the {count} processes that it started are"
        assert f", and {others} not watched. Start such processes with torchrun, or call hookscope.watch" in line


@pytest.mark.exhaustive
def test_other_processes_are_said_not_to_be_watched_beside_a_training_and_workers_are_not_meant(
    tmp_path: Path, forked: Forked
) -> None:
    how = "train(); multiprocessing.Pool(2).map(train, range(2))"
    how += "\n        [*torch.utils.data.DataLoader(torch.zeros(4), num_workers=2)]"
    scripted(tmp_path, STARTED.replace("HOW", how))
    done = forked("-m", "hookscope", "watch", "train.py")
    assert said(done)[-1].endswith(
        " 2 other processes that the script started were not watched. For a page: --out DIR."
    )


@pytest.mark.exhaustive
def test_a_network_that_is_rebuilt_is_found_again_and_the_old_one_freed(tmp_path: Path, forked: Forked) -> None:
    source = """
        import gc, weakref, torch
        refs = []
        for fold in range(3):
            network = torch.nn.Linear(4, 2)
            optimizer = torch.optim.Adam(network.parameters())
            refs.append(weakref.ref(network))
            for step in range(5):
                network(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        gc.collect()
        print([each() is not None for each in refs])
    """
    scripted(tmp_path, source)
    done = forked("-m", "hookscope", "watch", "train.py", "--every", "2", "--out", "run")
    assert done.stdout == "[False, False, True]\n"
    log = read_training(tmp_path / "run")
    assert [start.step for start in log.starts] == [1, 6, 11]
    assert [step.step for step in log.steps] == [*range(1, 16)]
    assert [end.reason for end in log.ends] == ["another optimizer stepped"] * 2 + ["the process ended"]


@pytest.mark.exhaustive
def test_tensors_without_a_network_are_watched_by_number(tmp_path: Path, forked: Forked) -> None:
    source = """
        import torch
        torch.manual_seed(0)
        weight, bias = torch.randn(4, 2, requires_grad=True), torch.zeros(2, requires_grad=True)
        for step in range(6):
            loss = (torch.ones(8, 4) @ weight + bias).square().mean()
            loss.backward()
            print(float(weight.grad.norm()))
            with torch.no_grad():  # new leaves at each step
                weight = (weight - 0.01 * weight.grad).requires_grad_()
                bias = (bias - 0.01 * bias.grad).requires_grad_()
    """
    scripted(tmp_path, source)
    done = forked("-m", "hookscope", "watch", "train.py", "--out", "run")
    actual, end = said(done)
    assert actual == "watching 2 parameters (no optimizer: loss and gradients only), from step 2 on, loss at train.py:7"
    assert end.startswith("No problems in 5 steps. None was measured in full")
    norms = list(map(float, done.stdout.split()))
    steps = read_training(tmp_path / "run").steps
    assert [step.step for step in steps] == [2, 3, 4, 5, 6]
    assert [max(norm for _, norm in step.largest) for step in steps] == pytest.approx(norms[1:], rel=1e-5)


BROKEN = ["discovery.living", "script_watch.Watch", "watch.read_gradients", "channel_axis.AxisReader.channel_axis"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("broken", BROKEN)
def test_an_error_of_hookscopes_is_a_line_and_the_script_goes_on(tmp_path: Path, forked: Forked, broken: str) -> None:
    scripted(tmp_path, TRAINED.replace("ENDING", "print('done')"))
    module, _, name = broken.partition(".")
    program = f"""
import sys
from hookscope.cli.app import main
from hookscope.statistics import channel_axis
from hookscope.commands.watch import discovery, script_watch, watch
def fail(*_, **__):
    raise RuntimeError("broken")
script_watch.{name if module == "discovery" else "Unused"} = {module}.{name} = fail
sys.argv = ["hookscope", "watch", "train.py", "--every", "1", *sys.argv[1:]]
main()
"""
    assert forked("-c", program, "--strict").returncode == 1
    done = forked("-c", program)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "Watching ends, because hookscope failed: RuntimeError: broken. The training goes on." in said(done)
    assert "Traceback" not in done.stderr


# --- Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing.py"], 2, "There is no script to run: 'missing.py' does not exist."),
        (["."], 2, "There is no script to run: '.' is a folder."),
        ([], 2, "Nothing to run is given"),
        (["train.py", "-m", "train"], 2, "Both a script and -m are given"),
        (["train.py", "--lr", "0.1"], 2, "No such option: --lr"),
        (["train.py", "--resume"], 2, "--resume needs --out"),
        (["train.py", "--layer", "conv@3"], 2, "execution order"),
        (["train.py", "--every", "0"], 2, "--every"),
        (["train.py", "--out", "train.py"], 3, "Cannot write to 'train.py'"),
    ],
)
def test_what_cannot_be_right_is_refused_before_the_script_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    scripted(tmp_path, "open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    assert run(["watch", *arguments]) == code
    assert message in capfd.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_a_module_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for name in ("nowhere", "nowhere.train", "json.nowhere"):
        done = python("-m", "hookscope", "watch", "-m", name, folder=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"hookscope: error: There is no module '{name}' to run")
        assert done.stderr.count("\n") == 1
