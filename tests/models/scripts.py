"""Networks that can be scripted, with conditions, loops, writes in place and whatever else a graph may hold."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.networks import Network


class Branching(nn.Module):
    """Conditions, loops, early returns, numbers, casts, writes in place, helpers, and every container."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def scaled(self, x: Tensor, by: float = 2.0) -> Tensor:
        if x.dim() == 1:
            return x
        return x * by

    def forward(self, x: Tensor, more: Tensor | None = None, count: int = 2) -> dict[str, list[Tensor]]:
        self.steps += 1
        parts: list[Tensor] = []
        for i in range(count):
            x = F.dropout(F.relu(self.first(x)), 0.5, self.training) + i
            if float(x.sum()) > 0:
                x = 1 - self.scaled(x)
            parts.append(x.double().to(x.dtype))
        x[:, 0] = 0.5
        x[:, 1:] += 1
        y = halves(x)[0] if more is None else torch.cat([x, more])
        while float(y.abs().sum()) > 1:
            y = y / 2
        values, indices = self.second(x).max(dim=1)
        y.mul_(3).clamp_(min=-1.0)
        return {"parts": parts, "y": [y, x.T, values + indices, x.to(torch.half).float()]}


def halves(x: Tensor) -> list[Tensor]:
    return [torch.tanh(part) for part in x.chunk(2)]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state = x.new_zeros(x.shape[0], 4)
        states = []
        for step in x.unbind(1):
            state = torch.tanh(self.cell(step, state)) * 0.5
            states.append(state)
        return torch.stack(states, 1), state.softmax(-1)


class Mixed(nn.Module):
    """Layers in a loop, functions of torch's that are several operators, gradients turned off, many subscripts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.weight = nn.Parameter(torch.rand(4))

    def block(self, x: Tensor, left_out: int) -> Tensor:
        for at, layer in enumerate(self.layers):
            if at != left_out:
                x = F.gelu(layer(x)) * self.weight
        return x

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs: list[Tensor] = []
        for left_out in range(2):
            x = self.block(x, left_out)
            outputs.append(F.max_pool1d(F.pad(x, [1, 1]), 2))
        outputs.append(F.normalize(x) + F.normalize(x * 2)[:, None, 0])
        x = torch.where(x > 0, x, -x)
        outputs.append(torch.einsum("ij,kj->ik", x, F.layer_norm(x, [4])))
        outputs.append(torch.topk(x, 2).values.masked_fill(x[..., :2] > 1, 0.5))
        with torch.no_grad():
            outputs.append((x.to(torch.int64) // 2 + 1) % 3)
        return outputs


BY_HAND = {
    "mixed": Network(Mixed, lambda: (torch.randn(4, 4),)),
    "branching": Network(Branching, lambda: (torch.randn(4, 4),)),
    "branching with more": Network(Branching, lambda: (torch.randn(4, 4), torch.randn(2, 4), 3)),
    "recurrent": Network(Recurrent, lambda: (torch.randn(2, 3, 3),)),
}
