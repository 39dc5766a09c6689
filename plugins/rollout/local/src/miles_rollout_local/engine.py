"""`LocalEngine`: the asynchronous face of the batch in `slots.py`.

All state of the batch belongs to one worker thread. The event loop hands it requests and *commands* (pause, abort,
weights …); the worker runs commands between two decode steps, and decodes step after step without coming back to the
loop as long as there is work. Requests that came together are handed over together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from miles_core.contracts.engine import Completion, Health, PauseMode, Request
from miles_core.errors import NEW_RUN, CapabilityError, DeadlineError, EngineError, MilesError
from miles_core.records import Version
from miles_rollout_local.jobs import Job
from miles_rollout_local.lanes import Lane, Lanes
from miles_rollout_local.port import CheckpointPort, TensorsPort
from miles_rollout_local.scoring import asked
from miles_rollout_local.slots import Slots
from miles_rollout_local.weights import LiveWeights

#: The least temperature (but 0) and top_p that the batch's float32 can work with, the highest temperature that it
#: holds, and the highest number of tokens of its int64.
_LEAST, _HOTTEST, _MOST = 1e-30, 3e38, 2**63 - 1
#: Longer than any deadline, in seconds.
_EVER_S = 1e9


class _Batch:
    """Requests that came together: jobs, made by who goes through them. `left` counts those that the worker has not
    finished."""

    __slots__ = ("alike", "future", "left", "requests", "results", "timer")
    timer: asyncio.TimerHandle

    def __init__(self, future: asyncio.Future[None], requests: Sequence[Request]) -> None:
        self.future, self.left = future, len(requests)
        self.results: list[Completion | Exception | None] = [None] * len(requests)
        self.requests = requests
        self.alike: dict[Any, Any] = {}  # prompts that were checked already: requests that come together differ little

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Job]:
        return (Job(request, self, index) for index, request in enumerate(self.requests))

    def dues(self) -> list[float]:
        """The deadlines of those without an answer, in seconds from when they came."""
        return [_seconds(r) for r, result in zip(self.requests, self.results, strict=True) if result is None]


class LocalEngine:
    """Keeps `miles_core.contracts.engine.Engine` for one or several policies of one architecture."""

    def __init__(self, name: str, lanes: Lanes, offers: frozenset[str]) -> None:
        self.name, self.lanes, self.offers = name, lanes, offers
        self.loading: Version | None = None  # between `begin` and `end`
        self._paused = False
        self._parking = False  # new requests wait outside until `resume`
        self._draining: list[asyncio.Future[None]] = []  # callers of pause("finish")
        self._closed = False
        self._failure: BaseException | None = None
        self._arrived: list[_Batch | list[Job]] = []  # in this turn of the event loop; the worker gets them all at once
        self._incoming: deque[_Batch | list[Job]] = deque()
        self._parked: list[Job] = []
        self._inflight: set[_Batch] = set()
        self._answered: list[asyncio.Future[None]] = []  # the worker's: whom to wake when this turn ends
        self._commands: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._worker: ThreadPoolExecutor | None = None
        self._running = False
        self._kicked = False
        self._ports = {"tensors": TensorsPort(self), "checkpoint": CheckpointPort(self)}

    @property
    def slots(self) -> Slots:
        """The batch of the first lane: all there is where one policy is served."""
        return self.lanes.first.slots

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt behind which an answer may follow."""
        return self.slots.max_length - 1

    @property
    def weights(self) -> LiveWeights:
        """The model of the first lane."""
        return self.lanes.first.weights

    # --- the contract ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._closed:
            raise EngineError(f"engine {self.name!r} is closed", fix="build a new one")
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"engine-{self.name}")

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`. At temperature 0 log-probabilities are those at temperature 1. A request whose prompt
        and answer would pass `max_length` ends there with finish `length`."""
        (result,) = await self.generate_many([request])
        if isinstance(result, Exception):
            raise result
        return result

    async def generate_many(self, requests: Sequence[Request]) -> list[Completion | Exception]:
        """See `Engine`: one answer, or the error in its place, for each of the requests."""
        self._alive()
        if not requests:
            return []
        loop = asyncio.get_running_loop()
        batch = _Batch(loop.create_future(), requests)
        self._inflight.add(batch)
        if self._parking:
            self._parked.extend(batch)
        else:
            self._arrived.append(batch)
        self._kick(loop)
        self._watch(loop, batch, loop.time(), min(batch.dues()))
        try:
            await batch.future
        except BaseException:  # cancelled: the slots must not stay taken
            self._forget(lambda job: job.batch is batch)
            raise
        finally:
            batch.timer.cancel()
            self._inflight.discard(batch)
        return batch.results  # type: ignore[return-value]  # all of them are there

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        wanted = None if request_ids is None else set(request_ids)

        def chosen(job: Job) -> bool:
            return wanted is None or job.request.id in wanted

        await self.control(self._ending(chosen))

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`. Requests that come while `finish` waits are served after `resume`."""
        if mode not in ("in_place", "recompute", "abort", "finish"):
            raise CapabilityError(
                f"engine {self.name!r} has no pause mode {mode!r}", fix="use in_place, recompute, abort or finish"
            )
        drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def stop() -> None:
            self._paused = mode != "finish"
            if mode == "recompute":
                self.lanes.preempt()
            elif mode == "abort":
                self.lanes.abort(lambda job: True)
            elif mode == "finish":
                self._draining.append(drained)

        self._parking |= mode == "finish"
        await self.control(stop)
        if mode == "finish":
            await drained

    async def resume(self) -> None:
        self._parking = False
        self._arrived.append(self._parked)
        self._parked = []

        def go() -> None:
            self._paused = False
            self._answered += self._draining  # woken by the worker: who called this may be cancelled by then
            self._draining = []

        await self.control(go)

    def port(self, name: str) -> TensorsPort:
        if name not in self._ports:
            raise CapabilityError(
                f"engine {self.name!r} has no weight port {name!r}; it has {', '.join(self._ports)}",
                fix="choose a transport that requires weights.tensors, such as `bucketed`",
            )
        return self._ports[name]

    async def health(self) -> Health:
        detail = "closed" if self._closed else repr(self._failure) if self._failure else ""
        running, waiting = self.lanes.counts()
        waiting += len(self._parked) + sum(map(len, [*self._arrived, *self._incoming]))
        return Health(ok=not detail, detail=detail, running=running, waiting=waiting)

    async def close(self) -> None:
        """Requests in flight fail with `EngineError`. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        worker, self._worker = self._worker, None
        try:
            if worker is not None:
                await asyncio.to_thread(worker.shutdown)
        finally:
            self._fail(EngineError(f"engine {self.name!r} was closed", fix="finish requests before closing"))

    # --- for the port ------------------------------------------------------------------------------------------------

    async def control(self, command: Callable[[], Any]) -> Any:
        """Run `command` in the worker, between two decode steps; return its result or raise its error."""
        self._alive()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._let_in()  # what came before this command is there when it runs
        self._commands.append((command, future))
        self._kick(loop)
        return await future

    def check_invariance(self, lane: Lane) -> None:
        """With constant shapes, equal rows must give equal bits in every slot: prove it once, with real weights."""
        s = lane.slots
        if not s.invariant:
            return
        length = min(8, s.max_length - 1)
        width = s.width(length)
        tokens = np.arange(length) % len(s.is_stop)
        rows = max(1, 256 // width)
        ids = np.zeros((rows, width), np.int64)
        ids[:, :length] = tokens
        logits, entries = s.forward.prefill(torch.from_numpy(ids), torch.full((rows,), length))
        arena = s._room(entries)
        arena[:, :, :, :width] = entries[:, :1]
        where = torch.full((s.rows,), length)
        mask = (torch.arange(s.capacity) <= length).expand(s.rows, 1, 1, -1)
        decoded = s.forward.decode(torch.zeros(s.rows, dtype=torch.int64), where, arena, s.capacity, mask)
        arena.zero_()
        if not (bool((logits == logits[:1]).all()) and bool((decoded == decoded[:1]).all())):
            raise EngineError(
                f"engine {self.name!r} cannot be batch-invariant here: equal rows gave unequal bits in {s.rows} slots "
                f"with {torch.get_num_threads()} threads",
                fix="set run.threads=1 or another rollout.slots (a multiple of 16), or batch_invariant: false",
            )

    # --- inside ------------------------------------------------------------------------------------------------------

    def _checked(self, request: Request) -> Any:
        """Its prompt, int64 [n], where this engine can answer such a request."""
        if not self.lanes.versions:
            raise EngineError(
                f"engine {self.name!r} has no weights yet", fix="publish version 0 through port `tensors` first"
            )
        if request.policy not in self.lanes.versions:
            raise EngineError(
                f"request {request.id!r} is for policy {request.policy!r}; engine {self.name!r} serves "
                f"{', '.join(map(repr, self.lanes.versions))}",
                fix="route requests by policy, and publish a policy's weights before its first request",
            )
        k, needs = asked(request.want)
        lacking = needs - self.offers
        lacking |= {key for key in request.prompt if key != "tokens"}
        if lacking:
            raise CapabilityError(
                f"request {request.id!r} wants {sorted(lacking)}; the engine `local` offers {sorted(self.offers)}",
                fix="choose an engine that offers it",
            )
        if k is not None and k > len(self.slots.is_stop):
            raise EngineError(
                f"request {request.id!r} wants the {k} likeliest tokens; the vocabulary has {len(self.slots.is_stop)}",
                fix="ask for fewer",
            )
        given = request.prompt["tokens"]
        most = self.longest_prompt + (1 if k is not None and request.sampling.max_new_tokens == 0 else 0)
        if not 0 < len(given) <= most:  # type: ignore[arg-type]  # no `Ref` comes here
            raise EngineError(
                f"the prompt of request {request.id!r} has {len(given)} tokens; from 1 to {most} fit"  # type: ignore[arg-type]
                + (", so that an answer may follow" if most < self.slots.max_length else ""),
                fix=f"shorten the prompt, or, where the model allows it, raise rollout.max_length {NEW_RUN}",
            )
        self._check_sampling(request)
        return self._check_ids(request, given, "the prompt")

    def _check_sampling(self, request: Request) -> None:
        """What the batch could not hold, or would read as something else, is refused before it gets there."""
        s = request.sampling
        fits = {
            "max_new_tokens": isinstance(s.max_new_tokens, Integral) and s.max_new_tokens >= 0,
            "temperature": isinstance(s.temperature, Real)
            and (s.temperature == 0 or _LEAST <= s.temperature <= _HOTTEST),
            "top_p": isinstance(s.top_p, Real) and _LEAST <= s.top_p <= 1,
            "top_k": isinstance(s.top_k, Integral) and 0 <= s.top_k <= _MOST,
            "stop": not isinstance(s.stop, str) and all(isinstance(stop, str) and stop for stop in s.stop or ()),
        }
        if wrong := [f"{name} {getattr(s, name)!r:.80}" for name, fit in fits.items() if not fit]:
            raise EngineError(
                f"request {request.id!r} cannot be sampled with {', '.join(wrong)}",
                fix="give whole numbers from 0 as max_new_tokens and top_k, a temperature of 0 or from "
                f"{_LEAST}, a top_p from {_LEAST} to 1, and a tuple of strings that are not empty as stop",
            )

    def _check_ids(self, request: Request, given: Any, what: str) -> Any:
        """`given` as int64 [n], where it is ids of the vocabulary."""
        ids, vocabulary = np.asarray(given), len(self.slots.is_stop)
        if ids.ndim == 1 and (not len(ids) or ids.dtype.kind in "iu"):  # a truth or a fraction would become an id
            ids = ids.astype(np.int64, copy=False)
            if not len(ids) or ids.view(np.uint64).max() < vocabulary:  # a negative id is huge
                return ids
        raise EngineError(
            f"{what} of request {request.id!r} holds a token outside the vocabulary of {vocabulary}",
            fix="use the model's own tokenizer",
        )

    def _alive(self) -> None:
        if self._failure is not None:
            raise EngineError(
                f"engine {self.name!r} failed earlier: {self._failure!r}", fix="see the first error; start a new engine"
            ) from self._failure
        if self._closed or self._worker is None:
            raise EngineError(
                f"engine {self.name!r} is {'closed' if self._closed else 'not started'}", fix="call start() first"
            )

    def _watch(self, loop: asyncio.AbstractEventLoop, batch: _Batch, began: float, due: float) -> None:
        batch.timer = loop.call_at(began + due, self._expire, loop, batch, began, due)

    def _expire(self, loop: asyncio.AbstractEventLoop, batch: _Batch, began: float, due: float) -> None:
        """Answer those whose deadline is `due`; the others keep theirs."""
        if batch.future.done():
            return
        held = " (it is paused or loading weights)" if self._paused or self.loading else ""
        late = set()
        for index, request in enumerate(batch.requests):
            if batch.results[index] is None and _seconds(request) <= due:
                late.add(index)
                batch.results[index] = DeadlineError(
                    f"request {request.id!r} took over {request.deadline_s} s on engine {self.name!r}{held}",
                    fix="raise the deadline, or look at what keeps the engine",
                )
        if dues := batch.dues():
            self._watch(loop, batch, began, min(dues))
        else:
            batch.future.set_result(None)
        self._forget(lambda job: job.batch is batch and job.index in late)

    def _ending(self, chosen: Callable[[Job], bool]) -> Callable[[], None]:
        """The command that ends the requests that `chosen` picks, also those that wait outside."""
        self._arrived.append([job for job in self._parked if chosen(job)])
        self._parked = [job for job in self._parked if not chosen(job)]
        return lambda: self.lanes.abort(chosen)

    def _forget(self, chosen: Callable[[Job], bool]) -> None:
        """Nobody waits for these any more: free their slots."""
        ending = self._ending(chosen)
        self._let_in()
        loop = asyncio.get_running_loop()
        self._commands.append((ending, loop.create_future()))
        self._kick(loop)

    def _kick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the worker run, once the loop has served everything that is ready now: requests join in one batch."""
        if not self._kicked and self._worker is not None:
            self._kicked = True
            loop.call_soon(self._launch, loop)

    def _launch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._kicked = False
        self._let_in()
        if not self._running and self._worker is not None:
            self._running = True
            self._worker.submit(self._work, loop)

    def _let_in(self) -> None:
        self._incoming.extend(self._arrived)  # in one go: the worker may be looking
        self._arrived.clear()

    def _landed(self, loop: asyncio.AbstractEventLoop, failure: Exception | None) -> None:
        self._running = False
        if failure is not None:
            self._failure = failure
            self._fail(failure)
        elif self._commands or self._incoming:
            self._kick(loop)

    def _fail(self, cause: Exception) -> None:
        """Nothing in flight will ever finish: say so to everyone who waits."""
        error = cause
        if not isinstance(cause, MilesError):
            error = EngineError(f"engine {self.name!r} failed: {cause!r}", fix="see the cause; start a new engine")
            error.__cause__ = cause
        waiting = [batch.future for batch in self._inflight] + [future for _, future in self._commands] + self._draining
        self._commands.clear()
        self._draining.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # heard: where nobody awaits it (`_forget`), the event loop has nothing to tell

    # --- in the worker thread ----------------------------------------------------------------------------------------

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Commands, then a step, and again, until there is nothing to do."""
        failure: Exception | None = None
        try:
            with torch.inference_mode():
                while self._turn(loop):
                    pass
        except Exception as error:
            failure = error
        loop.call_soon_threadsafe(self._landed, loop, failure)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> bool:
        if self._closed:
            return False
        lanes = self.lanes
        self._take_in()
        ran = bool(self._commands)
        while self._commands:
            command, future = self._commands.popleft()
            self._take_in()  # it may have come since, and before the command
            result, error = None, None
            try:
                result = command()
            except Exception as problem:
                error = problem
            self._hand_over(loop)  # an abort returns after the requests that it ended
            loop.call_soon_threadsafe(_resolve, future, result, error)
        stepping = lanes.busy and not self._paused and self.loading is None
        if stepping:
            lanes.step()
        self._hand_over(loop)
        if self._draining and not lanes.busy and not self._incoming:
            self._paused = True
            while self._draining:
                loop.call_soon_threadsafe(_resolve, self._draining.pop(), None, None)
        return ran or stepping

    def _take_in(self) -> None:
        while self._incoming:
            for job in self._incoming.popleft():
                self._enter(job)

    def _enter(self, job: Job) -> None:
        request, alike = job.request, job.batch.alike
        try:
            key = request.policy, request.want, id(request.prompt), id(request.sampling)
            if key not in alike:
                alike[key] = self._checked(request)
            if request.resume is not None:
                self._check_ids(request, request.resume, "what it goes on from")
            job.open(alike[key], self.slots.max_length)
        except MilesError as error:
            self._answer(job, error)
        except Exception as error:  # it must not cost the others theirs
            told = EngineError(f"request {request.id!r} cannot be read: {error!r}", fix="see the contract of `Request`")
            told.__cause__ = error
            self._answer(job, told)
        else:
            self.lanes.enqueue(job)

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        for job, result in self.lanes.take_finished():
            self._answer(job, result)
        if self._answered:  # all at once: every call wakes the event loop
            loop.call_soon_threadsafe(_wake, self._answered)
            self._answered = []

    def _answer(self, job: Job, result: Completion | Exception) -> None:
        batch = job.batch
        if batch.results[job.index] is None:  # else it came too late
            batch.results[job.index] = result
        batch.left -= 1
        if not batch.left:
            self._answered.append(batch.future)


def _seconds(request: Request) -> float:
    """Its deadline. One that is no number never comes, and the worker refuses the request."""
    given = request.deadline_s
    return max(given, 0.0) if isinstance(given, float | int) and given <= _EVER_S else _EVER_S


def _wake(waiting: Sequence[asyncio.Future[None]]) -> None:
    for future in waiting:
        _resolve(future, None, None)


def _resolve(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():  # its caller has gone: cancelled, or past its deadline
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
