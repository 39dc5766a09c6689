"""Cutting by token budget: nothing lost, nothing twice, atoms whole, ranks in step."""

from __future__ import annotations

from typing import Any

import numpy as np
from fsdp_support import batch_of, random_groups
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_backend_fsdp import layout, microbatch


@given(
    seed=st.integers(0, 10_000),
    ranks=st.integers(1, 5),
    budget=st.integers(1, 200),
    level=st.sampled_from(["unit", "trajectory", "episode", "group"]),
)
@settings(max_examples=100, deadline=None)
def test_a_cut_is_a_partition_of_whole_atoms_within_the_budget(seed: int, ranks: int, budget: int, level: Any) -> None:
    batch = batch_of(random_groups(seed, groups=4))
    lengths = layout.fed_lengths(batch, layout.needed_units(batch))
    found = microbatch.rounds(
        batch, level=level, ranks=ranks, budget=budget, lengths=lengths, cost=lambda n: np.asarray(n, float) ** 1.2
    )
    assert all(len(parts) == ranks for parts in found)
    pieces = [piece for parts in found for piece in parts]
    assert sorted(np.concatenate(pieces)) == list(range(batch.n_trajectories))
    atom = {"episode": batch.episode_of, "group": batch.group_of[batch.episode_of]}.get(
        level, np.arange(batch.n_trajectories)
    )
    owner = {}
    for number, piece in enumerate(pieces):
        assert list(piece) == sorted(piece)
        for row in piece:
            assert owner.setdefault(int(atom[row]), number) == number
        assert lengths[piece].sum() <= budget or len(set(atom[piece])) == 1
    assert all(len(piece) for parts in found[:-1] for piece in parts)


def test_ranks_share_the_work_evenly() -> None:
    batch = batch_of(random_groups(3, groups=16, size=8))
    lengths = layout.fed_lengths(batch, layout.needed_units(batch))
    found = microbatch.rounds(batch, level="unit", ranks=4, budget=10**6, lengths=lengths, cost=lambda n: n * 1.0)
    assert len(found) == 1
    shares = [int(lengths[piece].sum()) for piece in found[0]]
    assert max(shares) - min(shares) <= 2 * lengths.max()


def test_the_coarsest_level_decides() -> None:
    assert microbatch.coarsest(["unit", "group", "trajectory"]) == "group"
    assert microbatch.coarsest([]) == "unit"


def test_an_idle_micro_batch_trains_nothing() -> None:
    batch = batch_of(random_groups(0))
    micro = microbatch.idle(batch, 2)
    assert micro.n_trajectories == 1 and not micro.columns["trainable"].any()
    assert batch.columns["trainable"].any()
