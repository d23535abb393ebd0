"""Where the code of a TorchScript node was written, as far as the archive keeps it.

A scripted node knows its expression, with file and line. A traced one knows the Python frames under which it ran. Calls
of functions are looked up behind the function's name, because the archive records no place at the name.
"""

import ast
import io
import itertools
import pickle
import re
import zipfile
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple

import torch

# "net.py(15): forward", with the file's whole path, innermost first.
_FRAME = re.compile(r"^(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)$", re.MULTILINE)
# torch writes "1 - x" as "torch.neg(x) + 1", in a definition of `sub` that is in no file.
_DEFINED = re.compile(r"^def (\w+)\(", re.MULTILINE)
_SERIALIZED = re.compile(r'Serialized   File "(?P<file>code/[^"]+)", line (?P<line>\d+)\n')
_FILE = re.compile(r'\s*File "(?P<file>[^"]*)", line (?P<line>\d+)\n')

# The file may have been made on another machine.
_TORCH = re.compile(rf"(?:{re.escape(str(Path(torch.__file__).parent))}|[/\\](?:site|dist)-packages[/\\]torch)[/\\]")
_LAYERS = re.compile(r"(?:nn|ao|jit|nested)[/\\](?!functional\.py|modules[/\\]module\.py)")
# Functions of torch's that are called around the one that is meant.
_AROUND = frozenset({"__call__", "fn", "wrapped", "wrapper", "inner", "_fn", "<lambda>"})


class Origin(NamedTuple):
    """Where a node comes from.

    Attributes:
        source: The line of the network's code, "net.py:14"; "" if that is not known.
        function: The function of torch's that this line calls, "interpolate", if the node is that or inside it.
        expression: The node's expression; of a call maybe without the arguments; "" if that is not known.
        form: What the expression is.
        is_torchs: Whether the node is inside a layer of torch's.
        frames: The innermost frames, up to the network's own.
    """

    source: str = ""
    function: str = ""
    expression: str = ""
    form: Literal["subscript", "assignment", "other", ""] = ""
    is_torchs: bool = False
    frames: tuple[tuple[str, str, str], ...] = ()


UNKNOWN = Origin()


# Offsets in serialized code, in order, and the place from there on: (file, line).
_Places = tuple[Sequence[int], Sequence[tuple[str, int]]]


@dataclass(slots=True)
class Origins:
    """Where the nodes of one archive come from."""

    archive: Path
    _files: dict[str, tuple[Sequence[int], _Places]] = field(default_factory=dict)

    def of(self, node: Any) -> Origin:
        """Return where a node was written; for what torch has put in, the line of the expression around it."""
        known = _origin(node)
        if known is UNKNOWN and node.kind() == "prim::CallFunction":
            return self._behind_the_name(node)
        around = known
        while not around.source and not around.is_torchs and (used := _inside(node)) is not None:
            node = used
            around = _origin(node)
        return known._replace(source=around.source, is_torchs=around.is_torchs)

    def _behind_the_name(self, call: Any) -> Origin:
        """Return where a call of a function was written, "name(x)", asking at the bracket."""
        text = call.sourceRange()
        serialized = _SERIALIZED.search(text)
        if serialized is None:
            return UNKNOWN
        mark = next((line for line in text[serialized.end() :].splitlines() if line.endswith("<--- HERE")), "")
        mark = mark.removesuffix(" <--- HERE")
        try:
            starts, (offsets, places) = self._places(serialized["file"])
            at = starts[int(serialized["line"]) - 1] + len(mark)
            file, line = places[bisect_right(offsets, at) - 1]
        except Exception:  # noqa: BLE001 - the file may be gone by now, or anything else; all that is lost is a line
            return UNKNOWN
        whose = _whose(file)
        return Origin(_line(file, str(line)) if file and whose == "network" else "", is_torchs=whose == "torch")

    def _places(self, file: str) -> tuple[Sequence[int], _Places]:
        """Return where the lines of a file of serialized code begin, and its places."""
        if file not in self._files:
            with zipfile.ZipFile(self.archive) as archive:
                name = next(name for name in archive.namelist() if name.partition("/")[2] == file)
                code, places = archive.read(name), archive.read(f"{name}.debug_pkl")
            _, texts, found = _Plain(io.BytesIO(places)).load()
            starts = [0]
            for line in code.splitlines(keepends=True):
                starts.append(starts[-1] + len(line))
            self._files[file] = starts, ([each[0] for each in found], [_place(texts, each[1]) for each in found])
        return self._files[file]


class _Plain(pickle.Unpickler):
    """Reads containers, texts and numbers."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) == ("torch.jit._pickle", "build_intlist"):  # marks a list of whole numbers
            return list
        raise pickle.UnpicklingError(f"{module}.{name}")


def _place(texts: Sequence[str], place: Any) -> tuple[str, int]:
    """Return file and line; the text around a node is in parts, and begins at a line of the file."""
    (parts, file, first), begin, _ = place
    text = "".join(texts[part] for part in parts) if parts else ""
    return texts[file] or "", first + text.count("\n", 0, begin)


def _inside(node: Any) -> Any:
    """Return the node that uses the only value of another; None if that is a variable, used in other statements."""
    if len(list(node.outputs())) != 1 or not node.output().debugName().isdigit():
        return None
    used = next(iter(node.output().uses()), None)
    return None if used is None or used.user.kind() == "prim::Return" else used.user


def _origin(node: Any) -> Origin:
    text = node.sourceRange().partition("Serialized   File")[0]
    written = _FILE.match(text)
    if written is not None:
        defined = _DEFINED.findall(text.partition("<--- HERE")[0]) if written["file"] == "<string>" else []
        if defined:
            return Origin(function=defined[-1], frames=(("<string>", "", defined[-1]),))
        # Without notes on its sources an archive knows its own files only.
        is_known = written["file"] and not written["file"].startswith("code/__torch__")
        return _scripted(written, text) if is_known else UNKNOWN
    frames = [(each["file"], each["line"], each["function"]) for each in _FRAME.finditer(text)]
    return _traced(frames) if frames else UNKNOWN


def _scripted(written: re.Match[str], text: str) -> Origin:
    whose = _whose(written["file"])
    expression = _marked(text)
    form, function = _read(expression)
    return Origin(
        source=_line(written["file"], written["line"]) if whose == "network" else "",
        function=function,
        expression=expression,
        form=form,
        is_torchs=whose == "torch",
    )


def _read(expression: str) -> tuple[Literal["subscript", "assignment", "other", ""], str]:
    """Return what an expression is, and the function of torch's that it calls, "" if it calls none."""
    try:
        text = f"({expression}\n)" if "\n" in expression else expression
        (statement,) = ast.parse(text).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return "", ""
    match statement:
        case ast.Assign(targets=[ast.Subscript()]):
            return "assignment", ""
        case ast.Expr(value=ast.Subscript()):
            return "subscript", ""
        case (
            ast.Expr(value=ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)))
            | ast.Expr(value=ast.Attribute(attr=name) | ast.Name(id=name))
        ):
            is_torchs = any(hasattr(place, name) for place in (torch, torch.Tensor, torch.nn.functional))
            return "other", name if is_torchs else ""
    return "other", ""


def _marked(text: str) -> str:
    """Return the code below which torch draws "~~~~", with "<--- HERE" at the end; it may end inside a name."""
    lines = text.splitlines()
    parts = []
    for code, below in itertools.pairwise(lines):
        mark = below.removesuffix(" <--- HERE")
        if set(mark.strip()) == {"~"}:
            end = next((at for at in range(len(mark), len(code)) if not code[at].isidentifier()), len(code))
            parts.append(code[mark.index("~") : end].strip())
    return "\n".join(parts)


def _traced(frames: list[tuple[str, str, str]]) -> Origin:
    count = next((at for at, (file, _, _) in enumerate(frames) if _whose(file) != "wrapper"), len(frames))
    functions = [name for _, _, name in reversed(frames[:count]) if name not in _AROUND]
    own = next(((file, line) for file, line, _ in frames if _whose(file) == "network"), None)
    return Origin(
        source=_line(*own) if own else "",
        function=functions[0] if functions else "",
        is_torchs=count < len(frames) and _whose(frames[count][0]) == "torch",
        frames=tuple(frames[:count]),
    )


def _whose(file: str) -> Literal["network", "torch", "wrapper"]:
    """Tell whose code a file holds; see `whose_code` in hooks/callers.py."""
    found = _TORCH.search(file)
    if found is None:
        return "network"
    return "torch" if _LAYERS.match(file, found.end()) else "wrapper"


def _line(file: str, line: str) -> str:
    return "" if file.startswith("<") else f"{PurePath(file.replace(chr(92), '/')).name}:{line}"
