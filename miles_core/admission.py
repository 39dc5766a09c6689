"""Which slot and task come next, and what may be trained: the pure rules of the schedule, without clocks or I/O.

`Numbers` hands out slots and task positions; `limit` is the admission bound; `fit_group` decides about failed
episodes; `mask_stale` and `is_stale` apply the lag rule. Lag is the number of the step that consumes a token minus the
number of the version that sampled it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field, replace

import numpy as np

from miles_core.config.schema import OnFailedEpisode, ScheduleConfig
from miles_core.errors import LedgerError, bad_answer
from miles_core.records import Episode, Group, Status, Trajectory, Version


def broken(what: str) -> LedgerError:
    return LedgerError(what, fix="report this: the accounting is broken")


@dataclass
class Numbers:
    """The natural numbers, each free or taken. All below `end` that are not in `holes` (sorted) are taken."""

    end: int = 0
    holes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.holes = sorted(self.holes)  # a list of its own

    def __len__(self) -> int:
        """How many are taken."""
        return self.end - len(self.holes)

    def free(self, number: int) -> bool:
        at = bisect_left(self.holes, number)
        return number >= self.end or (at < len(self.holes) and self.holes[at] == number)

    def nth(self, n: int) -> int:
        """The n-th free number, counted from 0."""
        return self.holes[n] if n < len(self.holes) else self.end + n - len(self.holes)

    def take(self, number: int) -> None:
        """Raises `LedgerError` where it is taken already."""
        if not self.free(number):
            raise broken(f"number {number} is taken already")
        if number >= self.end:
            self.holes.extend(range(self.end, number))
            self.end = number + 1
        else:
            del self.holes[bisect_left(self.holes, number)]

    def give(self, number: int) -> None:
        """Make a taken number free again."""
        if self.free(number):
            raise broken(f"number {number} is free already")
        insort(self.holes, number)


def is_strict(schedule: ScheduleConfig) -> bool:
    """Whether nothing may depend on timing: strictly on-policy, every batch its own slots."""
    return schedule.max_staleness == 0 and schedule.order == "slot"


def limit(schedule: ScheduleConfig, published: int, total_steps: int) -> int:
    """The slots below this one may be leased when version `published` is served.

    Slots that no step of the run will consume are never leased. In order `slot` an extra lease would stand in a batch
    that the served version cannot reach, so `oversample` means something in order `ready` only.
    """
    groups = schedule.groups_per_step
    bound = min((published + 1 + schedule.max_staleness) * groups, total_steps * groups)
    return bound + (schedule.oversample if schedule.order == "ready" else 0)


def versions_of(group: Group) -> tuple[int, int] | None:
    """Lowest and highest version number that sampled any token; `None` where nothing was sampled."""
    numbers = [s.version.number for e in group.episodes for t in e.trajectories for s in t.spans]
    return (min(numbers), max(numbers)) if numbers else None


def check_versions(group: Group, published: set[Version], since: int) -> None:
    """Raise `EngineError` where an engine says that a version sampled which is not one of these, or is older than
    number `since`, which all engines had when the lease was made: stale tokens would be sampled anew for ever."""
    last = None
    for t in [t for e in group.episodes for t in e.trajectories]:
        if t.spans is not last:  # most answers of a group share them
            last = t.spans
            for version in [s.version for s in last if s.version.number < since or s.version not in published]:
                due = f"a published version of {group.policy!r}, from number {since} on, was due"
                raise bad_answer(t.engine, t.id, f"tokens of {version} where {due}")


def is_stale(versions: tuple[int, int] | None, step: int, schedule: ScheduleConfig) -> bool:
    """Whether a group sampled by `versions` can no longer be consumed by `step` (nor by any later one).

    Under `on_stale: mask` a group lives as long as one of its tokens is young enough.
    """
    if versions is None:
        return False
    decisive = versions[1] if schedule.on_stale == "mask" else versions[0]
    return step - decisive > schedule.max_staleness


def mask_stale(group: Group, step: int, max_staleness: int) -> Group:
    """The group with every token older than the bound made untrainable context."""
    oldest = step - max_staleness

    def masked(trajectory: Trajectory) -> Trajectory:
        stale = [s for s in trajectory.spans if s.version.number < oldest]
        if not stale:
            return trajectory
        trainable = np.array(trajectory.columns["trainable"], dtype=bool)
        for span in stale:
            trainable[span.start : span.end] = False
        return replace(trajectory, columns={**trajectory.columns, "trainable": trainable})

    episodes = tuple(replace(e, trajectories=tuple(masked(t) for t in e.trajectories)) for e in group.episodes)
    return replace(group, episodes=episodes)


def failed_episodes(group: Group) -> list[Episode]:
    failed = Status.FAILED  # looked up once: CPython 3.11 calls a function for it
    return [episode for episode in group.episodes if episode.status == failed]


def fit_group(group: Group, schedule: ScheduleConfig) -> tuple[Group | None, str]:
    """The group to train after failed episodes were dealt with, or `None` and why not.

    `shrink` takes failed episodes out and keeps the rest if `min_group_size` of them are left.
    """
    failed = failed_episodes(group)
    if failed and schedule.on_failed_episode == OnFailedEpisode.drop_group:
        return None, f"failed episode: {failed[0].error}"
    kept = tuple(e for e in group.episodes if e.status != Status.FAILED) if failed else group.episodes
    if len(kept) < max(1, schedule.min_group_size):
        left = f"{len(kept)} of {len(group.episodes)} episodes left, min_group_size {schedule.min_group_size}"
        return None, left + (f": {failed[0].error}" if failed else "")
    return (replace(group, episodes=kept) if failed else group), ""
