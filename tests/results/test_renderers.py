"""How results are shown, whatever shows them."""

import random

import pytest
from torch import nn

import hookscope
from hookscope.errors import LayerNotFoundError
from hookscope.results.renderers import RENDERERS, rendered


def test_what_shows_a_result_draws_no_number_from_pythons_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RENDERERS, "text", "random:choice")  # rich draws one when it is imported
    before = random.getstate()
    assert rendered("a", "text") == "a"
    assert random.getstate() == before


@pytest.mark.parametrize("label", [slice(0, 2), 0, None, []])
def test_what_is_no_label_has_no_row(label: object) -> None:
    run = hookscope.activations(nn.Sequential(nn.Linear(2, 3)), input_shape="1,2")
    with pytest.raises(LayerNotFoundError, match="No row is called"):
        run[label]  # type: ignore[index]
