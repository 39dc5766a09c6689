"""The state of the ledger: leases, what is open, and one book per policy, with their JSON form for checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    ended: Counter[str] = field(default_factory=Counter)  # kind of end -> leases

    def training(self) -> int:
        """Open leases that hold a slot."""
        return sum(o.lease.split == "train" for o in self.open.values())


def available(book: Book, slot: int, position: int) -> bool:
    """Whether `slot` may take `position`: it is free, or due to this slot."""
    return book.positions.free(position) or book.pending.get(slot) == position


def take(book: Book, slot: int, position: int) -> None:
    if book.pending.get(slot) == position:
        del book.pending[slot]
    else:
        book.positions.take(position)


def pair(data: Sequence[int] | None) -> tuple[int, int] | None:
    return (data[0], data[1]) if data else None


def ends(book: Book) -> int:
    return sum(book.ended[end] for end in ("trained", "evaluated", "dropped", "returned"))


def lease_out(lease: Lease) -> dict[str, Any]:
    return {
        "id": lease.id,
        "policy": lease.policy,
        "slot": lease.slot,
        "task": lease.task.id,
        "attempt": lease.attempt,
        "env": lease.env,
        "position": lease.position,
        "split": lease.split,
        "started_version": lease.started_version,
    }


def book_out(book: Book) -> dict[str, Any]:
    base = book.base
    return {
        "slots": book.slots.to_json(),
        "positions": book.positions.to_json(),
        "consumed": book.consumed,
        "published": book.published,
        "pending": [[slot, position] for slot, position in book.pending.items()],
        "drops": [[slot, dict(why)] for slot, why in book.drops.items()],
        "base": None if base is None else [base[0], base[1].to_json()],
        "ended": dict(book.ended),
        "open": [
            {
                **lease_out(o.lease),
                "group_at": list(o.group_at) if o.group_at else None,
                "versions": list(o.versions) if o.versions else None,
                "restorable": o.restorable,
            }
            for o in book.open.values()
        ],
    }


def book_in(data: Mapping[str, Any]) -> Book:
    """The state without its open leases: `Ledger._settle` takes back what it keeps of them."""
    base = data["base"]
    book = Book(
        slots=Numbers.from_json(data["slots"]),
        positions=Numbers.from_json(data["positions"]),
        consumed=data["consumed"],
        published=-1,
        pending={slot: position for slot, position in data["pending"]},
        drops={slot: Counter(why) for slot, why in data["drops"]},
        base=None if base is None else (base[0], Numbers.from_json(base[1])),
        ended=Counter(data["ended"]),
    )
    for lease in data["open"]:
        if lease["split"] == "train":
            book.slots.give(lease["slot"])
            book.positions.give(lease["position"])
    return book
