"""Exactly-once accounting: every task is leased, and every lease ends in exactly one of trained, evaluated, dropped
(with a reason) or returned (with a reason).

The ledger writes each fact to the journal first and believes it afterwards. It also keeps what a checkpoint needs:
which slots and task positions are taken, how many steps were consumed, which version is published, and the finished
groups that wait to be trained. `snapshot` is that state as JSON; `Ledger.resume` goes on from one, on a new lineage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.admission import broken, is_strict, versions_of
from miles_core.book import Book, Lease, Open
from miles_core.config.schema import ScheduleConfig
from miles_core.errors import LedgerError
from miles_core.frames import decode_group, encode_group, restorable
from miles_core.history import BEFORE, Entry, History
from miles_core.journal import Journal, Position, read, read_one
from miles_core.records import Group, Task, Version

__all__ = ["Book", "Lease", "Ledger", "Open"]

FORMAT = 1


class Ledger:
    """The accounting of a run. `schedules` gives each policy's section `schedule`; `journal` may be `None` in tests.

    `omit` names columns that are not journalled (`run.journal: light` and the large columns). `notes` is JSON that the
    loop keeps in snapshots.
    """

    def __init__(
        self, journal: Journal | None, schedules: Mapping[str, ScheduleConfig], *, omit: frozenset[str] = frozenset()
    ) -> None:
        self.journal = journal
        self.schedules = dict(schedules)
        self.books = {policy: Book() for policy in schedules}
        self.lineage = 0
        self.notes: dict[str, Any] = {}
        self._omit = omit
        self._issued = 0

    # --- what comes next ---------------------------------------------------------------------------------------------

    def next_slot(self, policy: str) -> int:
        """The lowest slot that is not taken: by a consumed step, or a group that is claimed, waits or is in flight."""
        return self.books[policy].slots.nth(0)

    def next_position(self, policy: str, slot: int) -> int:
        """The task position that `slot` gets next.

        A returned position goes back to its slot. Otherwise the lowest free one; but where nothing may depend on
        timing, the n-th replacement in slot i of a batch gets number n·G + i of the positions that were free when the
        batch began, whichever lease was dropped first. Positions that were skipped come first in the next batch.
        """
        book = self.books[policy]
        if slot in book.pending:
            return book.pending[slot]
        schedule = self.schedules[policy]
        if not is_strict(schedule):
            return book.positions.nth(0)
        batch, place = divmod(slot, schedule.groups_per_step)
        replaced = self.reasons(policy, slot).total()
        return book.start_batch(batch).nth(replaced * schedule.groups_per_step + place)

    # --- leases and their ends ---------------------------------------------------------------------------------------

    def lease(
        self, policy: str, *, slot: int, position: int, env: str, task: Task, attempt: int, split: str = "train"
    ) -> Lease:
        """Issue a lease; for evaluations `slot` is -1 and nothing is taken."""
        book = self.books[policy]
        lease = Lease(
            id=f"{policy}/{self.lineage}.{self._issued}",
            policy=policy,
            slot=slot,
            task=task,
            attempt=attempt,
            env=env,
            position=position,
            split=split,
            started_version=book.published,
        )
        if split == "train" and not (book.slots.free(slot) and book.available(slot, position)):
            raise broken(f"slot {slot} or position {position} of policy {policy!r} is taken already")
        self._write("lease", lease.to_json())
        self._issued += 1
        book.ended["issued"] += 1
        if split == "train":
            book.slots.take(slot)
            book.take(slot, position)
        book.open[lease.id] = Open(lease)
        return lease

    def finish(self, lease: Lease, group: Group) -> None:
        """A lease's group is finished and accepted: journal it whole and keep it until it is trained."""
        entry = self._entry(lease, "finished")
        expected, found = ((x.policy, x.slot, x.attempt, x.task.id) for x in (lease, group))
        if entry.group is not None or found != expected:
            raise LedgerError(
                f"lease {lease.id} is for (policy, slot, attempt, task) {expected}; it was finished with group "
                f"{group.id!r} of {found}",
                fix="return the group of the lease that was given, once",
            )
        header, blocks = encode_group(group, omit=self._omit)
        entry.group_at = self._write("group", {"lease": lease.id, **header}, blocks)
        entry.group = group
        entry.restorable = restorable(header)
        entry.versions = versions_of(group)
        self.books[lease.policy].finished[lease.id] = None

    def claim(self, policy: str, leases: Sequence[Lease]) -> list[Group]:
        """A step takes these finished groups; their end is still to come."""
        book = self.books[policy]
        groups: list[Group] = []
        for lease in leases:
            entry = self._entry(lease, "claimed")
            if entry.group is None or entry.claimed:
                raise broken(f"lease {lease.id} cannot be claimed")
            entry.claimed = True
            del book.finished[lease.id]
            groups.append(entry.group)
        return groups

    def trained(self, policy: str, step: int, leases: Sequence[Lease], oldest: int | None) -> None:
        """`step` consumed these claimed groups; `oldest` is the lowest version number of a token that was trained."""
        book, schedule = self.books[policy], self.schedules[policy]
        entries = [self._entry(lease, "trained") for lease in leases]
        wrong = ""
        if step != book.consumed or len({lease.id for lease in leases}) != schedule.groups_per_step:
            wrong = f"it consumed {len(leases)} groups; step {book.consumed} with {schedule.groups_per_step} is due"
        elif not all(entry.claimed for entry in entries):
            wrong = "a group was never claimed"
        elif oldest is not None and step - oldest > schedule.max_staleness:
            wrong = f"a token of version {oldest} is older than max_staleness {schedule.max_staleness} allows"
        if wrong:
            raise broken(f"step {step} of policy {policy!r}: {wrong}")
        fields = {"policy": policy, "step": step, "lineage": self.lineage, "oldest": oldest}
        self._write("trained", {**fields, "leases": [lease.id for lease in leases]})
        for lease in leases:
            del book.open[lease.id]
            if schedule.order == "slot":
                book.drops.pop(lease.slot, None)
        if schedule.order == "ready":
            book.drops = {slot: why for slot, why in book.drops.items() if book.slots.free(slot)}
        book.consumed += 1
        book.ended["trained"] += len(leases)

    def evaluated(self, lease: Lease, step: int) -> None:
        """An evaluation's lease is done."""
        self._end(lease, "evaluated", step)

    def drop(self, lease: Lease, reason: str, *, newest: int | None = None) -> None:
        """Nothing of this lease will be trained, and its task is used up. Its slot is free at once.

        `newest` is the highest version number that sampled for it. A group that was finished is dropped for its age
        only: such a drop is void under a lineage that resumes from before.
        """
        self._end(lease, "dropped", reason, newest=newest)
        book = self.books[lease.policy]
        book.slots.give(lease.slot)
        book.drops.setdefault(lease.slot, Counter())[reason] += 1

    def give_back(self, lease: Lease, reason: str) -> None:
        """The task goes back to its source: the next lease of this slot gets it again, with the same seeds."""
        self._end(lease, "returned", reason)
        if lease.split == "train":
            book = self.books[lease.policy]
            book.slots.give(lease.slot)
            book.pending[lease.slot] = lease.position

    def publish(self, version: Version, receipts: Mapping[str, Any], changed: bool) -> None:
        """`version` is served from now on. Receipts are kept as (evidence, root) by engine."""
        engines = {name: [str(getattr(r, "evidence", "")), getattr(r, "root", None)] for name, r in receipts.items()}
        fields = {"policy": version.policy, "lineage": version.lineage, "number": version.number}
        self._write("published", {**fields, "changed": changed, "engines": engines})
        self.books[version.policy].published = version.number

    # --- reading the state -------------------------------------------------------------------------------------------

    def waiting(self, policy: str) -> list[Open]:
        """Finished groups that no step has claimed, in order of finishing."""
        book = self.books[policy]
        return [book.open[lease] for lease in book.finished]

    def in_flight(self, policy: str) -> list[Lease]:
        """Leases that have no group yet, in order of issue."""
        return [o.lease for o in self.books[policy].open.values() if o.group is None]

    def reasons(self, policy: str, slot: int) -> Counter[str]:
        """Why leases of this slot were dropped since its batch began."""
        return self.books[policy].drops.get(slot, Counter())

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """The whole state as JSON, for `ledger.json`. Syncs the journal, which the snapshot points into."""
        if self.journal is not None:
            self.journal.sync()
        return {
            "format": FORMAT,
            "lineage": self.lineage,
            "journal": list(self.journal.position()) if self.journal is not None else None,
            "notes": dict(self.notes),
            "policies": {policy: book.to_json() for policy, book in self.books.items()},
        }

    @classmethod
    def resume(
        cls,
        snapshot: Mapping[str, Any],
        journal: Journal,
        schedules: Mapping[str, ScheduleConfig],
        *,
        omit: frozenset[str] = frozenset(),
        changes: Mapping[str, Any] | None = None,
    ) -> Ledger:
        """Go on from a checkpoint, on a new lineage, with `journal` freshly opened on the run's folder.

        Later `trained` entries are void. Finished groups that only versions up to the checkpoint sampled are kept and
        wait to be trained (again); so are drops that such versions caused. All other leases are returned. `changes`
        (what the config changed) is recorded with the lineage. Raises `JournalError`, `LedgerError`.
        """
        if snapshot.get("format") != FORMAT or set(snapshot["policies"]) != set(schedules):
            raise LedgerError(
                f"the checkpoint's ledger has format {snapshot.get('format')} and policies "
                f"{sorted(snapshot['policies'])}; format {FORMAT} and {sorted(schedules)} were expected",
                fix="resume with the run file and the version of miles-core that wrote it",
            )
        segment, offset = snapshot["journal"]
        cut: Position = (segment, offset)
        history = History(cut)
        for data in snapshot["policies"].values():
            history.begin(data["open"])
        for frame in read(journal.folder, cut):
            history.apply(frame)
        ledger = cls(journal, schedules, omit=omit)
        ledger.lineage = max(history.lineage, snapshot["lineage"]) + 1
        ledger.notes = dict(snapshot["notes"])
        ledger.books = {policy: Book.from_json(data) for policy, data in snapshot["policies"].items()}
        ledger._settle(history, cut, dict(changes or {}))
        return ledger

    def _settle(self, history: History, cut: Position, changes: dict[str, Any]) -> None:
        """Decide what becomes of every lease that was open at the checkpoint or issued behind it, and write it down."""
        for policy, book in self.books.items():
            if is_strict(self.schedules[policy]):
                book.start_batch(book.consumed)  # before anything of this batch is taken back
        settled: dict[str, list[Entry]] = {"kept": [], "dropped": [], "returned": []}
        for entry in history.unsettled():
            lease, book = entry.lease, self.books[entry.lease["policy"]]
            slot, position = lease["slot"], lease["position"]
            valid = (
                lease["split"] == "train"
                and max(lease["started_version"], entry.newest) <= book.consumed
                and book.available(slot, position)
            )
            if valid and entry.group_at and entry.restorable and book.slots.free(slot):
                end = "kept"
                book.slots.take(slot)
                book.take(slot, position)
                self._restore(lease, entry.group_at)
            elif valid and not entry.group_at and entry.end and entry.end[0] == "dropped":
                end = "dropped"
                book.take(slot, position)
                book.drops.setdefault(slot, Counter())[entry.end[1]] += 1
                book.ended["dropped"] += 1
            else:
                end = "returned"
                book.ended["returned"] += 1
            settled[end].append(entry)
            book.ended["issued"] += entry.leased_at != BEFORE
        for entry in settled["returned"]:
            lease, book = entry.lease, self.books[entry.lease["policy"]]
            slot, position = lease["slot"], lease["position"]
            before = entry.leased_at == BEFORE and lease["split"] == "train"
            if before and slot not in book.pending and book.positions.free(position) and book.slots.free(slot):
                book.positions.take(position)
                book.pending[slot] = position
        fields: dict[str, Any] = {"lineage": self.lineage, "cut": list(cut)}
        fields["steps"] = {policy: book.consumed for policy, book in self.books.items()}
        fields |= {end: [entry.lease["id"] for entry in entries] for end, entries in settled.items()}
        self._write("lineage", fields | {"changes": changes})

    def _restore(self, data: Mapping[str, Any], at: Position) -> None:
        assert self.journal is not None
        frame = read_one(self.journal.folder, at)
        group = decode_group(frame.header, frame.body)
        lease = Lease.from_json(data, group.task)
        book = self.books[lease.policy]
        book.open[lease.id] = Open(lease, group=group, versions=versions_of(group), group_at=at, restorable=True)
        book.finished[lease.id] = None

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _entry(self, lease: Lease, what: str) -> Open:
        entry = self.books[lease.policy].open.get(lease.id)
        if entry is None:
            raise broken(f"lease {lease.id} cannot be {what}: it is not open")
        return entry

    def _end(self, lease: Lease, end: str, why: str | int, **more: Any) -> None:
        self._entry(lease, end)
        self._write("end", {"lease": lease.id, "end": end, "why": why, **more})
        book = self.books[lease.policy]
        del book.open[lease.id]
        book.finished.pop(lease.id, None)
        book.ended[end] += 1

    def _write(self, kind: str, fields: Mapping[str, Any], blocks: Sequence[bytes] = ()) -> Position | None:
        return None if self.journal is None else self.journal.append(kind, fields, blocks)
