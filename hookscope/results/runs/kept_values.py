"""The values that a run's rows keep, in its directory: `values.safetensors`, read by `hookscope diff`.

The file holds (N, K) of each row that has any, of float32 or float64: "rows.3" belongs to the fourth row of
`layers.json`, "gradients.3" and "parameters.3" to those of `gradients.json`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hookscope.results.activations import Activations
from hookscope.results.gradients import Gradients
from hookscope.results.runs.reading import StoredRun, read_inside, refusal
from hookscope.results.statistics import MeasuredTensor

FILE = "values.safetensors"

# A row has 256 float64 of each input at most, and its entry in the header.
_MOST_BYTES_PER_INPUT, _MOST_BYTES_BESIDES = 256 * 8, 256


def write_kept_values(folder: Path, result: Activations | Gradients) -> None:
    """Write the values that all rows keep into a run."""
    from safetensors.numpy import save  # noqa: PLC0415 - for this alone

    kept = {name: row.statistics.kept_values for name, row in _rows(result)}
    there = {name: np.ascontiguousarray(values) for name, values in kept.items() if values is not None}
    (folder / FILE).write_bytes(save(there))


def read_kept_values(run: StoredRun) -> Mapping[str, NDArray[np.floating]]:
    """Return the values that a run's rows keep, (N, K), by the names in the file; rows without any are not there.

    Raises:
        InputError: If there is no such file, as in runs of an earlier hookscope, or it does not fit the run.
    """
    from safetensors import SafetensorError  # noqa: PLC0415 - for this alone
    from safetensors.numpy import load  # noqa: PLC0415

    if not (run.folder / FILE).exists():
        raise refusal(run.folder, f"it has no {FILE}, so an earlier version of hookscope made it")
    rows = {name for name, _ in _rows(run.result)}
    most = (len(rows) + 1) * (_MOST_BYTES_PER_INPUT * max(len(run.result.inputs), 1) + _MOST_BYTES_BESIDES)
    try:
        stored = load(read_inside(run.folder, FILE, most))
    except (SafetensorError, KeyError, ValueError) as error:
        raise refusal(run.folder, f"its {FILE} is cut short or damaged") from error
    if not stored.keys() <= rows or any(
        values.ndim != 2 or values.dtype not in (np.float32, np.float64) for values in stored.values()
    ):
        raise refusal(run.folder, f"its {FILE} does not fit its rows")
    return stored


def _rows(result: Activations | Gradients) -> Iterator[tuple[str, MeasuredTensor]]:
    tables: dict[str, Sequence[MeasuredTensor]] = {"rows": result.rows}
    if isinstance(result, Gradients):
        tables |= {"gradients": result.gradients, "parameters": result.parameters}
    for table, rows in tables.items():
        yield from ((f"{table}.{index}", row) for index, row in enumerate(rows))
