"""Options of the engine `local` (beside the keys that core owns in `rollout`). Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from miles_core.config.schema import opt


class Dtype(StrEnum):
    """Number format of weights and KV cache; it must be the one that the trainer publishes."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """Options of `rollout: {use: local}`."""

    slots: int = opt(64, "requests decoded together; more wait for a free slot", unit="requests", low=1)
    max_length: int | None = opt(
        None, "longest prompt and answer together; the model's own limit where null", unit="tokens", low=2
    )
    prefill_tokens: int = opt(
        4096, "most prompt tokens, padding included, computed between two decode steps", unit="tokens", low=1
    )
    share_prefixes: bool = opt(True, "encode what prompts begin with in common once; never in constant shapes")
    batch_invariant: bool = opt(False, "constant shapes, so that a request's bits never depend on its neighbours")
    dtype: Dtype = opt(Dtype.float32, "number format of weights and KV cache, as the trainer publishes them")
    unverified: bool = opt(False, "run architectures that this engine was never tested with")
