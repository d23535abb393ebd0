# ruff: noqa: SLF001 - graphs and handles of scripts are private to torch; `hookable` survives their absence
"""TorchScript as a tree of ordinary modules on which hooks fire.

torch refuses hooks on script modules, and a script runs without asking Python. So each call of a layer in the graphs of
a freshly loaded script is replaced by an operator of ours, which calls a module of the layer's name and class instead.
That module runs its hooks like any other, and in between the layer's own compiled method. Parameters, buffers and mode
are the script's own.

Operations inside a script are not seen. The graph interface is private to torch: where it is missing, and where the
graphs have no calls left (frozen, optimised), the network runs as it is, and only its output and its parameters can be
seen.
"""

import re
from collections import UserDict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from hookscope.models.module_stubs import always_training, layer_class, set_sizes, some_layers
from hookscope.models.scriptgraph import Plan, define_weights, groups, permutation, planned, reroute


class _Tensors(UserDict[str, Tensor]):
    """The parameters or buffers of a script module, live: what either side assigns, the other has."""

    def __init__(self, view: Any) -> None:
        self.data = view  # torch's own, which lacks part of what a dictionary does

    def __iter__(self) -> Iterator[str]:
        return iter(self.data.keys())


class ScriptLayer(nn.Module):
    """Stands for one module of a script: hooks fire on it, and its forward is the script's."""

    def __init__(self, script: Any, taken: dict[int, tuple[Any, nn.Parameter]]) -> None:
        """Take over the tensors of a script module; `taken` has them by identity, so that tied ones stay tied."""
        handle = script._c
        self.__dict__["_script"] = handle
        self.__dict__["_method"] = "forward"
        mode = self.training
        nn.Module.__init__(self)  # not super's: a borrowed class would make parameters of its own
        self.training = mode
        for name, tensor in script._parameters.items():
            made = taken.setdefault(id(tensor), (tensor, nn.Parameter(tensor.detach(), tensor.requires_grad)))
            handle.setattr(name, made[1])
        self.__dict__["_parameters"] = _Tensors(script._parameters)
        self.__dict__["_buffers"] = _Tensors(script._buffers)

    @property
    def training(self) -> bool:
        """The script's own mode. A frozen one has none, and evaluates."""
        handle = self.__dict__["_script"]
        return bool(handle.hasattr("training") and handle.getattr("training"))

    @training.setter
    def training(self, mode: bool) -> None:
        handle = self.__dict__["_script"]
        if handle.hasattr("training"):
            handle.setattr("training", mode)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the script's method, as written: torch would fuse and rearrange it after the first runs."""
        method = self.__dict__["_script"]._get_method(self.__dict__["_method"])
        try:
            with torch.jit.optimized_execution(False):  # type: ignore[attr-defined] # documented all the same
                return method(*args, **kwargs)
        except BaseException as error:
            if not _raised and isinstance(error, RuntimeError | torch.jit.Error):
                raise RuntimeError(_cause_of(error)) from error
            if not _raised:
                raise
        raise _raised.pop()  # here, where the interpreter's report does not become its context


_layers: WeakValueDictionary[Any, ScriptLayer] = WeakValueDictionary()
"""What stands for a script module, by the latter's handle, whose hash and equality are those of the object."""

_raised: list[BaseException] = []
"""The exception of Python code called by a running script; the interpreter of scripts would turn it into text."""

_numbers = count()  # of our operators, one for each way of returning


def hookable(load: Callable[[], Any]) -> tuple[nn.Module, tuple[str, ...]]:
    """Return modules that stand for those of a script and run it with their hooks, and what a reader must be told.

    A list or dictionary that a layer takes or returns is copied on the way; where a layer changes one it was given, the
    call is left alone. `load` loads the script, a `RecursiveScriptModule` that has not run yet: its graphs are changed.
    It is called again if they turn out not to be changeable, or where looking into them would fix them as they are.
    """
    script = load()
    try:
        plan = planned(script, cache(load))
        for call in plan.calls:
            reroute(*call, _operator(call[2]))
        for graph, node in plan.attentions:
            define_weights(graph, node)
        limit = "" if plan.calls or _is_one_layer(script) else "its code does not say where its layers are called"
    except (AttributeError, RuntimeError, TypeError):  # this torch has other graphs, and some may be half changed
        script, plan, limit = load(), Plan(), "this version of torch does not let hooks in"
    root = _layer(script, {}, {})
    remarks = []
    if limit:
        remarks.append(f"only the output of the whole network and its parameters can be seen: {limit}.")
    names = [name for name, _ in script.named_modules()]
    if skipped := [name for name in names if name in plan.skipped]:
        reason = "what they take or return cannot pass through Python."
        remarks.append(f"no hook can reach {some_layers(skipped)}: {reason}")
    if passed := [name for name in names if name in plan.traced_away]:
        remarks.append(
            f"tracing kept nothing of {some_layers(passed)}: most likely they return their inputs unchanged."
        )
    if plan.forced:
        remarks.append(always_training(plan.forced))
    return root, tuple(remarks)


@cache
def _library() -> torch.library.Library:
    return torch.library.Library("hookscope", "FRAGMENT")  # type: ignore[no-untyped-call] # torch's


@cache
def _operator(returns: tuple[str, ...]) -> str:
    name = f"call_{next(_numbers)}"
    written = returns[0] if len(returns) == 1 else f"({', '.join(returns)})"
    # Conservative: it may do anything, so torch neither drops nor moves nor merges it.
    schema = f"{name}(Any layer, str method, Any arguments) -> {written}"
    _library().define(schema, alias_analysis="CONSERVATIVE")  # type: ignore[no-untyped-call] # torch's
    _library().impl(name, _call, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call] # torch's
    return f"hookscope::{name}"


def _call(handle: Any, method: str, arguments: tuple[object, ...]) -> object:
    layer = _layers[handle]
    layer.__dict__["_method"] = method
    try:
        return layer(*arguments)
    except BaseException as error:
        _raised[:] = [error]
        raise
    finally:
        layer.__dict__["_method"] = "forward"


def _layer(script: Any, cached: dict[Any, ScriptLayer], taken: dict[int, tuple[Any, nn.Parameter]]) -> ScriptLayer:
    handle = script._c
    if handle not in cached:
        made: Any = layer_class(ScriptLayer, _python_name(script))(script, taken)
        cached[handle] = _layers[handle] = made
        for name, child in script._modules.items():
            made._modules[name] = _layer(child, cached, taken)
        set_sizes(made, groups(script), permutation(script))
    return cached[handle]


def _python_name(script: Any) -> str:
    """Return the dotted name of the class: "__torch__.torch.nn.modules.conv.___torch_mangle_3.Conv2d" without marks."""
    parts = script._c._type().qualified_name().split(".")
    return ".".join(part for part in parts if part != "__torch__" and not part.startswith("___torch_mangle_"))


def _cause_of(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    starts = [index for index, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception): ", line)]
    if not starts:
        return str(error)
    return "\n".join([lines[starts[-1]].partition(": ")[2], *lines[starts[-1] + 1 :]]).strip()


def _is_one_layer(script: Any) -> bool:
    """Tell whether there is nothing but the root. Freezing takes the others away, and with them the root's mode."""
    return not len(script._modules) and bool(script._c.hasattr("training"))
