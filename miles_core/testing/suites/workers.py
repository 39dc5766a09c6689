"""The worker object that the launcher suite starts: it echoes, fails, waits, and dies on demand."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_core.errors import WeightError


def echo_worker(*, rank: int, count: int, cancelled: Callable[[], bool], **payload: Any) -> EchoWorker:
    """`payload["fail"]` names a rank whose worker cannot be built."""
    if payload.get("fail") == rank:
        raise WeightError("this worker cannot be built", fix="this is a test")
    return EchoWorker(rank, count, cancelled, payload)


class EchoWorker:
    """Plain methods and coroutines."""

    def __init__(self, rank: int, count: int, cancelled: Callable[[], bool], payload: dict[str, Any]) -> None:
        self._rank = rank
        self._count = count
        self._cancelled = cancelled
        self._payload = payload
        self._thread = threading.get_ident()
        self._event: asyncio.Event | None = None
        self.closed = False

    def where(self) -> tuple[int, int, int]:
        """(rank, count, process)."""
        return self._rank, self._count, os.getpid()

    def payload(self) -> dict[str, Any]:
        return self._payload

    def echo(self, *values: Any) -> list[Any]:
        return list(values)

    def on_its_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def fail(self, rank: int, text: str) -> str:
        """A library's error on one rank."""
        if rank == self._rank:
            raise ValueError(text)
        return "fine"

    def refuse(self, text: str, fix: str) -> None:
        raise WeightError(text, fix=fix)

    def slow_or_fail(self, rank: int, seconds: float) -> str:
        """Fails at once on `rank`, takes long on the others."""
        if rank == self._rank:
            raise ValueError("the quick one failed")
        return self.wait(seconds)

    def wait(self, seconds: float) -> str:
        """Sleeps, and comes back early once interrupted."""
        stop = time.monotonic() + seconds
        while time.monotonic() < stop:
            if self._cancelled():
                return "interrupted"
            time.sleep(0.005)
        return "slept"

    def is_cancelled(self) -> bool:
        return self._cancelled()

    async def meet(self) -> str:
        """Returns once it is called twice at the same time."""
        if self._event is None:
            self._event = asyncio.Event()
            await self._event.wait()
            self._event = None
        else:
            self._event.set()
        return "met"

    def die(self) -> None:
        os._exit(3)

    def close(self) -> None:
        if "closed_file" in self._payload:
            Path(f"{self._payload['closed_file']}.{self._rank}").write_text("closed")
