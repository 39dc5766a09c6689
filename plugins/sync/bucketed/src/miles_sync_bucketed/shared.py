"""Hand-over between processes: two slots of anonymous shared memory, and a Unix socket that says what lies in them.

The memory has no name: its file descriptor travels over the socket, so nothing is left behind when a process dies. The
sender fills one slot while links copy from the other. Messages are JSON lines; no byte of a tensor crosses the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.contracts.weights import Tensor, TensorSpec
from miles_core.errors import DeadlineError, WeightError
from miles_core.numerics import buckets

if TYPE_CHECKING:
    from miles_core.records import Array

POLL_S = 0.05
SLOTS = 2
_LINE_LIMIT = 1 << 16


def _memory(nbytes: int) -> int:
    """The descriptor of `nbytes` of anonymous memory that can be shared."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("miles-weights", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, nbytes)
    except OSError as error:
        os.close(fd)
        raise WeightError(
            f"no {nbytes / 2**20:.0f} MiB of shared memory: {error}", fix="free memory, or lower sync.bucket_mib"
        ) from error
    return fd


def _map(fd: int, nbytes: int) -> Array:
    return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)


class _Lines:
    """JSON lines over a socket that is read in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> None:
        self._rest += data
        if len(self._rest) > _LINE_LIMIT:
            raise WeightError("a message between sender and link is too long", fix="use one version at both ends")

    def pop(self) -> dict[str, Any] | None:
        line, found, rest = self._rest.partition(b"\n")
        if not found:
            return None
        self._rest = rest
        message = json.loads(line)
        if not isinstance(message, dict):
            raise WeightError(f"a message between sender and link is {message!r}", fix="use one version at both ends")
        return message


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Server:
    """The sender's end of one connection: the slots, and a socket for each link. Methods block."""

    def __init__(self, address: str, token: str, engines: Sequence[str], nbytes: int, deadline_s: float) -> None:
        """Make two slots of `nbytes` and let the links of `engines` in, on a thread, until all are there.

        `address` is a path in a folder that does not exist yet: it is made here, for this user alone.
        """
        self._deadline_s = deadline_s
        self._token = token
        self._engines = list(engines)
        self._fd = _memory(SLOTS * nbytes)
        memory = _map(self._fd, SLOTS * nbytes)
        self._slots = [memory[i * nbytes : (i + 1) * nbytes] for i in range(SLOTS)]
        self._folder = Path(address).parent
        self._folder.mkdir(mode=0o700)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(address)
        self._socket.listen()
        self._socket.settimeout(POLL_S)
        self._links: dict[str, tuple[socket.socket, _Lines]] = {}
        self._done: dict[str, int] = {}
        self._closed = False
        self._doorman = threading.Thread(target=self._let_in, name="miles-sync-bucketed", daemon=True)
        self._doorman.start()

    def _missing(self) -> list[str]:
        return [engine for engine in self._engines if engine not in self._links]

    def _let_in(self) -> None:
        try:
            while self._missing() and not self._closed:
                with contextlib.suppress(TimeoutError):
                    self._accept(self._socket.accept()[0])
        finally:
            self._socket.close()
            os.close(self._fd)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self, link: socket.socket) -> None:
        link.settimeout(5.0)
        lines = _Lines()
        try:
            while (hello := lines.pop()) is None:
                data = link.recv(4096)
                if not data:
                    raise OSError("closed")
                lines.feed(data)
            if hello.get("token") != self._token or hello.get("engine") not in self._engines:
                raise OSError("not one of ours")
            socket.send_fds(link, [b"M"], [self._fd])
        except (OSError, ValueError, WeightError):
            link.close()  # a stranger, or a link of an earlier plan
            return
        link.settimeout(POLL_S)
        self._links[hello["engine"]] = (link, lines)

    def start(self, cancelled: Callable[[], bool]) -> bool:
        """Wait until every link is there, then begin a version; `False` where cancelled."""
        until = time.monotonic() + self._deadline_s
        while self._doorman.is_alive():
            if cancelled():
                return False
            if time.monotonic() > until:
                raise DeadlineError(
                    f"the links of {self._missing()} did not connect within {self._deadline_s:g} s",
                    fix="see the engines' logs, or raise sync.deadline_s",
                )
            self._doorman.join(POLL_S)
        self._done = dict.fromkeys(self._links, 0)
        return True

    def put(self, version: str, index: int, bucket: Sequence[TensorSpec], tensors: Iterable[Tensor]) -> None:
        """Copy bucket `index` into its slot and announce it. Its slot must be free (`wait(index - 2)`)."""
        slot = self._slots[index % SLOTS]
        starts, _ = buckets.offsets(bucket)
        library: buckets.Library = "numpy"
        for start, tensor in zip(starts, tensors, strict=True):
            buckets.write(slot, start, tensor)
            library = buckets.library_of(tensor)
            del tensor  # before the next one is made
        message = _line({"version": version, "bucket": index, "library": library})
        for engine, (link, _) in self._links.items():
            try:
                link.sendall(message)
            except OSError as error:
                raise self._gone(engine, str(error)) from error

    def wait(self, index: int, cancelled: Callable[[], bool]) -> bool:
        """Until every link has copied bucket `index`; `False` where cancelled."""
        for engine, (link, lines) in self._links.items():
            while self._done[engine] <= index:
                message = lines.pop()
                if message is not None:
                    if message.get("done") != self._done[engine]:
                        raise self._gone(engine, f"it answered {message}")
                    self._done[engine] += 1
                    continue
                if cancelled():
                    return False
                try:
                    data = link.recv(4096)
                except TimeoutError:
                    continue
                except OSError as error:
                    raise self._gone(engine, str(error)) from error
                if not data:
                    raise self._gone(engine, "it closed the connection")
                lines.feed(data)
        return True

    def _gone(self, engine: str, why: str) -> WeightError:
        return WeightError(f"the link of engine {engine!r} gave up: {why}", fix="see the engine's own error")

    def close(self) -> None:
        self._closed = True
        self._doorman.join()
        for link, _ in self._links.values():
            link.close()
        self._links, self._slots = {}, []


class Client:
    """The link's end. Coroutines."""

    def __init__(self, engine: str, deadline_s: float) -> None:
        self._engine = engine
        self._deadline_s = deadline_s
        self._socket: socket.socket | None = None
        self._lines = _Lines()
        self._slots: list[Array] = []
        self._closed = True

    async def connect(self, address: str, token: str, nbytes: int) -> None:
        self.close()
        self._closed = False
        fd = await asyncio.to_thread(self._connect, address, token)
        try:
            memory = _map(fd, SLOTS * nbytes)
        finally:
            os.close(fd)
        self._slots = [memory[i * nbytes : (i + 1) * nbytes] for i in range(SLOTS)]

    def _connect(self, address: str, token: str) -> int:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(self._deadline_s)
        until = time.monotonic() + self._deadline_s
        try:
            while True:
                try:
                    sock.connect(address)
                    break
                except (FileNotFoundError, ConnectionRefusedError):  # the sender connects at the same time
                    if time.monotonic() > until or self._closed:
                        raise
                    time.sleep(POLL_S)
            sock.sendall(_line({"token": token, "engine": self._engine}))
            _, fds, _, _ = socket.recv_fds(sock, 1, 1)
            if not fds:
                raise OSError("the sender closed the connection")
        except OSError as error:
            sock.close()
            raise WeightError(
                f"engine {self._engine!r} cannot reach the trainer's weights at {address}: {error}",
                fix="run both in one mount and process namespace, or choose another transport",
            ) from error
        sock.setblocking(False)
        self._socket, self._lines = sock, _Lines()
        return fds[0]

    async def next(self, version: str, index: int, bucket: Sequence[TensorSpec]) -> list[tuple[TensorSpec, Tensor]]:
        """Bucket `index`, as views of its slot: valid until `done(index)`."""
        message = await self._receive()
        if (message.get("version"), message.get("bucket")) != (version, index):
            raise WeightError(
                f"engine {self._engine!r} was handed {message}, bucket {index} of {version} was due",
                fix="publish the version again",
            )
        slot = self._slots[index % SLOTS]
        starts, _ = buckets.offsets(bucket)
        library = message["library"]
        return [(spec, buckets.view(slot, start, spec, library)) for start, spec in zip(starts, bucket, strict=True)]

    async def done(self, index: int) -> None:
        await asyncio.get_running_loop().sock_sendall(self._need(), _line({"done": index}))

    async def _receive(self) -> dict[str, Any]:
        while (message := self._lines.pop()) is None:
            data = await asyncio.get_running_loop().sock_recv(self._need(), 4096)
            if not data:
                raise WeightError(
                    f"the trainer closed the connection of engine {self._engine!r} in the middle of a version",
                    fix="see the trainer's own error",
                )
            self._lines.feed(data)
        return message

    def _need(self) -> socket.socket:
        if self._socket is None:
            raise WeightError(f"the link of engine {self._engine!r} is not connected", fix="call connect() first")
        return self._socket

    def close(self) -> None:
        self._closed = True
        if self._socket is not None:
            self._socket.close()
        self._socket, self._slots = None, []
