"""Results as the text that the commands print, as dicts and as data frames."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from io import StringIO
from operator import itemgetter
from shutil import get_terminal_size
from typing import Any

from rich.console import Console, Group, RenderableType

from hookscope.commands.activations.describe import describe_activations
from hookscope.commands.attention.describe import HEADS, describe_attention
from hookscope.commands.attribute.describe import describe_attributions, map_columns
from hookscope.commands.check.describe import describe_check
from hookscope.commands.diff.columns import difference_columns
from hookscope.commands.diff.describe import describe_differences
from hookscope.commands.grads.describe import describe_gradients
from hookscope.commands.history.columns import tensor_columns
from hookscope.commands.history.describe import describe_history
from hookscope.commands.survey.columns import CHANNELS, channel_rows
from hookscope.commands.survey.describe import describe_survey
from hookscope.errors import UsageError
from hookscope.reporting import layer_columns, terminal
from hookscope.reporting.columns import Column, machine_columns
from hookscope.reporting.comparison import CHANGES, describe_comparison
from hookscope.reporting.contents import TENSORS, describe_contents
from hookscope.reporting.document import Document
from hookscope.reporting.document_text import printed
from hookscope.reporting.modules import describe_modules, module_table_of
from hookscope.results.activations import Activations
from hookscope.results.attention import Attention
from hookscope.results.attributions import Attributions
from hookscope.results.check import CheckReport, checks_to_dict
from hookscope.results.comparison import Comparison
from hookscope.results.contents import CheckpointContents
from hookscope.results.differences import Differences
from hookscope.results.findings import Finding
from hookscope.results.gradients import Gradients
from hookscope.results.history import History
from hookscope.results.json_form import to_document
from hookscope.results.network import ModuleTable
from hookscope.results.runs.record import RunRecord
from hookscope.results.survey import Survey

RunDirectoryResult = Activations | Gradients | Attributions | Attention | Differences | History | Survey
"""What a run directory holds."""

Result = RunDirectoryResult | CheckReport | CheckpointContents | ModuleTable | Comparison


def result_text(result: Result) -> str:
    """Return what the command prints of a result, as plain text as wide as the terminal; warnings first."""
    width = get_terminal_size().columns
    text = StringIO()
    console = Console(file=text, width=width, color_system=None, highlight=False, markup=False, emoji=False)
    for part in (terminal.warnings_panel(warnings_of(result)), summary(result, width=width)):
        if not isinstance(part, Group) or part.renderables:
            console.print(part, overflow="ignore", crop=False)  # no name is broken
    failure = getattr(result, "failure", None)
    if failure is not None:
        console.print(terminal.failure_panel(failure))
    return text.getvalue().rstrip("\n")


def warnings_of(result: Result) -> tuple[str, ...]:
    """Return the warnings of a result; none of a check, whose summary has them as notes."""
    return () if isinstance(result, CheckReport) else tuple(getattr(result, "warnings", ()))


def summary(result: Result, *, width: int, full: bool = False, height: int | None = None) -> RenderableType:
    """Return what a command prints of its result on stdout: all but warnings, and where a model raised."""
    return printed(DESCRIPTIONS[type(result)](result, None), width=width, full=full, height=height)


DESCRIPTIONS: Mapping[type, Callable[[Any, RunRecord | None], Document]] = {
    Activations: describe_activations,
    Attention: lambda attention, _: describe_attention(attention),
    Attributions: lambda attributions, _: describe_attributions(attributions),
    CheckReport: lambda report, _: describe_check(report),
    CheckpointContents: lambda contents, _: describe_contents(contents),
    Comparison: lambda comparison, _: describe_comparison(comparison),
    Differences: describe_differences,
    Gradients: describe_gradients,
    History: lambda history, _: describe_history(history),
    ModuleTable: lambda table, _: describe_modules(table),
    Survey: describe_survey,
}
"""What describes a result; from a run, with its record, which has the paths of its pictures."""


def result_dict(result: Result) -> dict[str, Any]:
    """Return a result as dicts, lists, text and numbers, as `--json` prints it."""
    return checks_to_dict([result]) if isinstance(result, CheckReport) else to_document(result)


def result_frame(result: Result, *, full: bool = False) -> Any:
    """Return the rows of a result as a `pandas.DataFrame`; of gradients with a column `role`, of a check the findings.

    A UsageError is raised if pandas is not installed.
    """
    try:
        import pandas as pd  # noqa: PLC0415 - an optional package
    except ModuleNotFoundError as error:
        raise UsageError("A data frame needs one more package: pip install pandas") from error
    columns, rows = _TABLES[type(result)](result)
    records = _records(columns, rows)
    if isinstance(result, Gradients):
        further = layer_columns.parameter_columns(result)
        parameters = _records(further, result.parameters)
        records += [{"label": parameter["name"], "role": "parameter", **parameter} for parameter in parameters]
        columns = [*columns, *further]
    named = [column for column in columns if column.key]
    index = next((column.key for column in named if column.key in ("label", "key")), named[0].key)
    ranks = {column.key: column.rank if column.title or column.key == "role" else 100 for column in named}
    kept = sorted(ranks, key=lambda key: -1 if key == index else ranks[key])[: None if full else 1 + _FRAME_COLUMNS]
    return pd.DataFrame(records, columns=[key for key in ranks if key in kept]).set_index(index)


def _records(columns: Sequence[Column], rows: Sequence[Any]) -> list[dict[str, Any]]:
    readers = {column.key: column.read for column in columns if column.key}
    return [{key: read(row) for key, read in readers.items()} for row in rows]


# Columns of a data frame, if not all are asked for: those that stay longest in a narrow terminal.
_FRAME_COLUMNS = 20

_TABLES: Mapping[type, Callable[[Any], tuple[Sequence[Column], Sequence[Any]]]] = {
    Activations: layer_columns.layer_table_of,
    Attention: lambda attention: (HEADS, attention.rows),
    Attributions: lambda report: (map_columns(report), report.maps),
    CheckReport: lambda report: (machine_columns(*(field.name for field in fields(Finding))), report.findings),
    CheckpointContents: lambda contents: (
        [Column("part", value=lambda row: row[0].key), *(column.on(itemgetter(1)) for column in TENSORS)],
        [(part, tensor) for part in contents.parts for tensor in part.tensors],
    ),
    Comparison: lambda comparison: (CHANGES, comparison.changes),
    Differences: lambda report: (difference_columns(report), report.rows),
    Gradients: lambda gradients: (layer_columns.gradient_columns(gradients), gradients.gradients),
    History: lambda history: (tensor_columns(history), history.rows),
    ModuleTable: module_table_of,
    Survey: lambda survey: (CHANNELS, channel_rows(survey)),
}
