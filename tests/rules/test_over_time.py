"""Gradients over time: each step's against autograd's own, and which courses are judged lost."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import hookscope
from hookscope.results.gradients import Gradients, StepsRow
from hookscope.rules.judging import judge_gradients
from tests.commands.check.measurements import inspection, layer_row, tensor

RULE = "gradient-over-time"
WIDTH = 6
Forward = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Runs a layer under a name as a function says."""

    def __init__(self, layer: nn.Module, forward: Forward, features: int = 8) -> None:
        super().__init__()
        self.layer, self.run, self.head = layer, forward, nn.Linear(features, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self.layer, x))


def cells(cell: nn.Module, x: Tensor) -> Tensor:
    state = None
    for step in range(x.shape[1]):
        state = cell(x[:, step], state)
    return state[0] if isinstance(state, tuple) else state  # type: ignore[return-value]


def packed(layer: nn.Module, x: Tensor) -> Tensor:
    lengths = torch.tensor([x.shape[1], x.shape[1] - 2, 4])
    state = layer(pack_padded_sequence(x, lengths, batch_first=True))[1]
    return state[0][-1] if isinstance(state, tuple) else state[-1]


def chunks(layer: nn.Module, x: Tensor) -> Tensor:
    state = None
    for part in x.split(4, 1):
        output, state = layer(part, state)
    return output[:, -1]


def last(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)[0][:, -1]


def recurrent(kind: type[nn.RNNBase], **options: Any) -> nn.Module:
    return kind(WIDTH, 8, batch_first=True, **options)


CASES: dict[str, tuple[Callable[[], nn.Module], Forward]] = {
    "LSTM": (lambda: recurrent(nn.LSTM), last),
    "GRU": (lambda: recurrent(nn.GRU), last),
    "RNN": (lambda: recurrent(nn.RNN, num_layers=2), last),
    "packed": (lambda: recurrent(nn.LSTM), packed),
    "in chunks": (lambda: recurrent(nn.LSTM), chunks),
    "GRUCell": (lambda: nn.GRUCell(WIDTH, 8), cells),
    "checkpointed": (
        lambda: recurrent(nn.LSTM),
        lambda layer, x: checkpoint(lambda states: layer(states)[0][:, -1], x, use_reentrant=False),
    ),
    "self-attention": (
        lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        lambda layer, x: F.pad(layer(x, x, x)[0][:, 0], (0, 2)),
    ),
    "cross-attention": (
        lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        lambda layer, x: F.pad(layer(x[:, :1].detach(), x, x)[0][:, 0], (0, 2)),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample("LSTM", "packed", "GRUCell", "self-attention")
def test_the_gradient_of_each_step_is_autograds(case: str) -> None:
    build, forward = CASES[case]
    torch.manual_seed(0)
    network, x = Net(build(), forward).eval(), torch.randn(3, 11, WIDTH)
    result = hookscope.grads(network, x, loss="sum")
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(network(leaf).sum(), leaf)
    (row,) = result.over_time
    assert torch.allclose(torch.tensor(row.largest), expected.abs().amax((0, 2)), rtol=1e-5, atol=0)
    assert result.verification is not None
    assert result.verification.status == "same"
    assert all(parameter.grad is None for parameter in network.parameters())


def test_a_way_around_the_layer_does_not_count() -> None:
    torch.manual_seed(0)
    network = Net(recurrent(nn.LSTM), lambda layer, x: layer(x)[0][:, -1] + F.pad(x.mean(1), (0, 2)) * 1000)
    x = torch.randn(2, 90, WIDTH)
    (row,) = hookscope.grads(network, x, loss="sum").over_time
    assert max(row.largest) < 1
    assert row.largest[0] < 1e-15


def test_several_batches_are_one_course_for_each_length() -> None:
    torch.manual_seed(0)
    network, x = Net(recurrent(nn.GRU), last).eval(), torch.randn(4, 9, WIDTH)
    (whole,) = hookscope.grads(network, x, loss="sum").over_time
    (parts,) = hookscope.grads(network, x, loss="sum", batch_size=1).over_time
    assert parts.largest == pytest.approx(whole.largest, rel=1e-5)


def test_a_frozen_layer_behind_data_is_not_watched() -> None:
    network = Net(recurrent(nn.LSTM).requires_grad_(False), last)
    assert hookscope.grads(network, torch.randn(2, 9, WIDTH), loss="sum").over_time == ()


def test_an_input_without_elements_has_no_course() -> None:
    network = Net(nn.GRUCell(WIDTH, 8), lambda layer, x: F.pad(x[:, 0], (0, 2)) + layer(x[:0, 0]).sum())
    assert hookscope.grads(network, torch.randn(2, 9, WIDTH), loss="sum").over_time == ()


def test_an_lstm_over_120_steps_is_told_that_it_forgets() -> None:
    torch.manual_seed(0)
    result = hookscope.grads(Net(recurrent(nn.LSTM), last), torch.randn(2, 120, WIDTH), loss="ce", target=1)
    (verdict,) = [verdict for verdict in result.verdicts if verdict.rule == RULE]
    assert (verdict.level, verdict.where) == ("warn", "layer")
    assert "The gradient vanishes over time" in verdict.message
    assert "at step 0, " in verdict.message


def test_a_cell_is_told_by_its_calls_and_over_time() -> None:
    torch.manual_seed(0)
    result = hookscope.grads(Net(nn.LSTMCell(WIDTH, 8), cells), torch.randn(2, 120, WIDTH), loss="ce", target=1)
    actual = [(verdict.rule, verdict.where) for verdict in result.verdicts if verdict.rule != RULE]
    assert actual == [("vanishing-gradient", "layer[0]"), ("vanishing-gradient", "layer[1]")]
    assert [verdict.level for verdict in result.verdicts if verdict.rule == RULE] == ["warn"]


def course(values: Sequence[float], kind: str = "LSTM", dtype: str = "float32") -> Gradients:
    row = StepsRow("layer", kind, dtype, tuple(values))
    return inspection([layer_row("layer", tensor(1.0), kind)], over_time=(row,))


def verdicts(judged: Gradients) -> list[str]:
    return [judge_gradient.message for judge_gradient in judge_gradients(judged) if judge_gradient.rule == RULE]


LOST, KEPT = 2.0**-24 * 0.99, 2.0**-24
SOUND: dict[str, Gradients] = {
    "even": course([1.0] * 100),
    "a decay to 1e-4, which still trains": course([10 ** (-4 * (99 - step) / 99) for step in range(100)]),
    "half of the steps lost": course([LOST] * 50 + [1.0] * 50),
    "all at the limit": course([KEPT] * 99 + [1.0]),
    "a loss at the first step": course([1.0] + [0.0] * 99),
    "a loss at a step in the middle": course([1.0] * 20 + [0.0] * 80),
    "steps that a mask leaves out": course([1.0, 0.0, 0.0, 0.0] * 25),
    "few steps": course([LOST] * 6 + [1.0]),
    "in float64 more is kept": course([2.0**-52] * 99 + [1.0], dtype="float64"),
    "no gradient at all": course([0.0] * 50),
}


@pytest.mark.parametrize("case", SOUND)
def test_these_courses_are_sound(case: str) -> None:
    assert verdicts(SOUND[case]) == []


UNSOUND: dict[str, tuple[Gradients, str]] = {
    "more than half": (course([LOST] * 51 + [1.0] * 49), "vanishes over time: 51 of 100 steps"),
    "zeros that it has come down to": (
        course([0.0] * 40 + [1e-44, 1e-30, 1e-20, 1e-9] + [1.0] * 20),
        "vanishes over time: 44 of 64 steps",
    ),
    "towards both ends": (course([1.0] * 10 + [LOST] * 80 + [1.0] * 10), "80 of 100 steps"),
    "growing": (course([1.0] * 10 + [1e-12] * 30), "explodes over time: 30 of 40 steps"),
    "calls of a cell": (course([LOST] * 30 + [1.0] * 10, "GRUCell"), "30 of 40 calls"),
    "attention to one place": (course([1.0] + [LOST] * 30, "MultiheadAttention"), "Attention is saturated: 30 of 31"),
    "in float64": (course([2.0**-54] * 90 + [1.0] * 10, dtype="float64"), "1e-16 of the greatest"),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_these_courses_are_not(case: str) -> None:
    judged, words = UNSOUND[case]
    (message,) = verdicts(judged)
    assert words in message


def test_a_saturated_attention_is_found_and_an_untrained_one_is_not() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, 1, batch_first=True)

    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        return F.pad(layer(x, x, x)[0].mean(1), (0, 2))

    x = torch.randn(1, 40, WIDTH)
    assert not [
        verdict for verdict in hookscope.grads(Net(attention, forward), x, loss="sum").verdicts if verdict.rule == RULE
    ]
    with torch.no_grad():
        attention.in_proj_weight[: 2 * WIDTH] *= 8
    network = Net(attention, lambda layer, x: F.pad(layer(x[:, :1], x, x)[0][:, 0], (0, 2)))
    (verdict,) = [verdict for verdict in hookscope.grads(network, x, loss="sum").verdicts if verdict.rule == RULE]
    assert "Attention is saturated" in verdict.message
