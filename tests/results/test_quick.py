"""Dataclasses that are made all at once behave as those that are made one by one."""

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace

import pytest

from hookscope.results.quick import make_all


class Named:
    """A base without fields, as rows have."""

    __slots__ = ()

    @property
    def shown(self) -> str:
        """Text."""
        return f"<{self.name}>"

    name: str


@dataclass(frozen=True, slots=True)
class Row(Named):
    """As results are."""

    name: str
    values: tuple[int, ...] = ()
    notes: list[str] = field(default_factory=list)
    weight: float | None = field(default=None, repr=False, compare=False)


@pytest.mark.parametrize("arguments", [("a", (1,), ["n"], 2.0), ("b", (2,)), ("c",)])
def test_objects_are_equal_to_those_of_the_constructor(arguments):
    plain, (made,) = Row(*arguments), make_all(Row, [arguments])
    assert type(made) is Row
    assert [getattr(made, each.name) for each in fields(made)] == [getattr(plain, each.name) for each in fields(plain)]
    assert (made, repr(made), made.shown) == (plain, repr(plain), plain.shown)


def test_each_is_made_of_its_own_values():
    assert make_all(Row, [("a",), ("b", (1,))]) == [Row("a"), Row("b", (1,))]
    assert make_all(Row, []) == []


def test_defaults_are_made_anew_each_time():
    first, second = make_all(Row, [("a",), ("a",)])
    assert first.notes == []
    assert first.notes is not second.notes


def test_instances_cannot_be_changed():
    (made,) = make_all(Row, [("a",)])
    with pytest.raises(FrozenInstanceError):
        made.name = "b"
    with pytest.raises(FrozenInstanceError):
        del made.name
    assert not hasattr(made, "__dict__")


def test_copies_pickles_and_replacements_are_equal():
    (made,) = make_all(Row, [("a", (1, 2), ["n"], 3.0)])
    for same in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made)), replace(made)):
        assert type(same) is Row
        assert (same, same.weight) == (made, 3.0)
    assert replace(made, name="b") == Row("b", (1, 2), ["n"])


@pytest.mark.parametrize("arguments", [(), ("a", (), [], None, "one too many")])
def test_wrong_arguments_raise(arguments):
    with pytest.raises(TypeError, match="argument"):
        make_all(Row, [arguments])
