"""`miles audit RUN`: prove the accounting of a run from its files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer


def audit(run: Annotated[Path, typer.Argument(help="a run directory, e.g. runs/quickstart")]) -> int:
    """Prove from the journal: every lease ends once, no group is trained twice, batches hold their own slots, no token
    is older than allowed, and every version that sampled was verified. Exit code 1 where a promise was broken."""
    from miles_core.cli.accounting import check_history, check_versions
    from miles_core.cli.table import table
    from miles_core.config.compose import reload
    from miles_core.history import History
    from miles_core.journal import read
    from miles_core.run import RunDir

    opened = RunDir.open(run)
    run_file = reload(run)
    history = History()
    frames = list(read(opened.path / "journal"))
    for frame in frames:
        history.apply(frame)
    schedules = {policy.name: policy.schedule for policy in run_file.policies.values()}
    finished = all(history.steps.get(name, 0) == run_file.run.steps * p.share for name, p in run_file.policies.items())
    rows = []
    for name in schedules:
        own = [entry for entry in history.entries.values() if entry.lease["policy"] == name]
        ends = Counter("open" if entry.end is None else entry.end[0] for entry in own)
        lags = [e.end[1] - e.oldest for e in own if e.end and e.end[0] == "trained" and e.oldest is not None]
        numbers = (len(own), *(ends[end] for end in ("trained", "evaluated", "dropped", "returned", "open")))
        rows.append([name, str(history.steps.get(name, 0)), *map(str, numbers), str(max(lags, default=0))])
        for why, count in Counter(str(e.end[1]) for e in own if e.end and e.end[0] == "dropped").most_common(10):
            rows.append(["", "", "", "", "", str(count), "", "", "", why])
    header = ["policy", "steps", "leases", "trained", "evaluated", "dropped", "returned", "open", "oldest token", ""]
    print(table(header, [row + [""] * (len(header) - len(row)) for row in rows]))
    found = check_history(frames, schedules, finished=finished) + check_versions(frames)
    if found:
        print(f"\n{len(found)} broken promises:")
        print("\n".join(f"  {sentence}" for sentence in found))
        return 1
    state = "finished" if finished else "not finished"
    print(f"\nevery promise held: {len(frames)} records, lineage {history.lineage}, {state}")
    return 0
