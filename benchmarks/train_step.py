"""One optimizer update of backend `fsdp` against the same update in plain PyTorch and transformers.

Both sides train the same random Qwen3 (hidden 128, two layers) on the same trajectories with the clipped objective and
AdamW, on the same number of threads, taking turns. The bare side is what one writes by hand: padded rows, logits of the
answers, `torch.optim.AdamW`, `clip_grad_norm_`. Printed: backend's time divided by bare time (median of the rounds;
lower is better), for several settings of the backend.

    python benchmarks/train_step.py [--rounds 30] [--threads 1]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from miles_backend_fsdp.backend import FsdpBackend
from miles_backend_fsdp.causal_lm import CausalLM
from miles_backend_fsdp.config import CausalLMConfig, FsdpConfig, LayoutChoice
from shapes import MODEL
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from miles_core.columns import CORE_COLUMNS, Batch, ColumnSpec, Level, collate
from miles_core.config.schema import OptimizerConfig
from miles_core.contracts.backend import RoleSpec
from miles_core.contracts.learning import LOGPROBS, BoundTerm, TermOutput
from miles_core.contracts.model import ModelSource
from miles_core.provider import BuildContext, Place
from miles_core.records import Episode, Group, Sampling, Task, Trajectory

ARCHITECTURE = {**MODEL, "vocab_size": 45, "max_position_embeddings": 256}
PROMPT = 6


class Clip:
    """max(−ρA, −clip(ρ, 0.8, 1.2)A), on-policy: ρ against the detached current log-probabilities."""

    level, mask, weighted, aggregation = "unit", "kept", True, None
    outputs, needs = (LOGPROBS,), frozenset({"advantages"})

    def __call__(self, view: Any) -> TermOutput:
        advantages = view["advantages"]
        ratio = (view.out(LOGPROBS) - view["proximal_logprobs"]).exp()
        return TermOutput(value=-torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages))


def groups(rng: np.random.Generator, n: int, size: int, low: int, high: int) -> list[Group]:
    """`n` prompts of 6 tokens with `size` answers of `low` to `high` tokens."""
    made = []
    for g in range(n):
        prompt = rng.integers(2, 45, PROMPT)
        episodes = []
        for e in range(size):
            answer = rng.integers(2, 45, rng.integers(low, high + 1))
            tokens = np.concatenate([prompt, answer]).astype(np.int32)
            sampled = np.arange(len(tokens)) >= PROMPT
            columns = {
                "tokens": tokens,
                "origin": sampled.astype(np.uint8),
                "trainable": sampled,
                "behaviour_logprobs": np.where(sampled, -3.8, 0).astype(np.float32),
            }
            row = Trajectory(
                id=f"{g}/{e}/0", length=len(tokens), columns=columns, sampling=Sampling(max_new_tokens=high)
            )
            episodes.append(Episode(id=f"{g}/{e}", member=e, trajectories=(row,), reward=0.0))
        task = Task(id=str(g), prompt="")
        made.append(Group(id=str(g), policy="main", slot=g, attempt=0, task=task, episodes=tuple(episodes)))
    return made


def minibatch(rng: np.random.Generator, found: list[Group]) -> Batch:
    batch = collate("main", 0, found, CORE_COLUMNS)
    mask = batch.columns["trainable"]
    return batch.with_columns(
        {"advantages": rng.normal(size=batch.units), "weight.clip": np.where(mask, 1 / mask.sum(), 0)},
        [ColumnSpec(name="weight.clip", level=Level.UNIT, dtype="float32")],
    )


def backend_side(layout: str, share: bool) -> FsdpBackend:
    context = BuildContext(place=Place.TRAINER, name="fsdp", run=SimpleNamespace())  # type: ignore[arg-type]
    backend = FsdpBackend(FsdpConfig(), context)
    role = RoleSpec(
        name="actor",
        source=ModelSource(asked="benchmark", architecture=ARCHITECTURE),
        adapter=CausalLM(CausalLMConfig(layout=LayoutChoice[layout]), share_prefixes=share),
        optimizer=OptimizerConfig(lr=1e-4),
    )
    backend.build({"main": {"actor": role}}, {"main": 100})
    return backend


def bare_side() -> Callable[[Batch], None]:
    keys = {k: v for k, v in ARCHITECTURE.items() if k != "model_type"}
    model = Qwen3ForCausalLM(Qwen3Config(**keys))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)

    def update(batch: Batch) -> None:
        longest = int(batch.lengths.max())
        rows = np.arange(longest) < batch.lengths[:, None]

        def padded(column: str) -> torch.Tensor:
            grid = np.zeros(rows.shape, batch.columns[column].dtype)
            grid[rows] = batch.columns[column]
            return torch.from_numpy(grid)

        tokens, mask = padded("tokens").long(), padded("trainable")[:, PROMPT:].float()
        advantages = padded("advantages")[:, PROMPT:]
        kwargs: dict[str, Any] = {} if rows.all() else {"attention_mask": torch.from_numpy(rows).long()}
        logits = model(input_ids=tokens, **kwargs).logits[:, PROMPT - 1 : -1].float()
        logprobs = functional.log_softmax(logits, -1).gather(2, tokens[:, PROMPT:].unsqueeze(2)).squeeze(2)
        ratio = (logprobs - logprobs.detach()).exp()
        value = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = (value * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return update


def _update(backend: FsdpBackend, batch: Batch) -> None:
    backend.update(batch, [BoundTerm(name="clip", term=Clip(), coef=1.0)])  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rng = np.random.default_rng(0)
    shapes = {
        "recipe A (16 x 16, 6 new tokens)": (16, 16, 6, 6),
        "its warm-up (128 x 1, 6 new tokens)": (128, 1, 6, 6),
        "ragged (8 x 8, 1 to 128 new tokens)": (8, 8, 1, 128),
    }
    print(f"threads on both sides: {torch.get_num_threads()}, rounds: {given.rounds}")
    for title, shape in shapes.items():
        batches = [minibatch(rng, groups(rng, *shape)) for _ in range(given.rounds)]
        sides: dict[str, Callable[[Batch], Any]] = {"bare": bare_side()}
        backends = []
        for name, layout, share in (
            ("default", "auto", True),
            ("padded", "padded", False),
            ("packed, no shared prefixes", "packed", False),
        ):
            backend = backend_side(layout, share)
            backends.append(backend)
            sides[name] = partial(_update, backend)
        spent: dict[str, list[float]] = {name: [] for name in sides}
        for number, batch in enumerate(batches):
            for name, update in sides.items():
                start = time.perf_counter(), time.process_time()
                update(batch)
                wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
                if number >= 3:
                    spent[name].append(cpu if given.threads == 1 else wall)
        bare = statistics.median(spent["bare"])
        print(f"{title}: bare {1e3 * bare:.0f} ms")
        for name in list(sides)[1:]:
            print(f"  {name}: {statistics.median(spent[name]) / bare:.2f} x bare")
        for backend in backends:
            backend.close()


if __name__ == "__main__":
    main()
