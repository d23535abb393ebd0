"""What is written of a result is read back as the same result, whatever it holds."""

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as random_arrays

from hookscope.results import json_form
from hookscope.results.activations import Activations
from hookscope.results.attention import Attention
from hookscope.results.attributions import Attributions
from hookscope.results.differences import Differences
from hookscope.results.gradients import Gradients
from hookscope.results.history import History
from hookscope.results.runs.record import RunRecord
from hookscope.results.runs.store import checked, parse_json
from hookscope.results.survey import Survey
from hookscope.text import strict_json
from tests.results.same import assert_same

PLAIN: Mapping[object, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(0, 2**63),
    float: st.floats(),
    str: st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), st.sampled_from(["NaN", "Infinity"])),
    type(None): st.none(),
    Any: st.integers(0, 9),
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Return values of a type as the fields of results have them."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in PLAIN:
        return PLAIN[hint]
    if is_dataclass(hint):
        return st.deferred(lambda: instances_of(hint))
    if hasattr(hint, "_fields"):
        return st.builds(
            hint, **{name: values_of(get_type_hint) for name, get_type_hint in get_type_hints(hint).items()}
        )
    if origin in (Literal, Union, types.UnionType):
        return st.sampled_from(arguments) if origin is Literal else st.one_of(*map(values_of, arguments))
    return containers_of(origin, arguments)


def containers_of(origin: Any, arguments: Sequence[Any]) -> st.SearchStrategy[Any]:
    if origin is np.ndarray:
        shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
        return shapes.flatmap(lambda shape: random_arrays(np.float32, shape))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*map(values_of, arguments))
    if origin in (tuple, Sequence):
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    assert issubclass(origin, Mapping), origin
    return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=2)


def instances_of(kind: Any) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind)
    stored = [field.name for field in fields(kind) if json_form.is_stored(field)]
    values = {name: values_of(hints[name]) for name in stored}
    values |= {name: st.integers(1, 2**63) for name in values.keys() & {"count", "tile", "columns"}}
    return st.builds(kind, **values)


@pytest.fixture
def without_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out properties, which are computed again and make no sense of random fields."""
    monkeypatch.setattr(json_form, "derived", lambda _kind: {})
    monkeypatch.setattr(json_form, "_names", json_form._names.__wrapped__)


@pytest.mark.usefixtures("without_derived")
@pytest.mark.parametrize(
    "kind", [Activations, Gradients, Attributions, Attention, Differences, History, Survey, RunRecord]
)
@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_what_is_read_is_what_was_written(kind: Any, data: st.DataObject) -> None:
    result = data.draw(instances_of(kind))
    arrays: dict[str, Any] = {}
    document = parse_json(strict_json(json_form.json_form(result, arrays)).encode())
    assert document is not None
    assert_same(checked(kind, document, arrays), result)
