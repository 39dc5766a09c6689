"""Kinds `launcher` and `tracker`: where workers run; where records of the run go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from miles_core.provider import Place
from miles_core.records import Metric


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """How a worker comes to be: `factory` is `module:function`, called in the worker as
    `factory(rank=…, count=…, cancelled=…, **payload)`; `cancelled()` turns true once `Workers.interrupt` was called and
    false again when the call that it interrupted has returned.

    The payload is plain data (the frozen run file as a tree, the plugin lock); the worker wires itself and refuses if
    its own lock differs. The returned object's methods are what `Workers.call` calls.
    """

    place: Place
    factory: str
    count: int = 1
    payload: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 1
    gpus: float = 0


@runtime_checkable
class Workers(Protocol):
    """Started workers of one place. Methods of a worker object may be plain (run on its own thread) or coroutines."""

    count: int

    async def call(self, method: str, *args: Any, rank: int | None = None, timeout_s: float) -> list[Any]:
        """Call `method` on all workers at once (or on one): their results in rank order.

        The first error cancels the wait for the others and surfaces with its own text; `DeadlineError` past the
        timeout; `StoppedError` where a worker died.
        """

    def interrupt(self) -> None:
        """Ask the running calls to return early: their `cancelled()` turns true. Callable from any thread."""

    async def close(self) -> None: ...


@runtime_checkable
class Launcher(Protocol):
    """Kind `launcher`, place `controller`. Offers `in_process` where workers share the controller's process.

    Worker processes ignore SIGINT: Ctrl-C reaches them too, and the controller decides what it means."""

    async def start(self, spec: WorkerSpec) -> Workers: ...

    async def close(self) -> None: ...


@runtime_checkable
class Tracker(Protocol):
    """Kind `tracker`, place `controller`. Called at most a few times a step; never changes data; must not block."""

    def start(self, info: Mapping[str, Any]) -> None:
        """`info`: `name`, `dir`, `steps`, `first_step`, `lineage`, `policies`, and a readable `summary`."""

    def metrics(self, step: int, side: str, values: Mapping[str, Metric], policy: str) -> None:
        """`side` is `train`, `rollout`, `eval`, `time` or `sync`."""

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Progress between steps: `group_finished`, `lease_dropped`, `published`, `checkpoint`, …"""

    def close(self, status: str) -> None: ...
