"""Launcher `inline`: one trainer rank in this process, on a thread of its own. The default.

A worker is built and called on one thread, so torch objects never change threads, while the event loop keeps turning.
Left out on purpose: more than one worker and sampler processes; `processes` and `ray` are for those.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles_core import hookimpl
from miles_core.errors import CapabilityError, DeadlineError
from miles_core.provider import BuildContext, Place, Provider

if TYPE_CHECKING:
    from miles_core.contracts.launcher import WorkerSpec

BUILD_TIMEOUT_S = 1800.0
CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class InlineConfig:
    """`inline` has no options of its own."""


class InlineWorkers:
    """One worker on one thread."""

    count = 1

    def __init__(self, spec: WorkerSpec) -> None:
        self._name = f"miles-{spec.place.value}"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        self._cancelled = threading.Event()
        self._spec = spec
        self._worker: Any = None

    async def start(self) -> None:
        module, _, function = self._spec.factory.partition(":")

        def build() -> Any:
            factory = getattr(importlib.import_module(module), function)
            return factory(rank=0, count=1, cancelled=self._cancelled.is_set, **self._spec.payload)

        self._worker = await self._run("start", build, BUILD_TIMEOUT_S)

    async def call(self, method: str, *args: Any, rank: int | None = None, timeout_s: float) -> list[Any]:
        bound = getattr(self._worker, method)
        if asyncio.iscoroutinefunction(bound):
            return [await self._deadline(method, bound(*args), timeout_s)]
        return [await self._run(method, lambda: bound(*args), timeout_s)]

    async def _run(self, method: str, work: Any, timeout_s: float) -> Any:
        def guarded() -> Any:
            try:
                return work()
            finally:
                self._cancelled.clear()

        return await self._deadline(method, asyncio.wrap_future(self._thread.submit(guarded)), timeout_s)

    async def _deadline(self, method: str, awaitable: Any, timeout_s: float) -> Any:
        try:
            return await asyncio.wait_for(awaitable, timeout_s)
        except TimeoutError as error:
            raise DeadlineError(
                f"{self._name}: {method!r} did not return within {timeout_s:g} s",
                fix="look for what hangs with `py-spy dump`, or raise the deadline that the message names",
            ) from error

    def interrupt(self) -> None:
        self._cancelled.set()

    async def close(self) -> None:
        worker, self._worker = self._worker, None  # closing twice is harmless
        if worker is not None and hasattr(worker, "close"):
            with suppress(DeadlineError):  # its thread hangs in an earlier call, which has said so
                await self._run("close", worker.close, CLOSE_TIMEOUT_S)
        self._thread.shutdown(wait=False, cancel_futures=True)


class InlineLauncher:
    """Keeps the workers that it started, and closes them."""

    def __init__(self) -> None:
        self._started: list[InlineWorkers] = []

    async def start(self, spec: WorkerSpec) -> InlineWorkers:
        if spec.count != 1 or spec.place != Place.TRAINER:
            raise CapabilityError(
                f"launcher 'inline' was asked for {spec.count} workers at place {spec.place.value!r}; it runs one "
                "trainer rank in this process",
                fix="set backend.ranks: 1 and schedule.samplers: 0, or choose a launcher that starts processes",
            )
        workers = InlineWorkers(spec)
        self._started.append(workers)
        await workers.start()
        return workers

    async def close(self) -> None:
        for workers in self._started:
            await workers.close()
        self._started.clear()


def _build(config: InlineConfig, context: BuildContext) -> InlineLauncher:
    return InlineLauncher()


@hookimpl
def miles_launcher() -> Provider[InlineConfig, InlineLauncher]:
    return Provider(
        name="inline",
        config=InlineConfig,
        build=_build,
        offers=("in_process",),
        summary="one trainer rank and local engines in this process",
    )
