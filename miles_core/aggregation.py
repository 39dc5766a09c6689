"""Denominators before the update: minibatch cuts, and each term's aggregation and mask compiled into `weight.<term>`.

The controller holds every mask, so it computes the denominators once over the whole minibatch of one optimizer update,
in float64. A loss is then Σ weight · x: micro-batches, ranks and accumulation only sum. What the names mean, with x a
value per unit, m the numerator's mask, n the denominator's, B the episodes of the minibatch (excluded and failed ones
count), L a configured length:

    token_mean     m / Σ n                    episode_mean   m / (B · Σ of n over the unit's episode)
    episode_sum    m / B                      constant       m / (B · L)

A term of kind `kept` loses rejected units from m; n keeps them under `reject_denominator: original`. A term whose level
is an atom (trajectory, episode, group) has one value per atom: an atom counts as one unit where its mask holds anywhere
in it, and its weight stands on all its units. For groups, which span episodes, B is the number of groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.columns import Array, Batch, ColumnSpec, Level
from miles_core.errors import CombinationError

if TYPE_CHECKING:
    from miles_core.config.schema import AlgorithmKeys
    from miles_core.contracts.learning import TermInfo


def cut(batch: Batch, updates: int) -> list[Batch]:
    """`updates` contiguous runs of whole groups, sizes differing by at most one; fewer where there are fewer groups."""
    if batch.n_groups == 0:
        return []
    runs = np.array_split(np.arange(batch.n_groups), min(updates, batch.n_groups))
    return [take_groups(batch, run) for run in runs]


def take_groups(batch: Batch, groups: Array) -> Batch:
    """The sub-batch of these groups, episodes without trajectories included (they count in denominators)."""
    if len(groups) == batch.n_groups:
        return batch
    keep_episode = np.isin(batch.group_of, groups)
    episodes = np.flatnonzero(keep_episode)
    keep_row = keep_episode[batch.episode_of] if batch.n_trajectories else np.zeros(0, bool)
    picked = batch.select(np.flatnonzero(keep_row))  # knows only episodes that have trajectories
    new_episode = np.cumsum(keep_episode) - 1
    new_group = {int(g): i for i, g in enumerate(sorted(int(g) for g in groups))}
    columns = {
        name: value[episodes] if batch.specs[name].level == Level.EPISODE else picked.columns[name]
        for name, value in batch.columns.items()
    }
    return Batch(
        policy=batch.policy,
        step=batch.step,
        trajectory_ids=picked.trajectory_ids,
        episode_ids=tuple(batch.episode_ids[i] for i in episodes),
        group_ids=tuple(batch.group_ids[g] for g in sorted(new_group)),
        lengths=picked.lengths,
        episode_of=new_episode[batch.episode_of[keep_row]].astype(np.int64),
        group_of=np.array([new_group[int(g)] for g in batch.group_of[episodes]], np.int64),
        columns=columns,
        specs=batch.specs,
        items=picked.items,
    )


def compile_weights(
    minibatch: Batch, term: TermInfo, keys: AlgorithmKeys, *, max_new_tokens: int | None = None
) -> Array:
    """The column `weight.<term>`: float32 [units], computed in float64 over the whole minibatch of one update.

    `max_new_tokens` is L of `constant` where `algorithm.constant_length` is null. A zero denominator gives zeros.
    """
    trainable = minibatch.columns["trainable"].astype(bool)
    kept = minibatch.kept.astype(bool)
    num = kept if term.mask == "kept" else trainable
    den = kept if term.mask == "kept" and keys.reject_denominator == "kept" else trainable
    how = str(term.aggregation or keys.aggregation)
    length = constant_length(keys, max_new_tokens) if how == "constant" else 0
    if term.level == "unit":
        return _weights(num, den, minibatch.episode_of_unit, minibatch.n_episodes, how, length)
    atom_of_unit, atoms = _atoms(minibatch, term)
    alive = np.bincount(atom_of_unit[num], minlength=atoms) > 0
    counted = np.bincount(atom_of_unit[den], minlength=atoms) > 0
    if term.level == "trajectory":
        parent, parents = minibatch.episode_of, minibatch.n_episodes
    else:
        parent, parents = np.arange(atoms), atoms
    return _weights(alive, counted, parent, parents, how, length)[atom_of_unit]


def weight_spec(term: str) -> ColumnSpec:
    return ColumnSpec(name=f"weight.{term}", level=Level.UNIT, dtype="float32", help="aggregation and mask of the term")


def with_weights(
    minibatch: Batch, terms: Sequence[TermInfo], keys: AlgorithmKeys, *, max_new_tokens: int | None = None
) -> Batch:
    """The minibatch with the column `weight.<term>` of every term that is summed (dynamic weights have none)."""
    summed = [term for term in terms if not term.dynamic]
    columns = {f"weight.{t.name}": compile_weights(minibatch, t, keys, max_new_tokens=max_new_tokens) for t in summed}
    return minibatch.with_columns(columns, [weight_spec(t.name) for t in summed])


def constant_length(keys: AlgorithmKeys, max_new_tokens: int | None) -> int:
    """L of the aggregation `constant`; `CombinationError` where neither the config nor an engine gives one."""
    length = keys.constant_length or max_new_tokens
    if not length:
        raise CombinationError(
            "aggregation 'constant' divides by a length; algorithm.constant_length is null and nothing samples",
            fix="set algorithm.constant_length",
        )
    return length


def _atoms(minibatch: Batch, term: TermInfo) -> tuple[Array, int]:
    if term.level == "trajectory":
        return minibatch.trajectory_of_unit, minibatch.n_trajectories
    if term.level == "episode":
        return minibatch.episode_of_unit, minibatch.n_episodes
    return minibatch.group_of[minibatch.episode_of_unit], minibatch.n_groups


def _weights(num: Array, den: Array, parent: Array, parents: int, how: str, length: int) -> Array:
    """[rows] float32 from the masks [rows] and each row's parent (episode, or the atom itself)."""
    weight: Any
    if how == "token_mean":
        total = int(den.sum())
        weight = 1.0 / total if total else 0.0
    elif how == "episode_mean":
        counts = np.bincount(parent[den], minlength=parents).astype(np.float64)
        weight = np.divide(1.0, counts * parents, out=np.zeros(parents), where=counts > 0)[parent]
    elif how == "episode_sum":
        weight = 1.0 / parents if parents else 0.0
    elif how == "constant":
        weight = 1.0 / (parents * length) if parents else 0.0
    else:
        raise CombinationError(
            f"unknown aggregation {how!r}", fix="choose token_mean, episode_mean, episode_sum or constant"
        )
    compiled: Array = (num * weight).astype(np.float32)
    return compiled
