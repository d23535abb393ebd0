"""What a survey should find, from all activations kept and NumPy in float64."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.results.survey import SurveyChannel, SurveyRow

Array = NDArray[np.float64]


def kept_outputs(network: nn.Module, inputs: Tensor, batch_size: int) -> dict[str, Array]:
    """Return the outputs of all modules that return one tensor, by label, over all inputs: axis 0 joined."""
    parts: dict[str, list[Array]] = {}
    counts: Counter[str] = Counter()

    def keep(name: str, output: object) -> None:
        label = f"{name or '(model)'}{f'#{counts[name]}' if counts[name] else ''}"
        counts[name] += 1
        if isinstance(output, Tensor):
            parts.setdefault(label, []).append(output.detach().double().numpy().copy())

    handles = [
        module.register_forward_hook(lambda _module, _args, output, name=name: keep(name, output))
        for name, module in network.named_modules()
    ]
    was_training = network.training
    network.eval()
    with torch.no_grad():
        for begin in range(0, len(inputs), batch_size):
            counts.clear()
            network(inputs[begin : begin + batch_size].clone())
    network.train(was_training)
    for handle in handles:
        handle.remove()
    return {label: np.concatenate(part) for label, part in parts.items()}


def check_row(row: SurveyRow, values: Array, names: Sequence[str], top: int, rtol: float = 1e-5) -> None:
    """Compare a row with all its values, (N, ...)."""
    finite = values[np.isfinite(values)]
    close = {"rtol": rtol, "atol": rtol * np.abs(finite).mean()}
    actual = row.activation
    assert actual.shape == values.shape
    assert actual.element_count == values.size
    np.testing.assert_allclose([actual.mean, actual.std], [finite.mean(), finite.std()], **close)
    assert (actual.min, actual.max) == (finite.min(), finite.max())
    check_bins(row, finite)
    if actual.channel_axis is None:
        assert row.channels == ()
        return
    by_channel = np.moveaxis(values, actual.channel_axis, 1)
    by_channel = by_channel.reshape(*by_channel.shape[:2], -1)  # (N, C, P)
    assert len(row.channels) == by_channel.shape[1]
    places = tuple(size for axis, size in enumerate(values.shape) if axis not in (0, actual.channel_axis))
    for channel in row.channels:
        check_channel(channel, by_channel[:, channel.channel], places, names, top, close)


def check_bins(row: SurveyRow, finite: Array) -> None:
    """Count the values of every bin by its edges: 1 + 32 (e + 1074) + p is from 2^e (1 + p/32), up to the next."""
    spread = row.activation.distribution
    assert spread is not None
    assert spread.keys is not None
    assert spread.counts is not None
    assert spread.counts.sum() == finite.size
    magnitudes = np.abs(finite)
    for key, count in zip(spread.keys.tolist(), spread.counts.tolist(), strict=True):
        if key == 0:
            assert count == (finite == 0).sum()
            continue
        exponent, part = divmod(abs(key) - 1, 32)
        low, high = (2.0 ** (exponent - 1074) * (1 + case / 32) for case in (part, part + 1))
        inside = (magnitudes >= low) & (magnitudes < high) & (np.sign(finite) == np.sign(key))
        assert count == inside.sum()


def check_channel(
    actual: SurveyChannel,
    values: Array,
    places: tuple[int, ...],
    names: Sequence[str],
    top: int,
    close: dict[str, float],
) -> None:
    """Compare a channel with all its values, (N, P)."""
    is_finite = np.isfinite(values)
    finite = values[is_finite]
    assert actual.firing_positions == (values != 0).mean()
    assert actual.firing_inputs == (values != 0).any(1).mean()
    assert actual.is_dead == (not values.any())
    assert actual.nonfinite_count == (~is_finite).sum()
    if not finite.size:
        assert (actual.mean, actual.min, actual.top) == (None, None, ())
        return
    np.testing.assert_allclose([actual.mean, actual.std], [finite.mean(), finite.std()], **close)
    assert (actual.min, actual.max) == (finite.min(), finite.max())
    greatest = np.where(is_finite, values, -np.inf).max(1)
    usable = [number for number in range(len(values)) if is_finite[number].any()]
    for listed, numbers in (
        (actual.top, usable),
        (actual.halves[0], [each for each in usable if not each % 2]),
        (actual.halves[1], [each for each in usable if each % 2]),
    ):
        ranked = sorted(numbers, key=lambda number: (-greatest[number], number))[:top]
        assert [each.input for each in listed] == [names[number] for number in ranked]
        assert [each.value for each in listed] == [greatest[number] for number in ranked]
        for each, number in zip(listed, ranked, strict=True):
            row = np.where(is_finite[number], values[number], -np.inf)
            expected = np.unravel_index(row.argmax(), places) if places else ()
            assert each.position == tuple(map(int, expected))
