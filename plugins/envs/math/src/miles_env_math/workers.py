"""Killable child processes for what a model wrote: a verifier that hangs or dies costs its process, never the run.

A child that passes its deadline or dies is killed and replaced by the next call. A call costs one round trip over a
local socket. Children are started when first needed; they end with the pool, with this process, or by their own alarm.
The child's side is `sandbox.py`, which says why the two files exist twice.
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
from typing import Any

from miles_core.errors import ConfigError, EngineError

START_DEADLINE_S = 180.0


class WorkerLostError(Exception):
    """The child passed its deadline (`late`), or died; it is gone."""

    def __init__(self, message: str, *, late: bool) -> None:
        super().__init__(message)
        self.late = late


class Pool:
    """At most `count` children, started one by one as they are needed; calls beyond that wait their turn."""

    @classmethod
    def shared(cls, module: str, settings: Mapping[str, Any], count: int) -> Pool:
        """The pool of this process for these settings: environments that agree share their children. `module` is run
        with `settings` as JSON, and calls `sandbox.serve`."""
        command = (sys.executable, "-P", "-m", module, json.dumps(dict(settings), sort_keys=True))
        found = _POOLS.get((command, count))
        if found is None:
            found = _POOLS[command, count] = cls(command, count)
        return found

    def __init__(self, command: tuple[str, ...], count: int) -> None:
        self._command = command
        self._idle: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        for _ in range(count):
            self._idle.put(None)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="verifier")

    def ask(self, request: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """The child's answer. Blocks; the deadline begins when a child is free and ready. Raises `WorkerLostError`,
        and `ConfigError` for what the child refuses."""
        child = self._idle.get()
        kept: _Child | None = None
        try:
            child = child or _Child(self._command)
            told = child.ask(request, deadline_s)
            kept = child
        finally:
            if kept is None and child is not None:
                child.end()
            self._idle.put(kept)
        return _accepted(told)

    async def ask_async(self, request: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """`ask`, without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.ask, request, deadline_s)


_POOLS: weakref.WeakValueDictionary[tuple[tuple[str, ...], int], Pool] = weakref.WeakValueDictionary()


class _Child:
    """One child. Whoever holds it may ask it."""

    def __init__(self, command: tuple[str, ...]) -> None:
        """Starts it, and waits until it is ready."""
        self._socket, theirs = socket.socketpair()
        self._buffer = b""
        try:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the run, which ends its step with these still alive
                env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        except OSError as error:
            self._socket.close()
            fix = "free memory or processes on this machine"
            raise EngineError(f"a process for verifiers cannot be started: {error}", fix=fix) from error
        finally:
            theirs.close()
        self.end = weakref.finalize(self, _end, self._process, self._socket)
        try:
            told = self._line(START_DEADLINE_S)
        except WorkerLostError as lost:
            fix = "see why: " + " ".join(command[:4]) + "; raise env.memory_mib if it needs more memory"
            raise EngineError(f"the process for verifiers does not start: {lost}", fix=fix) from lost
        _accepted(told)

    def ask(self, request: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        try:
            self._socket.settimeout(deadline_s)
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise self._lost(error, deadline_s) from error
        return self._line(deadline_s)

    def _line(self, deadline_s: float) -> dict[str, Any]:
        end = time.monotonic() + deadline_s
        while b"\n" not in self._buffer:
            try:
                self._socket.settimeout(max(end - time.monotonic(), 1e-3))
                chunk = self._socket.recv(1 << 16)
            except OSError as error:
                raise self._lost(error, deadline_s) from error
            if not chunk:
                raise self._lost(None, deadline_s)
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        told: dict[str, Any] = json.loads(line)
        return told

    def _lost(self, error: OSError | None, deadline_s: float) -> WorkerLostError:
        if isinstance(error, TimeoutError):
            return WorkerLostError(f"took longer than {deadline_s:g} s", late=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return WorkerLostError(f"ended its process (exit code {self._process.returncode})", late=False)


def _end(process: subprocess.Popen[bytes], line: socket.socket) -> None:
    line.close()
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5.0)


def _accepted(told: dict[str, Any]) -> dict[str, Any]:
    if "refused" in told:
        message, fix = told["refused"]
        raise ConfigError(message, fix=fix)
    return told
