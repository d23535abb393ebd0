"""What each command does, for the command line and for the Python functions: a network, inputs and typed options."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from hookscope import options
from hookscope.errors import OutputError, UsageError
from hookscope.hooks.interrupts import interrupts_between_blocks
from hookscope.parameters import arg
from hookscope.text import printable

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

    from hookscope.checks.settings import CheckSettings
    from hookscope.differences.compare_networks import RunOptions
    from hookscope.differences.compare_weights import Weights
    from hookscope.inputs import Batch
    from hookscope.inspection.given_inputs import Images
    from hookscope.inspection.session import OnError, OnProgress, Session
    from hookscope.models import FileOptions, LoadedModel
    from hookscope.results.activations import Activations
    from hookscope.results.attention import Attention
    from hookscope.results.attributions import Attributions
    from hookscope.results.check import CheckReport
    from hookscope.results.contents import CheckpointContents
    from hookscope.results.differences import Differences
    from hookscope.results.gradients import Gradients
    from hookscope.results.history import History
    from hookscope.results.network import ModuleTable
    from hookscope.results.noise_shapes import NoiseShape
    from hookscope.results.survey import FeatureFiles, Survey
    from hookscope.results.training import TrainingLog
    from hookscope.watching.networks import Networks, Optimizers
    from hookscope.watching.watch import Watch

    Model = str | Path | nn.Module | ExportedProgram | LoadedModel

_JUDGED_ALONE = (
    "A state dict is judged without a network, so options that load or run one do not apply. Load it into the network "
    "and give that, or save it and give the file."
)
_TOO_LARGE_TO_TIME = (
    "No times: the network takes more than half of this machine's memory. Bytes saved for backward are those of the "
    "meta device, where attention is not fused."
)


def _runs_where_it_is() -> str:
    few = ", ".join(map(arg, ("weights", "arch", "device", "dtype")))
    return (
        "A module stays on its device, with its weights: load, convert and move it yourself. "
        f"{few} and the like need MODEL as a name or a file."
    )


@interrupts_between_blocks()
def activations(
    model: Model,
    images: Images = (),
    *,
    option: options.Activations,
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
    from hookscope.inspection.session import run_forward

    session = _opened(model, images, option)
    return run_forward(session, option, judge_activations, on_progress, on_error)


@interrupts_between_blocks()
def grads(
    model: Model,
    images: Images = (),
    *,
    option: options.Grads,
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

    Returns:
        The gradients, with their verdicts. Printing them shows the command's tables; `result["layer1.0.conv1"]` is the
        gradient of an output and `result["layer1.0.conv1.weight"]` that of a parameter.

    Raises:
        HookscopeError: As for `activations`; `PassError` if the model raised.
    """
    from hookscope.checks.judging import judge_gradients
    from hookscope.checks.rules import limits_of_grads
    from hookscope.inspection.session import choose_session_loss, run_backward

    limits = limits_of_grads(option.limit)
    if option.per_image and not _are_given(images):
        raise UsageError(f"{arg('per_image')} needs pictures: give IMAGE.")
    session = _opened(model, images, option, mode=option.mode, noise=1)
    loss = choose_session_loss(session, option.loss, option.target, option.output_key)
    judge = partial(judge_gradients, limits=limits)
    return run_backward(session, loss, option, judge, {"limits": limits}, on_progress, on_error)


@interrupts_between_blocks()
def attribute(
    model: Model,
    images: Images = (),
    *,
    option: options.Attribute,
    on_progress: OnProgress | None = None,
    on_error: OnError | None = None,
) -> Attributions:
    """Map where a model looks: the places of a picture, signal or volume that the score of a class comes from.

        >>> import hookscope
        >>> looks = hookscope.attribute("demo", "sample_images/cat.jpg", target="Egyptian cat", sanity="none")
        >>> looks["Egyptian cat"].values.shape
        (7, 7)

    A module keeps its state and its device.

    Returns:
        The maps: `looks["Egyptian cat"]` is the map of a target, and `looks.save("runs/a")` writes the command's run
        directory.

    Raises:
        HookscopeError: As for `activations`; `UsageError` also if the method cannot explain the layer or the network.
    """
    from hookscope.attribution.run_attribution import run_attribution

    return run_attribution(_opened(model, images, option), option, on_progress, on_error)


@interrupts_between_blocks()
def attention(
    model: Model,
    images: Images = (),
    *,
    option: options.Attention,
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

    Returns:
        The attention: `looks.census` counts the blocks that were seen, `looks["blocks.11.attn"]` is a map, `looks.rows`
        are the numbers by head, and `looks.save("runs/a")` writes the command's run directory.

    Raises:
        HookscopeError: As for `activations`; `NothingMatchedError` if no attention was seen, `UsageError` if rollout
            is undefined for the network, or no block has the query.
    """
    from hookscope.attention_maps.run_attention import run_attention

    return run_attention(_opened(model, images, option), option, on_progress, on_error)


@interrupts_between_blocks()
def diff(
    a: Model,
    b: Model,
    images: Images = (),
    *,
    option: options.Diff,
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

    Returns:
        The differences: `result["layer3.0.conv1"]` is a row, and `result.first_differences` is where they begin.

    Raises:
        HookscopeError: As for `activations`; `NothingMatchedError` if no layer of A has a partner in B.
    """
    from hookscope.differences.compare_networks import compare_networks
    from hookscope.differences.compare_weights import compare_weights
    from hookscope.differences.compared_networks import sides
    from hookscope.inspection.session import choose_session_loss, open_session
    from hookscope.results.runs.reading import is_run

    began = time.perf_counter()
    has_images, given_b = _are_given(images), _are_given(option.input_b)
    how_b_runs = _how_b_runs(option, other_inputs=given_b)
    if (option.loss is not None or option.target is not None) and not option.grads:
        raise UsageError(f"{arg('loss')} and {arg('target')} need {arg('grads')}.")
    of_inputs = ["IMAGE"] * has_images + ["input"] * bool(option.input)
    of_inputs += ["input_shape"] * (option.input_shape is not None)
    of_passes = [name for name in _OF_PASSES if options.is_given(option, name)] + ["input_b"] * given_b
    if any(isinstance(model, str | Path) and is_run(Path(model)) for model in (a, b)):
        _refuse([*of_inputs, *of_passes], "two run directories are compared as they are")
        return _compared_runs(a, b, option)
    names = [str(model) if isinstance(model, str | Path) else None for model in (a, b)]
    of_a, of_b = sides(names[0], names[1], option)
    if not of_inputs:
        _refuse(of_passes, "without IMAGE, only weights are compared")
        weights = _weights(a, of_a), _weights(a if _is_same(b) else b, of_b)
        return compare_weights(*weights, maps=option.map, fail_over=option.fail_over)
    if given_b and not has_images:
        _refuse(["input_b"], "without IMAGE both sides get the same noise, or inputs by name")
    loaded, other = (_with_classes(model, option) for model in _two_models((a, of_a), (b, of_b), option))
    opened = partial(open_session, loaded, option=option, began=began, seed=option.seed)
    session = opened(images)
    return compare_networks(
        session,
        other,
        option,
        how_b_runs,
        inputs_b=opened(option.input_b).inputs if given_b else None,
        loss=choose_session_loss(session, option.loss or "projection", option.target, option.output_key)
        if option.grads
        else None,
        on_progress=on_progress,
        on_error=on_error,
    )


@interrupts_between_blocks()
def layers(model: Model, *, option: options.Layers) -> ModuleTable:
    """List a model's modules with types, parameters and shapes, and mark what patterns select.

        >>> import hookscope
        >>> print(hookscope.layers("resnet18")["layer1.0.conv1"].output_shapes)
        ((1, 64, 56, 56),)

    Shapes come from a forward pass over noise, or over `input`. MODEL runs on the meta device, which computes nothing,
    and on the CPU if that fails; a module runs on its own device.

    Args:
        model: As for `activations`.

    Returns:
        The modules: `table["layer1.0.conv1"]` is a row.

    Raises:
        HookscopeError: As for `activations`. If the forward pass raises, `failure` of the result has the error instead.
    """
    from hookscope.inspection.device import fits_into_memory
    from hookscope.models import build_on_meta, load_model, parse_model
    from hookscope.models.construction import built_of_zeros
    from hookscope.results.noise_shapes import parse_noise_shapes

    shapes = () if option.input_shape is None else parse_noise_shapes(option.input_shape)
    table_of = partial(_module_table, shapes=shapes, option=option)
    if not isinstance(model, str | Path):
        loaded = _given(model)
        table = table_of(loaded, option.layer)
        real: LoadedModel | None = loaded
    else:
        kwargs: dict[str, Any] = {"arch": option.arch, "model_arguments": option.model_arg}
        kwargs["options"] = _file_options(option)
        is_named = option.weights not in ("auto", "none")
        loaded = real = (
            load_model(str(model), weights=option.weights, **kwargs)
            if is_named
            else build_on_meta(str(model), **kwargs)
        )
        weights = "auto" if parse_model(str(model)).form == "weights" else "none"
        warnings, notes = loaded.warnings, loaded.notes
        first = table_of(loaded, ()) if _device(loaded) == "meta" else None
        if first is not None and first.failure is not None:
            # Data-dependent code (non-maximum suppression, say) needs values.
            loaded = real = load_model(str(model), weights=weights, **kwargs)
        elif first is not None:
            # It ran on the meta device, so nothing depends on values: zeros are timed, if they fit into memory.
            load = partial(load_model, str(model), weights=weights, **kwargs)
            real = built_of_zeros(load) if option.cost and fits_into_memory(loaded.module) else None
        table = table_of(loaded, option.layer) if first is None or first.failure is not None or option.layer else first
        remarks = table.warnings[len(loaded.warnings) :]
        table = replace(table, warnings=(*warnings, *remarks), notes=notes)
    if option.cost and table.failure is None:
        table = _with_cost(table, loaded, real, shapes, option)
    return table if option.depth is None else table.down_to(option.depth)


@interrupts_between_blocks()
def check(checkpoint: Model | Mapping[str, Any], *, option: options.Check) -> CheckReport:
    """Check one checkpoint by the rules of `hookscope check`; the network runs in this process.

        >>> import hookscope
        >>> def test_the_checkpoint_is_sound():
        ...     hookscope.check("model.pt").raise_for_failure()

    Arguments override the configuration.

    Args:
        checkpoint: A weights file or any other form of MODEL; a module, which stays on its device; or a state dict,
            also inside the dict that a training script saves. A state dict is judged by its values alone, without a
            network.

    Returns:
        The report. If the checkpoint cannot be read or run, its `error` has the reason.

    Raises:
        UsageError: If the configuration, the baseline, the device or the name of a rule is wrong.
        OutputError: If the evidence cannot be written to its folder.
    """
    from hookscope.checks.baseline import read_baseline
    from hookscope.checks.checkpoint import check_checkpoint
    from hookscope.checks.judging import judged_by
    from hookscope.checks.settings import NO_NETWORK, loads_as_told, runs_as_told, with_options
    from hookscope.inspection.device import choose_device
    from hookscope.inspection.given_inputs import as_sources, by_position_and_name

    images, named = by_position_and_name(option.images, option.input)
    inputs = as_sources(images)
    option = replace(option, images=inputs, input=named)
    if isinstance(checkpoint, Mapping):
        loading = replace(option, key=None, arch=None if option.arch == NO_NETWORK else option.arch)
        if loads_as_told(loading) or runs_as_told(option):
            raise UsageError(_JUDGED_ALONE)
        option = replace(option, arch=NO_NETWORK)
    elif not isinstance(checkpoint, str | Path):
        loaded = _given(checkpoint)  # which refuses what is no network
        if loads_as_told(option):
            raise UsageError(_runs_where_it_is())
        if loaded.module is not checkpoint:  # TorchScript and exported programs, as modules
            checkpoint = loaded
    settings = with_options(_configured(option), option)
    baseline = None if settings.baseline is None else read_baseline(settings.baseline)
    settings, wanted = judged_by(settings, option, baseline)
    return check_checkpoint(
        str(checkpoint) if isinstance(checkpoint, Path) else checkpoint,
        settings,
        wanted,
        trust=option.trust,
        device=choose_device(option.device) if isinstance(checkpoint, str | Path) and option.device != "cpu" else None,
        baseline=baseline,
        evidence=None if option.evidence is None else Path(option.evidence),
    )


@interrupts_between_blocks()
def history(
    files: options.Texts | Sequence[Path] | Path,
    images: Images = (),
    *,
    option: options.History,
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

    Returns:
        The weights over the files, and the verdicts, each with the first file that breaks the rule.
        `run.save("runs/a")` writes the command's run directory.

    Raises:
        UsageError: If an option is wrong, or there are fewer than two files.
        NothingMatchedError: If a folder or a glob holds no weights file.
    """
    from hookscope.checkpoints.find_checkpoints import find_checkpoints
    from hookscope.checks.judging import judged_by
    from hookscope.checks.settings import NO_NETWORK, with_options
    from hookscope.inspection.device import choose_device
    from hookscope.inspection.given_inputs import as_sources, by_position_and_name
    from hookscope.series.follow import follow

    images, named = by_position_and_name(images, option.input)
    inputs = as_sources(images)
    configured = _configured(option)
    has_inputs = bool(named) or option.input_shape is not None or not isinstance(inputs, list) or bool(inputs)
    arch = option.arch or configured.arch or (None if has_inputs else NO_NETWORK)
    checked = options.taken(options.Check, option, images=inputs, input=named, arch=arch)
    settings = replace(with_options(configured, checked), baseline=None, survey=None)
    settings, wanted = judged_by(settings, option, None)
    return follow(
        find_checkpoints([str(file) for file in _several(files)]),
        settings,
        wanted,
        searches=option.bisect,
        device=choose_device(option.device) if option.device != "cpu" else None,
        on_progress=on_progress,
    )


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
    from hookscope.surveys.feature_files import FeatureTarget
    from hookscope.surveys.plan import ChunkFolder, parse_share
    from hookscope.surveys.run_survey import SurveyPlace, labelled_inputs, place_on_own_device, run_survey

    if option.features is not None and not option.layer:
        raise UsageError(f"{arg('features')} needs {arg('layer')}: name the layers whose outputs are wanted.")
    target = None
    if option.features is not None:
        target = FeatureTarget(Path(option.features), option.pool, option.features_dtype)
        target.check()
    labelled = labelled_inputs(images) if option.by_class else None
    share = None if option.shard is None else parse_share(option.shard)
    option = replace(option, device=place_on_own_device(option.device))
    session = _opened(model, [*labelled.labels] if labelled else images, option)
    session = replace(session, inputs=replace(session.inputs, readers=option.workers))
    with TemporaryDirectory() if chunks is None else nullcontext(chunks) as folder:
        place = SurveyPlace(ChunkFolder(Path(folder)), labelled, target, share)
        return run_survey(session, option, place, on_progress)


@interrupts_between_blocks()
def features(
    model: Model,
    batches: Iterable[Any],
    out: str | Path,
    *,
    layer: options.Texts,
    option: options.Features,
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

    Returns:
        The files, and the shape of each tensor.

    Raises:
        HookscopeError: As for `activations`; `OutputError` if a file cannot be written.
    """
    from hookscope.surveys.batch_features import batch_features
    from hookscope.surveys.feature_files import FeatureTarget

    loaded = _load(model, options.ModelOptions(), options.RunOptions(seed=option.seed))
    target = FeatureTarget(Path(out), option.pool, option.features_dtype)
    return batch_features(loaded, batches, target, _several(layer), option.seed)


def checkpoint(file: str | Path, *, option: options.Checkpoint) -> CheckpointContents:
    """List the contents of a weights file without building a network or running code from the file.

    Args:
        file: A weights file, the index of a sharded one, or the folder of a distributed one.

    Returns:
        The sets of weights with their tensors, the other entries of the file, and its metadata.

    Raises:
        CheckpointError: If the file is missing, damaged, or not a weights file.
        NothingMatchedError: If there is nothing at `key`.
    """
    from hookscope.models.contents import list_contents

    return list_contents(Path(file), option.key)


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
    from hookscope.render.conversion import DESCRIPTIONS
    from hookscope.render.html.document import document_html
    from hookscope.render.training import describe_training
    from hookscope.render.training_files import save_training_overview
    from hookscope.results.runs.reading import read_run
    from hookscope.results.runs.reports import check_report_target, default_report_path, write_report
    from hookscope.results.runs.training_log import is_training, read_training
    from hookscope.results.training import TrainingLog

    if not isinstance(run, str | Path):
        if out is None:
            raise UsageError("The page of a result needs a file name: give out.")
        if isinstance(run, TrainingLog):
            check_report_target(Path(out))
            write_report(Path(out), document_html(describe_training(run)))
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
    stored = read_run(Path(run))
    write_report(target, document_html(DESCRIPTIONS[type(stored.result)](stored.result, stored.record), stored))
    return target


def watch(
    model: Networks,
    optimizer: Optimizers,
    *,
    option: options.Watch,
    activations: bool = True,
    edits: options.Texts = (),
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
    from hookscope.watching.watch import Watch

    return Watch(model, optimizer, replace(option, edit=edits), activations=activations, on_line=on_line)


def _opened(
    model: Model,
    images: Images,
    option: options.Activations | options.Grads | options.Attribute | options.Attention | options.Survey,
    **further: Any,
) -> Session:
    """Load a network, and find the inputs to run it over; further arguments are those of `open_session`."""
    from hookscope.inspection.session import open_session

    began = time.perf_counter()
    loaded = _with_classes(_load(model, option, option), option)
    return open_session(loaded, images, option, began=began, seed=option.seed, **further)


def _with_classes(loaded: LoadedModel, option: options.ModelOptions) -> LoadedModel:
    from hookscope.models import with_classes

    if not isinstance(option, options.ClassNames):
        return loaded
    multi_label = option.multi_label if isinstance(option, options.ScoreOptions) else loaded.multi_label
    return with_classes(loaded, option.classes, multi_label=multi_label)


def _configured(option: options.RuleOptions) -> CheckSettings:
    from hookscope.checks.configuration import read_settings

    return read_settings(None if option.config is None else Path(option.config), Path())


def _load(model: Model, option: options.ModelOptions, run: options.RunOptions) -> LoadedModel:
    """Load what MODEL names and move it to its device; take a module as it is."""
    from hookscope.inspection.device import choose_device, move_to
    from hookscope.models import load_model

    if not isinstance(model, str | Path):
        if options.any_given(option, options.ModelOptions) or run.device != "auto" or run.dtype is not None:
            raise UsageError(_runs_where_it_is())
        return _given(model)
    where = choose_device(run.device)
    loaded = load_model(
        str(model),
        weights=option.weights,
        arch=option.arch,
        model_arguments=option.model_arg,
        seed=run.seed,
        options=_file_options(option),
    )
    move_to(loaded, where, run.dtype)
    return loaded


def _two_models(
    a: tuple[Model, options.Diff], b: tuple[Model, options.Diff], option: options.Diff
) -> tuple[LoadedModel, LoadedModel]:
    """Load A and B, each with its options; "same" is A in another way, and modules are taken as they are."""
    from hookscope.inspection.device import choose_device

    (model_a, of_a), (model_b, of_b) = a, b
    if option.device_b is not None:
        choose_device(option.device_b, "device_b")
    is_same = _is_same(model_b)
    if isinstance(model_a, str | Path) or is_same or not isinstance(model_b, str | Path):
        loaded = _load(model_a, of_a, of_a)
    else:
        loaded = _given(model_a)  # the options about loading are for B
    if is_same and not isinstance(model_a, str | Path):
        return loaded, _another_way(loaded, option)
    named = model_a if is_same else model_b
    device, dtype = option.device_b or option.device, option.dtype_b or option.dtype
    if isinstance(named, str | Path):
        return loaded, _load(named, of_b, replace(of_b, device=device, dtype=dtype))
    alone = options.ModelOptions(weights=option.weights_b or "auto")
    run = options.RunOptions(device=option.device_b or "auto", dtype=option.dtype_b, seed=option.seed)
    return loaded, _load(named, alone, run)


def _is_same(model: Model) -> bool:
    return isinstance(model, str) and model == "same"  # a module may have an `__eq__` of its own


def _compared_runs(a: Model, b: Model, option: options.Diff) -> Differences:
    from hookscope.differences.compare_runs import compare_runs

    for run in (a, b):
        if not isinstance(run, str | Path) or not Path(run).is_dir():
            shown = repr(printable(str(run), 80)) if isinstance(run, str | Path) else f"A {type(run).__name__}"
            raise UsageError(f"{shown} is not a run directory. Give two runs, or two models.")
    return compare_runs(Path(str(a)), Path(str(b)), maps=option.map, fail_over=option.fail_over)


def _how_b_runs(option: options.Diff, *, other_inputs: bool) -> RunOptions:
    """Return how B runs, with what differs from A in words."""
    from hookscope.differences.compare_networks import RunOptions

    texts = [] if option.autocast_b is None else [f"autocast to {option.autocast_b}"]
    texts += ["train mode"] * (option.mode_b == "train")
    texts += [] if option.threads_b is None else [f"threads: {option.threads_b}"]
    texts += [f"edit {edit}" for edit in option.edit_b]
    texts += ["compiled"] * option.compile_b + ["other inputs"] * other_inputs
    return RunOptions(option.mode_b, option.autocast_b, option.threads_b, option.edit_b, option.compile_b, tuple(texts))


# Options of `diff` that need models to run.
_OF_PASSES = (
    *("layer", "ops", "reference", "shadow", "grads", "device_b", "dtype", "dtype_b", "autocast_b", "mode_b"),
    *("threads_b", "edit_b", "compile_b", "output_key"),
)


def _refuse(names: Sequence[str], reason: str) -> None:
    """Raise a UsageError for the first of the options, if any is given."""
    for name in names:
        option = {"IMAGE": name, "mode_b": f"{arg('mode_b')} train"}.get(name, arg(name))
        raise UsageError(f"{option} applies to models that run over pictures: {reason}.")


def _weights(model: Model, option: options.Diff) -> Weights:
    """Return the weights of a model; of a weights file those in it, whatever network they are for."""
    from hookscope.differences.compare_weights import read_weights, weights_of
    from hookscope.models import parse_model

    if not isinstance(model, str | Path):
        return weights_of(_given(model))
    if option.arch is None and option.weights == "auto" and parse_model(str(model)).form == "weights":
        return read_weights(Path(model), _file_options(option))
    return weights_of(_load(model, option, options.RunOptions(device="cpu", seed=option.seed)))


def _another_way(loaded: LoadedModel, option: options.Diff) -> LoadedModel:
    from hookscope.inspection.device import choose_device, move_to
    from hookscope.models.construction import copied

    if option.weights_b is not None:
        raise UsageError(
            f"{arg('weights_b')} is for a model given by name: load them into a second module, and give that as B."
        )
    other = copied(loaded)
    if option.device_b is not None or option.dtype_b is not None:
        move_to(other, choose_device(option.device_b or _device(loaded)), option.dtype_b)
    return other


def _file_options(option: options.ModelOptions) -> FileOptions:
    from hookscope.models import FileOptions

    missing, unexpected = tuple(option.allow_missing), tuple(option.allow_unexpected)
    return FileOptions(option.trust, option.key, missing, unexpected)


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
    option: options.Layers,
) -> ModuleTable:
    """List modules after a pass over noise or inputs by name; a warning has the reason if there was none."""
    from hookscope.inspection.forward import list_modules
    from hookscope.inspection.run import unseen_in_scripts
    from hookscope.models.input_spec import shape_option
    from hookscope.results.network import ModuleTable

    warnings = loaded.warnings
    batch = _shown_input(loaded, shapes, option)
    if batch is None:
        remedy = shape_option(loaded.module)
        warnings += (f"No shapes: the input shape cannot be inferred from the first layer. Give {remedy}.",)
    args, kwargs = (None, None) if batch is None else (batch.args, batch.kwargs)
    rows, failure = list_modules(loaded.module, args, patterns, kwargs=kwargs, ops=option.ops)
    if option.ops:
        warnings += unseen_in_scripts(dict(loaded.module.named_modules()))
    return ModuleTable(loaded.info, rows, failure, warnings, loaded.notes)


def _with_cost(
    table: ModuleTable,
    loaded: LoadedModel,
    real: LoadedModel | None,
    shapes: tuple[NoiseShape, ...],
    option: options.Layers,
) -> ModuleTable:
    """Return the table with costs, or with a warning that has the reason if there are none."""
    from hookscope.errors import ModelError
    from hookscope.inspection.cost import Call, network_cost

    def call_of(model: LoadedModel) -> Call | None:
        batch = _shown_input(model, shapes, option)
        return None if batch is None else Call(model.module, batch.args, batch.kwargs)

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


def _shown_input(loaded: LoadedModel, shapes: tuple[NoiseShape, ...], option: options.Layers) -> Batch | None:
    """Return what shapes are shown for: inputs by name, or noise and what goes with it; None if that is not known."""
    from hookscope.inputs import (
        named_batch,
        named_inputs,
        noise_and_named,
        noise_batch,
        noise_count,
        to_device,
        with_named,
    )
    from hookscope.inspection.device import floating_dtype
    from hookscope.models import example_shape
    from hookscope.models.noise_arguments import noise_arguments
    from hookscope.results.noise_shapes import NoiseShape

    by_name = named_inputs(option.input, loaded.preprocessing)
    if not shapes and all(named_input.record is None for named_input in by_name):
        shape = loaded.example_shape or example_shape(loaded.module, loaded.preprocessing)
        if shape is None:
            return None
        shapes = (NoiseShape(shape),)
    shapes = noise_arguments(shapes, loaded.module, given=[named_input.name for named_input in by_name])
    shapes, by_name = noise_and_named(shapes, by_name, 0, with_others=False)
    if shapes:
        batch = with_named(noise_batch(shapes, 0, loaded.preprocessing.kind), by_name, noise_count(shapes))
    else:
        batch = named_batch(by_name)
    return to_device(batch, _device(loaded), floating_dtype(loaded.module))


def _are_given(images: Images) -> bool:
    return not isinstance(images, list | tuple) or bool(images)


def _device(loaded: LoadedModel) -> str:
    return next((str(parameter.device) for parameter in loaded.module.parameters()), "cpu")


def _several(value: Any) -> list[Any]:
    """Return a single value as a list of one."""
    return list(value) if isinstance(value, list | tuple) else [value]
