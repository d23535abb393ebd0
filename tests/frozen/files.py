"""The files that the frozen commands read, written from fixed seeds."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from tests.frozen import net

_SAMPLES = Path(__file__).parents[2] / "sample_images"

_TRAINING = """
import torch
from torch import nn

torch.manual_seed(0)
network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
{before}
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 31):
    inputs, labels = torch.randn(16, 8), torch.randint(0, 3, (16,))
    {batch}
    loss = nn.functional.cross_entropy(network(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("trained")
"""


def write_files(folder: Path) -> None:
    """Write networks, pictures, training scripts and checkpoints."""
    shutil.copy(Path(net.__file__), folder / "net.py")
    shutil.copy(_SAMPLES / "cat.jpg", folder / "cat.jpg")
    _write_pictures(folder)
    _write_checkpoints(folder)
    scripts = {
        "train": ("", ""),
        "train_nan": ("", "inputs = inputs * float('nan') if step == 20 else inputs"),
        "train_dead": ("network[0].bias.data.fill_(-100.0)", ""),
    }
    for name, (before, batch) in scripts.items():
        (folder / f"{name}.py").write_text(_TRAINING.format(before=before, batch=batch), encoding="utf-8")
    (folder / "fails.py").write_text(_TRAINING.format(before="", batch="1 / (step - 9)"), encoding="utf-8")


def _write_pictures(folder: Path) -> None:
    (folder / "pictures").mkdir()
    rows, columns = np.mgrid[:32, :32]
    for number in range(40):
        across, down = (number % 8) * 3 + 4, (number // 8) * 5 + 4
        spot = 255 * np.exp(-((columns - across) ** 2 + (rows - down) ** 2) / (8 + number))
        colours = np.stack([spot, (rows * 7 + number * 5) % 256, (columns * (1 + number % 3) * 4) % 256], 2)
        Image.fromarray(colours.round().astype(np.uint8)).save(folder / "pictures" / f"{number:02}.png")
    shutil.copy(folder / "pictures" / "11.png", folder / "picture.png")
    for number in range(10):
        (folder / "labelled" / f"class{number % 5}").mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "pictures" / f"{number:02}.png", folder / "labelled" / f"class{number % 5}")
    (folder / "classes.txt").write_text("".join(f"class{number}\n" for number in range(5)), encoding="utf-8")


def _write_checkpoints(folder: Path) -> None:
    """Write six files of one training, the last two broken, and one file of each other kind."""
    (folder / "ckpt").mkdir()
    torch.manual_seed(0)
    network = net.cnn()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(1, 7):
        loss = nn.functional.cross_entropy(network(torch.randn(8, 3, 16, 16)), torch.arange(8) % 5)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        if epoch > 4:
            weights["3.weight"][0, 0, 0, 0] = float("nan")
        contents = {
            "epoch": epoch,
            "model": weights,
            "optimizer": optimizer.state_dict(),
            "loss": round(loss.item(), 3),
        }
        torch.save(contents, folder / "ckpt" / f"epoch{epoch}.pt")
    save_file(net.cnn().state_dict(), folder / "plain.safetensors", {"made": "for a test"})
    (folder / "cut.pt").write_bytes((folder / "ckpt" / "epoch1.pt").read_bytes()[:3000])
    (folder / "code.pkl").write_bytes(pickle.dumps({"weight": torch.zeros(2), "call": print}))
    (folder / "text.json").write_text(json.dumps({"weight": [1, 2]}), encoding="utf-8")
