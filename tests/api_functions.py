"""The functions of hookscope/api.py, from hookscope/commands/ and options.py: `python -m tests.api_functions`."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import Field
from inspect import cleandoc, get_annotations
from pathlib import Path
from textwrap import fill, indent
from typing import Any

import hookscope
from hookscope import options

PACKAGE = Path(options.__file__).parent
API = PACKAGE / "api.py"

HEAD = '''"""The Python functions, one for each command. Written by `python -m tests.api_functions`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hookscope import options
from hookscope.options import Dtype, Numbers, Sizes, Texts

'''
# In the order of the file; each defines the public functions that follow.
FILES = (
    *(f"{name}/run" for name in ("activations", "grads", "attribute", "attention", "diff")),
    *("layers", "check/run", "history/run", "survey/run", "checkpoint", "report", "watch/run"),
)
_SHORT = ("Texts", "Numbers", "Sizes", "Dtype")  # the other aliases are written out


def parsed(name: str) -> ast.Module:
    return ast.parse((PACKAGE / name).read_text(encoding="utf-8"))


def for_type_checkers(tree: ast.Module) -> list[ast.stmt]:
    """Return what a file imports and defines for type checkers only."""
    blocks = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return [statement for block in blocks for statement in block.body]


def aliases(tree: ast.Module) -> dict[str, str]:
    """Return the aliases of types in options.py that are written out."""
    actual: dict[str, str] = {}
    for case in (*tree.body, *for_type_checkers(tree)):
        if isinstance(case, ast.Assign) and isinstance(case.targets[0], ast.Name):
            name = case.targets[0].id
            if name.istitle() and name not in (*_SHORT, "T"):
                actual[name] = written_out(ast.unparse(case.value), actual)
    return actual


def written_out(annotation: str, expected: Mapping[str, str]) -> str:
    return re.sub(r"\b[A-Z]\w+\b", lambda name: expected.get(name[0], name[0]), annotation)


def fields_of(tree: ast.Module) -> dict[tuple[str, str], str]:
    """Return the annotation of each option by its class and name."""
    expected = aliases(tree)
    actual = {}
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for field in (node for node in kind.body if isinstance(node, ast.AnnAssign)):
            quoted = isinstance(field.annotation, ast.Constant)
            annotation = str(field.annotation.value) if quoted else ast.unparse(field.annotation)
            actual[kind.name, ast.unparse(field.target)] = written_out(annotation, expected)
    return actual


def entries(docstring: str, heading: str) -> dict[str, str]:
    """Return what a section of a docstring says of each name."""
    section = re.search(rf"^{heading}:\n(.*?)(?=^\S|\Z)", cleandoc(docstring), re.DOTALL | re.MULTILINE)
    parts = re.split(r"^ {4}(?=\w+: )", section[1] if section else "", flags=re.MULTILINE)
    return {part.partition(":")[0]: part.partition(": ")[2].strip() for part in parts if part.strip()}


def described(kind: type, option: Field[Any]) -> str:
    """Return what the class, or the nearest of its bases that has the option, says of it; else its help."""
    for base in kind.__mro__:
        actual = entries(base.__doc__ or "", "Attributes")
        if option.name in actual:
            return actual[option.name]
        if option.name in get_annotations(base):
            break
    return fill(options.on_command_line(option).help.rpartition("  ")[2], 104).replace("\n", "\n        ")


def public_functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield each function with its file; others of these files are described there and not exported."""
    for name in FILES:
        for statement in parsed(f"commands/{name}.py").body:
            if isinstance(statement, ast.FunctionDef) and statement.name in hookscope.__all__:
                yield name, statement


def functions() -> Iterator[str]:
    annotations = fields_of(parsed("options.py"))
    public = [function for _, function in public_functions()]
    common = entries(ast.get_docstring(public[0]) or "", "Args")
    for function in public:
        yield _function(function, annotations, common)


def _function(function: ast.FunctionDef, annotations: Mapping[tuple[str, str], str], common: Mapping[str, str]) -> str:
    arguments, passed = function.args, []
    message: dict[str, str] = {}
    docstring = ast.get_docstring(function) or ""
    own = entries(docstring, "Args")
    places = [None] * (len(arguments.args) - len(arguments.defaults)) + [*arguments.defaults]
    signature = [_parameter(argument, default) for argument, default in zip(arguments.args, places, strict=True)]
    passed += [argument.arg for argument in arguments.args]
    message |= {argument.arg: own.get(argument.arg) or common[argument.arg] for argument in arguments.args}
    if arguments.kwonlyargs:
        signature.append("*")
    for kwonlyarg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if kwonlyarg.arg != "option":
            signature.append(_parameter(kwonlyarg, default))
            passed.append(f"{kwonlyarg.arg}={kwonlyarg.arg}")
            message[kwonlyarg.arg] = own.get(kwonlyarg.arg) or common[kwonlyarg.arg]
            continue
        kind = getattr(options, ast.unparse(kwonlyarg.annotation).removeprefix("options."))
        names = []
        for option, _ in options.in_help(kind):
            if options.on_command_line(option).is_python:
                home = next(base for base in kind.__mro__ if (base.__name__, option.name) in annotations)
                annotation = annotations[home.__name__, option.name]
                signature.append(f"{option.name}: {annotation} = {option.default!r}{_shadows(option.name)}")
                message[option.name] = described(kind, option)
                names.append(f"{option.name}={option.name}")
        passed.append(f"option=options.{kind.__name__}({', '.join(names)})")
    lines = ",\n".join(signature).replace("  # noqa: A002,", ",  # noqa: A002")
    call = f"return run_{function.name}({', '.join(passed)})"
    returned = ast.unparse(function.returns) if function.returns else "None"
    text = f'"""{_with_args(docstring, message)}\n"""\n{call}'
    return f"def {function.name}(\n{indent(lines, '    ')},\n) -> {returned}:\n{indent(text, '    ')}\n"


def _parameter(parameter: ast.arg, default: ast.expr | None) -> str:
    annotation = ast.unparse(parameter.annotation).replace("options.", "") if parameter.annotation else "Any"
    return f"{parameter.arg}: {annotation}" + (f" = {ast.unparse(default)}" if default else "")


def _shadows(name: str) -> str:
    return "  # noqa: A002" if name in ("input", "map") else ""


def _with_args(docstring: str, message: Mapping[str, str]) -> str:
    """Return a docstring in which the section of arguments has all of them."""
    section = "Args:\n" + "\n".join(f"    {name}: {text}" for name, text in message.items()) + "\n\n"
    without = re.sub(r"^Args:\n(?: .*\n|\n)*", "", docstring + "\n", flags=re.MULTILINE)
    before, returns, after = without.rstrip("\n").partition("Returns:\n")
    return f"{before.rstrip()}\n\n{section}{returns}{after}"


def written() -> str:
    """Return the file."""
    body = "\n\n".join(functions())
    files = ["commands/opening.py", *(f"commands/{name}.py" for name in FILES), "options.py"]
    checked = [statement for name in files for statement in for_type_checkers(parsed(name))]
    used = "".join(
        f"from hookscope.commands.{name.replace('/', '.')} import {function.name} as run_{function.name}\n"
        for name, function in public_functions()
    )
    texts = [
        text for text in map(ast.unparse, checked) if not text.startswith(("Target", "from hookscope.commands.opening"))
    ]
    imports = indent("\n".join(dict.fromkeys(texts)), "    ")
    text = f"{HEAD}{used}\nif TYPE_CHECKING:\n{imports}\n\n\n{body}"
    for ruff in (["check", "--fix-only", "--select", "I,F401"], ["format"]):
        command = [sys.executable, "-m", "ruff", *ruff, "-q", "--stdin-filename", str(API), "-"]
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return text


if __name__ == "__main__":
    API.write_text(written(), encoding="utf-8")
