"""Hand-over inside one process: tensors go from the trainer's thread to the event loop as they are, without a copy.

At most two buckets exist at a time: one that the engine is copying, and one that the sender has ready.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from miles_core.errors import WeightError
from miles_core.records import Version

#: How often a waiting sender looks whether it was cancelled.
POLL_S = 0.05

Bucket = list[tuple[Any, Any]]


class Channel:
    """One sender, one link, one version after another. The sender's methods block; the link's are coroutines."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._bucket: tuple[Version, int, Bucket] | None = None
        self._done = 0  # buckets that the link has finished, of the current version
        self._closed = ""
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    # --- sender ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        with self._changed:
            self._done = 0

    def put(self, version: Version, index: int, bucket: Bucket, cancelled: Callable[[], bool]) -> bool:
        """Hand bucket `index` over once the one before was taken; `False` where cancelled."""
        if not self._until(lambda: self._bucket is None, cancelled):
            return False
        with self._changed:
            self._bucket = (version, index, bucket)
            if self._waiter is not None:
                loop, future = self._waiter
                self._waiter = None
                loop.call_soon_threadsafe(_set, future)
        return True

    def wait(self, index: int, cancelled: Callable[[], bool]) -> bool:
        """Until the link has finished bucket `index`; `False` where cancelled."""
        return self._until(lambda: self._done > index, cancelled)

    def _until(self, ready: Callable[[], bool], cancelled: Callable[[], bool]) -> bool:
        with self._changed:
            while not ready():
                if self._closed:
                    raise WeightError(
                        f"the link of engine {self._engine!r} gave up: {self._closed}", fix="see the engine's own error"
                    )
                if cancelled():
                    return False
                self._changed.wait(POLL_S)
        return True

    # --- link --------------------------------------------------------------------------------------------------------

    async def next(self, version: Version, index: int) -> Bucket:
        """Bucket `index` of `version`."""
        while True:
            with self._changed:
                if self._bucket is not None:
                    found, number, bucket = self._bucket
                    if (found, number) != (version, index):
                        raise WeightError(
                            f"engine {self._engine!r} was handed bucket {number} of {found}, bucket {index} of "
                            f"{version} was due",
                            fix="publish the version again",
                        )
                    self._bucket = None
                    self._changed.notify_all()
                    return bucket
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self._waiter = (loop, future)
            await future

    async def done(self) -> None:
        with self._changed:
            self._done += 1
            self._changed.notify_all()

    def close(self, why: str) -> None:
        """Tell the sender that no more will be taken."""
        with self._changed:
            self._closed = why
            self._bucket = None
            self._changed.notify_all()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_LOCK = threading.Lock()
_CHANNELS: dict[tuple[str, str], Channel] = {}


def channel(token: str, engine: str) -> Channel:
    """The channel of one connection, made by whichever end asks first."""
    with _LOCK:
        return _CHANNELS.setdefault((token, engine), Channel(engine))


def forget(token: str) -> None:
    """Drop the channels of a connection that was replaced or closed."""
    with _LOCK:
        for key in [key for key in _CHANNELS if key[0] == token]:
            del _CHANNELS[key]
