"""Entry point of `miles.rollout.v1`: describes the engine and builds it; everything heavy is imported in `_build`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core import hookimpl
from miles_core.provider import BuildContext, Provider
from miles_rollout_local.config import LocalConfig

if TYPE_CHECKING:
    from miles_rollout_local.engine import LocalEngine

OFFERS = frozenset(
    {
        *("weights.tensors", "weights.checkpoint", "logprobs", "keep_ids", "prompt_logprobs", "policies"),
        *("pause.in_place", "pause.recompute", "pause.abort", "pause.finish"),
    }
)


def _offers(config: LocalConfig) -> frozenset[str]:
    # Constant shapes would have to hold whatever adapters other policies have: those are merged there.
    return OFFERS | {"batch_invariant" if config.batch_invariant else "lora"}


def _requires(config: LocalConfig) -> tuple[str, ...]:
    """Weights are copied into the live model as they come. Asked by the engine, because a backend may train without
    one: whatever it computes in then."""
    return (f"weights.dtype:{config.dtype.value}",)


def _build(config: LocalConfig, context: BuildContext) -> LocalEngine:
    from miles_rollout_local.building import build

    return build(config, context, _offers(config))


@hookimpl
def miles_rollout() -> Provider[LocalConfig, LocalEngine]:
    return Provider(
        name="local",
        config=LocalConfig,
        build=_build,
        requires=_requires,
        offers=_offers,
        summary="in-process engine on transformers models: continuous batching, CPU",
    )
