"""See the operations that a network's own forward code calls: torch functions, tensor methods and operators.

Hooks see modules; `F.relu(x)`, `x + identity` and `torch.cat` are seen by a `TorchFunctionMode`, which torch asks at
each such call. What torch's own layers call inside themselves is theirs: a call counts if the nearest Python code that
is not torch's made it, while a module of the network ran. Nothing that the call computes is changed.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from types import CodeType, FrameType, TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hookscope.errors import nearest
from hookscope.hooks.callers import (
    CALL,
    caller_of,
    code_of,
    has_own_operations,
    operation_name,
    runs_networks_code,
    source_line,
    stands_for_torchs,
    whose_code,
)
from hookscope.hooks.calls import CallHooks, Hook
from hookscope.hooks.interventions import Intervention, edit_inputs, edit_operation, separate_operation
from hookscope.hooks.observed import Operation
from hookscope.hooks.patterns import OperationPattern
from hookscope.hooks.pytree import tensors_given, tensors_in

T = TypeVar("T")

# What verdicts need not know: the values are those of the input, in another order or shape, or come from nowhere.
_NOT_JUDGED = frozenset(
    {"view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "permute", "transpose", "t", "T", "mT", "H"}
    | {"mH", "movedim", "moveaxis", "swapaxes", "swapdims", "squeeze", "unsqueeze", "expand", "expand_as", "getitem"}
    | {"broadcast_to", "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "narrow", "select", "contiguous"}
    | {"clone", "detach", "data", "to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool"}
    | {"cpu", "cuda", "repeat", "roll", "flip", "unfold", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle"}
    | {"zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "arange"}
    | {"linspace", "meshgrid", "eye", "tensor", "as_tensor", "from_numpy"}
)
# The pattern of `--ops`, which may match nothing.
EVERYTHING = "op:*"

# What the whole model is called in labels.
_ROOT = "(model)"


# The modes that are on in this thread: `torch.overrides` has contexts for them, which take several calls more.
_stack_size = torch._C._len_torch_function_stack
_pop, _push = torch._C._pop_torch_function_stack, torch._C._push_on_torch_function_stack


@dataclass(slots=True)
class OperationChoice:
    """Which operations are observed and edited, and which of the patterns have selected one.

    Attributes:
        patterns: Those that select, and those that exclude.
        edits: What to change of which operations.
        judged: Whether those that verdicts are about are observed, too, though no pattern selects them.
        matched: Patterns, as they were written, that have selected an operation.
        seen: Names of the operations that ran, by module: for a message that offers the nearest.
    """

    patterns: Sequence[OperationPattern]
    edits: Sequence[tuple[OperationPattern, Intervention]] = ()
    judged: bool = False
    seen: dict[tuple[str, str], None] = field(default_factory=dict)
    matched: set[str] = field(default_factory=set)

    def missing(self) -> str:
        """Return what is to be said if a pattern selected nothing; "" if each did."""
        for pattern in (*self.patterns, *(pattern for pattern, _ in self.edits)):
            if pattern.text not in self.matched and pattern.text != EVERYTHING:
                known = [text for module, name in self.seen for text in (f"op:{name}", f"{module}:{name}")]
                ran = nearest(pattern.text, known) if known else " The network's own code called none."
                return f"No operation matches {pattern.text!r}.{ran} List them with `hookscope layers MODEL --ops`."
        return ""

    def edits_of(self, owner: str, name: str) -> list[Intervention]:
        """Return the edits of an operation that a module calls, in order."""
        found = [(pattern, edit) for pattern, edit in self.edits if pattern.matches(owner or _ROOT, name)]
        self.matched.update(pattern.text for pattern, _ in found)
        return [edit for _, edit in found]

    def observes(self, owner: str, name: str) -> bool:
        """Tell whether an operation that a module calls is observed, in some call at least."""
        self.seen[owner or _ROOT, name] = None
        return self._calls(owner, name) != set() or (self.judged and name not in _NOT_JUDGED)

    def lists(self, owner: str, name: str, call: int) -> bool:
        """Tell whether a call of an operation is selected by the patterns, not only judged."""
        calls = self._calls(owner, name)
        return None in calls or call in calls

    def _calls(self, owner: str, name: str) -> set[int | None]:
        """Return which calls are selected, from 0; None stands for all."""
        matching = [pattern for pattern in self.patterns if pattern.matches(owner or _ROOT, name)]
        self.matched.update(pattern.text for pattern in matching)
        return set() if any(pattern.exclude for pattern in matching) else {pattern.call for pattern in matching}


class Caller(NamedTuple):
    """A module whose forward runs: its name, itself, and the code of its forward, None if that is no plain function."""

    name: str
    module: nn.Module
    code: CodeType | None


class _Kind(NamedTuple):
    """What is known of all calls of one operation by one module."""

    label: str
    owner: str
    is_observed: bool
    edits: Sequence[Intervention]


class OperationMode(TorchFunctionMode, Generic[T]):
    """Observes the operations that modules call, with the hooks of one capture.

    Attributes:
        hooks: Those of the capture.
        running: The modules whose forward runs, by the identity of a frame of `nn.Module.__call__`; None for layers
            whose operations are not the network's.
        names: Of all modules, by identity.
    """

    def __init__(self, hooks: CallHooks[T], choice: OperationChoice) -> None:
        """Observe with `hooks` what `choice` selects, after making the edits whose patterns match."""
        super().__init__()
        self.hooks = hooks
        self._choice = choice
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self.running: dict[int, Caller | None] = {}
        self.names: dict[int, str] = {}
        self._off_in: set[int] = set()
        self._is_paused = False

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a torch function, and observe it if a module's own code has called it."""
        caller = caller_of(sys._getframe(1))
        if caller is None:  # nearly always
            return _run(func, args, kwargs or {})
        return self.run(operation_name(func), func, args, kwargs or {}, caller)

    def run(
        self,
        name: str,
        func: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        caller: FrameType,
        source: str | None = None,
        owner: nn.Module | None = None,
    ) -> Any:
        """Run an operation, and observe it if a module's own code has called it.

        Args:
            name: What it is called in labels; "" if it is none.
            func: Runs it.
            args: What it is given.
            kwargs: Likewise, by name.
            caller: The frame of the network's code that calls it, see `caller_of`.
            source: The line that calls it, "net.py:14"; None if that is the frame's.
            owner: The module that calls it; None if that is the one whose forward runs.
        """
        called = self._called(name, caller, owner) if name else None
        if called is None:
            return _run(func, args, kwargs)
        kind, module = called
        inputs = tensors_given(args, kwargs)
        begun = self.hooks.operation_begins(inputs)
        for edit in kind.edits:
            if edit.place == "input":
                args, kwargs = edit_inputs(edit, name, args, kwargs)
        output = _run(func, args, kwargs)
        outputs = [("", args[0])] if name == "setitem" else _returned(output)
        if not outputs:
            return output
        if kind.edits:
            output = edit_operation(kind.edits, name, output)
            outputs = _returned(output) or outputs
        if kind.is_observed:
            operation = Operation(name, kind.owner, source_line(caller) if source is None else source)
            output = self.hooks.operation_ends(kind.label, module, operation, inputs, begun, output, outputs)
        return separate_operation(kind.edits, name, output) if kind.edits else output

    def _called(self, name: str, caller: FrameType, inside: nn.Module | None = None) -> tuple[_Kind, nn.Module] | None:
        """Return what is known of an operation, and whose module calls it; None if it is not looked at.

        `inside` is the module that calls it if that is not run by Python.
        """
        frame: FrameType | None = caller
        below: CodeType | None = None
        while frame is not None and id(frame) not in self.running:
            code = frame.f_code
            whose = whose_code(code)
            if whose == "torch":  # somebody has wrapped a function that a layer of torch calls
                return None
            # A module that is none of the network's is called, perhaps a copy; its forward counts, hooks on it do not.
            if code is CALL and below is not code_of(getattr(frame.f_locals.get("self"), "forward", None)):
                return None
            if whose != "module":
                below = code
            frame = frame.f_back
        found = None if frame is None else self.running[id(frame)]
        if found is None or found.code not in (None, below):  # but a hook of it
            return None
        owner, module, _ = found
        if inside is not None and inside is not module:
            owner, module = self.names.get(id(inside), owner), inside
        kind = self._kinds.get((owner, name))
        if kind is None:
            choice, label = self._choice, f"{owner or _ROOT}:{name}"
            kind = _Kind(label, owner, choice.observes(owner, name), choice.edits_of(owner, name))
            self._kinds[owner, name] = kind
        return (kind, module) if kind.is_observed or kind.edits else None

    def take_off(self, *_called_with: object) -> None:
        """Take the mode off in this thread, from below those that the network has turned on; also as a hook."""
        above: list[TorchFunctionMode] = []
        while _stack_size():
            top = _pop()
            if top is self:
                self._off_in.add(get_ident())
                break
            above.append(top)
        for each in reversed(above):
            _push(each)

    def put_on(self, *_called_with: object) -> None:
        """Put the mode back below the others, if it was taken off in this thread; also as a hook."""
        thread = get_ident()
        if thread in self._off_in and not self._is_paused:
            self._off_in.discard(thread)
            stack = [self]
            while _stack_size():
                stack.insert(1, _pop())
            for each in stack:
                _push(each)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Observe nothing for the length of a `with` block."""
        self.take_off()
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
            self.put_on()


def _returned(output: object) -> list[tuple[str, Tensor]]:
    """Return the tensors that an operation returned."""
    return tensors_in(output) if issubclass(type(output), Tensor | tuple | list) else []


def _run(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run the network's own call. What it raises has this frame on its traceback, see `is_networks_own`."""
    return func(*args, **kwargs)


def is_networks_own(trace: TracebackType) -> bool:
    """Tell whether a frame of this file on a traceback only stands for a call of the network."""
    following = trace.tb_next
    code, below = trace.tb_frame.f_code, None if following is None else following.tb_frame.f_code
    passes_on = (code, below) in ((_ASKED, _ACTS), (_ASKED, _run.__code__), (_ACTS, _run.__code__))
    return code is _run.__code__ or (passes_on and following is not None and is_networks_own(following))


_ASKED, _ACTS = OperationMode.__torch_function__.__code__, OperationMode.run.__code__


def observing() -> "OperationMode[Any] | None":
    """Return what observes operations in this thread: for code that calls them past torch's functions."""
    for place in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(place)
        if isinstance(mode, OperationMode):
            return mode
    return None


@contextmanager
def operations_observed(mode: OperationMode[T], modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Observe the operations of a network's modules for the length of a `with` block.

    Inside layers of torch's that ask whether a mode is on, and then run other kernels, it is off. In others it stays
    on: hooks that switch it cost as much as it does.

    Args:
        mode: What observes.
        modules: All modules of the network by name.
    """
    mode.names.update((id(module), name) for name, module in modules.items())
    attached: list[MutableMapping[Any, Any]] = []
    key: Any = object()

    def attach(module: nn.Module, before: Hook, after: Hook) -> None:
        # Without handles, which would cost more than the hooks do.
        attached.extend((module._forward_pre_hooks, module._forward_hooks))
        module._forward_pre_hooks[key], module._forward_hooks[key] = before, after

    mode.hooks.names = _Names(modules, {})
    naming = modules[""].register_forward_pre_hook(Hook(_name_inputs, mode.hooks, modules), with_kwargs=True)
    try:
        off: set[str] = set()  # names of modules inside which the mode is off
        kinds: dict[type, bool] = {}
        for name, module in modules.items():
            if runs_networks_code(module, kinds):
                calling = None if stands_for_torchs(module) else Caller(name, module, code_of(module.forward))
                attach(module, Hook(_enter, mode, calling), Hook(_leave, mode))
            elif name and name.rpartition(".")[0] in off:
                off.add(name)
            elif isinstance(module, _ASKING) and not any(map(has_own_operations, module.modules())):
                off.add(name)
                attach(module, Hook(mode.take_off), Hook(mode.put_on))
                attached.append(module._forward_hooks_always_called)
                module._forward_hooks_always_called[key] = True
        _push(mode)
        yield
    finally:
        mode.take_off()  # unless an interrupt has come while it was off
        naming.remove()
        for hooks in attached:
            hooks.pop(key, None)


_ASKING = (nn.MultiheadAttention, nn.TransformerEncoder)


class _Names(dict[int, str]):
    """Names of tensors by identity: of the network's inputs, and, once one is asked for that is none, of what it holds.

    Most networks never ask.
    """

    def __init__(self, modules: Mapping[str, nn.Module], inputs: Mapping[int, str]) -> None:
        super().__init__(inputs)
        self._modules: Mapping[str, nn.Module] | None = modules

    def __missing__(self, identity: int) -> str:
        """Return the name of a parameter or buffer; "" for a tensor without one."""
        modules, self._modules = self._modules, None
        for name, module in (modules or {}).items():
            for held in (module._parameters, module._buffers):
                for key, tensor in held.items():
                    self.setdefault(id(tensor), f"{name}.{key}" if name else key)
        return self.get(identity, "")


def _name_inputs(
    hooks: CallHooks[T],
    modules: Mapping[str, nn.Module],
    _module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Name the network's inputs beside what it holds, parameters and buffers, for the pass that begins."""
    given = tensors_given(args, kwargs)
    inputs = {id(tensor): f"input{path}" if len(given) > 1 else "input" for path, tensor in given}
    hooks.names = _Names(modules, inputs)


def _enter(mode: OperationMode[T], caller: Caller | None, _module: nn.Module, _args: object) -> None:
    mode.running[id(sys._getframe(1).f_back)] = caller
    mode.put_on()  # no such module runs where it is off: a call must have raised there, and the network gone on


def _leave(mode: OperationMode[T], _module: nn.Module, _args: object, _output: object) -> None:
    mode.running.pop(id(sys._getframe(1).f_back), None)
