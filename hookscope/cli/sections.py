"""`--help` with options under headings, in plain text: importing Rich would add half to its time."""

import re
from collections import Counter
from itertools import pairwise, takewhile
from typing import Any

from typer.core import TyperCommand, TyperOption

from hookscope.errors import UsageError
from hookscope.options import MOST_USED
from hookscope.text import printable

# How click shows the range of a number: "x>=1", "0.1<=x<=1000000.0".
_AT_LEAST, _BETWEEN = re.compile(r"\bx>=([\d.]+)"), re.compile(r"([\d.]+)<=x<=([\d.]+)")

METAVARS_OF_NUMBERS = ("N", "SECONDS", "GIB")

# Set by -h, which lists the most used options of a long help.
_SHORT = "hookscope.short_help"


class SectionedCommand(TyperCommand):
    """A command whose help puts each option under its `rich_help_panel`; -h shows the most used ones."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse a missing value, a second value of an option that takes one, and a number with an underscore.

        typer takes the name of the next option for a missing value, drops the first of two values, and skips
        underscores in numbers. `--report=--out` still means a file of that name.

        Raises:
            UsageError: For such an option.
        """
        if ctx.resilient_parsing:  # for a completion
            return super().parse_args(ctx, args)
        options = {
            name: parameter
            for parameter in self.get_params(ctx)
            if isinstance(parameter, TyperOption)
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        before_arguments = [*takewhile(lambda arg: arg != "--", args)]
        ctx.meta[_SHORT] = "-h" in before_arguments and "--help" not in before_arguments
        for name, value in pairwise((*before_arguments, None)):
            if name in options and value in {None, *options} and not options[name].is_flag:
                following = f"; '{value}' is the next option" if value else ""
                raise UsageError(f"{name} needs a value{following}.")
        values, _, parameters = self.make_parser(ctx).parse_args([*args])
        for parameter, count in Counter(parameters).items():
            if not isinstance(parameter, TyperOption):
                continue
            if count > 1 and not (parameter.multiple or parameter.is_flag):
                raise UsageError(f"{parameter.opts[0]} is given {count} times, and takes one value.")
            value = values[parameter.name]
            if parameter.metavar in METAVARS_OF_NUMBERS and "_" in str(value):
                shown = printable(" ".join(value) if parameter.multiple else value)
                raise UsageError(f"{parameter.opts[0]} '{shown}' is not a number: leave out the underscore.")
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line, without the braces that typer puts around a required argument."""
        return [re.sub(r"[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments first, then a section for each heading in the order of its first option."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = help_record(parameter, ctx)
            if record is not None:
                heading = "Arguments"
                if isinstance(parameter, TyperOption):
                    heading = parameter.rich_help_panel or "Other options"
                sections.setdefault(heading, []).append(record)
        is_short = ctx.meta.get(_SHORT) and MOST_USED in sections
        for heading, records in sections.items():
            if not is_short or heading in ("Arguments", MOST_USED):
                with formatter.section(heading):
                    formatter.write_dl(records)
        if is_short:
            formatter.write_paragraph()
            count = sum(len(records) for heading, records in sections.items() if heading != "Arguments")
            formatter.write_text(f"All {count} options: {ctx.command_path} --help")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the epilog, but not below the short help."""
        if not ctx.meta.get(_SHORT):
            super().format_epilog(ctx, formatter)


def help_record(parameter: Any, ctx: Any) -> tuple[str, str] | None:
    """Return an option or argument and its help, with its range in words: "1 or more", "0.1 to 1000000"."""
    record = parameter.get_help_record(ctx)
    if record is None:
        return None
    text = _BETWEEN.sub(lambda match: f"{_bound(match[1])} to {_bound(match[2])}", record[1])
    # click writes " / --no-grids" where there is no --grids, typer the type of an argument: "MODEL <str>".
    return re.sub("^ / |(?<=[A-Z]) .*", "", record[0]), _AT_LEAST.sub(lambda match: f"{_bound(match[1])} or more", text)


def _bound(digits: str) -> str:
    return "2^63 - 1" if digits == str(2**63 - 1) else digits.removesuffix(".0")
