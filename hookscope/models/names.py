"""The names that MODEL accepts, without importing torch or torchvision: that takes seconds."""

import ast
import re
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from hookscope.checkpoints.folders import HEIF_SUFFIXES, PICTURE_SUFFIXES
from hookscope.errors import NothingMatchedError, UsageError, nearest
from hookscope.parameters import arg
from hookscope.regular_files import read_bounded
from hookscope.text import printable, some_of

DEMO = "demo"

_MOST_SOURCE = 2**20  # bytes of a file whose names are listed

# How torchvision's source registers a network: by the name of its builder, or another one.
_REGISTERED = re.compile(r'^@register_model\((?:name="(\w+)")?\)$.*?^def (\w+)\(', re.MULTILINE | re.DOTALL)


def model_names(pattern: str | None = None) -> list[str]:
    """Return the names that MODEL accepts, `demo` first, then torchvision's sorted.

    A plain word as `pattern` selects the names that contain it, a glob (`*?[]`) those it matches as a whole, whatever
    the case; "timm:" selects among timm's instead. Raises NothingMatchedError if no name matches, UsageError if timm is
    asked for and missing.
    """
    names = [DEMO, *torchvision_names()]
    if pattern is None:
        return names
    folded = pattern.lower()
    if folded.startswith("timm:"):
        names = [f"timm:{name}" for name in timm_names()]
    is_glob = any(c in folded for c in "*?[")
    matching = [name for name in names if (fnmatchcase(name, folded) if is_glob else folded in name)]
    if not matching:
        close = nearest(pattern, names, prefix="timm:")
        raise NothingMatchedError(
            f"No model name matches '{printable(pattern)}'.{close} List all with `hookscope models`."
        )
    return matching


def refuse_by_form(text: str) -> None:
    """Raise UsageError for a MODEL that is a picture, or a Python file without the name of a factory."""
    if text.lower().endswith((*PICTURE_SUFFIXES, *HEIF_SUFFIXES)):  # MODEL and IMAGE were swapped
        raise UsageError(
            f"MODEL '{printable(text)}' is a picture. Name the network first, then pictures (in `check`: "
            f"{arg('images')})."
        )
    file = text.removesuffix(":")
    if file.endswith(".py"):
        defined = some_of([printable(name) for name in _defined_in(Path(file))], 6)
        remark = f"; it defines {defined}" if defined else ""
        raise UsageError(f"MODEL '{printable(text)}' needs the name of a factory: {printable(file)}:NAME{remark}.")


def _defined_in(file: Path) -> list[str]:
    try:
        body = ast.parse(read_bounded(file, _MOST_SOURCE)).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    kinds = (ast.ClassDef, ast.FunctionDef)
    return [node.name for node in reversed(body) if isinstance(node, kinds) and not node.name.startswith("_")]


def torchvision_names() -> list[str]:
    """Return the names of `torchvision.models.list_models()`, from torchvision's source where it is installed."""
    package = find_spec("torchvision")
    folders = package.submodule_search_locations if package is not None else None
    files = [file for folder in folders or () for file in Path(folder, "models").rglob("*.py")]
    by_file = (_REGISTERED.finditer(file.read_text(encoding="utf-8")) for file in files)
    names = sorted(match[1] or match[2] for matches in by_file for match in matches)
    if not names:
        from torchvision.models import list_models  # noqa: PLC0415 (slow to import)

        names = list_models()
    return names


def timm_names() -> list[str]:
    """Return the names of timm's networks, sorted, without the tags of their weights; UsageError without timm."""
    return sorted(import_timm().list_models())


def import_timm() -> ModuleType:
    """Return timm, which takes seconds to import; UsageError if it is not installed."""
    return optional_package("timm", "MODEL 'timm:NAME' needs one more package: pip install 'hookscope[timm]'")


def optional_package(name: str, advice: str) -> ModuleType:
    """Return a package that is not always installed; UsageError with the advice where it is not."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(advice) from error
