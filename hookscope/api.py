"""One function for each command, with the command's name, options and result: hookscope on one page."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from hookscope.errors import UsageError
from hookscope.hooks.interrupts import interrupts_between_blocks
from hookscope.text import printable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hookscope.differences.compare_networks import RunOptions
    from hookscope.differences.compare_weights import Weights
    from hookscope.differences.compared_networks import WeightOptions
    from hookscope.inspection.edits import Edit
    from hookscope.inspection.session import Images, OnError, OnProgress
    from hookscope.models import Classes, FileOptions, LoadedModel
    from hookscope.results.activations import Activations
    from hookscope.results.attributions import Attributions, Method
    from hookscope.results.check import CheckReport
    from hookscope.results.contents import CheckpointContents
    from hookscope.results.differences import Differences
    from hookscope.results.gradients import Gradients
    from hookscope.results.network import ModuleTable

    Model = str | Path | nn.Module | LoadedModel

Texts = str | Sequence[str]
Dtype = Literal["float32", "float64", "float16", "bfloat16"]
Numbers = str | float | Sequence[float]
Sizes = str | int | Sequence[int]

_RUNS_WHERE_IT_IS = "A module runs where it is: options that load or move a model need a name or a file."


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
    resize: Sizes | None = None,
    crop: Sizes | None = None,
    mean: Numbers | None = None,
    std: Numbers | None = None,
    max_pixels: int | None = None,
    batch_axis: str | int | None = None,
    input: Texts | Mapping[str, Any] = (),  # noqa: A002 - the name of the option
    output_key: str | None = None,
    classes: Classes | None = None,
    edit: Texts | Sequence[Edit] = (),
    batch_size: int = 8,
    grids_for: int = 0,
    max_channels: int | None = None,
    device: str = "auto",
    dtype: Dtype | None = None,
    seed: int = 0,
    verify: bool = True,
    save_tensors: bool = False,
    on_progress: OnProgress | None = None,
    on_error: OnError | None = None,
) -> Activations:
    """Run a model over inputs once, in eval mode, and measure what its layers put out.

        >>> import hookscope
        >>> run = hookscope.activations("demo", "sample_images/cat.jpg", layer="conv")
        >>> run["_conv_stem"].shape
        (1, 32, 112, 112)

    A module is left as it was, where it is. Options that are not described here do what `hookscope activations --help`
    says of the option of that name.

    Args:
        model: A module, what `load_model` returned, or MODEL: "resnet34", "timm:NAME", "net.py:build", a weights file.
        images: Files, folders and globs, PIL pictures, or one tensor with the inputs on axis 0.
        layer: Patterns; none means modules that own parameters, and leaves. "op:relu" and
            "layer3.*:cat" select operations.
        ops: Also observe the operations that the network's own code calls: `F.relu`, `+`, `torch.cat`.
        repeats: Keep the rows of modules that return their input.
        weights: For MODEL: "auto", "none", a name, or a file.
        arch: The network that a weights file belongs to; None to recognise it.
        model_arg: Keyword arguments for the network's factory, by name, or "NAME=VALUE" each.
        trust: Let a weights file run code while it is read.
        key: Where in the file the weights are.
        allow_missing: Globs over names that the file may lack.
        allow_unexpected: Globs over names in the file that the network may lack.
        resize: Of pictures: the shorter side, (height, width), or "none".
        crop: Of pictures: the height and width cut from the centre, in the same forms.
        mean: Subtracted after scaling to 0-1: one value, one per channel, or "none".
        std: What the difference is divided by, in the same forms.
        max_pixels: Pictures with more pixels are refused.
        batch_axis: Which axis of a tensor file counts inputs: 0, another, "auto" or "none".
        input: Inputs by name: tensors, numbers, text, and a `Path` for a file; or "NAME=VALUE" each.
        output_key: Which of several outputs holds the class scores.
        classes: Names of the classes: a file, a list, or names by index; None for those that come with the weights.
        edit: Changes to inputs or outputs, "layer3:output:zero(channels=3)"; what they change is in `comparison`.
        batch_size: Inputs at a time.
        grids_for: Keep feature maps for drawing, for this many inputs from the first.
        max_channels: Keep at most this many channels of each, the first ones.
        device: For MODEL: "auto", "cpu", "cuda", "cuda:1", "mps".
        dtype: For MODEL: run in this dtype.
        seed: Seed of random weights and random numbers.
        verify: Run the first batch once more without hooks, and compare the outputs.
        save_tensors: Keep the activations themselves, in `tensors`; `save` then writes them.
        on_progress: Called after each batch with the number of inputs finished and their total.
        on_error: Called for an input that cannot be used, which is then left out; without it the error is raised.

    Returns:
        The run, with verdicts: it prints as what the command prints, `run["layer1.0.conv1"]` is a row,
        `run.save("runs/a")` writes the command's run directory.

    Raises:
        HookscopeError: Its subclasses say what: `ModelNotFoundError`, `CheckpointError`, `UntrustedFileError`,
            `ImageError`, `LayerNotFoundError`, `UsageError`, and `ForwardError` if the model raised, which carries
            what was seen until then.
    """
    from hookscope.checks.judging import judge_activations
    from hookscope.inspection.session import open_session, run_forward
    from hookscope.models import with_classes

    began = time.perf_counter()
    reading = _file_options(trust, key, allow_missing, allow_unexpected)
    loaded = with_classes(_load(model, weights, arch, model_arg, reading, device, dtype, seed), classes)
    session = open_session(
        loaded,
        images,
        _texts(input),
        began=began,
        seed=seed,
        **_preprocessing(resize, crop, mean, std, max_pixels, batch_axis),
    )
    return run_forward(
        session,
        layers=_texts(layer),
        ops=ops,
        repeats=repeats,
        edits=_texts(edit),
        batch_size=batch_size,
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
    input_shape: str | Sequence[int] | None = None,
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
        images: As for `activations`; without any the model runs over seeded noise.
        loss: "ce", "bce", "mse", "l1", "huber", "nll", "sum", "logit", "projection", "file.py:function", or a function
            of the output that returns a 0-d tensor, and of the target after it if there is one.
        target: What the output is compared with: a class index or name, or one per input, "zeros", "noise", "self", a
            tensor or its file.
        output_key: Which of several outputs counts.
        inputs: Measure grad_input too: the gradient through each layer alone.
        mode: "train" for batch statistics and dropout as in training.
        input_shape: Shape of the noise, (N, C, H, W) for example; None to infer it from the model.
        per_image: Differentiate each input alone too: norms in `inputs_alone`.
        edit: Changes to inputs, outputs, gradients or parameters' gradients; what they change is in `comparison`.
        limit: Limits of rules, by name, or "NAME=VALUE" each.
        grids_for: Keep gradients of outputs for drawing, for this many inputs from the first.
        autocast: Run forward pass and loss under autocast to this dtype.
        save_tensors: Keep the gradients themselves, in `tensors`; `save` then writes them.

    Returns:
        What was seen, with verdicts: it prints as the command's tables, `result["layer1.0.conv1"]` is the gradient of
        an output and `result["layer1.0.conv1.weight"]` of a parameter.

    Raises:
        HookscopeError: As for `activations`; `PassError` if the model raised.
    """
    from hookscope.checks.judging import judge_gradients
    from hookscope.checks.rules import limits_from_text
    from hookscope.inspection.session import choose_session_loss, open_session, run_backward
    from hookscope.models import with_classes

    began = time.perf_counter()
    limits = limits_from_text(_arguments(limit))
    has_images = not isinstance(images, list | tuple) or bool(images)
    if has_images and input_shape:
        raise UsageError("--input-shape is the shape of noise: leave it out, or the pictures.")
    if per_image and not has_images:
        raise UsageError("--per-image needs pictures: give IMAGE.")
    reading = _file_options(trust, key, allow_missing, allow_unexpected)
    loaded = with_classes(_load(model, weights, arch, model_arg, reading, device, dtype, seed), classes)
    session = open_session(
        loaded,
        images,
        _texts(input),
        began=began,
        seed=seed,
        mode=mode,
        noise=True,
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
    weights: str = "auto",
    arch: str | None = None,
    model_arg: Texts | Mapping[str, Any] = (),
    trust: bool = False,
    key: str | None = None,
    allow_missing: Texts = (),
    allow_unexpected: Texts = (),
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
    """Say where a model looks: which places of a picture its score for a class comes from.

        >>> import hookscope
        >>> looks = hookscope.attribute("demo", "sample_images/cat.jpg", target="Egyptian cat", sanity="none")
        >>> looks["Egyptian cat"].values.shape
        (7, 7)

    A module is left as it was, where it is. Arguments that are not described here are those of `activations`.

    Args:
        method: "grad-cam", "grad-cam++", "layer-cam" and "hires-cam" look at a layer, "gradient", "input-x-gradient",
            "guided-backprop", "deconvnet", "integrated-gradients", "smoothgrad" and "occlusion" at the picture itself,
            "guided-grad-cam" at both.
        target: What to explain: classes by index or name, one against another ("tabby-tiger cat"), a detector's boxes
            ("box:0", or the best of a class), a class's pixels where each pixel has scores, or the number per input
            that a function of the network's output returns ("file.py:function"). Several, in a list or with commas,
            are each explained.
        top: Explain this many best classes or boxes of each input instead; with neither, the best one.
        layer: Names of layers, or patterns; none means the last one whose output is a map of the picture.
        tokens: How tokens lie on the picture, where it cannot be inferred: "prefix=1,grid=14x14", height first.
        sanity: Which checks of the maps to make: "none", "quick" on the first batch, "full" on all inputs.
        output_key: Which of several outputs holds the scores.

    Returns:
        The maps: `looks["Egyptian cat"]` is that of a target, `looks.save("runs/a")` writes the command's run
        directory.

    Raises:
        HookscopeError: As for `activations`; `UsageError` also if a layer or the network cannot be explained.
    """
    from hookscope.attribution.run_attribution import run_attribution
    from hookscope.inspection.session import open_session
    from hookscope.models import with_classes

    began = time.perf_counter()
    reading = _file_options(trust, key, allow_missing, allow_unexpected)
    loaded = with_classes(_load(model, weights, arch, model_arg, reading, device, dtype, seed), classes)
    session = open_session(
        loaded,
        images,
        _texts(input),
        began=began,
        seed=seed,
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
    """Say how two models differ on the same inputs, layer by layer, and where the difference begins.

    Two run directories of `activations` or `grads` are compared by what they store. Without inputs only weights are
    compared.

        >>> import hookscope
        >>> result = hookscope.diff("demo", "same", "sample_images/cat.jpg", edit_b="_conv_stem:output:scale(1.1)")
        >>> result.first_differences[0].layer
        '_conv_stem'

    Both run side by side, and only the current layer is held. Modules are left as they were, where they are. Arguments
    that are not described here are those of `activations`.

    Args:
        a: As `model` for `activations`, or a run directory.
        b: As `a`, or "same": A again, run in another way. A module is copied for that.
        images: None of them, nor `input`: weights alone. A weights file then needs no network.
        layer: Layers of A whose rows are shown.
        map: Layers that belong together, "encoder.*=backbone.*", where names do not say so.
        reference: "float64": also run A's weights in float64, and measure the error of each side.
        shadow: Also run each layer of B on A's input, which shows what the layer itself adds to the difference.
        grads: Also run both backward, batch by batch, and compare the gradients of outputs, and those of parameters
            summed over batches. `first_gradient_difference` of the result is the first row of them to differ in the
            backward pass. The gradients of all inputs and outputs of layers over a batch are held, on both sides.
        loss: As for `grads`, and so is `target`; None for "projection". Without a target each side takes its own.
        output_key: Which of several outputs is compared, and differentiated; None for all.
        fail_over: Conditions for `exceeded`: "rel>1e-3", "layer4*:cosine<0.99", "output:kl>0.01", "top1<1".
        input_b: What B is given in place of `images`, one for each in the same order: the same picture padded, another
            crop. They run one by one; rows of other shapes are not compared.
        weights_b: As `weights`, for B; None for those of A.
        device_b: As `device`, for B, and `dtype_b` as `dtype`; None for those of A.
        autocast_b: Run B under autocast to this dtype.
        mode_b: "train" runs B with batch statistics and dropout as in training.
        threads_b: Threads that B computes with on the CPU.
        compile_b: Run B through torch.compile: its output is that of the whole network, compiled in one piece; rows are
            those of blocks compiled one by one, which `layer` can make smaller.
        edit_b: Changes to inputs or outputs of B's layers: "layer3:output:zero(channels=3)".

    Returns:
        The differences: `result["layer3.0.conv1"]` is a row, `result.first_differences` says where differences begin.

    Raises:
        HookscopeError: As for `activations`; `NothingMatchedError` if no layer of A has a partner in B.
    """
    from hookscope.differences.compare_networks import compare_networks
    from hookscope.differences.compared_networks import weight_options
    from hookscope.inspection.device import choose_device
    from hookscope.inspection.session import choose_session_loss, open_session
    from hookscope.models import with_classes
    from hookscope.results.runs.reading import is_run

    began = time.perf_counter()
    if threads_b is not None and threads_b < 1:
        raise UsageError(f"--threads-b {threads_b} is not possible: give 1 or more.")
    if (loss is not None or target is not None) and not grads:
        raise UsageError("--loss and --target need --grads.")
    given_b = not isinstance(input_b, list | tuple) or bool(input_b)
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
    has_images = not isinstance(images, list | tuple) or bool(images)
    conditions = {"maps": _texts(map), "fail_over": _texts(fail_over)}
    if any(isinstance(each, str | Path) and is_run(Path(each)) for each in (a, b)):
        _refuse({"IMAGE": has_images, "--input": input, **of_passes}, "two run directories are compared as they are")
        return _compared_runs(a, b, **conditions)
    reading = _file_options(trust, key, allow_missing, allow_unexpected)
    names = [str(each) if isinstance(each, str | Path) else None for each in (a, b)]
    of_a, of_b = weight_options(names[0], names[1], weights, weights_b, arch, reading)
    if not has_images and not input:
        _refuse(of_passes, "without IMAGE only weights are compared")
        return _compared_weights((a, of_a), (a if b == "same" else b, of_b), model_arg, seed, **conditions)
    if device_b is not None:
        choose_device(device_b, "--device-b")
    if not isinstance(a, str | Path) and isinstance(b, str | Path) and b != "same":
        own = _given(a)  # the options about loading are for B
    else:
        own = _load(a, of_a.weights, of_a.arch, model_arg, of_a.file, device, dtype, seed)
    loaded = with_classes(own, classes)
    if not isinstance(b, str | Path):
        as_it_is = _file_options(trust=False, key=None, allow_missing=(), allow_unexpected=())
        other = _load(b, weights_b or "auto", None, (), as_it_is, device_b or "auto", dtype_b, seed)
    elif b == "same" and not isinstance(a, str | Path):
        other = _another_way(loaded, weights_b, device_b, dtype_b)
    else:
        wanted = (of_b.weights, of_b.arch, model_arg, of_b.file, device_b or device, dtype_b or dtype, seed)
        other = _load(a if b == "same" else b, *wanted)
    prepared = _preprocessing(resize, crop, mean, std, max_pixels, batch_axis)
    session = open_session(loaded, images, _texts(input), began=began, seed=seed, **prepared)
    options_b = _run_options(mode_b, autocast_b, threads_b, _texts(edit_b), compiles=compile_b)
    inputs_b = None
    if given_b:
        inputs_b = open_session(loaded, input_b, _texts(input), began=began, seed=seed, **prepared).inputs
        options_b = replace(options_b, texts=(*options_b.texts, "other inputs"))
    return compare_networks(
        session,
        with_classes(other, classes),
        options_b=options_b,
        inputs_b=inputs_b,
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
    arch: str | None = None,
    model_arg: Texts | Mapping[str, Any] = (),
    trust: bool = False,
    key: str | None = None,
    allow_missing: Texts = (),
    allow_unexpected: Texts = (),
    input_shape: str | Sequence[int] | None = None,
) -> ModuleTable:
    """List a model's modules with types, parameters and shapes, and mark what patterns select.

        >>> import hookscope
        >>> print(hookscope.layers("resnet18")["layer1.0.conv1"].output_shapes)
        ((1, 64, 56, 56),)

    Shapes come from a forward pass over noise: MODEL runs on the meta device, which computes nothing, and on the CPU
    where that fails; a module runs where it is.

    Args:
        model: As for `activations`, and so is every argument but the last.
        layer: Patterns to mark; none marks modules that own parameters, and leaves.
        ops: Also list the operations that the network's own code calls.
        arch: The network that a weights file belongs to; None to recognise it.
        model_arg: Keyword arguments for the network's factory.
        trust: Let a weights file run code while it is read.
        key: Where in the file the weights are.
        allow_missing: Globs over names that the file may lack.
        allow_unexpected: Globs over names in the file that the network may lack.
        input_shape: Shape of the input, batch axis first; None to infer it from the model.

    Raises:
        HookscopeError: As for `activations`. A forward pass that raises is in `failure` instead.
    """
    from hookscope.inputs import parse_shape
    from hookscope.models import build_on_meta, load_model, parse_model

    shape = None if input_shape is None else parse_shape(input_shape)
    if not isinstance(model, str | Path):
        return _module_table(_given(model), _texts(layer), shape, ops=ops)
    options = _file_options(trust, key, allow_missing, allow_unexpected)
    arguments = _arguments(model_arg)
    loaded = build_on_meta(str(model), arch=arch, model_arguments=arguments, options=options)
    warnings, notes = loaded.warnings, loaded.notes
    if _device(loaded) == "meta" and _module_table(loaded, (), shape, ops=ops).failure is not None:
        # Data-dependent code (non-maximum suppression, say) needs values.
        weights = "auto" if parse_model(str(model)).form == "weights" else "none"
        loaded = load_model(str(model), weights=weights, arch=arch, model_arguments=arguments, options=options)
    table = _module_table(loaded, _texts(layer), shape, ops=ops)
    remarks = table.warnings[len(loaded.warnings) :]
    return replace(table, warnings=(*warnings, *remarks), notes=notes)


@interrupts_between_blocks()
def check(  # noqa: D417 - those of `activations` are described there
    checkpoint: Model,
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
    images: Images = (),
    data: str | Path | None = None,
    input_shape: str | Sequence[int] | None = None,
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
    evidence: str | Path | None = None,
    trust: bool = False,
    device: str = "cpu",
) -> CheckReport:
    """Check one checkpoint in this process, by the rules of `hookscope check`, which runs each in another process.

        >>> import hookscope
        >>> def test_the_checkpoint_is_sound():
        ...     hookscope.check("model.pt").raise_for_failure()

    Arguments override the configuration. Arguments that are not described here are those of `activations`.

    Args:
        checkpoint: A weights file or any other form of MODEL; or a module, which runs where it is.
        config: The configuration; None for that of the working directory, else the defaults.
        arch: The network that a weights file belongs to; "none" to judge the file alone, by what it stores; None for
            the configuration's, or to recognise it.
        allow_global: Globs over classes and functions, beside plain data, that the file's pickle may name. They are
            read past, and never imported.
        images: As for `activations`, instead of the configuration's or of noise.
        data: Labelled pictures to measure the accuracy on: a folder of class folders, or a CSV file with a path and a
            label on each line.
        input_shape: Shape of the noise, batch axis first, instead of the configuration's.
        input: Inputs by name: numbers, text, and a `Path` for a file; or "NAME=VALUE" each.
        baseline: What `--update-baseline` wrote; None for the configuration's, if it names one.
        select: Rules or globs to judge by; none means all that are on.
        ignore: Rules or globs to leave out.
        evidence: A folder for grids, histograms and rows of what failed; None for none.
        trust: Let a weights file run code while it is read.
        device: For MODEL: where it runs.

    Returns:
        The verdict. A checkpoint that cannot be read or run has one too: `error` says why.

    Raises:
        UsageError: If the configuration, the baseline, the device or the name of a rule is wrong.
        OutputError: If the evidence could not be written where it is to go.
    """
    from hookscope.checks.baseline import read_baseline
    from hookscope.checks.checkpoint import check_checkpoint
    from hookscope.checks.configuration import read_settings
    from hookscope.checks.judging import wanted_rules
    from hookscope.checks.settings import loads_as_told, with_options
    from hookscope.inspection.device import choose_device
    from hookscope.inspection.session import as_sources

    given: dict[str, Any] = {"arch": arch, "model_arg": _arguments(model_arg), "key": key, "output_key": output_key}
    given |= {"allow_missing": _texts(allow_missing), "allow_unexpected": _texts(allow_unexpected)}
    given["allow_global"] = _texts(allow_global)
    inputs = as_sources(images)
    given |= {"images": inputs, "data": data, "input": _arguments(input), "classes": classes}
    given |= {
        "baseline": baseline,
        "input_shape": input_shape,
        **_preprocessing(resize, crop, mean, std, max_pixels, batch_axis),
    }
    if not isinstance(checkpoint, str | Path) and loads_as_told(given):
        raise UsageError(_RUNS_WHERE_IT_IS)
    settings = with_options(read_settings(None if config is None else Path(config), Path()), given)
    path = settings.baseline if baseline is None else Path(baseline)
    return check_checkpoint(
        str(checkpoint) if isinstance(checkpoint, Path) else checkpoint,
        settings,
        wanted_rules(settings, _texts(select), _texts(ignore)),
        trust=trust,
        device=choose_device(device) if isinstance(checkpoint, str | Path) and device != "cpu" else None,
        given=None if isinstance(inputs, list) else inputs,
        baseline=None if path is None else read_baseline(path),
        evidence=None if evidence is None else Path(evidence),
    )


def checkpoint(file: str | Path, *, key: str | None = None) -> CheckpointContents:
    """List what a weights file holds without building a network or running anything.

    Args:
        file: A weights file, or the index of a sharded one.
        key: Where in the file the weights are; None for all sets of weights.

    Raises:
        CheckpointError: If it is missing, damaged, or not a weights file.
        NothingMatchedError: If there is nothing at `key`.
    """
    from hookscope.models.contents import list_contents

    return list_contents(Path(file), key)


def report(
    run: str | Path | Activations | Gradients | Attributions | Differences, out: str | Path | None = None
) -> Path:
    """Write one self-contained HTML page of a run.

    Args:
        run: A run directory, or a result.
        out: The HTML file; None for RUN.html beside a run directory.

    Returns:
        The file that was written.

    Raises:
        InputError: If `run` is not a run that can be read.
        OutputError: If the page cannot be written.
        UsageError: If `run` is a result and `out` is None.
    """
    from hookscope.render.html import report_html
    from hookscope.render.html.attributions import attributions_html
    from hookscope.render.html.differences import differences_html
    from hookscope.results.runs.attributions import read_attributions
    from hookscope.results.runs.differences import read_differences
    from hookscope.results.runs.reading import read_record, read_run
    from hookscope.results.runs.reports import check_report_target, default_report_path, write_report

    if not isinstance(run, str | Path):
        if out is None:
            raise UsageError("The page of a result needs a file name: give out.")
        with TemporaryDirectory() as folder:
            return report(run.save(Path(folder) / "run"), out)
    target = default_report_path(Path(run)) if out is None else Path(out)
    check_report_target(target)
    verb = read_record(Path(run)).get("verb")
    if verb == "attribute":
        page = attributions_html(read_attributions(Path(run)))
    elif verb == "diff":
        page = differences_html(read_differences(Path(run)))
    else:
        page = report_html(read_run(Path(run)))
    write_report(target, page)
    return target


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


def _compared_runs(a: Model, b: Model, **conditions: Any) -> Differences:
    from hookscope.differences.compare_runs import compare_runs

    for each in (a, b):
        if not isinstance(each, str | Path) or not Path(each).is_dir():
            shown = repr(printable(str(each), 80)) if isinstance(each, str | Path) else f"A {type(each).__name__}"
            raise UsageError(f"{shown} is no run directory. Give two runs, or two models.")
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
) -> RunOptions:
    """Return how B runs, with what differs from A in words."""
    from hookscope.differences.compare_networks import RunOptions

    texts = [] if autocast is None else [f"autocast to {autocast}"]
    texts += ["train mode"] * (mode == "train") + ([] if threads is None else [f"threads: {threads}"])
    texts += [f"edit {each}" for each in edits] + ["compiled"] * compiles
    return RunOptions(mode, autocast, threads, edits, compiles, tuple(texts))


def _refuse(given: Mapping[str, Any], reason: str) -> None:
    """Raise a UsageError for the first of the options that is given."""
    for option, value in given.items():
        if value:
            raise UsageError(f"{option} goes with models that run over pictures: {reason}.")


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


def _given(model: nn.Module | LoadedModel) -> LoadedModel:
    from hookscope.models import LoadedModel
    from hookscope.models.construction import loaded_module

    return model if isinstance(model, LoadedModel) else loaded_module(model)


def _module_table(
    loaded: LoadedModel, patterns: Sequence[str], shape: tuple[int, ...] | None, *, ops: bool
) -> ModuleTable:
    """List modules after a pass over noise; a warning says why there was none."""
    from hookscope.inputs import noise_batch, to_device
    from hookscope.inspection.device import floating_dtype
    from hookscope.inspection.forward import list_modules
    from hookscope.inspection.run import unseen_in_scripts
    from hookscope.models import example_shape
    from hookscope.results.network import ModuleTable

    shape = shape or loaded.example_shape or example_shape(loaded.module, loaded.preprocessing)
    warnings = loaded.warnings
    args = None
    if shape is None:
        warnings += ("No shapes: the input shape cannot be inferred from the first layer. Give --input-shape.",)
    else:
        noise = noise_batch(shape, 0, loaded.preprocessing.kind)
        args = to_device(noise, _device(loaded), floating_dtype(loaded.module)).args
    rows, failure = list_modules(loaded.module, args, patterns, ops=ops)
    if ops:
        warnings += unseen_in_scripts(dict(loaded.module.named_modules()))
    return ModuleTable(loaded.info, rows, failure, warnings, loaded.notes)


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
