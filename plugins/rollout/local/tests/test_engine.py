"""The engine's contract: pauses, aborts, deadlines, cancellation, stops, kept ids, refusals."""

from __future__ import annotations

import asyncio
import collections
import gc
import threading
from dataclasses import replace
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from local_engine_kit import (
    ARCHITECTURES,
    EOS,
    VOCABULARY,
    build,
    model_of,
    publish,
    ragged,
    request,
    run,
    started,
    version,
)

from miles_core.config.schema import EngineKeys
from miles_core.contracts.engine import Engine
from miles_core.contracts.engine import Request as EngineRequest
from miles_core.errors import CapabilityError, ConfigError, DeadlineError, EngineError, ModelSourceError
from miles_core.records import Finish, Sampling
from miles_rollout_local.config import LocalConfig
from miles_rollout_local.plugin import miles_rollout

QWEN = ARCHITECTURES["qwen3"]
LONG = dict(max_new_tokens=60)


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of(QWEN)


def endless(engine: Any) -> None:
    """Let nothing stop but lengths."""
    engine.slots.is_stop[:] = False


def after(engine: Any, steps: int, action: Any) -> None:
    """Call `action` in the worker after so many steps."""
    original, seen = engine.slots.step, 0

    def step() -> None:
        nonlocal seen
        original()
        seen += 1
        if seen == steps:
            action()

    engine.slots.step = step


async def stand_still(engine: Any, requests: Any, steps: int = 4) -> list[asyncio.Future[Any]]:
    """Start requests, and let the engine stop by itself after so many steps, as an in-place pause would."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold() -> None:
        engine._paused = True
        loop.call_soon_threadsafe(stopped.set)

    after(engine, steps, hold)
    jobs = [asyncio.ensure_future(engine.generate(r)) for r in requests]
    await stopped.wait()
    await engine.pause("in_place")
    return jobs


def test_keeps_the_protocol_and_declares_what_it_offers() -> None:
    engine = build(QWEN)
    assert isinstance(engine, Engine)
    provider = miles_rollout()
    plain = provider.offered(LocalConfig())
    assert {"weights.tensors", "logprobs", "keep_ids", "pause.in_place", "pause.finish"} <= plain
    assert provider.offered(LocalConfig(batch_invariant=True)) - plain == {"batch_invariant"}


def test_pause_finish_lets_old_requests_end_and_new_ones_wait(model: Any) -> None:
    async def go() -> None:
        engine = await started(model, QWEN, slots=2)
        endless(engine)
        old = await stand_still(engine, [request(f"o{i}", [3, i + 2], **LONG) for i in range(5)])
        pausing = asyncio.ensure_future(engine.pause("finish"))
        await asyncio.sleep(0)
        new = asyncio.ensure_future(engine.generate(request("new", [4], max_new_tokens=3)))
        await pausing
        assert all(job.done() and len(job.result().columns["tokens"]) == 60 for job in old)
        assert not new.done() and (await engine.health()).waiting == 1
        await publish(engine, model, 1)
        await engine.resume()
        assert (await new).spans[0].version == version(1)
        await engine.pause("finish")  # nothing in flight: returns at once
        await engine.close()

    run(go())


def test_pause_abort_returns_what_there_is_and_abort_works_while_paused(model: Any) -> None:
    async def go() -> None:
        engine = await started(model, QWEN, slots=2)
        endless(engine)
        jobs = await stand_still(engine, [request(f"r{i}", [3, i + 2], **LONG) for i in range(3)])
        await engine.abort(["r0", "nobody"])
        assert jobs[0].done() and not jobs[1].done()
        assert jobs[0].result().finish is Finish.ABORT and len(jobs[0].result().columns["tokens"]) == 5
        await engine.pause("abort")
        assert [len(job.result().columns["tokens"]) for job in jobs] == [5, 5, 0]
        assert jobs[2].result().spans == ()
        late = asyncio.ensure_future(engine.generate(request("late", [5], max_new_tokens=2)))
        await asyncio.sleep(0.05)
        assert not late.done()
        await engine.abort()
        assert late.result().finish is Finish.ABORT
        await engine.resume()
        assert len((await engine.generate(request("again", [5], max_new_tokens=2))).columns["tokens"]) == 2
        await engine.close()

    run(go())


def test_nothing_is_sampled_between_begin_and_end(model: Any) -> None:
    async def go() -> None:
        engine = await started(model, QWEN)
        await engine.port("tensors").begin(version(1))
        job = asyncio.ensure_future(engine.generate(request("r", [5], max_new_tokens=2)))
        await asyncio.sleep(0.05)
        assert not job.done() and (await engine.health()).waiting == 1
        await engine.port("tensors").end(version(1))
        assert (await job).spans[0].version == version(1)
        await engine.close()

    run(go())


def test_deadlines_and_cancellation_free_their_slots(model: Any) -> None:
    async def go() -> None:
        engine = await started(model, QWEN, slots=1)
        await engine.pause("in_place")
        hasty = request("hasty", [5])
        hasty = EngineRequest(
            id="hasty", policy="main", prompt=hasty.prompt, sampling=hasty.sampling, seed=0, deadline_s=0.02
        )
        with pytest.raises(DeadlineError, match=r"'hasty' took over 0.02 s on engine 'local' \(it is paused"):
            await engine.generate(hasty)
        job = asyncio.ensure_future(engine.generate(request("gone", [5])))
        await asyncio.sleep(0.01)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        await engine.pause("in_place")  # behind the command that takes the request out
        health = await engine.health()
        assert (health.running, health.waiting) == (0, 0)
        await engine.close()

    run(go())


def test_stop_strings_across_token_borders_and_across_calls(model: Any) -> None:
    async def go() -> None:
        engine = await started(model, QWEN)
        endless(engine)
        free = (await engine.generate(request("r", [5, 6], seed=3, max_new_tokens=30))).columns["tokens"]
        text = engine.slots.decode_text(free.tolist())
        stop = text[7:10]
        first = text.index(stop) + 3
        cut = await engine.generate(request("r", [5, 6], seed=3, max_new_tokens=30, stop=("never", stop)))
        ids = [i for i, t in enumerate(free) if t >= 2][first - 1]
        assert cut.finish is Finish.STOP
        np.testing.assert_array_equal(cut.columns["tokens"], free[: ids + 1])
        again = await engine.generate(
            request("r", [5, 6], seed=3, max_new_tokens=30, stop=(stop,), resume=free[: ids - 1])
        )
        np.testing.assert_array_equal(again.columns["tokens"], free[ids - 1 : ids + 1])
        assert again.finish is Finish.STOP
        await engine.close()

    run(go())


def test_kept_ids_belong_to_their_tokens(model: Any) -> None:
    async def go() -> None:
        engine = await started(model, QWEN, slots=3)
        prompts = ragged(7)
        asked = [
            request(f"r{i}", p, seed=i, want=["keep_ids"], top_k=(0, 4, 45)[i % 3], top_p=(1.0, 0.8)[i % 2])
            for i, p in enumerate(prompts)
        ]
        for ask, done in zip(asked, await asyncio.gather(*(engine.generate(r) for r in asked)), strict=True):
            tokens, counts, flat = (done.columns[c] for c in ("tokens", "keep_counts", "keep_ids"))
            assert counts.dtype == flat.dtype == np.int32 and counts.sum() == len(flat)
            if ask.sampling.top_k == 0 and ask.sampling.top_p == 1:
                assert not counts.any()
            ids = [*ask.prompt["tokens"].tolist(), *tokens.tolist()]
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0].double()
            at = len(ask.prompt["tokens"]) - 1
            for i, (token, count) in enumerate(zip(tokens, counts, strict=True)):
                kept = flat[counts[:i].sum() :][:count] if count else np.arange(VOCABULARY)
                assert token in kept and (np.diff(kept) > 0).all()
                inside = torch.log_softmax(logits[at + i][torch.from_numpy(kept).long()], -1)
                np.testing.assert_allclose(
                    done.columns["logprobs"][i], inside[kept.tolist().index(token)], rtol=0, atol=1e-5
                )
        await engine.close()

    run(go())


def test_lengths_at_the_end_of_the_context(model: Any) -> None:
    async def go() -> None:
        engine = await started(model, QWEN, max_length=16)
        endless(engine)
        done = await engine.generate(request("r", [4] * 10, max_new_tokens=50))
        assert done.finish is Finish.LENGTH and len(done.columns["tokens"]) == 6
        with pytest.raises(EngineError, match="has 16 tokens; from 1 to 15 fit"):
            await engine.generate(request("r", [4] * 16))
        with pytest.raises(EngineError, match="has 0 tokens"):
            await engine.generate(request("r", []))
        full = await engine.generate(request("r", [4] * 3, max_new_tokens=2, resume=np.array([7, 8], np.int32)))
        assert full.finish is Finish.LENGTH and len(full.columns["tokens"]) == 0 and full.spans == ()
        await engine.close()

    run(go())


def test_refused_requests(model: Any) -> None:
    async def go() -> None:
        engine = await started(model, QWEN)
        with pytest.raises(CapabilityError, match="wants \\['routed_experts'\\]"):
            await engine.generate(request("r", [4], want=["routed_experts"]))
        other = EngineRequest(
            id="r", policy="other", prompt={"tokens": np.array([4])}, sampling=Sampling(max_new_tokens=1), seed=0
        )
        with pytest.raises(EngineError, match="is for policy 'other'; engine 'local' serves 'main'"):
            await engine.generate(other)
        with pytest.raises(EngineError, match="outside the vocabulary of 45"):
            await engine.generate(request("r", [45]))
        with pytest.raises(CapabilityError, match="no pause mode 'sometimes'"):
            await engine.pause("sometimes")
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="is closed"):
            await engine.generate(request("r", [4]))

    run(go())


def test_closing_fails_what_is_in_flight(model: Any) -> None:
    async def go() -> None:
        engine = await started(model, QWEN)
        endless(engine)
        jobs = await stand_still(engine, [request("r", [4], **LONG)])
        await engine.close()
        with pytest.raises(EngineError, match="was closed"):
            await jobs[0]
        assert not (await engine.health()).ok

    run(go())


def test_closing_does_not_wait_for_answers(model: Any) -> None:
    async def go() -> None:
        engine = await started(model, QWEN)
        endless(engine)
        engine.slots.max_length = 10**6
        running = asyncio.Event()
        loop = asyncio.get_running_loop()
        after(engine, 3, lambda: loop.call_soon_threadsafe(running.set))
        engine.slots.forward.decode = lambda ids, *_: torch.zeros(len(ids), VOCABULARY)  # an answer without end
        job = asyncio.ensure_future(engine.generate(request("r", [4], max_new_tokens=10**6)))
        await running.wait()
        await engine.close()
        with pytest.raises(EngineError, match="was closed"):
            await job
        assert engine.slots.state["count"][0] < 10**6

    run(go())


def test_a_model_that_fails_fails_every_request_with_its_cause(model: Any) -> None:
    async def go() -> None:
        engine = await started(model, QWEN)

        def broken(*_: Any) -> Any:
            raise RuntimeError("no memory")

        engine.slots.forward.decode = broken
        done = await asyncio.gather(
            *(engine.generate(request(f"r{i}", [4, i + 2], **LONG)) for i in range(3)), return_exceptions=True
        )
        assert all(isinstance(e, EngineError) and "no memory" in str(e) for e in done)
        assert isinstance(done[0].__cause__, RuntimeError)
        health = await engine.health()
        assert not health.ok and "no memory" in health.detail
        with pytest.raises(EngineError, match="failed earlier"):
            await engine.pause("in_place")
        await engine.close()

    run(go())


def test_nan_weights_are_an_error_of_their_requests_only_and_leave_no_trace(model: Any) -> None:
    async def go() -> None:
        engine = await started(model, QWEN, slots=4, prefill_tokens=14)
        endless(engine)
        sick = model_of(QWEN)
        with torch.no_grad():
            sick.model.norm.weight[3] = float("nan")
            sick.model.layers[0].self_attn.v_proj.weight[:] = float("nan")
        await publish(engine, sick, 1)
        with pytest.raises(EngineError, match=r"not finite for request 'r' at token 0, with weights main@0.1"):
            await engine.generate(request("r", [4] * 12))
        await publish(engine, model, 2)
        # A short request takes the sick one's slot beside a long one: it must not see what was left there.
        done = await asyncio.gather(*(engine.generate(request(f"r{n}", [4] * n)) for n in (2, 14)))
        assert all(np.isfinite(c.columns["logprobs"]).all() for c in done)
        await engine.close()

    run(go())


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        (dict(model_type="gpt2"), {}, "never verified with architecture 'gpt2'"),
        (dict(model_type="nonsense"), {}, "no configuration that transformers can read"),
        (ARCHITECTURES["mistral"] | {"sliding_window": 32}, {}, "sliding window of 32 tokens"),
        (QWEN | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, {}, "sliding window of 8"),
        (QWEN, {"max_length": 97}, "max_length is 97; the model was made for 96"),
        (
            QWEN | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            {},
            "rotary embedding",
        ),
    ],
)
def test_refused_models(architecture: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelSourceError, match=message) as caught:
        build(architecture, **options)
    assert "Fix:" in str(caught.value)


def test_refused_configurations() -> None:
    with pytest.raises(ConfigError, match="runs on CPU"):
        build(QWEN, core=SimpleNamespace(gpus=1.0))
    with pytest.raises(ConfigError, match="a constant cache of 64 slots x 1048576 tokens"):
        build(QWEN | {"max_position_embeddings": 2**20}, batch_invariant=True)


def test_a_window_that_never_cuts_is_accepted() -> None:
    build(ARCHITECTURES["mistral"] | {"sliding_window": 32}, max_length=32)


def test_stop_ids_come_from_the_renderer() -> None:
    engine = build(QWEN)
    assert np.flatnonzero(engine.slots.is_stop).tolist() == [EOS]


@pytest.mark.parametrize("end", ["close", "failure"])
def test_an_engine_that_ends_tells_those_who_wait_and_nobody_else(model: Any, end: str) -> None:
    """Commands that nobody awaits (to forget a batch) and callers that went away leave nothing for the event loop."""
    heard: list[dict[str, Any]] = []

    async def main() -> list[Any]:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context))
        engine = await started(model, QWEN, slots=4)
        endless(engine)
        jobs = await stand_still(engine, [request(f"r{i}", [3, 4], max_new_tokens=60) for i in range(3)])
        while engine._running:  # it may not have landed yet, and would take up what comes now
            await asyncio.sleep(0.001)
        engine._running = True  # the worker takes nothing up any more: commands stay where they are
        for job in jobs[:2]:
            job.cancel()
        gone = asyncio.ensure_future(engine.pause("finish"))
        waits = asyncio.ensure_future(engine.control(lambda: None))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(engine._commands) == 4 and len(engine._draining) == 0
        gone.cancel()
        engine._draining.append(asyncio.get_running_loop().create_future())  # as of a pause that never came through
        if end == "close":
            await engine.close()
        else:
            engine._landed(asyncio.get_running_loop(), RuntimeError("out of memory"))
        return await asyncio.gather(jobs[2], waits, return_exceptions=True)

    said = run(main())
    gc.collect()
    word = "was closed" if end == "close" else "failed: RuntimeError"
    assert [type(error) for error in said] == [EngineError, EngineError] and all(word in str(e) for e in said)
    assert heard == []


@pytest.mark.parametrize(
    ("tokens", "options", "said"),
    [
        (95, {}, ""),
        (96, {}, "max_new_tokens is 96, and its model has positions for 96 tokens"),
        (16, {"max_length": 17}, ""),
        (16, {"max_length": 16}, "max_new_tokens is 16, and rollout.max_length is 16 tokens"),
    ],
)
def test_answers_that_can_never_be_as_long_as_asked_are_announced(
    caplog: pytest.LogCaptureFixture, tokens: int, options: dict[str, Any], said: str
) -> None:
    build(QWEN, core=EngineKeys(max_new_tokens=tokens), **options)
    assert [said in record.getMessage() for record in caplog.records] == ([True] if said else [])


def test_an_engine_that_only_scores_announces_nothing(caplog: pytest.LogCaptureFixture) -> None:
    build(QWEN, core=EngineKeys(max_new_tokens=256), run=SimpleNamespace(judges={"local": None}, policies={}))
    assert not caplog.records


@pytest.mark.parametrize("busy", [False, True])
def test_a_resume_that_comes_before_the_pause_was_taken_up_ends_it(model: Any, busy: bool) -> None:
    async def main() -> None:
        engine = await started(model, QWEN)
        endless(engine)
        sampling = [asyncio.ensure_future(engine.generate(request("x", [3], **LONG)))] if busy else []
        pausing = asyncio.ensure_future(engine.pause("finish"))
        await asyncio.sleep(0)
        await engine.resume()
        await asyncio.wait_for(pausing, 20)
        assert len((await engine.generate(request("y", [3], max_new_tokens=2))).columns["tokens"]) == 2
        await asyncio.gather(*sampling)
        await engine.close()

    run(main())


class Paused(collections.deque[Any]):
    """What the worker takes its work from. Once armed, the worker waits behind the look that finds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.armed, self.seen, self.go = False, threading.Event(), threading.Event()

    def __bool__(self) -> bool:
        found = len(self) > 0
        if not found and self.armed and threading.current_thread() is not threading.main_thread():
            self.armed = False
            self.seen.set()
            self.go.wait(10)
        return found


@pytest.mark.parametrize("how", ["abort", "cancel"])
def test_what_ends_a_request_does_not_overtake_it(model: Any, how: str) -> None:
    async def main() -> None:
        engine = await started(model, QWEN)
        endless(engine)
        engine._incoming = incoming = Paused()
        incoming.armed = True
        warm = asyncio.ensure_future(engine.generate(request("warm", [3], max_new_tokens=2)))
        while not incoming.seen.is_set():
            await asyncio.sleep(0.001)
        late = asyncio.ensure_future(engine.generate(request("r", [3, 4], **LONG)))
        await asyncio.sleep(0.01)  # handed in, while the worker stands between its look and the commands
        ending = asyncio.ensure_future(engine.abort(["r"])) if how == "abort" else None
        if ending is None:
            late.cancel()
        await asyncio.sleep(0.01)
        incoming.go.set()
        if ending is None:
            await warm
            await engine.control(lambda: None)
            assert engine.lanes.counts() == (0, 0)  # it did not get a slot for its 60 tokens
        else:
            await ending
            assert (await late).finish == Finish.ABORT and len((await late).columns["tokens"]) < 60
        await warm
        await engine.close()

    run(main())


ODD: dict[str, dict[str, Any]] = {
    "no tokens": {"prompt": {}},
    "tokens of None": {"prompt": {"tokens": None}},
    "two dimensions": {"prompt": {"tokens": np.full((2, 2), 3, np.int32)}},
    "ids that are no whole numbers": {"prompt": {"tokens": np.array([3.5, 4.0])}},
    "truths in the place of ids": {"prompt": {"tokens": np.array([True, False])}},
    "ids as text": {"prompt": {"tokens": ["3", "4"]}},
    "an unknown id to go on from": {"resume": np.array([VOCABULARY], np.int32)},
    "half an id to go on from": {"resume": np.array([3.5])},
    "a seed that is no whole number": {"seed": 0.5},
    "no seed": {"seed": None},
    "no deadline": {"deadline_s": None},
    "a deadline that is no number": {"deadline_s": float("nan")},
    "a deadline of another kind of number": {"deadline_s": Decimal("0.3")},
    "a deadline in an array": {"deadline_s": np.array(0.3)},
    "half a deadline": {"deadline_s": np.float16(0.3)},
    "half a character to stop at": {"sampling": Sampling(max_new_tokens=4, stop=("\ud800",))},
}
ODD |= {
    f"{name} {value!r:.9}": {"sampling": replace(Sampling(max_new_tokens=4), **{name: value})}
    for name, values in {
        "max_new_tokens": ("4", None, 2.5, float("nan"), -1),
        "temperature": ("hot", None, float("nan"), float("inf"), -1.0, 2**2000, 1e-60, 1e-40),
        "top_p": ("1", None, float("nan"), -1, 0, 2, [0.5], 1e-60),
        "top_k": ("3", None, 2.5, -3, 2**70, float("nan")),
        "stop": (5, (5,), ("",)),
    }.items()
    for value in values
}


@pytest.mark.parametrize("odd", ODD)
def test_a_request_that_cannot_be_read_costs_nobody_else_theirs(model: Any, odd: str) -> None:
    async def main() -> None:
        engine = await started(model, QWEN)
        endless(engine)
        beside = asyncio.ensure_future(engine.generate(request("beside", [5, 6], max_new_tokens=30)))
        good = [request(f"g{i}", [3, 4, 5], max_new_tokens=8, seed=i) for i in range(2)]
        first, refused, last = await engine.generate_many(
            [good[0], replace(request("bad", [3, 4]), **ODD[odd]), good[1]]
        )
        assert [len(done.columns["tokens"]) for done in (first, last, await beside)] == [8, 8, 30]
        assert isinstance(refused, EngineError) and "'bad'" in str(refused)
        assert (await engine.health()).ok
        await engine.close()

    run(main())


def test_a_negative_seed_of_numpy_is_the_seed_that_it_is(model: Any) -> None:
    async def main() -> None:
        engine = await started(model, QWEN)
        asked = [request("x", [3, 4], seed=seed) for seed in (-3, np.int64(-3))]
        ours, numpys = await engine.generate_many(asked)
        assert ours.columns["tokens"].tolist() == numpys.columns["tokens"].tolist()
        await engine.close()

    run(main())


@pytest.mark.parametrize("parked", [False, True])
def test_a_deadline_costs_only_the_requests_that_it_is_for(model: Any, parked: bool) -> None:
    async def main() -> None:
        engine = await started(model, QWEN, slots=2)
        endless(engine)
        pausing = None
        if parked:  # behind what a pause waits for, they wait outside
            old = await stand_still(engine, [request("old", [3], **LONG)])
            pausing = asyncio.ensure_future(engine.pause("finish"))
            await asyncio.sleep(0)
        else:
            await engine.pause("in_place")
        soon, later = (replace(request(f"{s} s", [3, 4], **LONG), deadline_s=s) for s in (0.05, 0.1))
        asked = asyncio.ensure_future(engine.generate_many([soon, request("whole", [3, 4], **LONG), later]))
        if pausing is not None:
            await asyncio.gather(pausing, *old)
        await asyncio.sleep(0.3)
        assert not asked.done()
        await engine.resume()
        first, whole, last = await asked
        assert isinstance(first, DeadlineError) and "'0.05 s' took over 0.05 s" in str(first)
        assert isinstance(last, DeadlineError) and "'0.1 s' took over 0.1 s" in str(last)
        assert len(whole.columns["tokens"]) == 60
        await engine.control(lambda: None)
        assert engine.lanes.counts() == (0, 0) and not engine._parked
        await engine.close()

    run(main())


def test_a_resume_that_is_cancelled_on_its_way_still_ends_the_pause(model: Any) -> None:
    async def main() -> None:
        engine = await started(model, QWEN)
        endless(engine)
        (old,) = await stand_still(engine, [request("x", [3], **LONG)])
        pausing = asyncio.ensure_future(engine.pause("finish"))
        await asyncio.sleep(0)
        resuming = asyncio.ensure_future(engine.resume())
        await asyncio.sleep(0)
        resuming.cancel()
        await asyncio.wait_for(pausing, 20)
        assert len((await old).columns["tokens"]) == 60
        await engine.close()

    run(main())


def test_a_close_that_is_cancelled_tells_those_in_flight(model: Any) -> None:
    async def main() -> None:
        engine = await started(model, QWEN)
        await engine.pause("in_place")
        waiting = asyncio.ensure_future(engine.generate(request("x", [3])))
        await asyncio.sleep(0.01)
        closing = asyncio.ensure_future(engine.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(EngineError, match="was closed"):
            await asyncio.wait_for(waiting, 20)

    run(main())
