"""Layouts as pure functions: what is fed, where each unit is read, and who attends to whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fsdp_support import batch_of, random_groups, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_backend_fsdp import layout
from miles_core.columns import CORE_COLUMNS, Batch, collate
from miles_core.records import Episode, Group, Task


def build(batch: Batch, choice: str, share: bool = True, pack_tokens: int = 1000) -> layout.Layout:
    return layout.build(batch, choice=choice, share=share, pack_tokens=pack_tokens, costs=layout.Costs())


def histories(plan: layout.Layout) -> list[tuple[int, ...]]:
    """The tokens that each grid position can see, itself included, in order: what attention over rows computes."""
    flat = plan.tokens.reshape(-1)
    if plan.buckets is None:
        return [tuple(row[: t + 1]) for row in plan.tokens for t in range(len(row))]
    assert plan.inverse is not None
    seen = [tuple(flat[row[: t + 1]]) for bucket in plan.buckets for row in bucket for t in range(len(row))]
    return [seen[i] for i in plan.inverse]


@given(seed=st.integers(0, 10_000), choice=st.sampled_from(["padded", "packed"]), share=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_unit_is_predicted_from_exactly_its_own_history(seed: int, choice: str, share: bool) -> None:
    batch = batch_of(random_groups(seed))
    plan = build(batch, choice, share, pack_tokens=17)
    tokens, offsets = batch.columns["tokens"], batch.offsets
    seen = histories(plan)
    positions = np.broadcast_to(plan.positions, plan.tokens.shape).reshape(-1)
    assert list(plan.units) == list(np.flatnonzero(batch.columns["trainable"]))  # no answer starts a trajectory here
    for unit, at in zip(plan.units, plan.predictors, strict=True):
        start = offsets[batch.trajectory_of_unit[unit]]
        assert seen[at] == tuple(tokens[start:unit])
        assert positions[at] == unit - 1 - start
    assert choice == "padded" or plan.tokens.shape[1] <= 17


def one_group(rows: list[Any]) -> Batch:
    episodes = tuple(Episode(id=r.id, member=i, trajectories=(r,)) for i, r in enumerate(rows))
    group = Group(id="g", policy="main", slot=0, attempt=0, task=Task(id="g", prompt=""), episodes=episodes)
    return collate("main", 0, [group], CORE_COLUMNS)


def test_only_what_a_trainable_unit_depends_on_is_fed() -> None:
    untrained = trajectory("c", [5, 6], [7, 8], trainable=np.zeros(4, bool))
    batch = one_group([trajectory("a", [5, 6, 7], [8, 9]), trajectory("b", [5], [9, 9, 9, 9]), untrained])
    plan = build(batch, "padded")
    assert plan.tokens.tolist() == [[5, 6, 7, 8], [5, 9, 9, 9]]
    assert plan.predictors.tolist() == [2, 3, 4, 5, 6, 7]
    assert plan.units.tolist() == [3, 4, 6, 7, 8, 9]


def test_equal_histories_are_one_packed_token() -> None:
    batch = one_group([trajectory("a", [5, 6], [8, 9]), trajectory("b", [5, 6], [8, 3]), trajectory("c", [5], [6, 7])])
    plan = build(batch, "packed")
    # fed: 5 6 8 of a and b, 5 6 of c -- all along one path
    assert plan.fed == 3
    assert build(batch, "packed", share=False).fed == 8


def test_a_batch_that_needs_nothing_still_has_a_forward() -> None:
    plan = build(one_group([trajectory("a", [5, 6], [7], trainable=np.zeros(3, bool))]), "auto")
    assert plan.fed == 1 and len(plan.units) == 0


def test_a_trainable_first_token_is_not_predicted() -> None:
    plan = build(one_group([trajectory("a", [], [5, 6, 7])]), "padded")
    assert plan.units.tolist() == [1, 2]


@pytest.mark.parametrize(("lengths", "packed"), [([20, 20, 20, 20], False), ([100, 3, 3, 3], True)])
def test_auto_takes_the_cheaper_layout(lengths: list[int], packed: bool) -> None:
    rows = [trajectory(str(i), [2 + i], np.arange(n) % 40 + 2) for i, n in enumerate(lengths)]
    plan = build(one_group(rows), "auto")
    assert (plan.buckets is not None) is packed
