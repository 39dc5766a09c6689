"""Layers of a run file and how they merge: each leaf remembers where it came from.

A tree is a dict of trees and `Leaf`s. Layers, lowest first: preset, file, extensions, command line (dataclass defaults
lie below all and are filled in when sections are bound). Merging knows where parts stand: choosing *another* plugin for
a part discards the lower layer's keys that belong to the old plugin. Keys that core owns stay (`rollout.use=other`
keeps `max_new_tokens`), except over a preset, whose keys for that part go altogether. The *same* plugin keeps them all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles_core.config.binding import fields_of, show
from miles_core.config.schema import PART_FIELDS, AlgorithmKeys, BackendKeys, EngineKeys, EnvKeys, ModelKeys, SyncKeys
from miles_core.errors import ConfigError, ConfigTypeError

#: Sections that hold one part, and sections that are ordered maps of parts: section -> kind.
SINGULAR = {
    **{"backend": "backend", "sync": "sync", "launcher": "launcher", "rollout": "rollout"},
    **{"model": "model", "renderer": "renderer", "env": "env"},
}
PLURAL = {"engines": "rollout", "envs": "env", "trackers": "tracker", "scorers": "scorer", "extensions": "extension"}

#: What core owns of a part's section, by kind (terms: see `compose`).
CORE_KEYS: dict[str, type] = {
    **{"rollout": EngineKeys, "backend": BackendKeys, "sync": SyncKeys, "env": EnvKeys, "model": ModelKeys},
}
#: Keys that core owns of `algorithm`.
ALGORITHM_KEYS = frozenset({"use", *PART_FIELDS, *fields_of(AlgorithmKeys)})


_NAME = re.compile(r"[A-Za-z0-9_][\w-]*")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value (scalar, list or empty mapping) and its origin."""

    value: Any
    origin: str


Tree = dict[str, Any]  # str -> Tree | Leaf


def wrap(value: Any, origin: str, origins: Mapping[str, str] | None = None, path: str = "") -> Any:
    """Plain data as a tree of leaves; `origins` by dotted path, where known, instead of `origin`."""
    if isinstance(value, Mapping) and value:
        return {str(k): wrap(v, origin, origins, f"{path}.{k}" if path else str(k)) for k, v in value.items()}
    return Leaf({} if isinstance(value, Mapping) else value, (origins or {}).get(path, origin))


def unwrap(tree: Any) -> Any:
    """The plain data of a tree."""
    return {k: unwrap(v) for k, v in tree.items()} if isinstance(tree, dict) else tree.value


def origins_of(tree: Any, path: str = "") -> dict[str, str]:
    """Origin of every leaf by dotted path."""
    if isinstance(tree, Leaf):
        return {path: tree.origin}
    return {p: o for k, v in tree.items() for p, o in origins_of(v, f"{path}.{k}" if path else k).items()}


def part_at(path: tuple[str, ...]) -> str | None:
    """The kind of the part that stands at `path` (`algorithm` for the section itself, `part` inside it), or `None`."""
    if len(path) > 2 and path[0] == "policies":
        path = path[2:]
    if len(path) == 1:
        return "algorithm" if path[0] == "algorithm" else SINGULAR.get(path[0])
    if len(path) == 2 and path[0] in PLURAL:
        return PLURAL[path[0]]
    if path[0] == "algorithm" and len(path) > 1 and path[1] in PART_FIELDS:
        return "part" if len(path) == (3 if PART_FIELDS[path[1]][1] else 2) else None
    return None


def owned_by_core(kind: str) -> frozenset[str]:
    """Keys that survive a change of plugin."""
    if kind == "algorithm":
        return ALGORITHM_KEYS
    if kind == "part":
        return frozenset({"coef"})
    return frozenset(fields_of(CORE_KEYS[kind])) if kind in CORE_KEYS else frozenset()


def expand(tree: Tree, path: tuple[str, ...] = ()) -> Tree:
    """Bare strings where a part stands become `use:` (`loss: clip`)."""
    out: Tree = {}
    for key, value in tree.items():
        at = (*path, key)
        if isinstance(value, dict):
            out[key] = expand(value, at)
        elif part_at(at) and isinstance(value.value, str):
            out[key] = {"use": value}
        elif part_at(at) and value.value == {}:
            out[key] = {}
        else:
            out[key] = value
    return out


def merge(low: Tree, high: Tree, path: tuple[str, ...] = (), *, keep_core: bool = True) -> Tree:
    """`high` over `low`. `keep_core`: a change of plugin keeps core's keys of the lower layer (not over a preset)."""
    out = dict(low)
    for key, value in high.items():
        at, below = (*path, key), low.get(key)
        if not isinstance(value, dict):
            out[key] = value
        elif not isinstance(below, dict):
            out[key] = merge({}, value, at, keep_core=keep_core)
        else:
            kind, old = part_at(at), _plugin(below, key if _named_by_key(at) else None)
            if kind and old is not None and _plugin(value, old) != old:
                kept = owned_by_core(kind) if keep_core else frozenset()
                below = {k: v for k, v in below.items() if k in kept}
            out[key] = merge(below, value, at, keep_core=keep_core)
    return out


def _plugin(section: Tree, default: str | None) -> Any:
    use = section.get("use")
    return use.value if isinstance(use, Leaf) else default


def _named_by_key(path: tuple[str, ...]) -> bool:
    """Whether the part at `path` is an instance of an ordered map, whose `use` defaults to its key."""
    return len(path) > 1 and (path[-2] in PLURAL or PART_FIELDS.get(path[-2], ((), False))[1])


def instances(tree: Tree, key: str) -> dict[str, Tree]:
    """Instances of a plural section; those set to `null` are removed."""
    section = tree.get(key, {})
    if isinstance(section, Leaf):
        if section.value not in ({}, None):
            raise ConfigTypeError(
                f"{key} is {show(section.value)}; it must be a mapping from names to sections",
                fix=f"write {key}: {{name: {{use: plugin}}}}",
            )
        return {}
    for name, instance in section.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{key}.{name!r} is no instance name", fix="use letters, digits, _ and -")
        if isinstance(instance, Leaf) and instance.value is not None:
            raise ConfigTypeError(
                f"{key}.{name} is {show(instance.value)}; it must be a mapping, or null to remove it",
                fix=f"write {key}: {{{name}: {{use: plugin}}}}",
            )
    return {name: instance for name, instance in section.items() if isinstance(instance, dict)}


def removed(tree: Tree, key: str) -> list[str]:
    """Instances of a plural section that are set to `null`."""
    section = tree.get(key)
    return (
        [n for n, i in section.items() if isinstance(i, Leaf) and i.value is None] if isinstance(section, dict) else []
    )


def section_at(tree: Tree, key: str, path: str) -> Tree | None:
    """A singular section; `None` where absent or `null`."""
    section = tree.get(key)
    if isinstance(section, Leaf):
        if section.value not in ({}, None):
            raise ConfigTypeError(
                f"{path} is {show(section.value)}; it must be a mapping", fix=f"write {path}: {{key: value}}"
            )
        return None if section.value is None else {}
    return section


def chosen(section: Tree, path: str) -> str | None:
    use = section.get("use")
    if use is None or (isinstance(use, Leaf) and use.value is None):
        return None
    if not isinstance(use, Leaf) or not isinstance(use.value, str):
        raise ConfigTypeError(f"{path}.use is {show(unwrap(use))}; it must be a plugin's name", fix="name one plugin")
    return use.value
