"""What encoding shared prompts once gains, in the engine and in the trainer, and what training fewer layers gains.

    python benchmarks/shared_prompts.py [--rounds 3] [--layers 30] [--threads 1]

Both sides compute the same answers with the same weights (random, in the shape of SmolLM2-135M) and take turns; printed
are ratios of processor time, the side that shares nothing being 1 (lower is better). Prompts are those of
`recipes/smollm2.yaml` in length: a chat template and an instruction that all begin with, then the question.
`answers only` of the engine is the time of a batch whose prompts are one token, which no sharing can touch.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from miles_backend_fsdp.backend import FsdpBackend
from miles_backend_fsdp.causal_lm import CausalLM
from miles_backend_fsdp.config import CausalLMConfig, FsdpConfig, LayoutChoice
from rollout_local import engine_of, model_of
from train_step import Clip

from miles_core.columns import CORE_COLUMNS, Batch, ColumnSpec, Level, collate
from miles_core.config.schema import OptimizerConfig
from miles_core.contracts.backend import RoleSpec
from miles_core.contracts.engine import Request
from miles_core.contracts.learning import BoundTerm
from miles_core.contracts.model import ModelSource
from miles_core.provider import BuildContext, Place
from miles_core.records import Episode, Group, Sampling, Task, Trajectory, Version

SMOLLM2 = dict(
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    rope_theta=100000.0,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
)
ALIKE, OWN, NEW = 32, 14, 8  # tokens: what all prompts begin with, what is theirs, and the answer
Array = np.ndarray[Any, Any]


def prompts(count: int, alike: int = ALIKE, own: int = OWN) -> list[Array]:
    rng = np.random.default_rng(0)
    first = rng.integers(3, SMOLLM2["vocab_size"], alike)
    return [np.concatenate([first, rng.integers(3, SMOLLM2["vocab_size"], own)]) for _ in range(count)]


def measured(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median processor seconds of each side; they take turns, and the first round does not count."""
    spent: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            start = time.process_time()
            side()
            if number:
                spent[name].append(time.process_time() - start)
    return {name: statistics.median(found) for name, found in spent.items()}


def report(title: str, found: dict[str, float]) -> None:
    base = next(iter(found.values()))
    print(f"{title}: " + ", ".join(f"{name} {value / base:.2f}" for name, value in found.items()), flush=True)


# --- the engine ------------------------------------------------------------------------------------------------------


def engine_side(loop: Any, architecture: dict[str, Any], model: Any, share: bool) -> Callable[[list[Array], int], None]:
    engine = loop.run_until_complete(engine_of(model, architecture, share_prefixes=share, max_length=256))
    version = 0

    async def sample(given: list[Array], size: int) -> None:
        nonlocal version
        version += 1
        port = engine.port("tensors")  # the same weights under a new name: nothing of the last round may be taken over
        await port.begin(Version(policy="main", lineage=0, number=version))
        await port.load([])
        await port.end(Version(policy="main", lineage=0, number=version))
        requests = [
            Request(
                id=f"{i}/{k}",
                policy="main",
                prompt={"tokens": prompt},
                sampling=Sampling(max_new_tokens=NEW),
                seed=i * size + k,
            )
            for i, prompt in enumerate(given)
            for k in range(size)
        ]
        await asyncio.gather(*(engine.generate(r) for r in requests))

    return lambda given, size: loop.run_until_complete(sample(given, size))


def engines(architecture: dict[str, Any], rounds: int) -> None:
    loop = asyncio.new_event_loop()
    model = model_of(architecture)
    sides = {share: engine_side(loop, architecture, model, share) for share in (False, True)}
    for title, count, size in (("8 prompts, 8 answers each", 8, 8), ("evaluation: 64 prompts, one answer each", 64, 1)):
        whole, bare = prompts(count), prompts(count, 0, 1)
        found = measured(
            {
                "each prompt once": lambda whole=whole, size=size: sides[False](whole, size),
                "common beginnings once": lambda whole=whole, size=size: sides[True](whole, size),
                "answers only": lambda bare=bare, size=size: sides[False](bare, size),
            },
            rounds,
        )
        report(f"engine, {title}", found)


# --- the trainer -----------------------------------------------------------------------------------------------------


def minibatch(count: int, size: int) -> Batch:
    rng = np.random.default_rng(1)
    groups = []
    for g, prompt in enumerate(prompts(count)):
        episodes = []
        for e in range(size):
            tokens = np.concatenate([prompt, rng.integers(3, SMOLLM2["vocab_size"], NEW)]).astype(np.int32)
            sampled = np.arange(len(tokens)) >= len(prompt)
            columns = {
                "tokens": tokens,
                "origin": sampled.astype(np.uint8),
                "trainable": sampled,
                "behaviour_logprobs": np.where(sampled, -3.8, 0).astype(np.float32),
            }
            row = Trajectory(
                id=f"{g}/{e}/0", length=len(tokens), columns=columns, sampling=Sampling(max_new_tokens=NEW)
            )
            episodes.append(Episode(id=f"{g}/{e}", member=e, trajectories=(row,), reward=0.0))
        task = Task(id=str(g), prompt="")
        groups.append(Group(id=str(g), policy="main", slot=g, attempt=0, task=task, episodes=tuple(episodes)))
    batch = collate("main", 0, groups, CORE_COLUMNS)
    mask = batch.columns["trainable"]
    columns = {
        "advantages": rng.normal(size=batch.units),
        "weight.clip": np.where(mask, 1 / mask.sum(), 0),
        "proximal_logprobs": np.where(mask, -10.8, 0),
    }
    return batch.with_columns(columns, [ColumnSpec(name="weight.clip", level=Level.UNIT, dtype="float32")])


def trainer(architecture: dict[str, Any], **options: Any) -> FsdpBackend:
    backend = FsdpBackend(FsdpConfig(), BuildContext(place=Place.TRAINER, name="fsdp", run=SimpleNamespace()))  # type: ignore[arg-type]
    config = CausalLMConfig(**options)
    role = RoleSpec(
        name="actor",
        source=ModelSource(asked="benchmark", architecture=architecture),
        adapter=CausalLM(config, share_prefixes=config.share_prefixes),
        optimizer=OptimizerConfig(lr=1e-6),
    )
    backend.build({"main": {"actor": role}}, {"main": 100})
    return backend


def trainers(architecture: dict[str, Any], rounds: int) -> None:
    layers = architecture["num_hidden_layers"]
    last = [f"model.layers.{i}.*" for i in range(layers - max(1, layers // 5), layers)]
    sides = {
        "padded rows": {"layout": LayoutChoice.padded},
        "common beginnings once": {},
        f"and the last {len(last)} of {layers} layers trained": {"trainable": last},
    }
    batch = minibatch(8, 8)
    backends = {name: trainer(architecture, **options) for name, options in sides.items()}

    def update(backend: FsdpBackend) -> None:
        backend.update(batch, [BoundTerm(name="clip", term=Clip(), coef=1.0)])  # type: ignore[arg-type]

    found = measured({name: lambda b=backend: update(b) for name, backend in backends.items()}, rounds)
    report("trainer, 8 prompts, 8 answers each", found)
    for backend in backends.values():
        backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    architecture = {**SMOLLM2, "num_hidden_layers": options.layers}
    engines(architecture, options.rounds)
    trainers(architecture, options.rounds)


if __name__ == "__main__":
    main()
