"""`miles config show --explain`: the objective that a run file resolves to, part by part, with every constant."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_core.config.schema import Part, Policy, RunFile
    from miles_core.discovery import Catalogue

AGGREGATION = {
    "token_mean": "Σ m x / Σ m over all trainable tokens of one optimizer update",
    "episode_mean": "mean over the episodes of one optimizer update of each one's token mean",
    "episode_sum": "sum over an episode's tokens, mean over the episodes of one optimizer update",
    "constant": "sum over tokens / (episodes of one optimizer update · {length})",
}


def explained(run_file: RunFile, catalogue: Catalogue) -> Iterator[str]:
    """Lines of text."""
    for policy in run_file.policies.values():
        yield from _policy(policy, run_file, catalogue)


def _policy(policy: Policy, run_file: RunFile, catalogue: Catalogue) -> Iterator[str]:
    from miles_core.config.binding import join
    from miles_core.config.schema import is_on
    from miles_core.passes import PHASES

    algorithm, schedule = policy.algorithm, policy.schedule
    at = join(policy.at, "algorithm")
    yield f"policy {policy.name}: {algorithm.preset or 'no preset'}"
    if algorithm.preset:
        indent = "  "
        how, paths = _apart(algorithm.preset, at, run_file, catalogue)
        if paths:
            yield f"  preset {algorithm.preset}, {how} in: {', '.join(paths)}"
            yield "  by itself it is:"
            indent = "    "
        yield from _says(catalogue, "algorithm", algorithm.preset, indent)
    parts = [(field, part) for field in algorithm.parts for part in algorithm.many(field)]
    terms = [part for _, part in parts if part.kind == "term" and is_on(part) and part.core is not None]
    yield "  minimises " + " + ".join(f"{part.core.coef:g} · agg({part.name})" for part in terms)
    order = ("filters", *PHASES)
    for field, part in sorted(parts, key=lambda pair: order.index(pair[0]) if pair[0] in order else len(order)):
        yield ""
        off = "" if is_on(part) else ", off: its coefficient is 0"
        yield f"  {field}: {part.use} ({part.kind} of {_from(catalogue, part)}{off})"
        yield from _says(catalogue, part.kind, part.use, "    ")
        yield from _constants(part, run_file)
    yield ""
    length = algorithm.keys.constant_length or next((p.core.max_new_tokens for p in run_file.engines.values()), None)
    yield f"  agg: {AGGREGATION[algorithm.keys.aggregation].format(length=length)}"
    for name in vars(algorithm.keys):
        yield _value(f"{at}.{name}", getattr(algorithm.keys, name), run_file)
    yield ""
    size = f"{schedule.groups_per_step} groups of {schedule.group_size}"
    yield f"  a step is {size}, cut into {schedule.updates_per_step} optimizer update(s)"
    for name, role in policy.roles.items():
        origin = f"scorer {role.scorer}" if role.scorer else f"from {role.init or role.source or 'model.source'}"
        origin += f" in engine {role.engine}" if role.engine else ""
        moves = f" every {role.every} step(s), decay {role.decay:g}" if role.update in ("copy", "ema") else ""
        late = f", from step {role.from_step}" if role.from_step else ""
        yield f"  role {name}: {origin}, {role.update.value}{moves}{late}"
    yield ""


def _apart(preset: str, at: str, run_file: RunFile, catalogue: Catalogue) -> tuple[str, list[str]]:
    """Paths at which the section `at` is not what its preset, under the options given to it, resolves to by itself; and
    what the run file did to the preset there."""
    from miles_core.config.binder import Binder
    from miles_core.config.compose import with_presets
    from miles_core.config.layers import ALGORITHM_KEYS, layer
    from miles_core.errors import ConfigError

    section: Mapping[str, Any] = run_file.tree
    for key in at.split("."):
        section = section[key]
    given = {key: value for key, value in section.items() if key == "use" or key not in ALGORITHM_KEYS}
    binder = Binder(catalogue)
    try:
        binder.algorithm(with_presets(layer({"algorithm": given}, "file"), catalogue), "")
        return "changed", list(_differing(section, binder.tree["algorithm"], at))
    except ConfigError:  # it leaves something to the run file, such as a bound or the loss
        alone = _not_given(section, at, run_file.origins) | {"use": preset}
        return "completed or changed", list(_differing(section, alone, at))


def _not_given(section: Mapping[str, Any], at: str, origins: Mapping[str, str]) -> dict[str, Any]:
    """The section without what file, extensions and command line gave, as the origins tell."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        path = f"{at}.{key}"
        if isinstance(value, Mapping) and value:
            found[key] = _not_given(value, path, origins)
        elif origins.get(path, "default").partition(" ")[0] in ("preset", "default"):
            found[key] = value
    return found


def _differing(new: Mapping[str, Any], old: Mapping[str, Any], at: str) -> Iterator[str]:
    """Paths that differ; of a part that is another plugin, or that only one of them has, its own path alone."""
    for key in dict.fromkeys([*new, *old]):
        one, two = (None if tree.get(key) == {} else tree.get(key) for tree in (new, old))
        if isinstance(one, Mapping) and isinstance(two, Mapping) and one.get("use") == two.get("use"):
            yield from _differing(one, two, f"{at}.{key}")
        elif one != two:
            yield f"{at}.{key}"


def _from(catalogue: Catalogue, part: Part) -> str:
    loaded = catalogue.load(part.kind, part.use)
    return f"{loaded.distribution} {loaded.version}"


def _says(catalogue: Catalogue, kind: str, name: str, indent: str) -> Iterator[str]:
    provider = catalogue.load(kind, name).provider
    for line in (provider.explain or provider.summary).strip().splitlines():
        yield textwrap.fill(line, 110, initial_indent=indent, subsequent_indent=indent)


def _constants(part: Part, run_file: RunFile) -> Iterator[str]:
    for keys in (part.core, part.options):
        for name in vars(keys) if keys is not None else ():
            yield _value(f"{part.at}.{name}", getattr(keys, name), run_file)


def _value(path: str, value: Any, run_file: RunFile) -> str:
    from miles_core.config.binding import plain
    from miles_core.config.reading import written

    return f"    {path} = {written(plain(value))}  # {run_file.origins.get(path, 'default')}"
