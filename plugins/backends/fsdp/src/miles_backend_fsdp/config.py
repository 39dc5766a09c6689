"""The options of backend `fsdp` and of model adapter `causal-lm`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from miles_core.config.schema import opt


class Dtype(StrEnum):
    """What forward and backward compute in; weights and optimizer state are float32 masters in both cases."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class FsdpConfig:
    """Options of `backend: {use: fsdp}`."""

    dtype: Dtype = opt(Dtype.float32, "compute in this type; masters are float32, exported weights have this type")
    micro_tokens: int = opt(16384, "token budget of one micro-batch on one rank", unit="tokens", low=1)
    checkpointing: bool = opt(False, "recompute activations of each block in the backward pass")
    unit_mib: int = opt(16, "consecutive blocks are sharded together up to this size", unit="MiB", low=0)
    rendezvous: str | None = opt(None, "file:// or tcp:// address where several ranks meet, where no launcher did it")
    deadline_s: float = opt(1800.0, "deadline of every collective", unit="s", low=0.001)


class LayoutChoice(StrEnum):
    """How a micro-batch is laid out. `auto` takes the cheaper one, micro-batch by micro-batch."""

    auto = "auto"
    padded = "padded"
    packed = "packed"


@dataclass(frozen=True, kw_only=True)
class CausalLMConfig:
    """Options of `model: {use: causal-lm}`."""

    unverified: bool = opt(False, "accept an architecture that no test of this package covers")
    layout: LayoutChoice = opt(LayoutChoice.auto, "padded, packed, or the cheaper of both by micro-batch")
    share_prefixes: bool = opt(True, "in the packed layout, compute a prefix that several trajectories share once")
    trainable: list[str] = opt([], "names that are trained, e.g. model.layers.2[6-9].*; everything where empty")
    pack_tokens: int = opt(8192, "longest packed row", unit="tokens", low=1)
    pad_vocab_to: int | None = opt(None, "pad the vocabulary to a multiple of this; never exported", low=1)
    head_mib: int = opt(256, "logits held at once; above it they are computed in recomputed chunks", unit="MiB", low=1)
