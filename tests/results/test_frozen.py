import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass, replace

import pytest

from hookscope.results.activations import LayerRow
from hookscope.results.frozen import quick_constructor
from hookscope.results.gradients import GradientRow, ParameterRow
from hookscope.results.statistics import TensorStatistics

STATISTICS = TensorStatistics((1, 2), "float32", 2, 0.5, 0.25, quantiles=(0.0, 1.0))
ROWS = (
    STATISTICS,
    LayerRow(3, "conv", "Conv2d", 0, "", 7, STATISTICS, ("in-place",), ()),
    GradientRow(3, None, "conv", "Conv2d", 0, "", "output", "gradient", STATISTICS, "", ()),
    ParameterRow(0, "conv.weight", "Conv2d", True, "gradient", STATISTICS, 2.0, 0.5, ("other.weight",)),
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: type(row).__name__)
def test_it_makes_what_the_class_itself_makes(row: TensorStatistics) -> None:
    values = [getattr(row, name) for name in row.__slots__]
    made = quick_constructor(type(row))(*values)
    assert type(made) is type(row)
    assert made == row
    assert hash(made) == hash(row)
    assert repr(made) == repr(row)
    assert replace(made) == copy.copy(made) == pickle.loads(pickle.dumps(made)) == row
    assert asdict(made) == asdict(row)
    with pytest.raises(FrozenInstanceError):
        setattr(made, row.__slots__[0], None)
    with pytest.raises(AttributeError):
        object.__setattr__(made, "other", 1)


@dataclass(frozen=True, slots=True)
class Place:
    name: str
    rank: int = 3


def test_fields_may_be_given_by_name_or_left_to_their_defaults() -> None:
    new = quick_constructor(Place)
    assert new("a") == new(name="a", rank=3) == Place("a")
    assert new("a", 4) == Place("a", 4)
    with pytest.raises(TypeError, match="name"):
        new()  # type: ignore[call-arg]
