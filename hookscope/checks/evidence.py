"""Evidence of a failure: the rows, grids and histograms of just the layers that a rule fails."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from hookscope.checks.measuring import Prepared, measure_layers
from hookscope.checks.settings import CheckSettings
from hookscope.render.grids import draw_for_run, encode_png, grid_name
from hookscope.render.plot_axes import figure_png
from hookscope.render.plots import activation_histograms
from hookscope.render.tables import rows_to_csv
from hookscope.results.activations import Activations, LayerRow
from hookscope.results.check import CheckMeasurements, CheckReport
from hookscope.results.grids import Grid
from hookscope.runs.directory import new_run
from hookscope.runs.serialize import checks_to_json

# Of more layers than this, the first in execution order are drawn; all have their rows. Our choice: whoever looks for
# the cause begins at the first.
_MOST_DRAWN = 12


def write_evidence(
    folder: Path,
    report: CheckReport,
    prepared: Prepared | None,
    settings: CheckSettings,
    measured: CheckMeasurements | None,
) -> None:
    """Write `report.json`, and of the failing layers `rows.csv`, `grids/` and `plots/`; whole or not at all.

    Grids are of the first input, drawn from another forward pass.

    Args:
        folder: Where: nothing yet, an empty folder, or earlier evidence, which is replaced.
        report: The verdict, `evidence` set.
        prepared: The network with its inputs; None if it could not be loaded.
        settings: Those it was prepared with.
        measured: What the verdict is about; None if there is none.

    Raises:
        OutputError: If it cannot be written.
    """
    rows = failing_rows(report, measured.forward if measured is not None else None)
    grids: Sequence[Grid] = ()
    with new_run(folder, "--evidence") as run:
        (run.path / "report.json").write_text(checks_to_json([report]), encoding="utf-8")
        if rows and prepared is not None and measured is not None and measured.forward is not None:
            forward = replace(measured.forward, rows=rows, uncalled=())
            (run.path / "rows.csv").write_text(rows_to_csv(forward), encoding="utf-8")
            grids = _draw(run.path, prepared, settings, forward)
        layers = [row.label for row in rows]
        drawn = [asdict(grid) for grid in grids]
        run.finish({"verb": "check", "checkpoint": report.checkpoint, "layers": layers, "grids": drawn})


def failing_rows(report: CheckReport, forward: Activations | None) -> tuple[LayerRow, ...]:
    """Return the rows of the layers that findings of level "fail" are about: their outputs, or their parameters."""
    rows = forward.rows if forward is not None else ()
    names = {row.label for row in rows} | {row.layer for row in rows}
    places = {finding.where for finding in report.findings if finding.level == "fail" and finding.where}
    # "layer1.0.conv1.weight" is about layer1.0.conv1, "weight" about the whole model.
    about = {place if place in names else place.rpartition(".")[0] or "(model)" for place in places}
    return tuple(row for row in rows if row.label in about or (row.layer or "(model)") in about)


def _draw(folder: Path, prepared: Prepared, settings: CheckSettings, forward: Activations) -> list[Grid]:
    rows = forward.rows[:_MOST_DRAWN]
    (folder / "plots").mkdir()
    figure = activation_histograms(rows, forward.model.name)
    (folder / "plots" / "histograms.png").write_bytes(figure_png(figure))
    labels = {row.label for row in rows}
    seen = measure_layers(prepared, settings, sorted(labels))
    maps = [each for each in seen.feature_maps if each.label in labels]
    if maps:
        (folder / "grids").mkdir()
    grids = []
    for each in maps:
        path = f"grids/{grid_name(each, len(seen.rows))}"
        picture, grid = draw_for_run(each, path, input_name=seen.inputs[each.input_index].name)
        (folder / path).write_bytes(encode_png(picture))
        grids.append(grid)
    return grids
