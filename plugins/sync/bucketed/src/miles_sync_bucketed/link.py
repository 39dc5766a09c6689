"""The engine's end: takes buckets, gives them to the engine's port `tensors`, and writes the receipt."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, cast

from miles_core.contracts.weights import Evidence, Manifest, Receipt, TensorSpec, TensorsPort
from miles_core.errors import WeightError
from miles_core.numerics import buckets
from miles_core.weights import Rotation
from miles_sync_bucketed import inprocess, shared
from miles_sync_bucketed.config import Path
from miles_sync_bucketed.transport import here

if TYPE_CHECKING:
    from miles_core.config.schema import SyncKeys
    from miles_core.contracts.engine import Engine


class BucketedLink:
    """Keeps `contracts.weights.Link`.

    `sync.verify: live` asks the engine for digests of what it computes with, after activation; anything weaker digests
    the bytes that are handed over. The receipt's root is the manifest's only if every tensor was checked.
    """

    def __init__(self, *, engine: Engine, keys: SyncKeys) -> None:
        self._engine = engine
        self._port = cast("TensorsPort", engine.port("tensors"))
        self._live = str(keys.verify) == Evidence.LIVE
        self._rotation = Rotation(keys.verify_within)
        self._within = keys.verify_within
        self._client = shared.Client(engine.name, keys.deadline_s)
        self._channel: inprocess.Channel | None = None
        self._limit = 0

    async def describe(self) -> bytes:
        return json.dumps(here()).encode()

    async def connect(self, plan: bytes) -> None:
        told = json.loads(plan)
        self._limit = told["limit"]
        self._rotation = Rotation(self._within)  # after a new connection everything is checked again
        self._channel = None
        self._client.close()
        if told["path"] == Path.in_process:
            self._channel = inprocess.channel(told["token"], self._engine.name)
        else:
            await self._client.connect(told["socket"], told["token"], told["memory"])

    async def stage(self, manifest: Manifest) -> None:
        """Nothing to prepare: buckets go straight into the engine."""

    async def carry(self, manifest: Manifest) -> Receipt:
        started = time.perf_counter()
        packed = buckets.pack(manifest.tensors, self._limit)
        received: dict[str, tuple[str, ...]] = {}
        ended = False
        try:
            await self._port.begin(manifest.version)
            for index, specs in enumerate(packed):
                await self._take(manifest, index, specs, received)
            await self._port.end(manifest.version)
            ended = True
        finally:
            if not ended:
                self._give_up("it did not finish the version")
        digests = received
        if self._live:
            checked = self._rotation.next(manifest.tensors)
            digests = dict(await self._port.evidence(manifest.version, checked))
        whole = set(digests) == set(manifest.digests)
        return Receipt(
            engine=self._engine.name,
            version=manifest.version,
            evidence=Evidence.LIVE if self._live else Evidence.RECEIVED,
            digests=digests,
            root=_root(manifest, digests) if whole else None,
            nbytes=sum(buckets.nbytes(spec) for spec in manifest.tensors),
            seconds=time.perf_counter() - started,
        )

    async def _take(
        self, manifest: Manifest, index: int, specs: list[TensorSpec], received: dict[str, tuple[str, ...]]
    ) -> None:
        if self._channel is not None:
            bucket = await self._channel.next(manifest.version, index)
        else:
            bucket = await self._client.next(str(manifest.version), index, specs)
        if not self._live:
            received |= {spec.name: buckets.piece_digests(spec, tensor) for spec, tensor in bucket}
        await self._port.load(bucket)
        del bucket
        if self._channel is not None:
            await self._channel.done()
        else:
            await self._client.done(index)

    def _give_up(self, why: str) -> None:
        if self._channel is not None:
            self._channel.close(why)
        self._client.close()

    async def close(self) -> None:
        self._give_up("the link was closed")


def _root(manifest: Manifest, digests: dict[str, tuple[str, ...]]) -> str:
    from miles_core.weights import manifest_root

    try:
        return manifest_root(manifest.tensors, digests)
    except ValueError as error:  # a piece without a digest
        raise WeightError(
            f"evidence for {manifest.version} is incomplete: {error}", fix="see the engine's log"
        ) from error
