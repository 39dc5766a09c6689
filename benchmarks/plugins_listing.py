"""What `miles plugins` costs beyond starting Python and importing modules.

Three commands are timed in turn, in fresh interpreters, one thread each: `miles plugins` with 20 more plugins installed
than this environment has; an interpreter that imports exactly the modules which that command had imported when it
ended; and the same with a typer command of the same options that does nothing. Differences of the medians, in processor
time. Claim: below 50 ms beyond interpreter and imports; typer's own parsing is shown apart.

    python benchmarks/plugins_listing.py
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CLAIM_MS = 50.0
IDLE = """
from typing import Annotated
import typer
app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.callback()(lambda: None)
@app.command("plugins")
def plugins(
    kind: Annotated[str, typer.Option()] = "",
    check: Annotated[bool, typer.Option("--check")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None: ...
app(args=["plugins"], standalone_mode=False)
"""
LIST = "from miles_core.cli import main\nmain(['plugins'])"
MODULES = f"import sys\ntry:\n    {LIST.splitlines()[0]}\n    {LIST.splitlines()[1]}\nexcept SystemExit:\n    pass\n"
MODULES += "print('modules:', *sys.modules)"


def write_plugins(folder: Path, count: int) -> None:
    """`count` distributions as an installer leaves them: metadata with a README in it, and one entry point each."""
    for i in range(count):
        info = folder / f"acme_miles_sync_{i}-1.{i}.0.dist-info"
        info.mkdir()
        head = f"Metadata-Version: 2.4\nName: acme-miles-sync-{i}\nVersion: 1.{i}.0\nSummary: Transport number {i}\n"
        head += (
            "Requires-Python: >=3.11\nRequires-Dist: miles-core<1,>=0.1\nRequires-Dist: torch>=2.6; extra == 'torch'\n"
        )
        (info / "METADATA").write_text(head + "\n" + "A README of some length.\n" * 200)
        (info / "entry_points.txt").write_text(f"[miles.sync.v1]\ntransport-{i} = acme_miles_sync_{i}.plugin\n")


def timed(code: str, environment: dict[str, str]) -> float:
    """Processor time (user and system) of a fresh interpreter, in ms: other processes do not disturb it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.DEVNULL, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plugins", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=25)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_plugins(Path(folder), options.plugins)
        cache = Path(folder) / "cache"
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)}
        done = subprocess.run(
            [sys.executable, "-c", MODULES], env=environment, check=True, capture_output=True, text=True, timeout=120
        )
        *listed, modules = done.stdout.splitlines()
        names = [m for m in modules.split()[1:] if m != "__main__"]
        imports = f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)\n"
        times: dict[str, list[float]] = {"imports": [], "parsing": [], "listing": []}
        for _ in range(options.repeats):
            for side, code in (("imports", imports), ("parsing", imports + IDLE), ("listing", LIST)):
                times[side].append(timed(code, environment))
    bare, parsing, listing = (statistics.median(times[side]) for side in ("imports", "parsing", "listing"))
    beyond = listing - bare
    print(f"plugins listed                  {len(listed) - 2}, {options.plugins} of them made for this measurement")
    print(f"interpreter, {len(names)} modules        {bare:7.1f} ms (median of {options.repeats})")
    print(f"  and an idle typer command     {parsing:7.1f} ms")
    print(f"miles plugins                   {listing:7.1f} ms, {listing / bare:.2f} x interpreter and imports")
    print(f"beyond imports                  {beyond:7.1f} ms")
    print(f"beyond imports and parsing      {listing - parsing:7.1f} ms")
    print(f"claim: below {CLAIM_MS:g} ms: {'holds' if beyond < CLAIM_MS else 'DOES NOT HOLD'}")


if __name__ == "__main__":
    main()
