"""`hookscope grads`: run a model forward and backward and show where gradients go."""

from typing import Annotated, Any

import typer

from hookscope import options
from hookscope.cli.options import Model, with_options
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


@with_options
def grads(
    model: Model,
    images: Annotated[
        list[str] | None,
        typer.Argument(metavar="IMAGE", help="Pictures, tensor files, folders or globs; default: seeded noise."),
    ] = None,
    *,
    option: options.Grads,
) -> int:
    """Run MODEL forward and backward; write gradients of layers and parameters, and verdicts.

    \b
    hookscope grads model.pt --loss mse
    hookscope grads resnet34 cat.jpg --loss ce --target 281 --layer conv
    hookscope grads net.py:build photos/ --mode train --per-image
    hookscope grads demo cat.jpg --loss logit --edit 'relu:grad:clamp(min=0)'
    hookscope grads net.py:build --fail-on fail --quiet
    """
    from hookscope import commands
    from hookscope.checks.rules import limits_of_grads

    limits_of_grads(option.limit)
    return run_model(commands.grads, model, images or [], option, takes_noise=True)
