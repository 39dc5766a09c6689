"""Do the chosen plugins fit together, and are they still the same? Gate D, capabilities, and the plugin lock."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from miles_core import __version__
from miles_core.config.schema import is_on
from miles_core.contracts import backend, engine, environment, extension, launcher, learning, model, rendering, weights
from miles_core.discovery import CORE, Catalogue, Loaded, close
from miles_core.errors import NEW_RUN, CapabilityError, LockError, PluginContractError
from miles_core.provider import Place
from miles_core.treehash import distribution_hash

if TYPE_CHECKING:
    from miles_core.config.schema import Part, RunFile

_C, _S, _T, _E = Place.CONTROLLER, Place.SAMPLER, Place.TRAINER, Place.ENGINE

#: Requirements on the run file, which no part offers: `config/rules.py` says what they mean and judges them.
JUDGED = ("siblings", "aggregation", "behaviour_logprobs", "preference", "several_updates", "role:", "scores_at_ids:")

#: The Protocol of each (kind, place). A preset's product is a tree, an extension's has optional methods: both below.
PROTOCOLS: dict[tuple[str, Place], type] = {
    **{("rollout", place): engine.Engine for place in (_C, _S)},
    ("backend", _T): backend.Backend,
    ("sync", _C): weights.Transport,
    ("sync", _T): weights.Sender,
    ("sync", _E): weights.Link,
    **{("env", place): environment.Environment for place in (_C, _S)},
    **{("scorer", place): environment.Scorer for place in (_C, _S)},
    ("launcher", _C): launcher.Launcher,
    ("tracker", _C): launcher.Tracker,
    ("stage", _C): learning.Stage,
    ("term", _T): learning.Term,
    ("filter", _C): learning.Filter,
    ("model", _T): model.ModelAdapter,
    ("model", _C): model.ModelResolver,
    **{("tokenizer", place): rendering.Tokenizer for place in (_C, _S)},
    **{("renderer", place): rendering.Renderer for place in (_C, _S)},
    **{("extension", place): extension.Extension for place in Place},
}

#: Parameters younger than the first release of API v1: a product may lack them, and is then called without (`takes`).
LATER: dict[tuple[type, str], frozenset[str]] = {(environment.Scorer, "score"): frozenset({"tasks"})}


def takes(method: Any, parameter: str) -> bool:
    """Whether a product's method may be called with a parameter that is younger than the first release."""
    known = inspect.signature(method).parameters
    return parameter in known or any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in known.values())


def check_product(loaded: Loaded, place: Place, product: Any) -> None:
    """Gate D: what `build` returned keeps the Protocol of (kind, place). Raises `PluginContractError`."""
    protocol = PROTOCOLS.get((loaded.kind, place))
    if protocol is None:
        places = ", ".join(p.value for kind, p in PROTOCOLS if kind == loaded.kind)
        what = f"{loaded} was built at place {place.value!r}; a {loaded.kind} plugin is built at: {places}"
        raise PluginContractError(what, fix="build it at one of these places")
    if wrong := [*_wrong(protocol, product), *(_unknown_methods(product) if loaded.kind == "extension" else ())]:
        raise PluginContractError(
            f"{loaded} built a {type(product).__name__} at place {place.value!r}, which is no "
            f"{protocol.__module__}.{protocol.__name__}: {'; '.join(wrong)}",
            fix=f"run `miles conformance {loaded.kind}:{loaded.provider.name}` and give what is missing",
        )


@cache
def members(protocol: type) -> tuple[str, ...]:
    """Attributes and methods that a Protocol asks for, inherited ones too."""
    bases = [b for b in reversed(protocol.__mro__) if b is not Protocol and getattr(b, "_is_protocol", False)]
    names = [name for base in bases for name in (*inspect.get_annotations(base), *vars(base))]
    return tuple(dict.fromkeys(name for name in names if name == "__call__" or not name.startswith("_")))


def _wrong(protocol: type, product: Any) -> Iterator[str]:
    """Members that are missing, or cannot be called the way their Protocol says."""
    for name in members(protocol):
        asked, found = getattr(protocol, name, None), getattr(product, name, None)
        if not hasattr(product, name):
            yield f"{name}{'()' if callable(asked) else ''} is missing"
        elif callable(asked) and not callable(found):
            yield f"{name} is a {type(found).__name__}, not a method"
        elif inspect.isfunction(asked) and callable(found):
            later = LATER.get((protocol, name), frozenset()) | {"self"}
            wanted = [p for p in inspect.signature(asked).parameters.values() if p.name not in later]
            plain = [p for p in wanted if p.kind is p.POSITIONAL_OR_KEYWORD]
            try:
                signature = inspect.signature(found)
                signature.bind(*plain, **{p.name: p for p in wanted if p.kind is p.KEYWORD_ONLY})
            except ValueError:  # some builtins have no signature
                continue
            except TypeError as error:
                yield f"{name}{signature} cannot be called as {name}({', '.join(p.name for p in wanted)}): {error}"


def _unknown_methods(product: Any) -> Iterator[str]:
    known = extension.EXTENSION_METHODS
    for name in dir(product):
        if not name.startswith("_") and name not in (*known, "name", "columns") and callable(getattr(product, name)):
            similar = close(name, known)
            yield f"{name}() is no method of an extension" + (f" ({similar}?)" if similar else "")


# --- capabilities ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """One requirement and who meets it: a line of the capability table."""

    asked_by: str
    capability: str
    offered_by: tuple[str, ...]
    met: bool


def capability_rows(run_file: RunFile, catalogue: Catalogue) -> tuple[Row, ...]:
    """Every requirement of the run, met or not.

    A capability of engines counts as offered only where every engine offers it, because any of them may be asked.
    Any other plugin of the run may offer it alone. Core asks too: for `logprobs` of what it samples to train on, and
    for the pause that `schedule.on_update` names where requests may be in flight when weights change.
    """
    engines = {_label(part) for part in _built(run_file) if part.kind == "rollout"}
    rows = []
    for asked_by, capability in _requirements(run_file, catalogue):
        having = tuple(k for k, offered in _offers(run_file, catalogue, asked_by) if capability in offered)
        rivals = engines - {asked_by}
        met = bool(set(having) - rivals) or (bool(rivals) and rivals <= set(having))
        rows.append(Row(asked_by=asked_by, capability=capability, offered_by=having, met=met))
    return tuple(rows)


def match_capabilities(run_file: RunFile, catalogue: Catalogue) -> tuple[Row, ...]:
    """The rows of `capability_rows`; a `CapabilityError` for the first that is not met, naming both sides, what the
    counterparts offer, and the installed plugins that would fit."""
    rows = capability_rows(run_file, catalogue)
    for row in [row for row in rows if not row.met]:
        offers = _offers(run_file, catalogue, row.asked_by)
        found = "; ".join(f"{label} offers {', '.join(sorted(offered))}" for label, offered in offers if offered)
        whose = f"only {', '.join(row.offered_by)} offers it" if row.offered_by else "nothing in the run offers it"
        what, colon, _ = row.capability.partition(":")
        alike = [label for label, offered in offers if colon and any(o.startswith(what + colon) for o in offered)]
        offering = list(_offering(row.capability, catalogue))
        fitting = ", ".join(f"{p.kind} {p.provider.name!r} ({p.distribution})" for p in offering)
        fix = f"no installed plugin offers it; choose something else than {row.asked_by}"
        if alike:
            fix = f"give {row.asked_by} and {' and '.join(alike)} options that agree on {what}"
        elif own := [p for p in offering if (p.kind, p.name) in {(part.kind, part.use) for part in run_file.parts()}]:
            fix = f"see which option of {own[0].kind} {own[0].name!r} takes it away: by default it is offered"
        elif fitting:
            fix = f"use one of: {fitting}"
        raise CapabilityError(
            f"{row.asked_by} needs {row.capability!r}, and {whose}; {found or 'no part offers anything'}", fix=fix
        )
    return rows


def _built(run_file: RunFile) -> list[Part]:
    """Parts that will exist beside the engines that hold a role, which serve nobody else."""
    return [p for p in run_file.parts() if is_on(p) and p not in run_file.judges.values()]


def _label(part: Part) -> str:
    return f"{part.kind} {part.name!r}" + ("" if part.name == part.use else f" ({part.use})")


def _offers(run_file: RunFile, catalogue: Catalogue, asked_by: str) -> list[tuple[str, frozenset[str]]]:
    """What every part but the one that asks offers."""
    parts = [(_label(part), part) for part in _built(run_file)]
    return [(label, catalogue.offered(part)) for label, part in parts if label != asked_by]


def _requirements(run_file: RunFile, catalogue: Catalogue) -> Iterator[tuple[str, str]]:
    for part in _built(run_file):
        for capability in sorted(c for c in catalogue.required(part) if not c.startswith(JUDGED)):
            yield _label(part), capability
    for policy in run_file.policies.values():
        if policy.algorithm.keys.episodes == "sampled":
            yield f"algorithm of policy {policy.name!r}", "logprobs"
            if policy.schedule.max_staleness > 0:
                yield f"schedule.on_update of policy {policy.name!r}", f"pause.{policy.schedule.on_update.value}"


def _offering(capability: str, catalogue: Catalogue) -> Iterator[Loaded]:
    """Installed plugins that offer it in their default config."""
    for loaded in catalogue.loadable():
        with suppress(Exception):  # broken, or without a default config: no advice from it
            if capability in loaded.provider.offered(loaded.provider.config()):
                yield loaded


# --- the lock --------------------------------------------------------------------------------------------------------


def plugin_lock(parts: Iterable[Part], catalogue: Catalogue) -> dict[str, Any]:
    """`{"format": 1, "distributions": {name: {"version", "sha256"}}}` of core and of what offers `parts`."""
    chosen = [catalogue.find(part.kind, part.use) for part in parts]
    versions = {entry.distribution: entry.version for entry in chosen} | {CORE: __version__}
    rows = {n: {"version": versions[n], "sha256": distribution_hash(n, catalogue)} for n in sorted(versions)}
    return {"format": 1, "distributions": rows}


def check_lock(lock: Mapping[str, Any], catalogue: Catalogue) -> None:
    """Raise `LockError` with every difference between `lock` and what is installed here."""
    if lock.get("format") != 1:
        what = f"the plugin lock has format {lock.get('format')!r}; miles-core {__version__} reads format 1"
        raise LockError(what, fix="use the miles-core that wrote it")
    installed = {entry.distribution: entry.version for entry in catalogue.entries()} | {CORE: __version__}
    wrong = []
    for name, locked in lock["distributions"].items():
        if name not in installed:
            wrong.append(f"{name} {locked['version']} is not installed")
        elif installed[name] != locked["version"]:
            wrong.append(f"{name} is {installed[name]}, locked {locked['version']}")
        elif (found := distribution_hash(name, catalogue)) != locked["sha256"]:
            wrong.append(f"{name} {locked['version']} has other files ({found[:12]}, locked {locked['sha256'][:12]})")
    if wrong:
        raise LockError(
            f"what is installed differs from the plugin lock: {'; '.join(wrong)}",
            fix=f"install what the lock names, or go on with what is installed {NEW_RUN}; RUN@STEP starts from another "
            "checkpoint than its best or latest",
        )
