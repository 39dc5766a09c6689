"""Adapted models on the backend `fsdp`, and small batches for them."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from miles_backend_fsdp.backend import FsdpBackend
from miles_backend_fsdp.causal_lm import CausalLM
from miles_backend_fsdp.config import CausalLMConfig, FsdpConfig

from miles_algo_lora.config import LoraConfig
from miles_algo_lora.trainer import LoraTrainer
from miles_core.columns import CORE_COLUMNS, Batch, ColumnSpec, Level, collate
from miles_core.config.schema import OptimizerConfig, RoleConfig, RoleUpdate
from miles_core.contracts.backend import RoleSpec
from miles_core.contracts.learning import LOGPROBS, BoundTerm, Output, TermOutput
from miles_core.contracts.model import ModelSource
from miles_core.provider import BuildContext, Place
from miles_core.records import Episode, Group, Task, Trajectory

torch.set_num_threads(1)

VOCABULARY = 48
ARCHITECTURE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}
SOURCE = ModelSource(asked="qwen3", architecture=ARCHITECTURE)
REFERENCE = Output(name="logprobs", role="reference")
ADAPTER_OFF = {"reference": {"init": "actor", "update": "adapter_off"}}


def extension(further: Mapping[str, Any] | None = None, names: tuple[str, ...] = ("main",), **options: Any) -> Any:
    """The extension beside a trainer, of a run with an actor and these further roles in every policy."""
    found = {"actor": RoleConfig(update=RoleUpdate.trained)}
    for name, given in (further or {}).items():
        found[name] = RoleConfig(**{k: RoleUpdate[v] if k == "update" else v for k, v in given.items()})
    model = SimpleNamespace(core=SimpleNamespace(source="base"))
    policy = SimpleNamespace(roles=found, model=model)
    run: Any = SimpleNamespace(policies=dict.fromkeys(names, policy))
    return LoraTrainer(LoraConfig(**options), BuildContext(place=Place.TRAINER, name="lora", run=run, seed=5))


def backend(
    added: Any,
    roles: Mapping[str, Any] | None = None,
    *,
    policies: tuple[str, ...] = ("main",),
    rank: int = 0,
    ranks: int = 1,
    lr: float = 1e-2,
    source: ModelSource = SOURCE,
    **config: Any,
) -> FsdpBackend:
    """A backend whose policies have an actor and these further roles."""
    extensions = () if added is None else (added,)
    run: Any = SimpleNamespace()
    context = BuildContext(place=Place.TRAINER, name="fsdp", run=run, rank=rank, ranks=ranks, extensions=extensions)
    made = FsdpBackend(FsdpConfig(**config), context)
    base: dict[str, Any] = {"source": source, "optimizer": OptimizerConfig(lr=lr, eps=1e-6), "seed": 11}

    def spec(name: str, **changes: Any) -> RoleSpec:
        return RoleSpec(name=name, adapter=CausalLM(CausalLMConfig(), share_prefixes=True), **{**base, **changes})

    specs = {"actor": spec("actor"), **{name: spec(name, **given) for name, given in (roles or {}).items()}}
    made.build(dict.fromkeys(policies, specs), dict.fromkeys(policies, 10))
    return made


def batch_of(seed: int = 0, policy: str = "main", step: int = 0) -> Batch:
    """Three groups of four answers of up to eight tokens, with random advantages and the weights of a token mean."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(3):
        prompt = rng.integers(2, VOCABULARY, rng.integers(1, 6))
        episodes = []
        for e in range(4):
            answer = rng.integers(2, VOCABULARY, rng.integers(1, 9))
            n = len(prompt) + len(answer)
            sampled = np.arange(n) >= len(prompt)
            columns = {
                "tokens": np.array([*prompt, *answer], np.int32),
                "origin": sampled.astype(np.uint8),
                "trainable": sampled,
                "behaviour_logprobs": np.zeros(n, np.float32),
            }
            row = Trajectory(id=f"t{g}/{e}/0", length=n, columns=columns, sampling=None)
            episodes.append(Episode(id=f"t{g}/{e}", member=e, trajectories=(row,), reward=0.0))
        task = Task(id=f"t{g}", prompt="")
        groups.append(Group(id=f"t{g}", policy=policy, slot=g, attempt=0, task=task, episodes=tuple(episodes)))
    batch = collate(policy, step, groups, CORE_COLUMNS)
    mask = batch.columns["trainable"]
    specs = [ColumnSpec(name="weight.policy", level=Level.UNIT, dtype="float32")]
    columns = {"advantages": rng.normal(size=batch.units), "weight.policy": np.where(mask, 1.0 / mask.sum(), 0.0)}
    return batch.with_columns(columns, specs)


class Reinforce:
    """−A·π, and with a coefficient the k2 of the reference, inside the micro-batch."""

    level = "unit"
    mask = "kept"
    weighted = True
    aggregation = None
    needs = frozenset({"advantages"})

    def __init__(self, beta: float = 0.0) -> None:
        self.beta = beta
        self.outputs: tuple[Output, ...] = (LOGPROBS, REFERENCE) if beta else (LOGPROBS,)

    def __call__(self, view: Any) -> TermOutput:
        logprobs = view.out(LOGPROBS)
        value = -view["advantages"] * logprobs
        if self.beta:
            value = value + self.beta * 0.5 * (logprobs - view.out(REFERENCE)) ** 2
        return TermOutput(value=value, metrics={})


def terms(beta: float = 0.0) -> list[BoundTerm]:
    return [BoundTerm(name="policy", term=Reinforce(beta), coef=1.0)]


def parameters(made: FsdpBackend, policy: str = "main", role: str = "actor") -> dict[str, torch.Tensor]:
    """Copies of a role's parameters."""
    found = made._role(policy, role)
    found.settle()
    return {name: tensor.clone() for name, tensor in found.full_tensors(False)}


def stream(made: FsdpBackend, policy: str = "main") -> dict[str, torch.Tensor]:
    return {spec.name: tensor.clone() for spec, tensor in made.export(policy, "full")}
