"""Killable child processes for what a model wrote: a verifier that hangs or dies costs its process, never the run.

A child that passes its deadline or dies is replaced by the next call, cheaply: children are forked from one process
that has loaded what they need (`sandbox.py`). A call costs one round trip over a local socket. Everything is started
when first needed, and ends with the pool or with this process.
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
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from miles_core.errors import ConfigError, EngineError

START_DEADLINE_S = 180.0
FORK_DEADLINE_S = 30.0


class WorkerLostError(Exception):
    """The child passed its deadline, or died; it is gone."""


class Pool:
    """At most `count` children; calls beyond that wait their turn."""

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
        self._nursery = _Nursery(command)
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
            child = child or self._nursery.child()
            told = child.ask(request, deadline_s)
            kept = child
        except (OSError, EOFError) as error:
            code = self._nursery.end(child) if child is not None else None
            late = isinstance(error, TimeoutError)
            why = f"took longer than {deadline_s:g} s" if late else f"ended its process (exit code {code})"
            raise WorkerLostError(why) from error
        finally:
            self._idle.put(kept)
        return _accepted(told)

    async def ask_async(self, request: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """`ask`, without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.ask, request, deadline_s)


_POOLS: weakref.WeakValueDictionary[tuple[tuple[str, ...], int], Pool] = weakref.WeakValueDictionary()


class _Child:
    """The parent's end of one child's socket. Whoever holds it may ask it."""

    def __init__(self, line: socket.socket, pid: int = 0) -> None:
        self.line, self.pid, self._buffer = line, pid, b""

    def ask(self, request: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """Raises `TimeoutError`, `EOFError` or another `OSError`."""
        self.line.settimeout(deadline_s)
        self.line.sendall(json.dumps(request).encode() + b"\n")
        return self.told(deadline_s)

    def told(self, deadline_s: float) -> dict[str, Any]:
        """The next line of its."""
        end = time.monotonic() + deadline_s
        while b"\n" not in self._buffer:
            self.line.settimeout(max(end - time.monotonic(), 1e-3))
            chunk = self.line.recv(1 << 16)
            if not chunk:
                raise EOFError
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        told: dict[str, Any] = json.loads(line)
        return told


class _Nursery:
    """The process that forks the children, started by the first of them, and again after it died."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._control: _Child | None = None
        self._close: Callable[[], Any] = int  # nothing yet

    def child(self) -> _Child:
        """A new child. Raises `ConfigError` for what the process refuses, and `EngineError` where it does not start."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            if self._control is None:
                self._start()
            assert self._control is not None
            try:
                socket.send_fds(self._control.line, [b"{}"], [theirs.fileno()])
                return _Child(ours, self._control.told(FORK_DEADLINE_S)["told"])
            except (OSError, EOFError) as error:
                self._stop()
                fix = "free memory or processes on this machine"
                raise EngineError("a process for verifiers cannot be forked", fix=fix) from error

    def end(self, child: _Child) -> int | None:
        """End a child; its exit code, `None` where that is not known."""
        child.line.close()
        with self._lock:
            if self._control is None:
                return None
            try:
                code: int = self._control.ask({"end": child.pid}, FORK_DEADLINE_S)["told"]
            except (OSError, EOFError):
                self._stop()
                return None
            return code

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(
                self._command,
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
        self._close = weakref.finalize(self, _closed, process, ours)
        self._control = _Child(ours, process.pid)
        try:
            told = self._control.told(START_DEADLINE_S)
        except (OSError, EOFError) as error:
            self._stop()
            fix = "see why: " + " ".join(self._command[:4])
            raise EngineError("the process for verifiers does not start", fix=fix) from error
        if "refused" in told:
            self._stop()
        _accepted(told)

    def _stop(self) -> None:
        self._control = None
        self._close()


def _closed(process: subprocess.Popen[bytes], line: socket.socket) -> None:
    """The process ends its children once its socket closes."""
    line.close()
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)


def _accepted(told: dict[str, Any]) -> dict[str, Any]:
    if "refused" in told:
        message, fix = told["refused"]
        raise ConfigError(message, fix=fix)
    return told
