"""The last conformance result of each plugin, kept in the user's cache: one `conformance.json` for each distribution,
version and tree hash, in `$XDG_CACHE_HOME/miles/conformance/<distribution>-<version>-<hash>/`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_core.discovery import Catalogue, Entry


def cache_folder() -> Path:
    """Where results are kept; a cache only, so that losing it changes nothing."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "miles" / "conformance"


def _file(entry: Entry, catalogue: Catalogue) -> Path:
    from miles_core.treehash import distribution_hash

    tree = distribution_hash(entry.distribution, catalogue)
    return cache_folder() / f"{entry.distribution}-{entry.version}-{tree[:16]}" / "conformance.json"


def record(
    entry: Entry, catalogue: Catalogue, passed: int, failed: int, checks: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Remember a conformance result, with its checks; a cache that cannot be written is not an error."""
    file = _file(entry, catalogue)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = _read(file)
        kept[f"{entry.kind}:{entry.name}"] = {"passed": passed, "failed": failed, "checks": list(checks)}
        whole = {"v": 1, "distribution": entry.distribution, "version": entry.version, "plugins": kept}
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(whole, sort_keys=True, indent=1) + "\n")
        os.replace(draft, file)
    except (OSError, ValueError):
        return


def _read(file: Path) -> dict[str, Any]:
    """`kind:name` -> its last result; empty where there is none that can be read."""
    try:
        kept = json.loads(file.read_text())["plugins"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return kept if isinstance(kept, dict) else {}


def recorded() -> frozenset[str]:
    """`distribution-version` of everything that has a result: hashing is needed for those only."""
    try:
        return frozenset(p.parent.name.rpartition("-")[0] for p in cache_folder().glob("*/conformance.json"))
    except OSError:
        return frozenset()


def found(entry: Entry, catalogue: Catalogue, known: frozenset[str]) -> tuple[str, str]:
    """The last result (`12 passed`, `11 passed, 1 failed`) and the file that holds it; `-` and no file where this very
    version was never tested."""
    if f"{entry.distribution}-{entry.version}" not in known:
        return "-", ""
    file = _file(entry, catalogue)
    result = _read(file).get(f"{entry.kind}:{entry.name}")
    if not result:
        return "-", ""
    return f"{result['passed']} passed" + (f", {result['failed']} failed" if result["failed"] else ""), str(file)


def last(entry: Entry, catalogue: Catalogue, known: frozenset[str]) -> str:
    """The last result alone."""
    return found(entry, catalogue, known)[0]
