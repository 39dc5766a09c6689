"""An engine that only holds weights: what transports are tested against.

Its port `tensors` takes NumPy arrays and anything that `np.asarray` or `.view(torch.uint8)` can turn into bytes, keeps
them bit for bit, and writes down every call. Faults are switched on by attributes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from miles_core.contracts.engine import Health, PauseMode, Request
from miles_core.contracts.weights import Tensor, TensorSpec
from miles_core.errors import CapabilityError, EngineError
from miles_core.records import Version
from miles_core.weights import digest, piece_of

Array = np.ndarray[Any, Any]

SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def raw_of(spec: TensorSpec, tensor: Tensor) -> Array:
    """uint8 [*shape, item size]: a copy of the tensor's bytes."""
    size = SIZES[spec.dtype]
    array = tensor if isinstance(tensor, np.ndarray) else _host(tensor)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(*spec.shape, size).copy()


def _host(tensor: Any) -> Array:
    flat = tensor.detach().contiguous().reshape(-1)
    torch = __import__("importlib").import_module("torch")  # the tensor is torch's, so it is there
    return np.asarray(flat.view(torch.uint8).cpu().numpy())


def raw_digests(spec: TensorSpec, raw: Array) -> tuple[str, ...]:
    """One digest per piece, from `raw_of`."""
    return tuple(digest(np.ascontiguousarray(piece_of(raw, piece) if spec.pieces else raw)) for piece in spec.boxes())


class RecordingEngine:
    """`held[policy][name]` are bytes as `raw_of` gives them; `log` are (method, detail)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.held: dict[str, dict[str, Array]] = {}
        self.version: dict[str, Version] = {}
        self.log: list[tuple[str, Any]] = []
        self.fail_on_load = ""  # text of the error that loading raises
        self.hang_on_load = False
        self.flip = ""  # name of a tensor of which one bit is flipped on arrival

    async def start(self) -> None:
        return

    async def generate(self, request: Request) -> Any:
        raise CapabilityError("a recording engine samples nothing", fix="use another engine")

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        return

    async def pause(self, mode: PauseMode) -> None:
        return

    async def resume(self) -> None:
        return

    def port(self, name: str) -> RecordingPort:
        if name != "tensors":
            raise CapabilityError(f"engine {self.name!r} has no port {name!r}; it has ['tensors']", fix="use tensors")
        return RecordingPort(self)

    async def health(self) -> Health:
        return Health(ok=True)

    async def close(self) -> None:
        return


class RecordingPort:
    """Port `tensors`."""

    def __init__(self, engine: RecordingEngine) -> None:
        self._engine = engine
        self._version: Version | None = None

    async def begin(self, version: Version) -> None:
        self._version = version
        self._engine.log.append(("begin", version))

    async def load(self, bucket: Sequence[tuple[TensorSpec, Tensor]]) -> None:
        engine = self._engine
        if engine.fail_on_load:
            raise EngineError(engine.fail_on_load, fix="this is a test")
        if engine.hang_on_load:
            await asyncio.sleep(3600)
        if self._version is None:
            raise EngineError("load outside begin and end", fix="begin first")
        held = engine.held.setdefault(self._version.policy, {})
        for spec, tensor in bucket:
            raw = raw_of(spec, tensor)
            if spec.name == engine.flip and raw.size:
                raw.reshape(-1)[0] ^= 1
            held[spec.name] = raw
        engine.log.append(("load", [spec.name for spec, _ in bucket]))

    async def end(self, version: Version) -> None:
        if self._version != version:
            raise EngineError(f"end({version}) after begin({self._version})", fix="end what was begun")
        self._engine.version[version.policy] = version
        self._engine.log.append(("end", version))
        self._version = None

    async def evidence(self, version: Version, tensors: Sequence[TensorSpec]) -> Mapping[str, tuple[str, ...]]:
        held = self._engine.held.get(version.policy, {})
        self._engine.log.append(("evidence", [spec.name for spec in tensors]))
        return {s.name: raw_digests(s, held[s.name]) if s.name in held else ("",) * len(s.boxes()) for s in tensors}
