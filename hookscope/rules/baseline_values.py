"""Values and moments of channels as a baseline keeps them: fewer or coarser numbers than were measured, as text."""

import base64
import hashlib
import struct
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

MOST_VALUES = 1024
"""Values of an output that are kept: all `kept_values` of four inputs; of more every second or later one of each."""

CHANNEL_SUMS = 64
"""Numbers that are kept of more channels: of 2,048 channels four that moved are found in 99 of 100 cases."""

_MOST_FOUND = 4  # with more, so few sums do not tell
_UNEXPLAINED = 0.1  # share of what differs, in its norm, that the few channels may leave unexplained
_ROUNDING = 1e-4  # what is left is that of float32


def values_text(values: NDArray[np.floating] | None) -> str | None:
    """Return `MOST_VALUES` of (N, K), or at least one of each input, little-endian float32 in base64; None for none."""
    if values is None:
        return None
    inputs, count = values.shape
    step = max(min(-(-values.size // MOST_VALUES), count), 1)
    kept = values[(np.arange(count) + np.arange(inputs)[:, None]) % step == 0]
    with np.errstate(over="ignore"):  # infinite in float32
        return base64.b64encode((kept.astype("<f4") + np.float32(0)).tobytes()).decode("ascii")


def values_from_text(text: str) -> NDArray[np.float64]:
    """Return what `values_text` wrote, (n,); raises ValueError if it is something else."""
    content = base64.b64decode(text, validate=True)
    if len(content) % 4:
        raise ValueError("not whole numbers of four bytes")
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        return np.frombuffer(content, "<f4").astype(np.float64)


def check_text(read: Callable[[str], object], text: str | None, place: str) -> None:
    """Raise ValueError, with the place, for text that `values_from_text` or `channels_from_text` does not read."""
    try:
        if text is not None:
            read(text)
    except ValueError as error:
        raise ValueError(f"{place} is damaged: {error}") from error


def values_apart(before: str, now: str) -> float | None:
    """Return the root mean square of the differences of values that `values_text` wrote; None of other many.

    It is infinite where NaN or Inf stands at other places.
    """
    was, current = values_from_text(before), values_from_text(now)
    if was.size != current.size or not was.size:
        return None
    with np.errstate(all="ignore"):
        differences = np.where((was == current) | (np.isnan(was) & np.isnan(current)), 0.0, was - current)
    apart = float(np.linalg.norm(differences) / np.sqrt(was.size))
    return apart if np.isfinite(apart) else np.inf


def root_mean_square(text: str) -> float:
    """Return that of the finite values that `values_text` wrote; 0 of none."""
    values = values_from_text(text)
    finite = values[np.isfinite(values)]
    return float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0


def channels_text(moments: NDArray[np.float64] | None) -> str | None:
    """Return mean and standard deviation of channels, (2, C), as a baseline keeps them, in base64.

    The two are added: the sum moves when a channel is shifted or scaled, or when its sign is turned. Of up to
    `CHANNEL_SUMS` channels each is kept, for more channels as many signed sums over all of them, from which a few that
    moved can be found. First comes C, little-endian uint32, then float32. None for none, and for what float32 does not
    hold.
    """
    if moments is None:
        return None
    edges = moments.sum(0)
    with np.errstate(all="ignore"):
        kept = (_signs(edges.size) @ edges if edges.size > CHANNEL_SUMS else edges).astype("<f4") + np.float32(0)
    if not np.isfinite(kept).all():
        return None
    return base64.b64encode(struct.pack("<I", edges.size) + kept.tobytes()).decode("ascii")


def channel_differences(before: str, now: str) -> NDArray[np.float64] | None:
    """Return by how much mean plus standard deviation of each channel differ, (C,), of two that `channels_text` wrote.

    Of more than `CHANNEL_SUMS` channels those few are found that explain nearly all that differs; None if more do.
    Raises ValueError for other text.
    """
    (count, was), (other, current) = (channels_from_text(text) for text in (before, now))
    if count != other:
        return None
    difference: NDArray[np.float64] = current - was
    return difference if count <= CHANNEL_SUMS else _few(difference, _signs(count))


def channels_apart(before: str, now: str) -> float:
    """Return how far channels differ, root mean square over them, of two that `channels_text` wrote.

    A channel whose values differ by d, root mean square, differs in its mean and standard deviation by m and s, where
    m^2 + s^2 <= d^2, and so in their sum by up to sqrt(2) d: the result is at most so many times that of all values.
    Of more than `CHANNEL_SUMS` channels it is estimated from the signed sums, with a standard error of 9%.
    """
    (count, was), (other, current) = (channels_from_text(text) for text in (before, now))
    if count != other:
        return 0.0
    over = 1 if count <= CHANNEL_SUMS else count
    return float(np.sqrt(np.mean(np.square(current - was)) / over))


def _few(sums: NDArray[np.float64], signs: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Return the few numbers, (C,), of which these are the sums; None if no few are.

    This is orthogonal matching pursuit: Tropp and Gilbert 2007.
    """
    solution: NDArray[np.float64] = np.zeros(signs.shape[1])
    chosen: list[int] = []
    left, norm = sums, np.linalg.norm(sums)
    while len(chosen) < _MOST_FOUND and np.linalg.norm(left) > _ROUNDING * norm:
        chosen.append(int(np.abs(signs.T @ left).argmax()))
        solution[chosen] = np.linalg.lstsq(signs[:, chosen], sums, rcond=None)[0]
        left = sums - signs @ solution
    return solution if np.linalg.norm(left) <= _UNEXPLAINED * norm else None


@cache
def _signs(count: int) -> NDArray[np.float64]:
    """Return signs that are the same everywhere, (`CHANNEL_SUMS`, C): the first bits of the SHA-256 of a number."""
    digests = b"".join(hashlib.sha256(str(channel).encode()).digest()[: CHANNEL_SUMS // 8] for channel in range(count))
    bits = np.unpackbits(np.frombuffer(digests, np.uint8)).reshape(count, CHANNEL_SUMS)
    return 1.0 - 2.0 * bits.T.astype(np.float64)


def channels_from_text(text: str) -> tuple[int, NDArray[np.float64]]:
    """Return how many channels there are, and what `channels_text` kept; raises ValueError for other text."""
    content = base64.b64decode(text, validate=True)
    count = int.from_bytes(content[:4], "little")
    kept = np.frombuffer(content[4:], "<f4") if len(content) == 4 * (1 + min(count, CHANNEL_SUMS)) > 4 else None
    if kept is None or not np.isfinite(kept).all():
        raise ValueError("not as many finite numbers as channels")
    return count, kept.astype(np.float64)
