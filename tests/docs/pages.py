"""The documentation as tests read it: its pages, the blocks of code on them, and what of two outputs is the same."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^(```+)(\w+)([^\n`]*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*)(?:\.\d+)?(?:e[-+]?\d+)?")
_SECONDS = re.compile(r"\b[\d.]+ (?:ms|s)\b")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, what follows on that line, its text, and where the text begins on the page."""

    language: str
    rest: str
    text: str
    begin: int

    @property
    def title(self) -> str:
        """The name of the file that the block shows, or ""."""
        match = re.search(r'title="([^"]+)"', self.rest)
        return match[1] if match else ""


@dataclass(frozen=True)
class Shown:
    """A command on a page, and what the page shows of its output."""

    command: str
    output: str


def pages() -> list[Path]:
    """Return all pages, the README first."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def is_translated(page: Path) -> bool:
    return page.suffixes[:1] in ([".zh"], [".zh-CN"])


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    return [Block(actual[2], actual[3].strip(), actual[4], actual.start(4)) for actual in _FENCE.finditer(text)]


def commands(block: Block) -> Iterator[Shown]:
    """Yield the commands of a block of console output, each with the lines below it."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield Shown(command, output)


def is_shown(shown: str, printed: str) -> bool:
    """Return whether a page shows what was printed: a line `…` stands for any lines, figures may differ a little."""
    return _fits(_lines(shown), _lines(printed))


def _lines(text: str) -> list[str]:
    lines = (re.sub(r"─+", "─", " ".join(_SECONDS.sub("0 s", line).split())) for line in text.splitlines())
    return [line for line in lines if line]


def _fits(shown: Sequence[str], printed: Sequence[str]) -> bool:
    groups = [[*lines] for left_out, lines in itertools.groupby(shown, lambda line: line == "…") if not left_out]
    if not groups:
        return bool(shown) or not printed
    position = 0
    for number, group in enumerate(groups):
        last = number == len(groups) - 1 and shown[-1] != "…"
        starts = [len(printed) - len(group)] if last else range(position, len(printed) - len(group) + 1)
        if number == 0 and shown[0] != "…":
            starts = [start for start in starts if start == 0]
        fitting = (start for start in starts if start >= position and _same(group, printed[start : start + len(group)]))
        start = next(fitting, None)
        if start is None:
            return False
        position = start + len(group)
    return True


def _same(shown: Sequence[str], printed: Sequence[str]) -> bool:
    return len(shown) == len(printed) and all(map(_alike, shown, printed))


def _alike(shown: str, printed: str) -> bool:
    if _NUMBER.sub("0", shown) != _NUMBER.sub("0", printed):
        return False
    figures = zip(_NUMBER.findall(shown), _NUMBER.findall(printed), strict=True)
    return all(
        math.isclose(*(float(text.replace(",", "")) for text in pair), rel_tol=0.05, abs_tol=0.02) for pair in figures
    )
