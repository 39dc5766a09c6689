"""`run_suite`: test an installed plugin against the contract of its kind, without pytest.

A plugin may ship a module `conformance` beside its plugin module with subclasses of suites (weights of its own model, a
sample file, …); `run_suite` then uses the one whose `kind` and `name` fit, else the plain suite of the kind.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from miles_core.errors import UnknownPluginError
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


def suite_of(kind: str, name: str) -> type[Conformance]:
    """The suite class that tests this plugin. Raises `UnknownPluginError` for a kind or field without a suite."""
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
    return _shipped(loaded.provider.build.__module__, plain, kind, name) or plain


def run_suite(kind: str, name: str, options: Mapping[str, Any] | None = None) -> list[Result]:
    """Test the installed plugin `kind:name` with `options` of its own config (the suite's own where `None`)."""
    suite = suite_of(kind, name)
    given: dict[str, Any] = {"name": name}
    if options is not None:
        given["options"] = dict(options)
    return run_class(type(suite.__name__, (suite,), given))


def _resolves(name: str) -> bool:
    return name.startswith(".") or name.endswith(":")


def _shipped(module: str, plain: type[Conformance], kind: str, name: str) -> type[Conformance] | None:
    package = module.rpartition(".")[0]
    where = f"{package}.conformance"
    if not package or importlib.util.find_spec(where) is None:
        return None
    for value in vars(importlib.import_module(where)).values():
        if isinstance(value, type) and issubclass(value, plain) and value.kind == kind and value.name == name:
            return value
    return None
