"""The toy language model: softmax over a sum of tables, one for each of the last `order` tokens.

    logits(t) = bias + Σ_k table.k.weight[token t-1-k]       (token 0 stands for what lies before the start)

Small enough to check by hand, big enough to learn to copy a digit. The same functions give the engine's sampling
distribution and the trainer's log-probabilities, in float64 from float32 tables, so that on-policy ratios are 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from miles_core.testing.toys.autodiff import Var

Array = np.ndarray[Any, Any]

#: As `numerics.distill.ABSENT`, which needs torch.
ABSENT = -1e30

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def uniform(seeds: Array, draws: Array) -> Array:
    """float64 [n] in [0, 1): draw number `draws[i]` of stream `seeds[i]` (splitmix64). No state, so that a sample
    depends on (seed, draw) only."""
    with np.errstate(over="ignore"):
        z = seeds.astype(np.uint64) + (draws.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _MIX1
        z = (z ^ (z >> np.uint64(27))) * _MIX2
        z = z ^ (z >> np.uint64(31))
    return np.asarray((z >> np.uint64(11)).astype(np.float64) / 2.0**53)


def contexts(tokens: Array, lengths: Array, order: int) -> Array:
    """int64 [units, order]: the `order` tokens before each unit of ragged `tokens`, latest first, 0 before it."""
    starts = np.repeat(np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64), lengths)
    at = np.arange(len(tokens))[:, None] - 1 - np.arange(order)[None, :]
    if not len(tokens):
        return np.zeros((0, order), np.int64)
    return np.where(at >= starts[:, None], tokens[np.maximum(at, 0)], 0).astype(np.int64)


def cut(logits: Array, temperature: Array, top_k: Array, top_p: Array) -> Array:
    """bool [n, vocabulary]: what is kept of each row: the `top_k` largest (0: all), then of those the smallest set
    with mass >= `top_p`. Ties go to the lower id."""
    n, vocabulary = logits.shape
    keep = np.ones((n, vocabulary), bool)
    rows = np.flatnonzero(((top_k > 0) & (top_k < vocabulary)) | (top_p < 1.0))
    for i in rows:
        scaled = logits[i] / (temperature[i] or 1.0)
        order = np.argsort(-scaled, kind="stable")
        kept = order[: int(top_k[i])] if top_k[i] > 0 else order
        if top_p[i] < 1.0:
            mass = np.exp(scaled[kept] - scaled[kept].max())
            mass /= mass.sum()
            before = np.cumsum(mass) - mass
            kept = kept[before < float(top_p[i])]
        keep[i] = False
        keep[i, kept] = True
    return keep


def log_softmax(logits: Array, keep: Array | None = None) -> Array:
    """float64 [n, vocabulary]; -inf where not kept."""
    x = logits if keep is None else np.where(keep, logits, -np.inf)
    shifted = x - x.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


class ToyModel:
    """Named parameters and the forward pass. `params` hold float64 `Var`s whose values are float32 numbers."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Array]) -> None:
        self.config = dict(config)
        self.order = int(config["order"])
        self.vocab_size = int(config["vocab_size"])
        self.params = {name: Var(value) for name, value in weights.items()}
        self.frozen: set[str] = set()  # parameters that the optimizer leaves alone

    def weights(self) -> dict[str, Array]:
        """float32 copies by name."""
        return {name: var.value.astype(np.float32) for name, var in self.params.items()}

    def load(self, weights: Mapping[str, Array]) -> None:
        """Replace every parameter. Raises `KeyError` where names differ."""
        for name in self.params:
            self.params[name] = Var(weights[name])

    def logits(self, ctx: Array) -> Var:
        """[units, vocabulary] of contexts int64 [units, order]."""
        return _gather_sum([self.params[f"table.{k}.weight"] for k in range(self.order)], self.params["bias"], ctx)

    def values(self, ctx: Array) -> Var:
        """[units]: the value head, which sees what lies before each unit."""
        heads = [self.params[f"value.{k}.weight"] for k in range(self.order)]
        return _gather_sum(heads, self.params["value.bias"], ctx)


def _gather_sum(tables: list[Var], bias: Var, ctx: Array) -> Var:
    total = np.broadcast_to(bias.value, (len(ctx), *bias.shape)).copy()
    for k, table in enumerate(tables):
        total += table.value[ctx[:, k]]

    def scatter(k: int, shape: tuple[int, ...]) -> Any:
        def back(g: Array) -> Array:
            full = np.zeros(shape)
            np.add.at(full, ctx[:, k], g)
            return full

        return back

    return Var(total, [(bias, lambda g: g.sum(axis=0)), *((t, scatter(k, t.shape)) for k, t in enumerate(tables))])


def stream_logits(tensors: Mapping[str, Array], order: int, ctx: Array) -> Array:
    """float64 [n, vocabulary] straight from a weight stream's float32 tensors; the same sums as `ToyModel.logits`."""
    total = np.broadcast_to(tensors["bias"].astype(np.float64), (len(ctx), *tensors["bias"].shape)).copy()
    for k in range(order):
        total += tensors[f"table.{k}.weight"][ctx[:, k]]
    return total


def pick_logprobs(scaled: Var, ids: Array, keep: Array) -> Var:
    """[units]: log-probability of `ids` under softmax over `keep` of `scaled` logits, differentiable."""
    logp = log_softmax(scaled.value, keep)
    at = np.arange(len(ids))

    def back(g: Array) -> Array:
        grad = -np.exp(logp) * g[:, None]
        grad[at, ids] += g
        return grad

    return Var(logp[at, ids], [(scaled, back)])


def token_logprobs(scaled: Var, ids: Array, keep: Array) -> Var:
    """[units, m]: log-probabilities of `ids` [units, m] under softmax over `keep`; `ABSENT` outside it."""
    logp = np.maximum(log_softmax(scaled.value, keep), ABSENT)
    at = np.arange(len(ids))[:, None]

    def back(g: Array) -> Array:
        g = np.where(logp[at, ids] > ABSENT, g, 0.0)
        grad = -np.exp(logp) * g.sum(axis=1, keepdims=True)
        np.add.at(grad, (at, ids), g)
        return np.asarray(grad)

    return Var(logp[at, ids], [(scaled, back)])


def rest_logprobs(scaled: Var, ids: Array, keep: Array) -> Var:
    """[units]: log of the mass of all ids but these, `ABSENT` where there is none."""
    logp = np.maximum(log_softmax(scaled.value, keep), ABSENT)
    others = logp.copy()
    others[np.arange(len(ids))[:, None], ids] = ABSENT
    top = others.max(axis=1)
    rest = np.maximum(top + np.log(np.exp(others - top[:, None]).sum(axis=1)), ABSENT)
    share = np.where((rest > ABSENT)[:, None], np.exp(others - rest[:, None]), np.exp(logp))
    return Var(rest, [(scaled, lambda g: g[:, None] * (share - np.exp(logp)))])


def top_ids(logits: Array, keep: Array, k: int) -> Array:
    """int64 [units, k]: the most likely ids, most likely first; ties go to the lower id."""
    return np.argsort(-np.where(keep, logits, -np.inf), axis=1, kind="stable")[:, :k]


def entropy_of(scaled: Var) -> Var:
    """[units]: entropy over the full vocabulary of `scaled` logits, differentiable."""
    logp = log_softmax(scaled.value)
    p = np.exp(logp)
    h = -(p * logp).sum(axis=1)
    return Var(h, [(scaled, lambda g: -p * (logp + h[:, None]) * g[:, None])])


def initial_weights(config: Mapping[str, Any], seed: int, head: str) -> dict[str, Array]:
    """float32 tables drawn from `seed`; the same seed gives the same bits."""
    rng = np.random.Generator(np.random.Philox(key=seed % 2**64))
    vocabulary, order = int(config["vocab_size"]), int(config["order"])
    scale = float(config.get("scale", 0.01))
    shapes: dict[str, tuple[int, ...]] = {f"table.{k}.weight": (vocabulary, vocabulary) for k in range(order)}
    shapes["bias"] = (vocabulary,)
    if head == "value":
        shapes = {f"value.{k}.weight": (vocabulary,) for k in range(order)} | {"value.bias": ()}
    return {name: (rng.standard_normal(shape) * scale).astype(np.float32) for name, shape in shapes.items()}
