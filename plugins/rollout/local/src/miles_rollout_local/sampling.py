"""Batched sampling: one uniform number per row from a counter, inverse CDF, exact log-probabilities.

The distribution is the one of `numerics.md`: logits / temperature, then top-k, then top-p on what top-k left (smallest
set with mass >= p), renormalised. The draw of a request's token i depends on (seed, i) only: a counter hash, no
generator state, so requests may join, leave, be aborted and resumed without changing what they draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S11 = (np.uint64(n) for n in (30, 27, 31, 11))


def _mix(z: Array) -> Array:
    """The finaliser of splitmix64, on uint64."""
    z = (z ^ (z >> _S30)) * _MIX1
    z = (z ^ (z >> _S27)) * _MIX2
    return z ^ (z >> _S31)


def uniform(seeds: Array, draws: Array) -> Array:
    """float64 in [0, 1), one per (seed, draw): `mix(seed + mix((draw + 1) * golden)) >> 11`, times 2^-53.

    `seeds` uint64 [n], `draws` int64 [n]. Test vectors stand in `tests/test_sampling.py`; they are part of what makes a
    run repeatable and do not change within a major version.
    """
    counter = _mix((draws.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (_mix(seeds + counter) >> _S11) * 2.0**-53


@dataclass(slots=True)
class Knobs:
    """Sampling parameters of n rows: float32, int64, float32 [n]. `top_k` 0 and `top_p` 1 keep the whole vocabulary."""

    temperature: Array
    top_k: Array
    top_p: Array


@dataclass(slots=True)
class Kept:
    """What a cut left: `rows` int64 [c] (indices into the sampled rows), `counts` int32 [c], `ids` int32 flat,
    ascending within a row. Rows that are not named kept the whole vocabulary."""

    rows: Array
    counts: Array
    ids: Array


def sample(logits: torch.Tensor, u: Array, knobs: Knobs) -> tuple[Array, Array, Kept | None]:
    """One token per row: ids int64 [n], log-probabilities float32 [n] of the sampled distribution, and what was kept.

    `logits` float32 [n, vocabulary], `u` float64 [n] in [0, 1). Rows at temperature 0 take the argmax and report its
    log-probability at temperature 1: their own distribution is a point, whose log-probability would say nothing.
    """
    temperature = knobs.temperature
    cold = temperature == 0
    any_cold = bool(cold.any())
    if not (temperature == 1).all():
        scale = np.where(cold, 1, temperature).astype(np.float32) if any_cold else temperature
        logits = logits / torch.from_numpy(scale)[:, None]
    logp = torch.log_softmax(logits, -1)
    mass = torch.cumsum(logp.exp(), -1, dtype=torch.float64)
    target = torch.from_numpy(u)[:, None] * mass[:, -1:]
    picked = torch.searchsorted(mass, target, right=True).clamp_(max=logits.shape[-1] - 1)
    if any_cold:
        picked = torch.where(torch.from_numpy(cold)[:, None], logits.argmax(-1, keepdim=True), picked)
    score = logp.gather(1, picked)[:, 0].numpy()
    tokens = picked[:, 0].numpy()
    cut = ((knobs.top_p < 1) | ((knobs.top_k > 0) & (knobs.top_k < logits.shape[-1]))) & ~cold
    if not cut.any():
        return tokens, score, None
    rows = np.flatnonzero(cut)
    tokens[rows], score[rows], counts, ids = _cut(
        logp[torch.from_numpy(rows)], u[rows], knobs.top_k[rows], knobs.top_p[rows]
    )
    return tokens, score, Kept(rows, counts, ids)


def _cut(logp: torch.Tensor, u: Array, top_k: Array, top_p: Array) -> tuple[Array, Array, Array, Array]:
    """Sample rows under a cut. Ties at the border are kept by lower id: the sort is stable."""
    vocabulary = logp.shape[-1]
    ranked, order = logp.sort(dim=-1, descending=True, stable=True)
    p = ranked.double().exp()
    k = torch.from_numpy(np.where(top_k > 0, top_k, vocabulary))[:, None]
    first = torch.arange(vocabulary)[None] < k
    p = p * first
    mass = p.cumsum(-1)
    # Position j stays where the mass before it is still below p; float noise must not cut anything at p = 1.
    before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], -1)
    nucleus = torch.from_numpy(top_p.astype(np.float64))[:, None]
    keep = first & ((before < nucleus * mass[:, -1:]) | (nucleus >= 1))
    mass = (p * keep).cumsum(-1)
    place = torch.searchsorted(mass, torch.from_numpy(u)[:, None] * mass[:, -1:], right=True)
    place = torch.minimum(place, keep.sum(-1, keepdim=True) - 1)
    tokens = order.gather(1, place)[:, 0].numpy()
    score = (ranked.gather(1, place)[:, 0].double() - mass[:, -1].log()).float().numpy()
    kept = torch.zeros_like(keep).scatter_(1, order, keep)
    return tokens, score, kept.sum(-1).int().numpy(), kept.nonzero()[:, 1].int().numpy()
