"""How long the tokens of a layer's output are, which stand out, and single values that do; no torch."""

from dataclasses import dataclass

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
        token: Its position in the sequence, from 0, tokens in front of the grid counted.
        norm: The L2 norm of its D values.
        limit: Of its input: see `LEAST_RATIO` and `DEVIATIONS`.
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
        value: With its sign.
        median: The median magnitude of its input's values, of at most 65,536 evenly spaced ones.
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
        grid: (h, w) or (d, h, w), row by row; None where it is not known, or there is none.
        median: The median over inputs of the median norm of their tokens.
        max: The largest norm.
        high_count: Tokens beyond the limit, over all inputs.
        high: The longest of them, at most 16, in descending order.
        massive_count: Tokens with a massive activation, over all inputs.
        massive: The largest activation of each of them, at most 16, in descending order of magnitude.
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
