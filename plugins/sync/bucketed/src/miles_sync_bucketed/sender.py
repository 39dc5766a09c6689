"""The trainer's end, one on every rank. All ranks walk the export together; rank 0 digests and hands over."""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path as FilePath
from typing import Any

from miles_core.contracts.weights import Export, Manifest, TensorSpec
from miles_core.errors import WeightError
from miles_core.numerics import buckets
from miles_core.records import Version
from miles_core.weights import make_manifest
from miles_sync_bucketed import inprocess, shared
from miles_sync_bucketed.config import Path
from miles_sync_bucketed.transport import here


class BucketedSender:
    """Keeps `contracts.weights.Sender`.

    Nothing is staged: `stage` digests the stream and `carry` exports it again, so that at most two buckets of extra
    memory exist. Weights that moved in between do not pass the engines' receipts.
    """

    def __init__(self, *, policy: str, rank: int, export: Export, deadline_s: float) -> None:
        self._policy = policy
        self._rank = rank
        self._export = export
        self._deadline_s = deadline_s
        self._token = ""
        self._server: shared.Server | None = None
        self._channels: dict[str, inprocess.Channel] = {}
        self._address = ""
        self._limit = 0
        self._staged: Version | None = None
        self._specs: tuple[TensorSpec, ...] = ()

    def describe(self) -> bytes:
        inprocess.forget(self._token)
        self._token = uuid.uuid4().hex
        self._address = str(FilePath(tempfile.gettempdir()) / f"miles-sync-{self._token}" / "s")
        return json.dumps({**here(), "token": self._token, "socket": self._address}).encode()

    def connect(self, plan: bytes) -> None:
        """Links connect at their own time; `carry` waits for those that use shared memory."""
        told = json.loads(plan)
        self._limit = told["limit"]
        self._specs = tuple(TensorSpec(name=n, shape=tuple(s), dtype=d) for n, s, d in told["tensors"])
        paths: dict[str, str] = told["paths"]
        self._channels = {
            name: inprocess.channel(told["token"], name) for name, path in paths.items() if path == Path.in_process
        }
        through_memory = [name for name, path in paths.items() if path == Path.shared_memory]
        self._drop_server()
        if through_memory:
            self._server = shared.Server(self._address, told["token"], through_memory, told["memory"], self._deadline_s)

    def stage(self, version: Version) -> Manifest | None:
        digests: dict[str, Sequence[str]] = {}
        self._staged = None
        stream = iter(self._export(self._policy, "full", False))
        if self._rank:
            for _ in stream:
                pass
            self._staged = version
            return None
        for spec in self._specs:
            (_, tensor) = buckets.take(stream, [spec])[0]
            digests[spec.name] = buckets.piece_digests(spec, tensor)
        self._end(stream)
        self._staged = version
        return make_manifest(version, self._specs, digests)

    def carry(self, version: Version, cancelled: Callable[[], bool]) -> None:
        if self._staged != version:
            raise WeightError(
                f"{version} was to be carried, {self._staged or 'nothing'} was staged", fix="stage a version first"
            )
        stream = iter(self._export(self._policy, "full", False))
        if self._rank:
            for _ in stream:
                if cancelled():
                    return
            return
        for channel in self._channels.values():
            channel.start()
        if self._server is not None and not self._server.start(cancelled):
            return
        packed = buckets.pack(self._specs, self._limit)
        for index, specs in enumerate(packed):
            # Bucket `index` is made only when bucket `index - 2` is gone: two exist at a time.
            if not self._wait(index - 2, cancelled):
                return
            if self._server is not None and not self._channels:
                # Tensor by tensor into the slot, so that beside the two slots only one tensor exists.
                self._server.put(str(version), index, specs, (buckets.take(stream, [spec])[0][1] for spec in specs))
                continue
            bucket = buckets.take(stream, specs)
            if self._server is not None:
                self._server.put(str(version), index, specs, (tensor for _, tensor in bucket))
            for channel in self._channels.values():
                if not channel.put(version, index, bucket, cancelled):
                    return
            del bucket
        self._end(stream)
        self._wait(len(packed) - 1, cancelled)

    def _wait(self, index: int, cancelled: Callable[[], bool]) -> bool:
        if index < 0:
            return not cancelled()
        waits = [channel.wait for channel in self._channels.values()]
        if self._server is not None:
            waits.append(self._server.wait)
        return all(wait(index, cancelled) for wait in waits)

    def _end(self, stream: Iterator[tuple[TensorSpec, Any]]) -> None:
        extra = next(stream, None)
        if extra is not None:
            raise WeightError(
                f"the weight stream goes on with {extra[0].name!r} after all planned tensors",
                fix="export the same tensors with and without `meta`",
            )

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close("the sender was closed")
        inprocess.forget(self._token)
        self._drop_server()

    def _drop_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
