"""Read the MODEL argument, and load what it names."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hookscope.errors import CheckpointError, ModelNotFoundError, UsageError, nearest
from hookscope.models.building import LoadedModel, printable
from hookscope.models.checkpoint import WEIGHTS_SUFFIXES, exists, looks_like_file
from hookscope.models.pyfile import load_python, parse_arguments


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What MODEL says, before anything is loaded.

    Attributes:
        form: "demo"; "torchvision", a registry name; "file" and "module", a factory in Python; "weights", a file.
        source: The registry name, the path, or the dotted module name.
        factory: For "file" and "module", the name of the callable or Module in it; else "".
    """

    form: Literal["demo", "torchvision", "file", "module", "weights"]
    source: str
    factory: str = ""


def parse_model(text: str) -> ModelSpec:
    """Say what MODEL means.

    A name that torchvision knows is never taken for a file; write "./resnet34" for a file of that name.

    Args:
        text: "demo", "resnet34", "torchvision:resnet34", "net.py:build", "package.module:build", "model.safetensors".

    Raises:
        ModelNotFoundError: If it is none of these.
        UsageError: If it is a Python file without a factory.
    """
    source, colon, factory = text.rpartition(":")
    if text == "demo":
        return ModelSpec("demo", text)
    if text.lower().endswith(WEIGHTS_SUFFIXES):
        return ModelSpec("weights", text)
    if colon and source.endswith(".py"):
        return ModelSpec("file", source, factory)
    if text.endswith(".py"):
        raise UsageError(
            f"MODEL '{printable(text)}' lacks the name of what builds the network: {printable(text)}:NAME."
        )
    if source != "torchvision" and all(part.isidentifier() for part in source.split(".")):
        return ModelSpec("module", source, factory)
    from hookscope.models.zoo import model_names  # noqa: PLC0415 (torchvision takes as long to import as torch)

    name = text.removeprefix("torchvision:")
    known = model_names()
    if name.lower() in known[1:]:  # [0] is demo
        return ModelSpec("torchvision", name.lower())
    if looks_like_file(text):
        return ModelSpec("weights", text)
    raise ModelNotFoundError(
        f"No model is called '{printable(name)}'.{nearest(name, known)} List them with `hookscope models`."
    )


def load_model(
    model: str,
    *,
    weights: str = "auto",
    arch: str | None = None,
    model_arguments: Sequence[str] = (),
    seed: int = 0,
) -> LoadedModel:
    """Load the network that MODEL names, on the CPU, in the mode its builder leaves it in.

    Args:
        model: As `parse_model` reads it.
        weights: "auto": trained if cached or downloadable, else random with a warning. "none": random. The name of
            trained weights, or a state dict file: that or an error.
        arch: The network a weights file belongs to, in any form of MODEL but a weights file.
        model_arguments: "NAME=VALUE" each, for the function that builds the network.
        seed: Of random weights. The random number generators come out as they went in.

    Raises:
        ModelNotFoundError: If MODEL or `arch` names nothing.
        UsageError: If the arguments contradict each other or cannot be right.
        CheckpointError: If weights cannot be had, read, or do not fit.
        InputError: If a Python file cannot be read.
        UntrustedFileError: If reading the weights could run code.
        ModelError: If building the network raises.
    """
    return _load(model, weights, arch, model_arguments, seed, on_meta=False)


def build_on_meta(
    model: str,
    *,
    weights: str = "auto",
    arch: str | None = None,
    model_arguments: Sequence[str] = (),
    seed: int = 0,
) -> LoadedModel:
    """Build the network that `load_model` would load, with shapes but no values, on the meta device.

    Nothing is downloaded, and trained weights are not read; the state dict file of a named network is, as it decides
    how that is built. A factory that fails on the meta device runs on the CPU first. Quantised networks stay there,
    with random values, since they have no meta form: the device of their state dict's tensors tells.

    Args and Raises: As for `load_model`.
    """
    return _load(model, weights, arch, model_arguments, seed, on_meta=True)


def _load(
    model: str, weights: str, arch: str | None, model_arguments: Sequence[str], seed: int, *, on_meta: bool
) -> LoadedModel:
    spec = parse_model(model)
    if spec.form != "weights":
        if arch is not None:
            raise UsageError(f"--arch goes with a weights file; MODEL '{printable(model)}' is a network already.")
        return _load_network(spec, weights, model_arguments, seed, on_meta=on_meta)
    shown = printable(spec.source)
    if not exists(spec.source):
        raise CheckpointError(f"{shown} does not exist.")
    if arch is None:
        raise UsageError(f"{shown} holds weights only; name their network, for example --arch resnet34.")
    if weights != "auto":
        raise UsageError(f"--weights cannot be given as well: MODEL '{shown}' is the weights.")
    network = parse_model(arch)
    if network.form == "weights":
        raise UsageError(f"--arch '{printable(arch)}' is a weights file; name a network, for example resnet34.")
    loaded = _load_network(network, spec.source, model_arguments, seed, on_meta=on_meta)
    name = f"{printable(Path(spec.source).name)} ({loaded.info.name})"
    return replace(loaded, info=replace(loaded.info, name=name))


def _load_network(
    spec: ModelSpec, weights: str, model_arguments: Sequence[str], seed: int, *, on_meta: bool
) -> LoadedModel:
    arguments = parse_arguments(model_arguments)
    if spec.form in ("file", "module"):
        return load_python(spec.source, spec.factory, weights, arguments, seed, on_meta=on_meta)
    from hookscope.models import zoo  # noqa: PLC0415 (torchvision takes as long to import as torch)

    if spec.form == "demo":
        return zoo.load_demo(weights, arguments, seed, on_meta=on_meta)
    return zoo.load_torchvision(spec.source, weights, arguments, seed, on_meta=on_meta)
