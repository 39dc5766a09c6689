"""Drafts of records: made like the record, and nothing but the record once they are sealed."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from miles_core.contracts.engine import Completion, Request
from miles_core.drafts import drafts, seal
from miles_core.records import Episode, Finish, Sampling, Score, Span, Trajectory, Version

SAMPLING = Sampling(max_new_tokens=3)
VERSION = Version(policy="main", lineage=0, number=1)
RECORDS: list[tuple[type, dict[str, Any]]] = [
    (Trajectory, {"id": "a#0/0/0", "length": 2, "columns": {}}),
    (Trajectory, {"id": "a#0/0/0", "length": 2, "columns": {}, "spans": (), "finish": Finish.LENGTH, "engine": "e"}),
    (Episode, {"id": "a#0/0", "member": 0, "trajectories": ()}),
    (
        Episode,
        {"id": "a#0/0", "member": 0, "trajectories": (), "reward": 0.5, "info": {"answer": "7"}, "preference": -1},
    ),
    (Request, {"id": "r", "policy": "main", "prompt": {}, "sampling": SAMPLING, "seed": 2**64 - 1}),
    (Completion, {"request": "r", "columns": {}, "spans": (), "finish": Finish.STOP, "engine": "e"}),
    (Span, {"start": 0, "end": 2, "version": VERSION}),
    (Version, {"policy": "main", "lineage": 0, "number": 1}),
    (Score, {"reward": None}),
]


def sealed(record: type, values: dict[str, Any]) -> Any:
    draft: Any = drafts(record)(**values)
    seal(draft, record)
    return draft


@pytest.mark.parametrize(("record", "values"), RECORDS)
def test_a_sealed_draft_is_the_record(record: type, values: dict[str, Any]) -> None:
    made, usual = sealed(record, values), record(**values)
    assert type(made) is record
    assert made == usual and usual == made and repr(made) == repr(usual)
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == usual
    first = fields(record)[0].name
    assert replace(made, **{first: values[first]}) == usual
    for name in (field.name for field in fields(record)):
        with pytest.raises(FrozenInstanceError):
            setattr(made, name, None)
        with pytest.raises(FrozenInstanceError):
            delattr(made, name)
    with pytest.raises((FrozenInstanceError, TypeError, AttributeError)):
        made.more = 1


def test_sealed_drafts_hash_and_order_as_the_record_does() -> None:
    older, newer = (sealed(Version, {"policy": "main", "lineage": 0, "number": n}) for n in (1, 2))
    assert hash(older) == hash(VERSION) and older < newer and {older, VERSION} == {VERSION}


def test_every_draft_has_defaults_of_its_own() -> None:
    one, two = (sealed(Episode, {"id": "a#0/0", "member": 0, "trajectories": ()}) for _ in range(2))
    one.components["length"] = 1.0
    assert two.components == {} and Episode(id="a", member=0, trajectories=()).components == {}


def test_a_draft_needs_what_the_record_needs_and_takes_nothing_else() -> None:
    with pytest.raises(TypeError, match="columns"):
        drafts(Trajectory)(id="a", length=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="colour"):
        drafts(Score)(reward=1.0, colour="red")  # type: ignore[call-arg]


def test_nothing_is_sealed_as_another_record() -> None:
    draft: Any = drafts(Span)(start=0, end=1, version=VERSION)
    with pytest.raises(TypeError, match="layout"):
        seal(draft, Version)
