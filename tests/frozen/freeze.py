"""Write down what people see of each command: `python -m tests.frozen.freeze [COMMAND …]` writes tests/frozen/."""

import ast
import csv
import difflib
import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from PIL import ImageDraw

from hookscope.cli.app import run
from tests.fork_server import ForkServer
from tests.frozen.cases import CASES, COMMANDS, Case
from tests.frozen.files import write_files
from tests.reporting.html_page import Page

HERE = Path(__file__).parent
_LONG = 48  # lines or numbers, from which the middle is left out
_ALIKE = ("title", "alt", "aria-label", "placeholder", "label", "data-labels")

# In the process of a case.
_IN_TURN = """
from tests.frozen.freeze import run_in_turn
run_in_turn({lines!r})
"""
_PYTHON = "python"  # in the place of a command: what Python returns
_END = "-- exit code "
_DRAWN = "drawn.txt"


def seen(case: Case, folder: Path, server: ForkServer) -> dict[str, str]:
    """Return all that people see of one command line, by its form. The folder holds the files that it reads."""
    lines = {"text at 200 columns": case.line}
    if case.json_line:
        lines["json"] = case.json_line
    if case.command not in {"doctor", "models", "watch", "report"} and case.files:
        lines["python"] = (_PYTHON, case.command, *case.arguments)
    lines["text at 80 columns"] = case.line
    for line in case.before:
        server.run("-m", "hookscope", *line, cwd=folder, environment=_environment(80))
    if case.command == "watch":
        forms = {form: _watched(line, 200 if "200" in form else 80, folder, server) for form, line in lines.items()}
    else:
        program = _IN_TURN.format(lines=[(200 if "200" in form else 80, line) for form, line in lines.items()])
        ended = server.run("-c", program, cwd=folder, environment=_environment(80))
        ends = re.compile(f"^{_END}(\\d+)\n", re.MULTILINE)
        stdout, stderr = ends.split(ended.stdout), ends.split(ended.stderr)
        texts = zip(stdout[::2], stderr[::2], stdout[1::2], strict=False)
        forms = {form: _streams(*text) for form, text in zip(lines, texts, strict=True)}
    if "json" in forms:
        forms["json"] = _json_lines(forms["json"])
    forms |= _written(folder)
    if drawn := (folder / _DRAWN).read_text("utf-8") if (folder / _DRAWN).exists() else "":
        forms["texts in pictures"] = drawn
    return {form: masked(text, folder, case.command) for form, text in sorted(forms.items())}


def _watched(line: Sequence[str], columns: int, folder: Path, server: ForkServer) -> str:
    """Run a script, whose process ends with it."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    (folder / "out").mkdir()
    ended = server.run("-m", "hookscope", *line, cwd=folder, environment=_environment(columns))
    return _streams(ended.stdout, ended.stderr, ended.returncode)


def _streams(stdout: str, stderr: str, code: object) -> str:
    return f"{stdout}\n-- on stderr\n{stderr}\n{_END}{code}" if stderr.strip() else f"{stdout}\n{_END}{code}"


def run_in_turn(lines: Sequence[tuple[int, Sequence[str]]]) -> None:
    """Run command lines one after another in this process; the last one's files stay."""
    for columns, line in lines:
        shutil.rmtree("out", ignore_errors=True)
        Path("out").mkdir()
        os.environ["COLUMNS"] = str(columns)
        code = 0
        if line[0] == _PYTHON:
            print(seen_in_python(line[1], tuple(line[2:])))  # noqa: T201
        else:
            sys.argv[1:] = line
            with _drawing_recorded():
                code = run(line)
        for stream in (sys.stdout, sys.stderr):
            stream.write(f"\n{_END}{code}\n")
            stream.flush()


@contextmanager
def _drawing_recorded() -> Iterator[None]:
    """Write the different texts of pictures, without grids, into a file, sorted: threads draw them. A number is #."""
    texts: set[str] = set()
    draw = ImageDraw.ImageDraw.text

    def recorded(pen: Any, xy: Any, text: Any, *args: Any, **options: Any) -> None:
        if pen.im.mode == "RGB":
            texts.add(re.sub(r"[-\u2212]?\d[\d.,]*(?:e[-+]?\d+)?", "#", str(text)))
        draw(pen, xy, text, *args, **options)

    with patch.object(ImageDraw.ImageDraw, "text", recorded):
        yield
    Path(_DRAWN).write_text("".join(f"{text}\n" for text in sorted(texts)), "utf-8")


def _environment(columns: int) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    refused = "http://127.0.0.1:9"
    return kept | {
        "COLUMNS": str(columns),
        "LINES": "40",
        "OMP_NUM_THREADS": "1",
        # The same kernels on every processor: others round differently, and equal values come in another order.
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_HOME": "torch-home",
        "HTTPS_PROXY": refused,
        "https_proxy": refused,
    }


def seen_in_python(command: str, arguments: tuple[str, ...]) -> str:
    """Return the `repr` and the data frame of a command's result; its options are the arguments' names."""
    import hookscope

    positional: list[str] = []
    options: dict[str, Any] = {}
    rest = iter(arguments)
    for argument in rest:
        if argument.startswith("--"):
            name = argument[2:].replace("-", "_")
            value = True if name in _FLAGS else next(rest)
            if name in options:
                options[name] = [*([options[name]] if isinstance(options[name], str) else options[name]), value]
            else:
                options[name] = ast.literal_eval(value) if isinstance(value, str) and value.isdigit() else value
        else:
            positional.append(argument)
    try:
        result = getattr(hookscope, command)(*positional, **options)
        frame = result.to_pandas(full=True) if hasattr(result, "to_pandas") else None
    except (hookscope.HookscopeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    if frame is None:
        return repr(result)
    columns = ", ".join(f"{name} ({kind})" for name, kind in frame.dtypes.items())
    return f"{result!r}\n-- data frame: {columns}\n{_table(frame.to_csv())}"


_FLAGS = {"ops", "cost", "per_image", "rollout", "grads", "shadow", "by_class", "bisect"}


def _json_lines(text: str) -> str:
    """Return JSON a path a line; what has no JSON as it is."""
    start, mark, rest = text.partition("\n-- ")
    try:
        contents = json.loads(start)
    except ValueError:
        return text
    return "\n".join([*_paths(contents, ""), f"{mark[1:]}{rest}"])


# Keys and columns.
_OF_THE_MACHINE = re.compile(
    r"(?:^|_)(?:seconds|time|times|started|created|versions|host|hostname|cpu|machine|platform|sha256|hash|crc32|peak_bytes|thread_count|command)$"
)


def _paths(value: Any, path: str, depth: int = 0) -> Iterator[str]:
    if isinstance(value, dict) and value and depth < 2:
        for key, inner in value.items():
            name = f"{path}.{key}" if path else key
            yield from [f"{name} = MASKED"] if _OF_THE_MACHINE.search(key) else _paths(inner, name, depth + 1)
    elif isinstance(value, list) and any(isinstance(member, dict | list) for member in value):
        lines = [f"{path}[{index}] = {_compact(member)}" for index, member in enumerate(value)]
        yield from _shortened(lines)
    else:
        yield f"{path} = {_compact(value)}"


def _compact(value: Any) -> str:
    """Return JSON on a line: the machine's values masked, the middle of long lists left out."""
    if isinstance(value, dict):
        pairs = ((key, "MASKED" if _OF_THE_MACHINE.search(key) else _compact(inner)) for key, inner in value.items())
        return "{" + ", ".join(f"{key}: {inner}" for key, inner in pairs) + "}"
    if isinstance(value, list):
        inner = [_compact(member) for member in value]
        return "[" + ", ".join([*inner[:6], f"… {len(inner)} in all"] if len(inner) > 8 else inner) + "]"
    return json.dumps(value, ensure_ascii=False)


def _table(text: str) -> str:
    """Return a CSV without the machine's columns, nor the middle of its rows."""
    head, *rows = csv.reader(text.splitlines())
    kept = [
        ("MASKED" if _OF_THE_MACHINE.search(name) else cell for name, cell in zip(head, row, strict=False))
        for row in rows
    ]
    return "\n".join(_shortened([", ".join(row) for row in (head, *kept)]))


def _shortened(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _LONG else [*lines[: _LONG // 2], f"… {len(lines)} in all", *lines[-8:]]


def _written(folder: Path) -> dict[str, str]:
    """Return what the files hold that a command has written."""
    out = folder / "out"
    names = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    forms = {"files": "\n".join(_shortened(names))} if names else {}
    for name in names:
        text = (out / name).read_text("utf-8", errors="replace")
        if name.endswith(".csv"):
            forms[f"file {name}"] = _table(text)
        elif name.endswith(("run.json", ".sarif")):
            forms[f"file {name}"] = _json_lines(text)
        elif name.endswith(".jsonl"):
            forms[f"file {name}"] = "\n".join(_shortened([_compact(json.loads(line)) for line in text.splitlines()]))
        elif name.endswith(".xml"):
            forms[f"file {name}"] = text
        elif name.endswith(".html"):
            forms["page"] = _visible(text)
    return forms


class _Visible(Page):
    """The texts of a page in order, with what it says to a pointer or a reader."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        texts = [f"({name}: {value})" for name, value in attrs if name in _ALIKE and value]
        self.words.append(" ".join([*texts, ""]) if tag in _INLINE else "\n".join(["", *texts, ""]))
        if tag in {"td", "th"}:
            self.words.append(" | ")

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1].tag not in {"script", "style"}:
            super().handle_data(" ".join(data.split("\n")))


_INLINE = {"a", "abbr", "b", "code", "em", "i", "kbd", "span", "strong", "td", "th", "tspan"}


def _visible(html: str) -> str:
    lines = [" ".join(line.split()) for line in "".join(_Visible(html).words).splitlines()]
    return "\n".join(line for line in lines if line)


_MASKS = {
    r"\bLinux-\d\S+": "PLATFORM",
    r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)?)?": "DATE",
    r"\b\d+(?:\.\d+)? ?(?:µs|ms|s|seconds?|minutes?|hours?)(?=$|[\s.,;:)/·])": "TIME",
    r"\b\d+(?:\.\d+)? ?(?:bytes|[kKMGT]i?B|B)\b": "SIZE",
    r"(?<![\w.])\d+\.\d+\.\d+(?:[.+]\w+)*": "VERSION",
    r"(?<![\w.-])(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{8,}\b": "HASH",
    r"0x[0-9a-f]{6,}": "ADDRESS",
    r'\b(time|timestamp|hostname)="[^"]*"': r'\1="MASKED"',
    r"^timings\.(\w+) = .*": r"timings.\1 = MASKED",
    r"TIME \([a-z][^)]*\)": "TIME (PARTS)",
    r"^(\| `.*\| )\d+\.\d+ \|$": r"\1TIME |",
    r'(File "FOLDER/(?:hookscope|tests)/[^"]*", line )\d+': r"\1NUMBER",
}
_LIBRARIES = "(device|kernel|torchvision|timm|transformers|audio|attribute|show|tensorboard|parquet)"
_OF_DOCTOR = {
    rf"^{_LIBRARIES} +[^·\n]+": r"\1 MACHINE ",
    rf'subject: "{_LIBRARIES}", state: "[^·"]+': r'subject: "\1", state: "MACHINE ',
    r"Python \S+ · \w+ \w+": "Python MACHINE",
}


def masked(text: str, folder: Path, command: str) -> str:
    """Return a text without what belongs to the time and the machine; numbers with four digits."""
    for path in sorted({str(folder.resolve()), str(folder), str(HERE.parents[1])}, key=len, reverse=True):
        text = text.replace(path, "FOLDER")
    for pattern, name in ((_OF_DOCTOR if command == "doctor" else {}) | _MASKS).items():
        text = re.sub(pattern, name, text, flags=re.MULTILINE)
    text = re.sub(r"(?<![\w.])-?\d+\.\d+(?:e[-+]?\d+)?(?![\w.]*\d)", lambda number: f"{float(number[0]):.4g}", text)
    text = re.sub(r"[▁▂▃▄▅▆▇█▏▎▍▌▋▊▉⠀-⣿](?: *[▁▂▃▄▅▆▇█▏▎▍▌▋▊▉⠀-⣿])*", "▇", text)
    lines = (" ".join(re.sub("[─━│┃┌┐└┘├┤┬┴┼╭╮╰╯═║]+", " ", line).split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line)


_NUMBER = re.compile(r"(?:(?<![\w)\]])[-+\u2212])?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?%?")


def differences(was: str, now: str) -> list[str]:
    """Return the lines that differ in words, or else the numbers that differ; blanks do not count."""
    words_were, words_are = ([_NUMBER.sub("#", word) for word in text.split()] for text in (was, now))
    if words_were != words_are:
        old, new = ([_NUMBER.sub("#", line) for line in text.splitlines()] for text in (was, now))
        return list(difflib.unified_diff(old, new, "frozen", "now", n=0, lineterm=""))[2:]
    changed = []
    for before, after in zip(_NUMBER.finditer(was), _NUMBER.finditer(now), strict=True):
        if not _close(before[0], after[0]):
            line = was[: before.start()].rpartition("\n")[2]
            changed.append(f"{before[0]} is now {after[0]}, after: {line[-60:]}")
    return changed


def _close(was: str, now: str) -> bool:
    """Whether two numbers are equal, but for the last digit of a fraction."""
    if was == now:
        return True
    if not {".", "e", "%"} & {*was, *now}:
        return False  # counts and positions
    values = [float(text.rstrip("%").replace(",", "").replace("\u2212", "-")) for text in (was, now)]
    return abs(values[0] - values[1]) <= max(1e-5, _last_digit(was), _last_digit(now)) * 1.01


def _last_digit(number: str) -> float:
    """Return what one more in the last digit adds; a number with four digits or more has it at the fourth."""
    mantissa, _, exponent = number.rstrip("%").replace(",", "").partition("e")
    decimals = len(mantissa.partition(".")[2])
    value = abs(float(mantissa.replace("\u2212", "-")))
    smallest = 10.0 ** (math.floor(math.log10(value)) - 3) if value else 0.0
    return max(10.0**-decimals if decimals or "%" in number else 0.0, smallest) * 10.0 ** int(exponent or 0)


def path_of(command: str) -> Path:
    return HERE / f"{command}.txt"


def read(command: str) -> dict[str, dict[str, str]]:
    """Return what is written down of a command: text by case and form."""
    cases: dict[str, dict[str, str]] = {}
    for part in path_of(command).read_text("utf-8").split("\n=== ")[1:]:
        title, _, text = part.partition("\n")
        name, _, form = title.partition(" | ")
        cases.setdefault(name, {})[form] = text.rstrip("\n")
    return cases


def write(command: str, cases: Mapping[str, Mapping[str, str]]) -> None:
    head = f"What people see of `hookscope {command}`, written by tests/frozen/freeze.py.\n"
    parts = (f"\n=== {name} | {form}\n{text}\n" for name, forms in cases.items() for form, text in forms.items())
    path_of(command).write_text(head + "".join(parts), "utf-8")


def main(commands: list[str]) -> None:
    server = ForkServer()
    with tempfile.TemporaryDirectory() as temporary:
        files, folder = Path(temporary) / "files", Path(temporary) / "case"
        files.mkdir()
        write_files(files)
        for command in commands or COMMANDS:
            cases = {}
            for case in (case for case in CASES if case.command == command):
                shutil.copytree(files, folder)
                cases[case.name] = seen(case, folder, server)
                shutil.rmtree(folder)
            write(command, cases)
    server.close()


if __name__ == "__main__":
    main(sys.argv[1:])
