"""The pixels that a position of an output depends on, found by gradients where no closed form is known."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookscope.commands.survey.pictures import are_pictures, inputs_again
from hookscope.errors import ModelError
from hookscope.hooks.module_scopes import module_scopes
from hookscope.hooks.pytree import tensors_in
from hookscope.hooks.selection import module_index
from hookscope.inputs.batches import to_device
from hookscope.inspection.failures import reraise_internal
from hookscope.inspection.network import inspected_network
from hookscope.inspection.session import Session
from hookscope.inspection.state.preservation import preserved
from hookscope.results.survey import Box, ChannelPlace, SurveyRow

_AT_ONCE = 8


def input_supports(session: Session, row: SurveyRow, places: Sequence[ChannelPlace]) -> Mapping[ChannelPlace, Box]:
    """Return the smallest box around the pixels that each place depends on, for places where it is known.

    Only the values of this input count: behind a closed ReLU a place depends on no pixel. If the first few places
    depend on all of their inputs, the others are taken to do so too, and are left out.
    """
    boxes: dict[ChannelPlace, Box] = {}
    if row.slot or ":" in row.layer or row.activation.channel_axis is None:
        return boxes
    by_name: defaultdict[str, list[ChannelPlace]] = defaultdict(list)
    for place in places:
        by_name[place.input].append(place)
    inputs, seen = session.inputs, 0
    for names, batch in inputs_again(inputs.preprocessing, inputs, [*by_name]):
        values, *others = to_device(batch, inputs.device, inputs.dtype).args or (None,)
        if others or batch.kwargs or not are_pictures(values):
            continue
        wanted = [(number, place) for number, name in enumerate(names) for place in by_name.get(name, ())]
        for begin in range(0, len(wanted), _AT_ONCE):
            numbers, some = zip(*wanted[begin : begin + _AT_ONCE], strict=True)
            gradients = _gradients(session, values[[*numbers]], row, some)
            boxes |= {place: _box(gradient) for place, gradient in zip(some, gradients, strict=False) if gradient.any()}
            seen += len(some)
            if seen >= _AT_ONCE and {*boxes.values()} == {(0, 0, *values.shape[2:])}:
                return boxes
    return boxes


def _gradients(session: Session, inputs: Tensor, row: SurveyRow, places: Sequence[ChannelPlace]) -> NDArray[np.bool_]:
    """Return which pixels, (N, H, W), have a gradient; without rows if the network cannot be differentiated."""
    network = inspected_network(session.loaded).network
    leaf = inputs.detach().clone().requires_grad_()
    calls: Counter[str] = Counter()
    chosen: list[Tensor] = []

    def note(name: str, output: object) -> None:
        if (name, calls[name]) == (row.layer, row.call):
            for _, tensor in tensors_in(output)[:1]:
                values = tensor.movedim(row.activation.channel_axis or 0, 1)
                at = [(number, place.channel, *place.position) for number, place in enumerate(places)]
                chosen.append(torch.stack([values[place] for place in at]).sum())
        calls[name] += 1

    try:
        with (
            preserved(network, seed=session.seed),
            module_scopes(module_index(network)[0], lambda _name: None, note),
            torch.enable_grad(),
        ):
            network(leaf * 1)  # not the leaf itself: the network may overwrite its input
            total = chosen[0] if chosen else leaf.sum() * 0
            (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True)
    except (RuntimeError, IndexError, ModelError) as error:  # the network cannot be differentiated
        reraise_internal(error)
        return np.zeros((0, *inputs.shape[2:]), np.bool_)
    return (torch.zeros_like(leaf) if gradient is None else gradient).ne(0).any(1).cpu().numpy()


def _box(pixels: NDArray[np.bool_]) -> Box:
    rows, columns = np.nonzero(pixels.any(1))[0], np.nonzero(pixels.any(0))[0]
    return int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1
