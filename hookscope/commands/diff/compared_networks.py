"""The networks that are compared: separate ones, for the same kind of inputs, and one in higher precision."""

from dataclasses import replace

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from hookscope import options
from hookscope.commands.diff.alignment import is_inside
from hookscope.errors import ModelError, UsageError
from hookscope.inspection.network import InspectedNetwork, inspected_network
from hookscope.inspection.state.preservation import Mode
from hookscope.models.checkpoint import looks_like_file
from hookscope.models.construction import LoadedModel, copied
from hookscope.models.spec import parse_model
from hookscope.parameters import arg
from hookscope.text import exception_line, printable, some_of

# Modules of torch that compute something else in training mode.
_WITH_MODES = (_NormBase, _DropoutNd, nn.RNNBase, nn.MultiheadAttention, nn.RReLU)


def sides(a: str | None, b: str | None, option: options.Diff) -> tuple[options.Diff, options.Diff]:
    """Return the options of both sides: where one is a weights file and one a network, each gets those that fit it.

    `a` is MODEL, as given, None for a module; `b` as `a`, or "same".

    Raises:
        UsageError: If weights of B are named and B is a weights file.
    """
    names = (a, a if b == "same" else b)
    chosen = (option.weights, option.weights_b or option.weights)
    is_file = [name is not None and parse_model(name).form == "weights" for name in names]
    reads_file = [is_file[at] or (name is not None and looks_like_file(chosen[at])) for at, name in enumerate(names)]
    if option.weights_b is not None and is_file[1]:
        raise UsageError(
            f"{arg('weights_b')} cannot be used here: B, '{printable(names[1] or '')}', is already a weights file."
        )

    def side(at: int) -> options.Diff:
        other = 1 - at
        fitting = replace(
            option,
            weights="auto" if is_file[at] and not is_file[other] else chosen[at],
            arch=None if is_file[other] and not is_file[at] else option.arch,
        )
        if reads_file[other] and not reads_file[at]:
            return replace(fitting, key=None, allow_missing=(), allow_unexpected=())
        return fitting

    return side(0), side(1)


def separate(loaded: LoadedModel, other: LoadedModel) -> LoadedModel:
    """Return the other network, as a copy if it has modules of the first."""
    module_ids = {id(module) for module in loaded.module.modules()}
    return copied(other) if any(id(module) in module_ids for module in other.module.modules()) else other


def in_float64(loaded: LoadedModel, inspected: InspectedNetwork) -> InspectedNetwork:
    """Return a copy of a network with its weights in float64."""
    try:
        module = copied(replace(loaded, module=inspected.network)).module.double()
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"{inspected.info.name} cannot run in float64 on {inspected.placed[0]}: {exception_line(error)}. "
            f"Leave out {arg('reference')}, or give {arg('device')} cpu."
        ) from error
    return replace(inspected_network(module), info=inspected.info)


def different_inputs(loaded: LoadedModel, other: LoadedModel) -> list[str]:
    """Return a warning if both networks want pictures prepared in different ways.

    Raises:
        UsageError: If they take inputs of different kinds.
    """
    first, two = loaded.preprocessing, other.preprocessing
    names = f"A ({loaded.info.name})", f"B ({other.info.name})"
    if first.kind != two.kind:
        raise UsageError(f"{names[0]} takes inputs of kind '{first.kind}', {names[1]} of kind '{two.kind}'.")
    if first.mean != two.mean or first.std != two.std or first.crop != two.crop or first.resize != two.resize:
        return [f"{names[1]} expects different preprocessing: both get A's."]
    return []


def compiled_notes(loaded: LoadedModel, other: LoadedModel, *, compiles: bool) -> list[str]:
    """Return notes about networks that are given compiled: hooks only run in uncompiled code."""
    models = {"A": loaded, **({} if compiles else {"B": other})}
    return [
        f"{letter} is compiled, and runs uncompiled here: {arg('compile_b')} compares what is compiled."
        for letter, model in models.items()
        if "_orig_mod" in model.module._modules
    ]


def training_notes(a: InspectedNetwork, b: InspectedNetwork, mode_b: Mode) -> list[str]:
    """Return notes about modules that were in training mode, which they are not run in.

    None if all modules of both networks were: they are, until someone calls `eval`.
    """
    notes: list[str] = []
    modes = [{name: module.training for name, module in side.modules.items()} for side in (a, b)]
    if all(map(all, (flags.values() for flags in modes))) or not any(map(any, (flags.values() for flags in modes))):
        return notes
    for letter, side, mode, training in zip("AB", (a, b), ("eval", mode_b), modes, strict=True):
        trained = [name for name in side.modules if training[name] and mode != "train"]
        names = [name for name in trained if any(map(_has_modes, side.modules[name].modules()))]
        if not names:
            continue
        # A module in training mode whose parts all are stands for them; the others stand for their own code.
        whole = [name for name in names if all(training[part] for part in training if is_inside(part, name))]
        shown = [name for name in names if not any(is_inside(name, module) for module in whole)]
        at = [printable(name, 80) or "(model)" for name in shown]
        where = "" if "" in whole else f" at {some_of(at, 3)}"
        option = f", unless {arg('mode_b')} train is given" if letter == "B" else ""
        notes.append(f"{letter} was in training mode{where}, and runs in eval mode here{option}.")
    return notes


def _has_modes(module: nn.Module) -> bool:
    """Return whether a module may compute something else in training mode: of torch's own only some do."""
    is_torchs = type(module).__module__.startswith("torch.nn.")
    return not is_torchs or isinstance(module, _WITH_MODES)
