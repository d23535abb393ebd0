"""Options and arguments as typer takes them, and what a shell completes in them."""

from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import Field
from functools import wraps
from inspect import Parameter, signature
from io import StringIO
from typing import Annotated, Any

import typer

from hookscope.options import Layers, in_help, on_command_line, text_type

# Metavar, two blanks and help of each argument, of one command or of all that have it.
_ARGUMENTS = {
    "model": "MODEL  A torchvision name (resnet34), timm:NAME, 'demo', file.py:factory, package.module:factory, a "
    "weights file, or a folder of weights (Hugging Face, distributed).",
    "images": "IMAGE  Pictures, tensor files (.npy, .pt, .safetensors), folders or globs.",
    "activations images": "IMAGE  Pictures, tensor files (.npy, .pt, .safetensors), folders or globs; optional with "
    "--input or --input-shape; default for `demo`: a bundled cat.",
    "grads images": "IMAGE  Pictures, tensor files, folders or globs; default: seeded noise.",
    "diff a": "A  The reference: a model, as MODEL of `activations`, or a run directory.",
    "diff b": "B  The other model or run, or 'same': A again, with the options …-b.",
    "diff images": "IMAGE  Pictures, tensor files (.npy, .pt, .safetensors), folders or globs; none: compare weights "
    "only.",
    "check checkpoints": "CHECKPOINT  Weights files, folders of them or globs, or any other form of MODEL.",
    "checkpoint file": "FILE  A weights file, the index of a sharded one, or the folder of a distributed one.",
    "history files": "FILES  Checkpoints of one run: a folder of them, a glob, or several files.",
    "history images": "IMAGE  Pictures, tensor files (.npy, .pt, .safetensors), folders or globs to run each "
    "checkpoint on; without them, only weights are judged.",
    "survey model": "MODEL  As for `activations`; none with --merge.",
    "survey images": "INPUT  The data: folders, globs, pictures, tensor files (.npy, .pt, .safetensors); none with "
    "--merge.",
    "watch script": "SCRIPT  The training script.",
    "models pattern": "PATTERN  A part of a name, or a glob such as 'resnet*'.",
    "report run": "RUN  Run directory of `activations`, `grads`, `attribute`, `attention`, `diff`, `history` or "
    "`survey`, or the folder of a watched training.",
}


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command as typer takes it: arguments with their help, and the options of the class of `option`.

    A command gets only the values that are given: its own defaults hold for the others.
    """
    parameters = dict(signature(command).parameters)
    kind = parameters.pop("option").annotation if "option" in parameters else None
    options = in_help(kind) if kind else []
    completes = not {"model", "a"}.isdisjoint(parameters)

    @wraps(command)
    def spread(**kwargs: Any) -> Any:
        values = {name: value for name, value in kwargs.items() if value is not None}
        chosen = {option.name: values.pop(option.name) for option, _ in options if option.name in values}
        return command(**values, option=kind(**chosen)) if kind else command(**values)

    taken = [
        *(_argument(parameter, command.__name__) for parameter in parameters.values()),
        *(_option(*option, completes=completes) for option in options),
    ]
    spread.__signature__ = signature(command).replace(parameters=taken)  # type: ignore[attr-defined]
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in taken}
    return spread


def _argument(parameter: Parameter, command: str) -> Parameter:
    """Turn a parameter into a typer argument; with () as its default it takes several values."""
    name, default = parameter.name, parameter.default
    metavar, _, text = (_ARGUMENTS.get(f"{command} {name}") or _ARGUMENTS.get(name, "")).partition("  ")
    if not text:  # what typer itself provides
        return parameter.replace(kind=Parameter.KEYWORD_ONLY)
    completion = _complete_model if name == "model" else None
    info = typer.Argument(metavar=metavar, help=text, autocompletion=completion)
    if default == ():
        return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[list[str] | None, info])
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[parameter.annotation, info])


def _option(field: "Field[Any]", section: str, *, completes: bool) -> Parameter:
    """Turn a field into a typer option. Its help may begin with names and a metavar: "--layer -l PATTERN  Layers"."""
    here = on_command_line(field)
    usage, _, text = here.help.rpartition("  ")
    names = [word for word in usage.split() if word.startswith("-")]
    metavar = next((word for word in usage.split() if not word.startswith("-")), None)
    flag = field.name.replace("_", "-")
    turns_off = field.default is True
    info = typer.Option(
        *(names or [f" /--no-{flag}" if turns_off else f"--{flag}"]),
        metavar=metavar,
        help=text,
        min=here.bounds[0],
        max=here.bounds[1],
        show_default=not turns_off,
        rich_help_panel=section,
        autocompletion=_complete_layer if completes and field.name == "layer" else None,
    )
    default = field.default if here.command_default is None else here.command_default
    return Parameter(
        field.name,
        Parameter.KEYWORD_ONLY,
        default=None if default == () else default,
        annotation=Annotated[text_type(field), info],
    )


def _complete_model(incomplete: str) -> list[str]:
    """Complete the name of a network; if no name begins so, shells offer files."""
    from hookscope.models.names import model_names

    return [name for name in model_names() if name.startswith(incomplete)]


def _complete_layer(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the name or type of a layer, once the name of a network has been typed.

    Files are left alone: to build the network of `net.py:build`, or to read a weights file, would run code or take long
    for a completion.
    """
    from hookscope.models.names import model_names

    # MODEL is usually parsed. While the option that is completed lacks its value, parsing ends there, and MODEL is the
    # first of the arguments that are left over.
    model = context.params.get("model") or next(iter(context.args), None)
    if model not in model_names():
        return []
    from hookscope.commands.layers import layers as run_layers

    unread = StringIO()  # a network may print while it is built
    with suppress(Exception), redirect_stdout(unread), redirect_stderr(unread):
        rows = run_layers(str(model), option=Layers()).rows
        patterns = {name for row in rows for name in (row.layer, f"type:{row.kind.lower()}") if name}
        return sorted(name for name in patterns if name.startswith(incomplete))
    return []
