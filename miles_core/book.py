"""The state of the ledger: leases, what is open, and one book per policy, with their JSON form for checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from miles_core.admission import Numbers
from miles_core.journal import Position
from miles_core.records import Group, Task, group_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One task on loan, to be sampled once. `slot` is -1 for evaluations, whose `position` counts their tasks.

    `started_version` is the number of the version that was published when the lease began. Seeds derive from
    (policy, task, attempt), so that a lease of the same position repeats them.
    """

    id: str
    policy: str
    slot: int
    task: Task
    attempt: int
    env: str
    position: int
    split: str
    started_version: int

    @property
    def group(self) -> str:
        return group_id(self.task.id, self.attempt)

    def to_json(self) -> dict[str, Any]:
        """All fields, the task by its id."""
        return {name: getattr(self, name) for name in _LEASE} | {"task": self.task.id}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], task: Task) -> Lease:
        return cls(**{name: data[name] for name in _LEASE} | {"task": task})


_LEASE = tuple(f.name for f in fields(Lease))


@dataclass(slots=True)
class Open:
    """A lease without an end: in flight while `group` is `None`, then finished, then claimed by a step."""

    lease: Lease
    group: Group | None = None
    versions: tuple[int, int] | None = None
    group_at: Position | None = None
    restorable: bool = False  # whether the journal alone brings the group back
    claimed: bool = False


@dataclass(slots=True)
class Book:
    """The state of one policy. Slots and positions are taken from lease to end; trained and dropped keep positions."""

    slots: Numbers = field(default_factory=Numbers)
    positions: Numbers = field(default_factory=Numbers)
    consumed: int = 0  # steps
    published: int = -1  # version number; -1 before the first
    pending: dict[int, int] = field(default_factory=dict)  # slot -> position that was returned and is due again
    drops: dict[int, Counter[str]] = field(default_factory=dict)  # slot -> reasons, while its batch is not consumed
    base: tuple[int, Numbers] | None = None  # batch, and the free positions when its first lease was issued
    open: dict[str, Open] = field(default_factory=dict)
    finished: dict[str, None] = field(default_factory=dict)  # lease ids in order of finishing, not yet claimed
    ended: Counter[str] = field(default_factory=Counter)  # kind of end -> leases; and how many were `issued`

    def available(self, slot: int, position: int) -> bool:
        """Whether `slot` may take `position`: it is free, or due to this slot."""
        return self.positions.free(position) or self.pending.get(slot) == position

    def take(self, slot: int, position: int) -> None:
        """Mark a position that is available to `slot` as taken."""
        if self.pending.get(slot) == position:
            del self.pending[slot]
        else:
            self.positions.take(position)

    def start_batch(self, batch: int) -> Numbers:
        """The positions that were free when `batch` began, which is now where it is a new one."""
        if self.base is None or self.base[0] != batch:
            self.base = (batch, Numbers(self.positions.end, self.positions.holes))
        return self.base[1]

    def to_json(self) -> dict[str, Any]:
        """Plain data that shares nothing with this book."""
        return {
            "slots": asdict(self.slots),
            "positions": asdict(self.positions),
            "consumed": self.consumed,
            "published": self.published,
            "pending": [[slot, position] for slot, position in self.pending.items()],
            "drops": [[slot, dict(why)] for slot, why in self.drops.items()],
            "base": None if self.base is None else [self.base[0], asdict(self.base[1])],
            "ended": dict(self.ended),
            "open": [
                o.lease.to_json() | {"group_at": o.group_at, "versions": o.versions, "restorable": o.restorable}
                for o in self.open.values()
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Book:
        """The state without its open leases: `Ledger._settle` takes back what it keeps of them. Nothing is published
        to engines that start anew."""
        book = cls(
            slots=Numbers(**data["slots"]),
            positions=Numbers(**data["positions"]),
            consumed=data["consumed"],
            pending={slot: position for slot, position in data["pending"]},
            drops={slot: Counter(why) for slot, why in data["drops"]},
            base=None if data["base"] is None else (data["base"][0], Numbers(**data["base"][1])),
            ended=Counter(data["ended"]),
        )
        for lease in data["open"]:
            if lease["split"] == "train":
                book.slots.give(lease["slot"])
                book.positions.give(lease["position"])
        return book
