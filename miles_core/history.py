"""What a journal says happened: frames folded into leases and their ends, for resuming and for auditing.

A `lineage` frame is written by every resume: it names the checkpoint's place in the journal (`cut`) and what became of
each lease that was open there or was issued behind it: kept, dropped (as before), or returned. Everything else behind
the cut is void. Folding follows that, so that what is left is the history that the newest lineage stands on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_core.frames import restorable
from miles_core.journal import Frame, Position

BEFORE: Position = (-1, 0)  # leased before the part of the journal that is read


@dataclass(slots=True)
class Entry:
    """A lease in the history. `end` is `("trained", step)`, `("evaluated", step)`, `("dropped", reason)` or
    `("returned", reason)`."""

    lease: Mapping[str, Any]
    leased_at: Position
    group_at: Position | None = None
    finished_at: Position | None = None  # also where a resume gave the group up: another one may have kept it
    restorable: bool = False
    oldest: int | None = None  # lowest and highest version number that sampled for it
    newest: int = 0
    end: tuple[str, Any] | None = None
    end_at: Position = BEFORE


class History:
    """Fold frames in order with `apply`. `entries` holds every lease of the valid history, in order of issue."""

    def __init__(self, start: Position = (0, 0)) -> None:
        self.start = start
        self.entries: dict[str, Entry] = {}
        self.lineage = 0  # highest in the journal
        self.current = 0  # of the frames being folded
        self.steps: dict[str, int] = {}  # policy -> steps consumed, as far as the frames say
        self.left = False  # the journal went on from an earlier checkpoint: frames from here on are another history
        self.problems: list[str] = []

    def begin(self, leases: Sequence[Mapping[str, Any]]) -> None:
        """Start with what a checkpoint says was open (`Book.to_json`)."""
        for lease in leases:
            entry = self.entries[lease["id"]] = Entry(lease=lease, leased_at=BEFORE, restorable=lease["restorable"])
            if lease["group_at"]:
                entry.group_at = entry.finished_at = (lease["group_at"][0], lease["group_at"][1])
            if lease["versions"]:
                entry.oldest, entry.newest = lease["versions"]

    def apply(self, frame: Frame) -> None:
        header, kind, at = frame.header, frame.kind, frame.position
        if kind == "lineage":
            self._resume(header)
        elif self.left:
            return
        elif kind == "lease":
            if header["id"] in self.entries:
                self.problems.append(f"lease {header['id']} was issued twice")
            self.entries[header["id"]] = Entry(lease=header, leased_at=at)
        elif kind == "group":
            if entry := self._open(header["lease"], "finished"):
                numbers = [v[2] for v in header["versions"]]
                entry.group_at, entry.finished_at, entry.restorable = at, at, restorable(header)
                entry.oldest, entry.newest = min(numbers, default=None), max(numbers, default=0)
        elif kind == "trained":
            for lease in header["leases"]:
                self._end(lease, "trained", header["step"], at)
            self.steps[header["policy"]] = header["step"] + 1
        elif kind == "end":
            self._end(header["lease"], header["end"], header["why"], at, header.get("newest") or 0)

    def _open(self, lease: str, what: str) -> Entry | None:
        entry = self.entries.get(lease)
        if entry is None:
            self.problems.append(f"lease {lease} was {what}, and was never issued")
        elif entry.end is not None:
            self.problems.append(f"lease {lease} was {what} after it had ended as {entry.end[0]} ({entry.end[1]})")
            return None
        return entry

    def _end(self, lease: str, end: str, why: Any, at: Position, newest: int = 0) -> None:
        if entry := self._open(lease, end):
            entry.end, entry.end_at, entry.newest = (end, why), at, max(entry.newest, newest)

    def _resume(self, header: Mapping[str, Any]) -> None:
        self.lineage = max(self.lineage, header["lineage"])
        cut: Position = (header["cut"][0], header["cut"][1])
        if self.left or cut < self.start:
            self.left = True
            return
        self.current = header["lineage"]
        self.steps = {policy: int(step) for policy, step in header["steps"].items()}
        kept, dropped = set(header["kept"]), set(header["dropped"])
        for lease in sorted((kept | dropped) - self.entries.keys()):
            self.problems.append(f"lineage {header['lineage']} builds on lease {lease}, which is not in the history")
        for lease, entry in self.entries.items():
            if lease in kept:
                entry.end, entry.end_at, entry.group_at = None, BEFORE, entry.finished_at
            elif lease not in dropped and (entry.leased_at >= cut or entry.end is None or entry.end_at >= cut):
                entry.end, entry.end_at = ("returned", f"resume {header['lineage']}"), cut
                entry.group_at = None

    def unsettled(self) -> list[Entry]:
        """Leases that a resume must settle: all that were open at the checkpoint, and those issued behind it, unless
        an earlier resume gave them back already."""
        return [
            entry
            for entry in self.entries.values()
            if entry.leased_at == BEFORE or entry.group_at or not (entry.end and entry.end[0] == "returned")
        ]
