"""Load one plugin in a process of its own, and ask it for its health checks.

`python -m miles_core.cli.probe KIND NAME` prints one JSON line; whatever the plugin does (exit, crash, hang) stays
there. `probe` is the other side, with a deadline.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_core.discovery import Entry

DEADLINE_S = 120.0
_MARK = "miles-probe:"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of `miles doctor`."""

    name: str
    ok: bool
    finding: str
    fix: str = ""


def probe(entry: Entry, deadline_s: float = DEADLINE_S) -> list[Finding]:
    """Findings about one plugin: whether it loads, then what its health checks say."""
    command = [sys.executable, "-m", "miles_core.cli.probe", entry.kind, entry.name]
    name = f"{entry.kind}:{entry.name}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=deadline_s, env=environment, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        fix = f"upgrade or uninstall {entry.distribution}; importing a plugin must be quick"
        return [Finding(name=name, ok=False, finding=f"did not load within {deadline_s:g} s", fix=fix)]
    line = next((text for text in done.stdout.splitlines() if text.startswith(_MARK)), "")
    if not line:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        finding = f"its process ended with {done.returncode}: {last}"
        return [Finding(name=name, ok=False, finding=finding, fix=f"upgrade or uninstall {entry.distribution}")]
    return [Finding(**row) for row in json.loads(line.removeprefix(_MARK))]


def probe_all(entries: Sequence[Entry]) -> dict[tuple[str, str], list[Finding]]:
    """`probe` for each, a few at a time."""
    with ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 1)) as pool:
        return dict(zip([(e.kind, e.name) for e in entries], pool.map(probe, entries), strict=True))


def look(kind: str, name: str) -> list[dict[str, Any]]:
    """What the child process reports."""
    from miles_core.discovery import scan
    from miles_core.errors import MilesError

    catalogue = scan()
    rows = []
    try:
        catalogue.load(kind, name)
        rows.append({"name": f"{kind}:{name}", "ok": True, "finding": "loads"})
        for given in catalogue.pm.hook.miles_health_checks():
            for check, ok, finding, fix in given:
                rows.append({"name": str(check), "ok": bool(ok), "finding": str(finding), "fix": str(fix)})
    except MilesError as error:
        rows.append({"name": f"{kind}:{name}", "ok": False, "finding": error.message, "fix": error.fix})
    except Exception as error:
        finding = f"a health check raised {type(error).__name__}: {error}"
        rows.append({"name": f"{kind}:{name}", "ok": False, "finding": finding, "fix": "report it to its author"})
    return rows


if __name__ == "__main__":
    print(_MARK + json.dumps(look(sys.argv[1], sys.argv[2])), flush=True)
