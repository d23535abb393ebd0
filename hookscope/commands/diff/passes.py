"""Run the networks one after the other over each batch: A's outputs wait in a spool, and B's hooks compare them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hookscope.commands.diff.alignment import CallKey, matching_names
from hookscope.commands.diff.compare_gradients import GradientComparison
from hookscope.commands.diff.compare_outputs import Outputs
from hookscope.commands.diff.difference_maps import KeptMaps
from hookscope.commands.diff.hooked_network import HookedNetwork, Observer, PairedOutput
from hookscope.commands.diff.measures import sums_of
from hookscope.commands.diff.torch_compile import Compiled
from hookscope.commands.diff.values import REFERENCE, A, B, Compared, Spool, Value, Versions, compared
from hookscope.errors import ModelError
from hookscope.hooks.autograd import plain_arithmetic
from hookscope.hooks.observed import RowKey, physical
from hookscope.hooks.pytree import tensors_given
from hookscope.hooks.tracing import eager
from hookscope.inputs.batches import Batch
from hookscope.inspection.backward import PassError
from hookscope.inspection.network import BatchQueue
from hookscope.inspection.run import Break, run_batches
from hookscope.inspection.state.preservation import RandomStates
from hookscope.results.inputs import InputRecord
from hookscope.results.network import row_label
from hookscope.text import exception_line


@dataclass(slots=True)
class Passes:
    """The passes of networks over batches, and the comparisons of what they return.

    Attributes:
        networks: A, B and the optional reference.
        outputs: Compares the outputs of the networks.
        maps: Maps of A-B for the first input.
        compiled: B, compiled; in one piece it gives B's output. None unless B is compiled.
        gradients: Compares the gradients; None if they are not compared.
        shadow: Whether layers of B also run on A's inputs.
        records: Records of the inputs that all networks ran on; `records_b` has those of B's own inputs.
        rows: By the place of A's output, over all batches without errors.
    """

    networks: Sequence[HookedNetwork]
    outputs: Outputs
    maps: KeptMaps
    compiled: Compiled | None
    gradients: GradientComparison | None
    shadow: bool
    records: list[InputRecord] = field(default_factory=list)
    records_b: list[InputRecord] = field(default_factory=list)
    rows: dict[RowKey, Compared] = field(default_factory=dict)
    _batch_rows: dict[RowKey, Compared] = field(default_factory=dict)
    _spooled: dict[int, dict[RowKey, PairedOutput]] = field(default_factory=dict)  # by position of the network
    _arguments_of_a: dict[CallKey, tuple[list[Any], TreeSpec]] = field(default_factory=dict)  # for shadows
    _shadow_outputs: dict[CallKey, dict[str, Tensor] | str] = field(default_factory=dict)  # by slot, or the error
    _started: list[HookedNetwork] = field(default_factory=list)
    _random_states: RandomStates = field(default_factory=RandomStates)
    _count: int = 0

    def run(self, queue: BatchQueue, finished: Callable[[int], None]) -> None:
        """Run the networks over all batches; `finished` is called after each batch with the number of finished inputs.

        Raises:
            ModelError: If a network raised; with an `on_error` of the queue, if one raised on every input.
        """
        with ExitStack() as block:
            if self.compiled is not None:
                block.enter_context(self.compiled.forwards())
            block.enter_context(eager())
            for network in (*self.networks, *([] if self.compiled is None else [self.compiled.whole])):
                block.enter_context(network.prepared())
            broken = run_batches(queue, self._run, self.records, finished, self._rewind)
        if broken is not None:
            raise ModelError(broken.message) from broken.error

    def _run(self, batch: Batch) -> Break | None:
        """Run the networks over a batch, and keep its rows unless a network raises."""
        self._count = len(batch.indices)
        returned, broken = self._run_in_turn(batch)
        if self.compiled is not None:
            self.compiled.check(broken)
        if broken is not None:
            return broken
        chosen = self.outputs.chosen(returned)
        if self.gradients is not None:
            try:
                self.gradients.add(batch, len(self.records))
            except PassError as error:
                return Break(str(error), error=error.__cause__)
        self.outputs.add(chosen, len(self.records), self._count)
        for key, row in self._batch_rows.items():
            if key in self.rows:
                self.rows[key].merge(row)
            else:
                self.rows[key] = row
        self.records.extend(self.networks[A].own_inputs(batch).records)
        self.records_b.extend(self.networks[B].own_inputs(batch).records)
        return None

    def _run_in_turn(self, batch: Batch) -> tuple[list[object], Break | None]:
        """Run the networks from equal random states, B last; return their outputs, and the error of one.

        The next batch begins with the random states after B, or after A if B draws no numbers.
        """
        self._batch_rows, self._spooled, self._started = {}, {}, []
        spool, self._random_states = Spool(), RandomStates()
        ends: dict[int, RandomStates] = {}
        returned: dict[int, object] = {}
        for place in (A, *range(REFERENCE, len(self.networks)), B):
            self._random_states.enter()
            self._started.append(self.networks[place])
            returned[place] = self.networks[place].run(
                batch, self._comparing_observer() if place == B else self._spooling_observer(place, spool)
            )
            ends[place] = RandomStates()
            if isinstance(returned[place], Break):
                break
        else:
            if self.compiled is not None:
                self._random_states.enter()
                returned[B] = self.compiled.whole.run(batch, None)
            ends[B if ends[B].has_drawn(self._random_states) else A].enter()
        self._arguments_of_a.clear()
        self._shadow_outputs.clear()
        self._spooled = {}
        broken = next((output for output in returned.values() if isinstance(output, Break)), None)
        return [returned[place] for place in sorted(returned)], broken

    def _rewind(self) -> None:
        for network in self._started:
            network.rewind()
        self._random_states.enter()

    def _spooling_observer(self, place: int, spool: Spool) -> Observer:
        versions, outputs = Versions(spool.keep), self._spooled.setdefault(place, {})
        keeps = partial(self._keep_inputs, versions) if self.shadow and place == A else None
        return Observer(versions, lambda output: outputs.update({output.place: output}), begins=keeps)

    def _comparing_observer(self) -> Observer:
        if not self.records:  # the first batch may be repeated input by input, or left out
            shown = [place for place in self._spooled[A] if self.networks[A].has_row(place[0], row_label(*place))]
            self.maps = KeptMaps(self.maps.eps, len(shown))
        versions = Versions(lambda tensor: Value(tensor, ref(tensor)))
        return Observer(versions, self._compare, self._compare_input, self._run_shadow if self.shadow else None)

    def _partner_place(self, b: PairedOutput) -> RowKey | None:
        slot, rows_of_a = b.place[2], self.networks[A].rows
        if (*b.call, slot) in rows_of_a:
            return (*b.call, slot)
        slots = [place[2] for place in rows_of_a if place[:2] == b.call]
        which = matching_names(slots, b.slots)[b.slots.index(slot)]
        return None if which is None else (*b.call, slots[which])

    def _compare(self, b: PairedOutput) -> None:
        place = self._partner_place(b)
        if place is None or any(place not in outputs for outputs in self._spooled.values()):
            return
        a, *exact = [outputs.pop(place) for outputs in self._spooled.values()]
        batch = len(self.records), self._count
        axis = a.channel_axis if a.value.shape[:1] == (self._count,) else None
        values = [a.value, b.value, *(output.value for output in exact)]
        row = self._batch_rows[place] = compared(values, *batch, axis)
        row.place_b = b.place
        if len(a.inputs) == len(b.inputs):
            order = matching_names([path for path, _ in b.inputs], [path for path, _ in a.inputs])
            inputs = [(a.inputs[at][1], b.inputs[other][1]) for at, other in enumerate(order) if other is not None]
            sums = [value.sums_with(other, *batch) for value, other in inputs]
            row.inputs = tuple([measure for measure in sums if measure is not None]) if None not in sums else ()
            shapes = [(value.shape, other.shape) for value, other in inputs]
            # A ragged shape holds -1.
            row.input_shapes_differ = any(one != two and -1 not in (*one, *two) for one, two in shapes)
        shadow = self._shadow_outputs.get(b.call, {})
        if isinstance(shadow, str):
            row.not_added = shadow
        elif b.place[2] in shadow:
            row.added = sums_of(a.value.read(), shadow[b.place[2]])
        difference = row.sums.get((A, B))
        label = row_label(*place)
        if difference is not None and not self.records and self.networks[A].has_row(place[0], label):
            added = None if row.added is None else row.added.relative_l2
            self.maps.offer(label, a, b.value.read(), difference.relative_l2, added, self._count)

    def _compare_input(self, call: CallKey, b: Value) -> None:
        """Compare the first input of a call of B that will overwrite it."""
        a = next((output for place, output in self._spooled[A].items() if place[:2] == call), None)
        if a is not None and len(a.inputs) == 1:
            a.inputs[0][1].sums_with(b, len(self.records), self._count)

    def _keep_inputs(self, versions: Versions, call: CallKey, layer: str, args: Any, kwargs: Any) -> None:
        """Keep the arguments of a layer of A, to run its partner on them."""
        if layer in self.networks[A].selected:
            leaves, form = tree_flatten((args, kwargs))  # some containers accept only tensors
            with torch._C.DisableTorchFunction(), plain_arithmetic():
                self._arguments_of_a[call] = (
                    [versions.of(physical(leaf)[0]) if isinstance(leaf, Tensor) else leaf for leaf in leaves],
                    form,
                )

    def _run_shadow(self, call: CallKey, layer: str, args: Any, kwargs: Any) -> None:
        """Run a layer of B on its partner's arguments, moved to the device and dtype of B's arguments."""
        if call not in self._arguments_of_a:
            return
        values, form = self._arguments_of_a.pop(call)
        try:
            with torch._C.DisableTorchFunction(), plain_arithmetic():
                like = (tensor for _, tensor in tensors_given(args, kwargs))
                leaves = [_moved_like(value.read(), like) if isinstance(value, Value) else value for value in values]
            self._shadow_outputs[call] = self.networks[B].run_alone(layer, *tree_unflatten(leaves, form))
        except Exception as error:  # noqa: BLE001 - B's layer may refuse A's arguments
            self._shadow_outputs[call] = f"B's layer on A's input: {exception_line(error)}"


def _moved_like(tensor: Tensor, others: Iterator[Tensor]) -> Tensor:
    """Return a copy of a tensor on the device of the next of `others`, and in its dtype if it is floating."""
    other = next(others, tensor)
    return tensor.to(other.device, other.dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
