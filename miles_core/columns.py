"""Ragged columns: what a column is (`ColumnSpec`), a batch of them (`Batch`), and the checks at the borders.

A batch keeps trajectories in slot order, then member, then leaf. A unit column is one flat array over all tokens (or
denoising steps) of all trajectories; trajectory and episode columns have one row each. A column is aligned with the
token that it describes: `behaviour_logprobs[t]` is log p(token t | tokens < t).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np

from miles_core.errors import RecordError
from miles_core.records import Finish, Group, Origin, Ref, Sampling, Trajectory, shared_columns

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


def _core(level: Level, name: str, dtype: str, help: str, **more: Any) -> ColumnSpec:
    return ColumnSpec(name=name, level=level, dtype=dtype, help=help, **more)


#: Columns that core itself declares. Parts and extensions add theirs.
CORE_COLUMNS: dict[str, ColumnSpec] = {
    spec.name: spec
    for spec in (
        _core(Level.UNIT, "tokens", "int32", "token ids"),
        _core(Level.UNIT, "origin", "uint8", "0 prompt, 1 sampled, 2 environment, 3 demonstration"),
        _core(Level.UNIT, "trainable", "bool", "may be trained on; a subset of sampled and demonstration"),
        _core(Level.UNIT, "behaviour_logprobs", "float32", "log p under the sampling distribution", required=False),
        _core(Level.UNIT, "proximal_logprobs", "float32", "the trainer's score of the policy at the start of the step"),
        _core(Level.UNIT, "advantages", "float32", "per unit"),
        _core(Level.UNIT, "correction_weight", "float32", "product of the static corrections", required=False),
        _core(Level.UNIT, "rejected", "bool", "taken out of the kept mask by a correction", required=False),
        _core(Level.UNIT, "values", "float32", "the critic head's output at t-1"),
        _core(Level.UNIT, "returns", "float32", "targets of the critic"),
        _core(Level.TRAJECTORY, "bootstrap_value", "float32", "value after a truncation"),
        _core(Level.TRAJECTORY, "temperature", "float32", "sampling temperature", fill=1.0),
        _core(Level.TRAJECTORY, "top_p", "float32", "sampling top-p", fill=1.0),
        _core(Level.TRAJECTORY, "top_k", "int32", "sampling top-k, 0 for all"),
        _core(Level.TRAJECTORY, "truncated", "bool", "finish reason is `length`"),
        _core(Level.EPISODE, "reward", "float64", "Episode.reward", fill=float("nan")),
        _core(Level.EPISODE, "preference", "int8", "+1 chosen, -1 rejected"),
        _core(Level.UNIT, "keep_counts", "int32", "kept ids per token, 0 for all", required=False),
        _core(Level.ITEM, "keep_ids", "int32", "flat, by keep_counts", large=True, required=False),
    )
}


#: What every trajectory on the token axis has.
ALWAYS = ("tokens", "origin", "trainable")
_NOT_SAMPLED = Sampling(max_new_tokens=0)  # the defaults leave a distribution as it is


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
                what = f"column {name!r} has {len(value)} rows; the batch has {self.rows(spec.level)} {spec.level}s"
                raise RecordError(what, fix="return one row per " + spec.level)
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
        rows = np.asarray(trajectories, dtype=np.int64)
        episodes = _in_order(self.episode_of[rows])
        return self._part(rows, episodes, _in_order(self.group_of[episodes]))

    def select_groups(self, groups: Array) -> Batch:
        """The sub-batch of these group indices (ascending), with those of their episodes that have no trajectory."""
        episodes = np.flatnonzero(np.isin(self.group_of, groups))
        return self._part(np.flatnonzero(np.isin(self.episode_of, episodes)), episodes, np.asarray(groups))

    def _part(self, rows: Array, episodes: Array, groups: Array) -> Batch:
        pick = {Level.UNIT: _units_of(self.lengths, rows), Level.TRAJECTORY: rows, Level.EPISODE: episodes}
        return replace(
            self,
            trajectory_ids=tuple(self.trajectory_ids[i] for i in rows),
            episode_ids=tuple(self.episode_ids[i] for i in episodes),
            group_ids=tuple(self.group_ids[i] for i in groups),
            lengths=self.lengths[rows],
            episode_of=_places(episodes, self.n_episodes)[self.episode_of[rows]],
            group_of=_places(groups, self.n_groups)[self.group_of[episodes]],
            columns={name: value[pick[self.specs[name].level]] for name, value in self.columns.items()},
            items={name: (flat[_units_of(counts, rows)], counts[rows]) for name, (flat, counts) in self.items.items()},
        )

    def group_slices(self) -> list[Array]:
        """Trajectory indices of each group, in order."""
        group = self.group_of[self.episode_of]
        return [np.flatnonzero(group == g) for g in range(self.n_groups)]


def _in_order(values: Array) -> Array:
    """Distinct values in order of first appearance."""
    _, first = np.unique(values, return_index=True)
    return values[np.sort(first)]


def _places(index: Array, n: int) -> Array:
    """int64 [n]: where each of `index` stands in it."""
    places = np.zeros(n, np.int64)
    places[index] = np.arange(len(index))
    return places


def _units_of(lengths: Array, rows: Array) -> Array:
    """Indices of the units (or items) of these rows, where row i owns `lengths[i]` of them."""
    ends = np.cumsum(lengths)
    ranges = [np.arange(ends[i] - lengths[i], ends[i]) for i in rows]
    return np.concatenate([np.zeros(0, np.int64), *ranges])


def collate(policy: str, step: int, groups: Sequence[Group], specs: Mapping[str, ColumnSpec]) -> Batch:
    """Groups to one batch, holding the columns named in `specs` that trajectories or episodes carry.

    Failed episodes without trajectories keep their place among the episodes (they count in denominators). What every
    trajectory on the token axis has (`ALWAYS`) is there even where the batch has no trajectory at all: with 0 rows.
    """
    episodes = [e for group in groups for e in group.episodes]
    rows = [t for e in episodes for t in e.trajectories]
    sampling, cut = [t.sampling or _NOT_SAMPLED for t in rows], Finish.LENGTH
    columns: dict[str, Array] = {
        "temperature": np.array([s.temperature for s in sampling], np.float32),
        "top_p": np.array([s.top_p for s in sampling], np.float32),
        "top_k": np.array([s.top_k for s in sampling], np.int32),
        "truncated": np.array([t.finish == cut for t in rows], bool),
        "reward": np.array([np.nan if e.reward is None else e.reward for e in episodes], np.float64),
        "preference": np.array([e.preference for e in episodes], np.int8),
    }
    items: dict[str, tuple[Array, Array]] = {}
    shared: list[Any] = [shared_columns([t for e in group.episodes for t in e.trajectories]) for group in groups]
    pieces: list[Any] = [t.columns for t in rows] if None in shared else shared  # what holds the rows, end to end
    carried = {name for piece in pieces for name in piece} or ALWAYS
    for spec in specs.values():
        if spec.name not in carried or spec.level == Level.EPISODE:
            continue
        parts: list[Any] = [piece.get(spec.name) for piece in pieces]
        if pieces is not shared or spec.level != Level.UNIT or any(part is None for part in parts):
            parts = [_rows(t, spec) for t in rows]
        flat = np.concatenate([_absent(spec, 0), *parts], dtype=spec.dtype, casting="unsafe")
        if spec.level == Level.ITEM:
            items[spec.name] = (flat, np.array([len(p) for p in parts], np.int64))
        else:
            columns[spec.name] = flat
    known = CORE_COLUMNS | dict(specs)
    for name in sorted({key for e in episodes for key in e.components}):
        column = f"reward.{name}"
        known[column] = _core(Level.EPISODE, column, "float64", "a component that the environment reports")
        columns[column] = np.array([e.components.get(name, 0.0) for e in episodes], np.float64)
    return Batch(
        policy=policy,
        step=step,
        trajectory_ids=tuple([t.id for t in rows]),
        episode_ids=tuple([e.id for e in episodes]),
        group_ids=tuple(g.id for g in groups),
        lengths=np.array([t.length for t in rows], np.int64),
        episode_of=np.array([i for i, e in enumerate(episodes) for _ in e.trajectories], np.int64),
        group_of=np.array([i for i, g in enumerate(groups) for _ in g.episodes], np.int64),
        columns=columns,
        specs=known,
        items=items,
    )


def _absent(spec: ColumnSpec, rows: int) -> Array:
    return np.full((rows, *(n or 0 for n in spec.inner)), spec.fill, dtype=spec.dtype)


def _rows(trajectory: Trajectory, spec: ColumnSpec) -> Array:
    """What one trajectory has of a column: a row a unit, one row, or any number of items."""
    value = trajectory.columns.get(spec.name)
    if isinstance(value, Ref):
        what = f"column {spec.name!r} of {trajectory.id!r} is a reference that nothing resolved"
        raise RecordError(what, fix="resolve references on the rank before collating")
    if value is None and spec.level == Level.UNIT and spec.required:
        what = f"trajectory {trajectory.id!r} lacks column {spec.name!r}, which others have"
        raise RecordError(what, fix="give the column in every trajectory, or declare it with required=False")
    if value is None:
        return _absent(spec, {Level.UNIT: trajectory.length, Level.TRAJECTORY: 1}.get(spec.level, 0))
    array = np.asarray(value, dtype=spec.dtype)
    return array.reshape(1, *spec.inner) if spec.level == Level.TRAJECTORY else array


def validate(trajectory: Trajectory, specs: Mapping[str, ColumnSpec]) -> None:
    """Check one trajectory at a border of the system. Raises `RecordError` naming field, lengths and trajectory."""

    def wrong(what: str, fix: str) -> RecordError:
        return RecordError(f"trajectory {trajectory.id!r}: {what}", fix=fix)

    n, columns = trajectory.length, trajectory.columns
    for name, value in columns.items():
        spec = specs.get(name)
        if spec is None:
            raise wrong(f"column {name!r} was never declared", "declare it with a ColumnSpec")
        if spec.level == Level.UNIT and not isinstance(value, Ref) and len(value) != n:
            raise wrong(f"column {name!r} has {len(value)} rows, length is {n}", "give one row per unit")
    if trajectory.axis != "token":
        return
    for name in ALWAYS:
        if name not in columns:
            raise wrong(f"column {name!r} is missing", "give it in every trajectory on the token axis")
    sampled = np.asarray(columns["origin"]) == Origin.SAMPLED
    stray = np.asarray(columns["trainable"]) & ~sampled
    if np.count_nonzero(stray) and bool((stray & (np.asarray(columns["origin"]) != Origin.DEMONSTRATION)).any()):
        raise wrong("a trainable token is neither sampled nor a demonstration", "mask it")
    count = _count_sampled(trajectory, sampled, wrong)
    if count:
        logprobs = columns.get("behaviour_logprobs")
        if logprobs is None:
            raise wrong("sampled tokens without behaviour_logprobs", "return the engine's log-probabilities")
        if not plausible(np.asarray(logprobs)[sampled]):
            raise wrong("a behaviour log-probability is not finite or above 0", "return log-probabilities")
    counts = columns.get("keep_counts")
    if counts is not None:
        ids = columns.get("keep_ids")
        total = int(np.asarray(counts).sum())
        if ids is None or (not isinstance(ids, Ref) and len(ids) != total):
            raise wrong(f"keep_counts sum to {total}, keep_ids differ", "give keep_ids flat, by keep_counts")


#: So many numbers Python itself looks at in less time than a NumPy reduction takes to begin.
FEW = 256


def plausible(logprobs: Array) -> bool:
    """Whether all of these are log-probabilities: finite, and at most 0 but for rounding."""
    if len(logprobs) < FEW:
        values = logprobs.tolist()
        return not values or (max(values) <= 1e-4 and sum(values) > -np.inf)  # false for NaN too, as below
    return bool(np.maximum.reduce(logprobs) <= 1e-4 and np.minimum.reduce(logprobs) > -np.inf)


_START = attrgetter("start")


def _count_sampled(trajectory: Trajectory, sampled: Array, wrong: Callable[[str, str], RecordError]) -> int:
    """How many tokens were sampled; spans must cover exactly those, each once."""
    covered = inside = end = 0
    spans = trajectory.spans
    for span in spans if len(spans) < 2 else sorted(spans, key=_START):
        if not end <= span.start < span.end <= trajectory.length:
            raise wrong(f"span {span.start}:{span.end} is empty, outside, or overlaps another", "fix the spans")
        end = span.end
        covered += end - span.start
        inside += int(np.count_nonzero(sampled[span.start : end]))
    count = int(np.count_nonzero(sampled))
    if not covered == inside == count:
        raise wrong(f"spans cover {covered} tokens, {count} were sampled", "cover exactly what was sampled")
    return count
