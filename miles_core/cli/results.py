"""The last conformance result of each plugin, kept in the user's cache by distribution, version and tree hash."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.discovery import Catalogue, Entry


def cache_folder() -> Path:
    """Where results are kept; a cache only, so that losing it changes nothing."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "miles" / "conformance"


def _file(entry: Entry, catalogue: Catalogue) -> Path:
    from miles_core.treehash import distribution_hash

    tree = distribution_hash(entry.distribution, catalogue)
    return cache_folder() / f"{entry.distribution}-{entry.version}-{tree[:16]}.json"


def record(entry: Entry, catalogue: Catalogue, passed: int, failed: int) -> None:
    """Remember a conformance result; a cache that cannot be written is not an error."""
    file = _file(entry, catalogue)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        results = json.loads(file.read_text()) if file.exists() else {}
        results[f"{entry.kind}:{entry.name}"] = {"passed": passed, "failed": failed}
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(results, sort_keys=True))
        os.replace(draft, file)
    except (OSError, ValueError):
        return


def recorded() -> frozenset[str]:
    """`distribution-version` of everything that has a result: hashing is needed for those only."""
    try:
        return frozenset(p.stem.rpartition("-")[0] for p in cache_folder().glob("*.json"))
    except OSError:
        return frozenset()


def last(entry: Entry, catalogue: Catalogue, known: frozenset[str]) -> str:
    """`12 passed`, `11 passed, 1 failed`, or `-` where this very version was never tested."""
    if f"{entry.distribution}-{entry.version}" not in known:
        return "-"
    try:
        result = json.loads(_file(entry, catalogue).read_text()).get(f"{entry.kind}:{entry.name}")
    except (OSError, ValueError):
        return "-"
    if not result:
        return "-"
    return f"{result['passed']} passed" + (f", {result['failed']} failed" if result["failed"] else "")
