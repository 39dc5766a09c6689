"""Toy transport in one process: senders and links meet in a table of channels, by a key that the plan hands out.

The sender copies what the backend exports into buckets (so that training may go on) and digests the copies; each link
loads them through port `tensors` and digests what the engine then holds. `phase: staged` lets links take the buckets
before the pause; the engine still swaps between `begin` and `end`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from miles_core.contracts.weights import Evidence, Manifest, Receipt, TensorSpec, TransferPlan
from miles_core.errors import CapabilityError, DeadlineError, WeightError
from miles_core.weights import make_manifest, manifest_root, piece_digests

if TYPE_CHECKING:
    from miles_core.contracts.engine import Engine
    from miles_core.contracts.weights import Export, TensorsPort
    from miles_core.records import Array, Version

Bucket = list[tuple[TensorSpec, "Array"]]

#: How long a link waits for its sender, and a sender for its links, where no deadline of core ends the wait first.
WAIT_S = 600.0

_channels: dict[str, Channel] = {}
_numbers = itertools.count()


class Channel:
    """Where one sender and its links meet. `offer` and `taken` are called on the trainer's thread and on loops."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._offered: dict[Version, list[Bucket]] = {}
        self._taken: dict[Version, set[str]] = {}
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def offer(self, version: Version, buckets: list[Bucket]) -> None:
        with self._changed:
            self._offered = {version: buckets}
            self._taken.setdefault(version, set())
            for loop, event in self._waiters:
                loop.call_soon_threadsafe(event.set)
            self._waiters.clear()

    def withdraw(self, version: Version) -> None:
        with self._changed:
            self._offered.pop(version, None)

    def take(self, version: Version) -> list[Bucket] | asyncio.Event:
        """The buckets, or an event that is set when something is offered."""
        with self._changed:
            if version in self._offered:
                return self._offered[version]
            event = asyncio.Event()
            self._waiters.append((asyncio.get_running_loop(), event))
            return event

    def taken(self, version: Version, link: str) -> None:
        with self._changed:
            self._taken.setdefault(version, set()).add(link)
            self._changed.notify_all()

    def wait_taken(self, version: Version, links: Sequence[str], cancelled: Callable[[], bool]) -> None:
        """Block until every link took `version`, or until `cancelled()`."""
        deadline = time.monotonic() + WAIT_S
        with self._changed:
            while not cancelled() and not set(links) <= self._taken.get(version, set()):
                if time.monotonic() > deadline:
                    late = sorted(set(links) - self._taken.get(version, set()))
                    raise DeadlineError(f"{late} did not take {version} in {WAIT_S:g} s", fix="look at those engines")
                self._changed.wait(0.005)


class ToyTransport:
    """Place `controller`."""

    def __init__(self, phase: Literal["staged", "live"], places: str) -> None:
        self.phase = phase
        self._places = places

    def plan(self, specs: Sequence[TensorSpec], senders: Sequence[bytes], links: Mapping[str, bytes]) -> TransferPlan:
        if not senders:
            raise WeightError("a transfer needs a sender", fix="give every trainer rank one")
        described = [json.loads(s) for s in senders]
        nbytes = sum(4 * int(np.prod(s.shape, dtype=np.int64)) for s in specs)
        plans = [json.dumps({"links": sorted(links) if rank == 0 else []}).encode() for rank in range(len(senders))]
        part = {"source": described[0], "phase": self.phase}
        to_links = {name: json.dumps({**part, "name": name}).encode() for name in links}
        summary = {"path": self._places, "bytes": str(nbytes), "engines": str(len(links)), "phase": self.phase}
        return TransferPlan(senders=tuple(plans), links=to_links, summary=summary)


class StagingSender:
    """What both toy senders share: describe, connect, and a digested copy of each version in buckets."""

    def __init__(self, export: Export, *, rank: int, bucket_bytes: int) -> None:
        self._export = export
        self._rank = rank
        self._bucket_bytes = bucket_bytes
        self.links: list[str] = []
        self.staged: tuple[Version, list[Bucket]] | None = None

    def connect(self, plan: bytes) -> None:
        self.links = list(json.loads(plan)["links"])

    def stage(self, version: Version) -> Manifest | None:
        specs: list[TensorSpec] = []
        digests: dict[str, tuple[str, ...]] = {}
        buckets: list[Bucket] = []
        room = 0
        for spec, tensor in self._export(version.policy, "full", False):
            array = np.array(tensor)
            if room < array.nbytes:
                buckets.append([])
                room = self._bucket_bytes
            room -= array.nbytes
            buckets[-1].append((spec, array))
            specs.append(spec)
            digests[spec.name] = piece_digests(spec, array)
        if self._rank != 0:
            return None
        self.staged = (version, buckets)
        return make_manifest(version, specs, digests)

    def buckets(self, version: Version) -> list[Bucket]:
        if self.staged is None or self.staged[0] != version:
            have = None if self.staged is None else self.staged[0]
            raise WeightError(f"asked to carry {version}, staged is {have}", fix="stage a version before carrying it")
        return self.staged[1]


class ToySender(StagingSender):
    """Place `trainer`, in the controller's process."""

    def __init__(self, export: Export, *, rank: int, bucket_bytes: int) -> None:
        super().__init__(export, rank=rank, bucket_bytes=bucket_bytes)
        self._key = f"{os.getpid()}-{next(_numbers)}"
        self._channel = _channels.setdefault(self._key, Channel())

    def describe(self) -> bytes:
        return json.dumps({"channel": self._key, "pid": os.getpid(), "rank": self._rank}).encode()

    def carry(self, version: Version, cancelled: Callable[[], bool]) -> None:
        if self._rank != 0:
            return
        self._channel.offer(version, self.buckets(version))
        try:
            self._channel.wait_taken(version, self.links, cancelled)
        finally:
            self._channel.withdraw(version)

    def close(self) -> None:
        _channels.pop(self._key, None)


class LoadingLink:
    """What both toy links share: fetch buckets, load them through port `tensors`, prove it by digests in place.

    In phase `staged` buckets are fetched while the engine samples on, and `carry` only swaps.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.port = cast("TensorsPort", engine.port("tensors"))
        self.plan: dict[str, Any] = {}
        self._fetched: tuple[str, list[Bucket]] | None = None

    async def fetch(self, manifest: Manifest) -> list[Bucket]:
        """The buckets of a version, from wherever the sender is."""
        raise NotImplementedError

    async def describe(self) -> bytes:
        return json.dumps({"engine": self.engine.name, "pid": os.getpid()}).encode()

    async def connect(self, plan: bytes) -> None:
        self.plan = json.loads(plan)

    async def stage(self, manifest: Manifest) -> None:
        if self.plan["phase"] == "staged":
            self._fetched = (manifest.root, await self.fetch(manifest))

    async def carry(self, manifest: Manifest) -> Receipt:
        started = time.perf_counter()
        if self.plan["phase"] == "live":
            buckets = await self.fetch(manifest)
        elif self._fetched is not None and self._fetched[0] == manifest.root:
            buckets, self._fetched = self._fetched[1], None
        else:
            raise WeightError(f"{manifest.version} was not staged on this link", fix="stage a version before its carry")
        version = manifest.version
        await self.port.begin(version)
        nbytes = 0
        for bucket in buckets:
            await self.port.load(bucket)
            nbytes += sum(array.nbytes for _, array in bucket)
        await self.port.end(version)
        digests = dict(await self.port.evidence(version, manifest.tensors))
        return Receipt(
            engine=self.engine.name,
            version=version,
            evidence=Evidence.LIVE,
            digests=digests,
            root=manifest_root(manifest.tensors, digests),
            nbytes=nbytes,
            seconds=time.perf_counter() - started,
        )

    async def close(self) -> None:
        """The engine belongs to core."""


class ToyLink(LoadingLink):
    """Place `engine`, in the trainer's process."""

    async def connect(self, plan: bytes) -> None:
        await super().connect(plan)
        if self.plan["source"]["pid"] != os.getpid():
            raise CapabilityError(
                "transport 'toy' works in one process; the trainer runs in another",
                fix="set sync.use: toy-socket, or a launcher that runs the trainer in this process",
            )

    async def fetch(self, manifest: Manifest) -> list[Bucket]:
        version = manifest.version
        channel = _channels.get(self.plan["source"]["channel"])
        if channel is None:
            raise WeightError(f"the sender of {version} is closed", fix="plan again after a sender changed")
        deadline = time.perf_counter() + WAIT_S
        found = channel.take(version)
        while not isinstance(found, list):
            try:
                await asyncio.wait_for(found.wait(), deadline - time.perf_counter())
            except TimeoutError:
                raise DeadlineError(f"{version} was not carried", fix="look at the trainer") from None
            found = channel.take(version)
        buckets = [[(spec, array.copy()) for spec, array in bucket] for bucket in found]
        channel.taken(version, self.plan["name"])
        return buckets
