"""How inputs of known class are classified, and what their pictures are like: a few numbers for each input."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from hookscope.commands.check.measuring.labelled_pictures import VARYING_CLASSES, Classes, classes_of
from hookscope.commands.check.measuring.outputs import class_scores, returned_tensors
from hookscope.commands.survey.pictures import are_pictures
from hookscope.errors import UsageError
from hookscope.inputs.batches import Batch
from hookscope.inputs.labelled_files import LabelledFiles
from hookscope.inspection.losses.formulas import class_probabilities
from hookscope.inspection.losses.targets import Output
from hookscope.results.inputs import Preprocessing
from hookscope.statistics.storage import plain_array

LOOKS = ("brightness", "contrast", "aspect")
"""Columns of `JudgedInputs.looks`: mean and standard deviation of the grey picture, width over height in the file."""

GRID = 8
"""Height and width of the small pictures by which layouts are compared."""


@dataclass(frozen=True, slots=True)
class JudgedInputs:
    """Inputs in order, each array (N, ...).

    Attributes:
        taken_for: The class with the greatest score; -1 for scores with NaN.
        probabilities: Of this class, and of the label's class, (N, 2).
        is_right: Whether the label stands for the class taken.
        looks: See `LOOKS`; NaN for inputs that are not pictures.
        layouts: The grey picture as GRID x GRID means; NaN for inputs that are not pictures.
        class_count: Classes of the network.
        mapping: How labels became classes of the network, in a sentence.
    """

    taken_for: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    is_right: NDArray[np.bool_]
    looks: NDArray[np.float64]
    layouts: NDArray[np.float32]
    class_count: int = 0
    mapping: str = ""


@dataclass(slots=True)
class InputJudge:
    """Judges batches of inputs of known class, by the network's scores.

    Attributes:
        reason: Why inputs cannot be judged, in a sentence; "" if they can.
    """

    data: LabelledFiles
    labels: Sequence[str]
    categories: Sequence[str]
    preprocessing: Preprocessing
    reason: str = ""
    class_count: int = 0
    mapping: str = ""
    classes: Classes = field(default_factory=dict)
    _parts: list[tuple[NDArray[np.float64], ...]] = field(default_factory=list)

    def add(self, batch: Batch, output: object) -> None:
        """Judge a batch that went through the network."""
        scores = class_scores(returned_tensors(output), len(batch.indices), can_choose=False)
        if isinstance(scores, str) or scores.shape[1] < 2:
            self.reason = scores if isinstance(scores, str) else "The network has one score per input."
            return
        if not self.classes:
            count = self.class_count = scores.shape[1]
            in_folders = self.data.in_folders
            try:
                self.classes, self.mapping = classes_of(self.labels, self.categories, count, in_folders=in_folders)
            except UsageError as error:
                self.reason = str(error)
                return
        if scores.shape[1] != self.class_count:
            self.reason = VARYING_CLASSES
            return
        scores = (scores.float() if scores.itemsize < 4 else scores).cpu()
        broken = scores.isnan().any(1)
        shares = class_probabilities(scores, Output("", scores), multi_label=False)[0].double()
        taken_for = torch.where(broken, -1, scores.nan_to_num().argmax(1)).tolist()
        wanted = [self.classes[self.data.labels_of(record.name)[0]] for record in batch.records]
        rows = np.full((len(wanted), 4), np.nan)
        for place, (best, indices) in enumerate(zip(taken_for, wanted, strict=True)):
            rows[place, 0], rows[place, 3] = best, best in indices
            if best >= 0:
                rows[place, 1:3] = float(shares[place, best]), float(shares[place, [*indices]].max())
        self._parts.append((rows, *self._pictures(batch)))

    def _pictures(self, batch: Batch) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the looks and layouts of a batch's pictures, with the scaling of pictures from files undone."""
        count = len(batch.indices)
        looks, layouts = np.full((count, len(LOOKS)), np.nan), np.full((count, GRID * GRID), np.nan)
        values = batch.args[0] if batch.args else None
        if not are_pictures(values):
            return looks, layouts
        grey, regions = values.detach().float(), [record.region for record in batch.records]
        if any(regions):
            is_scaled = torch.tensor([*map(bool, regions)], device=grey.device)[:, None, None, None]
            for factors, undo in ((self.preprocessing.std, torch.mul), (self.preprocessing.mean, torch.add)):
                if factors:
                    undone = undo(grey, torch.tensor(factors, device=grey.device)[:, None, None])
                    grey = torch.where(is_scaled, undone, grey)
        grey = grey.mean(1)
        looks[:, 0] = plain_array(grey.mean((1, 2)).double().cpu())
        looks[:, 1] = plain_array(grey.std((1, 2), correction=0).double().cpu())
        looks[:, 2] = [math.nan if region is None else region.width / region.height for region in regions]
        small = functional.adaptive_avg_pool2d(grey[:, None], GRID).flatten(1)
        layouts[:] = plain_array(small.double().cpu())
        return looks, layouts

    def result(self) -> JudgedInputs | None:
        """Return all inputs so far; None if they cannot be judged, or there are none."""
        if self.reason or not self._parts:
            return None
        rows, looks, layouts = (np.concatenate(parts) for parts in zip(*self._parts, strict=True))
        return JudgedInputs(
            taken_for=rows[:, 0].astype(np.int64),
            probabilities=rows[:, 1:3],
            is_right=rows[:, 3] == 1,
            looks=looks,
            layouts=layouts.astype(np.float32),
            class_count=self.class_count,
            mapping=self.mapping,
        )
