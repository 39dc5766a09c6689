"""Trajectories that a group shares are those that one session after the other makes, or none are made together."""

import asyncio
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.answers import plain_trajectories
from miles_core.columns import CORE_COLUMNS, collate, validate
from miles_core.contracts.engine import Completion
from miles_core.errors import EngineError, RecordError
from miles_core.frames import decode_group, encode_group
from miles_core.records import (
    Episode,
    Finish,
    Group,
    Rows,
    Sampling,
    Span,
    Task,
    Version,
    shared_columns,
)
from miles_core.session import EpisodeFailedError, Session

OLD, NEW = (Version(policy="main", lineage=0, number=number) for number in (3, 4))
PROMPT = np.array([7, 8, 9], np.int32)
SAMPLING = Sampling(max_new_tokens=8, temperature=0.7)


def answer(tokens: list[int], cut: int = 0, finish: Finish = Finish.STOP) -> Completion:
    """`cut`: from which token on the newer version sampled, 0 for one version."""
    n = len(tokens)
    parts = [(0, cut, OLD), (cut, n, NEW)] if 0 < cut < n else [(0, n, OLD)] if n else []
    return Completion(
        request="r",
        columns={"tokens": np.array(tokens, np.int32), "logprobs": -np.arange(1, n + 1, dtype=np.float32)},
        spans=tuple(Span(start=a, end=b, version=version) for a, b, version in parts),
        finish=finish,
        engine="local",
    )


def by_session(name: str, completion: Completion):
    """What a session makes of it: the trajectory, or the error."""

    async def generate(request):
        return completion, {}

    async def play():
        session = Session(
            id=name,
            policy="main",
            prompt="789",
            renderer=None,
            generate=generate,
            sampling=SAMPLING,
            seed_of=lambda turn: 0,
            request_id=name,
            columns=CORE_COLUMNS,
            root=lambda: PROMPT,
        )
        await session.answer()
        (trajectory,) = session.trajectories()
        return trajectory

    try:
        return asyncio.run(play())
    except (EngineError, RecordError, EpisodeFailedError) as error:
        return error


def column(completion: Completion, **given: object) -> Completion:
    return replace(completion, columns={**completion.columns, **given})


GOOD = answer([4, 5, 6])
BREAKS = {
    "error": replace(GOOD, finish=Finish.ERROR),
    "abort": replace(GOOD, finish=Finish.ABORT),
    "positive": column(GOOD, logprobs=np.array([-1, 0.5, -1], np.float32)),
    "nan": column(GOOD, logprobs=np.array([-1, np.nan, -1], np.float32)),
    "infinite": column(GOOD, logprobs=np.array([-1, -np.inf, -1], np.float32)),
    "short": column(GOOD, logprobs=np.array([-1, -1], np.float32)),
    "objects": column(GOOD, logprobs=np.array([None, None, None])),
    "negative": column(GOOD, tokens=np.array([4, -5, 6], np.int32)),
    "no ids": column(GOOD, tokens=np.array([4.5, 5, 6], np.float32)),
    "no logprobs": replace(GOOD, columns={"tokens": GOOD.columns["tokens"]}),
    "no spans": replace(GOOD, spans=()),
    "late span": replace(GOOD, spans=(Span(start=1, end=3, version=OLD),)),
    "long span": replace(GOOD, spans=(Span(start=0, end=4, version=OLD),)),
    "empty span": replace(GOOD, spans=(*GOOD.spans, Span(start=3, end=3, version=NEW))),
    "spans overlap": replace(GOOD, spans=(Span(start=0, end=2, version=OLD), Span(start=1, end=3, version=NEW))),
}


def same(a, b) -> None:
    assert {name: getattr(a, name) for name in a.__slots__ if name != "columns"} == {
        name: getattr(b, name) for name in b.__slots__ if name != "columns"
    }
    assert set(a.columns) == set(b.columns)
    for name in a.columns:
        assert a.columns[name].dtype == b.columns[name].dtype
        assert a.columns[name].tolist() == b.columns[name].tolist(), name


answers = st.builds(
    answer,
    st.lists(st.integers(0, 40), max_size=5),
    st.integers(0, 5),
    st.sampled_from([Finish.STOP, Finish.LENGTH]),
)


@given(st.lists(answers, min_size=1, max_size=5))
def test_together_they_are_what_sessions_make_one_by_one(drawn):
    names = [f"g/{member}" for member in range(len(drawn))]
    found = plain_trajectories(names, PROMPT, drawn, SAMPLING)
    assert found is not None
    for name, trajectory, completion in zip(names, found, drawn, strict=True):
        validate(trajectory, CORE_COLUMNS)
        same(trajectory, by_session(name, completion))


@pytest.mark.parametrize("how", BREAKS)
def test_what_a_session_refuses_is_not_made_together(how):
    assert isinstance(by_session("g/1", BREAKS[how]), Exception)
    assert plain_trajectories(["g/0", "g/1"], PROMPT, [GOOD, BREAKS[how]], SAMPLING) is None


@pytest.mark.parametrize(
    "other", [EngineError("no", fix="none"), None, column(GOOD, strange=np.zeros(3))], ids=["error", "none", "column"]
)
def test_what_is_more_than_a_plain_answer_is_left_to_sessions(other):
    assert plain_trajectories(["g/0", "g/1"], PROMPT, [GOOD, other], SAMPLING) is None


# --- columns that a group shares -------------------------------------------------------------------------------------


def group(slot: int, drawn: list[Completion], *, own: bool) -> Group:
    """`own`: every trajectory has arrays of its own."""
    names = [f"t{slot}#0/{member}" for member in range(len(drawn))]
    found = plain_trajectories(names, PROMPT, drawn, SAMPLING)
    assert found is not None
    if own:
        found = [replace(t, columns={name: value.copy() for name, value in t.columns.items()}) for t in found]
    episodes = [
        Episode(id=n, member=i, trajectories=(t,), reward=1.0)
        for i, (n, t) in enumerate(zip(names, found, strict=True))
    ]
    task = Task(id=f"t{slot}", prompt="789")
    return Group(id=f"t{slot}#0", policy="main", slot=slot, attempt=0, task=task, episodes=tuple(episodes))


drawn_groups = st.lists(st.lists(answers, min_size=1, max_size=4), min_size=1, max_size=3)


@given(drawn_groups, st.data())
def test_a_batch_and_a_frame_do_not_show_who_shares(drawn, data):
    plain = [group(slot, some, own=True) for slot, some in enumerate(drawn)]
    owns = data.draw(st.lists(st.booleans(), min_size=len(drawn), max_size=len(drawn)))
    mixed = [group(slot, some, own=own) for slot, (some, own) in enumerate(zip(drawn, owns, strict=True))]
    one, other = (collate("main", 0, groups, CORE_COLUMNS) for groups in (plain, mixed))
    assert one.columns.keys() == other.columns.keys()
    for name, value in one.columns.items():
        assert value.dtype == other.columns[name].dtype
        assert value.tolist() == other.columns[name].tolist(), name
    for a, b in zip(plain, mixed, strict=True):
        assert encode_group(a) == encode_group(b)
        header, blocks = encode_group(b)
        for before, after in zip(b.episodes, decode_group(header, b"".join(blocks)).episodes, strict=True):
            same(before.trajectories[0], after.trajectories[0])


def test_a_part_of_a_group_shares_nothing():
    whole = [t for e in group(0, [answer([1]), answer([2, 3]), answer([])], own=False).episodes for t in e.trajectories]
    assert shared_columns(whole) is not None
    other = [t for e in group(0, [answer([1]), answer([2, 3])], own=False).episodes for t in e.trajectories]
    changed = replace(whole[0], columns={**whole[0].columns})
    for part in (whole[:2], whole[1:], [whole[1], whole[0], whole[2]], [*other[:1], *whole[1:]], [changed, *whole[1:]]):
        assert shared_columns(part) is None
    assert shared_columns([]) is None


def test_rows_are_a_mapping_that_survives_a_journey():
    rows = group(0, [answer([1]), answer([2, 3])], own=False).episodes[1].trajectories[0].columns
    assert isinstance(rows, Rows)
    assert rows["tokens"].tolist() == [7, 8, 9, 2, 3]
    assert dict(rows).keys() == {"tokens", "origin", "trainable", "behaviour_logprobs"}
    with pytest.raises(KeyError):
        rows["advantages"]
    back = pickle.loads(pickle.dumps(rows))
    assert {name: back[name].tolist() for name in back} == {name: rows[name].tolist() for name in rows}


def test_answers_that_came_from_another_process_are_made_together_too():
    """What was pickled has dtypes of its own."""
    answers = pickle.loads(pickle.dumps([answer([1, 2]), answer([3])]))
    assert answers[0].columns["tokens"].dtype is not np.dtype(np.int32)
    found = plain_trajectories(["g/0", "g/1"], PROMPT, answers, SAMPLING)
    assert shared_columns(found)["tokens"].tolist() == [7, 8, 9, 1, 2, 7, 8, 9, 3]
