"""Toy transport between processes: the sender listens on 127.0.0.1 and every link fetches the version from it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from miles_core.contracts.weights import TensorSpec
from miles_core.errors import DeadlineError, WeightError
from miles_core.testing.toys import wire
from miles_core.testing.toys.sync import WAIT_S, Bucket, LoadingLink, StagingSender

if TYPE_CHECKING:
    from miles_core.contracts.weights import Export, Manifest
    from miles_core.records import Version

POLL_S = 0.02


class SocketSender(StagingSender):
    """Place `trainer`. A link must know the secret of the plan; a link that fails may come again."""

    def __init__(self, export: Export, *, rank: int, bucket_bytes: int) -> None:
        super().__init__(export, rank=rank, bucket_bytes=bucket_bytes)
        self._secret = secrets.token_hex(16)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(POLL_S)

    def describe(self) -> bytes:
        port = self._listener.getsockname()[1]
        return json.dumps({"port": port, "secret": self._secret, "pid": os.getpid(), "rank": self._rank}).encode()

    def carry(self, version: Version, cancelled: Callable[[], bool]) -> None:
        if self._rank != 0:
            return
        buckets = self.buckets(version)
        served: set[str] = set()
        deadline = time.monotonic() + WAIT_S
        threads: list[threading.Thread] = []
        while not cancelled() and not set(self.links) <= served:
            if time.monotonic() > deadline:
                raise DeadlineError(f"{sorted(set(self.links) - served)} did not fetch {version}", fix="look at them")
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            thread = threading.Thread(target=self._serve, args=(connection, version, buckets, served), daemon=True)
            thread.start()
            threads.append(thread)

    def _serve(self, connection: socket.socket, version: Version, buckets: list[Bucket], served: set[str]) -> None:
        connection.settimeout(WAIT_S)
        try:
            with connection, connection.makefile("rb") as stream:
                hello, _ = wire.receive_blocking(stream)
                if not secrets.compare_digest(str(hello.get("secret")), self._secret):
                    return
                if hello["version"] != str(version):
                    connection.sendall(wire.encode({"error": f"asked for {hello['version']}, carried is {version}"}))
                    return
                for bucket in buckets:
                    connection.sendall(wire.encode({"more": True}, {spec.name: array for spec, array in bucket}))
                connection.sendall(wire.encode({"more": False}))
                done, _ = wire.receive_blocking(stream)
                if done.get("ok"):
                    served.add(str(hello["link"]))
        except (OSError, EOFError, WeightError, KeyError):
            return  # the link says what failed; it is not served, and may come again

    def close(self) -> None:
        self._listener.close()


class SocketLink(LoadingLink):
    """Place `engine`."""

    async def fetch(self, manifest: Manifest) -> list[Bucket]:
        source = self.plan["source"]
        specs = {spec.name: spec for spec in manifest.tensors}
        hello = {"secret": source["secret"], "version": str(manifest.version), "link": self.plan["name"]}
        try:
            async with asyncio.timeout(WAIT_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", source["port"])
                try:
                    writer.write(wire.encode(hello))
                    buckets = await self._receive(reader, specs)
                    writer.write(wire.encode({"ok": True}))
                    await writer.drain()
                    return buckets
                finally:
                    writer.close()
        except (OSError, EOFError) as error:
            raise WeightError(
                f"engine {self.engine.name!r} could not fetch {manifest.version}: {error!r}", fix="look at the trainer"
            ) from error

    async def _receive(self, reader: asyncio.StreamReader, specs: dict[str, TensorSpec]) -> list[Bucket]:
        buckets: list[Bucket] = []
        while True:
            header, arrays = await wire.receive(reader)
            if "error" in header:
                raise WeightError(f"the sender refused: {header['error']}", fix="stage and carry the same version")
            unknown = sorted(set(arrays) - set(specs))
            if unknown:
                raise WeightError(f"the sender sent {unknown[0]!r}, which the manifest lacks", fix="publish again")
            if not header["more"]:
                return buckets
            buckets.append([(specs[name], array) for name, array in arrays.items()])
