"""`batch_invariant`: equal bits whatever the neighbours, the slot and the moment; and seeds that decide alone."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from local_engine_kit import ARCHITECTURES, model_of, ragged, request, run, started

from miles_core.errors import EngineError


async def sampled(engine: Any, requests: list[Any], order: Any) -> dict[str, Any]:
    done = await asyncio.gather(*(engine.generate(requests[i]) for i in order))
    return {c.request: c for c in done}


@pytest.mark.parametrize("slots", [3, 16, 20])
def test_bits_do_not_depend_on_neighbours_slots_or_moments(architecture: dict[str, Any], slots: int) -> None:
    model = model_of(architecture)
    prompts = ragged(14, 2)
    lengths = np.random.default_rng(3).integers(1, 50, len(prompts))

    async def go() -> None:
        engine = await started(model, architecture, slots=slots, batch_invariant=True, prefill_tokens=64)
        asked = [
            request(f"r{i}", p, seed=i, temperature=0.8, max_new_tokens=int(n), top_k=9 * (i % 2))
            for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
        ]
        alone = [await engine.generate(r) for r in asked]
        for seed in range(3):
            together = await sampled(engine, asked, np.random.default_rng(seed).permutation(len(asked)))
            for one in alone:
                two = together[one.request]
                np.testing.assert_array_equal(one.columns["tokens"], two.columns["tokens"])
                np.testing.assert_array_equal(
                    one.columns["logprobs"].view(np.uint32), two.columns["logprobs"].view(np.uint32)
                )
        await engine.close()

    run(go())


def test_the_faster_mode_draws_the_same_tokens_up_to_float_noise() -> None:
    """Seeds decide: other order, other slots, other slot count; tokens agree, log-probabilities differ by noise."""
    architecture = ARCHITECTURES["llama"]
    model = model_of(architecture)
    asked = [request(f"r{i}", p, seed=i, max_new_tokens=20) for i, p in enumerate(ragged(10, 4))]

    async def go() -> None:
        results = []
        for slots, order in ((1, range(10)), (4, range(9, -1, -1)), (10, range(10))):
            engine = await started(model, architecture, slots=slots)
            results.append(await sampled(engine, asked, order))
            await engine.close()
        for other in results[1:]:
            for name, one in results[0].items():
                np.testing.assert_array_equal(one.columns["tokens"], other[name].columns["tokens"])
                np.testing.assert_allclose(one.columns["logprobs"], other[name].columns["logprobs"], atol=1e-5)

    run(go())


def test_machines_that_cannot_are_refused() -> None:
    architecture = ARCHITECTURES["qwen3"]
    model = model_of(architecture)

    async def go() -> None:
        from local_engine_kit import build, publish

        engine = build(architecture, batch_invariant=True)
        await engine.start()
        original = engine.slots.forward.decode

        def drifting(*args: Any) -> torch.Tensor:
            logits = original(*args)
            logits[7, 0] += 1e-6
            return logits

        engine.slots.forward.decode = drifting
        with pytest.raises(EngineError, match="cannot be batch-invariant here"):
            await publish(engine, model, 0)
        await engine.close()

    run(go())
