"""Kind `sync`, its three places, the weight ports of engines, and the records that pass between them.

One pipeline for every transport: export -> stage -> carry -> verify -> activate. `weights.py` holds digests, manifest
roots and the serving gate; `publish.py` drives the places. A piece is a box inside a tensor: offsets and shape. A
tensor that is gathered whole has one piece. Digests are xxh3-128 hex over a piece's little-endian contiguous bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable

from miles_core.records import Version

Tensor = Any  # a torch tensor, or a NumPy array from toys
Layout = Literal["full", "shards"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Piece:
    """A box inside a tensor."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A Hugging Face-named tensor of the weight stream. `dtype` as safetensors spells it (`F32`, `BF16`, …)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...] = ()

    def boxes(self) -> tuple[Piece, ...]:
        """Its pieces; one box that covers all where none are given."""
        return self.pieces or (Piece(offsets=(0,) * len(self.shape), shape=self.shape),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a version consists of, the same for every transport. `digests[name][i]` belongs to piece i of the spec."""

    version: Version
    tensors: tuple[TensorSpec, ...]
    digests: Mapping[str, tuple[str, ...]]
    root: str
    base_root: str | None = None


class Evidence(StrEnum):
    """What a receipt rests on, weakest first."""

    PROBE = "probe"
    NATIVE = "native"
    RECEIVED = "received"
    LIVE = "live"


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """An engine's word that it holds a version. `digests` cover the tensors that were checked (all, or a rotation)."""

    engine: str
    version: Version
    evidence: Evidence
    digests: Mapping[str, tuple[str, ...]]
    root: str | None
    nbytes: int
    seconds: float
    detail: str = ""


@runtime_checkable
class WeightPort(Protocol):
    """What every port has. Between `begin` and `end` no request of `version.policy` advances."""

    async def begin(self, version: Version) -> None:
        """Hold sampling between two steps; weights may now be written."""

    async def end(self, version: Version) -> None:
        """Activate: tokens sampled from now on carry `version`. Caches of older versions are dropped or keyed apart."""

    async def evidence(self, version: Version, tensors: Sequence[TensorSpec]) -> Mapping[str, tuple[str, ...]]:
        """Digests of the weights *in place*, per piece of each spec: read back from what the engine computes with."""


@runtime_checkable
class TensorsPort(WeightPort, Protocol):
    """Port `tensors`: tensors handed over as they are. The engine copies; the caller may reuse the memory after."""

    async def load(self, bucket: Sequence[tuple[TensorSpec, Tensor]]) -> None: ...


@runtime_checkable
class GroupPort(WeightPort, Protocol):
    """Port `group`: tensors through a collective that the engine joins."""

    async def join(self, rendezvous: Mapping[str, Any]) -> None: ...

    async def receive(self, specs: Sequence[TensorSpec]) -> None: ...

    async def leave(self) -> None: ...


@runtime_checkable
class CheckpointPort(WeightPort, Protocol):
    """Port `checkpoint`: tensors from a folder of safetensors files that the engine reads."""

    async def load(self, path: str, specs: Sequence[TensorSpec]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Registered engine memory that holds `piece` of `tensor`: where a one-sided writer puts it."""

    tensor: str
    piece: Piece
    endpoint: bytes
    offset: int
    strides: tuple[int, ...]


@runtime_checkable
class RegionsPort(WeightPort, Protocol):
    """Port `regions`: registered memory that the transport writes into."""

    async def regions(self) -> Sequence[Region]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """What `Transport.plan` decided: one opaque blob per sender rank and per link, and a summary for `miles plan`."""

    senders: tuple[bytes, ...]
    links: Mapping[str, bytes]
    summary: Mapping[str, str] = field(default_factory=dict)


@runtime_checkable
class Transport(Protocol):
    """Kind `sync`, place `controller`. `plan` is pure and is run again when membership changes.

    `phase`: `staged` transports carry before engines pause (`Sender.carry` runs with `Link.stage`) and only swap inside
    the pause (`Link.carry`); `live` ones carry inside it (`Sender.carry` runs with `Link.carry`).
    """

    phase: Literal["staged", "live"]

    def plan(
        self, specs: Sequence[TensorSpec], senders: Sequence[bytes], links: Mapping[str, bytes]
    ) -> TransferPlan: ...


@runtime_checkable
class Sender(Protocol):
    """Kind `sync`, place `trainer`: one on every rank, called collectively, on the rank's own thread."""

    def describe(self) -> bytes: ...

    def connect(self, plan: bytes) -> None: ...

    def stage(self, version: Version) -> Manifest | None:
        """Export, digest and stage `version`; the manifest on rank 0, `None` elsewhere."""

    def carry(self, version: Version, cancelled: Callable[[], bool]) -> None:
        """Hand the staged bytes over, concurrently with every link's `carry`; returns early once `cancelled()`."""

    def close(self) -> None: ...


@runtime_checkable
class Link(Protocol):
    """Kind `sync`, place `engine`: beside one engine client. Speaks to the engine through a weight port only."""

    async def describe(self) -> bytes: ...

    async def connect(self, plan: bytes) -> None: ...

    async def stage(self, manifest: Manifest) -> None: ...

    async def carry(self, manifest: Manifest) -> Receipt:
        """Take the bytes, activate the version, return the receipt."""

    async def close(self) -> None: ...


#: `backend.export` as senders get it: (policy, layout, meta) -> stream of specs with tensors. With `meta` the tensors
#: carry no data: that dry pass yields specs, plan and byte counts.
Export = Callable[[str, Layout, bool], Iterator[tuple[TensorSpec, Tensor]]]
