"""What edits changed: rows, loss and top classes, without and with them."""

import math
from dataclasses import dataclass
from typing import Literal

from hookscope.results.json_form import in_json
from hookscope.results.renderers import RenderedResult
from hookscope.results.statistics import TensorStatistics
from hookscope.text import counted

Reading = Literal["softmax", "sigmoid", "as returned"]
"""How scores become probabilities; "as returned" if the network returns values of 0-1 itself."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The highest-scoring classes of a classifier for one input, best first.

    Attributes:
        reading: How the probabilities were computed from the scores.
    """

    input_index: int
    class_indices: tuple[int, ...]
    class_names: tuple[str, ...]
    probabilities: tuple[float, ...]
    reading: Reading = "softmax"

    @property
    def classes(self) -> list[tuple[str, float]]:
        """Name and probability of each class, "class 281" for one without a name."""
        names = self.class_names or [f"class {index}" for index in self.class_indices]
        return list(zip(names, self.probabilities, strict=True))

    @property
    def is_nan(self) -> bool:
        """Whether probabilities are NaN, so that there is no best class."""
        return any(map(math.isnan, self.probabilities))

    @property
    def best(self) -> str:
        """Name of the best class; "NaN" if there is none."""
        return "NaN" if self.is_nan else next((name for name, _ in self.classes), "")


@dataclass(frozen=True, slots=True)
class Change:
    """How one set of statistics differs between two runs.

    Attributes:
        label: The row's label, or the parameter's name.
        quantity: "activation", "grad_output", "grad_input", or "gradient" of a parameter.
        before: None if only the second run has the row. `after` is None if only the first has it.
    """

    label: str
    quantity: str
    before: TensorStatistics | None
    after: TensorStatistics | None

    @property
    @in_json
    def l2_ratio(self) -> float | None:
        """Ratio of the L2 norms, after to before; None if either is missing or the first is 0."""
        before, after = (None if statistics is None else statistics.l2 for statistics in (self.before, self.after))
        return None if not before or after is None else after / before


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(RenderedResult):
    """What edits changed: the same run without and with them.

    Attributes:
        losses: Without edits, then with them, like `predictions`; None for a run without a loss.
        changes: Rows whose statistics differ at all, in the order of the run.
        row_count: Rows that were compared.
    """

    edits: tuple[str, ...]
    losses: tuple[float, float] | None
    predictions: tuple[tuple[Prediction, ...], tuple[Prediction, ...]]
    changes: tuple[Change, ...]
    row_count: int

    def __repr__(self) -> str:
        return f"<Comparison: {len(self.changes)} of {counted(self.row_count, 'row')} changed>"
