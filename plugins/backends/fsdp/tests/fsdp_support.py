"""Small batches, models and backends for the tests of this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from miles_backend_fsdp.backend import FsdpBackend
from miles_backend_fsdp.causal_lm import CausalLM
from miles_backend_fsdp.config import CausalLMConfig, FsdpConfig, LayoutChoice
from miles_backend_fsdp.conformance import TINY
from miles_core.columns import CORE_COLUMNS, Batch, ColumnSpec, Level, collate
from miles_core.config.schema import OptimizerConfig
from miles_core.contracts.backend import RoleSpec
from miles_core.contracts.learning import LOGPROBS, BoundTerm, Output, TermOutput
from miles_core.contracts.model import ModelSource
from miles_core.provider import BuildContext, Place
from miles_core.records import Episode, Group, Sampling, Task, Trajectory

torch.set_num_threads(1)

VOCABULARY = 48
BASE = {**TINY, "vocab_size": VOCABULARY}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**BASE, "model_type": "llama"},
    "qwen2": {**BASE, "model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": {**BASE, "model_type": "qwen3"},
    "qwen3_moe": {
        **BASE,
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "mistral": {**BASE, "model_type": "mistral", "sliding_window": 5},
    "smollm2": {**BASE, "model_type": "llama", "num_key_value_heads": 4, "rope_theta": 100000.0},
}


def source(name: str = "qwen3", **changes: Any) -> ModelSource:
    return ModelSource(asked=name, architecture={**ARCHITECTURES[name], **changes})


def adapter(**options: Any) -> CausalLM:
    layout = LayoutChoice[options.pop("layout", "auto")]
    config = CausalLMConfig(layout=layout, **options)
    return CausalLM(config, share_prefixes=config.share_prefixes)


def trajectory(
    identifier: str, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling | None = None, **columns: Any
) -> Trajectory:
    n = len(prompt) + len(answer)
    sampled = np.arange(n) >= len(prompt)
    given: dict[str, Any] = {
        "tokens": np.array([*prompt, *answer], np.int32),
        "origin": sampled.astype(np.uint8),
        "trainable": sampled,
        "behaviour_logprobs": np.zeros(n, np.float32),
    }
    return Trajectory(id=identifier, length=n, columns={**given, **columns}, sampling=sampling)


def random_groups(
    seed: int, groups: int = 3, size: int = 4, longest: int = 12, sampling: Sampling | None = None
) -> list[Group]:
    """Groups that share a prompt; answers of any length, some equal, and one episode of two siblings."""
    rng = np.random.default_rng(seed)
    made = []
    for g in range(groups):
        prompt = rng.integers(2, VOCABULARY, rng.integers(1, 7))
        episodes = []
        for e in range(size):
            leaves = 2 if (g, e) == (0, 1) else 1
            rows = []
            for leaf in range(leaves):
                answer = rng.integers(2, VOCABULARY, rng.integers(1, longest))
                rows.append(trajectory(f"t{g}/{e}/{leaf}", prompt, answer, sampling))
            if e and rng.random() < 0.3:
                before = episodes[-1].trajectories[0].columns["tokens"]
                rows[0] = trajectory(f"t{g}/{e}/0", prompt, before[len(prompt) :], sampling)
            episodes.append(Episode(id=f"t{g}/{e}", member=e, trajectories=tuple(rows), reward=float(rng.random())))
        task = Task(id=f"t{g}", prompt="")
        made.append(Group(id=f"t{g}", policy="main", slot=g, attempt=0, task=task, episodes=tuple(episodes)))
    return made


UNIT_SPECS = [ColumnSpec(name=name, level=Level.UNIT, dtype="float32") for name in ("weight.loss_term", "weight.other")]


def batch_of(groups: Sequence[Group], seed: int = 0, *, proximal: bool = False) -> Batch:
    """A minibatch with random advantages and `weight.loss_term` = 1 / trainable tokens."""
    batch = collate("main", 0, groups, CORE_COLUMNS)
    rng = np.random.default_rng(seed)
    mask = batch.columns["trainable"]
    weight = np.where(mask, 1.0 / max(1, mask.sum()), 0.0)
    columns: dict[str, Any] = {
        "advantages": rng.normal(size=batch.units),
        "weight.loss_term": weight,
        "weight.other": weight,
    }
    if proximal:
        columns["proximal_logprobs"] = np.where(mask, -2.0 + 0.3 * rng.normal(size=batch.units), 0.0)
    return batch.with_columns(columns, UNIT_SPECS)


class Reinforce:
    """−A·π, per unit."""

    level = "unit"
    mask = "kept"
    weighted = True
    aggregation = None
    outputs: tuple[Output, ...] = (LOGPROBS,)
    needs = frozenset({"advantages"})

    def __call__(self, view: Any) -> TermOutput:
        logprobs = view.out(LOGPROBS)
        return TermOutput(value=-view["advantages"] * logprobs, metrics={"logprob": logprobs.detach()})


def bound(term: Any = None, name: str = "loss_term", coef: float = 1.0, role: str = "actor") -> BoundTerm:
    return BoundTerm(name=name, term=term or Reinforce(), coef=coef, role=role)


def make_backend(
    *,
    architecture: ModelSource | None = None,
    options: Mapping[str, Any] | None = None,
    config: FsdpConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    roles: Mapping[str, Mapping[str, Any]] | None = None,
    policies: Mapping[str, Mapping[str, RoleSpec]] | None = None,
    total: int = 10,
    extensions: tuple[Any, ...] = (),
    rank: int = 0,
    ranks: int = 1,
) -> FsdpBackend:
    """A backend with policy `main` and role `actor` (and `roles`, as changes to its spec)."""
    context = BuildContext(
        place=Place.TRAINER,
        name="fsdp",
        run=SimpleNamespace(),  # type: ignore[arg-type]
        rank=rank,
        ranks=ranks,
        extensions=extensions,
    )
    backend = FsdpBackend(config or FsdpConfig(), context)
    base = {
        "source": architecture or source(),
        "adapter": adapter(**(options or {})),
        "optimizer": optimizer or OptimizerConfig(lr=1e-3),
        "seed": 11,
    }
    specs = {"actor": RoleSpec(name="actor", **base)}
    for name, changes in (roles or {}).items():
        specs[name] = RoleSpec(name=name, **{**base, **changes})
    built = policies or {"main": specs}
    backend.build(built, dict.fromkeys(built, total))
    return backend


def weights(backend: FsdpBackend, role: str = "actor") -> dict[str, torch.Tensor]:
    found = backend._role("main", role)
    found.settle()
    return {name: tensor.clone() for name, tensor in found.full_tensors(False)}


# --- a critic that shares the actor's module ------------------------------------------------------------------------

VALUES = Output(name="values", role="critic", grad=True)
BOOTSTRAP = Output(name="bootstrap_value", role="critic")
SHARES = {"critic": {"init": "actor", "update": "shares", "head": "value", "optimizer": None}}


class ValueLoss:
    """(V − 1)² per unit."""

    level = "unit"
    mask = "trainable"
    weighted = False
    aggregation = None
    outputs: tuple[Output, ...] = (VALUES,)
    needs: frozenset[str] = frozenset()

    def __call__(self, view: Any) -> TermOutput:
        return TermOutput(value=(view.out(VALUES) - 1.0) ** 2)


TERMS = [bound(), bound(ValueLoss(), "other", 0.5, "critic")]
