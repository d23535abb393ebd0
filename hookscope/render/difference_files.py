"""The run directory of `diff`: rows as CSV and JSON, and the plot over depth."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hookscope.errors import UsageError
from hookscope.render.difference_plots import differences_over_depth
from hookscope.render.plot_axes import figure_png
from hookscope.render.tables import differences_to_csv, weights_to_csv
from hookscope.render.weights_text import without_gradients
from hookscope.results.differences import Differences
from hookscope.runs.differences import PLOT, differences_to_dict
from hookscope.runs.directory import new_run
from hookscope.runs.serialize import provenance_to_dict
from hookscope.text import safe_text, strict_json

# What the record says of inputs that only a comparison in lockstep prepares.
_OF_INPUTS = ("preprocessing", "named_inputs", "unusable_inputs", "patterns")


@dataclass(frozen=True, slots=True)
class SavedDifferences:
    """A run directory that was written, and the files in it besides `run.json`."""

    folder: Path
    files: tuple[str, ...]

    @property
    def last_line(self) -> str:
        """What the command says of it in the end."""
        return f"{', '.join(self.files)} and run.json are in {safe_text(str(self.folder))}"


def save_differences(result: Differences, path: str | Path, *, command: str = "") -> SavedDifferences:
    """Write a result as `hookscope diff` does: whole or not at all, and over nothing but an earlier run.

    Raises:
        UsageError: If there is nothing to save.
        OutputError: If something cannot be written.
    """
    provenance = result.provenance
    if provenance is None:
        raise UsageError("This comparison was not made of a run, so it cannot be saved as one.")
    document = differences_to_dict(result)
    with new_run(Path(path)) as run:
        (run.path / "diff.json").write_text(strict_json(document), encoding="utf-8")
        names = _write_tables(run.path, result)
        if result.way != "weights":
            (run.path / PLOT).write_bytes(figure_png(differences_over_depth(result)))
            names.append(PLOT)
        made = provenance_to_dict(provenance)
        record: dict[str, Any] = {
            "verb": "diff",
            "command": command,
            **{name: value for name, value in made.items() if result.way == "lockstep" or name not in _OF_INPUTS},
            **provenance.settings,
            **{name: document[name] for name in ("a", "b", "way", "inputs", "births", "outputs", "exceeded")},
            **{name: document[name] for name in ("reference", "warnings", "notes", "seed", "timings")},
        }
        run.finish(record)
    return SavedDifferences(Path(path), tuple(names))


def _write_tables(folder: Path, result: Differences) -> list[str]:
    is_of_weights = result.way == "weights"
    texts = {"diff.csv": weights_to_csv(result) if is_of_weights else differences_to_csv(result)}
    if result.gradients:
        texts["gradients.csv"] = differences_to_csv(without_gradients(result))
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [*texts, "diff.json"]
