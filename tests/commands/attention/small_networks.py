"""Networks whose attention is known by construction."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

PATCH = 8


class RedSeeker(nn.Module):
    """A class token that looks at red patches, sharply; patches look at themselves and nothing else.

    Its input is not normalised, (N, 3, 32, 32), values of 0 to 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 1, PATCH, PATCH, bias=False)
        self.blocks = nn.ModuleList([SeekingBlock(), SeekingBlock()])
        with torch.no_grad():
            red = torch.tensor([1.0, -1.0, -1.0])[None, :, None, None]
            self.patches.weight.copy_(red.expand(1, 3, PATCH, PATCH) / PATCH**2)

    def forward(self, pictures: Tensor) -> Tensor:
        redness = self.patches(pictures).flatten(2).transpose(1, 2)  # (N, T, 1)
        tokens = torch.cat([torch.zeros_like(redness[:, :1]), redness], 1)
        for block in self.blocks:
            tokens = block(tokens)
        return tokens[:, 0]


class SeekingBlock(nn.Module):
    """Two heads: one attends by redness, one to the first token alone."""

    num_heads = 2

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, count, _ = tokens.shape
        is_class = torch.zeros(count)
        is_class[0] = 1
        sharp = 40 * (tokens.transpose(1, 2) - 100 * is_class) * is_class[:, None]
        sharp = sharp + torch.where(torch.eye(count, dtype=torch.bool), 60.0, 0.0) * (1 - is_class)[:, None]
        first = torch.full((count, count), 0.0)
        first[:, 0] = 60.0
        bias = torch.stack([sharp, first.expand(inputs, count, count)], 1)
        query = torch.zeros(inputs, 2, count, 4)
        value = tokens[:, None].expand(inputs, 2, count, 1)
        mixed = F.scaled_dot_product_attention(query, query, value, attn_mask=bias)
        return tokens + 0 * mixed.mean(1)


class SmallTransformer(nn.Module):
    """A class token and 4 x 4 patches of 8 pixels, two encoder layers, dropout in train mode."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 12, PATCH, PATCH)
        self.first = nn.Parameter(torch.randn(1, 1, 12))
        self.places = nn.Parameter(torch.randn(1, 17, 12))
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(12, 3, 24, dropout=0.4, batch_first=True) for _ in range(layers)]
        )
        self.head = nn.Linear(12, 5)

    def forward(self, pictures: Tensor) -> Tensor:
        tokens = self.patches(pictures).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(tokens), -1, -1), tokens], 1) + self.places
        for layer in self.layers:
            tokens = layer(tokens)
        output: Tensor = self.head(tokens[:, 0])
        return output


class Words(nn.Module):
    """Two heads over the words of a text, each of which looks at itself and those before it alike."""

    num_heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)

    def forward(self, words: Tensor) -> Tensor:
        values = self.embedding(words).unflatten(-1, (2, 4)).transpose(1, 2)
        equal = torch.zeros_like(values)
        return F.scaled_dot_product_attention(equal, equal, values, is_causal=True)


def _nearer(score: Tensor, _batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score - (query - key).abs()


class FlexAttention(nn.Module):
    """Attention that torch compiles where it is called."""

    num_heads = 2

    def forward(self, tokens: Tensor) -> Tensor:
        heads = tokens.unflatten(-1, (2, -1)).transpose(1, 2)
        output: Tensor = flex_attention(heads, heads, heads, score_mod=_nearer)
        return output.transpose(1, 2).flatten(2)


class Linear(nn.Module):
    """Attention without a softmax."""

    def forward(self, tokens: Tensor) -> Tensor:
        return F.relu(tokens) @ (F.relu(tokens).transpose(1, 2) @ tokens) / math.sqrt(tokens.size(1))


class LinearAttention(Linear):
    """The same, by its name."""


class HalfSeen(nn.Module):
    """One block with a softmax, and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.network = SmallTransformer(1)
        self.linear = LinearAttention()

    def forward(self, pictures: Tensor) -> Tensor:
        return self.linear(self.network(pictures)[:, None]).flatten(1)
