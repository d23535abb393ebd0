"""Name a torch function, and find out whether the network's own code called it and from which line."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path, PurePath
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from hookscope.hooks.attributes import attribute_of

# Attributes of a tensor that are tensors; the others are metadata.
_COMPUTED_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})
# Functions that compute no tensor. Others that return none are recognised by what they return.
_QUERIES = frozenset(
    {"dim", "ndimension", "size", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "item", "tolist"}
    | {"is_floating_point", "is_complex", "is_signed", "element_size", "get_device", "numpy", "requires_grad_"}
    | {"register_hook", "retain_grad", "is_tensor", "is_storage", "result_type", "can_cast", "promote_types"}
    | {"__bool__", "__len__", "__float__", "__int__", "__index__", "__contains__", "__format__", "__repr__", "__set__"}
    # Uninitialised memory.
    | {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
    | {"__hash__", "__reduce_ex__", "__deepcopy__", "__dir__", "__array__", "has_names", "backward", "data_ptr"}
    | {"_assert"}
)
_RENAMED = {"true_divide": "div", "truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "rsub": "sub"}

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_LAYERS = tuple(f"{_TORCH}{name}{os.sep}" for name in ("nn", "ao", "jit", "nested"))
# The file of the code that wraps every forward.
_MODULE = str(Path(_TORCH, "nn", "modules", "module.py"))
TORCHS_LAYERS = frozenset(member for member in vars(nn).values() if isinstance(member, type))
"""The classes of `torch.nn`."""
CALL = nn.Module.__call__.__code__
"""The code of the outermost frame of a module's call."""
_HOOKSCOPE = f"{Path(__file__).parent.parent}{os.sep}"
# Operators that torch traces, and flex attention, which is one.
_OPERATORS = (f"{_TORCH}_higher_order_ops{os.sep}", str(Path(_TORCH, "nn", "attention", "flex_attention.py")))
# It forwards calls of the network.
_TRACING = str(Path(_HOOKSCOPE, "hooks", "tracing.py"))
# These files run the graphs of exported programs, and so count as the network's own code.
_GRAPH_CODE = (
    str(Path(_TORCH, "fx", "interpreter.py")),
    str(Path(_TORCH, "export", "unflatten.py")),
    str(Path(_HOOKSCOPE, "models", "unflattened.py")),
)


@lru_cache(maxsize=4096)
def operation_name(func: Callable[..., Any]) -> str:
    """Return the name of a torch function in labels; "" if it computes no tensor.

    Operators and their in-place and reflected variants share one name: "add" stands for `+`, `+=`, `torch.add`, `add_`.
    """
    name = getattr(func, "__name__", "")
    if name == "__get__":
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return attribute if attribute in _COMPUTED_ATTRIBUTES else ""
    name = name.partition(".")[0]  # "relu.default" is an overload of "relu"
    if name in _QUERIES:
        return ""
    plain = name.strip("_")
    if name.startswith("__") and plain[0] in "ir" and hasattr(torch.Tensor, f"__{plain[1:]}__"):
        plain = plain[1:]  # "__iand__", "__rdiv__"
    return _RENAMED.get(plain, plain)


def frames_around(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def caller_of(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the network's code that called a torch function; None if torch's own code called it."""
    known_codes = _known_codes
    while frame is not None:
        code = frame.f_code
        cached = known_codes.get(id(code))  # by hand what `whose_code` does: this runs at every torch function
        kind = whose_code(code) if cached is None else cached[1]
        if kind == "network":
            return frame
        if kind == "torch":
            return None
        frame = frame.f_back
    return None


Whose = Literal["network", "torch", "wrapper", "module"]

# By id, because hashing a code object reads all of it. The entry keeps the object alive, so ids stay unique.
_known_codes: dict[int, tuple[CodeType, Whose]] = {}
_known_lines: dict[tuple[int, int], str] = {}


def whose_code(code: CodeType) -> Whose:
    """Classify code by its owner: torch's code around every forward is "module", around a public function "wrapper"."""
    cached = _known_codes.get(id(code))
    if cached is None:
        cached = _known_codes[id(code)] = code, _whose(code.co_filename)
    return cached[1]


def _whose(path: str) -> Whose:
    if path in _GRAPH_CODE or not path.startswith((_TORCH, _HOOKSCOPE)):
        return "network"
    if path.startswith(_HOOKSCOPE):
        return "wrapper" if path == _TRACING else "torch"
    if path == _MODULE:
        return "module"
    return "torch" if path.startswith(_LAYERS) and not path.endswith("functional.py") else "wrapper"


class Operator(NamedTuple):
    """An operator that torch traces, in progress: its name, such as "cond", and the frame that calls it, if known."""

    name: str
    caller: FrameType | None

    @property
    def place(self) -> str:
        """Its name and the line that calls it: "cond at net.py:14"."""
        line = "" if self.caller is None else source_line(self.caller)
        return f"{self.name} at {line}" if line else self.name


def operator_around(frame: FrameType | None) -> Operator | None:
    """Return the outermost operator that torch traces around a frame; None outside all of them."""
    operators = [around for around in frames_around(frame) if is_operators(around.f_code)]
    return Operator(operators[-1].f_code.co_name, caller_of(operators[-1].f_back)) if operators else None


def is_operators(code: CodeType) -> bool:
    """Tell whether code belongs to the operators that torch traces, such as `torch.cond`."""
    return code.co_filename.startswith(_OPERATORS)


def have_own_operations(modules: Iterable[nn.Module]) -> bool:
    """Tell whether any module's forward is not torch's own, so that operations in it are the network's."""
    alike = {(type(module), id(vars(module).get("forward"))): module for module in modules}
    return any(runs_networks_code(module) and not stands_for_torchs(module) for module in alike.values())


def stands_for_torchs(module: nn.Module) -> bool:
    """Tell whether a layer loaded from a file replaces one of torch's: operations in its graph are then the layer's."""
    return type(module).__module__.startswith(("torch.nn.", "torch.ao.")) and "forward" not in vars(module)


def runs_networks_code(module: nn.Module) -> bool:
    """Tell whether a module's forward is the network's own code."""
    forward = vars(module).get("forward") or getattr(type(module), "forward", None)
    code = code_of(forward)
    if isinstance(module, torch.jit.ScriptModule) or code is None:
        return isinstance(module, torch.fx.GraphModule)
    return forward is not nn.Module.forward and whose_code(code) != "torch"


def code_of(forward: object) -> CodeType | None:
    """Return the code of a module's forward; None if that is no plain Python function."""
    code = attribute_of(forward, "__code__")
    return code if isinstance(code, CodeType) else None


def source_line(caller: FrameType) -> str:
    """Return the line that calls an operation, "net.py:14"; "" if it is unknown."""
    place = (id(caller.f_code), caller.f_lasti)  # `_known_codes` keeps the code alive
    line = _known_lines.get(place)
    if line is not None:
        return line
    if caller.f_code.co_filename not in _GRAPH_CODE:
        line = _known_lines[place] = _line(caller.f_code, caller.f_lasti)
        return line
    frame = next((around for around in frames_around(caller) if around.f_code.co_name == "run_node"), None)
    node = None if frame is None else frame.f_locals.get("n")
    if not isinstance(node, torch.fx.Node):
        return ""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return next((f"{PurePath(file).name}:{line}" for file, line in reversed(lines) if "/torch/" not in file), "")


def _line(code: CodeType, instruction: int) -> str:
    """Return the line of an instruction, "net.py:14"; "" for code without a file."""
    if code.co_filename.startswith("<"):
        return ""
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end and line is not None)
    return f"{Path(code.co_filename).name}:{next(lines, code.co_firstlineno)}"
