"""The killable processes in which data sets and verifiers run, and how they are asked.

A worker that passes its deadline or dies is killed and replaced by the next call; nothing else is lost. A call costs a
round trip over a local socket. Workers are started when first needed and end with the pool, or with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from miles_core.errors import ConfigError, EngineError

START_DEADLINE_S = 180.0
_SCRIPT = Path(__file__).with_name("worker.py")


class WorkerLostError(Exception):
    """The worker passed its deadline, or died; it is gone. `late` says which."""

    def __init__(self, message: str, *, late: bool) -> None:
        super().__init__(message)
        self.late = late


class _Process:
    """One worker. Not thread-safe: whoever holds it may ask it."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT), json.dumps(dict(settings))],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the run, which ends its step with these still alive
                env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        except OSError as error:
            ours.close()
            fix = "free memory or processes on this machine"
            raise EngineError(f"a process for verifiers cannot be started: {error}", fix=fix) from error
        finally:
            theirs.close()
        self._socket, self._buffer = ours, b""
        self._end = weakref.finalize(self, _end, self._process, ours)

    def started(self) -> None:
        """Wait until it is ready. Raises `ConfigError` for what it refuses."""
        try:
            told = self._line(time.monotonic() + START_DEADLINE_S)
        except WorkerLostError as lost:
            fix = "run `python -c 'import reasoning_gym'` with this interpreter; raise env.memory_mib if it needs more"
            raise EngineError(f"the process for verifiers does not start: {lost}", fix=fix) from lost
        refuse(told)

    def ask(self, request: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """Raises `WorkerLostError`; the worker is killed then."""
        end = time.monotonic() + deadline_s
        try:
            self._socket.settimeout(deadline_s)
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except (OSError, TimeoutError) as error:
            raise self._lost(error, deadline_s) from error
        return self._line(end, deadline_s)

    def _line(self, end: float, deadline_s: float = START_DEADLINE_S) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            try:
                self._socket.settimeout(max(end - time.monotonic(), 1e-3))
                chunk = self._socket.recv(1 << 16)
            except (OSError, TimeoutError) as error:
                raise self._lost(error, deadline_s) from error
            if not chunk:
                raise self._lost(None, deadline_s)
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        told: dict[str, Any] = json.loads(line)
        return told

    def _lost(self, error: Exception | None, deadline_s: float) -> WorkerLostError:
        if isinstance(error, TimeoutError):
            self.end()
            return WorkerLostError(f"it took longer than {deadline_s:g} s", late=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        self.end()
        return WorkerLostError(f"its process ended ({'killed' if code is None else f'exit code {code}'})", late=False)

    def end(self) -> None:
        self._end()


def _end(process: subprocess.Popen[bytes], line: socket.socket) -> None:
    line.close()
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5.0)


def refuse(told: Mapping[str, Any]) -> None:
    """Raise what a worker refused."""
    if "refused" in told:
        message, fix = told["refused"]
        raise ConfigError(message, fix=fix)


class Pool:
    """At most `count` workers, started one by one as they are needed; calls beyond that wait their turn."""

    def __init__(self, settings: Mapping[str, Any], count: int) -> None:
        self._settings = dict(settings)
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(count):
            self._idle.put(None)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="verifier")

    def ask(self, request: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """Blocks. The deadline begins when a worker is free and ready. Raises `WorkerLostError`."""
        worker = self._idle.get()
        kept: _Process | None = None
        try:
            if worker is None:
                worker = _Process(self._settings)
                worker.started()
            found = worker.ask(request, deadline_s)
            kept = worker
            return found
        finally:
            if kept is None and worker is not None:
                worker.end()
            self._idle.put(kept)

    async def ask_async(self, request: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """`ask`, without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.ask, request, deadline_s)
