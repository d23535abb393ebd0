"""Training with a watch gives the weights, and the random numbers, of training without, bit for bit."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hookscope
from tests.commands.watch.loops import Recurrent, Transformer


class Checkpointed(nn.Module):
    """Blocks that are computed again in the backward pass, in both ways that torch has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, 24))
        self.second = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24), nn.ReLU(inplace=True))
        self.head = nn.Linear(24, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = checkpoint(self.first, inputs, use_reentrant=False)
        return self.head(checkpoint(self.second, inputs, use_reentrant=True))


def _cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout2d(0.2), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(72, 4)),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "cnn": (_cnn, lambda: torch.randn(8, 3, 12, 12)),
    "transformer": (Transformer, lambda: torch.randint(0, 32, (4, 16))),
    "lstm": (Recurrent, lambda: torch.randn(4, 12, 4)),
    "checkpointed": (Checkpointed, lambda: torch.randn(8, 12)),
}

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda network: torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9, nesterov=True),
    "adamw-foreach": lambda network: torch.optim.AdamW(network.parameters(), lr=1e-3, foreach=True),
    "adamw-fused": lambda network: torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True),
}


def trained(network_name: str, optimizer_name: str, steps: int, *, every: int | None) -> list[Tensor]:
    """Return weights, buffers and the random state after a training; watched every so many steps, or not."""
    torch.manual_seed(0)
    build, batch = NETWORKS[network_name]
    network = build()
    optimizer = OPTIMIZERS[optimizer_name](network)
    watch = None if every is None else hookscope.watch(network, optimizer, every=every, on_line=lambda _: None)
    for _ in range(steps):
        output = network(batch())
        loss = F.mse_loss(output, torch.randn_like(output))
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
        if watch is not None:
            watch.step(loss)
    if watch is not None:
        watch.close()
        assert watch.log.ends[0].reason == "closed"
        assert watch.log.steps[-1].step == steps
        assert watch.log.watched[-1].layers
    return [*network.state_dict().values(), torch.get_rng_state()]


@pytest.mark.parametrize(
    ("network", "optimizer"),
    [
        *(("cnn", "adamw-fused"), ("transformer", "adamw-foreach")),
        *(("lstm", "adamw-fused"), ("checkpointed", "sgd")),
    ],
)
@pytest.mark.sample("cnn")
def test_watched_steps_change_no_bit(network: str, optimizer: str) -> None:
    without = trained(network, optimizer, 12, every=None)
    watched = trained(network, optimizer, 12, every=4)
    assert all(map(torch.equal, without, watched))


@pytest.mark.exhaustive
def test_no_hook_is_left_behind() -> None:
    network = _cnn()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    clip, step = nn.utils.clip_grad_norm_.__closure__, torch.amp.GradScaler.step
    assert clip is not None
    held = clip[0].cell_contents
    watch = hookscope.watch(network, optimizer, every=1, on_line=lambda _: None)
    for _ in range(2):
        F.mse_loss(network(torch.randn(2, 3, 12, 12)), torch.zeros(2, 4)).backward()
        optimizer.step()
        watch.step()
    watch.close()
    watch.close()
    for module in network.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert clip[0].cell_contents is held
    assert torch.amp.GradScaler.step is step


@pytest.mark.parametrize(
    ("frozen", "norm"),
    [
        (torch.tensor([[3.0, 4.0]] * 2).to(torch.float8_e4m3fn), math.hypot(3, 4, 3, 4)),
        (torch.tensor([[3.0, 4.0]] * 2, device="meta"), None),
        (torch.tensor([[3, 4]] * 2, dtype=torch.int8), None),
    ],
    ids=["float8", "meta", "int8"],
)
def test_a_frozen_weight_of_any_kind_does_not_end_the_watch(frozen: Tensor, norm: float | None) -> None:
    network = nn.Linear(2, 1)
    network.base = nn.Parameter(frozen, requires_grad=False)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with hookscope.watch(network, optimizer, every=1, on_line=lambda _: None) as watch:
        for factor in (1.0, torch.nan):  # at NaN, all weights are examined
            (factor * network(torch.ones(1, 2)).sum()).backward()
            optimizer.step()
            watch.step()
    assert [step.step for step in watch.log.steps] == [1, 2]
    assert {row.name: row.weight_norm for row in watch.log.watched[0].parameters}["base"] == norm
