"""The picture that every run writes first: one and the same from the command, without its grids, and from Python."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import hookscope
from tests.cli.conftest import CAT, Run, record_of


@pytest.mark.parametrize(
    ("command", "more"), [("activations", ("--no-grids",)), ("grads", ("--grids",))], ids=["activations", "grads"]
)
@pytest.mark.sample("activations")
def test_the_overview_is_the_same_with_grids_or_without_and_from_python(
    run: Run, tmp_path: Path, command: str, more: tuple[str, ...]
) -> None:
    assert run(command, "net.py:tiny", CAT, "--out", "one").code == 0
    assert run(command, "net.py:tiny", CAT, "--out", "other", *more).code == 0
    getattr(hookscope, command)("net.py:tiny", CAT).save(tmp_path / "python")
    overviews = [(tmp_path / folder / "overview.png").read_bytes() for folder in ("one", "other", "python")]
    assert overviews[0] == overviews[1] == overviews[2]
    assert record_of(tmp_path / "one")["overview"] == "overview.png"
    assert "overview.png" in record_of(tmp_path / "one")["files"]
    with Image.open(tmp_path / "one" / "overview.png") as picture:
        assert (picture.width, picture.mode) == (1200, "RGB")
        assert np.asarray(picture)[0, 0].tolist() == [36, 40, 46]  # opaque: the same on any page


@pytest.mark.parametrize("command", ["activations", "grads"])
@pytest.mark.sample("activations")
def test_the_page_opens_with_the_answer(run: Run, tmp_path: Path, command: str) -> None:
    assert run(command, "net.py:tiny", CAT, "--out", "out", "--report", "page.html").code == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    main = page[page.index("<main>") :]
    assert main.index('id="answer"') < main.index('<dl class="facts">') < main.index('id="inputs"')
    assert 'class="overview"' not in main
