"""One function for each command, with the command's name, options and result: hookscope on one page."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from hookscope.errors import OutputError, UsageError
from hookscope.hooks.interrupts import interrupts_between_blocks
from hookscope.text import printable

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.export import ExportedProgram

    from hookscope.differences.compare_networks import RunOptions
    from hookscope.differences.compare_weights import Weights
    from hookscope.differences.compared_networks import WeightOptions
    from hookscope.inputs import Batch
    from hookscope.inspection.edits import Edit
    from hookscope.inspection.given_inputs import Images
    from hookscope.inspection.session import OnError, OnProgress
    from hookscope.models import Classes, FileOptions, LoadedModel
    from hookscope.results.activations import Activations
    from hookscope.results.attention import Attention
    from hookscope.results.attributions import Attributions, Method
    from hookscope.results.check import CheckReport
    from hookscope.results.contents import CheckpointContents
    from hookscope.results.differences import Differences
    from hookscope.results.gradients import Gradients
    from hookscope.results.history import History
    from hookscope.results.network import ModuleTable
    from hookscope.results.noise_shapes import NoiseShape, NoiseShapes
    from hookscope.results.survey import FeatureFiles, Survey
    from hookscope.results.training import TrainingLog
    from hookscope.watching.networks import Networks, Optimizers
    from hookscope.watching.watch import Watch

    Model = str | Path | nn.Module | ExportedProgram | LoadedModel

Texts = str | Sequence[str]
Dtype = Literal["float32", "float64", "float16", "bfloat16"]
Numbers = str | float | Sequence[float]
Sizes = str | int | Sequence[int]

_JUDGED_ALONE = (
    "A state dict is judged without a network, so options that load or run one do not apply. Load it into the network "
    "and give that, or save it and give the file."
)
_TOO_LARGE_TO_TIME = (
    "No times: the network takes more than half of this machine's memory. Bytes saved for backward are those of the "
    "meta device, where attention is not fused."
)
_RUNS_WHERE_IT_IS = (
    "A module stays on its device, with its weights: load, convert and move it yourself. --weights, --arch, --device, "
    "--dtype and the like need MODEL as a name or a file."
)


@interrupts_between_blocks()
def activations(
    model: Model,
    images: Images = (),
    *,
    layer: Texts = (),
    ops: bool = False,
    repeats: bool = False,
    weights: str = "auto",
    arch: str | None = None,
    model_arg: Texts | Mapping[str, Any] = (),
    trust: bool = False,
    key: str | None = None,
    allow_missing: Texts = (),
    allow_unexpected: Texts = (),
    input_shape: NoiseShapes | None = None,
    resize: Sizes | None = None,
    crop: Sizes | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    max_pixels: int | None = None,
    batch_axis: str | int | None = None,
    input: Texts | Mapping[str, Any] = (),  # noqa: A002 - the name of the option
    output_key: str | None = None,
    classes: Classes | None = None,
    multi_label: bool = False,
    edit: Texts | Sequence[Edit] = (),
    batch_size: int = 8,
    grids_for: int = 0,
    max_channels: int | None = None,
    device: str = "auto",
    dtype: Dtype | None = None,
    seed: int = 0,
    cost: bool = False,
    verify: bool = True,
    save_tensors: bool = False,
    on_progress: OnProgress | None = None,
    on_error: OnError | None = None,
) -> Activations:
    """Run a model over inputs once, in eval mode, and measure its layers' outputs.

        >>> import hookscope
        >>> run = hookscope.activations("demo", "sample_images/cat.jpg", layer="conv")
        >>> run["_conv_stem"].shape
        (1, 32, 112, 112)

    A module keeps its state and its device. `hookscope activations --help` describes the other options.

    Args:
        model: A module, the result of `load_model`, or MODEL: "resnet34", "timm:NAME", "net.py:build", a weights file.
        images: Files, folders and globs, PIL pictures, or one tensor (N, ...) with the inputs on axis 0; a tuple of
            tensors for several arguments by position, a mapping for arguments by name.
        layer: Patterns of layers to measure; default: modules that own parameters, and leaves. "op:relu" and
            "layer3.*:cat" select operations.
        ops: Also observe all operations that the network's own code calls: `F.relu`, `+`, `torch.cat`.
        repeats: Keep the rows of modules that return their input unchanged.
        weights: For MODEL: "auto" (trained if available, else random with a warning), "none" (random), a name, or a
            file.
        arch: The network that a weights file belongs to; None to recognise it.
        model_arg: Keyword arguments for the network's factory: a mapping, or texts "NAME=VALUE".
        trust: Let a weights file run code while it is read.
        key: Path of the weights inside the file.
        allow_missing: Globs over names that the file may lack.
        allow_unexpected: Globs over names in the file that the network may lack.
        input_shape: Noise instead of inputs, batch axis first: (4, 20), or "4,20:int64<1000" with dtype and bound; a
            list of these for several arguments by position; or a mapping of argument names to these, which may be
            combined with pictures and tensors by position.
        resize: Size of pictures in pixels: the shorter side, (height, width), or "none".
        crop: Size in pixels that is cut from the centre, in the same forms; by default no larger than `resize`.
        mean: Subtracted after scaling pixels to 0-1: one value, one per channel, or "none".
        std: Divisor after `mean` is subtracted, in the same forms.
        max_pixels: Refuse pictures with more pixels, before they are decoded.
        batch_axis: Axis of a tensor file that counts inputs: an index, "auto" or "none".
        input: Inputs by name: tensors, lists and dicts of tensors, numbers, text, and a `Path` for a file; or texts
            "NAME=VALUE".
        output_key: Which of several outputs holds the class scores.
        classes: Class names: a file, a list, or names by index; default: the weights' own.
        multi_label: Classes are independent labels, trained with `BCEWithLogitsLoss`: scores are read as sigmoids, not
            as a softmax.
        edit: Changes to inputs, outputs or parameters, "layer3:output:zero(channels=3)"; `comparison` of the result has
            their effect.
        batch_size: Inputs per forward pass.
        grids_for: Keep feature maps for drawing, for the first `grids_for` inputs.
        max_channels: Keep at most the first `max_channels` channels of each feature map.
        device: For MODEL: "auto", "cpu", "cuda", "cuda:1", "mps".
        dtype: For MODEL: run in this dtype.
        seed: Seed of random weights and random numbers.
        cost: Also measure the cost of every module for the first input, in `cost` of the result: see `NetworkCost`.
        verify: Run the first batch again without hooks, and compare the outputs.
        save_tensors: Keep the activations in `tensors` of the result; `save` then writes them too.
        on_progress: Called after each batch with the number of inputs finished and their total.
        on_error: Called with the error of an input that cannot be used, which is then skipped; without it the error is
            raised.

    Returns:
        The run, with its verdicts. Printing it shows the command's table, `run["layer1.0.conv1"]` is a row, and
        `run.save("runs/a")` writes the command's run directory.

    Raises:
        HookscopeError: One of its subclasses: `ModelNotFoundError`, `CheckpointError`, `UntrustedFileError`,
            `ImageError`, `LayerNotFoundError`, `UsageError`, and `ForwardError` if the model raised; it carries the
            rows measured before that.
    """
    from hookscope.checks.judging import judge_activations
    from hookscope.inspection.session import open_session, run_forward
    from hookscope.models import with_classes

    began = time.perf_counter()
    reading = _file_options(trust, key, allow_missing, allow_unexpected)
    loaded = with_classes(
        _load(model, weights, arch, model_arg, reading, device, dtype, seed), classes, multi_label=multi_label
    )
    session = open_session(
        loaded,
        images,
        _texts(input),
        began=began,
        seed=seed,
        input_shape=input_shape,
        **_preprocessing(resize, crop, mean, std, max_pixels, batch_axis),
    )
    return run_forward(
        session,
        layers=_texts(layer),
        ops=ops,
        repeats=repeats,
        edits=_texts(edit),
        batch_size=batch_size,
        cost=cost,
        verify=verify,
        save_tensors=save_tensors,
        on_progress=on_progress,
        on_error=on_error,
        judge=judge_activations,
        grids_for=grids_for,
        max_channels=max_channels,
        output_key=output_key,
    )


@interrupts_between_blocks()
def grads(  # noqa: D417 - those of `activations` are described there
    model: Model,
    images: Images = (),
    *,
    loss: str | Callable[..., object] = "projection",
    target: str | int | Sequence[int | str] | Path | Tensor | None = None,
    output_key: str | None = None,
    classes: Classes | None = None,
    multi_label: bool = False,
    layer: Texts = (),
    ops: bool = False,
    repeats: bool = False,
    inputs: bool = False,
    mode: Literal["eval", "train"] = "eval",
    weights: str = "auto",
    arch: str | None = None,
    model_arg: Texts | Mapping[str, Any] = (),
    trust: bool = False,
    key: str | None = None,
    allow_missing: Texts = (),
    allow_unexpected: Texts = (),
    input_shape: NoiseShapes | None = None,
    resize: Sizes | None = None,
    crop: Sizes | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    max_pixels: int | None = None,
    batch_axis: str | int | None = None,
    input: Texts | Mapping[str, Any] = (),  # noqa: A002 - the name of the option
    batch_size: int = 8,
    per_image: bool = False,
    edit: Texts | Sequence[Edit] = (),
    limit: Texts | Mapping[str, float] = (),
    grids_for: int = 0,
    max_channels: int | None = None,
    device: str = "auto",
    dtype: Dtype | None = None,
    autocast: Literal["bfloat16", "float16"] | None = None,
    seed: int = 0,
    verify: bool = True,
    save_tensors: bool = False,
    on_progress: OnProgress | None = None,
    on_error: OnError | None = None,
) -> Gradients:
    """Run a model forward and backward over inputs, measure gradients, and judge them.

        >>> import hookscope
        >>> result = hookscope.grads("demo", "sample_images/cat.jpg", loss="ce", target="tabby", layer="_fc")
        >>> result.verdicts
        ()

    Arguments that are not described here are those of `activations`.

    Args:
        model: As for `activations`.
        images: As for `activations`; default: seeded noise.
        loss: "ce", "bce", "mse", "l1", "huber", "nll", "sum", "logit", "projection", "file.py:function", or a function
            of the output, and of the target if there is one, that returns a 0-d tensor.
        target: Target of the loss: a class index or name, or one per input, "zeros", "noise", "self", a tensor or its
            file.
        output_key: Which of several outputs the loss is computed from.
        inputs: Also measure grad_input: the gradient of every layer's input along the path through the layer alone.
        mode: "train" for batch statistics and dropout as in training.
        input_shape: As for `activations`; None to infer it from the model.
        per_image: Also differentiate the loss of every single input; the norms are in `inputs_alone` of the result.
        edit: Changes to inputs, outputs, gradients, parameters or their gradients; `comparison` of the result has their
            effect.
        limit: Limits of rules: a mapping, `{"vanishing": 1e-5}`, or texts "NAME=VALUE".
        grids_for: Keep gradients of outputs for drawing, for the first `grids_for` inputs.
        autocast: Run forward pass and loss under autocast to this dtype.
        save_tensors: Keep the gradients in `tensors` of the result; `save` then writes them too.

    Returns:
        The gradients, with their verdicts. Printing them shows the command's tables; `result["layer1.0.conv1"]` is the
        gradient of an output and `result["layer1.0.conv1.weight"]` that of a parameter.

    Raises:
        HookscopeError: As for `activations`; `PassError` if the model raised.
    """
    from hookscope.checks.judging import judge_gradients
    from hookscope.checks.rules import limits_from_text
    from hookscope.inspection.session import choose_session_loss, open_session, run_backward
    from hookscope.models import with_classes

    began = time.perf_counter()
    limits = limits_from_text(_arguments(limit))
    if per_image and not _are_given(images):
        raise UsageError("--per-image needs pictures: give IMAGE.")
    reading = _file_options(trust, key, allow_missing, allow_unexpected)
    loaded = with_classes(
        _load(model, weights, arch, model_arg, reading, device, dtype, seed), classes, multi_label=multi_label
    )
    session = open_session(
        loaded,
        images,
        _texts(input),
        began=began,
        seed=seed,
        mode=mode,
        noise=1,
        input_shape=input_shape,
        **_preprocessing(resize, crop, mean, std, max_pixels, batch_axis),
    )
    return run_backward(
        session,
        choose_session_loss(session, loss, target, output_key),
        layers=_texts(layer),
        ops=ops,
        repeats=repeats,
        edits=_texts(edit),
        mode=mode,
        autocast=autocast,
        batch_size=batch_size,
        per_image=per_image,
        include_inputs=inputs,
        verify=verify,
        save_tensors=save_tensors,
        on_progress=on_progress,
        on_error=on_error,
        judge=partial(judge_gradients, limits=limits),
        settings={"limits": limits},
        grids_for=grids_for,
        max_channels=max_channels,
        output_key=output_key,
    )


@interrupts_between_blocks()
def attribute(  # noqa: D417 - those of `activations` are described there
    model: Model,
    images: Images = (),
    *,
    method: Method = "grad-cam",
    target: str | int | Sequence[str | int] = (),
    top: int | None = None,
    layer: Texts = (),
    tokens: str | None = None,
    sanity: Literal["none", "quick", "full"] = "quick",
    output_key: str | None = None,
    classes: Classes | None = None,
    multi_label: bool = False,
    weights: str = "auto",
    arch: str | None = None,
    model_arg: Texts | Mapping[str, Any] = (),
    trust: bool = False,
    key: str | None = None,
    allow_missing: Texts = (),
    allow_unexpected: Texts = (),
    input_shape: NoiseShapes | None = None,
    resize: Sizes | None = None,
    crop: Sizes | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    max_pixels: int | None = None,
    batch_axis: str | int | None = None,
    input: Texts | Mapping[str, Any] = (),  # noqa: A002 - the name of the option
    batch_size: int = 8,
    device: str = "auto",
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

    A module keeps its state and its device. Arguments that are not described here are those of `activations`.

    Args:
        method: "grad-cam", "grad-cam++", "layer-cam" and "hires-cam" map a layer; "gradient", "input-x-gradient",
            "guided-backprop", "integrated-gradients", "smoothgrad" and "occlusion" map the pixels. Sources of the
            formulas are in `hookscope.attribution`.
        target: What to explain: classes by index or name, one against another ("tabby-tiger cat"), a detector's boxes
            ("box:0", or the best of a class), a class's pixels where each pixel has scores, or the number per input
            that a function of the network's output returns ("file.py:function"). Every target in a list, or
            separated by commas, gets a map.
        top: Explain this many best classes or boxes of each input instead; without `target` and `top`, the best one.
        layer: Names of layers, or patterns; none means the last layer whose output is a map of the picture.
        tokens: How tokens are placed on the picture if it cannot be inferred: "prefix=1,grid=14x14", height first.
            With words behind the patches "grid=8x8,suffix=12".
        sanity: Tests of the maps: "none", "quick" on the first batch, or "full" on all inputs.
        output_key: Which of several outputs holds the scores.

    Returns:
        The maps: `looks["Egyptian cat"]` is the map of a target, and `looks.save("runs/a")` writes the command's run
        directory.

    Raises:
        HookscopeError: As for `activations`; `UsageError` also if the method cannot explain the layer or the network.
    """
    from hookscope.attribution.run_attribution import run_attribution
    from hookscope.inspection.session import open_session
    from hookscope.models import with_classes

    began = time.perf_counter()
    reading = _file_options(trust, key, allow_missing, allow_unexpected)
    loaded = with_classes(
        _load(model, weights, arch, model_arg, reading, device, dtype, seed), classes, multi_label=multi_label
    )
    session = open_session(
        loaded,
        images,
        _texts(input),
        began=began,
        seed=seed,
        input_shape=input_shape,
        **_preprocessing(resize, crop, mean, std, max_pixels, batch_axis),
    )
    return run_attribution(
        session,
        method=method,
        targets=[str(each) for each in _texts(target)],
        top=top,
        layers=_texts(layer),
        tokens=tokens,
        sanity=sanity,
        batch_size=batch_size,
        output_key=output_key,
        on_progress=on_progress,
        on_error=on_error,
    )


@interrupts_between_blocks()
def attention(  # noqa: D417 - those of `activations` are described there
    model: Model,
    images: Images = (),
    *,
    block: str | int | Sequence[str | int] = (),
    head: int | Sequence[int] = (),
    query: Texts = (),
    rollout: bool = False,
    numbers: bool = True,
    tokens: str | None = None,
    weights: str = "auto",
    arch: str | None = None,
    model_arg: Texts | Mapping[str, Any] = (),
    trust: bool = False,
    key: str | None = None,
    allow_missing: Texts = (),
    allow_unexpected: Texts = (),
    input_shape: NoiseShapes | None = None,
    resize: Sizes | None = None,
    crop: Sizes | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    max_pixels: int | None = None,
    batch_axis: str | int | None = None,
    input: Texts | Mapping[str, Any] = (),  # noqa: A002 - the name of the option
    batch_size: int = 8,
    device: str = "auto",
    dtype: Dtype | None = None,
    seed: int = 0,
    verify: bool = True,
    save_tensors: bool = False,
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

    A module keeps its state and its device. Arguments that are not described here are those of `activations`.

    Args:
        block: Which blocks to draw, of those seen: positions from 0, or -1 for the last, or names.
        head: Which heads to draw, from 0; none means the mean over heads.
        query: Whose attention to draw: "cls", "register:1", "mean", or "x,y", a pixel of the photograph; or a list of
            these. None means the class token, or the mean over queries if there is no class token.
        rollout: Also follow attention through all blocks.
        numbers: Measure every head. If False, only the rows of `query` are computed: maps of large pictures then cost
            little more than the forward pass.
        tokens: How tokens are placed on the picture if it cannot be inferred: "prefix=1,grid=14x14", height first.
            With words behind the patches "grid=8x8,suffix=12".
        verify: Run the first batch again without hooks, and compare the outputs.
        save_tensors: Keep the attention weights in `tensors` of the result; `save` then writes them too.

    Returns:
        The attention: `looks.census` counts the blocks that were seen, `looks["blocks.11.attn"]` is a map, `looks.rows`
        are the numbers by head, and `looks.save("runs/a")` writes the command's run directory.

    Raises:
        HookscopeError: As for `activations`; `NothingMatchedError` if no attention was seen, `UsageError` if rollout
            is undefined for the network, or no block has the query.
    """
    from hookscope.attention_maps.run_attention import run_attention
    from hookscope.inspection.session import open_session

    began = time.perf_counter()
    reading = _file_options(trust, key, allow_missing, allow_unexpected)
    session = open_session(
        _load(model, weights, arch, model_arg, reading, device, dtype, seed),
        images,
        _texts(input),
        began=began,
        seed=seed,
        input_shape=input_shape,
        **_preprocessing(resize, crop, mean, std, max_pixels, batch_axis),
    )
    return run_attention(
        session,
        blocks=[str(each) for each in _texts(block)],
        heads=[int(each) for each in _texts(head)],
        queries=_texts(query),
        rollout=rollout,
        numbers=numbers,
        tokens=tokens,
        batch_size=batch_size,
        verify=verify,
        save_tensors=save_tensors,
        on_progress=on_progress,
        on_error=on_error,
    )


@interrupts_between_blocks()
def diff(  # noqa: D417 - those of `activations` are described there
    a: Model,
    b: Model,
    images: Images = (),
    *,
    layer: Texts = (),
    ops: bool = False,
    map: Texts = (),  # noqa: A002 - the name of the option
    reference: Literal["float64"] | None = None,
    shadow: bool = False,
    grads: bool = False,
    loss: str | Callable[..., object] | None = None,
    target: str | int | Sequence[int | str] | Path | Tensor | None = None,
    fail_over: Texts = (),
    weights: str = "auto",
    weights_b: str | None = None,
    arch: str | None = None,
    model_arg: Texts | Mapping[str, Any] = (),
    trust: bool = False,
    key: str | None = None,
    allow_missing: Texts = (),
    allow_unexpected: Texts = (),
    input_shape: NoiseShapes | None = None,
    resize: Sizes | None = None,
    crop: Sizes | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    max_pixels: int | None = None,
    batch_axis: str | int | None = None,
    input: Texts | Mapping[str, Any] = (),  # noqa: A002 - the name of the option
    input_b: Images = (),
    output_key: str | None = None,
    classes: Classes | None = None,
    multi_label: bool = False,
    batch_size: int = 8,
    device: str = "auto",
    device_b: str | None = None,
    dtype: Dtype | None = None,
    dtype_b: Dtype | None = None,
    autocast_b: Literal["bfloat16", "float16"] | None = None,
    mode_b: Literal["eval", "train"] = "eval",
    threads_b: int | None = None,
    compile_b: bool = False,
    edit_b: Texts | Sequence[Edit] = (),
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
    their state and their device. Arguments that are not described here are those of `activations`.

    Args:
        a: As `model` for `activations`, or a run directory.
        b: As `a`, or "same": A again, run in a different way. If A is a module, B is a copy of it.
        images: Without these, `input` and `input_shape`, only weights are compared; a weights file then needs no
            network.
        layer: Layers of A whose rows are shown.
        map: Pairs of layers with different names, "encoder.*=backbone.*".
        reference: "float64": also run A's weights in float64, and measure the error of A and of B against them.
        shadow: Also run every layer of B on A's input, which shows how much the layer itself adds to the difference.
        grads: Also run both backward, batch by batch, and compare gradients of outputs, and gradients of parameters
            summed over batches. `first_gradient_difference` of the result is the first gradient to differ in the
            backward pass. The gradients of all layers' inputs and outputs over a batch, of both models, wait as A's
            outputs do.
        loss: As for `grads`; default: "projection".
        target: As for `grads`; without a target, A and B compute one each.
        output_key: Which of several outputs is compared and differentiated; None for all.
        fail_over: Conditions for `exceeded`: "rel>1e-3", "layer4*:cosine<0.99", "output:kl>0.01", "top1<1".
        input_b: Inputs of B instead of `images`, one per image in the same order, such as padded or cropped pictures.
            Inputs then run one by one; rows with different shapes are not compared.
        weights_b: As `weights`, for B; default: A's.
        device_b: As `device`, for B; default: A's.
        dtype_b: As `dtype`, for B; default: A's.
        autocast_b: Run B under autocast to this dtype.
        mode_b: "train" runs B with batch statistics and dropout as in training.
        threads_b: Threads that B computes with on the CPU.
        compile_b: Run B through torch.compile. The output comes from the whole network, compiled in one piece; the rows
            come from blocks that are compiled one by one, and `layer` can make these blocks smaller.
        edit_b: Changes to B's parameters, or to inputs or outputs of its layers: "layer3:output:zero(channels=3)".

    Returns:
        The differences: `result["layer3.0.conv1"]` is a row, and `result.first_differences` is where they begin.

    Raises:
        HookscopeError: As for `activations`; `NothingMatchedError` if no layer of A has a partner in B.
    """
    from hookscope.differences.compare_networks import compare_networks
    from hookscope.differences.compared_networks import weight_options
    from hookscope.inspection.session import choose_session_loss, open_session
    from hookscope.models import with_classes
    from hookscope.results.runs.reading import is_run

    began = time.perf_counter()
    has_images, given_b = _are_given(images), _are_given(input_b)
    options_b = _run_options(mode_b, autocast_b, threads_b, _texts(edit_b), compiles=compile_b, other_inputs=given_b)
    if (loss is not None or target is not None) and not grads:
        raise UsageError("--loss and --target need --grads.")
    of_passes = {
        "--layer": _texts(layer),
        "--ops": ops,
        "--reference": reference,
        "--shadow": shadow,
        "--grads": grads,
        "--device-b": device_b,
        "--dtype": dtype,
        "--dtype-b": dtype_b,
        "--autocast-b": autocast_b,
        "--mode-b train": mode_b == "train",
        "--threads-b": threads_b,
        "--edit-b": _texts(edit_b),
        "--compile-b": compile_b,
        "--output-key": output_key,
        "--input-b": given_b,
    }
    conditions = {"maps": _texts(map), "fail_over": _texts(fail_over)}
    if any(isinstance(each, str | Path) and is_run(Path(each)) for each in (a, b)):
        of_inputs = {"IMAGE": has_images, "--input": input, "--input-shape": input_shape}
        _refuse(of_inputs | of_passes, "two run directories are compared as they are")
        return _compared_runs(a, b, **conditions)
    reading = _file_options(trust, key, allow_missing, allow_unexpected)
    names = [str(each) if isinstance(each, str | Path) else None for each in (a, b)]
    of_a, of_b = weight_options(names[0], names[1], weights, weights_b, arch, reading)
    if not has_images and not input and input_shape is None:
        _refuse(of_passes, "without IMAGE, only weights are compared")
        return _compared_weights((a, of_a), (a if _is_same(b) else b, of_b), model_arg, seed, **conditions)
    _refuse({"--input-b": given_b and not has_images}, "without IMAGE both sides get the same noise, or inputs by name")
    models = _two_models(_Side(a, of_a, device, dtype), _Side(b, of_b, device_b, dtype_b), weights_b, model_arg, seed)
    own, other = (with_classes(each, classes, multi_label=multi_label) for each in models)
    options = _preprocessing(resize, crop, mean, std, max_pixels, batch_axis)
    opened = partial(open_session, own, named=_texts(input), began=began, seed=seed, input_shape=input_shape, **options)
    session = opened(images=images)
    return compare_networks(
        session,
        other,
        options_b=options_b,
        inputs_b=opened(images=input_b).inputs if given_b else None,
        layers=_texts(layer),
        ops=ops,
        reference=reference is not None,
        shadow=shadow,
        batch_size=batch_size,
        on_progress=on_progress,
        on_error=on_error,
        loss=choose_session_loss(session, loss or "projection", target, output_key) if grads else None,
        output_key=output_key,
        **conditions,
    )


@interrupts_between_blocks()
def layers(
    model: Model,
    *,
    layer: Texts = (),
    ops: bool = False,
    weights: str = "auto",
    arch: str | None = None,
    model_arg: Texts | Mapping[str, Any] = (),
    trust: bool = False,
    key: str | None = None,
    allow_missing: Texts = (),
    allow_unexpected: Texts = (),
    input_shape: NoiseShapes | None = None,
    input: Texts | Mapping[str, Any] = (),  # noqa: A002 - the name of the option
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
        ops: Also list the operations that the network's own code calls.
        weights: A file or a name of weights, which must load; "auto" and "none" load none: no values are needed.
        arch: The network that a weights file belongs to; None to recognise it.
        model_arg: Keyword arguments for the network's factory.
        trust: Let a weights file run code while it is read.
        key: Path of the weights inside the file.
        allow_missing: Globs over names that the file may lack.
        allow_unexpected: Globs over names in the file that the network may lack.
        input_shape: Noise, as for `activations`; None to infer its shape from the model.
        input: Inputs by name, as for `activations`; tensors replace the noise.
        cost: Also measure the cost of every module, in `cost` of the result: see `NetworkCost`. MODEL then also runs on
            the CPU; if it takes more than half of this machine's memory, there are no times.
        depth: Leave out modules below this depth; 0 lists only the whole model.

    Returns:
        The modules: `table["layer1.0.conv1"]` is a row.

    Raises:
        HookscopeError: As for `activations`. If the forward pass raises, `failure` of the result has the error instead.
    """
    from hookscope.models import build_on_meta, load_model, parse_model
    from hookscope.results.noise_shapes import parse_noise_shapes

    shapes = () if input_shape is None else parse_noise_shapes(input_shape)
    table_of = partial(_module_table, shapes=shapes, named=_texts(input), ops=ops)
    patterns = _texts(layer)
    if not isinstance(model, str | Path):
        loaded = _given(model)
        table = table_of(loaded, patterns)
        real: LoadedModel | None = loaded
    else:
        options = _file_options(trust, key, allow_missing, allow_unexpected)
        given: dict[str, Any] = {"arch": arch, "model_arguments": _arguments(model_arg), "options": options}
        is_named = weights not in ("auto", "none")
        loaded = real = (
            load_model(str(model), weights=weights, **given) if is_named else build_on_meta(str(model), **given)
        )
        weights = "auto" if parse_model(str(model)).form == "weights" else "none"
        warnings, notes = loaded.warnings, loaded.notes
        first = table_of(loaded, ()) if _device(loaded) == "meta" else None
        if first is not None and first.failure is not None:
            # Data-dependent code (non-maximum suppression, say) needs values.
            loaded = real = load_model(str(model), weights=weights, **given)
        elif first is not None:
            real = _with_any_values(loaded, partial(load_model, str(model), weights=weights, **given)) if cost else None
        table = table_of(loaded, patterns) if first is None or first.failure is not None or patterns else first
        remarks = table.warnings[len(loaded.warnings) :]
        table = replace(table, warnings=(*warnings, *remarks), notes=notes)
    if cost and table.failure is None:
        table = _with_cost(table, loaded, real, shapes, _texts(input))
    return table if depth is None else table.down_to(depth)


@interrupts_between_blocks()
def check(  # noqa: D417 - those of `activations` are described there
    checkpoint: Model | Mapping[str, Any],
    *,
    config: str | Path | None = None,
    arch: str | None = None,
    model_arg: Texts | Mapping[str, Any] = (),
    key: str | None = None,
    allow_missing: Texts = (),
    allow_unexpected: Texts = (),
    allow_global: Texts = (),
    output_key: str | None = None,
    classes: Classes | None = None,
    multi_label: bool = False,
    images: Images = (),
    data: str | Path | None = None,
    survey: str | Path | None = None,
    input_shape: NoiseShapes | None = None,
    resize: Sizes | None = None,
    crop: Sizes | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    max_pixels: int | None = None,
    batch_axis: str | int | None = None,
    input: Texts | Mapping[str, Any] = (),  # noqa: A002 - the name of the option
    baseline: str | Path | None = None,
    select: Texts = (),
    ignore: Texts = (),
    limit: Texts | Mapping[str, float] = (),
    evidence: str | Path | None = None,
    trust: bool = False,
    device: str = "cpu",
) -> CheckReport:
    """Check one checkpoint by the rules of `hookscope check`; the network runs in this process.

        >>> import hookscope
        >>> def test_the_checkpoint_is_sound():
        ...     hookscope.check("model.pt").raise_for_failure()

    Arguments override the configuration. Arguments that are not described here are those of `activations`.

    Args:
        checkpoint: A weights file or any other form of MODEL; a module, which stays on its device; or a state dict,
            also inside the dict that a training script saves. A state dict is judged by its values alone, without a
            network.
        config: The configuration file; default: the one in the working directory, else the built-in defaults.
        arch: The network that a weights file belongs to; "none" to judge the stored values without a network; None for
            the network of the configuration, or to recognise it.
        allow_global: Globs over classes and functions that the file's pickle may name in addition to plain data. They
            are skipped, never imported.
        images: As for `activations`, instead of the configuration's or of noise.
        data: Labelled pictures to measure the accuracy on: a folder of class folders, a CSV file with a path and a
            label on each line, or a JSON file of labels by path; with `multi_label`, a picture may have several labels.
        survey: Run directory of a survey of this network: rules about activations then judge all of its inputs.
        input_shape: Noise, as for `activations`, instead of the configuration's.
        baseline: File written by `--update-baseline`; default: the configuration's, if any.
        select: Rules or globs to judge by; default: all rules that are on.
        ignore: Rules or globs to leave out.
        limit: Limits of rules: a mapping, `{"dead-channels.max-fraction": 0.5}`, or texts "RULE.LIMIT=VALUE"; they
            override the configuration and the defaults.
        evidence: Folder for an overview, and for grids and rows of the layers that failed; None writes nothing.
        trust: Let a weights file run code while it is read.
        device: For MODEL: where it runs.

    Returns:
        The report. If the checkpoint cannot be read or run, its `error` has the reason.

    Raises:
        UsageError: If the configuration, the baseline, the device or the name of a rule is wrong.
        OutputError: If the evidence cannot be written to its folder.
    """
    from hookscope.checks.baseline import read_baseline
    from hookscope.checks.checkpoint import check_checkpoint
    from hookscope.checks.configuration import read_settings
    from hookscope.checks.judging import refuse_unused_limits, wanted_rules
    from hookscope.checks.rules import check_limits, with_limits
    from hookscope.checks.settings import NO_NETWORK, loads_as_told, runs_as_told, with_options
    from hookscope.inspection.device import choose_device
    from hookscope.inspection.given_inputs import as_sources, by_position_and_name

    images, named = by_position_and_name(images, _texts(input))
    given: dict[str, Any] = {"arch": arch, "model_arg": _arguments(model_arg), "key": key, "output_key": output_key}
    given |= {"allow_missing": _texts(allow_missing), "allow_unexpected": _texts(allow_unexpected)}
    given["allow_global"] = _texts(allow_global)
    inputs = as_sources(images)
    given |= {"images": inputs, "data": data, "survey": survey, "input": named or (), "classes": classes}
    given["multi_label"] = multi_label or None
    given |= {
        "baseline": baseline,
        "input_shape": input_shape,
        **_preprocessing(resize, crop, mean, std, max_pixels, batch_axis),
    }
    if isinstance(checkpoint, Mapping):
        loading = {**given, "key": None, "arch": None if arch == NO_NETWORK else arch}
        if loads_as_told(loading) or runs_as_told(given):
            raise UsageError(_JUDGED_ALONE)
        given["arch"] = NO_NETWORK
    elif not isinstance(checkpoint, str | Path):
        loaded = _given(checkpoint)  # which refuses what is no network
        if loads_as_told(given):
            raise UsageError(_RUNS_WHERE_IT_IS)
        if loaded.module is not checkpoint:  # TorchScript and exported programs, as modules
            checkpoint = loaded
    settings = with_options(read_settings(None if config is None else Path(config), Path()), given)
    settings = with_limits(settings, _arguments(limit))
    path = settings.baseline if baseline is None else Path(baseline)
    known = None if path is None else read_baseline(path)
    wanted = wanted_rules(settings, _texts(select), _texts(ignore))
    refuse_unused_limits(check_limits(_arguments(limit)), wanted, settings, known)
    return check_checkpoint(
        str(checkpoint) if isinstance(checkpoint, Path) else checkpoint,
        settings,
        wanted,
        trust=trust,
        device=choose_device(device) if isinstance(checkpoint, str | Path) and device != "cpu" else None,
        given=None if isinstance(inputs, list) else inputs,
        baseline=known,
        evidence=None if evidence is None else Path(evidence),
    )


@interrupts_between_blocks()
def history(  # noqa: D417 - those of `activations` are described there
    files: Texts | Sequence[Path] | Path,
    images: Images = (),
    *,
    config: str | Path | None = None,
    arch: str | None = None,
    model_arg: Texts | Mapping[str, Any] = (),
    key: str | None = None,
    allow_missing: Texts = (),
    allow_unexpected: Texts = (),
    allow_global: Texts = (),
    output_key: str | None = None,
    classes: Classes | None = None,
    input_shape: NoiseShapes | None = None,
    resize: Sizes | None = None,
    crop: Sizes | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    max_pixels: int | None = None,
    batch_axis: str | int | None = None,
    input: Texts | Mapping[str, Any] = (),  # noqa: A002 - the name of the option
    select: Texts = (),
    ignore: Texts = (),
    limit: Texts | Mapping[str, float] = (),
    bisect: bool = False,
    device: str = "cpu",
    on_progress: OnProgress | None = None,
) -> History:
    """Follow a training by its checkpoints: how the weights moved, and which file is the first to break a rule.

        run = hookscope.history("ckpt/epoch_*.pt")
        print(run)
        [row.drift for row in run["layer3.1.conv2.weight"]]

    Files are read without running code from them. A file that cannot be read is reported, and the others are finished.
    Arguments that are not described here are those of `activations` and `check`.

    Args:
        files: Weights files, folders of them or globs; at least two files. They are taken in the order of the epochs or
            steps that they store, else in natural order of names: "epoch_2.pt" before "epoch_10.pt".
        images: Run the network over these with the weights of each file, and judge by all rules.
        config: The configuration of `check`; None for that of the working directory, else the defaults.
        arch: The network that the files belong to; "none" to judge the stored values without a network. None takes the
            network of the configuration; if it has none, the network is recognised with inputs, and "none" without.
        allow_global: As for `check`.
        input_shape: Noise to run the network over, as for `activations`.
        select: Rules of `check` or globs to judge by; default: all rules that are on.
        ignore: Rules or globs to leave out.
        limit: Limits of rules, as for `check`.
        device: Where the network runs.
        bisect: Read only as many files as it takes to find the first that breaks a rule, assuming that all later files
            break it too.

    Returns:
        The weights over the files, and the verdicts, each with the first file that breaks the rule.
        `run.save("runs/a")` writes the command's run directory.

    Raises:
        UsageError: If an option is wrong, or there are fewer than two files.
        NothingMatchedError: If a folder or a glob holds no weights file.
    """
    from hookscope.checkpoints.find_checkpoints import find_checkpoints
    from hookscope.checks.configuration import read_settings
    from hookscope.checks.judging import refuse_unused_limits, wanted_rules
    from hookscope.checks.rules import check_limits, with_limits
    from hookscope.checks.settings import NO_NETWORK, with_options
    from hookscope.inspection.device import choose_device
    from hookscope.inspection.given_inputs import as_sources, by_position_and_name
    from hookscope.series.follow import follow

    images, named = by_position_and_name(images, _texts(input))
    inputs = as_sources(images)
    given: dict[str, Any] = {"model_arg": _arguments(model_arg), "key": key, "output_key": output_key}
    given |= {"allow_missing": _texts(allow_missing), "allow_unexpected": _texts(allow_unexpected)}
    given |= {"allow_global": _texts(allow_global), "images": inputs, "input": named or (), "classes": classes}
    given |= {"input_shape": input_shape, **_preprocessing(resize, crop, mean, std, max_pixels, batch_axis)}
    known = read_settings(None if config is None else Path(config), Path())
    has_inputs = bool(named) or input_shape is not None or not isinstance(inputs, list) or bool(inputs)
    given["arch"] = arch or known.arch or (None if has_inputs else NO_NETWORK)
    settings = with_limits(replace(with_options(known, given), baseline=None, survey=None), _arguments(limit))
    wanted = wanted_rules(settings, _texts(select), _texts(ignore))
    refuse_unused_limits(check_limits(_arguments(limit)), wanted, settings, None)
    return follow(
        find_checkpoints([str(each) for each in _texts(files)]),
        settings,
        wanted,
        searches=bisect,
        device=choose_device(device) if device != "cpu" else None,
        given=None if isinstance(inputs, list) else inputs,
        on_progress=on_progress,
    )


@interrupts_between_blocks()
def survey(  # noqa: D417 - those of `activations` are described there
    model: Model,
    images: Images,
    *,
    layer: Texts = (),
    ops: bool = False,
    top: int = 9,
    by_class: bool = False,
    features: str | Path | None = None,
    pool: Literal["avg", "max", "cls", "none"] = "avg",
    features_dtype: Literal["float32", "float16"] = "float32",
    weights: str = "auto",
    arch: str | None = None,
    model_arg: Texts | Mapping[str, Any] = (),
    trust: bool = False,
    key: str | None = None,
    allow_missing: Texts = (),
    allow_unexpected: Texts = (),
    classes: Classes | None = None,
    resize: Sizes | None = None,
    crop: Sizes | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    max_pixels: int | None = None,
    batch_axis: str | int | None = None,
    batch_size: int = 32,
    chunk_size: int = 1024,
    chunks: str | Path | None = None,
    workers: int | None = None,
    resume: bool = False,
    shard: str | None = None,
    device: str = "auto",
    dtype: Dtype | None = None,
    seed: int = 0,
    verify: bool = True,
    on_progress: OnProgress | None = None,
) -> Survey | None:
    """Measure what layers and their channels do over a data set, in one process or several.

        >>> import hookscope
        >>> survey = hookscope.survey("demo", "sample_images", layer="conv_head")
        >>> survey.input_count, len(survey["_conv_head"].channels)
        (4, 1280)

    Inputs are taken in natural order of their paths and measured in chunks. With the same batch size, threads, torch
    and processor, the result is the same bit for bit for any number of processes. A module is left as it was. Arguments
    that are not described here are those of `activations`.

    Args:
        images: Files, folders and globs, PIL pictures, or one tensor with the inputs on axis 0.
        top: For every channel, list this many of the inputs that excite it most.
        by_class: Inputs are one folder with a folder for each class in it, or a CSV file of paths and labels: also
            measure how selective channels are for classes.
        features: Also write the outputs of the layers of `layer`: to a .safetensors or .parquet file, or to a folder
            with one file per chunk; a JSON file next to it lists the inputs.
        pool: Reduce features (N, C, ...) over positions: "avg" to their mean and "max" to their maximum, "cls" to the
            first token; "none" keeps them.
        features_dtype: Store features in this dtype.
        batch_size: Inputs per forward pass; a different batch size may change the last bits of the results.
        chunk_size: Files per chunk, or inputs if they are in memory. A file of several inputs is in one chunk.
        workers: Threads that read pictures ahead, 0 for none; None for one per processor, at most 4. The number does
            not change results.
        chunks: Folder for finished chunks, which stay there; None for a temporary folder.
        resume: Use the finished chunks in `chunks` if they have the same model, inputs and settings.
        shard: "3/8" measures only the third of eight parts, into `chunks`. The same call without `shard`, with
            `resume`, measures the missing chunks and merges all.

    Returns:
        The survey: printing it shows the command's table, and `survey["layer1.0.conv1"]` is a row with its channels.
        None for a shard, and in all processes of torchrun except the first.

    Raises:
        HookscopeError: As for `activations`; `OutputError` if a chunk cannot be written.
    """
    from hookscope.inspection.session import open_session
    from hookscope.models import with_classes
    from hookscope.surveys.feature_files import FeatureTarget
    from hookscope.surveys.plan import ChunkFolder, parse_share
    from hookscope.surveys.run_survey import SurveyOptions, labelled_inputs, place_on_own_device, run_survey

    began = time.perf_counter()
    if features is not None and not _texts(layer):
        raise UsageError("--features needs --layer: name the layers whose outputs are wanted.")
    if top < 1 or chunk_size < 1:
        raise UsageError(f"{'--top' if top < 1 else '--chunk-size'} must be 1 or more.")
    if workers is not None and workers < 0:
        raise UsageError("--workers must be 0 or more.")
    target = None if features is None else FeatureTarget(Path(features), pool, features_dtype)
    if target is not None:
        target.check()
    labelled = labelled_inputs(images) if by_class else None
    reading = _file_options(trust, key, allow_missing, allow_unexpected)
    loaded = _load(model, weights, arch, model_arg, reading, place_on_own_device(device), dtype, seed)
    loaded = with_classes(loaded, classes, multi_label=loaded.multi_label)
    session = open_session(
        loaded,
        [*labelled.labels] if labelled else images,
        (),
        began=began,
        seed=seed,
        **_preprocessing(resize, crop, mean, std, max_pixels, batch_axis),
    )
    session = replace(session, inputs=replace(session.inputs, readers=workers))
    with TemporaryDirectory() if chunks is None else nullcontext(chunks) as folder:
        options = SurveyOptions(
            folder=ChunkFolder(Path(folder)),
            layers=_texts(layer),
            ops=ops,
            top=top,
            labelled=labelled,
            features=target,
            batch_size=batch_size,
            chunk_size=chunk_size,
            resume=resume,
            share=None if shard is None else parse_share(shard),
            verify=verify,
        )
        return run_survey(session, options, on_progress)


@interrupts_between_blocks()
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
        batches: Tensors (N, ...) with the inputs on axis 0, or tuples with such a tensor first and labels second.
        out: The .safetensors file to write: a tensor per output, by its label, with the inputs on axis 0. A JSON file
            next to it lists the inputs and their labels, and is written last.
        layer: Patterns of the layers, as for `activations`.
        pool: As for `survey`.
        features_dtype: Store features in this dtype.
        seed: Seed of random weights and random numbers.

    Returns:
        The files, and the shape of each tensor.

    Raises:
        HookscopeError: As for `activations`; `OutputError` if a file cannot be written.
    """
    from hookscope.models import FileOptions
    from hookscope.surveys.batch_features import batch_features
    from hookscope.surveys.feature_files import FeatureTarget

    loaded = _load(model, "auto", None, (), FileOptions(), "auto", None, seed)
    return batch_features(loaded, batches, FeatureTarget(Path(out), pool, features_dtype), _texts(layer), seed)


def checkpoint(file: str | Path, *, key: str | None = None) -> CheckpointContents:
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
    from hookscope.models.contents import list_contents

    return list_contents(Path(file), key)


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
    from hookscope.render.html import report_html
    from hookscope.render.html.attention import attention_html
    from hookscope.render.html.attributions import attributions_html
    from hookscope.render.html.differences import differences_html
    from hookscope.render.html.history import history_html
    from hookscope.render.html.survey import survey_html
    from hookscope.render.html.training import training_html
    from hookscope.render.training_files import save_training_overview
    from hookscope.results.attention import Attention
    from hookscope.results.attributions import Attributions
    from hookscope.results.differences import Differences
    from hookscope.results.history import History
    from hookscope.results.runs.reading import read_run
    from hookscope.results.runs.reports import check_report_target, default_report_path, write_report
    from hookscope.results.runs.training_log import is_training, read_training
    from hookscope.results.survey import Survey
    from hookscope.results.training import TrainingLog

    if not isinstance(run, str | Path):
        if out is None:
            raise UsageError("The page of a result needs a file name: give out.")
        if isinstance(run, TrainingLog):
            check_report_target(Path(out))
            write_report(Path(out), training_html(run))
            return Path(out)
        with TemporaryDirectory() as folder:
            return report(run.save(Path(folder) / "run"), out)
    target = default_report_path(Path(run)) if out is None else Path(out)
    check_report_target(target)
    if is_training(Path(run)):
        log = read_training(Path(run))
        with suppress(OutputError):  # of a folder on a disk that is only read
            save_training_overview(log, Path(run))
        return report(log, target)
    pages: Mapping[type, Callable[[Any], str]] = {
        Attributions: attributions_html,
        Attention: attention_html,
        Differences: differences_html,
        Survey: survey_html,
        History: history_html,
    }
    stored = read_run(Path(run))
    write_report(target, pages.get(type(stored.result), report_html)(stored))
    return target


def watch(
    model: Networks,
    optimizer: Optimizers,
    *,
    every: int = 100,
    out: str | Path | None = None,
    layer: Texts = (),
    activations: bool = True,
    eager_forward: bool = False,
    resume: bool = False,
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
        every: Number of steps from one watched step to the next.
        out: Folder for `watch.jsonl`, which grows a line at a time; None writes nothing.
        layer: Patterns, as for `activations`: watched steps record only these layers and their parameters.
        activations: Measure activations at watched steps, except at the first step.
        eager_forward: Measure activations of compiled networks too: at watched steps the network runs once more,
            eagerly and without gradients, on the first batch. Everything that this changes is put back.
        resume: Append to the log of an earlier training in `out`.
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
    from hookscope.watching.watch import Watch

    return Watch(
        model,
        optimizer,
        every=every,
        out=None if out is None else Path(out),
        layer=[layer] if isinstance(layer, str) else [*layer],
        activations=activations,
        eager_forward=eager_forward,
        resume=resume,
        on_line=on_line,
        edits=_texts(edits),
    )


def _load(
    model: Model,
    weights: str,
    arch: str | None,
    model_arg: Texts | Mapping[str, Any],
    reading: FileOptions,
    device: str,
    dtype: str | None,
    seed: int,
) -> LoadedModel:
    """Load what MODEL names and move it to its device; take a module as it is."""
    from hookscope.inspection.device import choose_device, move_to
    from hookscope.models import FileOptions, load_model

    if not isinstance(model, str | Path):
        given = (weights, arch, _arguments(model_arg), reading, device, dtype)
        if given != ("auto", None, [], FileOptions(), "auto", None):
            raise UsageError(_RUNS_WHERE_IT_IS)
        return _given(model)
    where = choose_device(device)
    loaded = load_model(
        str(model), weights=weights, arch=arch, model_arguments=_arguments(model_arg), seed=seed, options=reading
    )
    move_to(loaded, where, dtype)
    return loaded


class _Side(NamedTuple):
    """A model of `diff`, how its weights are read, where it runs and in which dtype; None for B means as A."""

    model: Model
    options: WeightOptions
    device: str | None
    dtype: Dtype | None


def _two_models(
    a: _Side, b: _Side, weights_b: str | None, model_arg: Texts | Mapping[str, Any], seed: int
) -> tuple[LoadedModel, LoadedModel]:
    """Load A and B; "same" is A in another way, and modules are taken as they are."""
    from hookscope.inspection.device import choose_device

    if b.device is not None:
        choose_device(b.device, "--device-b")
    model_b = a.model if _is_same(b.model) else b.model
    if isinstance(a.model, str | Path) or _is_same(b.model) or not isinstance(b.model, str | Path):
        reading = a.options.file
        own = _load(a.model, a.options.weights, a.options.arch, model_arg, reading, a.device or "auto", a.dtype, seed)
    else:
        own = _given(a.model)  # the options about loading are for B
    if isinstance(model_b, str | Path):
        device, dtype = b.device or a.device or "auto", b.dtype or a.dtype
        return own, _load(model_b, b.options.weights, b.options.arch, model_arg, b.options.file, device, dtype, seed)
    if _is_same(b.model):
        return own, _another_way(own, weights_b, b.device, b.dtype)
    as_it_is = _file_options(trust=False, key=None, allow_missing=(), allow_unexpected=())
    return own, _load(model_b, weights_b or "auto", None, (), as_it_is, b.device or "auto", b.dtype, seed)


def _is_same(model: Model) -> bool:
    return isinstance(model, str) and model == "same"  # a module may have an `__eq__` of its own


def _compared_runs(a: Model, b: Model, **conditions: Any) -> Differences:
    from hookscope.differences.compare_runs import compare_runs

    for each in (a, b):
        if not isinstance(each, str | Path) or not Path(each).is_dir():
            shown = repr(printable(str(each), 80)) if isinstance(each, str | Path) else f"A {type(each).__name__}"
            raise UsageError(f"{shown} is not a run directory. Give two runs, or two models.")
    return compare_runs(Path(str(a)), Path(str(b)), **conditions)


def _compared_weights(
    a: tuple[Model, WeightOptions],
    b: tuple[Model, WeightOptions],
    model_arg: Texts | Mapping[str, Any],
    seed: int,
    **conditions: Any,
) -> Differences:
    from hookscope.differences.compare_weights import compare_weights

    weights_a, weights_b = (_weights(model, options, model_arg, seed) for model, options in (a, b))
    return compare_weights(weights_a, weights_b, **conditions)


def _run_options(
    mode: Literal["eval", "train"],
    autocast: Literal["bfloat16", "float16"] | None,
    threads: int | None,
    edits: Sequence[Any],
    *,
    compiles: bool,
    other_inputs: bool,
) -> RunOptions:
    """Return how B runs, with what differs from A in words.

    Raises:
        UsageError: If `threads` is 0 or less.
    """
    from hookscope.differences.compare_networks import RunOptions

    if threads is not None and threads < 1:
        raise UsageError(f"--threads-b {threads} is not possible: give 1 or more.")

    texts = [] if autocast is None else [f"autocast to {autocast}"]
    texts += ["train mode"] * (mode == "train") + ([] if threads is None else [f"threads: {threads}"])
    texts += [f"edit {each}" for each in edits] + ["compiled"] * compiles + ["other inputs"] * other_inputs
    return RunOptions(mode, autocast, threads, edits, compiles, tuple(texts))


def _refuse(given: Mapping[str, Any], reason: str) -> None:
    """Raise a UsageError for the first of the options that is given."""
    for option, value in given.items():
        if value:
            raise UsageError(f"{option} applies to models that run over pictures: {reason}.")


def _weights(model: Model, options: WeightOptions, model_arg: Texts | Mapping[str, Any], seed: int) -> Weights:
    """Return the weights of a model; of a weights file those in it, whatever network they are for."""
    from hookscope.differences.compare_weights import read_weights, weights_of
    from hookscope.models import parse_model

    if not isinstance(model, str | Path):
        return weights_of(_given(model))
    if options.arch is None and options.weights == "auto" and parse_model(str(model)).form == "weights":
        return read_weights(Path(model), options.file)
    return weights_of(_load(model, options.weights, options.arch, model_arg, options.file, "cpu", None, seed))


def _another_way(loaded: LoadedModel, weights: str | None, device: str | None, dtype: str | None) -> LoadedModel:
    from hookscope.inspection.device import choose_device, move_to
    from hookscope.models.construction import copied

    if weights is not None:
        raise UsageError(
            "--weights-b is for a model given by name: load them into a second module, and give that as B."
        )
    other = copied(loaded)
    if device is not None or dtype is not None:
        move_to(other, choose_device(device or _device(loaded)), dtype)
    return other


def _file_options(trust: bool, key: str | None, allow_missing: Texts, allow_unexpected: Texts) -> FileOptions:
    from hookscope.models import FileOptions

    return FileOptions(trust, key, tuple(_texts(allow_missing)), tuple(_texts(allow_unexpected)))


def _given(model: nn.Module | ExportedProgram | LoadedModel) -> LoadedModel:
    from torch.fx import GraphModule
    from torch.jit import ScriptModule

    from hookscope.models import LoadedModel
    from hookscope.models.construction import loaded_module

    if isinstance(model, ScriptModule):
        from hookscope.models.exported import copied_torchscript

        return copied_torchscript(model)
    exporting: Any = sys.modules.get("torch.export")
    if exporting is not None and isinstance(model, exporting.ExportedProgram | GraphModule):
        from hookscope.models.exported import given_program

        return given_program(model)
    return model if isinstance(model, LoadedModel) else loaded_module(cast("nn.Module", model))


def _module_table(
    loaded: LoadedModel,
    patterns: Sequence[str],
    *,
    shapes: tuple[NoiseShape, ...],
    named: Sequence[str] | Mapping[str, Any],
    ops: bool,
) -> ModuleTable:
    """List modules after a pass over noise or inputs by name; a warning has the reason if there was none."""
    from hookscope.inputs import to_device
    from hookscope.inspection.device import floating_dtype
    from hookscope.inspection.forward import list_modules
    from hookscope.inspection.run import unseen_in_scripts
    from hookscope.models.input_spec import shape_option
    from hookscope.results.network import ModuleTable

    warnings = loaded.warnings
    given = _shown_input(loaded, shapes, named)
    if given is None:
        option = shape_option(loaded.module)
        warnings += (f"No shapes: the input shape cannot be inferred from the first layer. Give {option}.",)
    else:
        given = to_device(given, _device(loaded), floating_dtype(loaded.module))
    args, kwargs = (None, None) if given is None else (given.args, given.kwargs)
    rows, failure = list_modules(loaded.module, args, patterns, kwargs=kwargs, ops=ops)
    if ops:
        warnings += unseen_in_scripts(dict(loaded.module.named_modules()))
    return ModuleTable(loaded.info, rows, failure, warnings, loaded.notes)


def _with_any_values(on_meta: LoadedModel, load: Callable[[], LoadedModel]) -> LoadedModel | None:
    """Return the network on the CPU, to be timed; None if it may not fit into memory.

    A pass on the meta device went well, so nothing depends on values.
    """
    from hookscope.inspection.device import fits_into_memory
    from hookscope.models.construction import built_of_zeros

    return built_of_zeros(load) if fits_into_memory(on_meta.module) else None


def _with_cost(
    table: ModuleTable,
    loaded: LoadedModel,
    real: LoadedModel | None,
    shapes: tuple[NoiseShape, ...],
    named: Sequence[str] | Mapping[str, Any],
) -> ModuleTable:
    """Return the table with costs, or with a warning that has the reason if there are none."""
    from hookscope.errors import ModelError
    from hookscope.inputs import to_device
    from hookscope.inspection.cost import Call, network_cost
    from hookscope.inspection.device import floating_dtype

    def call_of(each: LoadedModel) -> Call | None:
        given = _shown_input(each, shapes, named)
        if given is None:
            return None
        batch = to_device(given, _device(each), floating_dtype(each.module))
        return Call(each.module, batch.args, batch.kwargs)

    counted = call_of(loaded)
    if counted is None:
        return replace(table, warnings=(*table.warnings, "No cost: the network has not run."))
    call = counted if real is None or real is loaded else call_of(real)
    try:
        cost = network_cost(call or counted, None if call is counted else counted)
    except ModelError as error:
        return replace(table, warnings=(*table.warnings, f"No cost: {error}"))
    missing = () if real is not None else (_TOO_LARGE_TO_TIME,)
    return replace(table, cost=cost, warnings=(*table.warnings, *missing))


def _shown_input(
    loaded: LoadedModel, shapes: tuple[NoiseShape, ...], named: Sequence[str] | Mapping[str, Any]
) -> Batch | None:
    """Return what shapes are shown for: inputs by name, or noise and what goes with it; None if that is not known."""
    from hookscope.inputs import (
        named_batch,
        named_inputs,
        noise_and_named,
        noise_batch,
        noise_count,
        with_named,
    )
    from hookscope.models import example_shape
    from hookscope.models.noise_arguments import noise_arguments
    from hookscope.results.noise_shapes import NoiseShape

    by_name = named_inputs(named, loaded.preprocessing)
    if not shapes and all(each.record is None for each in by_name):
        known = loaded.example_shape or example_shape(loaded.module, loaded.preprocessing)
        if known is None:
            return None
        shapes = (NoiseShape(known),)
    shapes = noise_arguments(shapes, loaded.module, given=[each.name for each in by_name])
    shapes, by_name = noise_and_named(shapes, by_name, 0, with_others=False)
    if not shapes:
        return named_batch(by_name)
    return with_named(noise_batch(shapes, 0, loaded.preprocessing.kind), by_name, noise_count(shapes))


def _are_given(images: Images) -> bool:
    return not isinstance(images, list | tuple) or bool(images)


def _device(loaded: LoadedModel) -> str:
    return next((str(parameter.device) for parameter in loaded.module.parameters()), "cpu")


def _texts(given: Any) -> Any:
    """Return a single value as a list of one; a mapping unchanged."""
    if isinstance(given, Mapping):
        return given
    return list(given) if isinstance(given, list | tuple) else [given]


def _arguments(given: Texts | Mapping[str, Any]) -> list[str]:
    """Return arguments by name as "NAME=VALUE" each."""
    if isinstance(given, Mapping):
        return [f"{name}={value if isinstance(value, Path) else repr(value)}" for name, value in given.items()]
    return [given] if isinstance(given, str) else list(given)


def _preprocessing(
    resize: Any, crop: Any, mean: Any, std: Any, max_pixels: int | None, batch_axis: Any
) -> dict[str, Any]:
    """Return the preprocessing options as text, as the command line has them."""
    texts: dict[str, Any] = {"max_pixels": max_pixels, "batch_axis": None if batch_axis is None else str(batch_axis)}
    for name, value, between in (("resize", resize, "x"), ("crop", crop, "x"), ("mean", mean, ","), ("std", std, ",")):
        is_several = isinstance(value, Sequence) and not isinstance(value, str)
        texts[name] = between.join(map(str, value)) if is_several else None if value is None else str(value)
    return texts
