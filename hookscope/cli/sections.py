"""`--help` with options under headings, in plain text: importing Rich would make it half as slow again."""

from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption


def _under(heading: str) -> "partial[Any]":
    return partial(typer.Option, rich_help_panel=heading)


# `typer.Option` for options under each heading.
model, inputs, layers, gradients = map(_under, ("Model", "Input", "Layers", "Loss and gradients"))
run, write, show = map(_under, ("Device and numbers", "Files", "Terminal"))
rules, workers, looks = map(_under, ("Rules", "Processes", "Method and targets"))
compares, other = map(_under, ("Comparison", "How B runs"))


class SectionedCommand(TyperCommand):
    """A command whose help puts each option under its `rich_help_panel`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments first, then a section for each heading in the order of its first option."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                heading = "Arguments"
                if isinstance(parameter, TyperOption):
                    heading = parameter.rich_help_panel or "Other options"
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)
