"""Toy launchers: `toy` runs workers on threads of this process, `toy-processes` starts a process for each."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from miles_core.errors import DeadlineError, MilesError, StoppedError
from miles_core.testing.toys.worker import portable

if TYPE_CHECKING:
    from miles_core.contracts.launcher import WorkerSpec

CLOSE_S = 10.0


async def gather(parts: list[Awaitable[Any]], what: str, timeout_s: float) -> list[Any]:
    """All results in order; the first error ends the wait for the others; `DeadlineError` past the timeout."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, pending = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            if task.exception() is not None:
                raise task.exception()  # type: ignore[misc]
        if pending:
            raise DeadlineError(
                f"{what} did not return within {timeout_s:g} s on {len(pending)} of {len(tasks)} workers",
                fix="look for what hangs, or raise the deadline",
            )
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


class ThreadWorkers:
    """`count` workers, each on its own thread."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.count = spec.count
        self._spec = spec
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"toy-{spec.place}-{r}") for r in range(spec.count)]
        self._cancelled = [threading.Event() for _ in range(spec.count)]
        self._workers: list[Any] = [None] * spec.count

    async def start(self, timeout_s: float) -> None:
        module, _, function = self._spec.factory.partition(":")

        def build(rank: int) -> None:
            factory = getattr(importlib.import_module(module), function)
            cancelled = self._cancelled[rank].is_set
            self._workers[rank] = factory(rank=rank, count=self.count, cancelled=cancelled, **self._spec.payload)

        await gather([self._on_thread(r, lambda r=r: build(r)) for r in range(self.count)], "start", timeout_s)

    async def call(self, method: str, *args: Any, rank: int | None = None, timeout_s: float) -> list[Any]:
        ranks = range(self.count) if rank is None else [rank]
        return await gather([self._one(r, method, args) for r in ranks], repr(method), timeout_s)

    async def _one(self, rank: int, method: str, args: tuple[Any, ...]) -> Any:
        bound = getattr(self._workers[rank], method)
        try:
            if asyncio.iscoroutinefunction(bound):
                return await bound(*args)
            return await self._on_thread(rank, lambda: bound(*args))
        except MilesError:
            raise
        except Exception as error:
            raise portable(error) from error

    async def _on_thread(self, rank: int, work: Any) -> Any:
        def guarded() -> Any:
            try:
                return work()
            finally:
                self._cancelled[rank].clear()

        return await asyncio.wrap_future(self._threads[rank].submit(guarded))

    def interrupt(self) -> None:
        for event in self._cancelled:
            event.set()

    async def close(self) -> None:
        workers, self._workers = self._workers, []
        for rank, worker in enumerate(workers):
            if hasattr(worker, "close"):
                plain = not asyncio.iscoroutinefunction(worker.close)
                closing = self._on_thread(rank, worker.close) if plain else worker.close()
                await asyncio.gather(asyncio.wait_for(closing, CLOSE_S), return_exceptions=True)
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)


class _Process:
    """One child: its pipe, and the calls that wait for its answers."""

    def __init__(self, spec: WorkerSpec, rank: int) -> None:
        self.name = f"{spec.place} worker {rank}"
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "miles_core.testing.toys.worker", str(theirs.fileno())]
            threads = {name: str(spec.threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
            path = os.pathsep.join(p for p in sys.path if p)
            environment = {**os.environ, **threads, "PYTHONPATH": path}
            self.popen = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        self._connection = Connection(ours.detach())
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]]] = {}
        self.dead = ""
        first = {"path": list(sys.path), "factory": spec.factory, "rank": rank, "count": spec.count}
        self._connection.send(first | {"payload": dict(spec.payload)})
        self.built: asyncio.Future[Any] = self._expect(0)
        threading.Thread(target=self._read, daemon=True, name=f"toy-reader-{rank}").start()

    def _expect(self, number: int) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting[number] = (loop, future)
        return future

    def _read(self) -> None:
        try:
            while True:
                number, ok, result = self._connection.recv()
                self._settle(number, ok, result)
        except (EOFError, OSError):
            code = self.popen.wait()
            self.dead = self.dead or f"{self.name} ended with exit code {code}"
            for number in list(self._waiting):
                self._settle(number, False, self._error())

    def _settle(self, number: int, ok: bool, result: Any) -> None:
        loop, future = self._waiting.pop(number, (None, None))
        if loop is None or future is None:
            return

        def set_result() -> None:
            if not future.done():
                future.set_result(result) if ok else future.set_exception(result)

        if not loop.is_closed():
            loop.call_soon_threadsafe(set_result)

    def _error(self) -> StoppedError:
        return StoppedError(self.dead, fix="see its last messages; resume the run with --resume")

    async def call(self, method: str, args: tuple[Any, ...]) -> Any:
        if self.dead:
            raise self._error()
        number = next(self._numbers)
        future = self._expect(number)
        try:
            await asyncio.to_thread(self._send, (number, method, args))
            return await future
        finally:
            self._waiting.pop(number, None)

    def _send(self, message: tuple[int, str, tuple[Any, ...]]) -> None:
        with self._lock:
            try:
                self._connection.send(message)
            except OSError as error:
                self.dead = self.dead or f"{self.name} does not take messages: {error}"
                raise self._error() from error

    def tell(self, method: str) -> None:
        if not self.dead:
            try:
                self._send((-1, method, ()))
            except StoppedError:
                return

    def stop(self) -> None:
        """Ends the process, kindly first."""
        self.tell("\0close")
        self.dead = self.dead or f"{self.name} is closed"
        try:
            self.popen.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


class ProcessWorkers:
    """`count` workers, each in its own process."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.count = spec.count
        self.processes = [_Process(spec, rank) for rank in range(spec.count)]
        self._closed = False

    async def start(self, timeout_s: float) -> None:
        await gather([p.built for p in self.processes], "start", timeout_s)

    async def call(self, method: str, *args: Any, rank: int | None = None, timeout_s: float) -> list[Any]:
        chosen = self.processes if rank is None else [self.processes[rank]]
        return await gather([p.call(method, args) for p in chosen], repr(method), timeout_s)

    def interrupt(self) -> None:
        for process in self.processes:
            process.tell("\0interrupt")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        closing = [asyncio.wait_for(p.call("close", ()), CLOSE_S) for p in self.processes]
        await asyncio.gather(*closing, return_exceptions=True)  # a worker that is dead or has nothing to close is fine
        await asyncio.gather(*(asyncio.to_thread(p.stop) for p in self.processes))


class ToyLauncher:
    """Starts workers as threads or processes, and closes what it started."""

    def __init__(self, kind: type[ThreadWorkers] | type[ProcessWorkers], start_s: float) -> None:
        self._kind = kind
        self._start_s = start_s
        self._started: list[ThreadWorkers | ProcessWorkers] = []

    async def start(self, spec: WorkerSpec) -> ThreadWorkers | ProcessWorkers:
        workers = self._kind(spec)
        self._started.append(workers)
        try:
            await workers.start(self._start_s)
        except BaseException:
            await workers.close()
            raise
        return workers

    async def close(self) -> None:
        for workers in self._started:
            await workers.close()
        self._started.clear()
