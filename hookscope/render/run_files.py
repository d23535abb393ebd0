"""Write the run directory of a result: the overview, tables, grids, tensors, and `run.json` last."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from hookscope.errors import UsageError
from hookscope.render import grids, tables
from hookscope.render.activations import describe_activations, describe_token_norms
from hookscope.render.attention_files import save_attention
from hookscope.render.attribution_files import save_attributions
from hookscope.render.columns import Column
from hookscope.render.comparison import CHANGES
from hookscope.render.cost_text import COSTS
from hookscope.render.difference_files import save_differences
from hookscope.render.gradients import describe_gradients
from hookscope.render.history_files import save_history
from hookscope.render.layer_columns import gradient_columns, parameter_columns
from hookscope.render.map_files import photograph_of, write_photograph
from hookscope.render.overviews.document import draw_document
from hookscope.render.survey_files import save_survey
from hookscope.results.activations import Activations, FeatureMaps
from hookscope.results.attention import Attention
from hookscope.results.attributions import Attributions
from hookscope.results.differences import Differences
from hookscope.results.gradients import Gradients
from hookscope.results.grids import Grid
from hookscope.results.history import History
from hookscope.results.inputs import SHOWN_INPUTS, InputRecord, Provenance
from hookscope.results.runs.directory import OVERVIEW, SavedRun, new_run
from hookscope.results.runs.record import StoredPicture, Verb, record_of
from hookscope.results.runs.store import write_result
from hookscope.results.runs.tensors import write_tensors
from hookscope.results.survey import Survey

TOKENS = "tokens.png"


def save_result(
    result: Activations | Gradients | Attributions | Attention | Differences | History | Survey,
    path: str | Path,
    **options: Any,
) -> SavedRun:
    """Write the run directory of any result: see `save_run` and those of the other commands."""
    if isinstance(result, Survey):
        return save_survey(result, path, **options)
    if isinstance(result, History):
        return save_history(result, path, **options)
    if isinstance(result, Attention):
        return save_attention(result, path, **options)
    if isinstance(result, Differences):
        return save_differences(result, path, **options)
    if isinstance(result, Attributions):
        return save_attributions(result, path, **options)
    return save_run(result, path, **options)


def save_run(
    result: Activations | Gradients,
    path: str | Path,
    *,
    cmap: str = "auto",
    scale: Literal["channel", "layer"] = "channel",
    command: str = "",
    numbered: bool = False,
) -> SavedRun:
    """Write a result as the commands do: whole or not at all, and never over anything but an earlier run.

    Args:
        result: What `hookscope.activations` or `hookscope.grads` returned.
        path: The run directory: nothing yet, an empty folder, or an earlier run, which is replaced.
        cmap: Matplotlib colour map of the grids; "auto" as in `draw_grid`.
        scale: Colour range of each channel by itself, or one for the layer.
        command: The command line for `run.json`; "" for none.
        numbered: Append a number to the path rather than replace a run of another command.

    Raises:
        UsageError: If the run did not finish.
        OutputError: If something cannot be written.
    """
    provenance = result.provenance
    if provenance is None or result.failure is not None or not result.inputs:
        raise UsageError("This run did not finish, so it cannot be saved.")
    if isinstance(result, Gradients):
        maps, row_count, tensor_file = result.gradient_maps, len(result.gradients), "gradients.safetensors"
    else:
        maps, row_count, tensor_file = result.feature_maps, len(result.rows), "activations.safetensors"
    with new_run(Path(path), numbered=numbered) as run:
        document = describe_gradients(result) if isinstance(result, Gradients) else describe_activations(result)
        draw_document(document).save(run.path / OVERVIEW, compress_level=6)
        drawn = _draw_grids(run.path, maps, result.inputs, row_count, cmap=cmap, scale=scale)
        shown: list[StoredPicture] = []
        files = [*_write_tables(run.path, result), *write_result(run.path, result)]
        if isinstance(result, Activations) and result.token_maps:
            last = max(each.input_index for each in result.token_maps)
            photographs = [photograph_of(result, index) for index in range(1 + last)]
            draw_document(describe_token_norms(result, photographs)).save(run.path / TOKENS, compress_level=6)
            files.append(TOKENS)
            (run.path / "inputs").mkdir()
            for index, photograph in enumerate(photographs):
                name = write_photograph(run.path, f"{index:03d}", photograph)
                shown.append(StoredPicture(name, TOKENS, photograph.region, photograph.remark))
        if result.tensors:
            saved: Any = result.tensors  # `SavedTensors`, which this room does not import
            write_tensors(run.path / tensor_file, saved.spooled, saved.spool)
            files.append(tensor_file)
        thumbnails = tuple(_write_pictures(run.path, result.inputs, provenance))
        pictures = {"overview": OVERVIEW, "grids": tuple(drawn), "thumbnails": thumbnails, "pictures": tuple(shown)}
        verb: Verb = "grads" if isinstance(result, Gradients) else "activations"
        folder = run.finish(record_of(verb, command, provenance, **pictures))
    return SavedRun(folder, tuple(files), tuple(drawn))


def _draw_grids(
    folder: Path,
    maps: Sequence[FeatureMaps],
    inputs: Sequence[InputRecord],
    row_count: int,
    *,
    cmap: str,
    scale: Literal["channel", "layer"],
) -> list[Grid]:
    names = [f"grids/{grids.grid_name(each, row_count, input_count=len(inputs))}" for each in maps]

    def draw(each: FeatureMaps, name: str) -> Grid:
        input_name = inputs[each.input_index].name
        picture, grid = grids.draw_for_run(each, name, cmap=cmap, scale=scale, input_name=input_name)
        (folder / name).write_bytes(grids.encode_png(picture))
        return grid

    if not names:
        return []
    (folder / "grids").mkdir()
    # NumPy and zlib let go of the interpreter for most of the work.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(draw, maps, names))


def _write_tables(folder: Path, result: Activations | Gradients) -> list[str]:
    texts = {"layers.csv": tables.rows_to_csv(result)}
    if isinstance(result, Gradients):
        texts["gradients.csv"] = tables.csv_text(gradient_columns(result), result.gradients)
        texts["parameters.csv"] = tables.csv_text(parameter_columns(result), result.parameters)
    elif result.cost is not None:
        texts["cost.csv"] = tables.csv_text((Column("layer"), *COSTS), result.cost.modules)
    if isinstance(result, Activations) and any(row.tokens and row.tokens.stands_out for row in result.rows):
        texts["tokens.csv"] = tables.tokens_to_csv(result)
    if result.comparison is not None:
        texts["changes.csv"] = tables.csv_text(CHANGES, result.comparison.changes)
    if isinstance(result, Gradients) and result.inputs_alone:
        texts["inputs.csv"] = tables.inputs_to_csv(result.inputs_alone)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return list(texts)


def _write_pictures(folder: Path, inputs: Sequence[InputRecord], provenance: Provenance) -> list[str | None]:
    names: list[str | None] = [None] * len(inputs)
    for index, record in enumerate(inputs[:SHOWN_INPUTS]):
        if record.size is not None and record in provenance.pictures:
            (folder / "inputs").mkdir(exist_ok=True)
            name = names[index] = f"inputs/{index:03d}.png"
            Image.fromarray(provenance.pictures[record]).save(folder / name)
    return names
