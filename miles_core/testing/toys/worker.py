"""The child of launcher `toy-processes`: builds a worker object and answers calls over a private pair of sockets.

Plain methods run one after another on the main thread, on which the object was built too; coroutines run together on
an event loop of their own; a third thread reads. Messages are pickles between a process and the child that it started,
never from a network. The process ends when its parent does.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from miles_core.errors import MilesError, StoppedError


class Child:
    """One worker process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._interrupted = threading.Event()
        self._worker: Any = None

    def run(self) -> None:
        threading.Thread(target=self._loop.run_forever, daemon=True, name="coroutines").start()
        first = self._connection.recv()
        sys.path[:] = first["path"]
        self._answer(0, lambda: self._build(first))
        if self._worker is None:
            return
        threading.Thread(target=self._read, daemon=True, name="reader").start()
        while (job := self._jobs.get()) is not None:
            number, method, args = job
            self._answer(number, lambda m=method, a=args: getattr(self._worker, m)(*a))
            self._interrupted.clear()

    def _build(self, first: dict[str, Any]) -> None:
        module, _, function = first["factory"].partition(":")
        factory = getattr(importlib.import_module(module), function)
        self._worker = factory(
            rank=first["rank"], count=first["count"], cancelled=self._interrupted.is_set, **first["payload"]
        )

    def _read(self) -> None:
        try:
            while True:
                number, method, args = self._connection.recv()
                if method == "\0interrupt":
                    self._interrupted.set()
                elif method == "\0close":
                    self._jobs.put(None)
                elif asyncio.iscoroutinefunction(getattr(self._worker, method, None)):
                    asyncio.run_coroutine_threadsafe(self._coroutine(number, method, args), self._loop)
                else:
                    self._jobs.put((number, method, args))
        except (EOFError, OSError):
            os._exit(0)  # the parent is gone: whatever runs has nobody to answer to

    async def _coroutine(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            result: Any = (number, True, await getattr(self._worker, method)(*args))
        except Exception as error:
            result = (number, False, portable(error))
        self._send(result)
        self._interrupted.clear()

    def _answer(self, number: int, work: Any) -> None:
        try:
            result: Any = (number, True, work())
        except Exception as error:
            result = (number, False, portable(error))
        self._send(result)

    def _send(self, result: tuple[int, bool, Any]) -> None:
        with self._lock:
            try:
                self._connection.send(result)
            except OSError:
                os._exit(0)
            except Exception as error:  # a result that cannot be pickled
                self._connection.send((result[0], False, portable(error)))


def portable(error: BaseException) -> MilesError:
    """An error that survives the way: ours as it is, any other by its class and text."""
    if isinstance(error, MilesError):
        return error
    return StoppedError(f"{type(error).__name__}: {error}", fix="see the worker's messages above")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the parent decides
    child = Child(Connection(int(sys.argv[1])))
    child.run()
    os._exit(0)


if __name__ == "__main__":
    main()
