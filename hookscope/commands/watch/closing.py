"""Lines on stderr: the last one says how many problems there were, and what could not be judged."""

import shlex
import sys
from dataclasses import dataclass

from hookscope.parameters import arg
from hookscope.results.training import TrainingFinding, TrainingRecord, TrainingStart, TrainingStep, WatchedStep
from hookscope.text import counted, in_words, safe_text

# For a script with fewer steps than `--every`, the line suggests a value that measures about this many steps.
_SUGGESTED_STEPS = 10


@dataclass(slots=True)
class Watched:
    """Counts over all trainings of a script: steps, those with loss, gradients and activations, and verdicts."""

    steps: int = 0
    losses: int = 0
    gradients: int = 0
    in_full: int = 0
    activations: int = 0
    first: TrainingFinding | None = None  # the first verdict
    problems: int = 0
    has_blind_spots: bool = False
    has_failed: bool = False  # hookscope itself failed, and sees no further steps

    def add(self, record: TrainingRecord) -> None:
        """Count a record; a verdict that ends is not counted."""
        if isinstance(record, TrainingStep):
            self.steps += 1
            self.losses += record.loss is not None
            self.gradients += record.gradient_norm is not None
        elif isinstance(record, WatchedStep):
            self.in_full += 1
            self.activations += bool(record.layers)
        elif isinstance(record, TrainingFinding) and record.state == "began":
            self.first = self.first or record
            self.problems += 1
        elif isinstance(record, TrainingStart):
            self.has_blind_spots |= bool(record.notes)


def closing_line(watched: Watched, *, folder: str | None, started: int) -> str:
    """Return the line; `folder` is `--out`, and `started` the number of processes that were not watched."""
    sentences = [_verdict(watched), *not_judged(watched)]
    if started:
        was = "was" if started == 1 else "were"
        others = counted(started, "other process", "other processes")
        sentences.append(f"{others} that the script started {was} not watched.")
    if watched.steps:
        page = f"As a page: hookscope report {shlex.quote(folder)}" if folder else f"For a page: {arg('out')} DIR."
        sentences.append(page)
    return " ".join(sentences)


def _verdict(watched: Watched) -> str:
    if not watched.steps:
        return "No step was watched."
    in_full = f" ({watched.in_full:,} measured in full)" if watched.in_full else ""
    steps = f"{counted(watched.steps, 'step')}{in_full}"
    if watched.first is None:
        return f"No problems in {'what was seen of ' * (watched.has_blind_spots or watched.has_failed)}{steps}."
    at = f"step {watched.first.step:,}: {watched.first.rule}"
    where = f", at {at}." if watched.problems == 1 else f"; first at {at}."
    return f"{counted(watched.problems, 'problem')} in {steps}{where}"


def not_judged(watched: Watched) -> list[str]:
    """Return sentences on the quantities that no step had."""
    if not watched.steps:
        return []
    counts = {
        "the loss": watched.losses,
        "gradients": watched.gradients,
        "activations": watched.activations or not watched.in_full,
    }
    missing = [quantity for quantity, count in counts.items() if not count]
    if watched.losses and watched.first is None:
        missing.append("whether the loss falls")  # no rule looks at that
    left_out = [f"Not judged: {in_words(missing)}."] if missing else []
    if watched.in_full:
        return left_out
    every = max(1, watched.steps // _SUGGESTED_STEPS)
    unmeasured = (
        f"None was measured in full, so activations, weights and updates were not judged: try {arg('every')} {every}."
    )
    return [unmeasured, *left_out]


def say(line: str, name: str = "hookscope watch") -> None:
    """Print a line of the watch on stderr."""
    try:
        sys.stderr.write("\n".join(map(safe_text, f"{name}: {line}".split("\n"))) + "\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # stderr is closed, or None
        return
