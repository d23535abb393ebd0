"""How much time and memory reading a file of unknown origin may take."""

from hookscope.checkpoints.sandbox import Limits

# Reading takes two maps or one copy of the file; what a pickle makes of itself comes on top. Checksums go
# at 1 GB/s, instructions at a million a second, on a machine ten times slower than ours at a tenth of that.
_SPARE_BYTES = 768 * 2**20
_SPARE_SECONDS = 20
_BYTES_PER_SECOND = 25_000_000

# On a busy or stopped machine work takes longer than the processor time it needs.
_PATIENCE = 10


def reading_limits(byte_count: int) -> Limits:
    """Return the limits of a process that reads files of so many bytes."""
    seconds = _SPARE_SECONDS + byte_count // _BYTES_PER_SECOND
    return Limits(_PATIENCE * seconds, 2 * byte_count + _SPARE_BYTES, seconds)
