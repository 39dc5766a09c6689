"""`run_suite`: test an installed plugin against the contract of its kind, without pytest.

A plugin may ship a module `conformance` beside its plugin module with subclasses of suites (weights of its own model, a
sample file, …); `run_suite` then runs all whose `kind` and `name` fit, else the plain suite of the kind.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from miles_core.errors import PluginLoadError, UnknownPluginError, UntestableError, blamed, clause
from miles_core.testing.pytest_plugin import overridden
from miles_core.testing.suite import Conformance, Result, run_class

#: (kind, field of the provider) -> the suite's name in `miles_core.testing`; "" for kinds without fields.
SUITES: dict[tuple[str, str], str] = {
    ("rollout", ""): "EngineConformance",
    ("backend", ""): "BackendConformance",
    ("sync", ""): "TransportConformance",
    ("env", ""): "EnvironmentConformance",
    ("scorer", ""): "ScorerConformance",
    ("launcher", ""): "LauncherConformance",
    ("tracker", ""): "TrackerConformance",
    ("algorithm", ""): "PresetConformance",
    ("filter", ""): "FilterConformance",
    ("model", ""): "ModelConformance",
    ("renderer", ""): "RendererConformance",
    ("tokenizer", ""): "TokenizerConformance",
    ("extension", ""): "ExtensionConformance",
    ("stage", "advantage"): "AdvantageConformance",
    ("stage", "penalty"): "PenaltyConformance",
    ("stage", "reward_kl"): "RewardKLConformance",
    ("stage", "whiten"): "WhitenConformance",
    ("stage", "distill"): "DistillConformance",
    ("stage", "correction"): "CorrectionConformance",
    ("term", "loss"): "LossConformance",
    ("term", "kl"): "KLConformance",
    ("term", "entropy"): "EntropyConformance",
    ("term", "value"): "ValueConformance",
    ("term", "distill"): "TermConformance",
    ("term", "correction"): "DynamicWeightConformance",
}


def suites_of(kind: str, name: str) -> list[type[Conformance]]:
    """The classes that test this plugin: those it ships, else the plain suite of its kind.

    Raises `UnknownPluginError` for a plugin that is not installed, and for a kind or field without a suite.
    """
    from miles_core.discovery import scan

    loaded = scan().load(kind, name)
    field = loaded.provider.field if kind in ("stage", "term") else ""
    chosen = "ResolverConformance" if kind == "model" and _resolves(name) else SUITES.get((kind, field))
    if chosen is None:
        raise UnknownPluginError(
            f"there is no suite for {kind} plugins of field {field!r}",
            fix="set Provider.field to one of " + ", ".join(sorted(f for k, f in SUITES if k == kind)),
        )
    plain: type[Conformance] = getattr(importlib.import_module("miles_core.testing"), chosen)
    return _shipped(loaded.provider.build.__module__, plain, kind, name) or [
        type(plain.__name__, (plain,), {"name": name, **({"field": field} if field else {})})
    ]


def run_suite(kind: str, name: str, options: Mapping[str, Any] | None = None) -> list[Result]:
    """Test the installed plugin `kind:name`; where it ships several classes, results are named `Class.test`.

    With `options` of the plugin's own config, its first class runs with these in place of its own. Raises
    `UnknownPluginError`, `ConfigError` for `options` that are not the plugin's, and `UntestableError` for a plugin that
    the plain suite of its kind cannot even build, because it needs options or a model of its own.
    """
    suites = suites_of(kind, name)
    if options is not None:
        from miles_core.config.binding import bind

        config = bind(suites[0]().the_provider().config, options, f"{kind}:{name}")
        given = {"options": dict(options), "config": lambda self: config}
        return run_class(type(suites[0].__name__, (suites[0],), given))
    if suites[0].__module__ == __name__:  # made above: nothing is shipped
        _usable(suites[0](), f"{kind}:{name}")
    titles = {suite: suite.__name__.removesuffix("Conformance") + "." for suite in suites if len(suites) > 1}
    results = [(suite, _told(suite, result)) for suite in suites for result in run_class(suite)]
    return [replace(result, name=titles.get(suite, "") + result.name) for suite, result in results]


def _told(suite: type[Conformance], result: Result) -> Result:
    """A test that the plugin replaced by its own says so where it passes: the kit cannot vouch for it."""
    own = result.passed and overridden(suite, result.name)
    return replace(result, detail="the plugin's own version of this test") if own else result


def _usable(suite: Conformance, plugin: str) -> None:
    try:
        suite.probe()
    except Exception as error:
        raise UntestableError(
            f"the plain {type(suite).__name__} cannot build {plugin}, so that every check would fail: {clause(error)}",
            fix=f"give the options it needs (miles conformance {plugin} key=value), or ship a module `conformance` "
            f"beside its plugin module with a subclass of {type(suite).__name__} that has them, or a model that fits",
        ) from error


def _resolves(name: str) -> bool:
    return name.startswith(".") or name.endswith(":")


def _shipped(module: str, plain: type[Conformance], kind: str, name: str) -> list[type[Conformance]]:
    package = module.rpartition(".")[0]
    where = f"{package}.conformance"
    if not package or importlib.util.find_spec(where) is None:
        return []
    with blamed(
        f"{where}, which {kind} plugin {name!r} ships, cannot be imported", PluginLoadError, "mend that module"
    ):
        classes = [v for v in vars(importlib.import_module(where)).values() if isinstance(v, type)]
    return [c for c in classes if issubclass(c, plain) and c.kind == kind and c.name == name]
