"""What `miles plugins` costs beyond starting Python and importing modules.

In fresh interpreters, one thread each, that first import every module which `miles plugins` imports: the processor time
of that command, and in others of a typer command of the same options that does nothing. Medians. Claim: listing 20
installed plugins costs below 50 ms beyond interpreter and imports, typer's own parsing included.

All this twice: where 20 plugins are installed (those of miles-core, and made ones, each a distribution of its own), and
with all that this environment has. For the first, a folder of links stands for each folder of packages: all that lies
there but the metadata of other distributions with plugins, so that the rest of the environment is looked through too.

    python benchmarks/plugins_listing.py
"""

from __future__ import annotations

import argparse
import os
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
LIST = "from miles_core.cli import main\ntry:\n    main(['plugins'])\nexcept SystemExit:\n    pass\n"
MODULES = LIST + "import sys\nprint('modules:', *sys.modules)"
TIMED = """
import importlib, time
for name in {modules!r}:
    importlib.import_module(name)
before = time.process_time()
{command}
print("ms:", 1000 * before, 1000 * (time.process_time() - before))
"""


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


def without_plugins(folder: Path) -> list[str]:
    """This interpreter's `sys.path` (but the script's own folder) on which miles-core alone has plugins."""
    path = []
    for number, entry in enumerate(sys.path[1:]):
        files = [f for f in Path(entry).glob("*.dist-info/entry_points.txt") if "[miles." in f.read_text()]
        hidden = {f.parent.name for f in files if not f.parent.name.startswith("miles_core-")}
        path.append(entry)
        if hidden:
            path[-1] = str(folder / f"links-{number}")
            os.mkdir(path[-1])
            for kept in (p for p in Path(entry).iterdir() if p.name not in hidden):
                Path(path[-1], kept.name).symlink_to(kept)
    return path


def said(code: str, path: list[str], cache: Path) -> list[str]:
    """What a fresh interpreter prints that runs `code` with this `sys.path`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-c", f"import sys\nsys.path[:] = {path!r}\n{code}"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120)
    return done.stdout.splitlines()


def listed(path: list[str], cache: Path) -> tuple[int, list[str]]:
    """How many plugins the command lists on this `sys.path`, and every module that it imports."""
    *lines, modules = said(MODULES, path, cache)
    return lines.index("") - 2, [m for m in modules.split()[1:] if m != "__main__"]


def timed(command: str, modules: list[str], path: list[str], cache: Path) -> tuple[float, float]:
    """Processor time in ms (other processes disturb it little) until all is imported, and of the command."""
    before, took = said(TIMED.format(modules=modules, command=command), path, cache)[-1].split()[1:]
    return float(before), float(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plugins", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=25)
    options = parser.parse_args()
    columns = []
    with tempfile.TemporaryDirectory() as temporary:
        made, cache = Path(temporary, "made"), Path(temporary, "cache")
        made.mkdir()
        alone = without_plugins(Path(temporary))
        write_plugins(made, options.plugins - listed(alone, cache)[0])
        for path in ([*alone, str(made)], sys.path[1:]):
            count, modules = listed(path, cache)
            listing, idle = [], []
            for _ in range(options.repeats):
                listing.append(timed(LIST, modules, path, cache))
                idle.append(timed(IDLE, modules, path, cache))
            imports = statistics.median(before for before, _ in listing + idle)
            took, parsing = (statistics.median(t for _, t in found) for found in (listing, idle))
            columns.append([f"{count}", *(f"{t:.1f}" for t in (imports, took, parsing, took - parsing))])
    print(f"processor time, ms, medians of {options.repeats}")
    names = (
        "plugins listed",
        "interpreter and imports",
        "miles plugins, beyond that",
        "  of it: parsing",
        "  the rest",
    )
    for name, few, every in zip(names, *columns, strict=True):
        print(f"{name:<28}{few:>8}{every:>8}")
    verdict = "holds" if float(columns[0][2]) < CLAIM_MS else "DOES NOT HOLD"
    print(f"claim: {columns[0][0]} plugins below {CLAIM_MS:g} ms beyond interpreter and imports: {verdict}")


if __name__ == "__main__":
    main()
