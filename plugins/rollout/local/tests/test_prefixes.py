"""What prompts begin with in common is computed once, and no answer notices: exact values, and what was computed."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from local_engine_kit import ARCHITECTURES, VOCABULARY, model_of, plain_logprobs, publish, request, run, started

TEMPLATE = np.random.default_rng(7).integers(2, VOCABULARY, 30)
QWEN = ARCHITECTURES["qwen3"]


def prompts(count: int, seed: int = 0) -> list[np.ndarray]:
    """Prompts that begin alike; some are the beginning of others, one is the template alone."""
    generator = np.random.default_rng(seed)
    own = [generator.integers(2, VOCABULARY, generator.integers(1, 9)) for _ in range(count - 2)]
    own += [own[0][:-1], np.concatenate([own[0], own[0]])]
    return [np.concatenate([TEMPLATE, tail]) for tail in own]


async def answers(engine: Any, given: list[np.ndarray], tag: str = "r", **sampling: Any) -> list[Any]:
    """All answers; whatever the engine shares, log-probabilities are those of one plain forward."""
    jobs = [engine.generate(request(f"{tag}{i}", p, seed=i, **sampling)) for i, p in enumerate(given)]
    return list(await asyncio.gather(*jobs))


def check(model: Any, given: list[np.ndarray], done: list[Any]) -> None:
    for prompt, completion in zip(given, done, strict=True):
        expected = plain_logprobs(model, prompt, completion.columns["tokens"])
        np.testing.assert_allclose(completion.columns["logprobs"], expected, rtol=0, atol=1e-5)


def encoded(engine: Any) -> int:
    return sum(lane.slots.encoded for lane in engine.lanes.all)


def test_log_probabilities_are_those_of_a_plain_forward(architecture: dict[str, Any]) -> None:
    model = model_of(architecture)

    async def go() -> None:
        engine = await started(model, architecture, slots=5)
        given = prompts(17)
        check(model, given, await answers(engine, given))
        assert encoded(engine) < 0.75 * sum(map(len, given))
        await engine.close()

    run(go())


def test_a_common_beginning_is_computed_once_and_answers_stay_the_same() -> None:
    model = model_of(QWEN)
    given = prompts(12)

    async def go(share: bool) -> tuple[int, list[list[int]]]:
        engine = await started(model, QWEN, share_prefixes=share)
        done = await answers(engine, given)
        found = encoded(engine), [c.columns["tokens"].tolist() for c in done]
        await engine.close()
        return found

    (shared, ours), (whole, theirs) = run(go(True)), run(go(False))
    assert ours == theirs
    longest = max(map(len, given))
    assert whole == len(given) * longest
    first = min(map(len, given)) - 1  # every prompt leaves a token to compute
    assert shared == first + len(given) * (longest - first)


def test_members_of_a_group_that_join_later_take_over_what_runs() -> None:
    model = model_of(QWEN)

    async def go() -> None:
        engine = await started(model, QWEN, slots=4)
        given = [TEMPLATE] * 16  # four slots: most join when a sibling has left
        lengths = np.random.default_rng(3).integers(2, 30, 16)
        jobs = [
            engine.generate(request(f"r{i}", p, seed=i, max_new_tokens=int(n)))
            for i, (p, n) in enumerate(zip(given, lengths, strict=True))
        ]
        check(model, given, list(await asyncio.gather(*jobs)))
        assert encoded(engine) < 2 * len(TEMPLATE) + 16  # the prompt at first, and afterwards its last token
        await engine.close()

    run(go())


def test_nothing_is_taken_over_from_other_weights() -> None:
    """New prompts after an update in place: what runs still holds entries of the old weights."""
    old, new = model_of(QWEN), model_of(QWEN, seed=5)

    async def go() -> None:
        engine = await started(old, QWEN)
        given = prompts(6)
        check(old, given, await answers(engine, given, max_new_tokens=2))  # what they share is held from now on
        running = asyncio.ensure_future(
            engine.generate(request("long", TEMPLATE, max_new_tokens=50, temperature=2.0, seed=3))
        )
        await asyncio.sleep(0)
        await engine.pause("in_place")
        await publish(engine, new, 1)
        await engine.resume()
        check(new, given, await answers(engine, given, "s"))
        await engine.pause("abort")
        await engine.resume()
        await running
        await engine.close()

    run(go())


@pytest.mark.parametrize("mode", ["recompute", "in_place"])
def test_requests_that_run_on_after_a_pause_are_sources_again_only_where_they_were_computed_anew(mode: str) -> None:
    old, new = model_of(QWEN), model_of(QWEN, seed=5)

    async def go() -> None:
        engine = await started(old, QWEN)
        running = [
            asyncio.ensure_future(engine.generate(request(f"l{i}", TEMPLATE, max_new_tokens=60, seed=i)))
            for i in range(12)
        ]
        await asyncio.sleep(0.02)
        await engine.pause(mode)
        await publish(engine, new, 1)
        await engine.resume()
        given = prompts(5)
        check(new, given, await answers(engine, given))
        await asyncio.gather(*running)
        await engine.close()

    run(go())


def test_constant_shapes_share_nothing() -> None:
    model = model_of(QWEN)

    async def go() -> None:
        engine = await started(model, QWEN, slots=16, batch_invariant=True)
        given = prompts(8)
        check(model, given, await answers(engine, given))
        assert all(lane.slots.prefixes is None for lane in engine.lanes.all)
        assert encoded(engine) >= sum(map(len, given))
        await engine.close()

    run(go())


def test_prompts_that_differ_at_once_are_computed_as_ever() -> None:
    model = model_of(QWEN)

    async def go() -> None:
        engine = await started(model, QWEN)
        given = [np.concatenate([[i + 2], TEMPLATE]) for i in range(6)] + [np.array([3])]
        check(model, given, await answers(engine, given))
        assert encoded(engine) == len(given) * (len(TEMPLATE) + 1)
        await engine.close()

    run(go())
