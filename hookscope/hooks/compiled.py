"""The compiled library, and its functions that work with Python's objects: see interpreter.h. No torch."""

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any, NamedTuple

LIBRARY = Path(__file__).parents[1] / "native.bin"  # not .so, which Python would take for a module

# `Interpreter` of interpreter.h, in its order.
_ENTRIES = (
    *("Py_IncRef", "Py_DecRef", "PyObject_Type", "PyType_GetSlot", "PyObject_GetAttr", "PyObject_SetAttr"),
    *("PyObject_GetItem", "PyObject_SetItem", "PySequence_DelItem", "PyObject_Size"),
    *("PyObject_Vectorcall", "PyObject_VectorcallMethod"),
    *("PyTuple_New", "PyTuple_SetItem", "PyTuple_GetItem", "PyTuple_Size"),
    *("PyList_New", "PyList_SetItem", "PyList_Append", "PyList_GetItem", "PyList_Size"),
    *("PyDict_GetItemWithError", "PyDict_SetItem", "PyDict_Size"),
    *("PyLong_FromLongLong", "PyLong_FromVoidPtr", "PyLong_AsLongLong"),
    *("PyFloat_FromDouble", "PyBytes_FromStringAndSize"),
    *("PyWeakref_NewRef", "PyErr_Clear", "PyErr_Fetch", "PyErr_Restore", "PyObject_GC_UnTrack"),
    *("PyEval_GetFrame", "PyCFunction_NewEx"),
)
_METH_FASTCALL = 0x80


class _Interpreter(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in _ENTRIES)


class _Definition(ctypes.Structure):
    """`PyMethodDef` of Python's C API."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("documentation", ctypes.c_char_p),
    )


class Parts(int):
    """Objects that a compiled function works with besides its arguments, as the address of an array of them."""

    _held: Any

    @classmethod
    def of(cls, objects: Sequence[Any]) -> "Parts":
        """Hold these objects, in the order that the C file says."""
        held = (ctypes.py_object * len(objects))(*objects)
        parts = cls(ctypes.addressof(held))
        parts._held = held
        return parts


class _Library(NamedTuple):
    functions: ctypes.PyDLL
    new_function: Callable[[int, Parts, None], Any]  # of a definition, with `self` and no module
    interpreter: _Interpreter  # which must outlive the functions


def compiled_function(name: str, parts: Sequence[Any]) -> Callable[..., Any] | None:
    """Return a function of the library, with its `Parts`.

    Args:
        name: As in C.
        parts: In the order that the C file says.

    Returns:
        The function; None if this installation, or this interpreter, has none.
    """
    library, address = _library(), definition_of(name)
    if library is None or address is None:
        return None
    return library.new_function(address, Parts.of(parts), None)  # type: ignore[no-any-return]


def parts_of(function: Any, name: str) -> Parts | None:
    """Return the parts of a compiled function of this name; None for any other."""
    parts = getattr(function, "__self__", None) if isinstance(function, BuiltinFunctionType) else None
    return parts if isinstance(parts, Parts) and function.__name__ == name else None


def definition_of(name: str) -> int | None:
    """Return the address of a function's `PyMethodDef`; None as for `compiled_function`."""
    definition = _definition(name)
    return None if definition is None else ctypes.addressof(definition)


@cache
def _definition(name: str) -> _Definition | None:
    """Return the definition of a function, which must outlive it."""
    library = _library()
    function = None if library is None else getattr(library.functions, name, None)
    return None if function is None else _Definition(name.encode(), _address(function), _METH_FASTCALL, None)


@cache
def _library() -> _Library | None:
    """Load the library, and show it the interpreter: CPython with its global lock."""
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None
    try:
        functions = ctypes.PyDLL(str(LIBRARY))
        if ctypes.c_longlong.in_dll(functions, "entry_count").value != len(_ENTRIES):  # of another version
            return None
        interpreter = _Interpreter(*(_address(getattr(ctypes.pythonapi, name)) for name in _ENTRIES))
        functions.use_interpreter(ctypes.byref(interpreter))
        new = _address(ctypes.pythonapi.PyCFunction_NewEx)
    except (OSError, AttributeError, ValueError):
        return None
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    return _Library(functions, prototype(new), interpreter)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
