"""Every exception that hookscope raises on purpose, with its exit code.

The hierarchy::

    HookscopeError
    ├── UsageError                2   an option or argument that cannot be right
    │   └── NetworkNeededError    2   adapters without the network that they are for
    ├── InputError                3   a file that cannot be read, or is not what it should be
    │   ├── ImageError            3   an image or input tensor
    │   ├── CheckpointError       3   a weights file
    │   │   └── MisfitError       3   weights with names or shapes that do not fit the network
    │   ├── UnmergedError         3   sound adapters that cannot be merged into their network
    │   └── OutputError           3   a place that cannot be written, or that is not ours
    ├── UntrustedFileError        4   reading it would run code from the file
    ├── NothingMatchedError       5   a name or pattern that selects nothing
    │   ├── ModelNotFoundError    5
    │   └── LayerNotFoundError    5
    └── ModelError                6   the model's own code raised
        └── UnfitInputError       6   on some of its inputs
"""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from unicodedata import normalize

EXIT_DONE = 0
EXIT_CHECK_FAILED = 1
EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
EXIT_BROKEN_PIPE = 141


_MOST_CAUSES = 10  # exceptions that are examined in a chain of causes

_OUT_OF_MEMORY = re.compile(
    "[Cc]an('t|not) allocate memory|not enough memory|out of memory|std::bad_alloc|failed to map segment"
)

# A message names at most this many inputs.
_NAMED_INPUTS = 3


class Terminated(BaseException):
    """SIGTERM arrived; raised as an exception, so that everything half-done is undone."""


class HookscopeError(Exception):
    """An error that the user can correct. The message is one line: what failed, what was given, what to do."""

    exit_code = EXIT_BUG


class UsageError(HookscopeError):
    """An option or argument has an invalid value."""

    exit_code = 2


class NetworkNeededError(UsageError):
    """A file of adapters is sound, but the user named no network for them."""


class InputError(HookscopeError):
    """A file is missing, unreadable, corrupt, unsupported or over a limit."""

    exit_code = 3


class ImageError(InputError):
    """An image or input tensor cannot be turned into a network input."""


class CheckpointError(InputError):
    """A weights file cannot be read, or (see `MisfitError`) its tensors do not fit the network."""


class MisfitError(CheckpointError):
    """A weights file is sound, but its names or shapes do not fit the network."""


class UnmergedError(InputError):
    """A file of adapters is sound, but cannot be merged: alpha is missing, or the names are not peft's."""


class OutputError(InputError):
    """A result cannot be written, or would overwrite something that is not a hookscope run."""


class UntrustedFileError(HookscopeError):
    """Reading the file would run code that comes with it."""

    exit_code = 4


class NothingMatchedError(HookscopeError):
    """A name, pattern or glob selects nothing."""

    exit_code = 5


class ModelNotFoundError(NothingMatchedError):
    """MODEL names nothing that can be loaded."""


class LayerNotFoundError(NothingMatchedError):
    """A layer pattern selects no module."""


class ModelError(HookscopeError):
    """The model's own code raised while it was built or run."""

    exit_code = 6


class UnfitInputError(ModelError):
    """The model raised on an input, or on a batch that cannot be divided.

    Attributes:
        names: Names of the inputs, safe to show; () for noise, and for tensors without a file.
        reason: The error and its place.
        indices: Position of each input among those given.
    """

    def __init__(self, names: Sequence[str], reason: str, indices: Sequence[int] = ()) -> None:
        """Make the message from the first names and the reason."""
        more = f" and {len(names) - _NAMED_INPUTS} more" if len(names) > _NAMED_INPUTS else ""
        super().__init__(f"{', '.join(names[:_NAMED_INPUTS])}{more}: {reason}" if names else reason)
        self.names = tuple(names)
        self.reason = reason
        self.indices = tuple(indices)


# Exit codes, the most severe first.
_BY_SEVERITY = (EXIT_BUG, 4, 3, 6, 5, 2, EXIT_CHECK_FAILED, EXIT_DONE)


def severity_rank(exit_code: int) -> int:
    """Return the place of an exit code, 0 for the most severe, and for an unknown code."""
    return _BY_SEVERITY.index(exit_code) if exit_code in _BY_SEVERITY else 0


def most_severe(exit_codes: Iterable[int]) -> int:
    """Return the most severe of `exit_codes`; 0 if there are none."""
    return min(exit_codes, key=severity_rank, default=EXIT_DONE)


def nearest(wanted: str, names: Iterable[str], count: int = 3, *, prefix: str = "", cutoff: float = 0.5) -> str:
    """Return a sentence with the names closest to `wanted`, or an empty string.

    Args:
        wanted: The name that the user wrote.
        names: The valid names.
        count: Most names in the sentence.
        prefix: A prefix that many names share; it is not compared.
        cutoff: Least similarity of a name, 0-1.
    """
    by_folded = {name.removeprefix(prefix).lower(): name for name in names}
    # Input methods for Chinese and Japanese may write full-width letters; NFKC maps them to ASCII.
    folded = normalize("NFKC", str(wanted)).removeprefix(prefix).lower()
    # "cat": "tiger cat", before "crate"; "layer1": "layer1.0.conv1"
    having = [name for name in by_folded if folded in name.replace(".", " ").split()]
    close = having[:count] or get_close_matches(folded, by_folded, n=count, cutoff=cutoff)
    return f" Nearest: {', '.join(repr(by_folded[name]) for name in close)}." if close else ""


def is_out_of_memory(error: BaseException | str) -> bool:
    """Tell whether an error, its message or one of its causes means that memory has run out.

    The loader of shared libraries reports "failed to map segment from shared object", from which NumPy and torch raise
    errors of their own.
    """
    if isinstance(error, str):
        return _OUT_OF_MEMORY.search(error) is not None
    causes, cause = [error], error.__cause__
    while cause is not None and len(causes) < _MOST_CAUSES:
        causes.append(cause)
        cause = cause.__cause__
    return any(isinstance(link, MemoryError) or is_out_of_memory(str(link)) for link in causes)
