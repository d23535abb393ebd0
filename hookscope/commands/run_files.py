"""Write the run directory of a result: the overview, tables, grids, tensors, and `run.json` last."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from PIL import Image

from hookscope.commands.activations.describe import describe_activations, describe_token_norms
from hookscope.commands.attention.save import write_attention
from hookscope.commands.attribute.describe import describe_attributions
from hookscope.commands.attribute.map_files import photograph_of, write_maps, write_photograph
from hookscope.commands.conversion import RunDirectoryResult
from hookscope.commands.diff.save import write_differences
from hookscope.commands.grads.describe import describe_gradients
from hookscope.commands.grid_files import write_grids
from hookscope.commands.history.save import write_history
from hookscope.commands.survey.save import write_survey
from hookscope.errors import UsageError
from hookscope.reporting import layer_columns, tables
from hookscope.reporting.columns import Column
from hookscope.reporting.comparison import CHANGES
from hookscope.reporting.cost_text import COSTS
from hookscope.reporting.overviews.document import draw_document
from hookscope.results.activations import Activations
from hookscope.results.attention import Attention
from hookscope.results.attributions import Attributions
from hookscope.results.differences import Differences
from hookscope.results.gradients import Gradients
from hookscope.results.history import History
from hookscope.results.inputs import SHOWN_INPUTS
from hookscope.results.runs.directory import OVERVIEW, RunFiles, SavedRun, new_run
from hookscope.results.runs.record import StoredPicture, Verb, record_of
from hookscope.results.runs.store import write_result
from hookscope.results.runs.tensors import write_tensors
from hookscope.results.survey import Survey

TOKENS = "tokens.png"


def save_result(
    result: RunDirectoryResult,
    path: str | Path,
    *,
    command: str = "",
    numbered: bool = False,
    **options: Any,
) -> SavedRun:
    """Write a result as its command does: whole or not at all, and never over anything but an earlier run.

    Args:
        result: What a function of hookscope returned.
        path: The run directory: nothing yet, an empty folder, or an earlier run, which is replaced.
        command: The command line for `run.json`; "" for none.
        numbered: Append a number to the path rather than replace a run of another command.
        options: How pictures are drawn: `cmap` and `scale` of `activations` and `grads`, `crops` of `survey`.

    Raises:
        UsageError: If the run did not finish, or was read from a folder.
        OutputError: If something cannot be written.
    """
    verb, write = _WRITERS[type(result)]
    provenance = result.provenance
    is_empty = isinstance(result, Activations | Gradients | Attributions | Attention) and not result.inputs
    if provenance is None or getattr(result, "failure", None) is not None or is_empty:
        raise UsageError("This run did not finish, or was read from a folder, so it cannot be saved.")
    with new_run(path, numbered=numbered) as run:
        files = write(run.path, result, **options)
        names = [*files.listed]
        if saved := getattr(result, "tensors", None):
            tensor_file = f"{'gradients' if verb == 'grads' else verb}.safetensors"
            write_tensors(run.path / tensor_file, saved.spooled, saved.spool)
            names.append(tensor_file)
        names += write_result(run.path, result)
        folder = run.finish(record_of(verb, command, provenance, **files.pictures))
    return SavedRun(names, files.pictures, files.remarks, folder=folder)


def result_picture(result: Any) -> Image.Image:
    """Return the picture of a result, overview.png of its run directory. Raises as `save_result`."""
    with TemporaryDirectory() as folder:
        saved = save_result(result, Path(folder, "run"))
        with Image.open(saved.folder / OVERVIEW) as picture:
            return picture.convert("RGB")


def _write_inspection(
    folder: Path, result: Activations | Gradients, *, cmap: str = "auto", scale: Literal["channel", "layer"] = "channel"
) -> RunFiles:
    """Write the files of `activations` and `grads`; `scale` of grids is by channel or one for the layer."""
    if isinstance(result, Gradients):
        maps, row_count, document = result.gradient_maps, len(result.gradients), describe_gradients(result)
    else:
        maps, row_count, document = result.feature_maps, len(result.rows), describe_activations(result)
    draw_document(document).save(folder / OVERVIEW, compress_level=6)
    drawn = write_grids(folder, maps, row_count, result.inputs, cmap=cmap, scale=scale)
    names = tables.write_tables(folder, _tables(result))
    shown: list[StoredPicture] = []
    if isinstance(result, Activations) and result.token_maps:
        last = max(token_map.input_index for token_map in result.token_maps)
        photographs = [photograph_of(result, index) for index in range(1 + last)]
        draw_document(describe_token_norms(result, photographs)).save(folder / TOKENS, compress_level=6)
        names.append(TOKENS)
        (folder / "inputs").mkdir()
        for index, photograph in enumerate(photographs):
            name = write_photograph(folder, f"{index:03d}", photograph)
            shown.append(StoredPicture(name, TOKENS, photograph.region, photograph.remark))
    thumbnails = tuple(_write_pictures(folder, result))
    return RunFiles(
        names, {"overview": OVERVIEW, "grids": tuple(drawn), "thumbnails": thumbnails, "pictures": tuple(shown)}
    )


def _tables(result: Activations | Gradients) -> dict[str, str]:
    texts = {"layers.csv": tables.csv_text(*layer_columns.layer_table_of(result))}
    if isinstance(result, Gradients):
        texts["gradients.csv"] = tables.csv_text(layer_columns.gradient_columns(result), result.gradients)
        texts["parameters.csv"] = tables.csv_text(layer_columns.parameter_columns(result), result.parameters)
        if result.inputs_alone:
            texts["inputs.csv"] = tables.csv_text(layer_columns.input_columns(result.inputs_alone), result.inputs_alone)
    elif result.cost is not None:
        texts["cost.csv"] = tables.csv_text((Column("layer"), *COSTS), result.cost.modules)
    if isinstance(result, Activations) and any(row.tokens and row.tokens.stands_out for row in result.rows):
        texts["tokens.csv"] = tables.csv_text(*layer_columns.token_table_of(result.rows, result.inputs))
    if result.comparison is not None:
        texts["changes.csv"] = tables.csv_text(CHANGES, result.comparison.changes)
    return texts


def _write_pictures(folder: Path, result: Activations | Gradients) -> list[str | None]:
    pictures = result.provenance.pictures if result.provenance else {}
    names: list[str | None] = [None] * len(result.inputs)
    for index, record in enumerate(result.inputs[:SHOWN_INPUTS]):
        if record.size is not None and record in pictures:
            (folder / "inputs").mkdir(exist_ok=True)
            name = names[index] = f"inputs/{index:03d}.png"
            Image.fromarray(pictures[record]).save(folder / name)
    return names


# By result: the command, and what writes its files.
_WRITERS: Mapping[type, tuple[Verb, Callable[..., RunFiles]]] = {
    Activations: ("activations", _write_inspection),
    Attention: ("attention", write_attention),
    Attributions: ("attribute", partial(write_maps, describe=describe_attributions)),
    Differences: ("diff", write_differences),
    Gradients: ("grads", _write_inspection),
    History: ("history", write_history),
    Survey: ("survey", write_survey),
}
