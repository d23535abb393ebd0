"""Networks out of a user's own Python: `net.py:build` and `package.module:build`."""

import ast
import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.errors import UsageError
from hookscope.models.construction import LoadedModel, replaced, seed_generators, seeded
from hookscope.models.input_spec import default_preprocessing
from hookscope.models.user_code import importable, imported, user_code
from hookscope.models.weight_choice import BuildOptions, ChosenWeights, load_named
from hookscope.options import Arguments
from hookscope.parameters import arg
from hookscope.text import an, counted, printable, some_of

# Values of a parameter that are compared, and names that a sentence lists.
_COMPARED_VALUES = 1024
_LISTED_NAMES = 3


def parse_arguments(model_args: Arguments) -> dict[str, Any]:
    """Read `--model-arg` values such as "width=2": a Python literal, or else the text itself; UsageError for others.

    A mapping has the values already.
    """
    if isinstance(model_args, Mapping):
        return dict(model_args)
    arguments: dict[str, Any] = {}
    for text in [model_args] if isinstance(model_args, str) else model_args:
        name, equals, value = map(str.strip, text.partition("="))
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
    name = f"{Path(source).name if source.endswith('.py') else source}:{factory}"
    if (weights := options.weights_name) is not None:
        raise UsageError(f"{name} has no weights '{printable(weights)}'; give auto, none or a file.")
    with seeded(options.seed), importable(source):
        made = imported(source, factory)
        seed_generators(options.seed)  # an import may have drawn, the first time
        with _watched_loading() as loads:
            module = _module_made_by(made, options.arguments, name, on_meta=options.on_meta)
    own = _memory_of(module.state_dict()) if loads else set()  # copies between parts of the network load nothing
    built = _samples(module) if not all(held <= own for held in loads) and not options.on_meta else {}
    chosen = options.file_weights() or ChosenWeights("not loaded" if options.on_meta else f"as built by {name}")
    loaded = load_named(name, chosen, options, lambda: module, lambda network: (default_preprocessing(network), (), ()))
    return replace(loaded, notes=(*loaded.notes, *_kept_remark(built, module, name))) if chosen.checkpoint else loaded


@contextmanager
def _watched_loading() -> Iterator[list[set[int]]]:
    loaded: list[set[int]] = []
    load = nn.Module.load_state_dict

    def load_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        loaded.append(_memory_of(args[0] if args else kwargs.get("state_dict")))
        return load(module, *args, **kwargs)

    with replaced(nn.Module, "load_state_dict", load_state_dict):
        yield loaded


def _memory_of(state: object) -> set[int]:
    values = state.values() if isinstance(state, Mapping) else ()
    tensors = [value for value in values if isinstance(value, Tensor) and not nn.parameter.is_lazy(value)]
    return {tensor.data_ptr() for tensor in tensors if tensor.layout is torch.strided}


def _samples(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: _first_values(parameter).clone()
        for name, parameter in module.named_parameters()
        if not (nn.parameter.is_lazy(parameter) or parameter.is_meta)
    }


def _first_values(parameter: Tensor) -> Tensor:
    return parameter.detach().reshape(-1)[:_COMPARED_VALUES]


def _kept_remark(built: Mapping[str, Tensor], module: nn.Module, name: str) -> list[str]:
    """Return a sentence on how many parameters equal the file's as built; [] without any to compare.

    `load_state_dict(strict=False)` silently drops every name that does not fit; the network then runs as it was
    initialised. Parameters of one value, as normalisation layers begin with, are not counted.
    """
    now = {key: _first_values(parameter) for key, parameter in module.named_parameters() if key in built}
    telling = {key: values for key, values in now.items() if len(values) and bool((values != values[0]).any())}
    if not telling:
        return []
    differing = [key for key, values in telling.items() if not torch.equal(values, built[key])]
    equal = len(telling) - len(differing)
    compared = f"{equal} of its {counted(len(telling), 'parameter')} equal{'s' if equal == 1 else ''} the file's"
    changed = some_of([printable(key, 80) for key in differing], _LISTED_NAMES)
    return [f"{name} loads weights itself; as built, {compared}{changed and f', and not {changed}'}."]


def _module_made_by(made: object, arguments: Mapping[str, Any], name: str, *, on_meta: bool) -> nn.Module:
    if isinstance(made, nn.Module):
        if arguments:
            raise UsageError(f"{name} is {an(type(made).__name__)} already: it takes no {arg('model_arg')}.")
        return copy.deepcopy(made) if on_meta else made  # others may hold the same object
    if not callable(made):
        raise UsageError(f"{name} is {an(type(made).__name__)}, neither a callable nor a Module.")
    _check_call(made, arguments, name)
    result: object = None
    if on_meta:
        with suppress(Exception, SystemExit), warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")  # values on the meta device go nowhere
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
        remedy = "" if arguments else " It must return the network; the forward pass goes into a Module."
        raise UsageError(
            f"{name}{printable(str(signature))} cannot be called with what {arg('model_arg')} gives: {error}.{remedy}"
        ) from error
