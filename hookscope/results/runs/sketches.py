"""The sketches of a run's rows in its directory: `sketches.safetensors`, read by `hookscope diff`.

It holds float32 of (R, 256) as "rows", in the order of `layers.json`, and of a run with a backward pass as "gradients"
and "parameters", in the order of `gradients.json`. A row without a sketch is NaN.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hookscope.results.activations import Activations
from hookscope.results.gradients import Gradients
from hookscope.results.runs.reading import StoredRun, read_inside, refusal
from hookscope.results.sketches import SKETCH_WIDTH
from hookscope.results.statistics import MeasuredTensor

FILE = "sketches.safetensors"

# A larger file was not written by hookscope: a hundred thousand rows fit.
_MAX_BYTES = 100_000 * SKETCH_WIDTH * 4


def write_sketches(folder: Path, result: Activations | Gradients) -> None:
    """Write the sketches of all rows into a run."""
    from safetensors.numpy import save  # noqa: PLC0415 - for this alone

    (folder / FILE).write_bytes(save({name: _stacked(rows) for name, rows in _tables(result).items()}))


def read_sketches(run: StoredRun) -> Mapping[str, NDArray[np.float32]]:
    """Return the sketches of a run's "rows", "gradients" and "parameters", (R, 256) each; NaN where there is none.

    Raises:
        InputError: If there is no such file, as in runs of an earlier hookscope, or it does not fit the run.
    """
    from safetensors import SafetensorError  # noqa: PLC0415 - for this alone
    from safetensors.numpy import load  # noqa: PLC0415

    try:
        stored = load(read_inside(run.folder, FILE, _MAX_BYTES))
    except (SafetensorError, KeyError, ValueError) as error:
        raise refusal(run.folder, f"its {FILE} is cut short or damaged") from error
    expected = {name: (len(rows), SKETCH_WIDTH) for name, rows in _tables(run.result).items()}
    if {name: array.shape for name, array in stored.items()} != expected or any(
        array.dtype != np.float32 for array in stored.values()
    ):
        raise refusal(run.folder, f"its {FILE} does not fit its rows")
    return stored


def _tables(result: Activations | Gradients) -> dict[str, Sequence[MeasuredTensor]]:
    tables: dict[str, Sequence[MeasuredTensor]] = {"rows": result.rows}
    if isinstance(result, Gradients):
        tables |= {"gradients": result.gradients, "parameters": result.parameters}
    return tables


def _stacked(rows: Sequence[MeasuredTensor]) -> NDArray[np.float32]:
    stacked = np.full((len(rows), SKETCH_WIDTH), np.nan, np.float32)
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is then no sketch
        for place, row in zip(stacked, rows, strict=True):
            if row.statistics.sketch is not None:
                place[:] = row.statistics.sketch
    stacked[~np.isfinite(stacked).all(1)] = np.nan
    return stacked
