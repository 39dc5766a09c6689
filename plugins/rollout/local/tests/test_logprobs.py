"""Log-probabilities of the engine against one plain forward, for every architecture and every way to get there."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from local_engine_kit import ARCHITECTURES, EOS, model_of, plain_logprobs, publish, ragged, request, run, started

from miles_core.records import Finish

CLOSE = dict(rtol=0, atol=1e-5)


def check(model: Any, prompt: Any, completion: Any, temperature: float = 1.0) -> None:
    tokens = completion.columns["tokens"]
    assert tokens.dtype == np.int32 and completion.columns["logprobs"].dtype == np.float32
    np.testing.assert_allclose(
        completion.columns["logprobs"], plain_logprobs(model, prompt, tokens, temperature), **CLOSE
    )


@pytest.mark.parametrize("invariant", [False, True])
def test_ragged_batch_with_fewer_slots_than_requests(architecture: dict[str, Any], invariant: bool) -> None:
    model = model_of(architecture)
    prompts = ragged(21)

    async def go() -> None:
        engine = await started(model, architecture, slots=5, batch_invariant=invariant, prefill_tokens=50)
        lengths = np.random.default_rng(1).integers(1, 40, len(prompts))
        jobs = [
            engine.generate(request(f"r{i}", p, seed=i, temperature=0.7, max_new_tokens=int(n)))
            for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
        ]
        for prompt, limit, completion in zip(prompts, lengths, await asyncio.gather(*jobs), strict=True):
            check(model, prompt, completion, 0.7)
            tokens = completion.columns["tokens"]
            if completion.finish is Finish.STOP:
                assert tokens[-1] == EOS and EOS not in tokens[:-1]
            else:
                assert completion.finish is Finish.LENGTH and len(tokens) == limit and EOS not in tokens
            assert [(s.start, s.end, s.version.number) for s in completion.spans] == [(0, len(tokens), 0)]
        await engine.close()

    run(go())


def test_equal_prompts_share_a_prefill_and_still_differ(architecture: dict[str, Any]) -> None:
    model = model_of(architecture)

    async def go() -> None:
        engine = await started(model, architecture)
        prompt = [5, 9, 12]
        done = await asyncio.gather(*(engine.generate(request(f"r{i}", prompt, seed=i)) for i in range(8)))
        for completion in done:
            check(model, prompt, completion)
        assert len({tuple(c.columns["tokens"].tolist()) for c in done}) > 1
        await engine.close()

    run(go())


def test_greedy_takes_the_argmax_and_reports_temperature_one() -> None:
    architecture = ARCHITECTURES["qwen3"]
    model = model_of(architecture)

    async def go() -> None:
        engine = await started(model, architecture)
        prompts = ragged(6)
        mixed = [request(f"r{i}", p, temperature=0.0 if i % 2 else 0.5, seed=i) for i, p in enumerate(prompts)]
        done = await asyncio.gather(*(engine.generate(r) for r in mixed))
        for i, (prompt, completion) in enumerate(zip(prompts, done, strict=True)):
            check(model, prompt, completion, 1.0 if i % 2 else 0.5)
            if i % 2:
                expected = list(prompt)
                for token in completion.columns["tokens"]:
                    import torch

                    with torch.no_grad():
                        assert int(model(torch.tensor([expected])).logits[0, -1].argmax()) == token
                    expected.append(int(token))
        await engine.close()

    run(go())


@pytest.mark.parametrize("mode", ["in_place", "recompute"])
def test_weights_change_in_mid_flight(architecture: dict[str, Any], mode: str) -> None:
    """Tokens of either version carry its span. After `recompute` they equal a plain forward under the new weights;
    in place, the old cache is used on purpose, so only the tokens before the change do."""
    old, new = model_of(architecture, 0), model_of(architecture, 1)
    prompts = ragged(9, 3)

    async def go() -> None:
        engine = await started(old, architecture, slots=4)
        steps = 0
        original = engine.slots.step
        paused = asyncio.Event()
        loop = asyncio.get_running_loop()

        def step() -> None:
            nonlocal steps
            original()
            steps += 1
            if steps == 7:
                loop.call_soon_threadsafe(paused.set)
                engine._paused = True  # stand still exactly here, as a command between two steps would

        engine.slots.step = step
        jobs = [
            asyncio.ensure_future(engine.generate(request(f"r{i}", p, seed=i, max_new_tokens=30)))
            for i, p in enumerate(prompts)
        ]
        await paused.wait()
        await engine.pause(mode)
        await publish(engine, new, 1)
        await engine.resume()
        done = await asyncio.gather(*jobs)
        crossed = 0
        for prompt, completion in zip(prompts, done, strict=True):
            tokens, scores = completion.columns["tokens"], completion.columns["logprobs"]
            spans = {s.version.number: (s.start, s.end) for s in completion.spans}
            assert sum(e - s for s, e in spans.values()) == len(tokens)
            crossed += len(spans) == 2
            before, after = plain_logprobs(old, prompt, tokens), plain_logprobs(new, prompt, tokens)
            if 0 in spans:
                s, e = spans[0]
                np.testing.assert_allclose(scores[s:e], before[s:e], **CLOSE)
            if 1 in spans and (mode == "recompute" or 0 not in spans):
                s, e = spans[1]
                np.testing.assert_allclose(scores[s:e], after[s:e], **CLOSE)
            elif 1 in spans:
                s, e = spans[1]
                assert not np.allclose(scores[s:e], after[s:e], **CLOSE)
        assert crossed
        await engine.close()

    run(go())


def test_abort_and_resume_draws_as_if_nothing_had_happened() -> None:
    architecture = ARCHITECTURES["qwen3"]
    model = model_of(architecture)
    prompts = ragged(6, 5)

    async def go() -> None:
        engine = await started(model, architecture, slots=6)
        whole = [request(f"r{i}", p, seed=i, max_new_tokens=40) for i, p in enumerate(prompts)]
        uncut = await asyncio.gather(*(engine.generate(r) for r in whole))
        original, steps = engine.slots.step, 0

        def step() -> None:
            nonlocal steps
            original()
            steps += 1
            if steps == 5:
                engine.slots.abort(lambda job: job.request.id in ("r1", "r2", "r4"))

        engine.slots.step = step
        for prompt, asked, full, first in zip(
            prompts, whole, uncut, await asyncio.gather(*(engine.generate(r) for r in whole)), strict=True
        ):
            tokens = first.columns["tokens"]
            if first.finish is Finish.ABORT:
                assert len(tokens) == 6
                rest = await engine.generate(
                    request(asked.id, prompt, seed=asked.seed, max_new_tokens=40, resume=tokens)
                )
                assert [s.start for s in rest.spans] == [0]
                tokens = np.concatenate([tokens, rest.columns["tokens"]])
                scores = np.concatenate([first.columns["logprobs"], rest.columns["logprobs"]])
                np.testing.assert_allclose(scores, plain_logprobs(model, prompt, tokens), **CLOSE)
            np.testing.assert_array_equal(tokens, full.columns["tokens"])
        await engine.close()

    run(go())
