"""Parts of the documentation that are made from the code: options from the command line, rules from their registry."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

import typer.main
from typer.core import TyperCommand, TyperOption

from hookscope.cli.app import app
from hookscope.cli.rule_tables import NEEDS
from hookscope.cli.sections import help_record
from hookscope.commands.history.columns import file_columns, layer_columns
from hookscope.reporting.columns import Column
from hookscope.results.history import History
from hookscope.rules import HISTORY_RULES, RULES
from hookscope.rules.rule import Rule

Part = Callable[[], str]
_NAMES = {"Arguments": "argument"}


def options() -> str:
    """Return every command with its arguments and options, as its help has them."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined] - it is a group
    return "\n\n".join(_command(name, command) for name, command in commands.items())


def _command(name: str, command: TyperCommand) -> str:
    prose, examples = _help(command)
    context = command.make_context(name, [], resilient_parsing=True)
    parts = [f"## hookscope {name}", prose, f"```bash\n{examples}\n```"]
    sections: dict[str, list[str]] = {}
    for parameter in command.get_params(context):
        record = help_record(parameter, context)
        if record is None or "help" in (parameter.name or ""):
            continue
        heading = (parameter.rich_help_panel or "Other options") if isinstance(parameter, TyperOption) else "Arguments"
        sections.setdefault(heading, []).append(f"| {_code(record[0])} | {_cell(record[1])} |")
    for heading, rows in sections.items():
        parts.append(f"### {heading}\n\n| {_NAMES.get(heading, 'option')} | meaning |\n|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts)


def _help(command: TyperCommand) -> tuple[str, str]:
    """Return a command's help as prose, and its examples."""
    prose, _, examples = inspect.cleandoc(command.help or "").partition("\b\n")
    return prose.strip(), examples.strip()


def _code(text: str) -> str:
    return f"<code>{escape(text).replace('|', '&#124;')}</code>"


def _cell(text: str) -> str:
    return escape(" ".join(text.split()), quote=False).replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


def columns(declared: Sequence[Column]) -> str:
    """Return a table of the columns that people see, and what each means."""
    titled = [column for column in declared if column.title]
    rows = (
        f"| `{column.title}` | {_prose(column.meaning)}{f', in {column.unit}' * bool(column.unit)} |"
        for column in titled
    )
    return "\n".join(("| column | meaning |", "|---|---|", *rows))


_NO_FILES = History(files=(), order="", verdicts=(), rows=())


def _history_rows() -> Iterator[str]:
    return (f"| `{name}` | {_prose(meaning)} |" for name, meaning in HISTORY_RULES.items())


TABLES: Mapping[str, Part] = {
    "columns-of-files": lambda: columns(file_columns(_NO_FILES)),
    "columns-of-layers-over-files": lambda: columns(layer_columns(_NO_FILES)),
    "rules-of-history": lambda: "\n".join(("| rule | reports that |", "|---|---|", *_history_rows())),
}


def rules() -> str:
    """Return a table of all rules, then each with its limits, their basis and its explanation."""
    lines = ["| rule | level | it reports that |", "|---|---|---|"]
    for name, rule in RULES.items():
        lines += [f"| [{name}](#{name}) | {rule.level} | {_cell(rule.meaning)} |"]
    return "\n\n".join(["\n".join(lines), *map(_rule, RULES.values())])


def _rule(rule: Rule) -> str:
    return "\n\n".join(_rule_parts(rule))


def _rule_parts(rule: Rule) -> Iterator[str]:
    yield f"## {rule.identifier} {{ #{rule.identifier} }}"
    yield _prose(rule.meaning)
    follow = f" One finding names the first {rule.followers} and counts those that follow." if rule.followers else ""
    yield f"Default level: {rule.level}. Looks at {NEEDS[rule.needs]}.{follow}"
    for name, limit in rule.limits.items():
        grads = f" In `grads`: `--limit {limit.grads_name}=`." if limit.grads_name else ""
        basis = f" Basis: {_prose(limit.basis)}." if limit.basis else ""
        named = f"**`{name.replace('_', '-')} = {limit.default:.10g}`**"
        yield f"{named}: {_prose(limit.meaning)}.{basis}{grads}"
    yield from map(_prose, filter(None, rule.explanation.split("\n\n")))


def _prose(text: str) -> str:
    """Return a docstring's sentences as Markdown: what stands between backticks stays code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else _cell(part) if part.strip() else part for part in parts)
