"""`miles audit RUN`: prove the accounting of a run from its files. No plugin of the run is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from miles_core.errors import EXIT_FINDINGS, CheckpointError, ResumeError

if TYPE_CHECKING:
    from miles_core.config.schema import ScheduleConfig
    from miles_core.history import History
    from miles_core.run import RunDir


def audit(run: Annotated[Path, typer.Argument(help="a run directory, e.g. runs/quickstart")]) -> int:
    """Prove from the journal: every lease ends once, no group is trained twice, batches hold their own slots, no token
    is older than allowed, every version that sampled was verified. And beside it: checkpoints and metrics know nothing
    that the journal does not, and no file of a checkpoint has changed. Exit code 1 where a promise was broken."""
    from miles_core.cli.accounting import check_history, check_metrics, check_positions, check_published
    from miles_core.history import History
    from miles_core.journal import read
    from miles_core.run import RunDir

    opened = RunDir.open(run)
    try:
        schedules, due = asked(opened.tree())
    except ResumeError as error:  # what was promised is not known any more; what was saved is
        return _broken([error.message, *_ledgers(opened, {})[1]])
    # Before the journal: of a run that goes on, it then says more than they do, never less.
    lines = list(opened.metrics())
    last = opened.latest()  # of a run's last step, it is written when every lease has its end
    ledgers, found = _ledgers(opened, due)
    frames = list(read(opened.path / "journal"))
    history = History()
    for frame in frames:
        history.apply(frame)
    step = last.step if last else 0
    finished = all(history.steps.get(name, 0) == steps == step * share for name, (steps, share) in due.items())
    _print(history, schedules)
    if any(frame.kind != "segment" for frame in frames):
        found += check_history(frames, schedules, finished=finished) + check_published(frames)
        ends = {frame.position[0]: frame.position[1] + frame.size for frame in frames}  # the last of each segment
        found += check_positions(frames, ends, ledgers) + check_metrics(frames, lines)
    elif beside := _beside(opened, lines):
        found = [f"journal/ holds no record, yet {'; '.join(beside)}"]
    if found:
        return _broken(found)
    state = "finished" if finished else "not finished"
    print(f"\nevery promise held: {len(frames)} records, lineage {history.lineage}, {state}")
    return 0


def _broken(found: Sequence[str]) -> int:
    print(f"\n{len(found)} broken promises:")
    print("\n".join(f"  {sentence}" for sentence in found))
    return EXIT_FINDINGS


def asked(tree: Mapping[str, Any]) -> tuple[dict[str, ScheduleConfig], dict[str, tuple[int, int]]]:
    """What a resolved tree asks of each policy: its schedule, and (all of its steps, those of one round). Binds nothing
    else, for an auditor need not have the plugins of the run."""
    from miles_core.config.binding import bind, join
    from miles_core.config.schema import PolicyKeys, RunConfig, ScheduleConfig

    run = bind(RunConfig, tree.get("run") or {}, "run")
    several = {name: scope for name, scope in (tree.get("policies") or {}).items() if scope}
    schedules, due = {}, {}
    for name, scope in (several or {"main": tree}).items():
        at = f"policies.{name}" if several else ""
        schedules[name] = bind(ScheduleConfig, scope.get("schedule") or {}, join(at, "schedule"))
        share = bind(PolicyKeys, {key: scope[key] for key in ("share",) if key in scope}, at).share
        due[name] = (run.steps * share, share)
    return schedules, due


def _ledgers(run: RunDir, due: Mapping[str, tuple[int, int]]) -> tuple[dict[str, Mapping[str, Any]], list[str]]:
    """What each committed checkpoint says, by file; and what is wrong with the steps that it names."""
    ledgers: dict[str, Mapping[str, Any]] = {}
    found: list[str] = []
    for checkpoint in run.checkpoints():
        file = f"checkpoints/{checkpoint.folder.name}/ledger.json"
        try:
            ledgers[file] = checkpoint.ledger()
        except CheckpointError:
            found.append(f"{file} cannot be read")
            continue
        try:
            checkpoint.check()
        except CheckpointError as error:
            found.append(error.message)
        books = ledgers[file].get("policies") or {}
        for name, (_, share) in due.items():
            consumed = (books.get(name) or {}).get("consumed")
            if books and consumed != checkpoint.step * share:
                found.append(
                    f"{file} says {consumed} consumed steps of policy {name}; the checkpoint is of "
                    f"{checkpoint.step * share}"
                )
    return ledgers, found


def _beside(run: RunDir, lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is there that is written only behind a record of the journal."""
    checkpoints, steps = run.checkpoints(), {line["step"] for line in lines if line.get("type") == "train"}
    rollouts = list((run.path / "rollouts").glob("*.jsonl"))
    return [
        *([f"checkpoints/ has {len(checkpoints)}, the last of step {checkpoints[-1].step}"] if checkpoints else []),
        *([f"metrics.jsonl has {len(steps)} steps"] if steps else []),
        *([f"rollouts/ has {len(rollouts)} files"] if rollouts else []),
    ]


def _print(history: History, schedules: Mapping[str, ScheduleConfig]) -> None:
    from miles_core.cli.table import table
    from miles_core.side import IDS

    rows = []
    for name in schedules:
        own = [entry for entry in history.entries.values() if entry.lease["policy"] == name]
        ends = Counter("open" if entry.end is None else entry.end[0] for entry in own)
        lags = [e.end[1] - e.oldest for e in own if e.end and e.end[0] == "trained" and e.oldest is not None]
        numbers = (len(own), *(ends[end] for end in ("trained", "evaluated", "dropped", "returned", "open")))
        rows.append([name, str(history.steps.get(name, 0)), *map(str, numbers), str(max(lags, default=0))])
        reasons = Counter(IDS.sub("", str(e.end[1])) for e in own if e.end and e.end[0] == "dropped")
        for why, count in reasons.most_common(10):
            rows.append(["", "", "", "", "", str(count), "", "", "", why])
    header = ["policy", "steps", "leases", "trained", "evaluated", "dropped", "returned", "open", "oldest token", ""]
    print(table(header, [row + [""] * (len(header) - len(row)) for row in rows]))
