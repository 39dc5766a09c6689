"""A run file from its layers: read, merge, expand presets, let extensions speak, bind, judge, freeze.

`load` starts from a YAML file and command-line values, `from_tree` from what `load` once resolved (resume, workers):
the same validation, with nothing expanded again. The resolved tree is itself a run file, in the form (singular or
plural sections) in which it was written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_core.config import rules
from miles_core.config.binder import Binder
from miles_core.config.layers import Tree, expand, instances, merge, wrap
from miles_core.config.presets import on_config, with_presets
from miles_core.config.reading import read_origins, read_overrides, read_yaml
from miles_core.config.schema import RunFile
from miles_core.discovery import Catalogue, scan


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
    layers = [expand(wrap(defaults, "default")), expand(wrap(read_yaml(path), "file"))]
    commands = [expand(wrap(tree, "command line")) for tree in read_overrides(overrides)]
    spoken: list[str] = []
    while True:
        draft: Tree = {}
        for layer in [*layers, *commands]:
            draft = merge(draft, layer)
        draft = with_presets(draft, catalogue)
        waiting = [name for name in instances(draft, "extensions") if name not in spoken]
        if not waiting:
            break
        spoken.append(waiting[0])
        changes = on_config(draft, waiting[0], catalogue)
        if changes:
            layers.append(expand(wrap(changes, f"extension {waiting[0]}")))
    run_file = Binder(catalogue).run_file(draft)
    if check:
        rules.check(run_file, catalogue)
    return run_file


def from_tree(
    tree: Mapping[str, Any],
    catalogue: Catalogue | None = None,
    origins: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
) -> RunFile:
    """The run file of a resolved tree, under command-line values (a resume). No preset is expanded again and no
    extension asked again. `origins` are those of the tree; where absent, each value's is `resolved`."""
    catalogue = catalogue or scan()
    draft = expand(wrap(tree, "resolved", origins or {}))
    for commands in read_overrides(overrides):
        draft = merge(draft, expand(wrap(commands, "command line")))
    run_file = Binder(catalogue).run_file(draft)
    rules.check(run_file, catalogue)
    return run_file


def reload(run_dir: Path, overrides: Sequence[str] = (), *, catalogue: Catalogue | None = None) -> RunFile:
    """What a run was started with, from its `resolved.yaml`, under command-line values: `from_tree` with origins."""
    file = run_dir / "resolved.yaml"
    return from_tree(read_yaml(file), catalogue, read_origins(file), overrides)
