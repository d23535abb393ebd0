"""Lines on stderr: the last one says how many problems there were, and what could not be judged."""

import sys
from dataclasses import dataclass

from hookscope.parameters import arg
from hookscope.results.training import TrainingFinding, TrainingStep, WatchedStep
from hookscope.text import counted, in_words, safe_text

# For a script with fewer steps than `--every`, the line suggests a value that measures about this many.
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

    def add_step(self, step: TrainingStep) -> None:
        """Count a step."""
        self.steps += 1
        self.losses += step.loss is not None
        self.gradients += step.gradient_norm is not None

    def add_watched(self, step: WatchedStep) -> None:
        """Count a step that was measured in full."""
        self.in_full += 1
        self.activations += bool(step.layers)

    def add_verdict(self, verdict: TrainingFinding) -> None:
        """Count a verdict, unless it ends an earlier one."""
        if verdict.state == "began":
            self.first = self.first or verdict
            self.problems += 1


def closing_line(watched: Watched, *, folder: str | None, started: int) -> str:
    """Return the line; `folder` is `--out`, and `started` the number of processes that were not watched."""
    sentences = [*_judged(watched)]
    if started:
        was = "was" if started == 1 else "were"
        processes = "process" if started == 1 else "processes"
        sentences.append(f"{started:,} other {processes} that the script started {was} not watched.")
    if watched.steps:
        sentences.append(f"As a page: hookscope report {folder}" if folder else f"For a page: {arg('out')} DIR.")
    return " ".join(sentences)


def _judged(watched: Watched) -> list[str]:
    if not watched.steps:
        return ["No step was watched."]
    in_full = f" ({watched.in_full:,} measured in full)" if watched.in_full else ""
    steps = f"{counted(watched.steps, 'step')}{in_full}"
    if watched.first is None:
        verdict = f"No problems in {steps}."
    else:
        at = f"step {watched.first.step:,}: {watched.first.rule}"
        where = f", at {at}." if watched.problems == 1 else f"; first at {at}."
        verdict = f"{counted(watched.problems, 'problem')} in {steps}{where}"
    counts = {
        "the loss": watched.losses,
        "gradients": watched.gradients,
        "activations": watched.activations or not watched.in_full,
    }
    missing = [quantity for quantity, count in counts.items() if not count]
    left_out = [f"Not judged: {in_words(missing)}."] if missing else []
    if watched.in_full:
        return [verdict, *left_out]
    every = max(1, watched.steps // _SUGGESTED_STEPS)
    unmeasured = (
        f"None was measured in full, so activations, weights and updates were not judged: try {arg('every')} {every}."
    )
    return [verdict, unmeasured, *left_out]


def say(line: str, name: str = "hookscope watch") -> None:
    """Print a line of the watch on stderr."""
    try:
        sys.stderr.write("\n".join(map(safe_text, f"{name}: {line}".split("\n"))) + "\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # closed, or none
        return
