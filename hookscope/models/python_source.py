"""Networks out of a user's own Python: `net.py:build` and `package.module:build`."""

import ast
import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hookscope.errors import UsageError
from hookscope.models.builder_weights import kept_remark, samples, watched_loading
from hookscope.models.checkpoint import looks_like_file
from hookscope.models.construction import LoadedModel, model_info, seeded
from hookscope.models.input_spec import default_preprocessing
from hookscope.models.statedict import load_into
from hookscope.models.user_code import check_readable, find_attribute, import_file, import_module, importable, user_code
from hookscope.models.weight_choice import BuildOptions, ChosenWeights
from hookscope.options import Arguments
from hookscope.parameters import arg
from hookscope.text import printable


def parse_arguments(model_args: Arguments) -> dict[str, Any]:
    """Read `--model-arg` values such as "width=2": a Python literal, or else the text itself; UsageError for others.

    A mapping has the values already.
    """
    if isinstance(model_args, Mapping):
        return dict(model_args)
    arguments: dict[str, Any] = {}
    for text in [model_args] if isinstance(model_args, str) else model_args:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            raise UsageError(f"{arg('model_arg')} '{printable(text)}' is not of the form NAME=VALUE, such as width=2.")
        if name in arguments:
            raise UsageError(f"{arg('model_arg')} {name} is given twice.")
        try:
            arguments[name] = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            arguments[name] = value
    return arguments


def load_python(source: str, factory: str, options: BuildOptions) -> LoadedModel:
    """Build a network with `factory`, dots allowed, of a path that ends in ".py" or an importable module.

    Weights "auto" and "none" leave the network as it was made. On the meta device it is made there if the factory can;
    a weights file is read and has to fit, but is not loaded. Raises InputError, ModelNotFoundError, ModelError if the
    user's code raises, UsageError if the factory does not take the arguments, makes no Module, or the weights are not a
    file, and what reading weights raises.
    """
    is_file = source.endswith(".py")
    name = f"{Path(source).name if is_file else source}:{factory}"
    weights = options.weights
    if isinstance(weights, str) and weights not in ("auto", "none") and not looks_like_file(weights):
        raise UsageError(f"{name} has no weights '{printable(weights)}'; give auto, none or a state dict file.")
    if is_file:
        check_readable(Path(source))
    with importable(Path(source).parent if is_file else Path.cwd(), is_file=is_file):
        with seeded(options.seed):
            home = import_file(Path(source)) if is_file else import_module(source)
        made = find_attribute(home, factory, source)
        with seeded(options.seed), watched_loading() as loads:
            module = _make(made, options.arguments, name, on_meta=options.on_meta)
    chosen = options.file_weights() or ChosenWeights(f"as built by {name}")
    checkpoint, notes = chosen.checkpoint, [*chosen.notes]
    misfits: tuple[str, ...] = ()
    if checkpoint is not None:
        built = samples(module) if loads and not options.on_meta else {}
        misfits = load_into(module, checkpoint.state, chosen.origin, options.file, notes=notes)
        notes += kept_remark(built, module, name)
    if options.on_meta:  # not before: on the way, tied weights become separate ones
        module = module.to("meta")
    info = model_info(
        name,
        module,
        "not loaded" if options.on_meta else chosen.origin,
        sha256=checkpoint.sha256 if checkpoint else None,
        categories=checkpoint.categories if checkpoint else (),
        arguments=options.arguments,
    )
    return LoadedModel(module, info, default_preprocessing(module), chosen.warnings + misfits, notes=tuple(notes))


def _make(made: object, arguments: Mapping[str, Any], name: str, *, on_meta: bool) -> nn.Module:
    if isinstance(made, nn.Module):
        if arguments:
            raise UsageError(f"{name} is a {type(made).__name__} already, so it takes no {arg('model_arg')}.")
        return copy.deepcopy(made) if on_meta else made  # others may hold the same object
    if not callable(made):
        raise UsageError(f"{name} is a {type(made).__name__}, neither a callable nor a Module.")
    _check_call(made, arguments, name)
    result: object = None
    if on_meta:
        with suppress(Exception, SystemExit), warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")  # of values that go nowhere
            result = made(**arguments)
    if result is None:
        with user_code(f"{name} raised while the network was built"):
            result = made(**arguments)
    if not isinstance(result, nn.Module):
        raise UsageError(f"{name} returned a value of type {type(result).__name__}, not a torch.nn.Module.")
    return result


def _check_call(factory: Callable[..., object], arguments: Mapping[str, Any], name: str) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        remedy = "" if arguments else " It is to return the network; a forward pass goes into a Module's forward."
        raise UsageError(
            f"{name}{printable(str(signature))} cannot be called with what {arg('model_arg')} gives: {error}.{remedy}"
        ) from error
