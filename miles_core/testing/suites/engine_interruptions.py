"""The interrupted half of the engine suite: aborts, deadlines and pauses of answers that are still being written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.errors import DeadlineError
from miles_core.records import Finish
from miles_core.testing.suite import Conformance, check, refuses_async

if TYPE_CHECKING:
    from miles_core.contracts.engine import Completion, Request


def tokens_of(completion: Completion) -> list[int]:
    return [int(t) for t in np.asarray(completion.columns["tokens"])]


async def a_while() -> None:
    """Rounds of the loop as well as time: a busy machine may give few in 50 ms."""
    for _ in range(10):
        await asyncio.sleep(0.005)


class EngineInterruptions(Conformance):
    """Mixed into `EngineConformance`, which has the helpers."""

    if TYPE_CHECKING:
        long: int
        engine: Any
        request: Any
        source: Any

    # --- how an answer is met in the middle --------------------------------------------------------------------------

    async def interrupted(
        self, engine: Any, requests: Callable[[int], list[Request]], interrupt: Callable[[], Awaitable[None]]
    ) -> tuple[int, list[asyncio.Task[Completion]]]:
        """Await `interrupt()` while `requests(n)` are answered: n, their new tokens, and the tasks of their answers.

        A fast engine has written a short answer before anybody can interrupt it, so more tokens are asked for, as far
        as the model has positions, until the first answer is met in the middle.
        """
        room = self.source().architecture.get("max_position_embeddings", 100 * self.long) - 16
        lengths = [self.long, *(n for n in (5 * self.long, 25 * self.long) if n < room)]
        for n in lengths:
            tasks = [asyncio.ensure_future(engine.generate(r)) for r in requests(n)]
            counted = await self.counted(engine, tasks)
            check("health counts running requests", counted or n != lengths[-1], await engine.health())
            await interrupt()
            await asyncio.sleep(0.01)  # what was done before reaches its task
            if n == lengths[-1] or not _whole(tasks[0], n):
                return n, tasks
            await engine.resume()
            await asyncio.gather(*tasks)
        raise AssertionError("the last length returns")

    async def counted(self, engine: Any, tasks: list[asyncio.Task[Completion]]) -> bool:
        """Whether `health` counted them, or two of them, at once before they were done."""
        for turn in range(200):
            if (await engine.health()).running >= min(2, len(tasks)):
                return True
            if all(task.done() for task in tasks):
                break
            await asyncio.sleep(0 if turn < 100 else 0.005)
        return False

    # --- aborts and deadlines ----------------------------------------------------------------------------------------

    def test_abort_and_resume(self) -> None:
        async def aborts() -> None:
            async with self.engine(endless=True) as engine:

                def asked(n: int, name: str, **given: Any) -> Any:
                    return self.request([2, 3], 21, id=name, sampling={"max_new_tokens": n}, **given)

                one = partial(engine.abort, ["a", "never-heard-of"])
                n, tasks = await self.interrupted(engine, lambda n: [asked(n, "a"), asked(n, "b")], one)
                part, other = await asyncio.gather(*tasks)
                whole = tokens_of(await engine.generate(asked(n, "whole")))
                check("an aborted request finishes with abort", part.finish == Finish.ABORT, part.finish)
                got = tokens_of(part)
                logprobs = np.asarray(part.columns["logprobs"])
                cut = len(logprobs) == len(got) < n and got == whole[: len(got)]
                check("an abort returns what was sampled", cut, (got, whole))
                check("an abort leaves others alone", tokens_of(other) == whole, (tokens_of(other), whole))
                half = np.array(whole[: n // 2], np.int32)
                rest = tokens_of(await engine.generate(asked(n, "c", resume=half)))
                check("resumed tokens count against max_new_tokens", len(half) + len(rest) == n, len(rest))
                same = rest == whole[len(half) :]
                check("a resumed request goes on with the same draws", same, (rest, whole))

                def several(n: int) -> list[Request]:
                    return [self.request([2], seed, sampling={"max_new_tokens": n}) for seed in range(3)]

                _, tasks = await self.interrupted(engine, several, engine.abort)
                ended = {c.finish for c in await asyncio.gather(*tasks)}
                check("an abort without ids ends every request", ended == {Finish.ABORT}, ended)

        self.run(aborts())

    def test_deadline(self) -> None:
        async def deadlines() -> None:
            async with self.engine() as engine:
                mode = self.modes()[0]
                await engine.pause(mode)
                late = asyncio.wait_for(engine.generate(self.request([2], deadline_s=0.1)), 20.0)
                await refuses_async("a request past its deadline raises DeadlineError", DeadlineError, late)
                await engine.resume()
                health = await engine.health()
                check("a request past its deadline is forgotten", health.running + health.waiting == 0, health)

        self.run(deadlines())

    # --- pauses ------------------------------------------------------------------------------------------------------

    def modes(self) -> list[Any]:
        offered = [c.removeprefix("pause.") for c in sorted(self.offered()) if c.startswith("pause.")]
        check("at least one pause mode is offered", offered, sorted(self.offered()))
        return offered

    def test_pauses(self) -> None:
        async def pauses() -> None:
            async with self.engine(endless=True) as engine:
                for mode in self.modes():
                    await self._pause(engine, mode)

        self.run(pauses())

    async def _pause(self, engine: Any, mode: str) -> None:
        def asked(n: int) -> list[Request]:
            return [self.request([2, 3], 31, id=f"{mode}-{n}", sampling={"max_new_tokens": n})]

        if mode == "finish":
            n = self.long
            task = asyncio.ensure_future(engine.generate(asked(n)[0]))
            await self.counted(engine, [task])
            await engine.pause(mode)
            health = await engine.health()
            await a_while()
            finished = health.running == 0 and task.done()
            check("pause finish returns when requests are done", finished, health)
        else:
            n, (task,) = await self.interrupted(engine, asked, partial(engine.pause, mode))
        if mode == "abort":
            ended = await asyncio.wait_for(task, 20.0)
            check("pause abort ends requests with abort", ended.finish == Finish.ABORT, ended.finish)
        late = asyncio.ensure_future(engine.generate(self.request([4], 1, id=f"late-{mode}")))
        await a_while()
        check("a request during a pause waits for resume", not late.done(), mode)
        if mode in ("in_place", "recompute"):
            check("nothing is sampled during a pause", not task.done(), mode)
        await engine.resume()
        await late
        if mode in ("in_place", "recompute"):
            done = await task
            whole = tokens_of(await engine.generate(replace(asked(n)[0], id=f"whole-{mode}")))
            same = tokens_of(done) == whole and done.finish == Finish.LENGTH
            check("a paused request goes on as if nothing had been", same, (mode, tokens_of(done), whole))


def _whole(task: asyncio.Task[Completion], n: int) -> bool:
    """Whether the answer was done before anything could interrupt it."""
    return task.done() and task.exception() is None and len(tokens_of(task.result())) >= n
