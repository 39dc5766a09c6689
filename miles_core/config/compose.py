"""A run file from its layers: read, merge, expand presets, let extensions speak, bind, judge, freeze.

`load` starts from a YAML file and command-line values, `from_tree` from what `load` once resolved (resume, workers):
the same validation, with nothing expanded again. The resolved tree is itself a run file, in the form (singular or
plural sections) in which it was written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from miles_core.config.binder import Binder
from miles_core.config.binding import bind, join
from miles_core.config.layers import ALGORITHM_KEYS, Tree, layer, merge, sections, unwrap, use_of
from miles_core.config.reading import read_origins, read_overrides, read_yaml
from miles_core.config.rules import violations
from miles_core.config.schema import RunFile
from miles_core.discovery import Catalogue, scan
from miles_core.errors import ConfigError, PluginContractError, blamed


def load(
    path: Path, overrides: Sequence[str] = (), *, catalogue: Catalogue | None = None, check: bool = True
) -> RunFile:
    """The frozen run file at `path` under command-line values such as `schedule.max_staleness=2`.

    `check=False` leaves out the rules across sections (`miles plan` lists what they refuse). Raises `ConfigError` and
    its subclasses, and what `Catalogue.load` raises.
    """
    catalogue = catalogue or scan()
    defaults = {
        "run": {"folder": str(path.resolve().parent)},
        "launcher": {"use": "inline"},
        "trackers": {"console": {"use": "console"}, "jsonl": {"use": "jsonl"}},
    }
    layers = [layer(defaults, "default"), layer(read_yaml(path), "file")]
    commands = [layer(tree, "command line") for tree in read_overrides(overrides)]
    spoken: list[str] = []
    while True:
        draft = with_presets(reduce(merge, [*layers, *commands]), catalogue)
        waiting = [name for name in sections(draft, "extensions") if name not in spoken]
        if not waiting:
            return _bound(draft, catalogue, check=check)
        spoken.append(waiting[0])
        layers.append(layer(_on_config(draft, waiting[0], catalogue), f"extension {waiting[0]}"))


def from_tree(
    tree: Mapping[str, Any],
    catalogue: Catalogue | None = None,
    origins: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
) -> RunFile:
    """The run file of a resolved tree, under command-line values (a resume). No preset is expanded again and no
    extension asked again. `origins` are those of the tree; where absent, each value's is `resolved`."""
    catalogue = catalogue or scan()
    commands = [layer(tree, "command line") for tree in read_overrides(overrides)]
    draft = reduce(merge, [layer(tree, "resolved", origins), *commands])
    return _bound(draft, catalogue)


def reload(run_dir: Path, overrides: Sequence[str] = (), *, catalogue: Catalogue | None = None) -> RunFile:
    """What a run was started with, from its `resolved.yaml`, under command-line values: `from_tree` with origins."""
    file = run_dir / "resolved.yaml"
    return from_tree(read_yaml(file), catalogue, read_origins(file), overrides)


def _bound(draft: Tree, catalogue: Catalogue, *, check: bool = True) -> RunFile:
    run_file = Binder(catalogue).run_file(draft)
    for error in violations(run_file, catalogue) if check else ():
        raise error
    return run_file


def with_presets(draft: Tree, catalogue: Catalogue, at: str = "") -> Tree:
    """The draft with every policy's preset expanded beneath what the file says."""
    draft = dict(draft)
    if isinstance(section := draft.get("algorithm"), dict):
        draft["algorithm"] = _over_preset(section, join(at, "algorithm"), catalogue, ())
    if policies := sections(draft, "policies"):
        full = {name: with_presets(policy, catalogue, f"policies.{name}") for name, policy in policies.items()}
        draft["policies"] = {**draft["policies"], **full}
    return draft


def _over_preset(section: Tree, path: str, catalogue: Catalogue, above: tuple[str, ...]) -> Tree:
    """`section` over what its preset resolves to; a preset may name another one that it builds on."""
    name = use_of(section)
    if name is None:
        return section
    if name in above:
        raise ConfigError(f"{path}: presets build on each other in a circle: {', '.join(above)}", fix="use another")
    loaded = catalogue.load("algorithm", name)
    options = {k: unwrap(v) for k, v in section.items() if k not in ALGORITHM_KEYS}
    given = bind(loaded.provider.config, options, path, also=sorted(ALGORITHM_KEYS))
    built = loaded.build(given, None)  # a preset is a pure function of its options
    stray = [key for key in built if key not in ALGORITHM_KEYS] if isinstance(built, Mapping) else [built]
    if stray:
        what = f"the preset {name!r} gives {', '.join(map(repr, stray))}; a preset gives a mapping of `algorithm` keys"
        raise PluginContractError(what, fix=f"give only: {', '.join(sorted(ALGORITHM_KEYS))}")
    below = layer(built, f"preset {name}", path=path)
    below = _over_preset(below, path, catalogue, (*above, name))
    below.pop("use", None)
    return merge(below, section, path, keep_core=False)


def _on_config(draft: Tree, name: str, catalogue: Catalogue) -> Mapping[str, Any]:
    """What the extension `name` changes. It is built in the controller, before there is a run file."""
    part = Binder(catalogue).part(f"extensions.{name}", sections(draft, "extensions")[name])
    extension = catalogue.load("extension", part.use).build_early(part.options, name)
    plain = unwrap(draft)
    fix = "see where with --traceback, then mend or leave out that extension"
    with blamed(f"on_config of extension {name!r} failed", PluginContractError, fix):
        changes = extension.on_config(plain) if hasattr(extension, "on_config") else {}
    if not isinstance(changes, Mapping):
        raise PluginContractError(
            f"on_config of extension {name!r} returned a {type(changes).__name__}", fix="return a mapping of changes"
        )
    return _differing(changes, plain)


def _differing(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """What `new` says otherwise than `old`: all else keeps the origin that it has."""
    other = {key: value for key, value in new.items() if key not in old or value != old[key]}
    return {
        key: _differing(value, old[key]) if isinstance(value, Mapping) and isinstance(old.get(key), Mapping) else value
        for key, value in other.items()
    }
