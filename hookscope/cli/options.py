"""Options as typer takes them, and the arguments that several commands share."""

from collections.abc import Callable
from dataclasses import Field
from functools import partial, wraps
from inspect import Parameter, signature
from typing import Annotated, Any

import typer

from hookscope.cli.completion import complete_layer, complete_model
from hookscope.options import in_help, on_command_line, text_type

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A torchvision name (resnet34), timm:NAME, 'demo', file.py:factory, package.module:factory, a weights "
        "file, or a folder of weights (Hugging Face, distributed).",
        autocompletion=complete_model,
    ),
]
Images = Annotated[
    list[str] | None,
    typer.Argument(metavar="IMAGE", help="Pictures, tensor files (.npy, .pt, .safetensors), folders or globs."),
]


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command whose last parameter, `option`, is spread into the options of its class, for typer."""
    arguments = dict(signature(command).parameters)
    if "option" not in arguments:
        return command
    kind = arguments.pop("option").annotation
    options = in_help(kind)
    completes = not {"model", "a"}.isdisjoint(arguments)

    @wraps(command)
    def spread(**kwargs: Any) -> Any:
        values = {option.name: kwargs.pop(option.name) for option, _ in options}
        return command(**kwargs, option=kind(**{name: value for name, value in values.items() if value is not None}))

    parameters = [*arguments.values(), *(_parameter(*option, completes=completes) for option in options)]
    spread.__signature__ = signature(command).replace(  # type: ignore[attr-defined]
        parameters=[parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread


def _parameter(field: "Field[Any]", section: str, *, completes: bool) -> Parameter:
    """Return an option as typer takes it: "--layer -l PATTERN  Layers by name" has names, metavar and help."""
    here = on_command_line(field)
    usage, _, text = here.help.rpartition("  ")
    names = [word for word in usage.split() if word.startswith("-")]
    metavar = next((word for word in usage.split() if not word.startswith("-")), None)
    flag = field.name.replace("_", "-")
    turns_off = field.default is True
    option = partial(
        typer.Option,
        *(names or [f" /--no-{flag}" if turns_off else f"--{flag}"]),
        metavar=metavar,
        help=text,
        min=here.bounds[0],
        max=here.bounds[1],
        show_default=not turns_off,
        rich_help_panel=section,
    )
    info = option(autocompletion=complete_layer) if completes and field.name == "layer" else option()
    default = field.default if here.command_default is None else here.command_default
    return Parameter(
        field.name,
        Parameter.KEYWORD_ONLY,
        default=None if default == () else default,
        annotation=Annotated[text_type(field), info],
    )
