"""Bounded waits: the few ways in which core waits for something, and what it does where that does not end well."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from miles_core.errors import DeadlineError, StoppedError

#: What ends this process, or a coroutine, whoever raised it.
STOPS = (KeyboardInterrupt, GeneratorExit)

T = TypeVar("T")

#: The fix of what a plugin raised while a run went on.
GO_ON = "see the cause with --traceback, mend it, then go on with --resume; it says how, if a plugin's files changed"

#: How long a cancelled side may take to return before the run goes on without it.
CANCEL_GRACE_S = 10.0
#: How long one part may take to close; what hangs is left behind.
CLOSE_TIMEOUT_S = 30.0


async def cancel(tasks: Iterable[asyncio.Future[Any]], grace_s: float = CANCEL_GRACE_S) -> None:
    """Cancel what is not done and wait for it, a bounded time; errors of cancelled tasks are not ours to raise."""
    tasks = list(tasks)
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running, timeout=grace_s)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # seen


async def contained(awaited: Awaitable[T]) -> T:
    """What a task waits for: `sys.exit()` or a panic in there is an error of its own, and not the end of the loop."""
    try:
        return await awaited
    except BaseException as error:
        if isinstance(error, (Exception, *STOPS, asyncio.CancelledError)):
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def finish_all(awaited: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for every one, also where one of them fails; the first failure surfaces."""
    tasks = [asyncio.ensure_future(one) for one in awaited]
    await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]


async def close_all(closers: Iterable[Callable[[], Any]]) -> None:
    """Every one is closed, in this order; the first failure surfaces."""
    errors = []
    for close in closers:
        try:
            closing = close()
            if inspect.isawaitable(closing):
                await asyncio.wait_for(contained(closing), CLOSE_TIMEOUT_S)
        except (Exception, SystemExit) as error:
            errors.append(error)
    if errors:
        raise errors[0]


async def within(awaited: Awaitable[T], what: str, deadline_s: float) -> T:
    """Wait for one thing, no longer than `deadline_s`; cancelled with whoever waits."""
    task = asyncio.ensure_future(awaited)
    try:
        await asyncio.wait({task}, timeout=deadline_s)
        if not task.done():
            raise DeadlineError(
                f"waiting for {what}: nothing happened for {deadline_s:g} s (schedule.stall_deadline_s)",
                fix="look at the engines' and trainer's logs, raise schedule.stall_deadline_s if they are only slow, "
                "and go on with `miles run --resume`",
            )
        if task.cancelled():
            raise cancelled(what)
        return task.result()
    finally:
        await cancel({task})


def cancelled(what: str) -> StoppedError:
    return StoppedError(f"{what} was cancelled from outside the loop", fix="go on with `miles run --resume`")
