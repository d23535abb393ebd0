"""`hookscope grads`: run a model forward and backward and show where gradients go."""

from typing import Annotated, Any, Literal

import typer

from hookscope.cli import options
from hookscope.cli import sections as under
from hookscope.cli.run_model import run_model
from hookscope.cli.sections import SectionedCommand


class GradsCommand(SectionedCommand):
    """Ends its help with the rules, which are only loaded then."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write each rule with its meaning and its limits."""
        from hookscope.checks.rules import GRADS_RULES, RULES

        paragraphs = ["Verdicts (`hookscope check --explain RULE` explains a rule):"]
        for name in GRADS_RULES:
            rule = RULES[name]
            limits = (f" Limit {each.grads_name}={each.default:g}: {each.meaning}." for each in rule.limits.values())
            paragraphs.append(f"{name}: {rule.meaning}{''.join(limits)}")
        self.epilog = "\n\n".join(paragraphs)
        super().format_epilog(ctx, formatter)


def grads(
    model: options.Model,
    images: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="IMAGE",
            help="Pictures, tensor files, folders or globs; default: seeded noise.",
        ),
    ] = None,
    loss: Annotated[
        str,
        under.gradients(
            metavar="LOSS",
            help="ce, bce, mse, l1, huber, nll, sum, logit, projection (a seeded random projection of all outputs), or "
            "file.py:function.",
        ),
    ] = "projection",
    target: Annotated[
        str | None,
        under.gradients(
            metavar="TARGET",
            help="A class index or name, or one per input separated by commas; zeros, noise, self (the input), or a "
            "tensor file. Default: the best class for ce, nll and logit, 0.5 for bce, noise for mse, l1 and huber.",
        ),
    ] = None,
    output_key: options.OutputKey = None,
    classes: options.Classes = None,
    multi_label: options.MultiLabel = False,
    layer: options.Layer = None,
    ops: options.Ops = False,
    repeats: options.Repeats = False,
    inputs: Annotated[
        bool, under.gradients("--inputs", help="Also report grad_input: the gradient through the layer alone.")
    ] = False,
    mode: Annotated[
        Literal["eval", "train"], under.gradients(help="train: batch statistics and dropout as in training.")
    ] = "eval",
    weights: options.Weights = "auto",
    arch: options.Arch = None,
    model_arg: options.ModelArg = None,
    trust: options.Trust = False,
    key: options.Key = None,
    allow_missing: options.AllowMissing = None,
    allow_unexpected: options.AllowUnexpected = None,
    input_shape: options.InputShape = None,
    resize: options.Resize = None,
    crop: options.Crop = None,
    mean: options.Mean = None,
    std: options.Std = None,
    max_pixels: options.MaxPixels = None,
    batch_axis: options.BatchAxis = None,
    input: options.NamedInputs = None,  # noqa: A002 - the name of the option
    batch_size: options.BatchSize = 8,
    per_image: Annotated[
        bool,
        under.gradients(
            "--per-image", help="Also differentiate each picture separately; show its gradient norms and their spread."
        ),
    ] = False,
    edit: options.Edits = None,
    limit: Annotated[
        list[str] | None,
        under.gradients(
            "--limit", metavar="NAME=VALUE", help="Threshold of a rule, such as vanishing=1e-6; repeatable."
        ),
    ] = None,
    fail_on: Annotated[
        Literal["fail", "warn"] | None,
        under.gradients(
            "--fail-on",
            metavar="LEVEL",
            help="Exit with 1 if a verdict has this level: fail, or warn for warnings too. Default: never.",
        ),
    ] = None,
    grids: Annotated[bool, under.write("--grids", help="Draw gradients of outputs as grids.")] = False,
    grids_for: options.GridsFor = 4,
    max_channels: options.MaxChannels = None,
    cmap: options.Cmap = "auto",
    scale: options.Scale = "channel",
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    autocast: Annotated[
        Literal["bfloat16", "float16"] | None, under.run(help="Run forward pass and loss under autocast.")
    ] = None,
    seed: options.Seed = 0,
    verify: options.Verify = True,
    save_tensors: Annotated[
        bool, under.write("--save-tensors", help="Also write the gradients themselves, gradients.safetensors.")
    ] = False,
    show: options.Show = False,
    tensorboard: options.TensorBoard = None,
    page: options.Report = None,
    out: options.Out = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    full: options.Full = False,
) -> int:
    """Run MODEL forward and backward; write gradients of layers and parameters, and verdicts.

    \b
    hookscope grads model.pt --loss mse
    hookscope grads resnet34 cat.jpg --loss ce --target 281 --layer conv
    hookscope grads net.py:build photos/ --mode train --per-image
    hookscope grads demo cat.jpg --loss logit --edit 'relu:grad:clamp(min=0)'
    hookscope grads net.py:build --fail-on fail --quiet
    """
    from hookscope import api
    from hookscope.checks.rules import limits_from_text

    limits_from_text(limit or ())
    return run_model(api.grads, locals(), otherwise="noise", has_progress=bool(images))
