"""Cut a minibatch into micro-batches by token budget, for every rank at once. NumPy only; the same on every rank.

Atoms (trajectories, or whole episodes or groups where a term speaks of them) are never split. Micro-batches hold
atoms of similar length, are balanced by cost, and stand in *rounds*: round k holds one micro-batch for each rank, so
that ranks that run their collectives together also do about the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.columns import Batch

if TYPE_CHECKING:
    from miles_core.contracts.learning import TermLevel

Array = np.ndarray[Any, Any]
LEVELS = ("unit", "trajectory", "episode", "group")


def coarsest(levels: Iterable[TermLevel]) -> TermLevel:
    """The level whose atoms must stay together for all of these."""
    return max(levels, key=LEVELS.index, default="unit")


def rounds(
    batch: Batch, *, level: TermLevel, ranks: int, budget: int, lengths: Array, cost: Callable[[Array], Array]
) -> list[list[Array]]:
    """Rounds of `ranks` arrays of trajectory indices, ascending; an array may be empty in the last round.

    `lengths` int64 [trajectories] are the tokens that each costs; an atom above `budget` stands alone.
    """
    atom = {"episode": batch.episode_of, "group": batch.group_of[batch.episode_of]}.get(
        level, np.arange(batch.n_trajectories)
    )
    _, atom = np.unique(atom, return_inverse=True)
    count = int(atom.max(initial=-1)) + 1
    tokens = np.bincount(atom, weights=lengths, minlength=count)
    work = np.bincount(atom, weights=cost(lengths), minlength=count)
    longest = np.zeros(count, np.int64)
    np.maximum.at(longest, atom, lengths)
    order = np.argsort(-longest, kind="stable")
    want = max(1, -(-int(tokens.sum()) // budget))
    while True:
        pieces = -(-want // ranks) * ranks
        cut = _cut(order, tokens, work, pieces, budget)
        if len(cut) <= pieces:
            break
        want = len(cut)
    member = [np.flatnonzero(np.isin(atom, piece)) for piece in cut]
    member += [np.zeros(0, np.int64)] * (-len(member) % ranks)
    return [member[i : i + ranks] for i in range(0, len(member), ranks)]


def _cut(order: Array, tokens: Array, work: Array, pieces: int, budget: int) -> list[Array]:
    """Runs of `order` of about equal work, each within the budget."""
    share = work.sum() / pieces
    found: list[list[int]] = []
    filled = spent = 0.0
    done = 0.0
    for atom in order:
        full = spent + tokens[atom] > budget
        # Close a piece where its end is nearer to the boundary of equal work without this atom than with it.
        reached = done + work[atom] / 2 > share * len(found) and len(found) < pieces
        if not found or full or (reached and filled > 0):
            found.append([])
            filled = spent = 0.0
        found[-1].append(int(atom))
        filled += work[atom]
        spent += tokens[atom]
        done += work[atom]
    return [np.array(piece, np.int64) for piece in found]


def take(batch: Batch, index: Array) -> Batch:
    """The micro-batch of these trajectories; the batch itself where it is all of them."""
    if len(index) == batch.n_trajectories:
        return batch
    return batch.select(index)


def idle(batch: Batch, shortest: int) -> Batch:
    """A micro-batch of one trajectory without trainable units, for a rank that has nothing to do in a round."""
    micro = batch.select(np.array([shortest], np.int64))
    columns = dict(micro.columns)
    columns["trainable"] = np.zeros(micro.units, bool)
    return replace(micro, columns=columns)
