"""The commands that measure networks and write a run directory."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import takewhile
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import typer

from hookscope import options
from hookscope.cli.ci_output import ci_output, refuse_one_file, write_each
from hookscope.cli.console import print_error
from hookscope.cli.run import Run, check_early, report_all, start_run
from hookscope.cli.sections import SectionedCommand
from hookscope.errors import EXIT_CHECK_FAILED, EXIT_DONE, HookscopeError, OutputError, UnfitInputError, UsageError
from hookscope.parameters import arg
from hookscope.text import once_per_file, printable, safe_text

if TYPE_CHECKING:
    from hookscope.results.activations import Activations
    from hookscope.results.attention import Attention
    from hookscope.results.attributions import Attributions
    from hookscope.results.gradients import Gradients
    from hookscope.results.survey import Survey


def activations(model: str, images: Sequence[str] = (), *, option: options.Activations) -> int:
    """Run MODEL over pictures; write feature-map grids, shapes and activation statistics.

    \b
    hookscope activations demo cat.jpg --layer conv
    hookscope activations resnet34 cat.jpg --layer 'layer[34].*' --layer '!downsample'
    hookscope activations net.py:build photos/ --model-arg width=2 --resize 64 --crop 64
    hookscope activations model.pt cat.jpg --arch resnet18 --layer type:relu --json
    hookscope activations resnet34 cat.jpg --cost
    hookscope activations net.py:build --input wave=speech.npy --input rate=16000
    """
    from hookscope.commands.activations.run import activations as run_activations

    return _over_inputs(run_activations, model, images, option)


def grads(model: str, images: Sequence[str] = (), *, option: options.Grads) -> int:
    """Run MODEL forward and backward; write gradients of layers and parameters, and verdicts.

    \b
    hookscope grads model.pt --loss mse
    hookscope grads resnet34 cat.jpg --loss ce --target 281 --layer conv
    hookscope grads net.py:build photos/ --mode train --per-image
    hookscope grads demo cat.jpg --loss logit --edit 'relu:grad:clamp(min=0)'
    hookscope grads net.py:build --fail-on fail --quiet
    """
    from hookscope.commands.grads.run import grads as run_grads
    from hookscope.rules import limits_of_grads

    limits_of_grads(option.limit)
    return _over_inputs(run_grads, model, images, option)


class GradsCommand(SectionedCommand):
    """Ends its help with the rules, which are only loaded then."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write each rule with its meaning and its limits."""
        from hookscope.rules import GRADS_RULES, RULES

        paragraphs = ["Verdicts (`hookscope check --explain RULE` explains a rule):"]
        for name in GRADS_RULES:
            rule = RULES[name]
            limits = (
                f" Limit {limit.grads_name}={limit.default:g}: {limit.meaning}." for limit in rule.limits.values()
            )
            paragraphs.append(f"{name}: {rule.meaning}{''.join(limits)}")
        self.epilog = "\n\n".join(paragraphs)
        super().format_epilog(ctx, formatter)


def attribute(model: str, images: Sequence[str] = (), *, option: options.Attribute) -> int:
    """Draw where MODEL looks: which places of a picture, signal or volume the score for a class comes from.

    \b
    hookscope attribute demo cat.jpg
    hookscope attribute resnet34 photos/ --top 3 --report looks.html
    hookscope attribute demo cat.jpg --target 'tabby-tiger cat' --method layer-cam
    hookscope attribute model.pt cat.jpg --target 281 --layer layer3 --layer layer4
    """
    from hookscope.commands.attribute.run import attribute as run_attribute

    return _over_inputs(run_attribute, model, images, option)


def attention(model: str, images: Sequence[str] = (), *, option: options.Attention) -> int:
    """Show what the attention of MODEL looks at: maps on the photograph, and numbers of every block and head.

    \b
    hookscope attention vit_b_16 cat.jpg
    hookscope attention timm:vit_small_patch14_reg4_dinov2 cat.jpg --query cls --query register:1
    hookscope attention swin_t cat.jpg --query 120,80 --block 3 --head 0
    hookscope attention vit_b_16 cat.jpg --rollout --report attention.html
    """
    from hookscope.commands.attention.run import attention as run_attention

    return _over_inputs(run_attention, model, images, option)


def _over_inputs(
    function: "Callable[..., Activations | Gradients | Attributions | Attention]",
    model: str,
    images: Sequence[str],
    option: "options.Activations | options.Grads | options.Attribute | options.Attention",
) -> int:
    """Run a function of `hookscope.commands`; show and save its result, a partial one too if the network raised."""
    from hookscope.commands.opening import images_or_demo
    from hookscope.models.names import check_model

    verb, takes_noise = function.__name__, isinstance(option, options.Grads)
    images = images_or_demo(model, images, option)
    if not (takes_noise or images or option.input or option.input_shape):
        check_model(model)
        how = "name a picture, a tensor file or a folder, or give --input-shape for noise"
        raise UsageError(f"Missing IMAGE: {how}. See `hookscope {verb} --help`.")
    check_early(option, images, model)
    run = start_run(
        verb, [model], option, images, "noise" if takes_noise or (option.input_shape and not option.input) else "named"
    )
    drawn = option if isinstance(option, options.GridOptions) else None
    asked = replace(drawn, grids_for=0) if drawn and not drawn.grids else option
    with run.progress(shown=not takes_noise or bool(images)) as advance:
        from hookscope.inspection.backward import PassError
        from hookscope.inspection.forward import ForwardError
        from hookscope.reporting.grids import check_cmap

        if drawn:
            check_cmap(drawn.cmap)
        try:
            result = function(model, images, option=asked, on_progress=advance, on_error=run.failures.append)
        except (ForwardError, PassError) as error:
            result = error.inspection
            if all(getattr(fault, "reason", None) != str(error) for fault in run.failures):  # not reported for an input
                run.failures.append(error)
    if result.inputs:
        run.show(result)
    folder = run.save(result) if result.inputs and result.provenance else None
    levels = {"fail": ("fail",), "warn": ("fail", "warn")}.get(getattr(option, "fail_on", None) or "", ())
    failed = any(verdict.level in levels for verdict in getattr(result, "verdicts", ()))
    return run.end(result, folder, EXIT_CHECK_FAILED if failed else EXIT_DONE)


def diff(a: str, b: str, images: Sequence[str] = (), *, option: options.Diff) -> int:
    """Run A, then B, on the same IMAGEs; report where they begin to differ and how the difference grows.

    \b
    hookscope diff old.pt new.pt cat.jpg
    hookscope diff resnet34 same cat.jpg --dtype-b bfloat16 --reference float64
    hookscope diff resnet50 timm:resnet50 photos/ --shadow
    hookscope diff resnet34 same cat.jpg --input-b cropped.jpg
    hookscope diff a.pt b.pt photos/ --fail-over 'rel>1e-3' --fail-over 'top1<1'
    hookscope diff a.pt b.safetensors
    hookscope diff hookscope-runs/before hookscope-runs/after
    """
    from hookscope.commands.diff.describe import differences_as_check
    from hookscope.commands.diff.run import diff as run_diff
    from hookscope.results.runs.reading import is_run

    has_inputs = bool(images or option.input or option.input_shape)
    are_runs = any(is_run(Path(name)) for name in (a, b))
    check_early(option, images, *(() if are_runs else (a, a if b == "same" else b)))
    otherwise = ("inputs" if option.input else "noise") if has_inputs else Path(b).stem
    models = [a, b] if has_inputs else [a]
    refuse_one_file(option)
    ci = ci_output(option)
    run = start_run("diff", models, option, images, otherwise, takes_stdout=ci.format == "markdown")
    with run.progress() as advance:
        try:
            result = run_diff(a, b, images, option=option, on_progress=advance, on_error=run.failures.append)
        except HookscopeError as error:
            said = {fault.reason if isinstance(fault, UnfitInputError) else str(fault) for fault in run.failures}
            return report_all([*run.failures, *([] if str(error) in said else [error])])
    run.show(result)
    folder = run.save(result)
    checked = [differences_as_check(result, tuple(option.fail_over))]
    ci.print(checked)
    run.failures.extend(write_each(ci.writers(checked)))
    return run.end(result, folder, EXIT_CHECK_FAILED if result.exceeded else EXIT_DONE)


def history(files: str, images: Sequence[str] = (), *, option: options.History) -> int:
    """Follow a training by its checkpoints: what changed, and which of FILES is the first to break a rule.

    Files are sorted by the epochs or steps that they store, else in natural order of names. The exit code is 0 if no
    file fails a rule and 1 if one does; other codes mean that a file could not be read or run.

    \b
    hookscope history 'ckpt/epoch_*.pt'
    hookscope history runs/ckpt --key ema --bisect
    hookscope history 'ckpt/*.pt' photos/ --arch resnet34 --report history.html
    hookscope history 'ckpt/*.safetensors' --arch net.py:build --json
    """
    from hookscope.checkpoints.fileformat import WEIGHTS_SUFFIXES, is_weights_folder
    from hookscope.commands.history.run import history as run_history

    several: str | list[str] = files
    if os.path.isfile(files) or is_weights_folder(Path(files)):  # noqa: PTH113 never raises
        # A glob that the shell has expanded.
        further = [
            *takewhile(lambda name: name.lower().endswith(WEIGHTS_SUFFIXES) or is_weights_folder(Path(name)), images)
        ]
        if not further:
            raise UsageError(
                f"A history takes several files, and '{printable(files)}' is one: name more, a folder, or a glob."
            )
        several, images = [files, *further], images[len(further) :]
    check_early(option, images)
    folder, stem = _place_of(several)
    run = start_run("history", [folder], option, images, stem)
    with run.progress(of="files") as advance:
        result = run_history(several, images, option=option, on_progress=advance)
    run.show(result)
    for error in once_per_file((PurePath(file.name).name, file.error) for file in result.unreadable):
        print_error(error)
    return run.end(result, run.save(result), result.exit_code)


def _place_of(files: str | list[str]) -> tuple[str, str]:
    """Return the folder of the files and the common beginning of their names, to name the run directory."""
    if not isinstance(files, str):
        folder, names = Path(files[0]).parent, [Path(file).name for file in files]
        same = takewhile(lambda letters: len({*letters}) == 1, zip(*names, strict=False))
        files = str(folder / f"{''.join(letters[0] for letters in same)}*")
    path = Path(files)
    if os.path.isdir(files):  # noqa: PTH112 never raises
        return path.resolve().name or "files", "weights"
    stem = re.split(r"[*?\[]", path.name)[0].rstrip("_-.")
    return path.parent.resolve().name or "files", stem or "weights"


def survey(model: str | None = None, images: Sequence[str] = (), *, option: options.Survey) -> int:
    """Measure the channels of MODEL over a data set: dead channels, value ranges, what excites each, features.

    With the same batch size and threads, results are the same bit for bit for any number of processes. Finished chunks
    stay in OUT.chunks until the survey is complete.

    \b
    hookscope survey resnet18 photos/ --layer type:relu
    hookscope survey resnet18 imagenet/val --by-class --report survey.html
    hookscope survey resnet18 photos/ --layer avgpool --features features.safetensors
    torchrun --nproc-per-node 2 -m hookscope survey resnet18 photos/
    hookscope survey resnet18 photos/ --shard 3/8 --out runs/a
    hookscope survey --merge runs/a
    """
    from hookscope.commands.opening import images_or_demo
    from hookscope.commands.survey.run import survey as run_survey
    from hookscope.models.names import check_model

    if option.merge is not None:
        return _merge(option.merge, option, takes_inputs=bool(model or images))
    images = images_or_demo(model, images, option)
    if not model:
        raise UsageError("Missing MODEL and INPUT, or --merge DIR. See `hookscope survey --help`.")
    if not images:
        check_model(model)
        raise UsageError("Missing INPUT: name a folder or files. See `hookscope survey --help`.")
    if option.shard is not None and (option.page or option.show or option.json or option.tensorboard):
        raise UsageError("--shard only measures a part: give --report, --show, --tensorboard and --json with --merge.")
    check_early(option, [] if option.by_class else images, model)
    run = start_run("survey", [model], option, images, "inputs")
    chunks = _chunk_folder(run.folder)
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        with run.progress(shown=is_first) as advance:
            result = run_survey(model, images, option=option, chunks=chunks, on_progress=advance)
    except BaseException as error:
        if is_first and not isinstance(error, OutputError):
            _say_how_to_go_on(chunks)
        raise
    if result is not None:
        return _finish(run, result, option)
    if option.shard is not None and not option.quiet:
        run.tables.print(f"Chunks of this shard: {safe_text(str(chunks))}", soft_wrap=True)
    return EXIT_DONE


def _merge(folder: Path, option: options.Survey, *, takes_inputs: bool) -> int:
    """Merge the chunks of shards that were measured with `--out` FOLDER, into a run of that name."""
    from hookscope.commands.survey.plan import ChunkFolder
    from hookscope.commands.survey.run_survey import merge_survey
    from hookscope.results.runs.directory import check_target

    kinds = (options.OutputOptions, options.StrictOption, options.ShowOption, options.TensorBoardOption)
    used = {"merge", "crops", *(field.name for kind in kinds for field in fields(kind))} - {"out"}
    changed = [name for field in fields(option) if options.is_given(option, name := field.name) and name not in used]
    written = [arg(f"no_{name}" if getattr(option, name) is False else name) for name in changed]
    unused = "MODEL and no inputs" if takes_inputs else next(iter(written), "")
    if unused:
        raise UsageError(f"--merge DIR, the --out of the shards, takes no {unused}: shards are measured already.")
    check_target(folder, "--merge")
    option = replace(option, out=folder)
    return _finish(start_run("survey", (), option), merge_survey(ChunkFolder(_chunk_folder(folder))), option)


def _finish(run: Run, result: "Survey", option: options.Survey) -> int:
    from hookscope.commands.survey.plan import ChunkFolder

    run.show(result)
    folder = run.save(result, crops=option.crops)
    ChunkFolder(_chunk_folder(run.folder)).remove()
    if result.features is not None and not option.quiet:
        run.tables.print(f"Inputs of the features: {safe_text(result.features.files[-1])}", soft_wrap=True)
    for unusable in result.unusable:
        print_error(unusable.message)
    return run.end(result, folder, result.exit_code)


def _chunk_folder(run: Path) -> Path:
    return run.with_name(f"{run.name}.chunks")


def _say_how_to_go_on(chunks: Path) -> None:
    count = sum(path.stem.isdecimal() for path in chunks.glob("*.json")) if chunks.is_dir() else 0
    if count:
        noun = "chunk waits" if count == 1 else "chunks wait"
        typer.echo(
            f"hookscope: {count} finished {noun} in {safe_text(str(chunks))}: the same command with --resume goes on.",
            err=True,
        )
