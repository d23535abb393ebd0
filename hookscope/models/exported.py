"""Files that run code when they are read: pickles, TorchScript and exported programs.

The caller has asked for trust; nothing here asks again.
"""

import logging
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.checkpoints.fileformat import file_kind
from hookscope.errors import CheckpointError, ModelNotFoundError
from hookscope.models.architecture import recognise
from hookscope.models.checkpoint import digest_of
from hookscope.models.classes import packed_classes
from hookscope.models.construction import LoadedModel, model_info, seeded, silenced_known_warnings
from hookscope.models.input_spec import default_preprocessing, with_channels
from hookscope.models.python_source import importable
from hookscope.models.weight_sets import state_shapes
from hookscope.models.weights import IMAGENET_CLASSES
from hookscope.results.inputs import Preprocessing
from hookscope.text import counted, exception_line, printable

# Pickle's message about a class or function that is no longer where it was.
_MISSING_CLASS = re.compile(r"Can't get attribute '(?P<name>[^']+)' on <module '(?P<module>[^']+)'")


def read_pickle(path: Path) -> object:
    """Unpickle a file: torch's zip, its two older formats, or a bare pickle. Tensors come to the CPU.

    Classes are looked for in the current folder first. Raises CheckpointError if it cannot be unpickled, or belongs to
    classes that cannot be imported.
    """
    shown = printable(str(path))
    try:
        # By its name alone, torch would take some file for safetensors.
        with path.open("rb") as file, importable(Path.cwd(), is_file=False), silenced_known_warnings():
            if file_kind(path) == "pickle":
                return pickle.load(file)  # noqa: S301 - trusted
            return torch.load(file, map_location="cpu", weights_only=False)
    except CheckpointError:
        raise
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{shown} needs the Python module '{printable(str(error.name), 80)}', which cannot be imported here: "
            f"install it, or run hookscope in the folder it lies in."
        ) from error
    except (Exception, SystemExit) as error:
        missing = _MISSING_CLASS.search(str(error)) if isinstance(error, AttributeError) else None
        if missing is None:
            raise CheckpointError(f"{shown} cannot be unpickled: {exception_line(error)}") from error
        raise CheckpointError(
            f"{shown} needs '{printable(missing['name'], 80)}' of the Python module "
            f"'{printable(missing['module'], 80)}', which does not have it here: run hookscope where it does, or save "
            "`model.state_dict()` and name the network with --arch."
        ) from error


def load_torchscript(path: Path, seed: int) -> LoadedModel:
    """Load TorchScript, scripted or traced, as a tree of modules with the original names and class names.

    Buffers that the original kept out of its state dict are in that of the module: TorchScript does not record which
    those were. Code in the file runs with random number generators seeded by `seed`. Names of classes are known where
    an extra file has them, or the network is one of torchvision's. Raises CheckpointError.
    """
    import torchvision  # noqa: F401, PLC0415 - registers operators that detection networks call

    from hookscope.models.torchscript import hookable  # noqa: PLC0415 - only for such files

    def load() -> Any:
        with seeded(seed):
            return torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call] # torch's

    with _loading(path, "TorchScript", "save"):
        module, remarks = hookable(load)
    loaded = _described(path, module, default_preprocessing(module), remarks)
    names, note = _class_names(path, module)
    if not names:
        return loaded
    notes = (*loaded.notes, f"{loaded.info.name}: {note}")
    return replace(loaded, info=replace(loaded.info, categories=names), notes=notes)


def _class_names(path: Path, script: nn.Module) -> tuple[tuple[str, ...], str]:
    """Return the names of a script's classes, with where they come from, in a sentence; of an unknown one nothing.

    They are in an extra file, or, where names and shapes are those of a network of torchvision, ImageNet's.
    """
    from torchvision.models import get_model_weights, list_models  # noqa: PLC0415 - as above

    state = script.state_dict()
    key, names = packed_classes(path, {tensor.shape[0] for tensor in state.values() if tensor.dim()})
    if names:
        return names, f"{counted(len(names), 'class name')} taken from its extra file '{key}'."
    with suppress(ModelNotFoundError):  # not all were compared
        for found in recognise(state_shapes(state)):
            if "num_classes" not in found.arguments and found.model in list_models():
                known = get_model_weights(found.model).DEFAULT.meta.get("categories", ())
                if len(known) == IMAGENET_CLASSES:
                    said = f"has names and shapes of {found.model}, as many classes as ImageNet, and takes their names."
                    return tuple(known), said
    return (), ""


def load_exported_program(path: Path, seed: int) -> LoadedModel:
    """Load an exported program (.pt2) as a tree of modules with the original names and class names.

    It runs once on its example inputs, if the file has them, to see that the tree computes the same. Raises
    CheckpointError.
    """
    from hookscope.models.unflattened import unflattened  # noqa: PLC0415 - only for such files

    with _loading(path, "an exported program", "export"), seeded(seed), path.open("rb") as file:
        program: Any = torch.export.load(file)
        module, remarks = unflattened(program, seed)
        shape = _input_shape(program)
    preprocessing = default_preprocessing(module)
    if shape is not None:
        preprocessing = _fitting(preprocessing, shape, path)
        if shape and isinstance(shape[0], int) and shape[0] != 1:
            shown = ", ".join("any" if size is None else str(size) for size in shape)
            remarks = (*remarks, f"exported for inputs of shape ({shown}), so it takes batches of exactly {shape[0]}.")
    sizes = () if shape is None else (shape[0] or 1, *shape[1:])
    known = tuple(size for size in sizes if size is not None)
    loaded = _described(path, module, preprocessing, remarks)
    return replace(loaded, example_shape=known if known and len(known) == len(sizes) else None)


def _input_shape(program: Any) -> tuple[int | None, ...] | None:
    """Return the shape of the program's input, None for sizes that may vary; None if it does not take one tensor."""
    names = program.graph_signature.user_inputs
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    if len(values) != 1 or len(names) != 1 or not isinstance(values[0], Tensor):
        return None
    return tuple(size if isinstance(size, int) else None for size in values[0].shape)


def _fitting(base: Preprocessing, shape: tuple[int | None, ...], path: Path) -> Preprocessing:
    """Return preprocessing that makes images of the shape (N, C, H, W), or clips of (N, C, T, H, W)."""
    if len(shape) not in (4, 5) or shape[1] not in (1, 3):
        return base
    channels, frames, (height, width) = shape[1], shape[2] if len(shape) == 5 else 1, shape[-2:]
    base = with_channels(base, channels)
    base = replace(base, kind="image" if len(shape) == 4 else "video", frames=frames or base.frames)
    if height is None or width is None:
        return base
    return replace(
        base,
        resize=height if height == width else (height, width),
        crop=(height, width),
        source=f"the input that {printable(path.name)} was exported for",
    )


def _described(path: Path, module: nn.Module, preprocessing: Preprocessing, remarks: tuple[str, ...]) -> LoadedModel:
    name = printable(path.name)
    info = model_info(name, module, name, sha256=digest_of(path))
    return LoadedModel(module, info, preprocessing, tuple(f"{name}: {remark}" for remark in remarks))


@contextmanager
def _loading(path: Path, what: str, make: str) -> Iterator[None]:
    """Turn whatever loading a file raises into one line, with the cause that torch.export only logs."""
    causes: list[BaseException] = []

    def collect(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1]:
            causes.append(record.exc_info[1])
        return False

    loggers = [logging.getLogger(name) for name in ("torch.export", "torch.export.pt2_archive._package")]
    for logger in loggers:
        logger.addFilter(collect)
    try:
        with silenced_known_warnings():
            yield
    except (Exception, SystemExit) as error:
        shown, cause = printable(str(path)), exception_line(causes[0] if causes else error)
        raise CheckpointError(f"{shown} cannot be loaded as {what}: {cause}; download or {make} it again.") from error
    finally:
        for logger in loggers:
            logger.removeFilter(collect)
