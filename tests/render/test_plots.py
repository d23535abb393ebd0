from hypothesis import given

from hookscope.render.plot_axes import plain
from tests.render.checked import anything


@given(anything)
def test_plain_text_is_short_and_never_mathematics(text: str) -> None:
    from matplotlib.cbook import is_math_text

    shown = plain(text, 12)
    assert not is_math_text(shown)
    assert len(shown.replace(r"\$", "$")) <= 12


def test_a_long_name_keeps_both_ends() -> None:
    assert plain("encoder.layers.11.mlp.fc2", 11) == "enc…mlp.fc2"
    assert plain("short", 5) == "short"
    assert plain("網網網", 13) == r"\u7d…b2\u7db2"
