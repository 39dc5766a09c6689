"""The local engine against `generate()` and a bare cached loop, as ratios measured in one run.

    OMP_NUM_THREADS=1 python benchmarks/rollout_local.py [--threads 1] [--repeats 5] [--sizes tiny small] [--cpu-time]

Each number is useful tokens per second (up to each request's own end) of the engine divided by that of the other side,
on the same model, prompts, answer lengths and thread count; sides take turns and the median of their times counts.
Goals: at least 3 x `generate()` when lengths have a long tail, 1.5 x when uniform, no slower than a bare loop on equal
lengths, all with 64 slots. The last line is the rollout of recipe A: 16 prompts, 16 answers each, 6 new tokens.

Lengths are imposed (nothing stops but the limit), so that every side computes the same answers' worth of tokens.
`generate()` takes batches of 64 in order of arrival, padded on the left, and each batch runs to its longest answer:
that is what a training loop around `generate()` does. There are four times as many requests as slots. `small` takes
some minutes a line.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from miles_rollout_local.config import LocalConfig
from miles_rollout_local.plugin import miles_rollout
from shapes import MODEL
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from miles_core.contracts.engine import Request
from miles_core.contracts.model import ModelSource
from miles_core.contracts.weights import TensorSpec
from miles_core.provider import BuildContext, Place
from miles_core.records import Sampling, Version

SLOTS = 64
TINY = MODEL | dict(vocab_size=45, max_position_embeddings=512, pad_token_id=0, eos_token_id=1, bos_token_id=None)
SMALL = TINY | dict(
    vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, head_dim=64
)
SIZES = {"tiny": TINY, "small": SMALL}


def model_of(architecture: dict[str, Any]) -> Any:
    keys = dict(architecture)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(keys.pop("model_type"), **keys)).eval()
    model.generation_config.eos_token_id = None
    return model


async def engine_of(model: Any, architecture: dict[str, Any], **options: Any) -> Any:
    """A started engine with the model's weights; nothing stops it but lengths."""
    renderer: Any = SimpleNamespace(stop_ids=(), tokenizer=None)
    context = BuildContext(
        place=Place.CONTROLLER,
        name="local",
        run=None,  # type: ignore[arg-type]
        model=ModelSource(asked="benchmark", architecture=architecture),
        renderer=renderer,
    )
    engine = miles_rollout().build(LocalConfig(**options), context)
    await engine.start()
    port, version = engine.port("tensors"), Version(policy="main", lineage=0, number=0)
    await port.begin(version)
    await port.load(
        [(TensorSpec(name=n, shape=tuple(p.shape), dtype="F32"), p.detach()) for n, p in model.named_parameters()]
    )
    await port.end(version)
    return engine


async def through_engine(engine: Any, prompts: list[np.ndarray], lengths: list[int]) -> int:
    requests = [
        Request(
            id=str(i),
            policy="main",
            prompt={"tokens": prompt},
            sampling=Sampling(max_new_tokens=length),
            seed=i,
        )
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    done = await asyncio.gather(*(engine.generate(r) for r in requests))
    return sum(len(c.columns["tokens"]) for c in done)


@torch.no_grad()
def through_generate(model: Any, prompts: list[np.ndarray], lengths: list[int]) -> int:
    for start in range(0, len(prompts), SLOTS):
        batch, wanted = prompts[start : start + SLOTS], lengths[start : start + SLOTS]
        width = max(map(len, batch))
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(batch):
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
            mask[row, width - len(prompt) :] = 1
        model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=max(wanted), pad_token_id=0)
    return sum(lengths)


@torch.no_grad()
def through_bare_loop(model: Any, prompts: list[np.ndarray], lengths: list[int], batch: int = SLOTS) -> int:
    """Equal prompts and equal answers only: no padding, no bookkeeping, log-probabilities as a trainer needs them."""
    for start in range(0, len(prompts), batch):
        x = torch.from_numpy(np.stack(prompts[start : start + batch])).long()
        cache = None
        for _ in range(lengths[0]):
            out = model(input_ids=x, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            logits = out.logits[:, -1].float()
            x = torch.multinomial(F.softmax(logits, -1), 1)
            F.log_softmax(logits, -1).gather(1, x)
    return sum(lengths)


def timed(run: Callable[[], int], clock: Callable[[], float]) -> float:
    """Seconds a useful token."""
    start = clock()
    tokens = run()
    return (clock() - start) / tokens


def compare(name: str, ours: Callable[[], int], theirs: Callable[[], int], options: Any, goal: str) -> None:
    ours(), theirs()
    clock = time.process_time if options.cpu_time else time.perf_counter
    pairs = [(timed(ours, clock), timed(theirs, clock)) for _ in range(options.repeats)]
    mine, other = (statistics.median(side) for side in zip(*pairs, strict=True))
    rates = f"({1 / mine:8.0f} against {1 / other:8.0f} tokens/s)"
    print(f"{name:<48} {other / mine:5.2f} x   {rates}   goal {goal}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny"])
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds: for busy machines")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore")
    print(f"threads: {options.threads} on every side; slots: {SLOTS}; repeats: {options.repeats}")
    with asyncio.Runner() as runner:
        for size in options.sizes:
            for invariant in (False, True):
                measure(runner, size, invariant, options)


def measure(runner: asyncio.Runner, size: str, invariant: bool, options: Any) -> None:
    architecture = SIZES[size]
    model = model_of(architecture)
    label = f"{size}{' batch_invariant' if invariant else ''}"
    generator = np.random.default_rng(0)
    count = 4 * SLOTS

    def engine(longest: int, slots: int = SLOTS) -> Any:
        constant = {"max_length": longest} if invariant else {}
        return runner.run(engine_of(model, architecture, slots=slots, batch_invariant=invariant, **constant))

    def ours(built: Any, prompts: list[np.ndarray], lengths: list[int]) -> Callable[[], int]:
        return lambda: runner.run(through_engine(built, prompts, lengths))

    # A long tail: most answers are short, a few reach the limit (exponential, mean 24, cut at 256).
    prompts = [generator.integers(2, 45, generator.integers(4, 24)) for _ in range(count)]
    tail = np.minimum(1 + generator.exponential(24, count), 256).astype(int).tolist()
    uniform = generator.integers(1, 129, count).tolist()
    built = engine(24 + 256)
    for kind, lengths, goal in (("long tail", tail, ">= 3"), ("uniform", uniform, ">= 1.5")):
        theirs = lambda lengths=lengths: through_generate(model, prompts, lengths)  # noqa: E731
        goal = "-" if invariant else goal  # goals are for the default, faster mode
        compare(f"{label}: {kind} / generate()", ours(built, prompts, lengths), theirs, options, goal)
    equal = [generator.integers(2, 45, 12) for _ in range(count)]
    theirs = lambda: through_bare_loop(model, equal, [48] * count)  # noqa: E731
    compare(
        f"{label}: equal lengths / bare loop",
        ours(engine(60), equal, [48] * count),
        theirs,
        options,
        "-" if invariant else ">= 1",
    )
    if size == "tiny":
        recipe = [prompt for prompt in generator.integers(2, 45, (16, 6)) for _ in range(16)]
        theirs = lambda: through_bare_loop(model, recipe, [6] * 256, 256)  # noqa: E731
        compare(f"{label}: recipe A / bare loop", ours(engine(12, 256), recipe, [6] * 256), theirs, options, "-")


if __name__ == "__main__":
    main()
