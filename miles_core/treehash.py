"""What a plugin's code is, as one hash: of its files as they lie on disk, without importing them."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from miles_core.discovery import CORE, Catalogue


def tree_hash(modules: Iterable[str]) -> str:
    """SHA-256 over the files of the top packages of `modules`: relative path and content, sorted, no bytecode.

    An unimportable or vanished module counts as absent. Imports nothing but namespace packages.
    """
    digest = hashlib.sha256()
    for root in sorted({root for module in modules if (root := _root(module))}):
        for file in [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file()):
            if file.suffix in (".pyc", ".pyo") or "__pycache__" in file.parts:
                continue
            name = file.relative_to(root.parent).as_posix()
            digest.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _root(module: str) -> Path | None:
    names = module.partition(":")[0].split(".")
    with suppress(ImportError, ValueError):  # which `find_spec` raises below a package that is absent
        for depth in range(1, len(names) + 1):
            spec = importlib.util.find_spec(".".join(names[:depth]))
            if spec and spec.origin:  # a namespace package has none: look one level deeper
                origin = Path(spec.origin)
                return origin if spec.submodule_search_locations is None else origin.parent
    return None


def distribution_hash(distribution: str, catalogue: Catalogue) -> str:
    """`tree_hash` of all plugin modules of a distribution; of `miles_core` for core itself."""
    if distribution == CORE:
        return tree_hash(["miles_core"])
    return tree_hash(e.module for e in catalogue.entries() if e.distribution == distribution)
