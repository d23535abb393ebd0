"""The networks that are measured, with seeded weights, and what hookscope's rows of them hold."""

from collections.abc import Iterable

import timm
import torch
from torch import Tensor, nn
from torchvision.models import get_model

import hookscope
from benchmarks.same_work import Rows
from hookscope.results.activations import LayerRow
from hookscope.results.gradients import GradientRow
from hookscope.results.network import row_label

Row = LayerRow | GradientRow

# By network and number of pictures.
CASES = (
    *(("resnet34", 1), ("resnet34", 8), ("vit_b_16", 1), ("densenet121", 1)),
    *(("efficientnet_b0", 1), ("timm mobilenetv2_050", 1)),
)


def seeded(name: str, device: str = "cpu", count: int = 1) -> tuple[nn.Module, Tensor]:
    """Return a torchvision or "timm NAME" network with seeded random weights, in eval mode, and noise (N, 3, H, W)."""
    torch.manual_seed(0)
    package, _, timm_name = name.partition(" ")
    model = (timm.create_model(timm_name) if timm_name else get_model(package)).eval().to(device)
    return model, torch.randn(count, 3, 224, 224).to(device)


def label(row: Row) -> str:
    """Name a row by module and call; the networks measured here return at most one tensor from a module."""
    return row_label(row.layer, row.call, "")


def statistics_of(rows: Iterable[Row]) -> Rows:
    """Return mean, std, min and max by label, without rows that have no gradient."""
    seen = {label(row): row.statistics for row in rows if row.statistics.mean is not None}
    return {
        name: (tensor.mean or 0.0, tensor.std or 0.0, tensor.min or 0.0, tensor.max or 0.0)
        for name, tensor in seen.items()
    }


def layers_of(rows: Iterable[Row]) -> list[str]:
    """Return the names of the modules that rows belong to, each once."""
    return list(dict.fromkeys(row.layer for row in rows))


def largest_activation_bytes(network: str) -> int:
    """Return the size of the largest output of a layer for one picture, in float32."""
    return max(4 * torch.Size(row.activation.shape).numel() for row in hookscope.activations(*seeded(network)))
