"""Compare two stored runs: by saved tensors where both have them, else by statistics and the kept values."""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hookscope.commands.diff.compare_outputs import with_classes
from hookscope.commands.diff.difference_maps import KeptMaps
from hookscope.commands.diff.first_differences import origin_of, with_origins
from hookscope.commands.diff.hooked_network import PairedOutput
from hookscope.commands.diff.measures import Sums, coarser, sums_of
from hookscope.commands.diff.row_pairs import RowPair, pair_gradients, pair_parameters, pair_rows
from hookscope.commands.diff.tolerances import exceeded, parse_condition
from hookscope.commands.diff.values import Value, compared
from hookscope.errors import InputError, NothingMatchedError, UsageError
from hookscope.inspection.session import package_versions
from hookscope.parameters import arg
from hookscope.results.activations import LayerRow
from hookscope.results.differences import DifferenceRow, Differences, Measures, NonFinite, OutputDifference, Side
from hookscope.results.gradients import Gradients
from hookscope.results.inputs import InputRecord, Provenance
from hookscope.results.runs.reading import StoredRun, read_record, read_run, refusal
from hookscope.results.statistics import TensorStatistics
from hookscope.statistics.channel_axis import AxisReader
from hookscope.statistics.storage import without_float8
from hookscope.text import printable

_TENSORS = {"activations": "activations.safetensors", "grads": "gradients.safetensors"}

# Sums of equal values, by different numbers of threads, differ by less than this share.
_ROUNDING_OF_SUMS = 1e-7


@dataclass(frozen=True, slots=True)
class _OpenRun:
    run: StoredRun
    tensors: Any = None  # an open safetensors file, whose tensors are read one at a time; None without one
    labels: frozenset[str] = frozenset()  # labels of its tensors


@dataclass(slots=True)
class _RunMaps:
    """Offers saved tensors of two runs to `KeptMaps`.

    Attributes:
        inputs: Number of inputs of the runs.
        axes: Holds the grids of the maps so far, on which tokens may lie.
    """

    kept: KeptMaps
    inputs: int
    axes: AxisReader = field(default_factory=AxisReader)

    def offer(self, pair: RowPair, a: Tensor, b: Tensor, relative_l2: float) -> None:
        axis, shape = pair.a.statistics.channel_axis, tuple(a.shape)
        if axis is not None and len(shape) > 3:
            grid = shape[2:] if axis == 1 else shape[1:-1]
            self.axes.add_grid(grid, makes_maps="2d" in pair.a.kind or "3d" in pair.a.kind)
        grids = tuple(self.axes.grids)
        tokens = pair.a.tokens if isinstance(pair.a, LayerRow) else None
        if tokens is not None:
            grids = (tokens.grid,) if tokens.grid is not None else ()
        call = pair.a.layer, pair.a.call
        output = PairedOutput(call, (*call, ""), (), Value(a), axis, grids)
        self.kept.offer(pair.label, output, b, relative_l2, None, self.inputs)


def compare_runs(a: Path, b: Path, *, maps: Sequence[str] = (), fail_over: Sequence[str] = ()) -> Differences:
    """Compare two runs of `hookscope activations` or `hookscope grads` over the same inputs.

    Args:
        a: Run directory of A.
        b: Run directory of B.
        maps: As for `--map`.
        fail_over: Conditions for `exceeded`.

    Returns:
        A row for each pair of outputs; where both runs have a backward pass, `gradients` too.

    Raises:
        InputError: If a folder is no run of these commands, is damaged, or of an earlier version.
        UsageError: If the runs are of different inputs, or an option is malformed.
        NothingMatchedError: If no row of A has a partner in B.
    """
    began = time.perf_counter()
    conditions = [parse_condition(text) for text in fail_over]
    with ExitStack() as files:
        base, other = (_read(path, files) for path in (a, b))
        warnings = _check_inputs(base, other)
        chosen = bool(base.run.record.patterns), bool(other.run.record.patterns)
        pairs, unmatched = pair_rows(base.run.result.rows, other.run.result.rows, maps, chosen)
        if not pairs:
            raise NothingMatchedError(
                f"No row of A ({printable(str(a))}) has a partner in B ({printable(str(b))}): pair them with "
                f"{arg('map')} 'a.*=b.*'."
            )
        drawing = _RunMaps(KeptMaps(_eps(pairs), len(pairs)), len(base.run.result.inputs))
        rows, first_differences = with_origins([_row(pair, base, other, drawing) for pair in pairs], _eps(pairs))
        gradients = tuple(_gradients(base, other, pairs))
    outputs = _outputs(base, other, pairs, rows)
    measured = [row.measures for row in (*rows, *gradients) if row.measures is not None]
    partly, notes = any(measures.value_count is not None for measures in measured), []
    if partly:
        notes.append(
            "Differences are measured on up to 256 values per input, and are at least what the statistics of all "
            f"values show; {arg('save_tensors')} on both runs compares every value."
        )
    if base.run.record.verb != other.run.record.verb:
        notes.append("One run has a backward pass and the other has none: their gradients are not compared.")
    return Differences(
        a=_side(base),
        b=_side(other),
        way="values" if partly else "tensors",
        inputs=base.run.result.inputs,
        rows=rows,
        gradients=gradients,
        unmatched=unmatched,
        outputs=outputs,
        first_differences=first_differences,
        maps=drawing.kept.drawn(rows, first_differences),
        exceeded=exceeded(conditions, (*rows, *gradients), outputs),
        warnings=(
            *warnings,
            *(f"A: {text}" for text in base.run.result.warnings),
            *(f"B: {text}" for text in other.run.result.warnings),
        ),
        notes=tuple(notes),
        seed=base.run.result.seed,
        timings={"compare": time.perf_counter() - began},
        provenance=Provenance((), None, versions=package_versions(), threads=torch.get_num_threads()),
    )


def _read(folder: Path, files: ExitStack) -> _OpenRun:
    verb = read_record(folder).get("verb")
    if verb not in _TENSORS:
        remedy = "Give runs of `hookscope activations` or `hookscope grads`."
        raise refusal(folder, f"a run of {printable(str(verb))} has no rows to compare", remedy)
    run = read_run(folder)
    path = folder.resolve() / _TENSORS[run.record.verb]
    if not path.exists():
        return _OpenRun(run)
    if path.resolve() != path or not path.is_file():
        raise refusal(folder, f"its file '{path.name}' is not a regular file")
    try:
        tensors = files.enter_context(safe_open(path, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        raise refusal(folder, f"its {path.name} is cut short or damaged") from error
    return _OpenRun(run, tensors, frozenset(tensors.keys()))


def _check_inputs(a: _OpenRun, b: _OpenRun) -> tuple[str, ...]:
    """Return warnings about the inputs of both runs; raise a UsageError if these are different inputs."""
    remedy = "Make both runs over the same inputs."
    inputs_a, inputs_b = a.run.result.inputs, b.run.result.inputs
    for number, (ref, other) in enumerate(zip(inputs_a, inputs_b, strict=False), 1):
        if ref.sha256 != other.sha256:
            mismatch = f"input {number} is {_name_and_digest(ref)} in A, {_name_and_digest(other)} in B"
            raise UsageError(f"The runs used different inputs: {mismatch}. {remedy}")
    if len(inputs_a) != len(inputs_b):
        raise UsageError(f"The runs used different inputs: A has {len(inputs_a)}, B has {len(inputs_b)}. {remedy}")
    if a.run.record.named_inputs != b.run.record.named_inputs:
        raise UsageError(f"The runs used different inputs by name ({arg('input')}). {remedy}")
    warnings = []
    if any(
        record.steps != other.steps or record.shape != other.shape
        for record, other in zip(inputs_a, inputs_b, strict=True)
    ):
        warnings.append("The inputs were preprocessed differently, which makes a difference by itself.")
    unknown = [record.name for record in inputs_a if record.sha256 is None]
    if "noise" in unknown and a.run.result.seed != b.run.result.seed:
        seeds = f"A has seed {a.run.result.seed}, B {b.run.result.seed}"
        raise UsageError(f"The runs used different noise: {seeds}. {remedy}")
    if any(name != "noise" for name in unknown):
        warnings.append("Inputs that came from Python have no digest: whether both runs had the same is not known.")
    return tuple(warnings)


def _name_and_digest(record: InputRecord) -> str:
    digest = f" (sha256 {record.sha256[:12]}…)" if record.sha256 else ""
    return f"'{printable(Path(record.name).name, 80)}'{digest}"


def _side(side: _OpenRun) -> Side:
    result = side.run.result
    autocast = side.run.record.settings.get("autocast")
    ways = ["train mode"] if isinstance(result, Gradients) and result.mode == "train" else []
    ways += [f"autocast {printable(autocast, 80)}"] if isinstance(autocast, str) else []
    ways += [f"edit {text}" for text in side.run.record.edits]
    return Side(result.model, result.device, result.dtype, tuple(ways), str(side.run.folder))


def _row(pair: RowPair, a: _OpenRun, b: _OpenRun, drawing: _RunMaps | None = None) -> DifferenceRow:
    for side, row in (("A", pair.a), ("B", pair.b)):
        if not isinstance(row, LayerRow) and row.status not in ("gradient", "zero"):
            return pair.difference(note=f"{side} has no gradient here")
    if pair.label not in a.labels or pair.label_b not in b.labels:
        measures, note = _value_measures(pair.a.statistics, pair.b.statistics)
        return pair.difference(measures=measures, note=note)
    try:
        tensor, other = a.tensors.get_tensor(pair.label), b.tensors.get_tensor(pair.label_b)
    except (SafetensorError, RuntimeError) as error:
        raise InputError(f"The saved tensor '{printable(pair.label, 80)}' cannot be read.") from error
    pair.compared = compared([Value(without_float8(tensor)), Value(without_float8(other))])
    pair.compared.dtype = coarser(tensor.dtype, other.dtype)
    if drawing is not None and pair.compared.measures is not None:
        drawing.offer(pair, tensor, other, pair.sums.relative_l2)
    return pair.difference()


def _value_measures(a: TensorStatistics, b: TensorStatistics) -> tuple[Measures | None, str]:
    """Return measures from kept values and statistics, or why there are none."""
    if a.element_count != b.element_count or a.shape[1:] != b.shape[1:]:  # axis 0 is as long as a batch
        return None, "shapes differ"
    if not a.element_count:
        return Measures(0.0), ""
    values_a, values_b = a.kept_values, b.kept_values
    if values_a is None or values_b is None:
        return None, a.unmeasured or b.unmeasured or "no values are kept of it"
    if values_a.shape != values_b.shape:
        return None, "shapes differ"
    sums = sums_of(torch.tensor(values_a), torch.tensor(values_b)) or Sums()
    nan, inf = (count - other for count, other in zip(_nonfinite_counts(a), _nonfinite_counts(b), strict=True))
    if nan or inf:
        nonfinite = NonFinite(max(nan, 0), max(inf, 0), max(-nan, 0), max(-inf, 0), a.element_count)
        return Measures(math.nan, value_count=sums.count, nonfinite=nonfinite), ""
    measures = sums.measured(torch.float64)
    at_least = 0.0 if any(_nonfinite_counts(a)) else _least_difference(a, b)
    is_unseen = at_least > measures.relative_l2 == 0
    return Measures(
        max(measures.relative_l2, at_least),  # the first of them if it is NaN
        None if is_unseen else measures.cosine,
        value_count=sums.count,
        nonfinite=measures.nonfinite,
    ), ""


def _nonfinite_counts(statistics: TensorStatistics) -> tuple[int, int]:
    return statistics.nan_count or 0, statistics.inf_count or 0


def _least_difference(a: TensorStatistics, b: TensorStatistics) -> float:
    """Return a lower bound of the relative L2 difference of two finite tensors; 0 where rounding explains it.

    Norm, minimum and maximum differ by |A-B| at most, means and standard deviations of n values by |A-B| / sqrt(n).
    """

    def differences(*names: str) -> list[float]:
        return [abs((getattr(a, name) or 0.0) - (getattr(b, name) or 0.0)) for name in names]

    root = math.sqrt(a.element_count)
    most = max(*differences("l2", "min", "max"), *(root * gap for gap in differences("mean", "std", "mean_abs")))
    at_least = most / a.l2 if a.l2 else math.inf if most else 0.0
    if any(differences("min", "max", "zero_fraction")):
        return max(at_least, np.finfo(np.float64).tiny)
    return at_least if at_least > _ROUNDING_OF_SUMS else 0.0


def _gradients(a: _OpenRun, b: _OpenRun, pairs: Sequence[RowPair]) -> list[DifferenceRow]:
    one, other = a.run.result, b.run.result
    if not (isinstance(one, Gradients) and isinstance(other, Gradients)):
        return []
    calls = {(pair.a.layer, pair.a.call): ((pair.b.layer, pair.b.call), pair.matched) for pair in pairs}
    layers = {pair.a.layer: (pair.b.layer, pair.matched) for pair in pairs}
    parameters = pair_parameters(one.parameters, other.parameters, layers)
    rows = [_row(pair, a, b) for pair in (*pair_gradients(one.gradients, other.gradients, calls.get), *parameters)]
    return [replace(row, origin=origin_of(row, row.limit)) for row in rows]


def _eps(pairs: Sequence[RowPair]) -> float:
    names = {row.statistics.dtype for pair in pairs for row in (pair.a, pair.b)}
    dtypes = [getattr(torch, name, None) for name in names]
    eps = [torch.finfo(dtype).eps for dtype in dtypes if isinstance(dtype, torch.dtype) and dtype.is_floating_point]
    return max(eps, default=torch.finfo(torch.float32).eps)


def _outputs(
    a: _OpenRun, b: _OpenRun, pairs: Sequence[RowPair], rows: Sequence[DifferenceRow]
) -> tuple[OutputDifference, ...]:
    """Return the rows of the whole network as outputs, the first with the best classes if both runs have them."""
    outputs = [
        OutputDifference(pair.a.slot, row.shape, row.measures)
        for pair, row in zip(pairs, rows, strict=True)
        if (pair.a.layer, pair.a.call) == ("", 0)
    ]
    best, best_b = a.run.result.predictions, b.run.result.predictions
    if not best or len(best) != len(best_b):
        return tuple(outputs)
    first, *others = outputs or [OutputDifference("", (), None)]
    return with_classes(first, best, best_b), *others
