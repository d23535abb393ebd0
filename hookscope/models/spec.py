"""Read the MODEL argument, and load what it names."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from hookscope.checkpoints.checkpoint import Checkpoint, FileOptions
from hookscope.checkpoints.fileformat import PROGRAMS, holds_inputs, looks_like_file
from hookscope.checkpoints.weights_files import WeightsFiles
from hookscope.errors import MisfitError, ModelNotFoundError, UsageError
from hookscope.models import architecture
from hookscope.models.adapters import is_adapter
from hookscope.models.checkpoint import read_checkpoint
from hookscope.models.construction import LoadedModel, loaded_module
from hookscope.models.merged_adapters import adapter_settings, merged
from hookscope.models.names import ModelSpec, parse_model
from hookscope.models.network_table import state_shapes
from hookscope.models.python_source import load_python, parse_arguments
from hookscope.models.statedict import foreign_names
from hookscope.models.weight_choice import BuildOptions
from hookscope.options import Arguments, ModelOptions, Named, RunOptions
from hookscope.parameters import arg
from hookscope.results.inputs import Preprocessing
from hookscope.text import printable

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram


def load_model(
    model: "str | Path | nn.Module | ExportedProgram | LoadedModel",
    *,
    weights: Named = "auto",
    arch: Named | None = None,
    model_arguments: Arguments = (),
    seed: int = 0,
    options: FileOptions = FileOptions(),  # noqa: B008 - frozen
    on_meta: bool = False,
) -> LoadedModel:
    """Load the network that MODEL names, on the CPU, in the mode its builder leaves it in.

    Args:
        model: MODEL in any of its forms, see `parse_model`. A module or an exported program is taken as it is, without
            options; TorchScript is copied, because torch refuses hooks on it.
        weights: "auto": trained if cached or downloadable, else random with a warning. "none": random. The name of
            trained weights, or a state dict file: exactly these, or an error.
        arch: The network a weights file belongs to, in any form of MODEL but a weights file; None to recognise it, or
            to take the network that a trusted file holds.
        model_arguments: A mapping, or texts "NAME=VALUE": arguments of the function that builds the network.
        seed: Seed of random weights. The state of the random number generators is restored.
        options: How a weights file is read and loaded.
        on_meta: See `build_on_meta`.

    Raises:
        ModelNotFoundError: If MODEL or `arch` names nothing, or no known network fits a weights file.
        NothingMatchedError: If the file has nothing at the key of `options`.
        UsageError: If the arguments contradict each other or cannot be right, or leave a choice open.
        CheckpointError: If weights cannot be downloaded or read, or do not fit.
        InputError: If a Python file cannot be read.
        UntrustedFileError: If reading the weights could run code, and they are not trusted.
        ModelError: If building the network raises.
    """
    ModelOptions(weights=weights, arch=arch), RunOptions(seed=seed)  # these refuse other types
    weights, arch = os.fspath(weights), None if arch is None else os.fspath(arch)
    if not isinstance(model, str | Path):
        if weights != "auto" or arch is not None or model_arguments or options != FileOptions():
            raise UsageError(needs_a_name())
        return _given_network(model)
    model = str(model)
    spec = parse_model(model)
    if spec.form == "hugging face" and arch is not None:
        spec = replace(spec, form="weights")
    build = BuildOptions(weights, parse_arguments(model_arguments), seed, on_meta, file=options)
    if spec.form == "weights":
        return _load_file(spec.source, arch, build)
    if arch is not None:
        raise UsageError(f"{arg('arch')} needs a weights file as MODEL; '{printable(model)}' is already a network.")
    no_file = spec.form != "hugging face" and not looks_like_file(weights)
    if replace(options, trust=False, allowed_globals=None) != FileOptions() and no_file:
        raise UsageError(
            f"{arg('key')}, {arg('allow_missing')} and {arg('allow_unexpected')} need a weights file; MODEL "
            f"'{printable(model)}' is loaded without one."
        )
    if spec.form in ("torchvision", "timm") and looks_like_file(weights):
        return _load_weights(read_checkpoint(Path(weights), options), spec, build)
    return _load_network(spec, build)


build_on_meta = partial(load_model, on_meta=True)
"""Build the network that `load_model` would load, with shapes but no values, on the meta device.

Nothing is downloaded, and trained weights are not read; a weights file is, and has to fit. A factory that fails on the
meta device runs on the CPU first. Quantised networks, and those out of a trusted file, stay on the CPU with values; the
device of the tensors in their state dict shows which case it is.
"""


def needs_a_name() -> str:
    """Return why options about loading do not go with a module."""
    return (
        "A module stays on its device, with its weights: load, convert and move it yourself. "
        f"{', '.join(map(arg, ('weights', 'arch', 'device', 'dtype')))} and the like need `model` as a name or a file."
    )


def _given_network(model: "nn.Module | ExportedProgram | LoadedModel") -> LoadedModel:
    exporting: Any = sys.modules.get("torch.export")  # not imported without need
    exported_types = () if exporting is None else (exporting.ExportedProgram, torch.fx.GraphModule)
    if isinstance(model, (torch.jit.ScriptModule, *exported_types)):
        from hookscope.models import exported  # noqa: PLC0415 - only for such networks

        return exported.given_program(model)
    return loaded_module(model)


def _load_file(source: str, arch: str | None, options: BuildOptions) -> LoadedModel:
    network = None if arch is None else parse_model(arch)
    if network is not None and network.form == "weights":
        raise UsageError(
            f"{arg('arch')} '{printable(arch or '')}' is a weights file; name a network, for example resnet34."
        )
    files = WeightsFiles.at(Path(source))
    if options.weights != "auto" and files.adapter_config is None:
        raise UsageError(
            f"{arg('weights')} cannot be used here: MODEL '{printable(source)}' is already a weights file."
        )
    if network is None and options.file.trust and files.kind in PROGRAMS:
        from hookscope.models import exported  # noqa: PLC0415 (nothing that runs a file is imported without trust)

        _refuse_arguments(files.path, options)
        if options.file.key is not None:
            raise UsageError(f"{printable(files.path.name)} is a program, so it takes no {arg('key')}.")
        return exported.load_program(files)
    checkpoint = read_checkpoint(files, options.file)
    if is_adapter(checkpoint.state):
        settings = adapter_settings(checkpoint, files.adapter_config, has_network=network is not None)
        plain = FileOptions(options.file.trust, allowed_globals=options.file.allowed_globals)
        return merged(_load_network(cast("ModelSpec", network), replace(options, file=plain)), checkpoint, settings)
    if network is None and (module := checkpoint.module) is not None:
        _refuse_arguments(files.path, options)
        loaded = loaded_module(module, checkpoint.name, checkpoint.sha256, checkpoint.categories)
        return replace(loaded, warnings=checkpoint.warnings, notes=checkpoint.notes, training=checkpoint.training)
    try:
        loaded = _load_weights(checkpoint, network, options)
    except (MisfitError, ModelNotFoundError) as error:
        if remark := files.shard_remark():
            raise type(error)(f"{error} {remark}") from error
        raise
    info = replace(loaded.info, name=f"{checkpoint.name} ({loaded.info.name})")
    return replace(loaded, info=info, training=checkpoint.training)


def _load_weights(checkpoint: Checkpoint, named: ModelSpec | None, options: BuildOptions) -> LoadedModel:
    network, recognised, channels, notes = _network_of(checkpoint, named, options.arguments)
    arguments = {**recognised, **options.arguments}
    loaded = _load_network(network, replace(options, weights=checkpoint, arguments=arguments, input_channels=channels))
    return replace(loaded, notes=(*notes, *loaded.notes))


def _network_of(
    checkpoint: Checkpoint, named: ModelSpec | None, arguments: Mapping[str, Any]
) -> tuple[ModelSpec, Mapping[str, Any], int | None, tuple[str, ...]]:
    """Return the network that weights belong to, with the arguments and input channels that make it fit, and notes.

    `named` is the network of --arch, None to recognise it; `arguments` of --model-arg win.
    """
    if named is not None and named.form == "python":
        return named, {}, None, ()
    shapes = state_shapes(checkpoint.state)
    if named is not None:
        prefix = "timm:" if named.form == "timm" else ""
        adapted = architecture.adapt(f"{prefix}{named.source}", shapes)
        if adapted is None:  # loading reports what does not fit
            return named, {}, None, ()
        changes = {key: value for key, value in adapted.arguments.items() if key not in arguments}
        if adapted.input_channels is not None:
            changes["input channels"] = adapted.input_channels
        built = ", ".join(f"{key}={value!r}" for key, value in changes.items())
        notes = (f"{checkpoint.name}: {adapted.model} is built with {printable(built)}, as the file has it.",)
        return named, adapted.arguments, adapted.input_channels, notes if changes else ()
    candidates = architecture.recognise(shapes)
    if not candidates:
        if foreign := foreign_names(checkpoint.state):
            raise MisfitError(f"{checkpoint.name} does not hold weights of PyTorch: {foreign}")
        near = architecture.nearest_network(shapes)
        is_weights = any("." in shape or shape in ("weight", "bias") for shape in shapes)
        inputs = "" if is_weights else f" {holds_inputs()}"
        hint = f", or give {arg('trust')} to run its own {checkpoint.pickled_class}" if checkpoint.pickled_class else ""
        raise ModelNotFoundError(
            f"{checkpoint.name} fits no network that hookscope knows; name it with {arg('arch')}, such as "
            f"{arg('arch')} net.py:build{hint}.{near and f' Nearest: {near}.'}{inputs}"
        )
    chosen, named_by_file = candidates[0], False
    if (declared := architecture.declared_network(checkpoint.architectures, candidates, shapes)) is not None:
        chosen, named_by_file = declared, len(candidates) > 1 or declared.model != chosen.model
    elif len(candidates) > 1:
        models = ", ".join(_with_differences([candidate.model for candidate in candidates]))
        raise UsageError(
            f"{checkpoint.name} fits several networks with equal names and shapes: {models}; name the right one "
            f"with {arg('arch')}, such as {arg('arch')} {candidates[0].model}."
        )
    remarks = "; ".join([*chosen.remarks, *(["the file names it"] if named_by_file else [])])
    note = f"{checkpoint.name}: recognised as {chosen.model} by its names and shapes{remarks and f': {remarks}'}."
    return parse_model(chosen.model), chosen.arguments, chosen.input_channels, (note,)


# How many networks are built to tell them apart, and how many classes of layers a sentence names.
_BUILT_TO_COMPARE = 4
_NAMED_CLASSES = 3


def _with_differences(models: Sequence[str]) -> list[str]:
    if len(models) > _BUILT_TO_COMPARE:
        return [*models]
    built = {model: build_on_meta(model) for model in models}
    classes = {name: {type(module).__name__ for module in loaded.module.modules()} for name, loaded in built.items()}
    shared = set.intersection(*classes.values())
    if differing := sorted(set().union(*classes.values()) - shared):
        none = f"no {' or '.join(differing[:_NAMED_CLASSES])}"
        traits = {name: ", ".join(sorted(names - shared)[:_NAMED_CLASSES]) or none for name, names in classes.items()}
    else:
        traits = {name: _preprocessing_text(loaded.preprocessing) for name, loaded in built.items()}
    return [f"{name} ({text})" for name, text in traits.items()] if len({*traits.values()}) > 1 else [*models]


def _preprocessing_text(preprocessing: Preprocessing) -> str:
    size = preprocessing.crop or preprocessing.resize
    pixels = f"{size[0]}x{size[1]} pixels" if isinstance(size, tuple) else f"{size} pixels"
    return f"{pixels}, mean {' '.join(f'{mean:g}' for mean in preprocessing.mean)}"


def _refuse_arguments(path: Path, options: BuildOptions) -> None:
    if options.arguments:
        raise UsageError(f"{printable(path.name)} holds a network already built, so it takes no {arg('model_arg')}.")


def _load_network(spec: ModelSpec, options: BuildOptions) -> LoadedModel:
    if spec.form == "python":
        return load_python(spec.source, spec.factory, options)
    if spec.form == "hugging face":
        from hookscope.models import hugging_face  # noqa: PLC0415 (an optional package, slow to import)

        return hugging_face.load_hugging_face(spec.source, options)
    if spec.form == "timm":
        from hookscope.models import timm_zoo  # noqa: PLC0415 (an optional package, slow to import)

        return timm_zoo.load_timm(spec.source, options)
    from hookscope.models import zoo  # noqa: PLC0415 (torchvision takes as long to import as torch)

    return zoo.load_demo(options) if spec.form == "demo" else zoo.load_torchvision(spec.source, options)
