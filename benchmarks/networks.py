"""The networks that are measured, seeded, and the rows that hookscope finds in them."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torchvision.models import get_model

import hookscope
from benchmarks.same_work import Rows
from hookscope.results import GradientRow, LayerRow, row_label

NETWORKS = ("resnet34", "vgg16", "densenet121", "vit_b_16", "efficientnet_b0", "swin_t")


def seeded(name: str, device: str = "cpu", count: int = 1, side: int = 224) -> tuple[nn.Module, Tensor]:
    """Return a torchvision network with seeded random weights, in eval mode, and noise (N, 3, H, W) for it."""
    torch.manual_seed(0)
    model = get_model(name).eval().to(device)
    return model, torch.randn(count, 3, side, side).to(device)


def label(row: LayerRow | GradientRow) -> str:
    """Name a row by module and call; the networks measured here return at most one tensor from a module."""
    return row_label(row.layer, row.call, "")


def layer_rows(model: nn.Module, batch: Tensor) -> tuple[LayerRow, ...]:
    """Return hookscope's rows of every module call."""
    return hookscope.inspect(model, batch, ["*"]).rows


def statistics_of(rows: Iterable[LayerRow]) -> Rows:
    """Return mean, std, min and max by label."""
    found = {}
    for row in rows:
        seen = row.activation
        found[label(row)] = (seen.mean or 0.0, seen.std or 0.0, seen.min or 0.0, seen.max or 0.0)
    return found


def shapes_of(rows: Iterable[LayerRow]) -> Rows:
    """Return shapes by label."""
    return {label(row): row.activation.shape for row in rows}


def layers_of(rows: Sequence[LayerRow]) -> list[str]:
    """Return the names of the modules that rows belong to, each once, without the whole model's."""
    return [layer for layer in dict.fromkeys(row.layer for row in rows) if layer]
