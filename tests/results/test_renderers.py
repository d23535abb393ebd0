"""How results are shown, whatever shows them."""

import random

import pytest

from hookscope.results.renderers import RENDERERS, rendered


def test_what_shows_a_result_draws_no_number_from_pythons_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RENDERERS, "text", "random:choice")  # rich draws one when it is imported
    before = random.getstate()
    assert rendered("a", "text") == "a"
    assert random.getstate() == before
