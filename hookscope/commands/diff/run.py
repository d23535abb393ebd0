"""What `diff` does, for the command line and for Python."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hookscope import options
from hookscope.commands.opening import are_given, file_options, load
from hookscope.errors import UsageError
from hookscope.hooks.interrupts import interrupts_between_blocks
from hookscope.models.names import parse_model
from hookscope.parameters import arg
from hookscope.text import printable

if TYPE_CHECKING:
    from hookscope.commands.diff.compare_weights import Weights
    from hookscope.commands.opening import Model
    from hookscope.inspection.given_inputs import Images
    from hookscope.inspection.session import OnError, OnProgress
    from hookscope.models.construction import LoadedModel
    from hookscope.results.differences import Differences


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
    from hookscope.commands.diff.compare_networks import compare_networks
    from hookscope.commands.diff.compare_weights import compare_weights
    from hookscope.inspection.session import choose_session_loss, open_session
    from hookscope.models.classes import with_classes
    from hookscope.results.runs.reading import is_run

    began = time.perf_counter()
    has_images, given_b = are_given(images), are_given(option.input_b)
    if (option.loss is not None or option.target is not None) and not option.grads:
        raise UsageError(f"{arg('loss')} and {arg('target')} need {arg('grads')}.")
    inputs = ["IMAGE"] * has_images + [name for name in ("input", "input_shape") if options.is_given(option, name)]
    running = [name for name in _RUNNING_OPTIONS if options.is_given(option, name)] + ["input_b"] * given_b
    if any(isinstance(model, str | Path) and is_run(Path(model)) for model in (a, b)):
        loading = [name for name in _LOADING_OPTIONS if options.is_given(option, name)]
        _refuse([*inputs, *running, *loading], "two run directories are compared as they are")
        return _compare_runs(a, b, option)
    names = [str(model) if isinstance(model, str | Path) else None for model in (a, b)]
    option_a, option_b = _options_by_side(names[0], names[1], option)
    if not inputs:
        _refuse(running, "without IMAGE, only weights are compared")
        weights = _weights(a, option_a), _weights(a if _is_same(b) else b, option_b)
        return compare_weights(*weights, maps=option.map, fail_over=option.fail_over)
    if given_b and not has_images:
        _refuse(["input_b"], "without IMAGE both sides get the same noise, or inputs by name")
    loaded, other = (with_classes(model, option) for model in _load_both(a, option_a, b, option_b, option))
    opened = partial(open_session, loaded, option=option, began=began, seed=option.seed)
    session = opened(images)
    loss = option.loss or "projection"
    return compare_networks(
        session,
        other,
        option,
        inputs_b=opened(option.input_b).inputs if given_b else None,
        loss=choose_session_loss(session, loss, option.target, option.output_key) if option.grads else None,
        on_progress=on_progress,
        on_error=on_error,
    )


def _options_by_side(a: str | None, b: str | None, option: options.Diff) -> tuple[options.Diff, options.Diff]:
    """Return the options of A and of B; a weights file and a network get only the options that fit them.

    `a` is MODEL, or None for a module; `b` is MODEL, None or "same".
    """
    from hookscope.checkpoints.fileformat import looks_like_file

    names = (a, a if b == "same" else b)
    chosen = (option.weights, option.weights_b or option.weights)
    is_file = [name is not None and parse_model(name).form == "weights" for name in names]
    reads_file = [is_file[at] or (name is not None and looks_like_file(chosen[at])) for at, name in enumerate(names)]
    if option.weights_b is not None and is_file[1]:
        raise UsageError(
            f"{arg('weights_b')} cannot be used here: B, '{printable(names[1] or '')}', is already a weights file."
        )

    def side(at: int) -> options.Diff:
        other = 1 - at
        fitting = replace(
            option,
            weights="auto" if is_file[at] and not is_file[other] else chosen[at],
            arch=None if is_file[other] and not is_file[at] else option.arch,
        )
        if reads_file[other] and not reads_file[at]:
            return replace(fitting, key=None, allow_missing=(), allow_unexpected=())
        return fitting

    return side(0), side(1)


def _load_both(
    model_a: Model, option_a: options.Diff, model_b: Model, option_b: options.Diff, option: options.Diff
) -> tuple[LoadedModel, LoadedModel]:
    """Load A and B with their options. "same" loads or copies A again; modules are used without loading."""
    from hookscope.inspection.device import choose_device

    if option.device_b is not None:
        choose_device(option.device_b, "device_b")
    is_same = _is_same(model_b)
    if isinstance(model_a, str | Path) or is_same or not isinstance(model_b, str | Path):
        loaded = load(model_a, option_a, option_a)
    else:
        loaded = load(model_a, options.ModelOptions(), options.RunOptions())  # the options about loading are for B
    if is_same and not isinstance(model_a, str | Path):
        return loaded, _copy_for_b(loaded, option)
    named = model_a if is_same else model_b
    device, dtype = option.device_b or option.device, option.dtype_b or option.dtype
    if isinstance(named, str | Path):
        return loaded, load(named, option_b, replace(option_b, device=device, dtype=dtype))
    alone = options.ModelOptions(weights=option.weights_b or "auto")
    run = options.RunOptions(device=option.device_b or "auto", dtype=option.dtype_b, seed=option.seed)
    return loaded, load(named, alone, run)


def _is_same(model: Model) -> bool:
    return isinstance(model, str) and model == "same"  # a module may have an `__eq__` of its own


def _compare_runs(a: Model, b: Model, option: options.Diff) -> Differences:
    from hookscope.commands.diff.compare_runs import compare_runs

    for run in (a, b):
        if not isinstance(run, str | Path) or not Path(run).is_dir():
            shown = repr(printable(str(run), 80)) if isinstance(run, str | Path) else type(run).__name__
            raise UsageError(f"{shown} is not a run directory. Give two runs, or two models.")
    return compare_runs(Path(str(a)), Path(str(b)), maps=option.map, fail_over=option.fail_over)


_LOADING_OPTIONS = ("arch", "weights", "weights_b")
# Options that apply to models that run.
_RUNNING_OPTIONS = (
    *("layer", "ops", "reference", "shadow", "grads", "device_b", "dtype", "dtype_b", "autocast_b", "mode_b"),
    *("threads_b", "edit_b", "compile_b", "output_key"),
)


def _refuse(names: Sequence[str], reason: str) -> None:
    """Raise a UsageError about the first of the options in `names`, unless it is empty."""
    for name in names:
        option = {"IMAGE": name, "mode_b": f"{arg('mode_b')} train"}.get(name, arg(name))
        models = "models" if name in _LOADING_OPTIONS else "models that run over pictures"
        raise UsageError(f"{option} applies to {models}: {reason}.")


def _weights(model: Model, option: options.Diff) -> Weights:
    """Return the weights of a model; a weights file is read without a network."""
    from hookscope.commands.diff.compare_weights import read_weights, weights_of
    from hookscope.models.spec import load_model

    if not isinstance(model, str | Path):
        return weights_of(load_model(model))
    if option.arch is None and option.weights == "auto" and parse_model(str(model)).form == "weights":
        return read_weights(Path(model), file_options(option))
    return weights_of(load(model, option, options.RunOptions(device="cpu", seed=option.seed)))


def _copy_for_b(loaded: LoadedModel, option: options.Diff) -> LoadedModel:
    from hookscope.inspection.device import choose_device, move_to, placement
    from hookscope.models.construction import copied

    if option.weights_b is not None:
        raise UsageError(
            f"{arg('weights_b')} is for a model given by name: load them into a second module, and give that as B."
        )
    other = copied(loaded)
    if option.device_b is not None or option.dtype_b is not None:
        move_to(other, choose_device(option.device_b or str(placement(loaded.module)[0])), option.dtype_b)
    return other
