"""Run the first batch again, and its inputs alone, to see whether the outputs stay the same."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hookscope.commands.check.measuring.outputs import Returned, returned_tensors
from hookscope.hooks.attributes import attribute_of
from hookscope.hooks.forward_hooks import capture
from hookscope.hooks.pytree import tensors_given
from hookscope.inputs.batches import Batch, copy_of, joined, part_of, with_changed
from hookscope.inspection.failures import reraise_internal
from hookscope.inspection.network import InspectedNetwork
from hookscope.inspection.state.preservation import preserved
from hookscope.results.check import OutputValues
from hookscope.statistics.storage import stored_values
from hookscope.text import exception_line

_ALONE = 2  # inputs of the first batch that run alone: a fault might affect only one of them
# If two equal passes differ by this share of the difference between a batch and an input alone, they explain it.
_EXPLAINED = 0.1

Differences = dict[str, float | None]
"""Results of `difference`, by path."""


@dataclass(slots=True)
class FirstPass:
    """What the network returned in the first pass over all inputs, and how further passes differ from it.

    Attributes:
        batch, returned: A copy of the first batch, None before it ran, and the tensors that it gave.
        parts: The part of `returned` that belongs to each input, by path.
        listed: Whether the network returned a list with a result for each input.
        spread, repeat, alone: The differences of `OutputValues`, by path.
        distinct: Whether any input differs from the first.
        unbatched: Paths whose axis 0 turned out not to count inputs.
        unmeasured: Reasons why rules could not be measured, by rule.
    """

    subject: InspectedNetwork
    wanted: AbstractSet[str]
    seed: int
    batch: Batch | None = None
    returned: Returned = field(default_factory=dict)
    parts: Sequence[Mapping[str, Tensor]] = ()
    listed: bool = False
    spread: Differences = field(default_factory=dict)
    distinct: bool = False
    repeat: Differences = field(default_factory=dict)
    alone: Differences = field(default_factory=dict)
    unbatched: set[str] = field(default_factory=set)
    unmeasured: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def add(self, batch: Batch, returned: Returned) -> None:
        """Compare the tensors returned for a batch, which are copies, with those for the first input."""
        parts = by_input(returned, batch)
        if self.batch is None:
            self.batch, self.returned, self.parts = copy_of(batch), returned, parts
            self.listed = is_listed(returned, batch)
        if "constant-output" not in self.wanted:
            return
        if not self.distinct:
            first = part_of(self.batch, 0)
            self.distinct = any(not same_input(first, part_of(batch, index)) for index in range(len(batch.indices)))
        reference = self.parts[0]
        for part in parts:
            if part is not reference:
                for path in varying(reference, part):
                    self.spread[path] = greatest(self.spread.get(path), difference(reference[path], part[path]))

    def compare(self) -> tuple[OutputValues, ...]:
        """Make the further passes that the wanted rules need; return a row for each tensor of the first pass.

        Modules are hooked as in the first pass, though nothing is measured: torch may take other kernels without hooks.
        """
        batch = self.batch
        if batch is not None and self.returned:
            single = len(batch.indices) == 1
            needs_another = {"batch-consistency": single, "constant-output": not self.distinct}
            if "repeatability" in self.wanted:
                self._run_again(batch)
            if "batch-consistency" in self.wanted and not single:
                self._run_alone(batch)
            if paired := [rule for rule, needed in needs_another.items() if needed and rule in self.wanted]:
                only = "There is only one input" if single else "All inputs are the same"
                self._run_with_another(batch, paired, only)
        self._explain()
        return tuple(self._row(path, tensor) for path, tensor in self.returned.items())

    def _row(self, path: str, tensor: Tensor) -> OutputValues:
        batched = not self.listed and path not in self.unbatched and any(path in part for part in self.parts)
        return OutputValues(
            f"(model){path}",
            tuple(tensor.shape) if not tensor.is_nested else (tensor.size(0), -1),
            str(tensor.dtype).removeprefix("torch."),
            batched,
            _max_abs(tensor),
            self.repeat.get(path),
            self.alone.get(path),
            self.spread.get(path.partition("]")[2] if self.listed else path) if self.listed or batched else None,
            len(self.parts),
        )

    def _passes(self, batch: Batch, seed: int, *, repeats: bool = False) -> tuple[list[Returned], str]:
        """Run a batch; with `repeats`, run it again if the first pass changed the network.

        Returns the tensors of each pass, and the error that the network raised, or "".
        """
        network, results = self.subject.network, list[Returned]()
        with preserved(network, seed) as state, capture(network, self.subject.modules, lambda *_: None):
            state.mark_hooks()
            try:
                while not results or (repeats and len(results) < 2 and state.changed()):
                    clone = copy_of(batch)
                    with torch.no_grad():
                        results.append(returned_tensors(network(*clone.args, **clone.kwargs)))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the model's code may raise anything
                return results, exception_line(reraise_internal(error))
        return results, ""

    def _run_again(self, batch: Batch) -> None:
        passes, raised = self._passes(batch, self.seed + 1, repeats=True)
        if raised:
            passes.append({})
            self.warnings.append(f"The network raised in a second pass over the first batch: {raised}")
        for again in passes:
            for path, tensor in self.returned.items():
                delta = difference(tensor, again[path]) if path in again else math.inf
                self.repeat[path] = greatest(self.repeat.get(path), delta)

    def _run_alone(self, batch: Batch) -> None:
        for index in range(min(_ALONE, len(batch.indices))):
            alone = part_of(batch, index)
            results, raised = self._passes(alone, self.seed)
            if raised:
                self._run_with_another(batch, ["batch-consistency"], f"The network raised on an input alone ({raised})")
                return
            self._compare_parts(index, by_input(results[0], alone)[0])

    def _run_with_another(self, batch: Batch, rules: list[str], only: str) -> None:
        pair = with_a_mirrored_copy(batch)
        results, raised = self._passes(pair, self.seed) if pair is not None else ([], "")
        if pair is None or raised:
            lack = "no second one can be derived from it: give more pictures."
            lack = f"with a second one in its batch the network raised {raised}" if raised else lack
            self.unmeasured.update(dict.fromkeys(rules, f"{only}, and {lack}"))
            return
        parts = by_input(results[0], pair)
        if "batch-consistency" in rules:
            self._compare_parts(0, parts[0])
        if "constant-output" in rules:
            for path in varying(parts[0], parts[1]):
                self.spread[path] = difference(parts[0][path], parts[1][path])

    def _compare_parts(self, index: int, other: Mapping[str, Tensor]) -> None:
        part = self.parts[index]
        item = f"[{index}]" if self.listed else ""
        chosen_otherwise = bool(item) and any(
            _differs_in_kind(tensor, other[path]) for path, tensor in part.items() if path in other
        )
        if chosen_otherwise:
            remark = "differs in number or order in a batch and alone, possibly from rounding"
            self.warnings.append(f"Result {item} {remark}: only its highest scores are compared.")
        for path, tensor in part.items():
            if path not in other:
                self.unbatched.add(item + path)
                continue
            pair = _common_scores(tensor, other[path]) if chosen_otherwise else (tensor, other[path])
            delta = None if pair is None else difference(*pair)
            self.alone[item + path] = greatest(self.alone.get(item + path), delta)

    def _explain(self) -> None:
        spread = {path: value for path, value in self.spread.items() if path not in self.unbatched}
        measured = {"repeatability": self.repeat, "batch-consistency": self.alone, "constant-output": spread}
        for rule, values in measured.items():
            if rule in self.wanted and all(value is None for value in values.values()):
                whose = "" if rule == "repeatability" else " that belong to one input"
                self.unmeasured.setdefault(rule, f"No output has values{whose}, so there is nothing to compare.")
        again, alone = ([delta for delta in values.values() if delta] for values in (self.repeat, self.alone))
        if (again or alone) and (observing := next(filter(self._is_observing, self.subject.modules), None)) is not None:
            reason = (
                f"'{observing or '(model)'}' rounds by the range of all inputs so far, which each pass changes."
                " Switch observers off with torch.ao.quantization.disable_observer."
            )
            self.unmeasured |= dict.fromkeys(self.wanted & {"repeatability", "batch-consistency"}, reason)
        elif again and alone and not max(again) < _EXPLAINED * max(alone):
            self.unmeasured["batch-consistency"] = (
                "The output differs between two identical passes, so a difference between a batch and an input alone"
                " proves nothing."
            )
        elif alone and (scaled := next(filter(self._is_scaled_by_batch, self.subject.modules), None)) is not None:
            self.unmeasured["batch-consistency"] = (
                f"'{scaled or '(model)'}' is quantised dynamically: it rounds by the range of its whole batch, so an"
                " input alone may differ by design."
            )

    def _is_observing(self, name: str) -> bool:
        """Tell whether a module imitates quantisation with a range that it still updates, even in eval mode."""
        # The buffers of torch.ao.quantization's FakeQuantizeBase, which TorchScript keeps.
        switches = [attribute_of(self.subject.modules[name], f"{kind}_enabled") for kind in ("observer", "fake_quant")]
        return all(isinstance(switch, Tensor) and switch.numel() == 1 and bool(switch) for switch in switches)

    def _is_scaled_by_batch(self, name: str) -> bool:
        """Tell whether a module rounds its input to 8 bits with one scale for the whole batch."""
        module: Any = self.subject.modules[name]
        weights = attribute_of(module, "_packed_params", module)  # float16 needs no scale
        is_script = isinstance(module, torch.jit.ScriptModule)
        # TorchScript keeps the dotted name of the Python class, with its own prefix.
        home = module._c._type().qualified_name() if is_script else type(module).__module__
        return "torch.ao.nn.quantized.dynamic" in home and attribute_of(weights, "dtype") is not torch.float16


def _max_abs(values: Tensor) -> float | None:
    if values.layout != torch.strided or values.is_nested or values.is_meta:
        return None
    numbers = double_numbers(values)
    finite = numbers[numbers.isfinite()]
    return float(finite.abs().max()) if finite.numel() else None


def _differs_in_kind(tensor: Tensor, other: Tensor) -> bool:
    """Tell whether shapes or whole numbers differ, as when detections are lost, gained or reordered."""
    return tensor.shape != other.shape or (not tensor.is_floating_point() and not torch.equal(tensor, other))


def _common_scores(tensor: Tensor, other: Tensor) -> tuple[Tensor, Tensor] | None:
    if tensor.dim() != 1 or other.dim() != 1 or not tensor.is_floating_point():
        return None
    count = min(len(tensor), len(other))
    return tensor.sort(descending=True).values[:count], other.sort(descending=True).values[:count]


def difference(first: Tensor, second: Tensor) -> float | None:
    """Return the greatest absolute difference over the greatest finite magnitude in either.

    It is 0 for equal tensors, NaN in the same places included; NaN where NaN meets a number; Inf where shapes differ,
    or Inf meets anything else; None for tensors that cannot be read.
    """
    # The ragged axis of a nested tensor has a symbolic size, which differs from pass to pass.
    ragged = first.is_nested and second.is_nested
    if first.dtype != second.dtype or (not ragged and first.shape != second.shape):
        return math.inf
    try:
        left, right = double_numbers(first), double_numbers(second)
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    if left.shape != right.shape:  # ragged and sparse tensors of equal shapes may hold different numbers of values
        return math.inf
    if not left.numel():
        return 0.0
    equal = (left == right) | (left.isnan() & right.isnan())
    furthest = float(torch.where(equal, 0.0, (left - right).abs()).max())
    if not 0 < furthest < math.inf:
        return furthest
    return furthest / max(float(tensor[tensor.isfinite()].abs().max()) for tensor in (left, right))


def double_numbers(tensor: Tensor) -> Tensor:
    """Return the stored values of a tensor in double precision, on the CPU."""
    values, _, _ = stored_values(tensor.detach().cpu(), () if tensor.is_nested else tuple(tensor.shape))
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def greatest(first: float | None, second: float | None) -> float | None:
    """Return the greater of two differences: NaN if either is, and None only for two None."""
    gaps = [gap for gap in (first, second) if gap is not None]
    return math.nan if any(math.isnan(gap) for gap in gaps) else max(gaps, default=None)


def by_input(returned: Returned, batch: Batch) -> list[dict[str, Tensor]]:
    """Return the part of the result that belongs to each input of a batch, by path.

    A detector returns a list with a result for each input. Other results are sliced along axis 0, if it counts inputs.
    """
    count = len(batch.indices)
    if is_listed(returned, batch):
        return [
            {path.removeprefix(f"[{index}]"): tensor for path, tensor in returned.items() if _item(path) == index}
            for index in range(count)
        ]
    parts: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for path, tensor in returned.items():
        if not tensor.is_nested and tensor.layout == torch.strided and tensor.dim() and tensor.shape[0] == count:
            for index, part in enumerate(parts):
                part[path] = tensor[index : index + 1]
    return parts


def varying(first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Return the paths that two inputs have in common, without empty tensors."""
    return [path for path, tensor in first.items() if path in other and tensor.numel() + other[path].numel()]


def is_listed(returned: Returned, batch: Batch) -> bool:
    """Tell whether the network took a list of inputs and returned a list of results, one for each."""
    count = len(batch.indices)
    inputs = batch.args[0] if batch.args else None
    items = {_item(path) for path in returned}
    return isinstance(inputs, list) and len(inputs) == count and None not in items and max(items, default=0) < count  # type: ignore[type-var, operator]


def _item(path: str) -> int | None:
    match = re.match(r"\[(\d+)\]", path)
    return int(match[1]) if match else None


def with_a_mirrored_copy(batch: Batch) -> Batch | None:
    """Return the first input of a batch and its mirrored negative as a batch; None if the two are equal.

    Mirroring alone may leave statistics over pixels as they are, and a factor vanishes in normalisation. Whole numbers
    are only mirrored: they may be indices.
    """
    alone = part_of(batch, 0)

    def doubled(value: Any, change: Callable[[Tensor], Tensor], name: str, *, is_list: bool) -> Any:
        if is_list:
            return [*value, *with_changed(value, lambda _, tensor: change(tensor))]

        def with_another(path: str, tensor: Tensor) -> Tensor:
            is_of_all = not tensor.dim() or name + path in alone.shared
            return tensor if is_of_all else joined([tensor, change(tensor)])

        return with_changed(value, with_another)

    args = tuple(doubled(value, _mirrored, "", is_list=isinstance(value, list)) for value in alone.args)
    again = torch.clone if alone.args else _mirrored
    by_name = {key: doubled(value, again, key, is_list=key in alone.listed) for key, value in alone.kwargs.items()}
    index, record = alone.indices[0], alone.records[0]
    pair = replace(alone, args=args, indices=(index, index + 1), records=(record, record), kwargs=by_name)
    return None if same_input(part_of(pair, 0), part_of(pair, 1)) else pair


def _mirrored(tensor: Tensor) -> Tensor:
    if tensor.is_nested:
        return torch.nested.as_nested_tensor([*map(_mirrored, tensor.unbind())], layout=tensor.layout)
    flipped = tensor.flip(-1) if tensor.dim() else tensor
    return -flipped if tensor.is_floating_point() or tensor.is_complex() else flipped


def same_input(first: Batch, second: Batch) -> bool:
    """Tell whether two batches, both of one input, hold equal values; NaN equals NaN."""
    inputs = [tensors_given(batch.args, batch.kwargs) for batch in (first, second)]
    return all(difference(left, right) == 0 for (_, left), (_, right) in zip(*inputs, strict=True))
