"""From options and context to a `LocalEngine`; what it could not serve is refused here, before the run."""

from __future__ import annotations

import logging
from typing import Any

from miles_core.errors import ConfigError
from miles_core.provider import BuildContext
from miles_rollout_local import models
from miles_rollout_local.adapters import Adapters
from miles_rollout_local.config import LocalConfig
from miles_rollout_local.engine import LocalEngine
from miles_rollout_local.fused import FusedForward
from miles_rollout_local.lanes import Lane, Lanes
from miles_rollout_local.plain import PlainForward
from miles_rollout_local.slots import Slots
from miles_rollout_local.weights import LiveWeights

_log = logging.getLogger(__name__)

#: Largest cache that `batch_invariant` allocates at once without being told a length.
_UNASKED_CACHE_BYTES = 2**30


def build(config: LocalConfig, context: BuildContext, offers: frozenset[str]) -> LocalEngine:
    """The engine of `context.name`, with memory for its weights; version 0 arrives through the port."""
    if context.core is not None and context.core.gpus:
        raise ConfigError(
            f"rollout {context.name!r} asks for {context.core.gpus} GPUs; the engine `local` runs on CPU",
            fix="set rollout.gpus=0, or choose an engine for GPUs",
        )
    renderer = context.need("renderer")
    source = context.need("model")
    _refuse_unlike(context)

    def lane() -> Lane:
        model, verified = models.load(source, config)
        limit = models.max_length(model.config, config)
        forward = FusedForward(model, limit, invariant=config.batch_invariant) if verified else PlainForward(model)
        if config.batch_invariant and config.max_length is None:
            _refuse_large_cache(config, model, limit)
        slots = Slots(
            forward,
            name=context.name,
            slots=config.slots,
            max_length=limit,
            vocabulary=model.config.vocab_size,
            prefill_tokens=config.prefill_tokens,
            stop_ids=renderer.stop_ids,
            decode_text=lambda ids: renderer.tokenizer.decode(ids, skip_special=False),
            invariant=config.batch_invariant,
            share_prefixes=config.share_prefixes,
        )
        return Lane(slots, LiveWeights(model), Adapters(model) if verified and not config.batch_invariant else None)

    engine = LocalEngine(context.name, Lanes(context.name, source, lane), offers)
    _warn_of_cut_answers(context, engine.slots.max_length, asked=config.max_length is not None)
    return engine


def _warn_of_cut_answers(context: BuildContext, limit: int, *, asked: bool) -> None:
    """Said and not refused: a run whose answers end by themselves never meets the limit."""
    judges = getattr(context.run, "judges", {})
    if context.core is None or context.name in judges or context.core.max_new_tokens < limit:  # a judge samples nothing
        return
    whose = "rollout.max_length is" if asked else "its model has positions for"
    _log.warning(
        "rollout %r: max_new_tokens is %d, and %s %d tokens, prompt and answer together: answers end there, with "
        "finish `length`, and max_new_tokens is never reached\nFix: write a max_new_tokens that fits behind a prompt",
        context.name,
        context.core.max_new_tokens,
        whose,
        limit,
    )


def _refuse_unlike(context: BuildContext) -> None:
    """One engine has one architecture and one tokenizer: those of the run's first policy."""
    policies = list(context.run.policies.values()) if context.run is not None else []
    for policy in policies[1:]:
        first, other = ((p.model.core, p.renderer.use, p.renderer.options) for p in (policies[0], policy))
        same = first[1:] == other[1:] and all(
            getattr(first[0], key) == getattr(other[0], key) for key in ("tokenizer", "alphabet", "architecture")
        )
        if not same or (first[0].tokenizer is None and first[0].source != other[0].source):
            raise ConfigError(
                f"rollout {context.name!r} serves policies {policies[0].name!r} and {policy.name!r}, whose tokenizer, "
                "renderer or architecture differ",
                fix="give them the same model, or name one model.tokenizer for both",
            )


def _refuse_large_cache(config: LocalConfig, model: Any, limit: int) -> None:
    settings = model.config
    width = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    heads = getattr(settings, "num_key_value_heads", settings.num_attention_heads)
    size = config.slots * limit * settings.num_hidden_layers * heads * width * 2 * model.dtype.itemsize
    if size > _UNASKED_CACHE_BYTES:
        raise ConfigError(
            f"batch_invariant: a constant cache of {config.slots} slots x {limit} tokens take {size / 2**30:.1f} GiB",
            fix="set rollout.max_length to the longest prompt and answer together, or lower rollout.slots",
        )
