"""`hookscope layers`: the module tree, and what a pattern would select."""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

import typer

from hookscope.cli.console import consoles, report
from hookscope.cli.options import (
    AllowMissing,
    AllowUnexpected,
    Arch,
    InputShape,
    Json,
    Key,
    Layer,
    Model,
    ModelArg,
    Trust,
    file_options,
    floating_dtype,
    parse_shape,
)
from hookscope.errors import ModelError

if TYPE_CHECKING:
    from hookscope.models import LoadedModel
    from hookscope.results.activations import Failure
    from hookscope.results.network import ModuleRow


def layers(
    model: Model,
    layer: Layer = None,
    arch: Arch = None,
    model_arg: ModelArg = None,
    trust: Trust = False,
    key: Key = None,
    allow_missing: AllowMissing = None,
    allow_unexpected: AllowUnexpected = None,
    input_shape: InputShape = None,
    json: Json = False,
) -> int:
    """List MODEL's modules with types, parameters and shapes, and mark what the patterns select.

    Shapes come from a forward pass on the meta device, which computes nothing; where that fails, from a real one.

    \b
    hookscope layers resnet34
    hookscope layers resnet34 --layer conv --layer '!downsample'
    hookscope layers net.py:build --input-shape 1,3,32,32
    """
    from hookscope.models import build_on_meta, load_model, parse_model
    from hookscope.render.terminal import failure_panel, module_table, note_lines, warnings_panel
    from hookscope.runs.serialize import modules_to_json

    shape = None if input_shape is None else parse_shape(input_shape)
    arguments = model_arg or ()
    reading = file_options(trust, key, allow_missing, allow_unexpected)
    with redirect_stdout(sys.stderr if json else sys.stdout):  # a model may print
        loaded = build_on_meta(model, arch=arch, model_arguments=arguments, options=reading)
        warnings, notes = loaded.warnings, loaded.notes
        if _device(loaded) == "meta" and _list(loaded, (), shape)[1] is not None:
            # Data-dependent code (non-maximum suppression, say) needs values.
            weights = "auto" if parse_model(model).form == "weights" else "none"
            loaded = load_model(model, weights=weights, arch=arch, model_arguments=arguments, options=reading)
        rows, failure, remark = _list(loaded, layer or (), shape)
    tables, messages = consoles(json=json)
    if remark or warnings:
        messages.print(warnings_panel([*warnings, *filter(None, [remark])]))
    if json:
        typer.echo(modules_to_json(rows), nl=False)
    else:
        if notes:
            tables.print(note_lines(notes))
        tables.print(module_table(rows, width=tables.width, title=f"{loaded.info.name} ({loaded.info.kind})"))
    if failure is None:
        return 0
    messages.print(failure_panel(failure))
    return report(ModelError(f"{loaded.info.name} raised in a forward pass; the shapes up to there are listed."))


def _list(
    loaded: "LoadedModel", patterns: Sequence[str], shape: tuple[int, ...] | None
) -> "tuple[tuple[ModuleRow, ...], Failure | None, str]":
    """List a model's modules after a pass over noise; the remark says why there was none."""
    from hookscope.inputs import noise_batch, to_device
    from hookscope.inspection.forward import list_modules
    from hookscope.models import example_shape

    shape = shape or loaded.example_shape or example_shape(loaded.module, loaded.preprocessing)
    if shape is None:
        rows, failure = list_modules(loaded.module, None, patterns)
        return rows, failure, "No shapes: the first layer does not tell what input it takes. Give --input-shape."
    noise = noise_batch(shape, 0, loaded.preprocessing.kind)
    batch = to_device(noise, _device(loaded), floating_dtype(loaded.module))
    return *list_modules(loaded.module, batch.args, patterns), ""


def _device(loaded: "LoadedModel") -> str:
    return next((str(parameter.device) for parameter in loaded.module.parameters()), "cpu")
