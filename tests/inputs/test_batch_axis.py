"""Which axis of a tensor counts inputs: one rule, for files and for tensors in Python, by the network's first layer."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.errors import UsageError
from hookscope.models.input_spec import default_preprocessing


class Last(nn.Module):
    """Return the last output of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.rnn(x)[0][:, -1])


class Functional(nn.Module):
    """Own no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 5))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))


def pooled(convolution: nn.Module, pool: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Identity(), convolution, pool, nn.Flatten(), nn.Linear(4, 2))


NETWORKS = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU()), 1, (4,), (6, 4)),
    "words": (words, 1, (20,), (4, 20)),
    "signal": (lambda: pooled(nn.Conv1d(2, 4, 3), nn.AdaptiveAvgPool1d(1)), 2, (2, 50), (5, 2, 50)),
    "picture": (lambda: pooled(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1)), 3, (3, 8, 8), (2, 3, 8, 8)),
    "clip": (lambda: pooled(nn.Conv3d(3, 4, 3), nn.AdaptiveAvgPool3d(1)), 4, (3, 4, 8, 8), (2, 3, 4, 8, 8)),
    "recurrent": (Last, 2, (7, 3), (5, 7, 3)),
    "functional": (Functional, None, (5,), (3, 5)),
}


def tensor_for(name: str, shape: tuple[int, ...]) -> Tensor:
    values = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    return values.long() % 10 if name == "words" else torch.sin(values)


@pytest.mark.parametrize(
    ("name", "way"), [*((name, "tensor") for name in NETWORKS), ("linear", "file"), ("picture", "file")]
)
def test_axis_0_counts_inputs_unless_the_tensor_is_a_single_one(name: str, way: str, tmp_path: Path) -> None:
    build, axes, one, several = NETWORKS[name]
    network = build().eval()
    assert default_preprocessing(network).input_axes == axes
    for shape, batch_shape in ((one, (1, *one)), (several, several)):
        tensor = tensor_for(name, shape)
        torch.save(tensor, tmp_path / "x.pt")
        run = hookscope.activations(network, tensor if way == "tensor" else tmp_path / "x.pt", layer="*")
        expected = network(tensor.reshape(batch_shape)).detach()
        assert len(run.inputs) == batch_shape[0]
        assert run.rows[-1].shape == tuple(expected.shape)
        assert run.rows[-1].mean == pytest.approx(expected.double().mean().item(), abs=1e-6)


def test_an_option_names_another_axis_or_none() -> None:
    network = nn.Linear(4, 3)
    assert hookscope.activations(network, torch.ones(6, 4), batch_axis="none").rows[0].shape == (1, 6, 3)
    assert len(hookscope.activations(network, torch.ones(4, 6), batch_axis=1).inputs) == 6
    with pytest.raises(UsageError, match=r"shape \(4, 6\) has no axis 2. Give another `batch_axis`"):
        hookscope.activations(network, torch.ones(4, 6), batch_axis=2)


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_network_that_takes_time_first_is_warned_of(batch_first: bool) -> None:
    run = hookscope.activations(nn.LSTM(3, 4, batch_first=batch_first), torch.ones(2, 7, 3))
    sentence = "LSTM takes time on axis 0, where hookscope puts inputs: build it with batch_first=True."
    assert (sentence in run.warnings) is not batch_first


def test_a_network_of_words_gets_noise_of_whole_numbers_below_its_vocabulary() -> None:
    run = hookscope.grads(words(), input_shape=(4, 200), loss="sum")
    # With the loss summed, a row of the embedding's gradient is as often the sum of the last weights as its word came.
    counts = run.parameters[0].gradient
    assert run.failure is None
    assert run.inputs[0].steps == ("whole numbers below 10, drawn at random, seed 0",)
    assert counts.zero_fraction == 0
    assert hookscope.check(words(), input_shape=(2, 5)).passed
    assert hookscope.layers(words(), input_shape=(2, 5))["1"].output_shapes == ((2, 5, 2),)


@pytest.mark.parametrize("run", [hookscope.activations, hookscope.survey])
def test_a_tensor_without_an_input_is_refused(run: Callable[..., object]) -> None:
    with pytest.raises(UsageError, match=r"The tensor of shape \(0, 4\) holds no input\. Is another `batch_axis`"):
        run(nn.Linear(4, 3), torch.zeros(0, 4))
