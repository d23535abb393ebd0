"""Work on files in a separate process with limits, so that a crash or a hang stays in that process. No torch."""

from collections.abc import Callable
from typing import Any

from hookscope.checkpoints.sandbox.worker import Limits, WorkerFailure, run_forked
from hookscope.checkpoints.weights_files import WeightsFiles
from hookscope.errors import CheckpointError

# Reading takes two maps or one copy of the file; what a pickle makes of itself comes on top. Checksums go
# at 1 GB/s, instructions at a million a second, on a machine ten times slower than ours at a tenth of that.
_SPARE_BYTES = 768 * 2**20
_SPARE_SECONDS = 20
_BYTES_PER_SECOND = 25_000_000

_PATIENCE = 10  # on a busy or stopped machine work takes longer than the processor time it needs

_ENDINGS = {
    "SIGBUS": "the file was cut short while it was read, or its disk failed",
    "SIGKILL": "the system ended it, as it does when memory runs out",
    "SIGXCPU": "it takes far longer than a file of its size should",
}


def run_isolated(work: Callable[[], Any], files: WeightsFiles) -> Any:
    """Work on files in a separate process, within the time and memory that files of their size should take.

    `work` returns what JSON can hold. Raises hookscope's errors that `work` raises; a CheckpointError if a file crashes
    its reader, takes too much, or has changed since it was found.
    """
    name = files.name
    with files.unchanged():
        byte_count = sum(size for _, size, _ in files.versions)
        seconds = _SPARE_SECONDS + byte_count // _BYTES_PER_SECOND
        limits = Limits(_PATIENCE * seconds, 2 * byte_count + _SPARE_BYTES, seconds)
        result = run_forked(work, limits)
        match result:
            case WorkerFailure(cause="raised"):
                raise RuntimeError(result.traceback)
            case WorkerFailure(cause="memory"):
                limit = f"{(limits.memory_bytes or 0) // 2**20} MiB"
                raise CheckpointError(
                    f"{name} takes more than {limit} to read, far more than a file of its size should; refused."
                )
            case WorkerFailure():
                ending = result.ending or "SIGXCPU"
                why = _ENDINGS.get(ending, "the file is damaged, or made to crash its reader")
                raise CheckpointError(f"{name} cannot be read: the process that read it ended with {ending}; {why}.")
    return result
