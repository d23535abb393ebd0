# ruff: noqa: SLF001 - graphs and handles of scripts are private to torch; `hookable` survives their absence
"""TorchScript as a tree of ordinary modules on which hooks fire.

torch refuses hooks on script modules, and a script runs without asking Python. So each call of a layer in the graphs of
a freshly loaded script is replaced by an operator of ours, which calls a module of the layer's name and class instead.
That module runs its hooks like any other, and in between the layer's own compiled method. Parameters, buffers and mode
are the script's own.

Operations are observed in copies of the graphs, which run each operation from Python in the same way, and run only
while operations are observed.

The graph interface is private to torch. Where it is missing, the network runs as it is, and only its output and its
parameters can be seen; where the graphs have no calls left (frozen, optimised), also the operations.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

from hookscope.hooks.callers import has_own_operations
from hookscope.hooks.operations import observing
from hookscope.models.module_stubs import always_training, layer_class, set_sizes, some_layers
from hookscope.models.scriptgraph import Plan, define_weights, groups, instances_of, permutation, planned, reroute
from hookscope.models.scriptoperations import Observable, ScriptOperation, cause_of
from hookscope.models.scriptsource import Origins


class _Tensors(MutableMapping[str, Tensor]):
    """The parameters or buffers of a script module, live: what either side assigns, the other has."""

    def __init__(self, view: Any) -> None:
        """Wrap torch's own view, which lacks part of what a dictionary does."""
        self._view = view

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._view[name]
        return tensor

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self._view[name] = tensor

    def __delitem__(self, name: str) -> None:
        del self._view[name]  # raises: a script keeps its attributes

    def __iter__(self) -> Iterator[str]:
        return iter(self._view.keys())

    def __len__(self) -> int:
        return len(self._view)


class ScriptLayer(nn.Module):
    """Stands for one module of a script: hooks fire on it, and its forward is the script's."""

    def __init__(self, script: Any, taken: dict[int, tuple[Any, nn.Parameter]]) -> None:
        """Take over the tensors of a script module, not its children.

        `taken` has, by the identity of the script's tensor, that and the parameter made of it, so that tied ones stay
        tied.
        """
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
                if observing() is not None and (observable := self._observable(method, args, kwargs)) is not None:
                    return observable()
                return method(*args, **kwargs)
        except BaseException as error:
            if not _raised and isinstance(error, RuntimeError | torch.jit.Error):
                raise RuntimeError(cause_of(error)) from error
            if not _raised:
                raise
        raise _raised.pop()  # here, where the interpreter's report does not become its context

    @property
    def with_torchs_operations(self) -> bool:
        """Whether operations of torch's own layers count as the network's, as nothing else of those layers is left."""
        return self in _graphs and _graphs[self].with_torchs

    @property
    def unseen_operations(self) -> tuple[str, ...]:
        """Names of layers, functions and types of the whole script whose operations were met and cannot be seen."""
        return tuple(_graphs[self].unseen) if self in _graphs else ()

    def _observable(self, method: Any, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
        """Return a call of the method's copy that shows its operations; None if there is none."""
        if self not in _graphs or not has_own_operations(self):
            return None
        handle = self.__dict__["_script"]
        function = _graphs[self].method(handle, self.__dict__["_method"])
        if function is None:
            return None
        _, *expected = method.schema.arguments
        given: list[object] = [*args]
        for argument in expected[len(args) :]:
            if argument.name not in kwargs and not argument.has_default_value():
                return None  # the method itself says what is missing
            given.append(kwargs.get(argument.name, argument.default_value))
        if len(given) != len(expected) or not kwargs.keys() <= {each.name for each in expected[len(args) :]}:
            return None
        return lambda: function(handle, *given)


_layers: WeakValueDictionary[Any, ScriptLayer] = WeakValueDictionary()
"""What stands for a script module, by the latter's handle, whose hash and equality are those of the object."""

_graphs: WeakKeyDictionary[ScriptLayer, Observable] = WeakKeyDictionary()
"""The graphs of the whole script, with their operations: not in the layers, whose state a run may put back."""

_raised: list[BaseException] = []
"""The exception of Python code called by a running script; the interpreter of scripts would turn it into text."""

_operators: dict[tuple[tuple[str, ...], str], str] = {}
"""Our operators by what they return and do."""

_library: list[torch.library.Library] = []


_NO_CALLS = "the file does not say where its layers are called"


class Script(NamedTuple):
    """A script that has been read: its root, a `RecursiveScriptModule`, its functions by qualified name, its file."""

    root: Any
    functions: Mapping[str, Any]
    path: Path


def read_script(path: Path) -> Script:
    """Read a TorchScript archive as `torch.jit.load` does, onto the CPU."""
    try:
        read_module: Any = torch._C.import_ir_module
        unit: Any = torch._C.CompilationUnit()
        read = read_module(unit, str(path), torch.device("cpu"), {}, False)
        wrap = import_module("torch.jit._recursive").wrap_cpp_module
    except (AttributeError, TypeError):  # this torch does it in another way
        return Script(torch.jit.load(path, map_location="cpu"), {}, path)  # type: ignore[no-untyped-call] # torch's
    return Script(wrap(read), {each.qualified_name: each for each in unit.get_functions()}, path)


def hookable(load: Callable[[], Script]) -> tuple[nn.Module, tuple[str, ...]]:
    """Return modules that stand for those of a script, with their names and class names, and run it with their hooks.

    A list or dictionary that a layer takes or returns is copied on the way; where a layer changes one it was given, the
    call is left alone. `load` loads the script, which has not run yet: its graphs are changed. It is called again if
    they turn out not to be changeable, or where looking into them would fix them as they are.

    Returns the root, and what a reader must be told, such as which modules run without their hooks.
    """
    script, functions, path = load()
    twin = cache(load)
    try:
        plan = planned(script, lambda: twin().root)
        for call in plan.calls:
            reroute(*call, _operator(call[2]))
        for graph, node in plan.attentions:
            define_weights(graph, node)
        limit = "" if plan.calls or _is_one_layer(script) else _NO_CALLS
    except (AttributeError, RuntimeError, TypeError):  # this torch has other graphs, and some may be half changed
        (script, functions, path), plan, limit = load(), Plan(), "this version of torch does not let hooks in"
    instances = instances_of(script)
    graphs = Observable(
        Origins(path.absolute()), functions, instances, bool(limit), lambda given: _operator(given, "operate")
    )
    root = _layer(script, {}, {}, graphs)
    remarks = []
    if limit:
        seen = "the output of the whole network and its parameters"
        seen = f"{seen}, and with --ops its operations," if limit is _NO_CALLS else seen
        remarks.append(f"only {seen} can be seen: {limit}.")
    names = [name for name, _ in script.named_modules()]
    if plan.skipped:
        skipped = some_layers([name for name in names if name in plan.skipped])
        remarks.append(f"no hook can reach {skipped}: what they take or return cannot pass through Python.")
    if plan.traced_away:
        passed = some_layers([name for name in names if name in plan.traced_away])
        remarks.append(f"tracing kept nothing of {passed}: most likely they return their inputs unchanged.")
    if plan.forced:
        remarks.append(always_training(plan.forced))
    return root, tuple(remarks)


def _operator(returns: tuple[str, ...], what: Literal["call", "operate"] = "call") -> str:
    """Return the name of our operator with these returns, registered when first asked for."""
    if (returns, what) not in _operators:
        if not _library:
            _library.append(torch.library.Library("hookscope", "FRAGMENT"))  # type: ignore[no-untyped-call] # torch's
        name = f"{what}_{len(_operators)}"
        written = returns[0] if len(returns) == 1 else f"({', '.join(returns)})"
        given, function = _GIVEN[what]
        # Conservative: it may do anything, so torch neither drops nor moves nor merges it.
        schema = f"{name}({given}, Any arguments) -> {written}"
        _library[0].define(schema, alias_analysis="CONSERVATIVE")  # type: ignore[no-untyped-call] # torch's
        _library[0].impl(name, function, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call] # torch's
        _operators[returns, what] = f"hookscope::{name}"
    return _operators[returns, what]


def _call(handle: Any, method: str, arguments: tuple[object, ...]) -> object:
    """Call what stands for a script module, from inside the script."""
    layer = _layers[handle]
    layer.__dict__["_method"] = method
    try:
        return layer(*arguments)
    except BaseException as error:
        _raised[:] = [error]
        raise
    finally:
        layer.__dict__["_method"] = "forward"


def _operate(handle: Any, index: int, arguments: tuple[object, ...]) -> object:
    """Run an operation of what stands for a script module, from inside the script."""
    layer = _layers[handle]
    operation: ScriptOperation = _graphs[layer].operations[index]
    name, source = operation.name, operation.source
    try:
        mode = observing()
        if mode is None:
            return operation(*arguments)
        with torch._C.DisableTorchFunction():
            if name != "setitem":
                return mode.run(name, operation, arguments, {}, sys._getframe(), source, layer)
            returned: list[object] = []  # in Python, assigning to a subscript returns nothing
            assign = lambda *given: returned.append(operation(*given))  # noqa: E731
            mode.run(name, assign, arguments, {}, sys._getframe(), source, layer)
            return returned[0]
    except BaseException as error:
        _raised[:] = [error]
        raise


_GIVEN = {"call": ("Any layer, str method", _call), "operate": ("Any layer, int operation", _operate)}
"""The leading arguments of our operators, and their functions."""


def _layer(
    script: Any, known: dict[Any, ScriptLayer], taken: dict[int, tuple[Any, nn.Parameter]], graphs: Observable
) -> ScriptLayer:
    """Return the layers that stand for a script module and those below it: one object for all of its names."""
    handle = script._c
    if handle not in known:
        made: Any = layer_class(ScriptLayer, _python_name(script))(script, taken)
        known[handle] = _layers[handle] = made
        _graphs[made] = graphs
        for name, child in script._modules.items():
            made._modules[name] = _layer(child, known, taken, graphs)
        set_sizes(made, groups(script), permutation(script))
    return known[handle]


def _python_name(script: Any) -> str:
    """Return the dotted name of the class: "__torch__.torch.nn.modules.conv.___torch_mangle_3.Conv2d" without marks."""
    parts = script._c._type().qualified_name().split(".")
    return ".".join(part for part in parts if part != "__torch__" and not part.startswith("___torch_mangle_"))


def _is_one_layer(script: Any) -> bool:
    """Tell whether there is nothing but the root. Freezing takes the others away, and with them the root's mode."""
    return not len(script._modules) and bool(script._c.hasattr("training"))
