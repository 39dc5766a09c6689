"""Load plugins in processes of their own, and ask them for their health checks.

`python -m miles_core.cli.probe KIND:NAME…` loads the names of one module and prints one JSON line; whatever the plugin
does (exit, crash, hang) stays there. `probe` is the other side, with a deadline.
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


def probe(entries: Sequence[Entry], deadline_s: float = DEADLINE_S) -> list[Finding]:
    """Findings about entries of one module: whether each loads, named `kind:name`, then what its health checks say."""
    names = [f"{e.kind}:{e.name}" for e in entries]
    command = [sys.executable, "-m", "miles_core.cli.probe", *names]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=deadline_s, env=environment, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        finding, fix = f"did not load within {deadline_s:g} s", "importing a plugin must be quick"
    else:
        line = next((text for text in done.stdout.splitlines() if text.startswith(_MARK)), "")
        if line:
            return [Finding(**row) for row in json.loads(line.removeprefix(_MARK))]
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        finding, fix = (
            f"its process ended with {done.returncode}: {last}",
            "importing a plugin must not end the process",
        )
    fix = f"upgrade or uninstall {entries[0].distribution}; {fix}"
    return [Finding(name=name, ok=False, finding=finding, fix=fix) for name in names]


def probe_all(entries: Sequence[Entry]) -> list[Finding]:
    """`probe` of every module that these entries name, a few at a time."""
    modules: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        modules.setdefault((entry.distribution, entry.module), []).append(entry)
    with ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 1)) as pool:
        return [finding for findings in pool.map(probe, modules.values()) for finding in findings]


def look(names: Sequence[str]) -> list[dict[str, Any]]:
    """What the child process reports."""
    from miles_core.discovery import scan
    from miles_core.errors import MilesError

    catalogue = scan()
    rows = []
    for name in names:
        kind, _, plain = name.partition(":")
        try:
            catalogue.load(kind, plain)
            rows.append({"name": name, "ok": True, "finding": "loads"})
        except MilesError as error:
            rows.append({"name": name, "ok": False, "finding": error.message, "fix": error.fix})
    try:
        for given in catalogue.pm.hook.miles_health_checks():
            for check, ok, finding, fix in given:
                rows.append({"name": str(check), "ok": bool(ok), "finding": str(finding), "fix": str(fix)})
    except Exception as error:
        finding = f"a health check raised {type(error).__name__}: {error}"
        rows.append({"name": names[0], "ok": False, "finding": finding, "fix": "report it to its author"})
    return rows


if __name__ == "__main__":
    print(_MARK + json.dumps(look(sys.argv[1:])), flush=True)
