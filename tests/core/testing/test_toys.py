"""The toys are real plugins: they learn, agree with each other, and survive what the contracts promise."""

import asyncio
import time

import numpy as np

from miles_core.records import Sampling

from .conftest import batch_of, built_backend, hand_over, policy_term, sample_group


def test_a_loop_of_toys_learns_to_echo(engine, env, renderer):
    async def loop():
        backend = built_backend()
        await engine.start()
        sampling = Sampling(max_new_tokens=2)
        terms = [policy_term()]
        rewards = []
        for step in range(30):
            await hand_over(backend, engine, step)
            groups = await asyncio.gather(
                *(sample_group(engine, env, renderer, step * 16 + g, sampling, size=8) for g in range(16))
            )
            batch = batch_of(groups, terms)
            result = backend.update(batch, terms)
            assert not result.skipped
            assert result.metrics["mismatch/max_abs"][0] == 0
            rewards.append(float(np.mean(batch.columns["reward"])))
        await engine.close()
        return rewards

    started = time.perf_counter()
    rewards = asyncio.run(loop())
    print([round(r, 2) for r in rewards], time.perf_counter() - started)
    assert np.mean(rewards[:3]) < 0.25
    assert np.mean(rewards[-5:]) > 0.8
