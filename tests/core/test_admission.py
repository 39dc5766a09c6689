"""The pure rules: numbers, the bound, lag, failed episodes; and the interleaving of environments."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.admission import Numbers, fit_group, is_stale, is_strict, limit, mask_stale, versions_of
from miles_core.config.schema import ScheduleConfig
from miles_core.errors import LateDataError, LedgerError
from miles_core.feed import TaskFeed
from miles_core.records import Episode, Group, Span, Status, Task, Trajectory, Version


def trajectory(*numbers, prompt=2):
    """A prompt, then one sampled token per version number."""
    n = prompt + len(numbers)
    spans = tuple(
        Span(start=prompt + i, end=prompt + i + 1, version=Version(policy="main", lineage=0, number=v))
        for i, v in enumerate(numbers)
    )
    columns = {"tokens": np.arange(n, dtype=np.int32), "trainable": np.arange(n) >= prompt}
    return Trajectory(id="t", length=n, columns=columns, spans=spans)


def group(*episodes):
    return Group(id="g", policy="main", slot=0, attempt=0, task=Task(id="t", prompt=""), episodes=tuple(episodes))


def episode(member=0, *, failed="", numbers=(0,)):
    return Episode(
        id=f"g/{member}",
        member=member,
        trajectories=() if failed else (trajectory(*numbers),),
        status=Status.FAILED if failed else Status.OK,
        error=failed,
    )


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20))))
def test_numbers_behave_like_a_set(moves):
    numbers, taken = Numbers(), set()
    for take, number in moves:
        if take and number not in taken:
            numbers.take(number)
            taken.add(number)
        elif not take and number in taken:
            numbers.give(number)
            taken.remove(number)
        else:
            with pytest.raises(LedgerError):
                (numbers.take if take else numbers.give)(number)
        free = [n for n in range(60) if n not in taken]
        assert [n for n in range(60) if numbers.free(n)] == free
        assert [numbers.nth(i) for i in range(10)] == free[:10]
        assert Numbers(**asdict(numbers)) == numbers
        assert len(numbers) == len(taken)


def test_the_bound_by_hand():
    s = ScheduleConfig(groups_per_step=4, max_staleness=0)
    assert limit(s, 0, 100) == 4  # before the first step: its own batch
    assert limit(s, 3, 100) == 16
    assert limit(replace(s, max_staleness=2), 3, 100) == 24
    assert limit(replace(s, oversample=3), 3, 100) == 16  # in slot order it could never be trained
    assert limit(replace(s, oversample=3, order="ready"), 3, 100) == 19
    assert limit(replace(s, max_staleness=2), 3, 5) == 20  # nothing that no step will consume
    assert limit(s, -1, 100) == 0


def test_only_on_policy_slot_order_is_strict():
    assert is_strict(ScheduleConfig(max_staleness=0, order="slot"))
    assert not is_strict(ScheduleConfig(max_staleness=1, order="slot"))
    assert not is_strict(ScheduleConfig(max_staleness=0, order="ready"))


def test_lag_by_hand():
    drop, mask = (ScheduleConfig(max_staleness=2, on_stale=s) for s in ("drop", "mask"))
    assert not is_stale((3, 5), 5, drop) and is_stale((3, 5), 6, drop)
    assert not is_stale((3, 5), 7, mask) and is_stale((3, 5), 8, mask)
    assert not is_stale(None, 99, drop)


def test_versions_of():
    assert versions_of(group(episode(numbers=(4, 2)), episode(1, numbers=(3,)))) == (2, 4)
    assert versions_of(group(episode(failed="x"))) is None


def test_masking_makes_old_tokens_context():
    before = group(episode(numbers=(3, 4, 5)), episode(1, numbers=(5,)))
    after = mask_stale(before, step=6, max_staleness=1)
    trainable = [t.columns["trainable"].tolist() for e in after.episodes for t in e.trajectories]
    assert trainable == [[False, False, False, False, True], [False, False, True]]
    untouched = before.episodes[0].trajectories[0].columns["trainable"]
    assert untouched.tolist() == [False, False, True, True, True]
    assert after.episodes[1].trajectories[0].columns is before.episodes[1].trajectories[0].columns


def test_shrinking_and_dropping():
    mixed = group(episode(0), episode(1, failed="boom"), episode(2))
    shrink = ScheduleConfig(group_size=3)
    kept, why = fit_group(mixed, shrink)
    assert [e.member for e in kept.episodes] == [0, 2] and why == ""
    assert fit_group(mixed, replace(shrink, min_group_size=3)) == (
        None,
        "2 of 3 episodes left, min_group_size 3: boom",
    )
    assert fit_group(mixed, replace(shrink, on_failed_episode="drop_group")) == (None, "failed episode: boom")
    whole = group(episode(0), episode(1))
    assert fit_group(whole, shrink)[0] is whole
    assert fit_group(group(episode(0, failed="boom")), shrink)[1] == "0 of 1 episodes left, min_group_size 1: boom"


class Source:
    def __init__(self, name, size):
        self.name, self.size = name, size

    def task(self, position):
        index = position if self.size is None else position % self.size
        return Task(id=f"{self.name}:{index}" if self.name else "", prompt="")


def test_one_environment_counts_through_and_wraps():
    feed = TaskFeed({"a": Source("a", 3)}, {})
    assert [(t.id, attempt) for _, t, attempt in map(feed.task, (0, 2, 3, 7))] == [
        ("a:0", 0), ("a:2", 0), ("a:0", 1), ("a:1", 2)
    ]  # fmt: skip


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), st.integers(1, 60))
def test_environments_get_their_share_at_any_point_and_positions_are_pure(weights, n):
    names = [f"e{i}" for i in range(len(weights))]
    sources = {name: Source(name, 5) for name in names}
    weighted = dict(zip(names, weights, strict=True))
    feed = TaskFeed(sources, {}, weighted)
    tasks = [feed.task(p) for p in range(n)]
    for name in names:
        got = sum(env == name for env, _, _ in tasks)
        assert abs(got - n * weighted[name] / sum(weights)) <= len(names)
    assert len({(t.id, attempt) for _, t, attempt in tasks}) == n
    fresh = TaskFeed(sources, {}, weighted)
    assert fresh.task(n - 1) == tasks[-1]  # no matter what was asked before


def test_evaluation_takes_the_first_tasks_in_turn_and_none_twice():
    feed = TaskFeed({}, {"a": Source("a", 2), "b": Source("b", None)})
    assert [t.id for _, t in feed.evaluation(6)] == ["a:0", "b:0", "a:1", "b:1", "b:2", "b:3"]
    assert TaskFeed({}, {}).evaluation(4) == []
    assert [t.id for _, t in TaskFeed({}, {"a": Source("a", 2)}).evaluation(4)] == ["a:0", "a:1"]


def test_an_environment_of_weight_zero_gives_no_task():
    feed = TaskFeed({"a": Source("a", 2), "b": Source("b", 2)}, {}, {"a": 0.0, "b": 1.0})
    assert {feed.task(p)[0] for p in range(4)} == {"b"}


def test_a_task_without_an_id_is_refused():
    with pytest.raises(LateDataError, match="environment 'a' gave task 0 no id"):
        TaskFeed({"a": Source("", 2)}, {}).task(0)
