"""What the pages show is what happens: every block of Python runs, every command prints what stands below it."""

import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models import mobilenet_v3_small, resnet18

import hookscope
from hookscope.commands.check.configuration.reading import read_settings
from tests.docs.pages import DOCS, ROOT, Block, blocks, commands, is_shown, is_translated, name_of, pages
from tests.fork_server import ForkServer

PAGES = [page for page in pages() if not is_translated(page)]
RUN = [page for page in PAGES if {"console", "python"} & {block.language for block in blocks(page.read_text("utf-8"))}]


@dataclass
class Terminal:
    """Runs the commands of a page one after another, in one folder; `hookscope` in forked processes."""

    folder: Path
    environment: Mapping[str, str]
    fork_server: ForkServer
    code: int = 0

    def run(self, command: str) -> list[str]:
        """Run a line; return its output as a terminal may show it: stderr before stdout or after it."""
        if command == "echo $?":
            code, self.code = self.code, 0
            return [f"{code}\n"]
        assert self.code == 0, f"the command before `{command}` has ended with {self.code}"
        words = shlex.split(command)
        if words[0] == "hookscope" and not {"|", ">", "&&", ";"} & set(words):
            expanded = [path for word in words[1:] for path in self._expanded(word, command)]
            done = self.fork_server.run("-m", "hookscope", *expanded, cwd=self.folder, environment=self.environment)
            self.code = done.returncode
            return [done.stderr + done.stdout, done.stdout + done.stderr]
        ended = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        self.code = ended.returncode
        return [ended.stdout]

    def _expanded(self, word: str, command: str) -> list[str]:
        """Expand a glob as a shell does, unless the page quotes it."""
        is_glob = "*" in word and f"'{word}'" not in command
        return sorted(path.name for path in self.folder.glob(word)) or [word] if is_glob else [word]


def run_block(block: Block, names: dict[str, object], terminal: Terminal, differing: list[str]) -> str:
    """Run a block; return its text as it would have to be, and note commands that print something else."""
    if block.title or block.language == "toml":
        path = terminal.folder / (block.title or "settings.toml")
        path.write_text(block.text, encoding="utf-8")
        if block.language == "toml":
            read_settings(path, terminal.folder)
    elif block.language == "python":
        exec(compile(block.text, "<a block of Python on the page>", "exec"), names)
    elif block.language == "console":
        written = ""
        for shown in commands(block):
            printed = terminal.run(shown.command)
            fits = any(is_shown(shown.output, each) for each in printed)
            if not fits:
                differing.append(f"$ {shown.command}\n{printed[-1]}")
            lines = [line.rstrip() for line in printed[-1].splitlines()]
            written += f"$ {shown.command}\n" + (shown.output if fits else "".join(f"{line}\n" for line in lines))
        return written
    return block.text


@pytest.mark.parametrize("page", RUN, ids=name_of)
@pytest.mark.sample("README.md", "docs/commands/checkpoint.md", "docs/hooks.md", "docs/questions/nan.md")
def test_what_a_page_shows_is_what_happens(
    page: Path,
    tmp_path: Path,
    docs_environment: dict[str, str],
    fork_server: ForkServer,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    (tmp_path / "sample_images").symlink_to(ROOT / "sample_images")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    terminal = Terminal(tmp_path, docs_environment, fork_server)
    names: dict[str, object] = {}
    differing: list[str] = []
    text = page.read_text(encoding="utf-8")
    actual = blocks(text)
    written = [run_block(block, names, terminal, differing) for block in actual]
    if differing and request.config.getoption("--update-golden"):
        for block, new in zip(reversed(actual), reversed(written), strict=True):
            text = text[: block.begin] + new + text[block.begin + len(block.text) :]
        page.write_text(text, encoding="utf-8")
    assert terminal.code == 0
    assert not differing, "\n".join(differing)


# Lines that make an environment. `.ci/run` runs those of the README; others need an index, or minutes.
MAKE_AN_ENVIRONMENT = ("python3 -m venv ", ".venv/bin/pip ", "source ", "uvx ", "pipx run ", "pip install ")

# Why a command does not run here.
NOT_RUN = {
    "hookscope survey --merge runs/photos": "its shards would have to be measured first",
    "hookscope survey net.py:build data.pt": "its network takes two arguments; see survey/test_brute_force.py",
    "hookscope activations resnet18 cat.jpg --layer layer4.<TAB>": "a shell completes it, in tests/cli/test_app.py",
}

# A command in a sentence or a table; what goes on with an option, or with MODEL, only names a command.
_INLINE = re.compile(r"`(hookscope [a-z]+ [a-z][^`\n]+)`")


def named_commands(page: Path) -> Iterator[str]:
    """Yield the commands that a page names without showing what they print."""
    text = page.read_text(encoding="utf-8")
    for block in blocks(text):
        if block.language == "bash":
            yield from block.text.splitlines()
        text = text.replace(block.text, "")
    yield from _INLINE.findall(text)


# `python -m docs.pictures` runs those of the gallery, and test_readme.py those of the README and the index.
NAMING = [page for page in pages() if page.name not in ("gallery.md", "README.md", "index.md")]
NAMED = {line for page in NAMING for line in named_commands(page)}
SHOWN = {
    shown.command
    for page in RUN
    for block in blocks(page.read_text(encoding="utf-8"))
    if block.language == "console"
    for shown in commands(block)
}

_PATH = re.compile(r"'?(?:[\w*.-]+/)*[\w*-]+(\.[a-z]+)'?|(?:[\w-]+/)+")


def traits(line: str) -> set[tuple[str, ...]]:
    """Return what a line shows of its command: the kinds of what it is given, and each of its options."""
    _, verb, *words = line.partition(" -- ")[0].split()
    first = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    kinds = [
        (path[1] or "/") if (path := _PATH.fullmatch(word)) else re.sub(r"\w+", "", word) for word in words[:first]
    ]
    return {(verb, *kinds), *((verb, word) for word in words[first:] if word.startswith("--"))}


def chosen() -> Iterator[str]:
    """Yield the lines that are named, unless others, shown or chosen, are given the same and have their options."""
    expected = {trait for line in SHOWN if line.startswith("hookscope ") for trait in traits(line)}
    lines = [line for line in NAMED - NOT_RUN.keys() if line.startswith("hookscope ")]
    for line in sorted(lines, key=lambda line: (-len(traits(line)), line)):
        if not traits(line) <= expected:
            expected |= traits(line)
            yield line


TO_RUN = sorted(chosen())

# What stands for the user's own: small networks that take pictures of any size.
NETWORKS = """
from collections import OrderedDict

import torch
from torch import nn


class Rectified(nn.Conv2d):
    def forward(self, x):
        return torch.relu(super().forward(x))


def build(part="features"):
    layers = {part: nn.Sequential(Rectified(3, 8, 3, 4)), "pool": nn.AdaptiveAvgPool2d(4), "flat": nn.Flatten()}
    return nn.Sequential(OrderedDict(layers, head=nn.Linear(128, 10)))


def before():
    return build("encoder")


def after():
    return build("backbone")


original = port = build
"""


SIGNALS = """
from torch import nn


def build():
    layers = nn.Conv1d(1, 8, 9, padding=4), nn.ReLU(), nn.MaxPool1d(4), nn.Conv1d(8, 8, 9, padding=4), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 3))
"""


@pytest.fixture(scope="module")
def yours(
    tmp_path_factory: pytest.TempPathFactory, docs_environment: dict[str, str], fork_server: ForkServer
) -> Terminal:
    """A folder of what pages leave to their readers: photographs, labelled ones, networks, weights, earlier runs."""
    folder = tmp_path_factory.mktemp("yours")
    (folder / "sample_images").symlink_to(ROOT / "sample_images")
    for picture in (ROOT / "sample_images").glob("*.jpg"):
        for path in (folder / case / picture.name for case in ("", "photos", "data", "val/3")):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(picture)
    (folder / "net.py").write_text(NETWORKS, encoding="utf-8")
    [settings] = [block for block in blocks((DOCS / "commands" / "check.md").read_text("utf-8")) if block.title]
    (folder / settings.title).write_text(settings.text, encoding="utf-8")
    np.save(folder / "input.npy", np.random.default_rng(0).random((1, 3, 64, 64), np.float32))
    torch.manual_seed(0)
    torch.save(mobilenet_v3_small(num_classes=10).state_dict(), folder / "good.pt")
    weights = resnet18(num_classes=10).state_dict()
    (folder / "ckpt").mkdir()
    for epoch in (1, 2, 3):
        for name in (f"ckpt/epoch_{epoch}.pt", f"epoch_{epoch}.pt"):
            torch.save({"epoch": epoch, "model": weights}, folder / name)
    scripts = blocks((DOCS / "commands" / "watch.md").read_text("utf-8"))
    (folder / "train.py").write_text(
        next(script.text for script in scripts if script.title == "train.py"), encoding="utf-8"
    )
    (folder / "ecg.py").write_text(SIGNALS, encoding="utf-8")
    np.save(folder / "beats.npy", np.random.default_rng(0).random((2, 1, 200), np.float32))
    signals: dict[str, Callable[[], nn.Module]] = {}
    exec(compile(SIGNALS, "ecg.py", "exec"), signals)
    torch.save(signals["build"]().state_dict(), folder / "ecg.pt")
    (folder / "models").mkdir()
    for name in ("model", "old", "a", "models/model"):
        torch.save(weights, folder / f"{name}.pt")
    (folder / "labels.csv").write_text("".join(_labels_as_it_sees_them(folder / "model.pt")), encoding="utf-8")
    weights["layer4.1.bn2.bias"] += 1e-6
    for name in ("new", "b"):
        torch.save(weights, folder / f"{name}.pt")
    networks: dict[str, Callable[[], nn.Module]] = {}
    exec(compile(NETWORKS, "net.py", "exec"), networks)
    torch.save({"ema": networks["port"]().state_dict()}, folder / "port.pt")
    terminal = Terminal(folder, docs_environment, fork_server)
    for run in ("before", "after"):
        terminal.run(f"hookscope activations net.py:build cat.jpg --out hookscope-runs/{run}")
    terminal.run("hookscope check good.pt --baseline baseline.json --update-baseline")
    terminal.run("hookscope survey model.pt photos/ --out runs/photos")
    network = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for run in ("a", "nan"):
        with hookscope.watch(network, optimizer, out=folder / "runs" / run) as watch:
            network(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            watch.step()
    return terminal


def _labels_as_it_sees_them(model: Path) -> Iterator[str]:
    """Yield a line for each photograph with the labels whose sigmoid is above 0.5."""
    pictures = sorted(model.parent.glob("*.jpg"))
    run = hookscope.activations(model, pictures, layer="fc", save_tensors=True)
    for picture, scores in zip(pictures, run.tensors["fc"], strict=True):
        yield f"{picture.name},{';'.join(map(str, scores.gt(0).nonzero().flatten().tolist()))}\n"


@pytest.mark.parametrize("line", TO_RUN)
@pytest.mark.exhaustive
def test_commands_that_are_only_named_run(line: str, yours: Terminal) -> None:
    yours.code = 0
    printed = yours.run(line)
    assert yours.code == 0, printed[0]


def test_lines_that_do_not_run_here_make_an_environment() -> None:
    assert NOT_RUN.keys() <= NAMED
    others = [line for line in NAMED if not line.startswith(("hookscope ", *MAKE_AN_ENVIRONMENT))]
    assert others == []
