"""Compare what networks return: every tensor, and class scores by their best classes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hookscope.commands.diff.alignment import matching_names
from hookscope.commands.diff.hooked_network import HookedNetwork
from hookscope.commands.diff.measures import plain
from hookscope.commands.diff.values import B, Compared, Value, compared
from hookscope.errors import UsageError
from hookscope.hooks.pytree import tensors_in
from hookscope.inspection.losses.choosing import output_at
from hookscope.inspection.losses.targets import Output
from hookscope.inspection.rows import top_classes
from hookscope.parameters import arg
from hookscope.results.comparison import Prediction
from hookscope.results.differences import OutputDifference

_BEST = 5


@dataclass(slots=True)
class _ComparedOutput:
    compared: Compared = field(default_factory=Compared)
    divergence: float = 0.0
    has_scores: bool = True
    predictions: tuple[list[Prediction], list[Prediction]] = field(default_factory=lambda: ([], []))

    def difference(self, slot: str) -> OutputDifference:
        result = OutputDifference(slot, self.compared.whole_shapes[0], self.compared.measures, *self.compared.errors)
        best, best_b = map(tuple, self.predictions)
        if not self.has_scores or not best:
            return result
        return replace(with_classes(result, best, best_b), kl=self.divergence / len(best))


@dataclass(slots=True)
class Outputs:
    """The outputs of the networks, compared batch by batch.

    Attributes:
        networks: A, B and the optional reference.
        may_differ: Whether outputs of different form are allowed.
        output_key: Which of several outputs is compared; None for all.
        remark: A sentence about outputs of different form.
    """

    networks: Sequence[HookedNetwork]
    may_differ: bool
    output_key: str | None = None
    remark: str = ""
    _outputs: dict[str, _ComparedOutput] = field(default_factory=dict)

    def chosen(self, returned: Sequence[object]) -> list[list[tuple[str, Tensor]]]:
        """Return the tensors of each network's output to compare; none if A's and B's cannot be compared.

        Raises:
            UsageError: If A and B return tensors that cannot be compared, or there is no such output.
        """
        sides = self._paired_by_name([tensors_in(output) for output in returned])
        forms = [_form_text(side) for side in sides]
        if forms[0] != forms[1]:
            a, b = (f"{side.title} returns {form}" for side, form in zip(self.networks[:2], forms, strict=False))
            self.remark = f"Outputs cannot be compared: {a}; {b}."
            if not self.may_differ:
                several = f", or {arg('output_key')} to choose an output" if max(map(len, sides)) > 1 else ""
                raise UsageError(f"{self.remark} Give {arg('layer')} to compare layers alone{several}.")
            return [[]]
        return sides

    def add(self, sides: Sequence[Sequence[tuple[str, Tensor]]], first_input: int, count: int) -> None:
        """Compare the tensors that `chosen` returned for a batch."""
        for at, (slot, a) in enumerate(sides[0]):
            tensors = [side[at][1] for side in sides if at < len(side)]
            output, b = self._outputs.setdefault(slot, _ComparedOutput()), tensors[B]
            measured = compared([Value(tensor) for tensor in tensors], first_input, count)
            output.compared.merge(measured)
            is_rows = not a.is_nested and a.dim() == 2 and 0 < count == len(a) and a.shape[1] > 1
            if is_rows and not measured.note and a.is_floating_point() and b.is_floating_point():
                cpu = torch.device("cpu")
                self._add_scores(output, plain(a, cpu), plain(b, cpu), first_input)
            else:
                output.has_scores = False

    def _paired_by_name(self, sides: list[list[tuple[str, Tensor]]]) -> list[list[tuple[str, Tensor]]]:
        """Return the tensors to compare, paired by name.

        An `output_key` names the tensor of each network. If one network returns several tensors, a network that returns
        a single tensor needs no key.
        """
        if self.output_key is not None:
            are_plain = [[path for path, _ in side] == [""] for side in sides]
            return [
                side if is_plain and not all(are_plain) else [_by_key(side, self.output_key)]
                for side, is_plain in zip(sides, are_plain, strict=True)
            ]
        a = [path for path, _ in sides[0]]
        places = [matching_names([path for path, _ in side], a) for side in sides]
        return [
            side if len(side) != len(a) else [side[at] for at in order if at is not None]
            for side, order in zip(sides, places, strict=True)
        ]

    def _add_scores(self, output: _ComparedOutput, a: Tensor, b: Tensor, first_input: int) -> None:
        places = range(first_input, first_input + len(a))
        multi = self.networks[0].inspected.multi_label
        output.divergence += float((_divergence_of_labels if multi else _divergence)(a.double(), b.double()).sum())
        for side, scores in enumerate((a, b)):
            categories = self.networks[side].inspected.info.categories
            names = categories if len(categories) == scores.shape[1] else ()
            output.predictions[side].extend(top_classes(scores, names, places, _BEST, multi_label=multi))

    def results(self) -> tuple[OutputDifference, ...]:
        """Return the differences of the outputs seen so far."""
        return tuple(output.difference(slot) for slot, output in self._outputs.items())


def _by_key(tensors: Sequence[tuple[str, Tensor]], key: str) -> tuple[str, Tensor]:
    chosen = output_at([Output(path, tensor) for path, tensor in tensors if tensor.is_floating_point()], key)
    return chosen.path, chosen.tensor


def _divergence(a: Tensor, b: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of B's softmax from A's, by row and class."""
    return _divergence_terms(a.softmax(1), a.log_softmax(1), b.log_softmax(1))


def _divergence_of_labels(a: Tensor, b: Tensor) -> Tensor:
    """Return the divergence by row and label, where labels are independent: the sigmoid is the probability of yes."""
    yes, no = (_divergence_terms((sign * a).sigmoid(), logsigmoid(sign * a), logsigmoid(sign * b)) for sign in (1, -1))
    return yes + no


def _divergence_terms(of_a: Tensor, logs_a: Tensor, logs_b: Tensor) -> Tensor:
    """Return probabilities of A times differences of logarithms."""
    # A class that is impossible for A adds nothing, whatever B returns; nor does a class that is NaN on both sides.
    adds_nothing = logs_a.isneginf() | (logs_a.isnan() & logs_b.isnan())
    # Not `exp`: MKL would start threads of its own for it, which takes milliseconds.
    return torch.where(adds_nothing, 0.0, of_a * (logs_a - logs_b))


def with_classes(
    output: OutputDifference, best: tuple[Prediction, ...], best_b: tuple[Prediction, ...]
) -> OutputDifference:
    """Return an output with the best classes of A and B, and on how many inputs they agree."""
    pairs = zip(best, best_b, strict=True)
    # NaN has no best class: inputs with NaN agree if both sides have it.
    alike = [(a.class_indices, b.class_indices) for a, b in pairs if a.is_nan == b.is_nan]
    shared = sum(len({*classes} & {*others}) for classes, others in alike) if len(alike) == len(best) else math.nan
    return replace(
        output,
        input_count=len(best),
        top1=sum(classes[:1] == others[:1] for classes, others in alike),
        top5=shared / (_BEST * len(best)) if len(best[0].class_indices) == _BEST else None,
        predictions=(best, best_b),
    )


def _form_text(tensors: Sequence[tuple[str, Tensor]]) -> str:
    shapes = [f"{tensor.size(0)} nested" if tensor.is_nested else str(tuple(tensor.shape)) for _, tensor in tensors]
    if len(shapes) < 2:
        return shapes[0] if shapes else "no tensor"
    return f"{len(shapes)} tensors: {', '.join(shapes[:4])}{', …' if len(shapes) > 4 else ''}"
