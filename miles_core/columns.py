"""Ragged columns: what a column is (`ColumnSpec`), a batch of them (`Batch`), and the checks at the borders.

A batch keeps trajectories in slot order, then member, then leaf. A unit column is one flat array over all tokens (or
denoising steps) of all trajectories; trajectory and episode columns have one row each. A column is aligned with the
token that it describes: `behaviour_logprobs[t]` is log p(token t | tokens < t).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np

from miles_core.errors import RecordError
from miles_core.records import Episode, Group, Origin, Ref, Trajectory

Array = np.ndarray[Any, Any]


class Level(StrEnum):
    """What a column has one row of."""

    UNIT = "unit"
    TRAJECTORY = "trajectory"
    EPISODE = "episode"
    ITEM = "item"


class Align(StrEnum):
    """Which token a unit column describes: the one it is stored at, or the one that was fed in there."""

    TARGET = "target"
    INPUT = "input"


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSpec:
    """A column, declared before the run by core, a part or an extension; presence never depends on the first sample.

    `inner` is the shape of one row. `fill` pads a row that a trajectory does not have, where `required` is false.
    """

    name: str
    level: Level
    dtype: str
    inner: tuple[int | None, ...] = ()
    fill: float = 0
    align: Align = Align.TARGET
    large: bool = False
    required: bool = True
    help: str = ""


def _unit(name: str, dtype: str, help: str, *, required: bool = True) -> ColumnSpec:
    return ColumnSpec(name=name, level=Level.UNIT, dtype=dtype, required=required, help=help)


#: Columns that core itself declares. Parts and extensions add theirs.
CORE_COLUMNS: dict[str, ColumnSpec] = {
    spec.name: spec
    for spec in (
        _unit("tokens", "int32", "token ids"),
        _unit("origin", "uint8", "0 prompt, 1 sampled, 2 environment, 3 demonstration"),
        _unit("trainable", "bool", "may be trained on; a subset of sampled and demonstration"),
        _unit("behaviour_logprobs", "float32", "log-probability under the sampling distribution", required=False),
        _unit("proximal_logprobs", "float32", "the trainer's score of the policy at the start of the step"),
        _unit("advantages", "float32", "per unit"),
        _unit("correction_weight", "float32", "product of the static corrections", required=False),
        _unit("rejected", "bool", "taken out of the kept mask by a correction", required=False),
        _unit("values", "float32", "the critic head's output at t-1"),
        _unit("returns", "float32", "targets of the critic"),
        ColumnSpec(name="bootstrap_value", level=Level.TRAJECTORY, dtype="float32", help="value after a truncation"),
        ColumnSpec(name="temperature", level=Level.TRAJECTORY, dtype="float32", fill=1.0, help="sampling temperature"),
        ColumnSpec(name="top_p", level=Level.TRAJECTORY, dtype="float32", fill=1.0, help="sampling top-p"),
        ColumnSpec(name="top_k", level=Level.TRAJECTORY, dtype="int32", help="sampling top-k, 0 for all"),
        ColumnSpec(name="truncated", level=Level.TRAJECTORY, dtype="bool", help="finish reason is `length`"),
        ColumnSpec(name="reward", level=Level.EPISODE, dtype="float64", fill=float("nan"), help="Episode.reward"),
        ColumnSpec(name="preference", level=Level.EPISODE, dtype="int8", help="+1 chosen, -1 rejected"),
        ColumnSpec(
            name="keep_counts", level=Level.UNIT, dtype="int32", required=False, help="kept ids per token, 0 for all"
        ),
        ColumnSpec(
            name="keep_ids", level=Level.ITEM, dtype="int32", large=True, required=False, help="flat, by keep_counts"
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one training step (or minibatch) consumes.

    `lengths` int64 [n_trajectories]; `episode_of` int64 [n_trajectories], nondecreasing, an index into episodes;
    `group_of` int64 [n_episodes], nondecreasing, an index into groups. `items` are the flat `item` columns, each with
    its row count per trajectory: name -> (flat array, int64 [n_trajectories]).
    """

    policy: str
    step: int
    trajectory_ids: tuple[str, ...]
    episode_ids: tuple[str, ...]
    group_ids: tuple[str, ...]
    lengths: Array
    episode_of: Array
    group_of: Array
    columns: Mapping[str, Array]
    specs: Mapping[str, ColumnSpec]
    items: Mapping[str, tuple[Array, Array]]

    @cached_property
    def offsets(self) -> Array:
        """int64 [n_trajectories + 1]: trajectory i owns units `offsets[i]:offsets[i + 1]`."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    @property
    def units(self) -> int:
        return int(self.lengths.sum())

    @property
    def n_trajectories(self) -> int:
        return len(self.trajectory_ids)

    @property
    def n_episodes(self) -> int:
        return len(self.episode_ids)

    @property
    def n_groups(self) -> int:
        return len(self.group_ids)

    @cached_property
    def trajectory_of_unit(self) -> Array:
        """int64 [units]."""
        return np.repeat(np.arange(self.n_trajectories), self.lengths)

    @cached_property
    def episode_of_unit(self) -> Array:
        """int64 [units]."""
        return np.repeat(self.episode_of, self.lengths)

    @cached_property
    def kept(self) -> Array:
        """bool [units]: `trainable` without `rejected`."""
        trainable = self.columns["trainable"]
        rejected = self.columns.get("rejected")
        return trainable if rejected is None else trainable & ~rejected

    def rows(self, level: Level) -> int:
        return {Level.UNIT: self.units, Level.TRAJECTORY: self.n_trajectories, Level.EPISODE: self.n_episodes}[level]

    def with_columns(self, columns: Mapping[str, Array], specs: Iterable[ColumnSpec]) -> Batch:
        """A batch with `columns` added or replaced; checks each against its spec."""
        known = dict(self.specs) | {spec.name: spec for spec in specs}
        merged = dict(self.columns)
        for name, value in columns.items():
            spec = known.get(name)
            if spec is None:
                raise RecordError(f"column {name!r} was never declared", fix="declare it with a ColumnSpec")
            if len(value) != self.rows(spec.level):
                raise RecordError(
                    f"column {name!r} has {len(value)} rows; the batch has {self.rows(spec.level)} {spec.level}s",
                    fix="return one row per " + spec.level,
                )
            merged[name] = np.asarray(value, dtype=spec.dtype)
        return replace(self, columns=merged, specs=known)

    def per_unit(self, name: str) -> Array:
        """Column `name` repeated to units, whatever its level."""
        value = self.columns[name]
        level = self.specs[name].level
        if level == Level.UNIT:
            return value
        return value[self.trajectory_of_unit if level == Level.TRAJECTORY else self.episode_of_unit]

    def select(self, trajectories: Sequence[int] | Array) -> Batch:
        """The sub-batch of these trajectory indices, in the given order (which must keep episodes contiguous)."""
        index = np.asarray(trajectories, dtype=np.int64)
        old_episodes = self.episode_of[index]
        episodes = _in_order(old_episodes)
        groups = _in_order(self.group_of[episodes])
        episode_rank = {int(e): i for i, e in enumerate(episodes)}
        group_rank = {int(g): i for i, g in enumerate(groups)}
        units = _gather_units(self.offsets, index)
        pick = {Level.UNIT: units, Level.TRAJECTORY: index, Level.EPISODE: episodes}
        return Batch(
            policy=self.policy,
            step=self.step,
            trajectory_ids=tuple(self.trajectory_ids[i] for i in index),
            episode_ids=tuple(self.episode_ids[i] for i in episodes),
            group_ids=tuple(self.group_ids[i] for i in groups),
            lengths=self.lengths[index],
            episode_of=np.array([episode_rank[int(e)] for e in old_episodes], dtype=np.int64),
            group_of=np.array([group_rank[int(self.group_of[e])] for e in episodes], dtype=np.int64),
            columns={name: value[pick[self.specs[name].level]] for name, value in self.columns.items()},
            specs=self.specs,
            items={name: _select_items(flat, counts, index) for name, (flat, counts) in self.items.items()},
        )

    def group_slices(self) -> list[Array]:
        """Trajectory indices of each group, in order."""
        group = self.group_of[self.episode_of] if self.n_trajectories else np.zeros(0, np.int64)
        return [np.flatnonzero(group == g) for g in range(self.n_groups)]


def _in_order(values: Array) -> Array:
    """Distinct values in order of first appearance."""
    _, first = np.unique(values, return_index=True)
    return values[np.sort(first)]


def _gather_units(offsets: Array, index: Array) -> Array:
    if not len(index):
        return np.zeros(0, np.int64)
    return np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in index])


def _select_items(flat: Array, counts: Array, index: Array) -> tuple[Array, Array]:
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return flat[_gather_units(offsets, index)], counts[index]


def collate(policy: str, step: int, groups: Sequence[Group], specs: Mapping[str, ColumnSpec]) -> Batch:
    """Groups to one batch, holding the columns named in `specs` that trajectories or episodes carry.

    Failed episodes without trajectories keep their place among the episodes (they count in denominators).
    """
    episodes: list[tuple[int, Episode]] = [(g, e) for g, group in enumerate(groups) for e in group.episodes]
    trajectories: list[tuple[int, Trajectory]] = [(i, t) for i, (_, e) in enumerate(episodes) for t in e.trajectories]
    rows = [t for _, t in trajectories]
    columns: dict[str, Array] = {}
    items: dict[str, tuple[Array, Array]] = {}
    for spec in specs.values():
        if spec.level == Level.ITEM:
            if any(spec.name in t.columns for t in rows):
                parts = [_item_rows(t, spec) for t in rows]
                items[spec.name] = (np.concatenate(parts), np.array([len(p) for p in parts], np.int64))
        elif spec.level == Level.UNIT and any(spec.name in t.columns for t in rows):
            columns[spec.name] = np.concatenate([_unit_rows(t, spec) for t in rows])
        elif spec.level == Level.TRAJECTORY and any(spec.name in t.columns for t in rows):
            columns[spec.name] = np.array([_trajectory_row(t, spec) for t in rows], dtype=spec.dtype)
    sampling = [t.sampling for t in rows]
    columns["temperature"] = np.array([1.0 if s is None else s.temperature for s in sampling], np.float32)
    columns["top_p"] = np.array([1.0 if s is None else s.top_p for s in sampling], np.float32)
    columns["top_k"] = np.array([0 if s is None else s.top_k for s in sampling], np.int32)
    columns["truncated"] = np.array([t.finish == "length" for t in rows], bool)
    columns["reward"] = np.array([np.nan if e.reward is None else e.reward for _, e in episodes], np.float64)
    columns["preference"] = np.array([e.preference for _, e in episodes], np.int8)
    known = dict(CORE_COLUMNS) | dict(specs)
    for name in sorted({key for _, e in episodes for key in e.components}):
        column = f"reward.{name}"
        known[column] = ColumnSpec(name=column, level=Level.EPISODE, dtype="float64")
        columns[column] = np.array([e.components.get(name, 0.0) for _, e in episodes], np.float64)
    return Batch(
        policy=policy,
        step=step,
        trajectory_ids=tuple(t.id for t in rows),
        episode_ids=tuple(e.id for _, e in episodes),
        group_ids=tuple(g.id for g in groups),
        lengths=np.array([t.length for t in rows], np.int64),
        episode_of=np.array([i for i, _ in trajectories], np.int64),
        group_of=np.array([g for g, _ in episodes], np.int64),
        columns=columns,
        specs=known,
        items=items,
    )


def _unit_rows(trajectory: Trajectory, spec: ColumnSpec) -> Array:
    value = trajectory.columns.get(spec.name)
    if value is None:
        if spec.required:
            raise RecordError(
                f"trajectory {trajectory.id!r} lacks column {spec.name!r}, which others have",
                fix="give the column in every trajectory, or declare it with required=False",
            )
        return np.full((trajectory.length, *(n or 0 for n in spec.inner)), spec.fill, dtype=spec.dtype)
    return _array(trajectory, spec, value)


def _item_rows(trajectory: Trajectory, spec: ColumnSpec) -> Array:
    value = trajectory.columns.get(spec.name)
    if value is None:
        return np.zeros((0, *(n or 0 for n in spec.inner)), dtype=spec.dtype)
    return _array(trajectory, spec, value)


def _trajectory_row(trajectory: Trajectory, spec: ColumnSpec) -> Any:
    value = trajectory.columns.get(spec.name, spec.fill)
    return value if np.isscalar(value) else np.asarray(value).reshape(spec.inner or ())


def _array(trajectory: Trajectory, spec: ColumnSpec, value: Array | Ref) -> Array:
    if isinstance(value, Ref):
        raise RecordError(
            f"column {spec.name!r} of {trajectory.id!r} is a reference that nothing resolved",
            fix="resolve references on the rank before collating",
        )
    return np.asarray(value, dtype=spec.dtype)


def validate(trajectory: Trajectory, specs: Mapping[str, ColumnSpec]) -> None:
    """Check one trajectory at a border of the system. Raises `RecordError` naming field, lengths and trajectory."""

    def wrong(what: str, fix: str) -> RecordError:
        return RecordError(f"trajectory {trajectory.id!r}: {what}", fix=fix)

    n = trajectory.length
    for name, value in trajectory.columns.items():
        spec = specs.get(name)
        if spec is None:
            raise wrong(f"column {name!r} was never declared", "declare it with a ColumnSpec")
        if spec.level == Level.UNIT and not isinstance(value, Ref) and len(value) != n:
            raise wrong(f"column {name!r} has {len(value)} rows, length is {n}", "give one row per unit")
    if trajectory.axis != "token":
        return
    for name in ("tokens", "origin", "trainable"):
        if name not in trajectory.columns:
            raise wrong(f"column {name!r} is missing", "give it in every trajectory on the token axis")
    origin = np.asarray(trajectory.columns["origin"])
    trainable = np.asarray(trajectory.columns["trainable"])
    sampled = origin == Origin.SAMPLED
    if bool((trainable & ~(sampled | (origin == Origin.DEMONSTRATION))).any()):
        raise wrong("a trainable token is neither sampled nor a demonstration", "mask it")
    covered = np.zeros(n, bool)
    for span in trajectory.spans:
        if not 0 <= span.start < span.end <= n or bool(covered[span.start : span.end].any()):
            raise wrong(f"span {span.start}:{span.end} is empty, outside, or overlaps another", "fix the spans")
        covered[span.start : span.end] = True
    if not np.array_equal(covered, sampled):
        raise wrong(
            f"spans cover {int(covered.sum())} tokens, {int(sampled.sum())} were sampled",
            "cover exactly what was sampled",
        )
    if sampled.any():
        logprobs = trajectory.columns.get("behaviour_logprobs")
        if logprobs is None:
            raise wrong("sampled tokens without behaviour_logprobs", "return the engine's log-probabilities")
        values = np.asarray(logprobs)[sampled]
        if not np.isfinite(values).all() or bool((values > 1e-4).any()):
            raise wrong("a behaviour log-probability is not finite or above 0", "return log-probabilities")
    counts = trajectory.columns.get("keep_counts")
    if counts is not None:
        ids = trajectory.columns.get("keep_ids")
        total = int(np.asarray(counts).sum())
        if ids is None or (not isinstance(ids, Ref) and len(ids) != total):
            raise wrong(f"keep_counts sum to {total}, keep_ids differ", "give keep_ids flat, by keep_counts")
