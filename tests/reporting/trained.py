"""Watched trainings for the renderers: small networks trained here, measured by hand with torch alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from PIL import Image
from rich.console import RenderableType
from torch import nn

from hookscope.commands.watch.describe import describe_training
from hookscope.reporting.document_text import printed
from hookscope.reporting.html.document import document_html
from hookscope.reporting.overviews.document import draw_document
from hookscope.results.training import (
    TrainingEnd,
    TrainingFinding,
    TrainingLog,
    TrainingStart,
    TrainingStep,
    WatchedLayer,
    WatchedParameter,
    WatchedStep,
)

START = TrainingStart(
    step=1,
    networks=("Net",),
    optimizers=("SGD, lr 0.1, momentum 0.9",),
    every=10,
    patterns=(),
    started="2026-01-01T00:00:00+00:00",
    versions={"hookscope": "0.1", "torch": "2.15", "Python": "3.11"},
)
MAX_NORM = 1.0


def training_page(log: TrainingLog) -> str:
    return document_html(describe_training(log))


def draw_training(log: TrainingLog) -> Image.Image:
    return draw_document(describe_training(log))


def training_summary(log: TrainingLog, width: int) -> RenderableType:
    return printed(describe_training(log), width=width)


def train(steps: int, *, every: int = 10, broken_at: int | None = None) -> TrainingLog:
    """Train a small network with clipping, and write down what happens; the batch of one step may hold a NaN."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 1))
    network[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    outputs: dict[str, torch.Tensor] = {}
    for name, module in network.named_children():
        module.register_forward_hook(lambda _, __, output, name=name: outputs.update({name: output.detach().clone()}))
    done: list[TrainingStep] = []
    watched: list[WatchedStep] = []
    verdicts: list[TrainingFinding] = []
    for step in range(1, steps + 1):
        x = torch.randn(16, 4)
        y = x.sum(1, keepdim=True).sin()
        if step == broken_at:
            x[3, 2] = math.nan
        loss = (network(x) - y).square().mean()
        loss.backward()
        before = float(nn.utils.clip_grad_norm_(network.parameters(), MAX_NORM))
        norms = {
            name: float(parameter.grad.norm())
            for name, parameter in network.named_parameters()
            if parameter.grad is not None
        }
        rate = optimizer.param_groups[0]["lr"]
        weights = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
        optimizer.step()
        total = math.sqrt(sum(norm * norm for norm in norms.values()))
        largest = tuple(sorted(norms.items(), key=lambda each: -each[1])[:10])
        done.append(TrainingStep(step, loss.item(), total, before, largest, (rate,)))
        if step % every == 0 or step == broken_at:
            reason = "non-finite" if step == broken_at else "every"
            rows = tuple(_parameter(name, parameter, weights) for name, parameter in network.named_parameters())
            layers = tuple(_layer(name, network.get_submodule(name), output) for name, output in outputs.items())
            watched.append(WatchedStep(step, reason, rows, layers))
        if step == broken_at:
            verdicts += [
                TrainingFinding(
                    *("non-finite-gradient", "fail", next(iter(norms)), "Its gradient holds NaN (limit 0)."),
                    followed_by=tuple(norms)[1:],
                    step=step,
                    value=None,
                    limit=0.0,
                    state="began",
                )
            ]
        optimizer.zero_grad()
        schedule.step()
    end = TrainingEnd(steps, "closed")
    return TrainingLog((replace(START, every=every),), tuple(done), tuple(watched), tuple(verdicts), (end,))


def _parameter(name: str, parameter: nn.Parameter, before: Mapping[str, torch.Tensor]) -> WatchedParameter:
    weight = float(before[name].norm())
    if parameter.grad is None:
        return WatchedParameter(name, "frozen", weight)
    gradient = parameter.grad
    return WatchedParameter(
        name,
        "gradient",
        weight,
        float(gradient.norm()),
        float(gradient.abs().max()),
        float((gradient == 0).float().mean()),
        int((~gradient.isfinite()).sum()),
        float((parameter.detach() - before[name]).norm()),
    )


def _layer(name: str, module: nn.Module, output: torch.Tensor) -> WatchedLayer:
    dead = (output == 0).all(0).float().mean() if output.shape[1] > 1 else None
    bounded = isinstance(module, nn.Sigmoid)
    return WatchedLayer(
        name,
        type(module).__name__,
        float(output.mean()),
        float(output.std(correction=0)),
        float(output.min()),
        float(output.max()),
        float((output == 0).float().mean()),
        None if dead is None else float(dead),
        float(((output < 0.01) | (output > 0.99)).float().mean()) if bounded else None,
        int((~output.isfinite()).sum()),
    )


def long_training(steps: int, *, parameters: int, every: int, spikes: Mapping[int, float]) -> TrainingLog:
    """Return a training of any length by closed forms: the loss 2 / sqrt(step), but for `spikes`; norms are its half.

    The gradient norm of parameter number k at a watched step is (k + 1) / step.
    """
    done = tuple(
        TrainingStep(step, loss, loss / 2, None, ((name_of(0), loss / 2),), (0.1 if step <= steps // 2 else 0.01,))
        for step in range(1, steps + 1)
        for loss in (spikes.get(step, 2 / math.sqrt(step)),)
    )
    watched = tuple(
        WatchedStep(step, "every", tuple(_closed(number, step) for number in range(parameters)))
        for step in range(every, steps + 1, every)
    )
    return TrainingLog((replace(START, every=every),), done, watched, (), (TrainingEnd(steps, "closed"),))


def name_of(number: int) -> str:
    return f"blocks.{number // 4}.layers.{number % 4}.weight"


def _closed(number: int, step: int) -> WatchedParameter:
    norm = (number + 1) / step
    return WatchedParameter(name_of(number), "gradient", 2.0, norm, norm / 2, 0.0, 0, norm / 100)


def verdict(
    step: int, rule: str, where: str, *, state: str = "began", level: str = "warn", **numbers: float
) -> TrainingFinding:
    expected: dict[str, float | None] = {"value": 0.75, "limit": 0.5, **numbers}
    message = f"{expected['value']} is over its limit ({expected['limit']})."
    return TrainingFinding(rule, level, where, message, step=step, state=state, **expected)  # type: ignore[arg-type]


def with_verdicts(log: TrainingLog, verdicts: Sequence[TrainingFinding]) -> TrainingLog:
    return replace(log, verdicts=tuple(verdicts))
