"""JSON text: exact where the run depends on it, forgiving where people read it."""

import json
import math
from datetime import date
from enum import Enum, StrEnum
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.jsontext import exact, readable

NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers()
TEXTS = st.text(st.characters(), max_size=8)  # halves of surrogate pairs too
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def kinds(value):
    """The value with the type of everything in it, and the sign of zeros."""
    if isinstance(value, dict):
        return {key: kinds(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [kinds(inner) for inner in value]
    return type(value), repr(value)


@given(PLAIN)
def test_what_json_holds_comes_back_as_it_was(value):
    assert kinds(json.loads(exact(value))) == kinds(value)


@given(st.sampled_from([math.nan, math.inf, -math.inf]), PLAIN)
def test_no_number_becomes_null_in_silence(number, beside):
    for value in ([number, beside], {"a": {"b": [number]}, "c": beside}, [None, number]):
        with pytest.raises(ValueError):
            exact(value)


@pytest.mark.parametrize(
    "value", [{1, 2}, b"bytes", object(), date(2024, 1, 2), np.float32(1.0), np.zeros(2), Path("x")]
)
def test_what_json_cannot_hold_is_refused(value):
    with pytest.raises(TypeError):
        exact({"kind": "x", "info": [value]})


class Verdict(StrEnum):
    RIGHT = "right"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"kind": "group", "a": [1, -0.0, 1e-7]}, b'{"kind":"group","a":[1,-0.0,1e-7]}'),
        ({"a": Verdict.RIGHT, "b": (1, 2)}, b'{"a":"right","b":[1,2]}'),
        ({"a": 2**64 - 1, "b": "é"}, '{"a":18446744073709551615,"b":"é"}'.encode()),
        ({"a": 2**80}, b'{"a":1208925819614629174706176}'),
        ({"a": None, "b": "null"}, b'{"a":null,"b":"null"}'),
        ({1: "\ud800"}, rb'{"1":"\ud800"}'),
    ],
)
def test_the_bytes(value, text):
    assert exact(value) == text


class Colour(Enum):
    RED = object()


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (math.nan, None),
        ([math.inf, {"a": -math.inf}], [None, {"a": None}]),
        (np.float32(0.5), 0.5),
        (np.array(math.nan), None),
        ({"a": np.int64(3), 4: {5}}, {"a": 3, "4": [5]}),
        ((1, frozenset([2])), [1, [2]]),
        ([math.nan, "\ud800"], [None, "\ud800"]),
        ({"a": Path("x/y"), "b": 2**80}, {"a": "x/y", "b": 2**80}),
        ([Colour.RED], ["Colour.RED"]),
    ],
)
def test_what_people_read_is_always_json(value, found):
    assert json.loads(readable(value)) == found
