"""On an accelerator no step waits for its numbers, and they are the same as on the CPU."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import hookscope
from hookscope.commands.watch.gradients import norms_of
from hookscope.results.training import TrainingLog
from tests import far_device

pytestmark = pytest.mark.exhaustive


def trained(send: Callable[[Tensor], Tensor]) -> tuple[TrainingLog, list[list[str]]]:
    """Train nine steps, the fifth watched; return the log, and what made somebody wait at each step."""
    torch.manual_seed(0)
    network = nn.Linear(4, 2)
    for name in ("weight", "bias"):
        setattr(network, name, nn.Parameter(send(getattr(network, name).data)))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, foreach=False)
    looks = []
    with hookscope.watch(network, optimizer, every=5, on_line=lambda _: None) as watch:
        for _ in range(9):
            far_device.looks.clear()
            loss = network(send(torch.randn(8, 4))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss)
            looks.append([*far_device.looks])
    return watch.log, looks


def _trained_there() -> tuple[TrainingLog, list[list[str]]]:
    return trained(far_device.FarTensor)


def test_no_step_waits_but_a_watched_one(elsewhere: ProcessPoolExecutor) -> None:
    log, looks = elsewhere.submit(_trained_there).result(timeout=300)
    assert [bool(look) for look in looks] == [number == 5 for number in range(1, 10)]
    here, _ = trained(lambda tensor: tensor)
    assert len(log.steps) == 9
    assert log.ends[0].reason == "closed"
    for there, near in zip(log.steps, here.steps, strict=True):
        assert there.loss == pytest.approx(near.loss, rel=1e-6)
        assert there.gradient_norm == pytest.approx(near.gradient_norm, rel=1e-6)
    (there,), (near,) = log.watched, here.watched
    assert [layer.label for layer in there.layers] == [layer.label for layer in near.layers]
    for one, other in zip(there.parameters, near.parameters, strict=True):
        assert one.update_norm == pytest.approx(other.update_norm, rel=1e-5)
        assert one.gradient_max == pytest.approx(other.gradient_max, rel=1e-5)


def _norms_there(size: float) -> list[float]:
    tensors = [torch.full((3, 4), size), torch.zeros(2)]
    return norms_of([*map(far_device.FarTensor, tensors)]).cpu().tolist()


@pytest.mark.parametrize("size", [2.0**66, 2.0**-90])
def test_norms_whose_squares_float32_cannot_hold_are_known_there(elsewhere: ProcessPoolExecutor, size: float) -> None:
    norms = elsewhere.submit(_norms_there, size).result(timeout=300)
    assert norms == pytest.approx([size * 12**0.5, 0], rel=1e-6, abs=0)
