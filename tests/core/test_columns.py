"""Ragged columns: collation, selection, repetition, and every message of `validate`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.columns import CORE_COLUMNS, FEW, ColumnSpec, Level, collate, plausible, validate
from miles_core.errors import RecordError
from miles_core.records import Episode, Finish, Group, Origin, Sampling, Span, Task, Trajectory, Version, spans_of

V0, V1 = Version(policy="main", lineage=0, number=0), Version(policy="main", lineage=0, number=1)


def trajectory(name: str, prompt: int, sampled: int, **columns) -> Trajectory:
    n = prompt + sampled
    origin = np.array([Origin.PROMPT] * prompt + [Origin.SAMPLED] * sampled, np.uint8)
    base = {
        "tokens": np.arange(n, dtype=np.int32),
        "origin": origin,
        "trainable": origin == Origin.SAMPLED,
        "behaviour_logprobs": np.where(origin == Origin.SAMPLED, -1.0, 0.0).astype(np.float32),
    }
    spans = (Span(start=prompt, end=n, version=V0),) if sampled else ()
    return Trajectory(id=name, length=n, columns={**base, **columns}, spans=spans)


def group(index: int, sizes: list[list[int]], slot: int = 0) -> Group:
    """`sizes`: one list an episode, one sampled length a trajectory."""
    name = f"e:train:{index}#0"
    episodes = tuple(
        Episode(
            id=f"{name}/{m}",
            member=m,
            trajectories=tuple(trajectory(f"{name}/{m}/{i}", 2, n) for i, n in enumerate(lengths)),
            reward=float(m),
        )
        for m, lengths in enumerate(sizes)
    )
    task = Task(id=f"e:train:{index}", prompt="p")
    return Group(id=name, policy="main", slot=slot, attempt=0, task=task, episodes=episodes)


def test_collation_keeps_order_and_places():
    batch = collate("main", 3, [group(0, [[1], [2, 3]]), group(1, [[], [4]])], CORE_COLUMNS)
    assert batch.lengths.tolist() == [3, 4, 5, 6] and batch.units == 18
    assert batch.episode_of.tolist() == [0, 1, 1, 3]
    assert batch.group_of.tolist() == [0, 0, 1, 1], "an episode without trajectories keeps its place"
    assert batch.columns["reward"].tolist() == [0, 1, 0, 1]
    assert batch.per_unit("reward").tolist() == [0] * 3 + [1] * 9 + [1] * 6
    assert [len(s) for s in batch.group_slices()] == [3, 1]


def test_kept_is_trainable_without_rejected():
    batch = collate("main", 0, [group(0, [[2]])], CORE_COLUMNS)
    assert batch.kept.tolist() == [False, False, True, True]
    rejected = batch.with_columns({"rejected": [False, False, True, False]}, [])
    assert rejected.kept.tolist() == [False, False, False, True]


@pytest.mark.parametrize("groups", [[], [group(0, [[], []]), group(1, [[]])]])
def test_a_batch_without_any_trajectory_has_its_columns_with_no_rows(groups):
    batch = collate("main", 0, groups, CORE_COLUMNS)
    assert (batch.units, batch.n_groups, batch.n_episodes) == (0, len(groups), sum(len(g.episodes) for g in groups))
    for name, dtype in (("tokens", np.int32), ("origin", np.uint8), ("trainable", bool), ("temperature", np.float32)):
        assert batch.columns[name].shape == (0,) and batch.columns[name].dtype == dtype
    assert batch.kept.shape == batch.per_unit("reward").shape == (0,)
    part = batch.select_groups(np.arange(batch.n_groups))
    assert part.episode_ids == batch.episode_ids and [len(s) for s in part.group_slices()] == [0] * len(groups)
    assert batch.select([]).units == 0


def test_a_column_that_only_some_have_needs_a_spec_that_says_so():
    spec = ColumnSpec(name="x.extra", level=Level.UNIT, dtype="float32", fill=-1)
    some = group(0, [[1], [1]])
    first = some.episodes[0].trajectories[0]
    first.columns["x.extra"] = np.ones(3, np.float32)
    with pytest.raises(RecordError, match=r"lacks column 'x\.extra'"):
        collate("main", 0, [some], {**CORE_COLUMNS, "x.extra": spec})
    optional = ColumnSpec(name="x.extra", level=Level.UNIT, dtype="float32", fill=-1, required=False)
    batch = collate("main", 0, [some], {**CORE_COLUMNS, "x.extra": optional})
    assert batch.columns["x.extra"].tolist() == [1, 1, 1, -1, -1, -1]


def test_items_are_flat_with_counts_and_follow_a_selection():
    two = group(0, [[1], [2]])
    for i, t in enumerate(t for e in two.episodes for t in e.trajectories):
        t.columns["keep_ids"] = np.full(i + 1, i, np.int32)
    batch = collate("main", 0, [two], CORE_COLUMNS)
    flat, counts = batch.items["keep_ids"]
    assert flat.tolist() == [0, 1, 1] and counts.tolist() == [1, 2]
    flat, counts = batch.select([1]).items["keep_ids"]
    assert flat.tolist() == [1, 1] and counts.tolist() == [2]


def test_with_columns_checks_rows_and_declaration():
    batch = collate("main", 0, [group(0, [[1]])], CORE_COLUMNS)
    with pytest.raises(RecordError, match="never declared"):
        batch.with_columns({"nobody": np.zeros(3)}, [])
    with pytest.raises(RecordError, match="has 2 rows; the batch has 3 units"):
        batch.with_columns({"advantages": np.zeros(2)}, [])


@given(st.lists(st.lists(st.lists(st.integers(0, 4), max_size=2), min_size=1, max_size=3), min_size=1, max_size=4))
def test_selecting_every_group_puts_the_batch_together_again(shape):
    batch = collate("main", 0, [group(i, sizes) for i, sizes in enumerate(shape)], CORE_COLUMNS)
    parts = [batch.select(index) for index in batch.group_slices()]
    assert sum(p.units for p in parts) == batch.units
    if batch.n_trajectories:
        for name in ("tokens", "trainable", "origin"):
            whole = np.concatenate([p.columns[name] for p in parts if p.n_trajectories])
            assert np.array_equal(whole, batch.columns[name])
    for part in parts:
        assert part.lengths.sum() == len(part.columns.get("tokens", ()))


SAMPLING = Sampling(max_new_tokens=4, temperature=0.5)


def wrong(**changes) -> Trajectory:
    from dataclasses import replace

    good = trajectory("t", 1, 2)
    columns = changes.pop("columns", {})
    return replace(good, columns={**good.columns, **columns}, **changes)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (wrong(columns={"tokens": np.zeros(2, np.int32)}), "column 'tokens' has 2 rows, length is 3"),
        (wrong(columns={"nobody": np.zeros(3)}), "never declared"),
        (wrong(columns={"trainable": np.ones(3, bool)}), "neither sampled nor a demonstration"),
        (wrong(spans=()), "spans cover 0 tokens, 2 were sampled"),
        (wrong(spans=(Span(start=1, end=4, version=V0),)), "outside"),
        (wrong(spans=(Span(start=1, end=3, version=V0), Span(start=2, end=3, version=V1))), "overlaps"),
        (wrong(columns={"behaviour_logprobs": np.array([0, np.nan, -1], np.float32)}), "not finite or above 0"),
        (wrong(columns={"behaviour_logprobs": np.array([0, 0.5, -1], np.float32)}), "not finite or above 0"),
        (
            wrong(columns={"keep_counts": np.array([0, 2, 1], np.int32), "keep_ids": np.zeros(2, np.int32)}),
            "keep_counts sum to 3",
        ),
    ],
)
def test_validate_names_the_trajectory_and_what_is_wrong(broken, message):
    validate(trajectory("fine", 1, 2), CORE_COLUMNS)
    with pytest.raises(RecordError, match=message) as error:
        validate(broken, CORE_COLUMNS)
    assert "'t'" in str(error.value)


def test_missing_behaviour_logprobs():
    good = trajectory("t", 1, 1)
    columns = {k: v for k, v in good.columns.items() if k != "behaviour_logprobs"}
    with pytest.raises(RecordError, match="without behaviour_logprobs"):
        validate(Trajectory(id="t", length=2, columns=columns, spans=good.spans), CORE_COLUMNS)


def test_spans_are_run_lengths():
    assert spans_of([V0, V0, V1], start=4) == (
        Span(start=4, end=6, version=V0),
        Span(start=6, end=7, version=V1),
    )
    assert spans_of([]) == ()


def test_sampling_parameters_become_trajectory_columns():
    from dataclasses import replace

    one = group(0, [[1]])
    sampled = replace(one.episodes[0].trajectories[0], sampling=SAMPLING, finish=Finish.LENGTH)
    episode = replace(one.episodes[0], trajectories=(sampled,))
    batch = collate("main", 0, [replace(one, episodes=(episode,))], CORE_COLUMNS)
    assert batch.columns["temperature"].tolist() == [0.5] and batch.columns["truncated"].tolist() == [True]


@given(st.lists(st.sampled_from([0.0, -0.0, 5e-5, -3e38, -1.0, 2e-4, np.nan, np.inf, -np.inf]), max_size=4))
def test_log_probabilities_are_finite_and_not_above_zero_wherever_one_stands(values):
    wanted = all(np.isfinite(value) and value <= 1e-4 for value in values)
    assert plausible(np.array(values, np.float32)) == wanted
    assert plausible(np.array([*values, *[-1.0] * FEW], np.float32)) == wanted
