"""Capability `prompt_logprobs`: against one plain forward, for every architecture and every way to ask."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_engine_kit import ARCHITECTURES, COMMON, VOCABULARY, build, model_of, publish, ragged, request, run, started
from local_engine_kit import version as version_of
from test_adapters import adapter, engine_of, folder_of, merged, send, silent

from miles_core.errors import CapabilityError, DeadlineError, EngineError
from miles_core.records import Finish
from miles_rollout_local import scoring

QWEN = ARCHITECTURES["qwen3"]
WISH = "prompt_logprobs"
TOP8 = (WISH, "prompt_top_logprobs:8")


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of(QWEN)


def scored(name: str, prompt: Any, *, want: Any = TOP8, **given: Any) -> Any:
    return request(name, prompt, want=want, **{"max_new_tokens": 0, **given})


def plain(model: Any, prompt: Any) -> torch.Tensor:
    """Log-probabilities [n - 1, vocabulary] after each token but the last, from one plain forward."""
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=torch.tensor([[*map(int, prompt)]])).logits[0, :-1].float(), -1)


def check(model: Any, prompt: Any, done: Any, k: int = 8, atol: float = 1e-5) -> None:
    n, expected = len(prompt), plain(model, prompt)
    logprobs = done.columns["prompt_logprobs"]
    assert logprobs.dtype == np.float32 and logprobs.shape == (n,) and logprobs[0] == 0
    own = expected.gather(1, torch.tensor([*map(int, prompt)])[1:, None])[:, 0].numpy()
    np.testing.assert_allclose(logprobs[1:], own, rtol=0, atol=atol)
    assert ("prompt_topk_ids" in done.columns) == ("prompt_topk_logprobs" in done.columns) == bool(k)
    if k:
        ids, top = done.columns["prompt_topk_ids"], done.columns["prompt_topk_logprobs"]
        assert ids.dtype == np.int32 and top.dtype == np.float32 and ids.shape == top.shape == (n, k)
        assert not ids[0].any() and not top[0].any()
        np.testing.assert_allclose(top[1:], expected.topk(k).values.numpy(), rtol=0, atol=atol)
        np.testing.assert_allclose(expected.gather(1, torch.from_numpy(ids[1:]).long()).numpy(), top[1:], atol=atol)
        assert all(len(set(row)) == k for row in ids[1:].tolist())


@pytest.mark.parametrize("invariant", [False, True])
def test_ragged_prompts_equal_a_plain_forward(
    architecture: dict[str, Any], invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "_CHUNK_NUMBERS", 32 * VOCABULARY)  # the vocabulary comes in several chunks
    model = model_of(architecture)
    prompts = [*ragged(9), np.array([7]), np.arange(96) % 43 + 2, np.arange(60) % 7 + 2]  # 96: all of max_length

    async def go() -> None:
        engine = await started(model, architecture, slots=3, batch_invariant=invariant, prefill_tokens=64)
        for prompt, done in zip(
            prompts, await engine.generate_many([scored(f"r{i}", p) for i, p in enumerate(prompts)]), strict=True
        ):
            check(model, prompt, done)
            assert (len(done.columns["tokens"]), done.spans, done.finish) == (0, (), Finish.LENGTH)
            assert done.info == {"prompt_version": "main@0.0"}
        assert engine.lanes.counts() == (0, 0)
        await engine.close()

    run(go())


@pytest.mark.parametrize("name", ["gpt2", "granite"])
def test_through_the_models_own_forward(name: str) -> None:
    gpt2 = dict(model_type="gpt2", vocab_size=45, n_positions=96, n_embd=64, n_layer=2, n_head=4, bos_token_id=None)
    granite = dict(model_type="granite", logits_scaling=3.0, **COMMON)  # a head that does more than multiply
    architecture = {"gpt2": gpt2, "granite": granite}[name]
    model = model_of(architecture)

    async def go() -> None:
        engine = await started(model, architecture, unverified=True)
        prompts = ragged(5)
        done = await engine.generate_many([scored(f"r{i}", p) for i, p in enumerate(prompts)])
        for prompt, got in zip(prompts, done, strict=True):
            check(model, prompt, got)
        await engine.close()

    run(go())


def test_beside_answers_that_stay_what_they_were(model: Any) -> None:
    async def go() -> None:
        engine = await started(model, QWEN, slots=3)
        prompts = [*ragged(6), *ragged(2)]  # two come twice
        free = [request(f"r{i}", p, seed=i) for i, p in enumerate(prompts)]
        wants = [(), (WISH,), TOP8, (WISH, "prompt_top_logprobs:3", "keep_ids")]
        asked = [replace(r, want=frozenset(wants[i % 4])) for i, r in enumerate(free)]
        before = await engine.generate_many(free)
        after = await engine.generate_many(asked)
        for i, (prompt, one, other) in enumerate(zip(prompts, before, after, strict=True)):
            np.testing.assert_array_equal(one.columns["tokens"], other.columns["tokens"])
            assert other.spans == one.spans and other.finish == one.finish
            if i % 4:
                check(model, prompt, other, k=(0, 0, 8, 3)[i % 4])
            else:
                assert other.columns.keys() == one.columns.keys() and not other.info
        # What an earlier call sampled is context, and no part of the prompt.
        half = before[0].columns["tokens"][:2]
        check(model, prompts[0], await engine.generate(scored("again", prompts[0], max_new_tokens=9, resume=half)))
        await engine.close()

    run(go())


def test_vectors_of_a_group_are_its_members_own(model: Any) -> None:
    async def go() -> None:
        engine = await started(model, QWEN)
        calls, forward = 0, engine.slots.forward.every

        def every(*given: Any) -> Any:
            nonlocal calls
            calls += 1
            assert given[0].shape == (1, 3)
            return forward(*given)

        engine.slots.forward.every = every
        done = await engine.generate_many([request(f"r{i}", [3, 4, 5], seed=i, want=TOP8) for i in range(4)])
        assert calls == 1
        done[0].columns["prompt_logprobs"][:] = 7
        check(model, [3, 4, 5], done[1])
        await engine.close()

    run(go())


def test_scores_take_no_slot_and_wait_for_no_answer(model: Any) -> None:
    async def go() -> None:
        engine = await started(model, QWEN, slots=1)
        engine.slots.is_stop[:] = False
        long = asyncio.ensure_future(engine.generate(request("long", [3], max_new_tokens=90)))
        while not (await engine.health()).running:
            await asyncio.sleep(0)
        engine._paused = True  # between two steps
        job = asyncio.ensure_future(engine.generate(scored("s", [3, 4])))
        await engine.pause("in_place")
        assert not job.done() and (await engine.health()).waiting == 1
        await engine.resume()
        check(model, [3, 4], await job)
        assert len((await long).columns["tokens"]) == 90
        await engine.close()

    run(go())


def test_scores_are_of_the_version_that_serves(model: Any) -> None:
    async def go() -> None:
        engine = await started(model, QWEN)
        prompt, newer = [5, 9, 12, 3], model_of(QWEN, 1)
        check(model, prompt, await engine.generate(scored("old", prompt)))
        port = engine.port("tensors")
        await port.begin(version_of(1))  # until `end` nothing is computed
        jobs = [
            asyncio.ensure_future(engine.generate(r))
            for r in (scored("only", prompt), request("both", prompt, want=TOP8))
        ]
        await asyncio.sleep(0.02)
        assert not any(job.done() for job in jobs)
        await publish(engine, newer, 1)
        for done in await asyncio.gather(*jobs):
            check(newer, prompt, done)
            assert done.info == {"prompt_version": "main@0.1"}
        assert jobs[1].result().spans[0].version == version_of(1)
        await engine.close()

    run(go())


@pytest.mark.parametrize("mode", ["in_place", "recompute"])
def test_a_swap_in_mid_flight_keeps_the_first_spans_scores(model: Any, mode: Any) -> None:
    async def go() -> None:
        engine = await started(model, QWEN)
        engine.slots.is_stop[:] = False
        steps, original = 0, engine.slots.step

        def step() -> None:
            nonlocal steps
            steps += 1
            original()
            engine._paused |= steps == 4

        engine.slots.step = step
        job = asyncio.ensure_future(engine.generate(request("r", [3, 4, 5], want=TOP8, max_new_tokens=20)))
        while steps < 4:
            await asyncio.sleep(0.001)
        await engine.pause(mode)
        await publish(engine, model_of(QWEN, 1), 1)
        await engine.resume()
        done = await job
        assert [s.version.number for s in done.spans] == [0, 1]
        assert done.info == {"prompt_version": str(done.spans[0].version)}
        check(model, [3, 4, 5], done)
        await engine.close()

    run(go())


def test_each_policy_scores_with_its_own_weights(tmp_path: Path) -> None:
    model = model_of(QWEN)
    a, b, whole = adapter(model, 1), adapter(model, 2, rank=5), model_of(QWEN, 4)
    models = {"a": merged(model, a), "b": merged(model, b), "base": model, "whole": whole}

    async def go() -> None:
        engine = engine_of(folder_of(model, tmp_path / "base"))
        await engine.start()
        for policy, stream in {"a": a, "b": b, "base": silent(a)}.items():
            await send(engine, stream, 0, policy)
        port = engine.port("tensors")
        await port.begin(version_of(0, "whole"))
        from local_engine_kit import stream as tensors

        await port.load(tensors(whole))
        await port.end(version_of(0, "whole"))
        prompts = ragged(4, 3)
        asked = [replace(scored(f"{p}{i}", prompt), policy=p) for i, prompt in enumerate(prompts) for p in models]
        asked += [replace(r, id=r.id + "x", sampling=replace(r.sampling, max_new_tokens=2)) for r in asked]
        for wanted, done in zip(asked, await engine.generate_many(asked), strict=True):
            check(models[wanted.policy], wanted.prompt["tokens"], done, atol=3e-5)
            assert done.info == {"prompt_version": f"{wanted.policy}@0.0"}
        await engine.close()

    run(go())


def test_bits_do_not_depend_on_neighbours_in_constant_shapes(model: Any) -> None:
    async def go() -> None:
        engine = await started(model, QWEN, slots=4, batch_invariant=True)
        prompts = [*ragged(20), np.arange(90) % 40 + 2]
        alone = [await engine.generate(scored(f"a{i}", p)) for i, p in enumerate(prompts)]
        together = await engine.generate_many([scored(f"t{i}", p) for i, p in enumerate(prompts)])
        for one, other in zip(alone, together, strict=True):
            for name in ("prompt_logprobs", "prompt_topk_ids", "prompt_topk_logprobs"):
                np.testing.assert_array_equal(one.columns[name], other.columns[name])
        await engine.close()

    run(go())


def test_what_is_refused(model: Any) -> None:
    async def go() -> None:
        engine = await started(model, QWEN)
        odd = (
            ("prompt_top_logprobs:8",),
            (WISH, "prompt_top_logprobs:0"),
            (WISH, "prompt_top_logprobs:x"),
            (WISH, "prompt_top_logprobs:2", "prompt_top_logprobs:3"),
            (WISH, "routed_experts"),
        )
        for want in odd:
            with pytest.raises(CapabilityError, match=r"wants .*the engine `local` offers .*prompt_logprobs"):
                await engine.generate(scored("r", [3, 4], want=want))
        with pytest.raises(EngineError, match="wants the 46 likeliest tokens; the vocabulary has 45"):
            await engine.generate(scored("r", [3, 4], want=(WISH, "prompt_top_logprobs:46")))
        check(model, [3, 4], await engine.generate(scored("r", [3, 4], want=(WISH, "prompt_top_logprobs:45"))), k=45)
        full = np.arange(96) % 40 + 2
        shared = [scored("fits", full), request("r", full, want=TOP8), request("r", full, max_new_tokens=0)]
        shared = [replace(r, prompt=shared[0].prompt) for r in shared]  # one array, checked for each
        done = await engine.generate_many(shared)
        check(model, full, done[0])
        assert all(isinstance(e, EngineError) and "from 1 to 95 fit, so that an answer" in str(e) for e in done[1:])
        with pytest.raises(EngineError, match="has 97 tokens; from 1 to 96 fit"):
            await engine.generate(scored("r", [3] * 97))
        await engine.close()
        lacks = build(QWEN)
        lacks.offers = lacks.offers - {WISH}
        await lacks.start()
        await publish(lacks, model, 0)
        with pytest.raises(CapabilityError, match=r"wants \['prompt_logprobs'"):
            await lacks.generate(scored("r", [3, 4]))
        await lacks.close()

    run(go())


def test_deadlines_and_aborts(model: Any) -> None:
    async def go() -> None:
        engine = await started(model, QWEN)
        await engine.pause("in_place")
        with pytest.raises(DeadlineError, match="'hasty' took over"):
            await engine.generate(replace(scored("hasty", [5, 6]), deadline_s=0.02))
        await engine.pause("in_place")  # behind the command that takes the request out
        assert (await engine.health()).waiting == 0
        jobs = [asyncio.ensure_future(engine.generate(scored(f"r{i}", [5, 6]))) for i in range(2)]
        await asyncio.sleep(0.01)
        await engine.abort(["r0"])
        gone = jobs[0].result()
        assert gone.finish is Finish.ABORT and gone.columns.keys() == {"tokens", "logprobs"}
        await engine.resume()
        check(model, [5, 6], await jobs[1])
        pausing = [asyncio.ensure_future(engine.generate(scored(f"p{i}", [5, 6 + i]))) for i in range(3)]
        await asyncio.sleep(0)
        await engine.pause("finish")
        await asyncio.sleep(0)  # `pause` may come back in the turn of the loop in which they do
        assert all(job.done() for job in pausing)
        await engine.close()

    run(go())


@pytest.mark.parametrize("new", [0, 3])
def test_a_log_probability_that_is_not_finite_is_an_error(new: int) -> None:
    broken = model_of(QWEN)
    with torch.no_grad():
        broken.model.embed_tokens.weight[9] = float("nan")

    async def go() -> None:
        engine = await started(broken, QWEN)
        with pytest.raises(
            EngineError, match=r"not finite for request 'r' (in its prompt|at token 0), with weights main@0"
        ):
            await engine.generate(scored("r", [5, 9, 6], max_new_tokens=new))
        await engine.close()

    run(go())
