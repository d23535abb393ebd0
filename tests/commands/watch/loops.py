"""Trainings to be watched: ten healthy ones, each of another kind, small enough for many steps."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Watching = Callable[[Any, Any], Callable[[Tensor], None]]
"""Given networks and optimisers, returns what is called with the loss after each step."""

Training = Callable[[int, Watching], None]


def unwatched(_networks: Any, _optimizers: Any) -> Callable[[Tensor], None]:
    return lambda _loss: None


def _pictures(count: int, seed: int = 0, size: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of four kinds of pictures: stripes of two directions, a spot, and noise, on noise."""
    generator = torch.Generator().manual_seed(seed)
    across = torch.arange(size).remainder(4).lt(2).float()
    spot = torch.zeros(size, size)
    spot[4:9, 4:9] = 2.0
    kinds = torch.stack([across.expand(size, size), across.expand(size, size).T, spot, torch.zeros(size, size)])
    for _ in range(count):
        labels = torch.randint(0, 4, (16,), generator=generator)
        yield kinds[labels].unsqueeze(1) + 0.5 * torch.randn(16, 1, size, size, generator=generator), labels


def _cnn() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 4)),
    )


def mlp_sgd(steps: int, watching: Watching) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    step = watching(network, optimizer)
    for pictures, labels in _pictures(steps):
        loss = F.cross_entropy(network(pictures), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step(loss)


def cnn_cosine(steps: int, watching: Watching) -> None:
    network = _cnn()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 100)
    step = watching(network, optimizer)
    for number, (pictures, labels) in enumerate(_pictures(steps)):
        loss = F.cross_entropy(network(pictures), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step(loss)
        if number % 50 == 49:  # a validation
            network.eval()
            with torch.no_grad():
                network(pictures)
            network.train()


def accumulated_adamw(steps: int, watching: Watching) -> None:
    network = _cnn()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    step = watching(network, optimizer)
    for number, (pictures, labels) in enumerate(_pictures(2 * steps)):
        loss = F.cross_entropy(network(pictures), labels)
        (loss / 2).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        step(loss)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 32)
        self.place = nn.Parameter(0.02 * torch.randn(16, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.body(self.embed(tokens) + self.place[: tokens.shape[1]], mask))


def transformer(steps: int, watching: Watching) -> None:
    network = Transformer()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: min(1.0, (number + 1) / 30))
    step = watching(network, optimizer)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        start = torch.randint(0, 32, (16, 1), generator=generator)
        tokens = (start + 3 * torch.arange(17)) % 32
        logits = network(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step(loss)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 32, batch_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, series: Tensor) -> Tensor:
        return self.head(self.lstm(series)[0])


def lstm(steps: int, watching: Watching) -> None:
    network = Recurrent()
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    step = watching(network, optimizer)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        phase = 6.28 * torch.rand(16, 1, 4, generator=generator)
        series = torch.sin(phase + 0.4 * torch.arange(20).view(1, -1, 1))
        loss = F.mse_loss(network(series[:, :-1]), series[:, 1:])
        loss.backward()
        nn.utils.clip_grad_value_(network.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        step(loss)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 256), nn.Sigmoid())

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.encoder(pictures).chunk(2, 1)
        drawn = mean + torch.exp(0.5 * spread) * torch.randn_like(mean)
        divergence = -0.5 * (1 + spread - mean**2 - spread.exp()).mean()
        return self.decoder(drawn), divergence


def variational_autoencoder(steps: int, watching: Watching) -> None:
    network = Autoencoder()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    step = watching(network, optimizer)
    for pictures, _ in _pictures(steps):
        shown = pictures.sigmoid()
        drawn, divergence = network(shown)
        loss = F.binary_cross_entropy(drawn, shown.flatten(1)) + 0.01 * divergence
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step(loss)


def gan(steps: int, watching: Watching) -> None:
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 256), nn.Tanh())
    critic = nn.Sequential(nn.Linear(256, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    optimizers = [torch.optim.Adam(layer.parameters(), lr=5e-4, betas=(0.5, 0.99)) for layer in (generator, critic)]
    step = watching({"generator": generator, "critic": critic}, optimizers)
    for pictures, _ in _pictures(steps):
        real = pictures.flatten(1).tanh()
        fake = generator(torch.randn(16, 8))
        ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
        optimizers[1].zero_grad()
        loss = F.binary_cross_entropy_with_logits(critic(real), 0.9 * ones)
        loss = loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        fooled = F.binary_cross_entropy_with_logits(critic(fake), ones)
        fooled.backward()
        optimizers[0].step()
        step(loss)


def fine_tuning(steps: int, watching: Watching) -> None:
    network = _cnn()
    for parameter in network[:4].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.RMSprop(
        (parameter for parameter in network.parameters() if parameter.requires_grad), lr=1e-3
    )
    step = watching(network, optimizer)
    for pictures, labels in _pictures(steps):
        loss = F.cross_entropy(network(pictures), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step(loss)


def two_at_a_time(steps: int, watching: Watching) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
    step = watching(network, optimizer)
    for pictures, labels in _pictures(steps):
        loss = F.cross_entropy(network(pictures[:2]), labels[:2])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step(loss)


def lbfgs(steps: int, watching: Watching) -> None:
    network = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(network.parameters(), lr=0.1, max_iter=4)
    step = watching(network, optimizer)
    inputs = torch.rand(64, 2, generator=torch.Generator().manual_seed(0))
    wanted = (3 * inputs).sin().prod(1, keepdim=True)
    for _ in range(steps):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(network(inputs), wanted)
            loss.backward()
            return loss

        step(optimizer.step(closure))


HEALTHY: Mapping[str, Training] = {
    "mlp-sgd": mlp_sgd,
    "cnn-cosine": cnn_cosine,
    "accumulated-adamw": accumulated_adamw,
    "transformer": transformer,
    "lstm": lstm,
    "variational-autoencoder": variational_autoencoder,
    "gan": gan,
    "fine-tuning": fine_tuning,
    "two-at-a-time": two_at_a_time,
    "lbfgs": lbfgs,
}
