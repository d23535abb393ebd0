"""What `layers` does, for the command line and for Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookscope import options
from hookscope.commands.opening import file_options
from hookscope.hooks.interrupts import interrupts_between_blocks

if TYPE_CHECKING:
    from hookscope.commands.opening import Model
    from hookscope.inputs.batches import Batch
    from hookscope.models.construction import LoadedModel
    from hookscope.results.network import ModuleTable
    from hookscope.results.noise_shapes import NoiseShape


_TOO_LARGE_TO_TIME = (
    "No times: the network takes more than half of this machine's memory. Bytes saved for backward are those of the "
    "meta device, where attention is not fused."
)


@interrupts_between_blocks()
def layers(model: Model, *, option: options.Layers) -> ModuleTable:
    """List a model's modules with types, parameters and shapes, and mark what patterns select.

        >>> import hookscope
        >>> print(hookscope.layers("resnet18")["layer1.0.conv1"].output_shapes)
        ((1, 64, 56, 56),)

    Shapes come from a forward pass over noise, or over `input`. MODEL runs on the meta device, which computes nothing,
    and on the CPU if that fails; a module runs on its own device.

    Args:
        model: As for `activations`.

    Returns:
        The modules: `table["layer1.0.conv1"]` is a row.

    Raises:
        HookscopeError: As for `activations`. If the forward pass raises, `failure` of the result has the error instead.
    """
    from hookscope.inspection.device import fits_into_memory, placement
    from hookscope.models.construction import built_of_zeros
    from hookscope.models.names import parse_model
    from hookscope.models.spec import build_on_meta, load_model
    from hookscope.results.noise_shapes import parse_noise_shapes

    shapes = () if option.input_shape is None else parse_noise_shapes(option.input_shape)
    table_of = partial(_module_table, shapes=shapes, option=option)
    kwargs: dict[str, Any] = {"arch": option.arch, "model_arguments": option.model_arg, "options": file_options(option)}
    if not isinstance(model, str | Path):
        loaded = load_model(model, weights=option.weights, **kwargs)
        table = table_of(loaded, option.layer)
        real: LoadedModel | None = loaded
    else:
        loaded = real = (
            build_on_meta(str(model), **kwargs)
            if option.weights in ("auto", "none")
            else load_model(str(model), weights=option.weights, **kwargs)
        )
        weights = "auto" if parse_model(str(model)).form == "weights" else "none"
        warnings, notes = loaded.warnings, loaded.notes
        first = table_of(loaded, ()) if placement(loaded.module)[0].type == "meta" else None
        if first is not None and first.failure is not None:
            # Data-dependent code (non-maximum suppression, say) needs values.
            loaded = real = load_model(str(model), weights=weights, **kwargs)
        elif first is not None:
            # It ran on the meta device, so nothing depends on values: zeros are timed, if they fit into memory.
            load = partial(load_model, str(model), weights=weights, **kwargs)
            real = built_of_zeros(load) if option.cost and fits_into_memory(loaded.module) else None
        table = table_of(loaded, option.layer) if first is None or first.failure is not None or option.layer else first
        remarks = table.warnings[len(loaded.warnings) :]
        table = replace(table, warnings=(*warnings, *remarks), notes=notes)
    if option.cost and table.failure is None:
        table = _with_cost(table, loaded, real, shapes, option)
    return table if option.depth is None else table.down_to(option.depth)


def _module_table(
    loaded: LoadedModel, patterns: Sequence[str], *, shapes: tuple[NoiseShape, ...], option: options.Layers
) -> ModuleTable:
    """List modules after a pass over noise or inputs by name; without a pass, a warning has the reason."""
    from hookscope.inspection.forward import list_modules
    from hookscope.inspection.run import unseen_in_scripts
    from hookscope.models.input_spec import shape_option
    from hookscope.results.network import ModuleTable

    warnings = loaded.warnings
    batch = _shown_input(loaded, shapes, option)
    if batch is None:
        remedy = shape_option(loaded.module)
        warnings += (f"No shapes: the input shape cannot be inferred from the first layer. Give {remedy}.",)
    args, kwargs = (None, None) if batch is None else (batch.args, batch.kwargs)
    rows, failure = list_modules(loaded.module, args, patterns, kwargs=kwargs, ops=option.ops)
    if option.ops:
        warnings += unseen_in_scripts(dict(loaded.module.named_modules()))
    return ModuleTable(loaded.info, rows, failure, warnings, loaded.notes)


def _with_cost(
    table: ModuleTable,
    loaded: LoadedModel,
    real: LoadedModel | None,
    shapes: tuple[NoiseShape, ...],
    option: options.Layers,
) -> ModuleTable:
    """Return the table with costs, or with a warning why there are none."""
    from hookscope.errors import ModelError
    from hookscope.inspection.cost import Call, network_cost

    def call_of(model: LoadedModel) -> Call | None:
        batch = _shown_input(model, shapes, option)
        return None if batch is None else Call(model.module, batch.args, batch.kwargs)

    counted = call_of(loaded)
    if counted is None:
        return replace(table, warnings=(*table.warnings, "No cost: the network has not run."))
    call = counted if real is None or real is loaded else call_of(real)
    try:
        cost = network_cost(call or counted, None if call is counted else counted)
    except ModelError as error:
        return replace(table, warnings=(*table.warnings, f"No cost: {error}"))
    missing = () if real is not None else (_TOO_LARGE_TO_TIME,)
    return replace(table, cost=cost, warnings=(*table.warnings, *missing))


def _shown_input(loaded: LoadedModel, shapes: tuple[NoiseShape, ...], option: options.Layers) -> Batch | None:
    """Return the batch to list shapes for: inputs by name, noise, or both; None if the shape of noise is not known."""
    from hookscope.inputs.batches import to_device
    from hookscope.inputs.named import named_batch, named_inputs, with_named
    from hookscope.inputs.noise import noise_and_named, noise_batch
    from hookscope.inspection.device import placement
    from hookscope.models.input_spec import example_shape
    from hookscope.models.noise_arguments import noise_arguments
    from hookscope.results.noise_shapes import NoiseShape

    by_name = named_inputs(option.input, loaded.preprocessing)
    if not shapes and all(named_input.record is None for named_input in by_name):
        shape = loaded.example_shape or example_shape(loaded.module, loaded.preprocessing)
        if shape is None:
            return None
        shapes = (NoiseShape(shape),)
    shapes = noise_arguments(shapes, loaded.module, named=[named_input.name for named_input in by_name])
    shapes, by_name = noise_and_named(shapes, by_name, 0, with_others=False)
    if shapes:
        batch = noise_batch(shapes, 0, loaded.preprocessing.kind)
        batch = with_named(batch, by_name, len(batch.indices))
    else:
        batch = named_batch(by_name)
    return to_device(batch, *placement(loaded.module))
