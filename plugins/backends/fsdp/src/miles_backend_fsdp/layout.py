"""From ragged trajectories to the tensors of one forward: right-padded rows, or packed tokens.

Only what a needed unit depends on is fed: a trajectory ends before its last needed unit, and one that needs nothing is
left out. Both layouts use plain causal attention over rows, so that no mask could let one trajectory see another:

- padded: `[rows, longest]`; padding stands to the right, where causal attention never looks;
- packed: every token stands once, in rows of at most `pack_tokens`, and attention gathers each trajectory's tokens
  into buckets of similar length (`Bucket`). With `share_prefixes`, tokens with the same history are one packed token:
  the prompt of a group is computed once, and so is whatever its answers begin with in common.

NumPy only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from miles_core.columns import Batch

Array = np.ndarray[Any, Any]

#: A bucket takes rows down to this share of its longest one.
BUCKET_FILL = 0.8
#: Gathering for attention costs about as much as this share of a token's linear work in one block.
GATHER_COST = 0.06


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Relative work: `token` of feeding one token through the model, `pair` of one (query, key) pair."""

    token: float = 1.0
    pair: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One forward.

    `tokens` int64 [rows, width]; `positions` int64, of that shape or [1, width]. `predictors` int64 [n]: where in
    the flattened grid the distribution of a needed unit is read; `units` int64 [n], ascending: those units in the
    micro-batch. `ends` int64 [rows], where asked for: the last token of every row in the flattened grid; `end_units`
    int64 [rows]: those units. `buckets` is `None` in the padded layout; otherwise int64 [rows of the bucket, longest of
    it] indices into the flattened grid (padding repeats index 0), and `inverse` int64 [rows * width] says where in the
    concatenated, flattened buckets each packed token's attention is found.
    """

    tokens: Array
    positions: Array
    predictors: Array
    units: Array
    buckets: tuple[Array, ...] | None = None
    inverse: Array | None = None
    ends: Array | None = None
    end_units: Array | None = None

    @property
    def fed(self) -> int:
        """Tokens that the forward computes, padding included."""
        return int(self.tokens.size)


def needed_units(micro: Batch) -> Array:
    """int64 ascending: trainable units (all where the batch has no such column) that are not first in a trajectory."""
    trainable = micro.columns.get("trainable")
    need = np.ones(micro.units, bool) if trainable is None else np.array(trainable, dtype=bool)
    starts = micro.offsets[:-1]
    need[starts[micro.lengths > 0]] = False
    return np.flatnonzero(need)


def fed_lengths(micro: Batch, units: Array) -> Array:
    """int64 [trajectories]: how many tokens of each must be fed to predict `units` (ascending)."""
    fed = np.zeros(micro.n_trajectories, np.int64)
    rows = micro.trajectory_of_unit[units]
    fed[rows] = units - micro.offsets[rows]  # ascending units: the last one of each row stays
    return fed


def build(micro: Batch, *, choice: str, share: bool, pack_tokens: int, costs: Costs, to_end: bool = False) -> Layout:
    """The layout of `micro`: `choice` is `padded`, `packed` or `auto` (the cheaper one by `costs`).

    With `to_end` trajectories that need anything are fed whole, and the layout says where their last tokens are.
    """
    units = needed_units(micro)
    fed = fed_lengths(micro, units)
    rows = np.flatnonzero(fed)
    if not len(rows):
        return _nothing(to_end)
    lengths = micro.lengths[rows] if to_end else fed[rows]
    width = int(lengths.max())
    within = np.arange(width)
    valid = within < lengths[:, None]
    source = np.where(valid, micro.offsets[rows][:, None] + within, 0)
    tokens = np.where(valid, micro.columns["tokens"][source], 0).astype(np.int64)
    rank = np.zeros(micro.n_trajectories, np.int64)
    rank[rows] = np.arange(len(rows))
    row = rank[micro.trajectory_of_unit[units]]
    column = units - micro.offsets[rows][row] - 1
    packed = None
    if choice != "padded":
        nodes, count = _trie(tokens, lengths, valid) if share else _distinct(lengths, valid)
        groups = _buckets(lengths)
        if choice == "packed" or _packed_is_cheaper(count, groups, lengths, tokens.size, width, costs):
            packed = (nodes, count, groups)
    if packed is None:
        found = Layout(
            tokens=tokens,
            positions=within[None],
            predictors=row * width + column,
            units=units,
        )
        at = np.arange(len(rows)) * width + lengths - 1
    else:
        found = _pack(*packed, tokens, valid, lengths, row, column, units, pack_tokens)
        at = packed[0][np.arange(len(rows)), lengths - 1]
    if not to_end:
        return found
    return replace(found, ends=at, end_units=micro.offsets[rows] + lengths - 1)


def _nothing(to_end: bool) -> Layout:
    """A forward of one token that no unit needs: ranks must run their collectives together."""
    zero = np.zeros((1, 1), np.int64)
    none = np.zeros(0, np.int64)
    ends = none if to_end else None
    return Layout(tokens=zero, positions=zero, predictors=none, units=none, ends=ends, end_units=ends)


def _distinct(lengths: Array, valid: Array) -> tuple[Array, int]:
    """A packed token for every token, row after row: int64 [rows, width] node ids (0 at padding), and their count."""
    nodes = np.zeros(valid.shape, np.int64)
    nodes[valid] = np.arange(int(lengths.sum()))
    return nodes, int(lengths.sum())


def _trie(tokens: Array, lengths: Array, valid: Array) -> tuple[Array, int]:
    """A packed token for every distinct history."""
    nodes = np.zeros(tokens.shape, np.int64)
    vocabulary = int(tokens.max()) + 1
    parents = np.zeros(len(lengths), np.int64)
    count = 0
    for t in range(tokens.shape[1]):
        alive = np.flatnonzero(lengths > t)
        _, first, inverse = np.unique(
            parents[alive] * vocabulary + tokens[alive, t], return_index=True, return_inverse=True
        )
        nodes[alive, t] = count + inverse
        parents[alive] = inverse
        count += len(first)
        if len(first) == len(alive):  # from here on every row is alone
            rest = valid.copy()
            rest[:, : t + 1] = False
            left = int(rest.sum())
            nodes[rest] = count + np.arange(left)
            return nodes, count + left
    return nodes, count


def _buckets(lengths: Array) -> list[Array]:
    """Row indices in runs of similar length, longest first; rows of a bucket keep their order."""
    order = np.argsort(-lengths, kind="stable")
    found: list[Array] = []
    start = 0
    for i in range(1, len(order) + 1):
        if i == len(order) or lengths[order[i]] < BUCKET_FILL * lengths[order[start]]:
            found.append(np.sort(order[start:i]))
            start = i
    return found


def _packed_is_cheaper(count: int, groups: list[Array], lengths: Array, padded: int, width: int, costs: Costs) -> bool:
    gathered = [(len(g), int(lengths[g].max())) for g in groups]
    pairs = sum(n * longest * longest for n, longest in gathered)
    moved = sum(n * longest for n, longest in gathered)
    packed = count * costs.token + pairs * costs.pair + moved * costs.token * GATHER_COST
    return packed < padded * costs.token + len(lengths) * width * width * costs.pair


def _pack(
    nodes: Array,
    count: int,
    groups: list[Array],
    tokens: Array,
    valid: Array,
    lengths: Array,
    row: Array,
    column: Array,
    units: Array,
    pack_tokens: int,
) -> Layout:
    height = -(-count // pack_tokens)
    width = -(-count // height)
    grid = np.zeros(height * width, np.int64)
    positions = np.zeros(height * width, np.int64)
    grid[nodes[valid]] = tokens[valid]
    positions[nodes[valid]] = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)[valid]
    buckets: list[Array] = []
    inverse = np.zeros(height * width, np.int64)
    base = 0
    for group in groups:
        longest = int(lengths[group].max())
        index, real = nodes[group, :longest], valid[group, :longest]
        inverse[index[real]] = base + np.flatnonzero(real)
        buckets.append(index)
        base += index.size
    return Layout(
        tokens=grid.reshape(height, width),
        positions=positions.reshape(height, width),
        predictors=nodes[row, column],
        units=units,
        buckets=tuple(buckets),
        inverse=inverse,
    )
