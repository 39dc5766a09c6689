"""The conformance kit: one suite per kind and field, `run_suite`, and toy plugins (`toys`).

Names are imported when they are asked for, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_core.testing.runner import run_suite
    from miles_core.testing.suite import CheckError, Conformance, Result, minimal_context
    from miles_core.testing.suites.backend import BackendConformance
    from miles_core.testing.suites.corrections import CorrectionConformance, DynamicWeightConformance
    from miles_core.testing.suites.engine import EngineConformance
    from miles_core.testing.suites.environment import EnvironmentConformance, ScorerConformance
    from miles_core.testing.suites.extension import ExtensionConformance
    from miles_core.testing.suites.launcher import LauncherConformance, TrackerConformance
    from miles_core.testing.suites.model import ModelConformance, ResolverConformance
    from miles_core.testing.suites.pairs import PairConformance
    from miles_core.testing.suites.parts import FilterConformance, PresetConformance
    from miles_core.testing.suites.rendering import RendererConformance, TokenizerConformance
    from miles_core.testing.suites.stages import (
        AdvantageConformance,
        DistillConformance,
        PenaltyConformance,
        RewardKLConformance,
        StageConformance,
        WhitenConformance,
    )
    from miles_core.testing.suites.terms import (
        EntropyConformance,
        KLConformance,
        LossConformance,
        TermConformance,
        ValueConformance,
    )
    from miles_core.testing.suites.transport import TransportConformance
    from miles_core.testing.suites.worked import StageExample, TermExample

_WHERE = {
    "run_suite": "runner",
    "CheckError": "suite",
    "Conformance": "suite",
    "Result": "suite",
    "minimal_context": "suite",
    "BackendConformance": "suites.backend",
    "EngineConformance": "suites.engine",
    "EnvironmentConformance": "suites.environment",
    "ScorerConformance": "suites.environment",
    "ExtensionConformance": "suites.extension",
    "LauncherConformance": "suites.launcher",
    "TrackerConformance": "suites.launcher",
    "ModelConformance": "suites.model",
    "ResolverConformance": "suites.model",
    "PairConformance": "suites.pairs",
    "FilterConformance": "suites.parts",
    "PresetConformance": "suites.parts",
    "RendererConformance": "suites.rendering",
    "TokenizerConformance": "suites.rendering",
    "AdvantageConformance": "suites.stages",
    "CorrectionConformance": "suites.corrections",
    "DistillConformance": "suites.stages",
    "PenaltyConformance": "suites.stages",
    "RewardKLConformance": "suites.stages",
    "StageConformance": "suites.stages",
    "WhitenConformance": "suites.stages",
    "DynamicWeightConformance": "suites.corrections",
    "EntropyConformance": "suites.terms",
    "KLConformance": "suites.terms",
    "LossConformance": "suites.terms",
    "TermConformance": "suites.terms",
    "ValueConformance": "suites.terms",
    "TransportConformance": "suites.transport",
    "StageExample": "suites.worked",
    "TermExample": "suites.worked",
}

__all__ = [
    "AdvantageConformance",
    "BackendConformance",
    "CheckError",
    "Conformance",
    "CorrectionConformance",
    "DistillConformance",
    "DynamicWeightConformance",
    "EngineConformance",
    "EntropyConformance",
    "EnvironmentConformance",
    "ExtensionConformance",
    "FilterConformance",
    "KLConformance",
    "LauncherConformance",
    "LossConformance",
    "ModelConformance",
    "PairConformance",
    "PenaltyConformance",
    "PresetConformance",
    "RendererConformance",
    "ResolverConformance",
    "Result",
    "RewardKLConformance",
    "ScorerConformance",
    "StageConformance",
    "StageExample",
    "TermConformance",
    "TermExample",
    "TokenizerConformance",
    "TrackerConformance",
    "TransportConformance",
    "ValueConformance",
    "WhitenConformance",
    "minimal_context",
    "run_suite",
]


def __getattr__(name: str) -> Any:
    where = _WHERE.get(name)
    if where is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{where}"), name)
