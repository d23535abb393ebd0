"""What documents share in a terminal: panels, the network and its inputs in words. No name is read as markup."""

from collections.abc import Sequence
from pathlib import PurePath

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hookscope.reporting.columns import safe_line
from hookscope.results.inputs import CLIP_STEP, InputRecord
from hookscope.results.network import Failure, ModelInfo
from hookscope.text import counted, shape_text

LEVEL_STYLES = {"fail": "bold red", "warn": "yellow", "good": "green", "dim": "dim", "": ""}


def warnings_panel(warnings: Sequence[str]) -> RenderableType:
    """Return the warnings in a frame, one paragraph each; nothing for none."""
    if not warnings:
        return Group()
    lines = Text("\n", overflow="fold").join(safe_line(f"• {warning}") for warning in warnings)
    return Panel(lines, title="Warning" if len(warnings) == 1 else "Warnings", title_align="left", style="yellow")


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
        whole = name if count == 1 else counted(count, "input")
        is_resampled = any(step.startswith("resampled") for record in inputs for step in record.steps)
        how = "resampled" if is_resampled else "as recorded"
        return f"{whole} at {', '.join(f'{rate:,}' for rate in sorted(rates))} Hz ({how})"
    clips = [step for step in first.steps if step.startswith(CLIP_STEP)]
    if count == 1:
        frames = clips[0].partition(",")[0] if clips else ""
        return f"{name}: {frames} ({name}/* for a clip of each picture)" if clips else name
    if clips:
        return f"{counted(count, 'input')}, folders as clips ('FOLDER/*' for a clip of each picture)"
    of_file = [step for step in first.steps if step.startswith(f"input 0 of {count} in the file")]
    if not of_file:
        return f"{counted(count, 'input')}{' of noise' if all(record.is_noise for record in inputs) else ''}"
    hint = of_file[0].partition(" in the file")[2]
    whole = f"{hint[:-1]} of {shape_text((count, *first.shape))})" if hint else ""
    return f"{name.removesuffix('[0]')}: {counted(count, 'input')} of {shape_text(first.shape)}{whole}"
