"""Read the weights out of a file without running anything that comes with it, unless it is trusted."""

from pathlib import Path

from hookscope.checkpoints.checkpoint import Checkpoint, FileOptions, read_weights
from hookscope.checkpoints.weights_files import WeightsFiles


def read_checkpoint(source: Path | WeightsFiles, options: FileOptions = FileOptions()) -> Checkpoint:  # noqa: B008 - frozen
    """Return the weights of the files at a path, as `read_weights` does."""
    files = source if isinstance(source, WeightsFiles) else WeightsFiles.at(source)
    if not options.trust:
        return read_weights(files, options)
    from hookscope.models.trusted_files import read_trusted  # noqa: PLC0415 (not imported without trust)

    return read_weights(files, options, read_trusted)
