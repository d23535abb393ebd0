"""Quickly made dataclasses behave as plain frozen ones do."""

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace

import pytest

from hookscope.results.quick import quick


class Named:
    """A base without fields, as rows have."""

    __slots__ = ()

    @property
    def shown(self) -> str:
        """Text."""
        return f"<{self.name}>"

    name: str


@dataclass(frozen=True, slots=True)
class Plain(Named):
    """As dataclasses makes it."""

    name: str
    values: tuple[int, ...] = ()
    notes: list[str] = field(default_factory=list)
    weight: float | None = field(default=None, repr=False, compare=False)


@quick
@dataclass(frozen=True, slots=True)
class Quick(Named):
    """The same, made quickly."""

    name: str
    values: tuple[int, ...] = ()
    notes: list[str] = field(default_factory=list)
    weight: float | None = field(default=None, repr=False, compare=False)


@pytest.mark.parametrize("make", [lambda each: each("a", (1,), ["n"], 2.0), lambda each: each(values=(2,), name="b")])
def test_fields_and_their_text_are_those_of_a_plain_one(make):
    plain, made = make(Plain), make(Quick)
    assert [getattr(made, each.name) for each in fields(made)] == [getattr(plain, each.name) for each in fields(plain)]
    assert repr(made) == repr(plain).replace("Plain", "Quick")
    assert made.shown == plain.shown
    assert inspect.signature(Quick).parameters.keys() == inspect.signature(Plain).parameters.keys()


def test_defaults_are_made_anew_each_time():
    assert Quick("a").notes == []
    assert Quick("a").notes is not Quick("a").notes


def test_equality_leaves_out_what_is_not_compared():
    assert Quick("a", (1,), [], 1.0) == Quick("a", (1,), [], 2.0)
    assert Quick("a") != Quick("b")


def test_instances_cannot_be_changed():
    made = Quick("a")
    with pytest.raises(FrozenInstanceError):
        made.name = "b"
    with pytest.raises(FrozenInstanceError):
        del made.name
    assert not hasattr(made, "__dict__")


def test_copies_pickles_and_replacements_are_equal():
    made = Quick("a", (1, 2), ["n"], 3.0)
    for same in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made)), replace(made)):
        assert type(same) is Quick
        assert (same, same.weight) == (made, 3.0)
    assert replace(made, name="b") == Quick("b", (1, 2), ["n"])


@pytest.mark.parametrize("arguments", [(), ("a", (), [], None, "one too many")])
def test_wrong_arguments_raise(arguments):
    with pytest.raises(TypeError, match="argument"):
        Quick(*arguments)
