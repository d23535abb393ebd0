"""What the pages show is what happens: every block of Python runs, every command prints what stands below it."""

import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main

from hookscope.checks.configuration import read_settings
from hookscope.cli.app import app
from tests.docs.pages import ROOT, Block, blocks, commands, is_shown, is_translated, name_of, pages
from tests.fork_server import ForkServer

PAGES = [page for page in pages() if not is_translated(page)]
RUN = [page for page in PAGES if {"console", "python"} & {each.language for each in blocks(page.read_text("utf-8"))}]


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
    found = blocks(text)
    written = [run_block(block, names, terminal, differing) for block in found]
    if differing and request.config.getoption("--update-golden"):
        for block, new in zip(reversed(found), reversed(written), strict=True):
            text = text[: block.begin] + new + text[block.begin + len(block.text) :]
        page.write_text(text, encoding="utf-8")
    assert terminal.code == 0
    assert not differing, "\n".join(differing)


EXAMPLES = [
    (page, line)
    for page in PAGES
    for block in blocks(page.read_text(encoding="utf-8"))
    if block.language == "bash"
    for line in block.text.splitlines()
    if line.startswith("hookscope ")
]


@pytest.mark.parametrize(("page", "line"), EXAMPLES, ids=lambda each: each if isinstance(each, str) else name_of(each))
def test_commands_that_are_only_named_are_commands(page: Path, line: str) -> None:
    name, *arguments = shlex.split(line)[1:]
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    assert command.make_context(name, arguments), page
