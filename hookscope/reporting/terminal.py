"""What documents share in a terminal: panels, the network and its inputs in words. No name is read as markup."""

from collections.abc import Sequence
from pathlib import PurePath

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hookscope.reporting.columns import safe_line
from hookscope.reporting.document import Level
from hookscope.results.activations import Verification
from hookscope.results.inputs import CLIP_STEP, InputRecord
from hookscope.results.network import Failure, ModelInfo
from hookscope.text import shape_text

LEVEL_STYLES = {"fail": "bold red", "warn": "yellow", "good": "green", "dim": "dim", "": ""}


def warnings_panel(warnings: Sequence[str]) -> RenderableType:
    """Return the warnings in a frame, one paragraph each; nothing for none."""
    if not warnings:
        return Group()
    lines = Text("\n", overflow="fold").join(safe_line(f"• {warning}") for warning in warnings)
    return Panel(lines, title="Warning" if len(warnings) == 1 else "Warnings", title_align="left", style="yellow")


def verified(
    verification: Verification | None, *, with_loss: bool = False, is_edited: bool = False
) -> list[tuple[str, Level]]:
    """Return whether hooks changed what the network computes, before edits: "verified: the same output as …"."""
    if verification is None:
        return []
    compared = "output, loss and parameter gradients" if with_loss else "output"
    if verification.status == "same":
        return [(f"verified: the same {compared} as without hooks{', before the edits' * is_edited}", "good")]
    if verification.status == "not repeatable":
        return [(f"not verified: two passes without hooks differ as well ({verification.difference})", "warn")]
    return [("not the same as without hooks: see the warning", "fail")]


def failure_panel(failure: Failure) -> RenderableType:
    """Return where and how the forward pass raised, in a frame."""
    grid = Table.grid(padding=(0, 1))
    facts = {
        "module": f"{failure.layer or '(model)'} ({failure.kind})",
        "inputs": ", ".join(failure.input_shapes) or "none",
        "error": failure.error,
    }
    for name, words in facts.items():
        grid.add_row(name, safe_line(words, overflow="fold"))
    return Panel(grid, title="The model raised", title_align="left", style="red")


def about_lines(about: Sequence[tuple[str, Level]]) -> list[Text]:
    """Return lines with their levels, bold."""
    return [safe_line(words, style=LEVEL_STYLES[level] or "bold", overflow="fold") for words, level in about]


def model_subject(model: ModelInfo, inputs: str, dtype: str, device: str) -> list[tuple[str, Level]]:
    """Return the model, its weights and its inputs in one line, and a warning about random weights."""
    unusual = [name for name, usual in ((dtype, ("float32", "none")), (device, ("cpu",))) if name not in usual]
    lines: list[tuple[str, Level]] = [
        (" · ".join((model_words(model), f"weights: {model.weights}", inputs, *unusual)), "")
    ]
    if model.random:
        lines.append(("RANDOM WEIGHTS: this network is untrained, nothing here was learned", "fail"))
    return lines


def model_words(model: ModelInfo, *more: str) -> str:
    """Return the model and its class: "resnet18 (ResNet)", "tiny.pt (net.py:tiny, Sequential)"."""
    is_named = model.name.lower() == model.kind.lower() or model.name.endswith(f" {model.kind}")  # "x.pt (no network)"
    details = [*([] if is_named else [model.kind]), *more]
    if not details:
        return model.name
    if model.name.endswith(")"):
        return f"{model.name[:-1]}, {', '.join(details)})"
    return f"{model.name} ({', '.join(details)})"


def inputs_words(inputs: Sequence[InputRecord]) -> str:
    """Return the name of the only input, or how many there are.

    Inputs of one tensor file have their shape too, and recordings their sampling rate.
    """
    first, count = inputs[0], len(inputs)
    name = PurePath(first.name).name
    rates = {record.sampling_rate for record in inputs if record.sampling_rate is not None}
    if rates:
        whole = name if count == 1 else f"{count} inputs"
        is_resampled = any(step.startswith("resampled") for record in inputs for step in record.steps)
        how = "resampled" if is_resampled else "as recorded"
        return f"{whole} at {', '.join(f'{rate:,}' for rate in sorted(rates))} Hz ({how})"
    clips = [step for step in first.steps if step.startswith(CLIP_STEP)]
    if count == 1:
        frames = clips[0].partition(",")[0] if clips else ""
        return f"{name}: {frames} ({name}/* for a clip of each picture)" if clips else name
    if clips:
        return f"{count} inputs, folders as clips ('FOLDER/*' for a clip of each picture)"
    of_file = [step for step in first.steps if step.startswith(f"input 0 of {count} in the file")]
    if not of_file:
        return f"{count} inputs{' of noise' if all(record.is_noise for record in inputs) else ''}"
    hint = of_file[0].partition(" in the file")[2]
    whole = f"{hint[:-1]} of {shape_text((count, *first.shape))})" if hint else ""
    return f"{name.removesuffix('[0]')}: {count} inputs of {shape_text(first.shape)}{whole}"
