"""The forms and names that MODEL accepts, without importing torch or torchvision: that takes seconds."""

import ast
import os
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from hookscope.checkpoints.fileformat import WEIGHTS_SUFFIXES, looks_like_file, nearest_file, read_config
from hookscope.checkpoints.folders import HEIF_SUFFIXES, PICTURE_SUFFIXES
from hookscope.checkpoints.weights_files import WeightsFiles
from hookscope.errors import ModelNotFoundError, NothingMatchedError, UsageError, nearest
from hookscope.models.user_code import importable, imported
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


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A parsed MODEL, before anything is loaded: a registry name, a path, or a dotted module name.

    `factory` is the callable or Module in a Python file or module. A "weights" file may hold the network too.
    """

    form: Literal["demo", "torchvision", "timm", "python", "weights", "hugging face"]
    source: str
    factory: str = ""


def parse_model(text: str) -> ModelSpec:
    """Return what MODEL means.

    A name that torchvision knows is never taken for a file; write "./resnet34" for a file of that name. Other forms:
    "demo", "torchvision:resnet34", "timm:convnext_tiny", "net.py:build", "package.module:build", "model.safetensors",
    "model.safetensors.index.json", and "./vit-base" for a folder of transformers'. Raises ModelNotFoundError for
    anything else, UsageError for a Python file without a factory, and for a picture.
    """
    _refuse_by_form(text)
    source, colon, factory = text.rpartition(":")
    if text == DEMO:
        return ModelSpec("demo", text)
    if text.startswith("timm:"):
        return ModelSpec("timm", text.removeprefix("timm:"))
    if text.lower().endswith(WEIGHTS_SUFFIXES):
        return ModelSpec("weights", text)
    is_module = source != "torchvision" and all(part.isidentifier() for part in source.split("."))
    if is_module or (colon and source.endswith(".py")):
        return ModelSpec("python", source, factory)
    name = text.removeprefix("torchvision:")
    names = model_names()
    if name.lower() in names[1:]:  # [0] is demo
        return ModelSpec("torchvision", name.lower())
    if looks_like_file(text):
        return ModelSpec("hugging face" if read_config(Path(text)) is not None else "weights", text)
    module, _, factory = text.rpartition(".") if "." in text else (text, "", "NAME")
    is_python = module.isidentifier() and factory.isidentifier()
    if is_python and os.path.isfile(f"{module}.py"):  # noqa: PTH113 never raises
        raise ModelNotFoundError(f"No model is called '{name}'. {module}.py is here: give {module}.py:{factory}.")
    from hookscope.models.network_table import network_table  # noqa: PLC0415 - only for this message

    is_timms = f"timm:{name}" in network_table("timm").networks
    others = f" timm has it: give timm:{name}." if is_timms else nearest_file(Path(text)) or nearest(name, names)
    raise ModelNotFoundError(f"No model is called '{printable(name)}'.{others} List them with `hookscope models`.")


def check_model(text: str) -> None:
    """Raise what shows to be wrong with MODEL before its network is built."""
    spec = parse_model(text)
    if spec.form == "weights":
        WeightsFiles.at(Path(spec.source))
    elif spec.form == "timm":
        published(spec.source)
    elif spec.form == "python":
        with importable(spec.source):
            imported(spec.source, spec.factory)


def _refuse_by_form(text: str) -> None:
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


@cache
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


def published(name: str) -> Any:
    """Return timm's `PretrainedCfg` of a network: its weights, input and the names of its first and last layers.

    `name` may have the tag of its weights: "resnet50.a1_in1k". Raises UsageError if timm is missing, ModelNotFoundError
    if it has no such network, or no such weights of it.
    """
    timm: Any = import_timm()
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        names = [f"timm:{model}" for model in timm.list_models()]
        raise ModelNotFoundError(
            f"timm has no network '{printable(architecture)}'.{nearest(architecture, names, prefix='timm:')}"
            " List them with `hookscope models timm:`."
        )
    try:
        return timm.get_pretrained_cfg(name) or timm.models.PretrainedCfg(architecture=architecture)
    except RuntimeError as error:
        tags = ", ".join(tagged.partition(".")[2] for tagged in timm.list_pretrained(f"{architecture}.*"))
        raise ModelNotFoundError(f"timm has no weights '{printable(tag)}' of {architecture}; it has {tags}.") from error


def optional_package(name: str, advice: str) -> ModuleType:
    """Return a package that is not always installed; UsageError with the advice where it is not."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UsageError(advice) from error
