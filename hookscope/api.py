"""The Python functions, one for each command. Written by `python -m tests.api_functions`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hookscope import options
from hookscope.commands.activations.run import activations as run_activations
from hookscope.commands.attention.run import attention as run_attention
from hookscope.commands.attribute.run import attribute as run_attribute
from hookscope.commands.check.run import check as run_check
from hookscope.commands.checkpoint import checkpoint as run_checkpoint
from hookscope.commands.diff.run import diff as run_diff
from hookscope.commands.grads.run import grads as run_grads
from hookscope.commands.history.run import history as run_history
from hookscope.commands.layers import layers as run_layers
from hookscope.commands.report import report as run_report
from hookscope.commands.survey.run import features as run_features
from hookscope.commands.survey.run import survey as run_survey
from hookscope.commands.watch.run import watch as run_watch
from hookscope.options import Dtype, Numbers, Sizes, Texts

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

    from hookscope.inspection.given_inputs import Images
    from hookscope.models.construction import LoadedModel

    Model = str | Path | nn.Module | ExportedProgram | LoadedModel
    from torch import Tensor

    from hookscope.checkpoints.class_names import Classes
    from hookscope.commands.watch.networks import Networks, Optimizers
    from hookscope.commands.watch.watch import Watch
    from hookscope.inspection.edits import Edit
    from hookscope.inspection.session import OnError, OnProgress
    from hookscope.results.activations import Activations
    from hookscope.results.attention import Attention
    from hookscope.results.attributions import Attributions, Method
    from hookscope.results.check import CheckReport
    from hookscope.results.contents import CheckpointContents
    from hookscope.results.differences import Differences
    from hookscope.results.gradients import Gradients
    from hookscope.results.history import History
    from hookscope.results.network import ModuleTable
    from hookscope.results.noise_shapes import NoiseShapes
    from hookscope.results.survey import FeatureFiles, Survey
    from hookscope.results.training import TrainingLog


def activations(
    model: Model,
    images: Images = (),
    *,
    layer: Texts = (),
    ops: bool = False,
    weights: str | PathLike[str] = "auto",
    arch: str | PathLike[str] | None = None,
    input_shape: NoiseShapes | None = None,
    device: str = "auto",
    repeats: bool = False,
    edit: Texts | Sequence[Edit] = (),
    key: str | None = None,
    model_arg: Texts | Mapping[str, Any] = (),
    allow_missing: Texts = (),
    allow_unexpected: Texts = (),
    trust: bool = False,
    output_key: str | None = None,
    classes: Classes | None = None,
    multi_label: bool = False,
    resize: Sizes | None = None,
    crop: Sizes | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    max_pixels: int | None = None,
    batch_axis: str | int | None = None,
    input: Texts | Mapping[str, Any] = (),  # noqa: A002
    batch_size: int = 8,
    grids_for: int = 0,
    max_channels: int | None = None,
    save_tensors: bool = False,
    dtype: Dtype | None = None,
    seed: int = 0,
    cost: bool = False,
    verify: bool = True,
    on_progress: OnProgress | None = None,
    on_error: OnError | None = None,
) -> Activations:
    """Run a model over inputs once, in eval mode, and measure its layers' outputs.

        >>> import hookscope
        >>> run = hookscope.activations("demo", "sample_images/cat.jpg", layer="conv")
        >>> run["_conv_stem"].shape
        (1, 32, 112, 112)

    A module keeps its state and its device.

    Args:
        model: A module, the result of `load_model`, or MODEL: "resnet34", "timm:NAME", "net.py:build", a weights file.
        images: Files, folders and globs, PIL pictures, or one tensor (N, ...) with the inputs on axis 0; a tuple of
            tensors for several arguments by position, a mapping for arguments by name.
        layer: Patterns of layers to measure; default: modules that own parameters, and leaves. "op:relu" and
            "layer3.*:cat" select operations.
        ops: Also observe all operations that the network's own code calls: `F.relu`, `+`, `torch.cat`.
        weights: For MODEL: "auto" (trained if available, else random with a warning), "none" (random), a name, or a
            file.
        arch: Network of the weights file given as MODEL; default: inferred from names and shapes.
        input_shape: Noise instead of inputs, batch axis first: (4, 20), or "4,20:int64<1000" with dtype and bound; a
            list of these for several arguments by position; or a mapping of argument names to these, which may be
            combined with pictures and tensors by position.
        device: For MODEL: "auto", "cpu", "cuda", "cuda:1", "mps".
        repeats: Also show modules that return their input unchanged, such as dropout in eval mode.
        edit: Changes to inputs, outputs or parameters, "layer3:output:zero(channels=3)"; `comparison` of the result has
            their effect.
        key: Path of the weights inside the file, such as ema or checkpoint.model.
        model_arg: Keyword arguments for the network's factory: a mapping, or texts "NAME=VALUE".
        allow_missing: Globs over names that the file may lack.
        allow_unexpected: Globs over names in the file that the network may lack.
        trust: Allow the weights file to run code while it is read: pickled modules, TorchScript, .pt2. It can do
            anything that you can.
        output_key: Which of several outputs holds the class scores.
        classes: Class names: a file, a list, or names by index; default: the weights' own.
        multi_label: Classes are independent labels (BCE): read scores as sigmoids, not as a softmax.
        resize: Size of pictures in pixels: the shorter side, (height, width), or "none".
        crop: Size in pixels that is cut from the centre, in the same forms; by default no larger than `resize`.
        mean: Subtracted after scaling pixels to 0-1: one value, one per channel, or "none".
        std: Divisor after `mean` is subtracted, in the same forms.
        max_pixels: Refuse larger pictures before decoding; default: 89478485, Pillow's limit for decompression bombs.
        batch_axis: Axis of a tensor file that counts inputs: an index, "auto" or "none".
        input: Inputs by name: tensors, lists and dicts of tensors, numbers, text, and a `Path` for a file; or texts
            "NAME=VALUE".
        batch_size: Inputs per forward pass.
        grids_for: Keep feature maps for drawing, for the first `grids_for` inputs.
        max_channels: Keep at most the first `max_channels` channels of each feature map.
        save_tensors: Keep the activations in `tensors` of the result; `save` then writes them too.
        dtype: For MODEL: run in this dtype.
        seed: Seed of random weights and random numbers.
        cost: Also measure the cost of every module for the first input, in `cost` of the result: see `NetworkCost`.
        verify: Run the first batch again without hooks, and compare the outputs.
        on_progress: Called after each batch with the number of inputs finished and their total.
        on_error: Called with the error of each input that cannot be used; the input is then skipped. Without it, the
            error is raised.

    Returns:
        The run, with its verdicts. Printing it shows the command's table, `run["layer1.0.conv1"]` is a row, and
        `run.save("runs/a")` writes the command's run directory.

    Raises:
        HookscopeError: One of its subclasses: `ModelNotFoundError`, `CheckpointError`, `UntrustedFileError`,
            `ImageError`, `LayerNotFoundError`, `UsageError`, and `ForwardError` if the model raised; it carries the
            rows measured before that.
    """
    return run_activations(
        model,
        images,
        option=options.Activations(
            layer=layer,
            ops=ops,
            weights=weights,
            arch=arch,
            input_shape=input_shape,
            device=device,
            repeats=repeats,
            edit=edit,
            key=key,
            model_arg=model_arg,
            allow_missing=allow_missing,
            allow_unexpected=allow_unexpected,
            trust=trust,
            output_key=output_key,
            classes=classes,
            multi_label=multi_label,
            resize=resize,
            crop=crop,
            mean=mean,
            std=std,
            max_pixels=max_pixels,
            batch_axis=batch_axis,
            input=input,
            batch_size=batch_size,
            grids_for=grids_for,
            max_channels=max_channels,
            save_tensors=save_tensors,
            dtype=dtype,
            seed=seed,
            cost=cost,
            verify=verify,
        ),
        on_progress=on_progress,
        on_error=on_error,
    )


def grads(
    model: Model,
    images: Images = (),
    *,
    layer: Texts = (),
    ops: bool = False,
    loss: str | Callable[..., object] = "projection",
    target: str | int | Sequence[int | str] | Path | Tensor | None = None,
    weights: str | PathLike[str] = "auto",
    arch: str | PathLike[str] | None = None,
    input_shape: NoiseShapes | None = None,
    device: str = "auto",
    inputs: bool = False,
    mode: Literal["eval", "train"] = "eval",
    per_image: bool = False,
    limit: Texts | Mapping[str, float] = (),
    repeats: bool = False,
    edit: Texts | Sequence[Edit] = (),
    output_key: str | None = None,
    classes: Classes | None = None,
    multi_label: bool = False,
    key: str | None = None,
    model_arg: Texts | Mapping[str, Any] = (),
    allow_missing: Texts = (),
    allow_unexpected: Texts = (),
    trust: bool = False,
    resize: Sizes | None = None,
    crop: Sizes | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    max_pixels: int | None = None,
    batch_axis: str | int | None = None,
    input: Texts | Mapping[str, Any] = (),  # noqa: A002
    batch_size: int = 8,
    grids_for: int = 0,
    max_channels: int | None = None,
    save_tensors: bool = False,
    dtype: Dtype | None = None,
    seed: int = 0,
    verify: bool = True,
    autocast: Literal["bfloat16", "float16"] | None = None,
    on_progress: OnProgress | None = None,
    on_error: OnError | None = None,
) -> Gradients:
    """Run a model forward and backward over inputs, measure gradients, and judge them.

        >>> import hookscope
        >>> result = hookscope.grads("demo", "sample_images/cat.jpg", loss="ce", target="tabby", layer="_fc")
        >>> result.verdicts
        ()

    Args:
        model: As for `activations`.
        images: As for `activations`; default: seeded noise.
        layer: Patterns of layers to measure; default: modules that own parameters, and leaves. "op:relu" and
            "layer3.*:cat" select operations.
        ops: Also observe all operations that the network's own code calls: `F.relu`, `+`, `torch.cat`.
        loss: "ce", "bce", "mse", "l1", "huber", "nll", "sum", "logit", "projection", "file.py:function", or a function
            of the output, and of the target if there is one, that returns a 0-d tensor.
        target: Target of the loss: a class index or name, or one per input, "zeros", "noise", "self", a tensor or its
            file.
        weights: For MODEL: "auto" (trained if available, else random with a warning), "none" (random), a name, or a
            file.
        arch: Network of the weights file given as MODEL; default: inferred from names and shapes.
        input_shape: As for `activations`; None to infer it from the model.
        device: For MODEL: "auto", "cpu", "cuda", "cuda:1", "mps".
        inputs: Also report grad_input: the gradient through the layer alone.
        mode: "train" for batch statistics and dropout as in training.
        per_image: Also differentiate the loss of every single input; the norms are in `inputs_alone` of the result.
        limit: Limits of rules: a mapping, `{"vanishing": 1e-5}`, or texts "NAME=VALUE".
        repeats: Also show modules that return their input unchanged, such as dropout in eval mode.
        edit: Changes to inputs, outputs, gradients, parameters or their gradients; `comparison` of the result has their
            effect.
        output_key: Which of several outputs the loss is computed from.
        classes: Class names: a file, a list, or names by index; default: the weights' own.
        multi_label: Classes are independent labels (BCE): read scores as sigmoids, not as a softmax.
        key: Path of the weights inside the file, such as ema or checkpoint.model.
        model_arg: Keyword arguments for the network's factory: a mapping, or texts "NAME=VALUE".
        allow_missing: Globs over names that the file may lack.
        allow_unexpected: Globs over names in the file that the network may lack.
        trust: Allow the weights file to run code while it is read: pickled modules, TorchScript, .pt2. It can do
            anything that you can.
        resize: Size of pictures in pixels: the shorter side, (height, width), or "none".
        crop: Size in pixels that is cut from the centre, in the same forms; by default no larger than `resize`.
        mean: Subtracted after scaling pixels to 0-1: one value, one per channel, or "none".
        std: Divisor after `mean` is subtracted, in the same forms.
        max_pixels: Refuse larger pictures before decoding; default: 89478485, Pillow's limit for decompression bombs.
        batch_axis: Axis of a tensor file that counts inputs: an index, "auto" or "none".
        input: Inputs by name: tensors, lists and dicts of tensors, numbers, text, and a `Path` for a file; or texts
            "NAME=VALUE".
        batch_size: Inputs per forward pass.
        grids_for: Keep gradients of outputs for drawing, for the first `grids_for` inputs.
        max_channels: Keep at most the first `max_channels` channels of each feature map.
        save_tensors: Keep the gradients in `tensors` of the result; `save` then writes them too.
        dtype: For MODEL: run in this dtype.
        seed: Seed of random weights and random numbers.
        verify: Run the first batch again without hooks, and compare the outputs.
        autocast: Run forward pass and loss under autocast.
        on_progress: Called after each batch with the number of inputs finished and their total.
        on_error: Called with the error of each input that cannot be used; the input is then skipped. Without it, the
            error is raised.

    Returns:
        The gradients, with their verdicts. Printing them shows the command's tables; `result["layer1.0.conv1"]` is the
        gradient of an output and `result["layer1.0.conv1.weight"]` that of a parameter.

    Raises:
        HookscopeError: As for `activations`; `PassError` if the model raised.
    """
    return run_grads(
        model,
        images,
        option=options.Grads(
            layer=layer,
            ops=ops,
            loss=loss,
            target=target,
            weights=weights,
            arch=arch,
            input_shape=input_shape,
            device=device,
            inputs=inputs,
            mode=mode,
            per_image=per_image,
            limit=limit,
            repeats=repeats,
            edit=edit,
            output_key=output_key,
            classes=classes,
            multi_label=multi_label,
            key=key,
            model_arg=model_arg,
            allow_missing=allow_missing,
            allow_unexpected=allow_unexpected,
            trust=trust,
            resize=resize,
            crop=crop,
            mean=mean,
            std=std,
            max_pixels=max_pixels,
            batch_axis=batch_axis,
            input=input,
            batch_size=batch_size,
            grids_for=grids_for,
            max_channels=max_channels,
            save_tensors=save_tensors,
            dtype=dtype,
            seed=seed,
            verify=verify,
            autocast=autocast,
        ),
        on_progress=on_progress,
        on_error=on_error,
    )


def attribute(
    model: Model,
    images: Images = (),
    *,
    layer: Texts = (),
    target: str | int | Sequence[str | int] = (),
    method: Method = "grad-cam",
    top: int | None = None,
    weights: str | PathLike[str] = "auto",
    arch: str | PathLike[str] | None = None,
    input_shape: NoiseShapes | None = None,
    device: str = "auto",
    sanity: Literal["none", "quick", "full"] = "quick",
    output_key: str | None = None,
    classes: Classes | None = None,
    multi_label: bool = False,
    key: str | None = None,
    model_arg: Texts | Mapping[str, Any] = (),
    allow_missing: Texts = (),
    allow_unexpected: Texts = (),
    trust: bool = False,
    tokens: str | None = None,
    resize: Sizes | None = None,
    crop: Sizes | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    max_pixels: int | None = None,
    batch_axis: str | int | None = None,
    input: Texts | Mapping[str, Any] = (),  # noqa: A002
    batch_size: int = 8,
    dtype: Dtype | None = None,
    seed: int = 0,
    on_progress: OnProgress | None = None,
    on_error: OnError | None = None,
) -> Attributions:
    """Map where a model looks: the places of a picture, signal or volume that the score of a class comes from.

        >>> import hookscope
        >>> looks = hookscope.attribute("demo", "sample_images/cat.jpg", target="Egyptian cat", sanity="none")
        >>> looks["Egyptian cat"].values.shape
        (7, 7)

    A module keeps its state and its device.

    Args:
        model: A module, the result of `load_model`, or MODEL: "resnet34", "timm:NAME", "net.py:build", a weights file.
        images: Files, folders and globs, PIL pictures, or one tensor (N, ...) with the inputs on axis 0; a tuple of
            tensors for several arguments by position, a mapping for arguments by name.
        layer: Names of layers, or patterns; none means the last layer whose output is a map of the picture.
        target: What to explain: classes by index or name, one against another ("tabby-tiger cat"), a detector's boxes
            ("box:0", or the best of a class), a class's pixels where each pixel has scores, or the number per input
            that a function of the network's output returns ("file.py:function"). Every target in a list, or
            separated by commas, gets a map.
        method: "grad-cam", "grad-cam++", "layer-cam" and "hires-cam" map a layer; "gradient", "input-x-gradient",
            "guided-backprop", "integrated-gradients", "smoothgrad" and "occlusion" map the pixels. Sources of the
            formulas are in `hookscope.commands.attribute`.
        top: Explain this many best classes or boxes of each input instead; without `target` and `top`, the best one.
        weights: For MODEL: "auto" (trained if available, else random with a warning), "none" (random), a name, or a
            file.
        arch: Network of the weights file given as MODEL; default: inferred from names and shapes.
        input_shape: Noise instead of inputs, batch axis first: (4, 20), or "4,20:int64<1000" with dtype and bound; a
            list of these for several arguments by position; or a mapping of argument names to these, which may be
            combined with pictures and tensors by position.
        device: For MODEL: "auto", "cpu", "cuda", "cuda:1", "mps".
        sanity: Tests of the maps: "none", "quick" on the first batch, or "full" on all inputs.
        output_key: Which of several outputs holds the class scores.
        classes: Class names: a file, a list, or names by index; default: the weights' own.
        multi_label: Classes are independent labels (BCE): read scores as sigmoids, not as a softmax.
        key: Path of the weights inside the file, such as ema or checkpoint.model.
        model_arg: Keyword arguments for the network's factory: a mapping, or texts "NAME=VALUE".
        allow_missing: Globs over names that the file may lack.
        allow_unexpected: Globs over names in the file that the network may lack.
        trust: Allow the weights file to run code while it is read: pickled modules, TorchScript, .pt2. It can do
            anything that you can.
        tokens: How tokens are placed on the picture if it cannot be inferred: prefix=1,grid=14x14. Words or other
            tokens behind the patches: grid=8x8,suffix=12.
        resize: Size of pictures in pixels: the shorter side, (height, width), or "none".
        crop: Size in pixels that is cut from the centre, in the same forms; by default no larger than `resize`.
        mean: Subtracted after scaling pixels to 0-1: one value, one per channel, or "none".
        std: Divisor after `mean` is subtracted, in the same forms.
        max_pixels: Refuse larger pictures before decoding; default: 89478485, Pillow's limit for decompression bombs.
        batch_axis: Axis of a tensor file that counts inputs: an index, "auto" or "none".
        input: Inputs by name: tensors, lists and dicts of tensors, numbers, text, and a `Path` for a file; or texts
            "NAME=VALUE".
        batch_size: Inputs per forward pass.
        dtype: For MODEL: run in this dtype.
        seed: Seed of random weights and random numbers.
        on_progress: Called after each batch with the number of inputs finished and their total.
        on_error: Called with the error of each input that cannot be used; the input is then skipped. Without it, the
            error is raised.

    Returns:
        The maps: `looks["Egyptian cat"]` is the map of a target, and `looks.save("runs/a")` writes the command's run
        directory.

    Raises:
        HookscopeError: As for `activations`; `UsageError` also if the method cannot explain the layer or the network.
    """
    return run_attribute(
        model,
        images,
        option=options.Attribute(
            layer=layer,
            target=target,
            method=method,
            top=top,
            weights=weights,
            arch=arch,
            input_shape=input_shape,
            device=device,
            sanity=sanity,
            output_key=output_key,
            classes=classes,
            multi_label=multi_label,
            key=key,
            model_arg=model_arg,
            allow_missing=allow_missing,
            allow_unexpected=allow_unexpected,
            trust=trust,
            tokens=tokens,
            resize=resize,
            crop=crop,
            mean=mean,
            std=std,
            max_pixels=max_pixels,
            batch_axis=batch_axis,
            input=input,
            batch_size=batch_size,
            dtype=dtype,
            seed=seed,
        ),
        on_progress=on_progress,
        on_error=on_error,
    )


def attention(
    model: Model,
    images: Images = (),
    *,
    query: Texts = (),
    weights: str | PathLike[str] = "auto",
    arch: str | PathLike[str] | None = None,
    input_shape: NoiseShapes | None = None,
    device: str = "auto",
    block: str | int | Sequence[str | int] = (),
    head: int | Sequence[int] = (),
    rollout: bool = False,
    numbers: bool = True,
    key: str | None = None,
    model_arg: Texts | Mapping[str, Any] = (),
    allow_missing: Texts = (),
    allow_unexpected: Texts = (),
    trust: bool = False,
    tokens: str | None = None,
    resize: Sizes | None = None,
    crop: Sizes | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    max_pixels: int | None = None,
    batch_axis: str | int | None = None,
    input: Texts | Mapping[str, Any] = (),  # noqa: A002
    batch_size: int = 8,
    save_tensors: bool = False,
    dtype: Dtype | None = None,
    seed: int = 0,
    verify: bool = True,
    on_progress: OnProgress | None = None,
    on_error: OnError | None = None,
) -> Attention:
    """Show what a transformer's attention looks at: numbers of every block and head, and maps on the photograph.

        >>> import hookscope
        >>> looks = hookscope.attention("vit_b_16", "sample_images/cat.jpg", weights="none")
        >>> looks.census
        '12 of 12 blocks seen'
        >>> looks["class token"].values.shape
        (14, 14)

    A module keeps its state and its device.

    Args:
        model: A module, the result of `load_model`, or MODEL: "resnet34", "timm:NAME", "net.py:build", a weights file.
        images: Files, folders and globs, PIL pictures, or one tensor (N, ...) with the inputs on axis 0; a tuple of
            tensors for several arguments by position, a mapping for arguments by name.
        query: Whose attention to draw: "cls", "register:1", "mean", or "x,y", a pixel of the photograph; or a list of
            these. None means the class token, or the mean over queries if there is no class token.
        weights: For MODEL: "auto" (trained if available, else random with a warning), "none" (random), a name, or a
            file.
        arch: Network of the weights file given as MODEL; default: inferred from names and shapes.
        input_shape: Noise instead of inputs, batch axis first: (4, 20), or "4,20:int64<1000" with dtype and bound; a
            list of these for several arguments by position; or a mapping of argument names to these, which may be
            combined with pictures and tensors by position.
        device: For MODEL: "auto", "cpu", "cuda", "cuda:1", "mps".
        block: Which blocks to draw, of those seen: positions from 0, or -1 for the last, or names.
        head: Which heads to draw, from 0; none means the mean over heads.
        rollout: Also follow attention through all blocks.
        numbers: Measure every head. If False, only the rows of `query` are computed: maps of large pictures then cost
            little more than the forward pass.
        key: Path of the weights inside the file, such as ema or checkpoint.model.
        model_arg: Keyword arguments for the network's factory: a mapping, or texts "NAME=VALUE".
        allow_missing: Globs over names that the file may lack.
        allow_unexpected: Globs over names in the file that the network may lack.
        trust: Allow the weights file to run code while it is read: pickled modules, TorchScript, .pt2. It can do
            anything that you can.
        tokens: How tokens are placed on the picture if it cannot be inferred: prefix=1,grid=14x14. Words or other
            tokens behind the patches: grid=8x8,suffix=12.
        resize: Size of pictures in pixels: the shorter side, (height, width), or "none".
        crop: Size in pixels that is cut from the centre, in the same forms; by default no larger than `resize`.
        mean: Subtracted after scaling pixels to 0-1: one value, one per channel, or "none".
        std: Divisor after `mean` is subtracted, in the same forms.
        max_pixels: Refuse larger pictures before decoding; default: 89478485, Pillow's limit for decompression bombs.
        batch_axis: Axis of a tensor file that counts inputs: an index, "auto" or "none".
        input: Inputs by name: tensors, lists and dicts of tensors, numbers, text, and a `Path` for a file; or texts
            "NAME=VALUE".
        batch_size: Inputs per forward pass.
        save_tensors: Keep the attention weights in `tensors` of the result; `save` then writes them too.
        dtype: For MODEL: run in this dtype.
        seed: Seed of random weights and random numbers.
        verify: Run the first batch again without hooks, and compare the outputs.
        on_progress: Called after each batch with the number of inputs finished and their total.
        on_error: Called with the error of each input that cannot be used; the input is then skipped. Without it, the
            error is raised.

    Returns:
        The attention: `looks.census` counts the blocks that were seen, `looks["blocks.11.attn"]` is a map, `looks.rows`
        are the numbers by head, and `looks.save("runs/a")` writes the command's run directory.

    Raises:
        HookscopeError: As for `activations`; `NothingMatchedError` if no attention was seen, `UsageError` if rollout
            is undefined for the network, or no block has the query.
    """
    return run_attention(
        model,
        images,
        option=options.Attention(
            query=query,
            weights=weights,
            arch=arch,
            input_shape=input_shape,
            device=device,
            block=block,
            head=head,
            rollout=rollout,
            numbers=numbers,
            key=key,
            model_arg=model_arg,
            allow_missing=allow_missing,
            allow_unexpected=allow_unexpected,
            trust=trust,
            tokens=tokens,
            resize=resize,
            crop=crop,
            mean=mean,
            std=std,
            max_pixels=max_pixels,
            batch_axis=batch_axis,
            input=input,
            batch_size=batch_size,
            save_tensors=save_tensors,
            dtype=dtype,
            seed=seed,
            verify=verify,
        ),
        on_progress=on_progress,
        on_error=on_error,
    )


def diff(
    a: Model,
    b: Model,
    images: Images = (),
    *,
    layer: Texts = (),
    ops: bool = False,
    grads: bool = False,
    loss: str | Callable[..., object] | None = None,
    target: str | int | Sequence[int | str] | Path | Tensor | None = None,
    reference: Literal["float64"] | None = None,
    shadow: bool = False,
    fail_over: Texts = (),
    weights: str | PathLike[str] = "auto",
    arch: str | PathLike[str] | None = None,
    input_shape: NoiseShapes | None = None,
    device: str = "auto",
    map: Texts = (),  # noqa: A002
    key: str | None = None,
    model_arg: Texts | Mapping[str, Any] = (),
    allow_missing: Texts = (),
    allow_unexpected: Texts = (),
    trust: bool = False,
    output_key: str | None = None,
    classes: Classes | None = None,
    multi_label: bool = False,
    weights_b: str | PathLike[str] | None = None,
    input_b: Images = (),
    device_b: str | None = None,
    dtype_b: Dtype | None = None,
    autocast_b: Literal["bfloat16", "float16"] | None = None,
    mode_b: Literal["eval", "train"] = "eval",
    threads_b: int | None = None,
    compile_b: bool = False,
    edit_b: Texts | Sequence[Edit] = (),
    resize: Sizes | None = None,
    crop: Sizes | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    max_pixels: int | None = None,
    batch_axis: str | int | None = None,
    input: Texts | Mapping[str, Any] = (),  # noqa: A002
    batch_size: int = 8,
    dtype: Dtype | None = None,
    seed: int = 0,
    on_progress: OnProgress | None = None,
    on_error: OnError | None = None,
) -> Differences:
    """Compare two models on the same inputs, layer by layer, and find where the difference begins.

    Two run directories of `activations` or `grads` are compared without running their models. Without inputs, only
    weights are compared.

        >>> import hookscope
        >>> result = hookscope.diff("demo", "same", "sample_images/cat.jpg", edit_b="_conv_stem:output:scale(1.1)")
        >>> result.first_differences[0].layer
        '_conv_stem'

    Over each batch A runs first; its outputs wait for B in memory up to 2 GiB, then in a temporary file. Modules keep
    their state and their device.

    Args:
        a: As `model` for `activations`, or a run directory.
        b: As `a`, or "same": A again, run in a different way. If A is a module, B is a copy of it.
        images: Without these, `input` and `input_shape`, only weights are compared; a weights file then needs no
            network.
        layer: Layers of A whose rows are shown.
        ops: Also observe all operations that the network's own code calls: `F.relu`, `+`, `torch.cat`.
        grads: Also run both backward, batch by batch, and compare gradients of outputs, and gradients of parameters
            summed over batches. `first_gradient_difference` of the result is the first gradient to differ in the
            backward pass. The gradients of all layers' inputs and outputs over a batch, of both models, wait as A's
            outputs do.
        loss: As for `grads`; default: "projection".
        target: As for `grads`; without a target, A and B compute one each.
        reference: Also run A's weights in float64, and measure the errors of A and B against it: is B worse?
        shadow: Also run each layer of B on A's input: how much the layer itself adds.
        fail_over: Conditions for `exceeded`: "rel>1e-3", "layer4*:cosine<0.99", "output:kl>0.01", "top1<1".
        weights: For MODEL: "auto" (trained if available, else random with a warning), "none" (random), a name, or a
            file.
        arch: Network of the weights file given as MODEL; default: inferred from names and shapes.
        input_shape: Noise instead of inputs, batch axis first: (4, 20), or "4,20:int64<1000" with dtype and bound; a
            list of these for several arguments by position; or a mapping of argument names to these, which may be
            combined with pictures and tensors by position.
        device: For MODEL: "auto", "cpu", "cuda", "cuda:1", "mps".
        map: Pairs of layers with different names, "encoder.*=backbone.*".
        key: Path of the weights inside the file, such as ema or checkpoint.model.
        model_arg: Keyword arguments for the network's factory: a mapping, or texts "NAME=VALUE".
        allow_missing: Globs over names that the file may lack.
        allow_unexpected: Globs over names in the file that the network may lack.
        trust: Allow the weights file to run code while it is read: pickled modules, TorchScript, .pt2. It can do
            anything that you can.
        output_key: Which of several outputs is compared and differentiated; None for all.
        classes: Class names: a file, a list, or names by index; default: the weights' own.
        multi_label: Classes are independent labels (BCE): read scores as sigmoids, not as a softmax.
        weights_b: As `weights`, for B; default: A's.
        input_b: Inputs of B instead of `images`, one per image in the same order, such as padded or cropped pictures.
            Inputs then run one by one; rows with different shapes are not compared.
        device_b: As `device`, for B; default: A's.
        dtype_b: Run B in this dtype. Default: A's.
        autocast_b: Run B under autocast to this dtype.
        mode_b: Run B with batch statistics and dropout as in training.
        threads_b: Threads that B computes with on the CPU.
        compile_b: Run B through torch.compile. The output comes from the whole network, compiled in one piece; the rows
            come from blocks that are compiled one by one, and `layer` can make these blocks smaller.
        edit_b: Changes to B's parameters, or to inputs or outputs of its layers: "layer3:output:zero(channels=3)".
        resize: Size of pictures in pixels: the shorter side, (height, width), or "none".
        crop: Size in pixels that is cut from the centre, in the same forms; by default no larger than `resize`.
        mean: Subtracted after scaling pixels to 0-1: one value, one per channel, or "none".
        std: Divisor after `mean` is subtracted, in the same forms.
        max_pixels: Refuse larger pictures before decoding; default: 89478485, Pillow's limit for decompression bombs.
        batch_axis: Axis of a tensor file that counts inputs: an index, "auto" or "none".
        input: Inputs by name: tensors, lists and dicts of tensors, numbers, text, and a `Path` for a file; or texts
            "NAME=VALUE".
        batch_size: Inputs per forward pass.
        dtype: For MODEL: run in this dtype.
        seed: Seed of random weights and random numbers.
        on_progress: Called after each batch with the number of inputs finished and their total.
        on_error: Called with the error of each input that cannot be used; the input is then skipped. Without it, the
            error is raised.

    Returns:
        The differences: `result["layer3.0.conv1"]` is a row, and `result.first_differences` is where they begin.

    Raises:
        HookscopeError: As for `activations`; `NothingMatchedError` if no layer of A has a partner in B.
    """
    return run_diff(
        a,
        b,
        images,
        option=options.Diff(
            layer=layer,
            ops=ops,
            grads=grads,
            loss=loss,
            target=target,
            reference=reference,
            shadow=shadow,
            fail_over=fail_over,
            weights=weights,
            arch=arch,
            input_shape=input_shape,
            device=device,
            map=map,
            key=key,
            model_arg=model_arg,
            allow_missing=allow_missing,
            allow_unexpected=allow_unexpected,
            trust=trust,
            output_key=output_key,
            classes=classes,
            multi_label=multi_label,
            weights_b=weights_b,
            input_b=input_b,
            device_b=device_b,
            dtype_b=dtype_b,
            autocast_b=autocast_b,
            mode_b=mode_b,
            threads_b=threads_b,
            compile_b=compile_b,
            edit_b=edit_b,
            resize=resize,
            crop=crop,
            mean=mean,
            std=std,
            max_pixels=max_pixels,
            batch_axis=batch_axis,
            input=input,
            batch_size=batch_size,
            dtype=dtype,
            seed=seed,
        ),
        on_progress=on_progress,
        on_error=on_error,
    )


def layers(
    model: Model,
    *,
    layer: Texts = (),
    ops: bool = False,
    weights: str | PathLike[str] = "auto",
    arch: str | PathLike[str] | None = None,
    key: str | None = None,
    model_arg: Texts | Mapping[str, Any] = (),
    allow_missing: Texts = (),
    allow_unexpected: Texts = (),
    trust: bool = False,
    input_shape: NoiseShapes | None = None,
    input: Texts | Mapping[str, Any] = (),  # noqa: A002
    cost: bool = False,
    depth: int | None = None,
) -> ModuleTable:
    """List a model's modules with types, parameters and shapes, and mark what patterns select.

        >>> import hookscope
        >>> print(hookscope.layers("resnet18")["layer1.0.conv1"].output_shapes)
        ((1, 64, 56, 56),)

    Shapes come from a forward pass over noise, or over `input`. MODEL runs on the meta device, which computes nothing,
    and on the CPU if that fails; a module runs on its own device.

    Args:
        model: As for `activations`.
        layer: Patterns to mark; default: modules that own parameters, and leaves.
        ops: Also observe all operations that the network's own code calls: `F.relu`, `+`, `torch.cat`.
        weights: A file or a name of weights, which must load; "auto" and "none" load none: no values are needed.
        arch: Network of the weights file given as MODEL; default: inferred from names and shapes.
        key: Path of the weights inside the file, such as ema or checkpoint.model.
        model_arg: Keyword arguments for the network's factory: a mapping, or texts "NAME=VALUE".
        allow_missing: Globs over names that the file may lack.
        allow_unexpected: Globs over names in the file that the network may lack.
        trust: Allow the weights file to run code while it is read: pickled modules, TorchScript, .pt2. It can do
            anything that you can.
        input_shape: Noise, as for `activations`; None to infer its shape from the model.
        input: Inputs by name, as for `activations`; tensors replace the noise.
        cost: Also measure the cost of every module, in `cost` of the result: see `NetworkCost`. MODEL then also runs on
            the CPU; if it takes more than half of this machine's memory, there are no times.
        depth: Show modules down to this depth: 1 for the network and its children.

    Returns:
        The modules: `table["layer1.0.conv1"]` is a row.

    Raises:
        HookscopeError: As for `activations`. If the forward pass raises, `failure` of the result has the error instead.
    """
    return run_layers(
        model,
        option=options.Layers(
            layer=layer,
            ops=ops,
            weights=weights,
            arch=arch,
            key=key,
            model_arg=model_arg,
            allow_missing=allow_missing,
            allow_unexpected=allow_unexpected,
            trust=trust,
            input_shape=input_shape,
            input=input,
            cost=cost,
            depth=depth,
        ),
    )


def check(
    checkpoint: Model | Mapping[str, Any],
    *,
    config: str | Path | None = None,
    select: Texts = (),
    ignore: Texts = (),
    baseline: str | Path | None = None,
    images: Images = (),
    data: str | Path | None = None,
    arch: str | PathLike[str] | None = None,
    input_shape: NoiseShapes | None = None,
    device: str = "cpu",
    limit: Texts | Mapping[str, float] = (),
    key: str | None = None,
    model_arg: Texts | Mapping[str, Any] = (),
    allow_missing: Texts = (),
    allow_unexpected: Texts = (),
    allow_global: Texts = (),
    output_key: str | None = None,
    classes: Classes | None = None,
    multi_label: bool | None = None,
    trust: bool = False,
    survey: str | Path | None = None,
    resize: Sizes | None = None,
    crop: Sizes | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    max_pixels: int | None = None,
    batch_axis: str | int | None = None,
    input: Texts | Mapping[str, Any] = (),  # noqa: A002
    evidence: str | Path | None = None,
) -> CheckReport:
    """Check one checkpoint by the rules of `hookscope check`; the network runs in this process.

        >>> import hookscope
        >>> def test_the_checkpoint_is_sound():
        ...     hookscope.check("model.pt").raise_for_failure()

    Arguments override the configuration.

    Args:
        checkpoint: A weights file or any other form of MODEL; a module, which stays on its device; or a state dict,
            also inside the dict that a training script saves. A state dict is judged by its values alone, without a
            network.
        config: The configuration file; default: the one in the working directory, else the built-in defaults.
        select: Rules or globs to judge by; default: all rules that are on.
        ignore: Rules or globs to leave out.
        baseline: File written by `--update-baseline`; default: the configuration's, if any.
        images: As for `activations`, instead of the configuration's or of noise.
        data: Labelled pictures to measure the accuracy on: a folder of class folders, a CSV file with a path and a
            label on each line, or a JSON file of labels by path; with `multi_label`, a picture may have several labels.
        arch: The network that a weights file belongs to; "none" to judge the stored values without a network; None for
            the network of the configuration, or to recognise it.
        input_shape: Noise, as for `activations`, instead of the configuration's.
        device: auto, cpu, cuda, cuda:1 or mps.
        limit: Limits of rules: a mapping, `{"dead-channels.max-fraction": 0.5}`, or texts "RULE.LIMIT=VALUE"; they
            override the configuration and the defaults.
        key: Path of the weights inside the file, such as ema or checkpoint.model.
        model_arg: Keyword arguments for the network's factory: a mapping, or texts "NAME=VALUE".
        allow_missing: Globs over names that the file may lack.
        allow_unexpected: Globs over names in the file that the network may lack.
        allow_global: Globs over classes and functions that the file's pickle may name in addition to plain data. They
            are skipped, never imported.
        output_key: Which of several outputs holds the class scores.
        classes: Class names: a file, a list, or names by index; default: the weights' own.
        multi_label: Classes are independent labels (BCE): read scores as sigmoids, not as a softmax; default: the
            configuration's, else no.
        trust: Allow the weights file to run code while it is read: pickled modules, TorchScript, .pt2. It can do
            anything that you can.
        survey: Run directory of `survey` of this network: rules about activations then judge all of its inputs.
        resize: Size of pictures in pixels: the shorter side, (height, width), or "none".
        crop: Size in pixels that is cut from the centre, in the same forms; by default no larger than `resize`.
        mean: Subtracted after scaling pixels to 0-1: one value, one per channel, or "none".
        std: Divisor after `mean` is subtracted, in the same forms.
        max_pixels: Refuse larger pictures before decoding; default: 89478485, Pillow's limit for decompression bombs.
        batch_axis: Axis of a tensor file that counts inputs: an index, "auto" or "none".
        input: Inputs by name: tensors, lists and dicts of tensors, numbers, text, and a `Path` for a file; or texts
            "NAME=VALUE".
        evidence: Folder for an overview, and for grids and rows of the layers that failed; None writes nothing.

    Returns:
        The report. Its `error` says why the checkpoint could not be read or run, or its evidence not written.

    Raises:
        UsageError: If the configuration, the baseline, the device or the name of a rule is wrong.
    """
    return run_check(
        checkpoint,
        option=options.Check(
            config=config,
            select=select,
            ignore=ignore,
            baseline=baseline,
            images=images,
            data=data,
            arch=arch,
            input_shape=input_shape,
            device=device,
            limit=limit,
            key=key,
            model_arg=model_arg,
            allow_missing=allow_missing,
            allow_unexpected=allow_unexpected,
            allow_global=allow_global,
            output_key=output_key,
            classes=classes,
            multi_label=multi_label,
            trust=trust,
            survey=survey,
            resize=resize,
            crop=crop,
            mean=mean,
            std=std,
            max_pixels=max_pixels,
            batch_axis=batch_axis,
            input=input,
            evidence=evidence,
        ),
    )


def history(
    files: Texts | Sequence[Path] | Path,
    images: Images = (),
    *,
    config: str | Path | None = None,
    select: Texts = (),
    ignore: Texts = (),
    bisect: bool = False,
    arch: str | PathLike[str] | None = None,
    input_shape: NoiseShapes | None = None,
    device: str = "cpu",
    limit: Texts | Mapping[str, float] = (),
    key: str | None = None,
    model_arg: Texts | Mapping[str, Any] = (),
    allow_missing: Texts = (),
    allow_unexpected: Texts = (),
    allow_global: Texts = (),
    output_key: str | None = None,
    classes: Classes | None = None,
    resize: Sizes | None = None,
    crop: Sizes | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    max_pixels: int | None = None,
    batch_axis: str | int | None = None,
    input: Texts | Mapping[str, Any] = (),  # noqa: A002
    on_progress: OnProgress | None = None,
) -> History:
    """Follow a training by its checkpoints: how the weights moved, and which file is the first to break a rule.

        run = hookscope.history("ckpt/epoch_*.pt")
        print(run)
        [row.drift for row in run["layer3.1.conv2.weight"]]

    Files are read without running code from them. A file that cannot be read is reported, and the others are finished.

    Args:
        files: Weights files, folders of them or globs; at least two files. They are taken in the order of the epochs or
            steps that they store, else in natural order of names: "epoch_2.pt" before "epoch_10.pt".
        images: Run the network over these with the weights of each file, and judge by all rules.
        config: The configuration file; default: the one in the working directory, else the built-in defaults.
        select: Rules or globs to judge by; default: all rules that are on.
        ignore: Rules or globs to leave out.
        bisect: Read the first and the last file, then only as many as it takes to find the first file with each verdict
            of the last; assumes that verdicts stay.
        arch: The network that the files belong to; "none" to judge the stored values without a network. None takes the
            network of the configuration; if it has none, the network is recognised with inputs, and "none" without.
        input_shape: Noise to run the network over, as for `activations`.
        device: auto, cpu, cuda, cuda:1 or mps.
        limit: Limits of rules: a mapping, `{"dead-channels.max-fraction": 0.5}`, or texts "RULE.LIMIT=VALUE"; they
            override the configuration and the defaults.
        key: Path of the weights inside the file, such as ema or checkpoint.model.
        model_arg: Keyword arguments for the network's factory: a mapping, or texts "NAME=VALUE".
        allow_missing: Globs over names that the file may lack.
        allow_unexpected: Globs over names in the file that the network may lack.
        allow_global: Globs over classes and functions that the file's pickle may name in addition to plain data. They
            are skipped, never imported.
        output_key: Which of several outputs holds the class scores.
        classes: Class names: a file, a list, or names by index; default: the weights' own.
        resize: Size of pictures in pixels: the shorter side, (height, width), or "none".
        crop: Size in pixels that is cut from the centre, in the same forms; by default no larger than `resize`.
        mean: Subtracted after scaling pixels to 0-1: one value, one per channel, or "none".
        std: Divisor after `mean` is subtracted, in the same forms.
        max_pixels: Refuse larger pictures before decoding; default: 89478485, Pillow's limit for decompression bombs.
        batch_axis: Axis of a tensor file that counts inputs: an index, "auto" or "none".
        input: Inputs by name: tensors, lists and dicts of tensors, numbers, text, and a `Path` for a file; or texts
            "NAME=VALUE".
        on_progress: Called after each batch with the number of inputs finished and their total.

    Returns:
        The weights over the files, and the verdicts, each with the first file that breaks the rule.
        `run.save("runs/a")` writes the command's run directory.

    Raises:
        UsageError: If an option is wrong, or there are fewer than two files.
        NothingMatchedError: If a folder or a glob holds no weights file.
    """
    return run_history(
        files,
        images,
        option=options.History(
            config=config,
            select=select,
            ignore=ignore,
            bisect=bisect,
            arch=arch,
            input_shape=input_shape,
            device=device,
            limit=limit,
            key=key,
            model_arg=model_arg,
            allow_missing=allow_missing,
            allow_unexpected=allow_unexpected,
            allow_global=allow_global,
            output_key=output_key,
            classes=classes,
            resize=resize,
            crop=crop,
            mean=mean,
            std=std,
            max_pixels=max_pixels,
            batch_axis=batch_axis,
            input=input,
        ),
        on_progress=on_progress,
    )


def survey(
    model: Model,
    images: Images,
    *,
    layer: Texts = (),
    ops: bool = False,
    top: int = 9,
    by_class: bool = False,
    features: str | Path | None = None,
    resume: bool = False,
    weights: str | PathLike[str] = "auto",
    arch: str | PathLike[str] | None = None,
    device: str = "auto",
    key: str | None = None,
    model_arg: Texts | Mapping[str, Any] = (),
    allow_missing: Texts = (),
    allow_unexpected: Texts = (),
    trust: bool = False,
    classes: Classes | None = None,
    resize: Sizes | None = None,
    crop: Sizes | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    max_pixels: int | None = None,
    batch_axis: str | int | None = None,
    batch_size: int = 32,
    pool: Literal["avg", "max", "cls", "none"] = "avg",
    features_dtype: Literal["float32", "float16"] = "float32",
    dtype: Dtype | None = None,
    seed: int = 0,
    verify: bool = True,
    chunk_size: int = 1024,
    workers: int | None = None,
    shard: str | None = None,
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
        model: A module, the result of `load_model`, or MODEL: "resnet34", "timm:NAME", "net.py:build", a weights file.
        images: Files, folders and globs, PIL pictures, or one tensor with the inputs on axis 0.
        layer: Patterns of layers to measure; default: modules that own parameters, and leaves. "op:relu" and
            "layer3.*:cat" select operations.
        ops: Also observe all operations that the network's own code calls: `F.relu`, `+`, `torch.cat`.
        top: For every channel, list this many of the inputs that excite it most.
        by_class: Inputs are one folder with a folder for each class in it, or a CSV file of paths and labels: also
            measure how selective channels are for classes.
        features: Also write the outputs of the layers of `layer`: to a .safetensors or .parquet file, or to a folder
            with one file per chunk; a JSON file next to it lists the inputs.
        resume: Use the finished chunks in `chunks` if they have the same model, inputs and settings.
        weights: For MODEL: "auto" (trained if available, else random with a warning), "none" (random), a name, or a
            file.
        arch: Network of the weights file given as MODEL; default: inferred from names and shapes.
        device: For MODEL: "auto", "cpu", "cuda", "cuda:1", "mps".
        key: Path of the weights inside the file, such as ema or checkpoint.model.
        model_arg: Keyword arguments for the network's factory: a mapping, or texts "NAME=VALUE".
        allow_missing: Globs over names that the file may lack.
        allow_unexpected: Globs over names in the file that the network may lack.
        trust: Allow the weights file to run code while it is read: pickled modules, TorchScript, .pt2. It can do
            anything that you can.
        classes: Class names: a file, a list, or names by index; default: the weights' own.
        resize: Size of pictures in pixels: the shorter side, (height, width), or "none".
        crop: Size in pixels that is cut from the centre, in the same forms; by default no larger than `resize`.
        mean: Subtracted after scaling pixels to 0-1: one value, one per channel, or "none".
        std: Divisor after `mean` is subtracted, in the same forms.
        max_pixels: Refuse larger pictures before decoding; default: 89478485, Pillow's limit for decompression bombs.
        batch_axis: Axis of a tensor file that counts inputs: an index, "auto" or "none".
        batch_size: Inputs per forward pass; a different batch size may change the last bits of the results.
        pool: Reduce features (N, C, ...) over positions: "avg" to their mean and "max" to their maximum, "cls" to the
            first token; "none" keeps them.
        features_dtype: Store features in this dtype.
        dtype: For MODEL: run in this dtype.
        seed: Seed of random weights and random numbers.
        verify: Run the first batch again without hooks, and compare the outputs.
        chunk_size: Files per chunk, or inputs if they are in memory. A file of several inputs is in one chunk.
        workers: Threads that read pictures ahead, 0 for none; None for one per processor, at most 4. The number does
            not change results.
        shard: "3/8" measures only the third of eight parts, into `chunks`. The same call without `shard`, with
            `resume`, measures the missing chunks and merges all.
        chunks: Folder for finished chunks, which stay there; None for a temporary folder.
        on_progress: Called after each batch with the number of inputs finished and their total.

    Returns:
        The survey: printing it shows the command's table, and `survey["layer1.0.conv1"]` is a row with its channels.
        None for a shard, and in all processes of torchrun except the first.

    Raises:
        HookscopeError: As for `activations`; `OutputError` if a chunk cannot be written.
    """
    return run_survey(
        model,
        images,
        option=options.Survey(
            layer=layer,
            ops=ops,
            top=top,
            by_class=by_class,
            features=features,
            resume=resume,
            weights=weights,
            arch=arch,
            device=device,
            key=key,
            model_arg=model_arg,
            allow_missing=allow_missing,
            allow_unexpected=allow_unexpected,
            trust=trust,
            classes=classes,
            resize=resize,
            crop=crop,
            mean=mean,
            std=std,
            max_pixels=max_pixels,
            batch_axis=batch_axis,
            batch_size=batch_size,
            pool=pool,
            features_dtype=features_dtype,
            dtype=dtype,
            seed=seed,
            verify=verify,
            chunk_size=chunk_size,
            workers=workers,
            shard=shard,
        ),
        chunks=chunks,
        on_progress=on_progress,
    )


def features(
    model: Model,
    batches: Iterable[Any],
    out: str | Path,
    *,
    layer: Texts,
    pool: Literal["avg", "max", "cls", "none"] = "avg",
    features_dtype: Literal["float32", "float16"] = "float32",
    seed: int = 0,
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
        pool: Reduce features (N, C, ...) over positions: "avg" to their mean and "max" to their maximum, "cls" to the
            first token; "none" keeps them.
        features_dtype: Store features in this dtype.
        seed: Seed of random weights and random numbers.

    Returns:
        The files, and the shape of each tensor.

    Raises:
        HookscopeError: As for `activations`; `OutputError` if a file cannot be written.
    """
    return run_features(
        model, batches, out, layer=layer, option=options.Features(pool=pool, features_dtype=features_dtype, seed=seed)
    )


def checkpoint(
    file: str | Path,
    *,
    key: str | None = None,
) -> CheckpointContents:
    """List the contents of a weights file without building a network or running code from the file.

    Args:
        file: A weights file, the index of a sharded one, or the folder of a distributed one.
        key: Path of the weights inside the file; None for all sets of weights.

    Returns:
        The sets of weights with their tensors, the other entries of the file, and its metadata.

    Raises:
        CheckpointError: If the file is missing, damaged, or not a weights file.
        NothingMatchedError: If there is nothing at `key`.
    """
    return run_checkpoint(file, option=options.Checkpoint(key=key))


def report(
    run: str | Path | Activations | Gradients | Attributions | Attention | Differences | History | Survey | TrainingLog,
    out: str | Path | None = None,
) -> Path:
    """Write one self-contained HTML page of a run.

    For the folder of a watched training, RUN/overview.png is written too if the folder is writable, because nothing is
    drawn while it trains.

    Args:
        run: A run directory, the folder of a watched training, or a result.
        out: The HTML file; None for RUN.html next to the run directory.

    Returns:
        The file that was written.

    Raises:
        InputError: If `run` is not a run that can be read.
        OutputError: If the page cannot be written.
        UsageError: If `run` is a result and `out` is None.
    """
    return run_report(run, out)


def watch(
    model: Networks,
    optimizer: Optimizers,
    *,
    every: int = 100,
    eager_forward: bool = False,
    layer: Texts = (),
    resume: bool = False,
    out: str | Path | None = None,
    activations: bool = True,
    edits: Texts = (),
    on_line: Callable[[str], None] | None = None,
) -> Watch:
    """Watch a training: every step briefly, every `every`-th step in full, and print a line when a verdict changes.

        watch = hookscope.watch(model, optimizer, every=100, out="runs/a")
        for images, labels in loader:
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss)
        watch.close()

    The weights are, bit for bit, those of the training without it. For every step it records the loss, the gradient
    norm at the optimiser and before clipping, the largest gradients and the learning rates, all read from the optimiser
    without hooks on modules. For watched steps, and for the step after a jump of loss or norm, it also records every
    parameter with its update, and the activations. Once the training runs, neither an error in hookscope nor a full
    disk ends it: a line reports either. On an accelerator, numbers are not waited for, so a jump is noticed a few steps
    late.

    Args:
        model: The network, or a list or dict of several; names then begin with the class or the key. Activations of
            compiled networks are measured with `eager_forward` only.
        optimizer: The optimiser, or a list of several.
        every: Measure weights, updates and activations at every Nth step.
        eager_forward: Measure activations of compiled networks too: at watched steps the network runs once more,
            eagerly and without gradients, on the first batch. Everything that this changes is put back.
        layer: Patterns, as for `activations`: watched steps record only these layers and their parameters.
        resume: Append to the log of an earlier training in `out`.
        out: Folder for `watch.jsonl`, which grows a line at a time; None writes nothing.
        activations: Measure activations at watched steps, except at the first step.
        edits: Changes to the training, "fc:grad:clip-norm(1)", "param:layer1.*:freeze"; assign to `edits` of the watch
            to change them while it trains. An edit that fails ends the training. Layers of compiled networks cannot be
            edited, but their parameters can.
        on_line: Called with each line instead of printing it on stderr.

    Returns:
        The watch. Call its `step(loss)` after each `optimizer.step()`, and `close()` at the end; or use it as a context
        manager.

    Raises:
        UsageError: If the network cannot be watched (nn.DataParallel, shards), if the optimiser holds none of its
            parameters, or if an edit is malformed or cannot be made.
        LayerNotFoundError: If a pattern or an edit selects nothing.
        OutputError: If `out` holds a different training, is in use, or cannot be written.
    """
    return run_watch(
        model,
        optimizer,
        option=options.Watch(every=every, eager_forward=eager_forward, layer=layer, resume=resume, out=out),
        activations=activations,
        edits=edits,
        on_line=on_line,
    )
