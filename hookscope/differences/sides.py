"""The networks that are compared: separate ones, for the same kind of inputs, and one in higher precision."""

from dataclasses import replace

from hookscope.errors import ModelError, UsageError
from hookscope.inspection.network import InspectedNetwork, inspected_network
from hookscope.models import LoadedModel
from hookscope.models.construction import copied
from hookscope.text import exception_line


def separate(loaded: LoadedModel, other: LoadedModel) -> LoadedModel:
    """Return the other network, as a copy if it has modules of the first."""
    own = {id(module) for module in loaded.module.modules()}
    return copied(other) if any(id(module) in own for module in other.module.modules()) else other


def in_float64(loaded: LoadedModel, inspected: InspectedNetwork) -> InspectedNetwork:
    """Return a copy of a network with its weights in float64."""
    try:
        module = copied(replace(loaded, module=inspected.network)).module.double()
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"{inspected.info.name} cannot run in float64 on {inspected.placed[0]}: {exception_line(error)}. "
            "Leave out --reference, or give --device cpu."
        ) from error
    return replace(inspected_network(module), info=inspected.info)


def different_inputs(loaded: LoadedModel, other: LoadedModel) -> list[str]:
    """Return a warning if both networks want pictures prepared in different ways.

    Raises:
        UsageError: If they take inputs of different kinds.
    """
    one, two = loaded.preprocessing, other.preprocessing
    names = f"A ({loaded.info.name})", f"B ({other.info.name})"
    if one.kind != two.kind:
        raise UsageError(f"{names[0]} takes inputs of kind '{one.kind}', {names[1]} of kind '{two.kind}'.")
    if one.mean != two.mean or one.std != two.std or one.crop != two.crop or one.resize != two.resize:
        return [f"{names[1]} expects inputs prepared in another way: both get A's."]
    return []


def compiled_notes(loaded: LoadedModel, other: LoadedModel, *, compiles: bool) -> list[str]:
    """Return notes about networks that are given compiled: hooks only run in uncompiled code."""
    given = {"A": loaded, **({} if compiles else {"B": other})}
    return [
        f"{letter} is compiled, and runs uncompiled here: --compile-b compares what is compiled."
        for letter, each in given.items()
        if "_orig_mod" in each.module._modules
    ]
