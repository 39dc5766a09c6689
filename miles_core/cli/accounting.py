"""The proof behind `miles audit`: a whole journal against what the schedule promises, and against what else the run
directory says. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miles_core.history import History

if TYPE_CHECKING:
    from miles_core.config.schema import ScheduleConfig
    from miles_core.journal import Frame, Position


def check_history(
    frames: Iterable[Frame], schedules: Mapping[str, ScheduleConfig], *, finished: bool = False
) -> list[str]:
    """Prove the accounting of a whole journal: every sentence returned is a broken promise.

    Held: every lease ends at most once (exactly once where the run `finished`, or went on on another lineage) and is
    finished at most once, with its own group; what was trained was finished before, and no group twice; batches hold
    `groups_per_step` groups, their own slots under `order: slot`; steps follow one another; no trained token is older
    than `max_staleness`, and the oldest is said.
    """
    history = History()
    found: list[str] = []
    cuts: list[tuple[Position, tuple[int, ...]]] = []  # earlier resumes: where each stands, where it went on from
    for frame in frames:
        due, header = dict(history.steps), frame.header
        if frame.kind == "group":
            entry = history.entries.get(header["lease"])
            if entry and entry.group_at and not entry.end:
                found.append(f"lease {header['lease']} was finished twice")
            found += _check_group(header, entry.lease if entry else {})
        elif frame.kind == "lineage":
            cut = tuple(header["cut"])
            settled, where = {*header["kept"], *header["dropped"], *header["returned"]}, f"lineage {header['lineage']}"
            lost = [lease for lease, entry in history.entries.items() if not entry.end and lease not in settled]
            if not any(at >= cut > before for at, before in cuts):  # else that branch was not its own
                found += [f"lease {lease} has no end, and {where} went on without it" for lease in lost]
            cuts.append((frame.position, cut))
        history.apply(frame)
        if frame.kind == "trained":
            policy, step = header["policy"], header["step"]
            if step != due.get(policy, 0):
                found.append(f"step {step} of policy {policy} was trained where step {due.get(policy, 0)} was due")
            if policy not in schedules:
                found.append(f"step {step} was trained by policy {policy}, which the run file does not name")
                continue
            found += _check_batch(header, history, schedules[policy])
    found += history.problems
    seen: dict[tuple[str, str], str] = {}
    for lease, entry in history.entries.items():
        if entry.end is None:
            if finished:
                found.append(f"lease {lease} has no end, and the run finished")
        elif entry.end[0] == "trained":
            key = (entry.lease["policy"], f"{entry.lease['task']}#{entry.lease['attempt']}")
            if (other := seen.setdefault(key, lease)) != lease:
                found.append(f"group {key[1]} of policy {key[0]} was trained twice: leases {other} and {lease}")
    return found


def check_published(frames: Iterable[Frame]) -> list[str]:
    """Every version that sampled a trained token was one of its policy and had been published: with the receipts of the
    engines that served it, or as the alias of the version before it, which had."""
    verified: set[tuple[str, int, int]] = set()
    before: dict[tuple[str, int], int] = {}  # policy and lineage -> the number that was published last
    sampled_by: dict[str, list[tuple[str, int, int]]] = {}
    found: list[str] = []
    for frame in frames:
        header = frame.header
        if frame.kind == "published":
            policy, lineage, number = (header[key] for key in ("policy", "lineage", "number"))
            receipts = header["engines"].values()
            last, before[policy, lineage] = before.get((policy, lineage)), number
            alias = not receipts and not header["changed"] and (policy, lineage, last) in verified
            if alias or (receipts and all(evidence and root for evidence, root in receipts)):
                verified.add((policy, lineage, number))
        elif frame.kind == "group":
            sampled_by[header["lease"]] = [tuple(version) for version in header["versions"]]
        elif frame.kind == "trained":
            versions = {version for lease in header["leases"] for version in sampled_by.get(lease, ())}
            for name, lineage, number in sorted(versions):
                if name != header["policy"]:
                    why = "is of another policy"
                elif (name, lineage, number) not in verified:
                    why = "was never verified"
                else:
                    continue
                where = f"step {header['step']} of policy {header['policy']}"
                found.append(f"{where}: version {name}@{lineage}.{number} sampled for it and {why}")
    return found


class Reached:
    """Where a journal ends and how many steps it had consumed at each of its positions. `ends`: by segment, the byte
    behind its last record."""

    def __init__(self, frames: Sequence[Frame], ends: Mapping[int, int]) -> None:
        self._ends = ends
        # The very beginning: where a run that was killed before its first record goes on.
        self._between = {(0, 0)} | {frame.position for frame in frames} | set(ends.items())
        self._at: list[Position] = []
        self._steps: list[dict[str, int]] = [{}]
        for frame in frames:
            if frame.kind == "trained":
                self._steps.append({**self._steps[-1], frame.header["policy"]: frame.header["step"] + 1})
            elif frame.kind == "lineage":
                self._steps.append(dict(frame.header["steps"]))
            else:
                continue
            self._at.append(frame.position)

    def check(self, what: str, position: Position, steps: Mapping[str, int]) -> list[str]:
        """Hold against the journal that `steps` were consumed at `position`, which `what` says."""
        (segment, byte), name = position, f"journal/{position[0]:06d}.frames"
        if position not in self._between:
            end = self._ends.get(segment)
            if end is None or byte > end:
                where = "which is not there" if end is None else f"whose records end at byte {end}"
            else:
                where = "where no record begins or ends"
            return [f"{what} at byte {byte} of {name}, {where}"]
        had = self._steps[bisect_left(self._at, position)]
        return [
            f"{what} at byte {byte} of {name} with {count} steps of policy {policy}; there the journal has "
            f"{had.get(policy, 0)}"
            for policy, count in steps.items()
            if count != had.get(policy, 0)
        ]


def check_positions(
    frames: Sequence[Frame], ends: Mapping[int, int], ledgers: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Every position that a checkpoint (`ledgers`: file -> content, of whatever lineage) or a lineage was written at
    lies in the journal, and the steps that it had consumed are those of the journal there."""
    reached = Reached(frames, ends)
    found: list[str] = []
    for file, ledger in ledgers.items():
        try:
            segment, byte = ledger["journal"]
            steps = {policy: int(book["consumed"]) for policy, book in ledger["policies"].items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            found.append(f"{file} is no ledger of a checkpoint")
        else:
            found += reached.check(f"{file} was written", (segment, byte), steps)
    for frame in frames:
        if frame.kind == "lineage":
            cut = (frame.header["cut"][0], frame.header["cut"][1])
            found += reached.check(f"lineage {frame.header['lineage']} goes on", cut, frame.header["steps"])
    return found


def check_metrics(frames: Sequence[Frame], lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """`metrics.jsonl` knows no step that the journal does not: of the newest lineage, for where a machine died, what
    older ones wrote and did not sync may be lost. A step is journalled before it is reported."""
    known = {tuple(f.header[key] for key in ("policy", "lineage", "step")) for f in frames if f.kind == "trained"}
    newest = max((frame.header["lineage"] for frame in frames if frame.kind == "lineage"), default=0)
    unknown: dict[tuple[str, int], list[int]] = {}
    for line in lines:
        told = (line["policy"], line["lineage"], line["step"]) if line.get("type") == "train" else None
        if told and line["lineage"] >= newest and told not in known:
            unknown.setdefault(told[:2], []).append(line["step"])
    return [
        f"metrics.jsonl has {len(steps)} step(s) of policy {policy} in lineage {lineage} that the journal does not "
        f"have, from step {min(steps)} to step {max(steps)}"
        for (policy, lineage), steps in unknown.items()
    ]


def _check_group(header: Mapping[str, Any], lease: Mapping[str, Any]) -> list[str]:
    """A group is of its lease, and its tokens are of the versions that it names."""
    group, name = header["group"], header["lease"]
    found: list[str] = []
    told = {key: group[key] for key in ("policy", "slot", "attempt")} | {"task": group["task"]["id"]}
    for key, value in told.items() if lease else ():
        if value != lease[key]:
            found.append(f"lease {name} is of {key} {lease[key]!r}, and was finished with a group of {key} {value!r}")
    named = {span[2] for *_, spans in header["trajectories"] for span in spans}
    if named != set(range(len(header["versions"]))):
        found.append(f"lease {name}: its tokens are of {len(named)} versions, {len(header['versions'])} are named")
    return found


def _check_batch(header: Mapping[str, Any], history: History, schedule: ScheduleConfig) -> list[str]:
    policy, step, leases = header["policy"], header["step"], header["leases"]
    where = f"step {step} of policy {policy} (lineage {header['lineage']})"
    found: list[str] = []
    if header["lineage"] != history.current:
        found.append(f"{where}: the journal is in lineage {history.current}")
    if len(leases) != schedule.groups_per_step or len(set(leases)) != len(leases):
        found.append(f"{where}: {len(set(leases))} groups, {schedule.groups_per_step} were due")
    entries = [history.entries[lease] for lease in leases if lease in history.entries]
    slots = [entry.lease["slot"] for entry in entries]
    first = step * schedule.groups_per_step
    if schedule.order == "slot" and slots != list(range(first, first + len(leases))):
        found.append(f"{where}: slots {slots} are not its own, in order")
    for lease, entry in zip(leases, entries, strict=False):
        if entry.group_at is None:
            found.append(f"{where}: lease {lease} was trained and never finished")
        old = entry.oldest is not None and step - entry.oldest > schedule.max_staleness
        if old and schedule.on_stale != "mask":
            found.append(f"{where}: lease {lease} holds a token of version {entry.oldest}")
    oldest = min((entry.oldest for entry in entries if entry.oldest is not None), default=None)
    if oldest is not None and schedule.on_stale == "mask":
        oldest = max(oldest, step - schedule.max_staleness)
    if header["oldest"] != oldest:
        found.append(f"{where}: its oldest token is of version {oldest}, by its groups; it says {header['oldest']}")
    if header["oldest"] is not None and step - header["oldest"] > schedule.max_staleness:
        found.append(f"{where}: a token of version {header['oldest']} was trained")
    return found
