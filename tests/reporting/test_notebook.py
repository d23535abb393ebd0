import base64
import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from IPython.core.formatters import DisplayFormatter
from PIL import Image

import hookscope
from hookscope.commands.conversion import summary
from hookscope.reporting.columns import sparkline
from hookscope.reporting.grids import draw_grid
from hookscope.results.activations import Activations, FeatureMaps
from hookscope.results.check import CheckReport
from hookscope.results.differences import Differences
from hookscope.results.distribution import distribution_of
from hookscope.results.gradients import Gradients
from tests.commands.attention.small_networks import SmallTransformer
from tests.reporting.conftest import FAILURE, GRADIENTS, INSPECTION, printed
from tests.reporting.html_page import Page

MAPS = INSPECTION.feature_maps[0]


def shown(result: Activations | Gradients | Differences | CheckReport | FeatureMaps) -> Page:
    """Return what IPython would show of a result."""
    data, _ = DisplayFormatter().format(result, include={"text/html"})
    return Page(data["text/html"])


def decoded(source: str | None) -> Image.Image:
    kind, _, data = (source or "").partition(",")
    assert kind == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data, validate=True)))


def test_feature_maps_show_the_grid_and_say_what_it_is() -> None:
    [picture] = shown(MAPS).all("img")
    assert picture.attributes["alt"] == "Grid of conv1 (Conv2d), input 0, shape 64x112x112, 64 channels"
    assert np.array_equal(
        np.asarray(decoded(picture.attributes["src"]).convert("RGB")), np.asarray(draw_grid(MAPS).convert("RGB"))
    )


def test_an_inspection_shows_a_row_for_every_row_and_every_number_of_the_terminal() -> None:
    rows = tuple(replace(INSPECTION.rows[0], index=index, layer=f"block.{index}") for index in range(200))
    table, *_ = shown(replace(INSPECTION, rows=rows)).tables()
    header, *lines = table
    assert header[:9] == ["#", "layer", "type", "shape", "parameters", "mean", "std", "min", "median"]
    assert [line[:6] for line in lines] == [
        [str(index), f"block.{index}", "Conv2d", "1x64x112x112", "9,408", "0.1250"] for index in range(200)
    ]


def test_it_says_what_the_terminal_says() -> None:
    page = shown(replace(INSPECTION, failure=FAILURE))
    for sentence in (
        "RuntimeError: expected 32 channels",
        "Egyptian cat 0.40",
        "Without a row: 10",
        "zero everywhere.",
    ):
        assert sentence in "".join(page.words)
    assert "aux7.fc" in "".join(page.words)  # every one of them, however long the list


def test_a_histogram_keeps_its_blanks() -> None:
    distribution = distribution_of(np.repeat([0.0, 8.0], 50))
    row = replace(INSPECTION.rows[0], activation=replace(INSPECTION.rows[0].activation, distribution=distribution))
    header, line = shown(replace(INSPECTION, rows=(row,))).tables()[0]
    assert line[header.index("hist")] == sparkline(distribution) == "█      █"
    page = shown(INSPECTION)
    assert all("monospace" in (table.attributes["style"] or "") for table in page.all("table"))
    assert all("border-spacing" in (table.attributes["style"] or "") for table in page.all("table"))
    # JupyterLab's style sheet sets white-space on cells, whatever their table has.
    assert all("white-space:pre" in (cell.attributes["style"] or "") for cell in (*page.all("td"), *page.all("th")))


def test_a_cell_of_sixty_five_rows_is_below_sixty_kilobytes() -> None:
    rows = tuple(replace(INSPECTION.rows[0], index=index, layer=f"block.{index}") for index in range(65))
    assert len(replace(INSPECTION, rows=rows)._repr_html_().encode()) < 60_000


def test_a_gradient_inspection_shows_both_tables_loss_and_verdicts() -> None:
    page = shown(GRADIENTS)
    names = [[line[1] for line in table[1:]] for table in page.tables()[:2]]
    assert [len(name) for name in names] == [len(GRADIENTS.gradients), len(GRADIENTS.parameters)]
    assert names[0][0] == "conv1"
    assert names[1][0] == "conv1.weight"
    assert "loss mse = 1.062" in "".join(page.words)
    assert "FAIL vanishing-gradient at conv1.weight" in "".join(page.words)


def test_results_with_tables_leave_their_picture_to_show() -> None:
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 2)
    )
    inputs = torch.rand(2, 3, 8, 8)
    for result in (
        hookscope.activations(network, inputs, grids_for=2),
        hookscope.grads(network, inputs),
        hookscope.diff(network, "same", inputs, edit_b="0:output:scale(2)"),
        hookscope.survey(network, inputs),
    ):
        page = shown(result)
        assert page.all("img") == []
        assert ".show() draws the picture." in page.words


def test_the_answer_stands_above_tables_and_pictures_as_text() -> None:
    torch.manual_seed(0)
    deep = torch.nn.Sequential(*(part for _ in range(12) for part in (torch.nn.Linear(8, 8), torch.nn.Sigmoid())))
    broken = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with torch.no_grad():
        broken[0].bias[0] = torch.nan
    results = {
        "FAIL vanishing-gradient": (hookscope.grads(deep, torch.rand(2, 8)), "<table"),
        "No problems found in the gradients (12 rules).": (
            hookscope.grads(torch.nn.Linear(2, 2), torch.rand(2, 2)),
            "<table",
        ),
        "Sequential: failed": (hookscope.check(broken, select="non-finite-*", input_shape=(1, 2)), "<img"),
    }
    for answer, (result, below) in results.items():
        html = result._repr_html_()
        assert 0 < html.index(answer) < html.index(below), answer


def test_attention_shows_the_overview_of_each_input(tmp_path: Path) -> None:
    torch.manual_seed(0)
    result = hookscope.attention(SmallTransformer(), torch.rand(2, 3, 32, 32))
    result.save(tmp_path / "run")
    for drawn, name in zip(shown(result).all("img"), ("overview.png", "overview-001.png"), strict=True):
        assert (drawn.attributes["alt"] or "").startswith("What the attention of SmallTransformer looks at")
        with Image.open(tmp_path / "run" / name) as written:
            assert np.array_equal(np.asarray(decoded(drawn.attributes["src"])), np.asarray(written))


def test_a_check_shows_its_overview_with_the_pictures_of_its_evidence(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
    passed = hookscope.check(network, select="non-finite-*", input_shape=(1, 3, 8, 8))
    assert (shown(passed).all("img")[0].attributes["alt"] or "").startswith("Overview of the check of Sequential")
    with torch.no_grad():
        network[0].bias[2] = torch.nan
    failed = hookscope.check(network, select="non-finite-*", input_shape=(1, 3, 8, 8), evidence=tmp_path / "kept")
    [overview] = shown(failed).all("img")
    with Image.open(tmp_path / "kept" / "overview.png") as written:
        assert np.array_equal(np.asarray(decoded(overview.attributes["src"])), np.asarray(written))
    assert shown(hookscope.check("missing.pt")).all("img") == []  # nothing was measured


def test_headers_say_what_they_head() -> None:
    page = shown(INSPECTION)
    scopes = [header.attributes["scope"] for header in page.all("th")]
    assert scopes.count("row") >= len(INSPECTION.rows)
    assert "col" in scopes
    assert all(frame.attributes.get("tabindex") == "0" for frame in page.all("div"))  # scrolled by keyboard


def test_results_load_no_renderer_before_they_are_shown() -> None:
    renderers = {"rich", "PIL", "matplotlib", "hookscope.reporting"}
    script = f"import sys, hookscope.results.activations; print(*{renderers} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_the_terminals_table_and_the_notebooks_hold_the_same_words() -> None:
    wide = printed(summary(INSPECTION, width=1000, full=True), 1000)
    words = {word for line in shown(INSPECTION).tables()[0] for cell in line for word in cell.split()}
    assert words <= set(re.split(r"\s+", wide))
