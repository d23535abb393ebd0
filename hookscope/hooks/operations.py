"""Observe the operations that a network's own forward code calls: torch functions, tensor methods and operators.

Hooks see modules; `F.relu(x)`, `x + identity` and `torch.cat` are seen by a `TorchFunctionMode`, which torch calls for
each of them. Calls inside torch's own layers do not count: the nearest Python code outside torch must have made the
call, while a module of the network ran. Results are unchanged.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from types import CodeType, FrameType, TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hookscope.errors import nearest
from hookscope.hooks.attributes import attribute_of
from hookscope.hooks.callers import (
    CALL,
    caller_of,
    code_of,
    have_own_operations,
    operation_name,
    runs_networks_code,
    source_line,
    stands_for_torchs,
    whose_code,
)
from hookscope.hooks.calls import CallHooks
from hookscope.hooks.interventions import Intervention, edit_inputs, edit_operation, separate_operation
from hookscope.hooks.observed import Operation
from hookscope.hooks.patterns import ACTIVATIONS, NOT_JUDGED, OperationPattern
from hookscope.hooks.pytree import constants_given, tensors_given, tensors_in
from hookscope.parameters import listing

T = TypeVar("T")

# The pattern of `--ops`, which may match nothing.
EVERYTHING = "op:*"

# The label of the whole model.
_ROOT = "(model)"


# The stack of active modes in this thread; the context managers of `torch.overrides` would cost several calls more.
_stack_size = torch._C._len_torch_function_stack
_pop, _push = torch._C._pop_torch_function_stack, torch._C._push_on_torch_function_stack


@dataclass(slots=True)
class OperationChoice:
    """The operations to observe and to edit, and the patterns that have selected one.

    Attributes:
        patterns: Patterns that select or exclude operations.
        edits: Edits, with the patterns of the operations they change.
        is_all: Whether no layers are selected besides the operations.
        for_rules: Whether to observe the operations that verdicts need, even if no pattern selects them.
        modules: All modules of the network by name; empty if the caller has not listed them yet.
        matched: Texts of the patterns that have selected an operation.
        seen: (module, operation) pairs that ran, and whether the patterns select any call of each.
    """

    patterns: Sequence[OperationPattern]
    is_all: bool = False
    edits: Sequence[tuple[OperationPattern, Intervention]] = ()
    for_rules: bool = False
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    seen: dict[tuple[str, str], bool] = field(default_factory=dict)
    matched: set[str] = field(default_factory=set)

    def missing(self) -> str:
        """Return the message if one pattern, or all together, selected nothing; "" if each selected something."""
        for pattern in (*self.patterns, *(pattern for pattern, _ in self.edits)):
            if pattern.text not in self.matched and pattern.text not in (EVERYTHING, ACTIVATIONS.text):
                labels = [text for module, name in self.seen for text in (f"op:{name}", f"{module}:{name}")]
                ran = nearest(pattern.text, labels, prefix="op:") if labels else " The network's own code called none."
                return f"No operation matches {pattern.text!r}.{ran} List them with {listing(ops=True)}."
        if self.is_all and not any(self.seen.values()) and any(pattern.exclude for pattern in self.patterns):
            texts = ", ".join(repr(pattern.text) for pattern in self.patterns)
            return f"The patterns {texts} leave no operation: drop an exclusion."
        return ""

    def edits_of(self, owner: str, name: str) -> list[Intervention]:
        """Return the edits of a module's operation, in order."""
        if not self.edits:
            return []
        matches = [(pattern, edit) for pattern, edit in self.edits if pattern.matches(owner or _ROOT, name)]
        self.matched.update(pattern.text for pattern, _ in matches)
        return [edit for _, edit in matches]

    def observes(self, owner: str, name: str) -> bool:
        """Tell whether any call of a module's operation is observed."""
        matching = self._matching(owner, name)
        leaves_out_all = any(pattern.exclude and pattern.call is None for pattern in matching)
        of_all = [pattern for pattern in matching if pattern.call is None or pattern.exclude or leaves_out_all]
        self.matched.update(pattern.text for pattern in of_all)
        is_selected = not leaves_out_all and any(not pattern.exclude for pattern in matching)
        self.seen[owner or _ROOT, name] = is_selected
        return is_selected or (self.for_rules and name not in NOT_JUDGED)

    def lists(self, owner: str, name: str, call: int) -> bool:
        """Tell whether the patterns select a call of an operation, from 0; otherwise only verdicts need it."""
        matching = [pattern for pattern in self._matching(owner, name) if pattern.call in (None, call)]
        self.matched.update(pattern.text for pattern in matching)
        return bool(matching) and not any(pattern.exclude for pattern in matching)

    def _matching(self, owner: str, name: str) -> list[OperationPattern]:
        return [pattern for pattern in self.patterns if pattern.matches(owner or _ROOT, name)]


class _Caller(NamedTuple):
    """A module that runs while an operation is called.

    Attributes:
        name: None for a module that is not the network's, or runs none of its code.
        code: The code of its forward; None if forward is no plain function.
        is_own: Whether operations in it are observed; False for a layer that replaces one of torch's.
    """

    name: str | None
    code: CodeType | None = None
    is_own: bool = False


class _Kind(NamedTuple):
    """What all calls of one operation by one module share."""

    label: str
    owner: str
    is_observed: bool
    edits: Sequence[Intervention]


class OperationMode(TorchFunctionMode, Generic[T]):
    """Observes the operations that modules call, with the hooks of one capture."""

    def __init__(self, hooks: CallHooks[T], choice: OperationChoice, modules: Mapping[str, nn.Module]) -> None:
        """Observe what `choice` selects in these modules of a network with `hooks`, after applying matching edits."""
        super().__init__()
        self.hooks, self.modules = hooks, modules
        self._choice = choice
        self._has_numbered = any(pattern.call is not None for pattern in choice.patterns)
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._names = dict(zip(map(id, modules.values()), modules, strict=True))
        self._callers: dict[int, _Caller] = {}
        self._off_in: dict[int, int] = {}  # by thread, how many modes lay below
        self._skipping_in: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function, and observe it if a module's own code has called it."""
        if torch.compiler.is_dynamo_compiling():  # flex attention compiles itself, and traces this function, too
            return func(*args, **(kwargs or {}))
        caller = caller_of(sys._getframe(1))
        name = operation_name(func) if caller is not None else ""
        if caller is None or not name:  # nearly always
            return run_networks(func, args, kwargs or {})
        return self.run(name, func, args, kwargs or {}, caller)

    def run(self, name: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], caller: FrameType) -> Any:
        """Run an operation, and observe it if a module's own code has called it.

        Args:
            name: Its name in labels.
            func: The function to call.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            caller: The frame of the network's code that calls it, see `caller_of`.
        """
        called = self._called(name, caller)
        if called is None:
            return run_networks(func, args, kwargs)
        kind, module = called
        inputs = tensors_given(args, kwargs)
        begun = self.hooks.operation_begins(inputs)
        for edit in kind.edits:
            if edit.place == "input":
                args, kwargs = edit_inputs(edit, name, args, kwargs)
        output = run_networks(func, args, kwargs)
        outputs = [("", args[0])] if name == "setitem" else _returned(output)
        if not outputs:
            return output
        if kind.edits:
            output = edit_operation(kind.edits, name, output)
            outputs = _returned(output) or outputs
        if kind.is_observed:
            operation = Operation(name, kind.owner, source_line(caller), tuple(constants_given(args, kwargs)))
            output = self.hooks.operation_ends(kind.label, module, operation, inputs, begun, output, outputs)
            if self._has_numbered:  # notes which patterns have selected a call
                self._choice.lists(kind.owner, name, self.hooks.counts[kind.label] - 1)
        return separate_operation(kind.edits, name, output) if kind.edits else output

    def _called(self, name: str, caller: FrameType) -> tuple[_Kind, nn.Module] | None:
        """Return an operation's kind and the module that calls it; None if it is neither observed nor edited."""
        frame: FrameType | None = caller
        below: CodeType | None = None
        while frame is not None:
            code = frame.f_code
            whose = whose_code(code)
            if whose == "torch":  # a function that a layer of torch calls has been wrapped
                return None
            if code is CALL:
                module = frame.f_locals["self"]
                around = self._callers.get(id(module)) or self._caller(module)
                if around.name is not None:
                    break
                # A module outside the network is called, perhaps a copy; its forward counts, its hooks do not.
                if below is not code_of(attribute_of(module, "forward")):
                    return None
            if whose != "module":
                below = code
            frame = frame.f_back
        else:
            return None
        owner = around.name
        if not around.is_own or around.code not in (None, below):  # called by one of its hooks
            return None
        kind = self._kinds.get((owner, name))
        if kind is None:
            choice, label = self._choice, f"{owner or _ROOT}:{name}"
            kind = _Kind(label, owner, choice.observes(owner, name), choice.edits_of(owner, name))
            self._kinds[owner, name] = kind
        return (kind, module) if kind.is_observed or kind.edits else None

    def _caller(self, module: nn.Module) -> _Caller:
        name = self._names.get(id(module))
        caller = _Caller(None)
        if name is not None and runs_networks_code(module):
            caller = _Caller(name, code_of(module.forward), not stands_for_torchs(module))
        self._callers[id(module)] = caller
        return caller

    def deactivate(self, *_called_with: object) -> None:
        """Deactivate the mode in this thread, below any modes that the network has entered; also usable as a hook."""
        below = take_off(self)
        if below is not None:
            self._off_in[get_ident()] = below

    def reactivate(self, *_called_with: object) -> None:
        """Reactivate the mode where it was, if it was deactivated in this thread; also usable as a hook."""
        thread = get_ident()
        if thread in self._off_in:
            below = self._off_in.pop(thread)
            above: list[TorchFunctionMode] = []
            while _stack_size() > below:
                above.append(_pop())
            for mode in (self, *reversed(above)):
                _push(mode)

    def skip(self, *_called_with: object) -> None:
        """Deactivate the mode for one call of a layer that runs torch's code alone, up to `resume`; a forward pre-hook.

        To pass each of torch's functions in there through the mode takes longer than the hooks. If another mode lies
        above, all stays as it is.
        """
        if _stack_size():
            top = _pop()
            if top is self:
                self._skipping_in.add(get_ident())
            else:
                _push(top)

    def resume(self) -> None:
        """Activate the mode again if a call skips it in this thread."""
        thread = get_ident()
        if thread in self._skipping_in:
            self._skipping_in.discard(thread)
            _push(self)

    def asking(self) -> Iterator[nn.Module]:
        """Yield the outermost torch layers that run other kernels while a mode is active."""
        kinds = {kind for kind in {*map(type, self.modules.values())} if issubclass(kind, _ASKING)}
        around: list[str] = []  # names that end with a dot
        for name, module in self.modules.items() if kinds else ():
            is_outermost = type(module) in kinds and not name.startswith(tuple(around))
            if is_outermost and not have_own_operations(module.modules()):
                around.append(f"{name}." if name else "")
                yield module


_ASKING = (nn.MultiheadAttention, nn.TransformerEncoder)


def _returned(output: object) -> list[tuple[str, Tensor]]:
    return tensors_in(output) if issubclass(type(output), Tensor | tuple | list) else []


def run_networks(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run the network's own call; this frame on a traceback marks the error as the network's, see `is_networks_own`."""
    if looks_up_a_name(func, args):  # torch warns of sequences before it raises
        with warnings.catch_warnings(action="ignore"):
            return func(*args, **kwargs)
    return func(*args, **kwargs)


def looks_up_a_name(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Tell whether a call is `tensor["name"]`, which raises: the network was made for a dict."""
    return func is _GETITEM and type(args[-1]) is str


_GETITEM = Tensor.__getitem__


def is_networks_own(trace: TracebackType) -> bool:
    """Tell whether a frame of this file on a traceback only forwards a call of the network."""
    following = trace.tb_next
    code, below = trace.tb_frame.f_code, None if following is None else following.tb_frame.f_code
    passes_on = code in _FORWARDING and below in (*_FORWARDING, run_networks.__code__)
    return code is run_networks.__code__ or (passes_on and following is not None and is_networks_own(following))


_FORWARDING = [OperationMode.__torch_function__.__code__, OperationMode.run.__code__]


def forwards(method: Callable[..., Any]) -> None:
    """Mark the `__torch_function__` of another mode, which runs the network's calls by `run_networks`."""
    _FORWARDING.append(method.__code__)


def take_off(mode: TorchFunctionMode) -> int | None:
    """Take a mode off the stack of this thread; return how many lay below it, None if it was not on the stack."""
    above: list[TorchFunctionMode] = []
    below: int | None = None
    while below is None and _stack_size():
        top = _pop()
        if top is mode:
            below = _stack_size()
        else:
            above.append(top)
    for other in reversed(above):
        _push(other)
    return below


class TensorNames(dict[int, str]):
    """Names of tensors by `id`: the network's inputs and, once another tensor is looked up, parameters and buffers."""

    def __init__(self, modules: Mapping[str, nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Name the tensors in the arguments that a network of these modules is called with."""
        tensors = tensors_given(args, kwargs)
        super().__init__({id(tensor): f"input{path}" if len(tensors) > 1 else "input" for path, tensor in tensors})
        self._modules: Mapping[str, nn.Module] | None = modules

    def __missing__(self, identity: int) -> str:
        """Return the name of a parameter or buffer; "" for a tensor without one."""
        modules, self._modules = self._modules, None
        for name, module in (modules or {}).items():
            for held in (module._parameters, module._buffers):
                for key, tensor in held.items():
                    self.setdefault(id(tensor), f"{name}.{key}" if name else key)
        return self.get(identity, "")
