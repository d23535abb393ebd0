"""Norms of the tokens in a layer's output, tokens with high norms, and massive activations; no torch."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

LEAST_RATIO = 2.0
"""A high-norm token's norm is more than this many times the median of its input's tokens, and ..."""

DEVIATIONS = 6.0
"""... more than this many robust standard deviations above it (1.4826 times the median absolute deviation).

Both limits are ours. Darcet et al. 2024 ("Vision Transformers Need Registers", arXiv 2309.16588) take a norm of 150 for
DINOv2, which suits no other network."""

MASSIVE_VALUE = 100.0
"""A massive activation is larger than this in magnitude, and ..."""

MASSIVE_RATIO = 1000.0
"""... at least this many times the median magnitude of its input's values in that output.

Source: Sun, Chen, Kolter, Liu 2024, "Massive Activations in Large Language Models", section 2 (arXiv 2402.17762)."""


@dataclass(frozen=True, slots=True)
class HighToken:
    """A token whose norm is beyond the limit.

    Attributes:
        input_index: Position of its input in the run.
        token: Its position in the sequence, from 0, including tokens in front of the grid.
        norm: The L2 norm of its D values.
        limit: The limit for its input: see `LEAST_RATIO` and `DEVIATIONS`.
    """

    input_index: int
    token: int
    norm: float
    limit: float


@dataclass(frozen=True, slots=True)
class MassiveActivation:
    """A single value that is far larger than the others.

    Attributes:
        input_index: Position of its input in the run.
        token: As in `HighToken`.
        channel: Position among the D values of the token.
        value: The value, with its sign.
        median: The median magnitude of its input's values in that output.
    """

    input_index: int
    token: int
    channel: int
    value: float
    median: float


@dataclass(frozen=True, slots=True)
class TokenNorms:
    """The L2 norms over D of tokens (N, T, D).

    Attributes:
        token_count: T.
        prefix: Tokens in front of the grid, such as a class token and registers; None without a known grid.
        grid: (h, w) or (d, h, w), row by row; None if it is not known, or there is none.
        median: The median over inputs of the median norm of their tokens.
        max: The largest norm.
        high_count: Tokens beyond the limit, over all inputs.
        high: The longest of them, at most 16, in descending order.
        massive_count: Tokens with a massive activation, over all inputs.
        massive: The largest activation of each such token, at most 16, in descending order of magnitude.
    """

    token_count: int
    prefix: int | None
    grid: tuple[int, ...] | None
    median: float
    max: float
    high_count: int
    high: tuple[HighToken, ...] = ()
    massive_count: int = 0
    massive: tuple[MassiveActivation, ...] = ()

    @property
    def stands_out(self) -> bool:
        """Whether there is a high-norm token or a massive activation."""
        return bool(self.high_count or self.massive_count)

    def place(self, token: int) -> str:
        """Return where a token lies: "token 0 (prefix)", "token 18 (row 1, column 3)", "token 5"."""
        if self.grid is None or self.prefix is None:
            return f"token {token}"
        at = token - self.prefix
        if at < 0:
            return f"token {token} (prefix)"
        words = []
        for size, name in zip(reversed(self.grid), ("column", "row", "frame"), strict=False):
            at, place = divmod(at, size)
            words.append(f"{name} {place}")
        return f"token {token} ({', '.join(reversed(words))})"


@dataclass(frozen=True, slots=True)
class TokenMap:
    """The norms of one input's tokens in one layer, on their grid.

    Attributes:
        row: `LayerRow.index` of the layer.
        label: Label of the row.
        input_index: Position of the input in the run.
        prefix: Names of the tokens in front of the grid: "class token", "register 1".
        grid: (h, w), row by row.
        norms: Norms of all tokens, prefix first, to five digits.
        limit: Norms above it are high: see `LEAST_RATIO` and `DEVIATIONS`.
    """

    row: int
    label: str
    input_index: int
    prefix: tuple[str, ...]
    grid: tuple[int, int]
    norms: tuple[float, ...]
    limit: float

    # As for `PlacedMap`: the map fills the input, and no box is framed.
    extent: ClassVar = (0.0, 0.0, 1.0, 1.0)
    box: ClassVar = None

    @property
    def values(self) -> NDArray[np.float32]:
        """Norms on the grid, (h, w)."""
        return np.array(self.norms[len(self.prefix) :], np.float32).reshape(self.grid)

    @property
    def median(self) -> float:
        """The median norm, including the prefix."""
        return float(np.median(self.norms))

    @property
    def high(self) -> list[str]:
        """Names of high tokens, the highest first: "class token", "row 3, column 5"."""
        order = sorted(range(len(self.norms)), key=lambda token: -self.norms[token])
        return [self._named(token) for token in order if self.norms[token] > self.limit]

    def _named(self, token: int) -> str:
        if token < len(self.prefix):
            return self.prefix[token]
        row, column = divmod(token - len(self.prefix), self.grid[1])
        return f"row {row}, column {column}"
