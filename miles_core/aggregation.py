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
from typing import Any

import numpy as np

from miles_core.columns import Array, Batch, ColumnSpec, Level
from miles_core.config.schema import AlgorithmKeys
from miles_core.contracts.learning import TermInfo
from miles_core.errors import CombinationError


def cut(batch: Batch, updates: int) -> list[Batch]:
    """`updates` contiguous runs of whole groups, sizes differing by at most one; fewer where there are fewer groups."""
    if batch.n_groups == 0:
        return []
    runs = np.array_split(np.arange(batch.n_groups), min(updates, batch.n_groups))
    return [batch.select_groups(run) for run in runs] if len(runs) > 1 else [batch]


def compile_weights(
    minibatch: Batch, term: TermInfo, keys: AlgorithmKeys, *, max_new_tokens: int | None = None
) -> Array:
    """The column `weight.<term>`: float32 [units], computed in float64 over the whole minibatch of one update.

    `max_new_tokens` is L of `constant` where `algorithm.constant_length` is null. A zero denominator gives zeros.
    """
    trainable, kept = minibatch.columns["trainable"], minibatch.kept
    num = kept if term.mask == "kept" else trainable
    den = kept if term.mask == "kept" and keys.reject_denominator == "kept" else trainable
    episodes, groups = minibatch.n_episodes, minibatch.n_groups
    # Of each level: the atom of every unit; the parent of every atom, over which denominators run; how many of those.
    # An episode's parent is itself, and so is a group's.
    atoms = {
        "unit": (np.arange(minibatch.units), minibatch.episode_of_unit, episodes),
        "trajectory": (minibatch.trajectory_of_unit, minibatch.episode_of, episodes),
        "episode": (minibatch.episode_of_unit, np.arange(episodes), episodes),
        "group": (minibatch.group_of[minibatch.episode_of_unit], np.arange(groups), groups),
    }
    atom_of_unit, parent, parents = atoms[term.level]
    alive, counted = (np.bincount(atom_of_unit[mask], minlength=len(parent)) > 0 for mask in (num, den))
    how = str(term.aggregation or keys.aggregation)
    weight: Any
    if how == "token_mean":
        weight = 1.0 / max(int(counted.sum()), 1)
    elif how == "episode_mean":
        counts = np.bincount(parent[counted], minlength=parents)
        weight = (1.0 / (np.maximum(counts, 1) * float(parents)))[parent]
    elif how == "episode_sum":
        weight = 1.0 / max(parents, 1)
    elif how == "constant":
        weight = 1.0 / (max(parents, 1) * constant_length(keys, max_new_tokens))
    else:
        raise CombinationError(
            f"unknown aggregation {how!r}", fix="choose token_mean, episode_mean, episode_sum or constant"
        )
    compiled: Array = (alive * weight).astype(np.float32)[atom_of_unit]
    return compiled


def with_weights(
    minibatch: Batch, terms: Sequence[TermInfo], keys: AlgorithmKeys, *, max_new_tokens: int | None = None
) -> Batch:
    """The minibatch with the column `weight.<term>` of every term that is summed (dynamic weights have none)."""
    columns = {
        f"weight.{term.name}": compile_weights(minibatch, term, keys, max_new_tokens=max_new_tokens)
        for term in terms
        if not term.dynamic
    }
    help = "aggregation and mask of a term"
    specs = [ColumnSpec(name=name, level=Level.UNIT, dtype="float32", help=help) for name in columns]
    return minibatch.with_columns(columns, specs)


def constant_length(keys: AlgorithmKeys, max_new_tokens: int | None) -> int:
    """L of the aggregation `constant`; `CombinationError` where neither the config nor an engine gives one."""
    length = keys.constant_length or max_new_tokens
    if not length:
        what = "aggregation 'constant' divides by a length; algorithm.constant_length is null and nothing samples"
        raise CombinationError(what, fix="set algorithm.constant_length")
    return length
