"""Train the network of net.py to tell upright from level stripes; write checkpoints/epoch_1.pt, epoch_2.pt, epoch_3.pt.

python configs/train.py --lr 0.1
"""

import argparse
from pathlib import Path

import torch
from net import build
from torch import Tensor, nn


def stripes(count: int) -> tuple[Tensor, Tensor]:
    """Return noisy pictures of stripes (N, 3, 32, 32), and whether those of each are level (N,)."""
    labels = torch.randint(2, (count,))
    waves = torch.sin(torch.arange(32) * 1.5).expand(count, 3, 32, 32)
    upright_or_level = torch.where(labels.view(-1, 1, 1, 1) == 1, waves.transpose(2, 3), waves)
    return upright_or_level + torch.randn(count, 3, 32, 32), labels


parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
options = parser.parse_args()

torch.manual_seed(0)
network = build()
optimizer = torch.optim.SGD(network.parameters(), lr=options.lr, momentum=0.9)
loss_of = nn.CrossEntropyLoss()
folder = Path("checkpoints")
folder.mkdir(exist_ok=True)
for epoch in range(1, 4):
    for _ in range(40):
        images, labels = stripes(32)
        loss = loss_of(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.3g}")
    torch.save({"model": network.state_dict(), "epoch": epoch}, folder / f"epoch_{epoch}.pt")
