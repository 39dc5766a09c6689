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
from typing import Any, NamedTuple

from miles_core.config.binding import fields_of, join, show
from miles_core.config.schema import PART_FIELDS, SECTIONS, AlgorithmKeys, TermKeys
from miles_core.errors import ConfigError, ConfigTypeError

#: Every section of a run file, like `PART_FIELDS`: the kind of plugin that stands there (none where core types all of
#: it), and whether it is an ordered map of such sections.
SHAPES: dict[str, tuple[tuple[str, ...], bool]] = {
    **{key: ((), False) for key in ("run", "eval", "schedule", "optimizer")},
    **{key: ((), True) for key in ("roles", "policies")},
    **{key: ((key,), False) for key in ("model", "env", "algorithm", "renderer")},
    **{key: ((key,), False) for key in ("rollout", "backend", "sync", "launcher")},
    **{"engines": (("rollout",), True), "envs": (("env",), True), "trackers": (("tracker",), True)},
    **{"scorers": (("scorer",), True), "extensions": (("extension",), True)},
}

#: What core owns of a part's section, by kind.
CORE_KEYS = {kind: SECTIONS[kind] for kind in ("rollout", "backend", "sync", "env", "model")} | {"term": TermKeys}
#: Keys that core owns of `algorithm`.
ALGORITHM_KEYS = frozenset({"use", *PART_FIELDS, *fields_of(AlgorithmKeys)})
#: Keys that survive a change of plugin, by its kind.
_KEPT = {kind: frozenset(fields_of(keys)) for kind, keys in CORE_KEYS.items()} | {"algorithm": ALGORITHM_KEYS}

_NAME = re.compile(r"[A-Za-z0-9_][\w-]*")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value (scalar, list or empty mapping) and its origin."""

    value: Any
    origin: str


Tree = dict[str, Any]  # str -> Tree | Leaf


class Shape(NamedTuple):
    """What may stand at a path: the kinds of plugin (none where no part stands), a map of sections, any section."""

    kinds: tuple[str, ...]
    is_map: bool
    is_section: bool


def unwrap(tree: Any) -> Any:
    """The plain data of a tree."""
    return {k: unwrap(v) for k, v in tree.items()} if isinstance(tree, dict) else tree.value


def origins_of(tree: Any, path: str = "") -> dict[str, str]:
    """Origin of every leaf by dotted path."""
    if isinstance(tree, Leaf):
        return {path: tree.origin}
    return {p: origin for k, v in tree.items() for p, origin in origins_of(v, join(path, k)).items()}


def sections(tree: Tree, key: str) -> dict[str, Tree]:
    """The sections of the map `key`, without those that are set to `null`."""
    found = tree.get(key)
    return {name: s for name, s in found.items() if isinstance(s, dict)} if isinstance(found, dict) else {}


def use_of(section: Tree) -> str | None:
    """The plugin that a part's section names."""
    use = section.get("use")
    return use.value if isinstance(use, Leaf) else None


def shape(path: str) -> Shape:
    """What may stand at a dotted path."""
    table, keys = SHAPES, path.split(".")
    if keys[0] == "policies" and len(keys) > 2:
        keys = keys[2:]
    if keys[0] == "algorithm" and len(keys) > 1:
        table, keys = PART_FIELDS, keys[1:]
    if keys[0] not in table:
        return Shape((), False, False)
    (kinds, plural), within = table[keys[0]], len(keys) - 1
    return Shape(kinds if within == plural else (), plural and not within, within <= plural)


def layer(values: Mapping[str, Any], origin: str, origins: Mapping[str, str] | None = None, path: str = "") -> Tree:
    """One layer of the run file, or of its section at `path`, from plain data, with every section in full: `loss: clip`
    becomes `loss: {use: clip}`. `origins` by dotted path, where known, instead of `origin`.

    Raises `ConfigTypeError` where another value stands in place of a section, `ConfigError` for a strange name.
    """
    out: Tree = {}
    for key, value in ((str(key), value) for key, value in values.items()):
        at = join(path, key)
        above, here, leaf = shape(path), shape(at), Leaf(value, (origins or {}).get(at, origin))
        if above.is_map and not _NAME.fullmatch(key):
            raise ConfigError(f"{path}.{key!r} is no instance name", fix="use letters, digits, _ and -")
        if above.kinds and key == "use" and not isinstance(value, str | None):
            raise ConfigTypeError(f"{at} is {show(value)}; it must be a plugin's name", fix="name one plugin")
        if isinstance(value, Mapping) and (value or here.is_section):
            out[key] = layer(value, origin, origins, at)
        elif value is None or not here.is_section:
            out[key] = leaf
        elif here.kinds and isinstance(value, str):
            out[key] = {"use": leaf}
        else:
            wanted, example = (" from names to sections", "name: {…}") if here.is_map else ("", "key: value")
            raise ConfigTypeError(
                f"{at} is {show(value)}; it must be a mapping{wanted}", fix=f"write {at}: {{{example}}}"
            )
    return out


def merge(low: Tree, high: Tree, path: str = "", *, keep_core: bool = True) -> Tree:
    """`high` over `low`. `keep_core`: a change of plugin keeps core's keys of the lower layer (not over a preset)."""
    out = dict(low)
    for key, value in high.items():
        at, below = join(path, key), low.get(key)
        if not isinstance(value, dict):
            out[key] = value
            continue
        if not isinstance(below, dict):
            below = {}
        kinds, old = shape(at).kinds, use_of(below) or (key if shape(path).is_map else None)
        if kinds and old is not None and (use_of(value) or old) != old:
            kept = {key for kind in kinds for key in _KEPT.get(kind, ()) if keep_core}
            below = {k: v for k, v in below.items() if k in kept}
        out[key] = merge(below, value, at, keep_core=keep_core)
    return out
