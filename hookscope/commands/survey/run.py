"""What `survey` and `features` do, for the command line and for Python."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hookscope import options
from hookscope.commands.opening import load, several
from hookscope.errors import UsageError
from hookscope.hooks.interrupts import interrupts_between_blocks
from hookscope.parameters import arg

if TYPE_CHECKING:
    from hookscope.commands.opening import Model
    from hookscope.inspection.given_inputs import Images
    from hookscope.inspection.session import OnProgress
    from hookscope.results.survey import FeatureFiles, Survey


@interrupts_between_blocks()
def survey(
    model: Model,
    images: Images,
    *,
    option: options.Survey,
    chunks: str | Path | None = None,
    on_progress: OnProgress | None = None,
) -> Survey | None:
    """Measure what layers and their channels do over a data set, in one process or several.

        >>> import hookscope
        >>> survey = hookscope.survey("demo", "sample_images", layer="conv_head")
        >>> survey.input_count, len(survey["_conv_head"].channels)
        (4, 1280)

    Inputs are taken in natural order of their paths and measured in chunks. With the same batch size, threads, torch
    and processor, the result is the same bit for bit for any number of processes. A module is left as it was.

    Args:
        images: Files, folders and globs, PIL pictures, or one tensor with the inputs on axis 0.
        chunks: Folder for finished chunks, which stay there; None for a temporary folder.

    Returns:
        The survey: printing it shows the command's table, and `survey["layer1.0.conv1"]` is a row with its channels.
        None for a shard, and in all processes of torchrun except the first.

    Raises:
        HookscopeError: As for `activations`; `OutputError` if a chunk cannot be written.
    """
    from hookscope.commands.survey.plan import ChunkFolder
    from hookscope.commands.survey.run_survey import run_survey

    if chunks is None and (option.resume or option.shard is not None):
        raise UsageError(f"{arg('resume' if option.resume else 'shard')} needs {arg('chunks')}, the folder for chunks.")
    if option.features is not None and not option.layer:
        raise UsageError(f"{arg('features')} needs {arg('layer')}: name the layers whose outputs are wanted.")
    chunks = options.of_kind("chunks", options.File | None, chunks)
    with TemporaryDirectory() if chunks is None else nullcontext(chunks) as folder:
        return run_survey(model, images, option, ChunkFolder(Path(folder)), on_progress)


@interrupts_between_blocks()
def features(
    model: Model, batches: Iterable[Any], out: str | Path, *, layer: options.Texts, option: options.Features
) -> FeatureFiles:
    """Write the outputs of layers over batches, such as those of a DataLoader, in constant memory.

        >>> import hookscope, torch
        >>> from torch import nn
        >>> network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> written = hookscope.features(network, [torch.rand(4, 3, 9, 9)] * 2, "features.safetensors", layer="1")
        >>> written.shapes
        {'1': (8, 8)}

    The network runs in eval mode, without gradients, and is left as it was. `survey` with `features` does the same for
    files, in chunks that can be resumed.

    Args:
        model: As for `activations`.
        batches: Tensors (N, ...) with the inputs on axis 0, or tuples with such a tensor first and labels second. A
            single tensor is one batch.
        out: The .safetensors file to write: a tensor per output, by its label, with the inputs on axis 0. A JSON file
            next to it lists the inputs and their labels, and is written last.
        layer: Patterns of the layers, as for `activations`.

    Returns:
        The files, and the shape of each tensor.

    Raises:
        HookscopeError: As for `activations`; `OutputError` if a file cannot be written.
    """
    from hookscope.commands.survey.feature_files import FeatureTarget, batch_features

    loaded = load(model, options.ModelOptions(), options.RunOptions(seed=option.seed))
    target = FeatureTarget(Path(options.of_kind("out", options.File, out)), option.pool, option.features_dtype)
    return batch_features(loaded, batches, target, several(layer), option.seed)
