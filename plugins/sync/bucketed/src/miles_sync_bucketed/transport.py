"""The plan: which path each link uses, and how large a bucket's memory is. Pure."""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from miles_core.contracts.weights import TensorSpec, TransferPlan
from miles_core.errors import CapabilityError
from miles_core.numerics import buckets
from miles_sync_bucketed.config import BucketedConfig, Path

_PROCESS = uuid.uuid4().hex


def here() -> dict[str, str]:
    """Where this end of the transport lives."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return {"host": f"{socket.gethostname()} {boot}", "process": f"{_PROCESS} {os.getpid()}"}


class BucketedTransport:
    """Keeps `contracts.weights.Transport`."""

    phase: Literal["staged", "live"] = "live"

    def __init__(self, config: BucketedConfig) -> None:
        self._config = config

    def plan(self, specs: Sequence[TensorSpec], senders: Sequence[bytes], links: Mapping[str, bytes]) -> TransferPlan:
        """Raises `CapabilityError` where an engine is on another host than the first trainer rank."""
        first = json.loads(senders[0])
        limit = self._config.bucket_mib << 20
        paths = {name: self._path(name, first, json.loads(blob)) for name, blob in sorted(links.items())}
        if Path.shared_memory in paths.values():
            # The tensor on its way into a slot is part of the two buckets of memory.
            largest = max(map(buckets.nbytes, specs), default=0)
            limit = max(limit - largest // 2, limit // 2)
        packed = buckets.pack(specs, limit)
        memory = max([buckets.ALIGN, *(buckets.offsets(bucket)[1] for bucket in packed)])
        common = {"limit": limit, "memory": memory, "token": first["token"]}
        tensors = [[spec.name, list(spec.shape), spec.dtype] for spec in specs]
        sender: dict[str, Any] = {**common, "tensors": tensors, "paths": {n: p.value for n, p in paths.items()}}
        rest = {**sender, "paths": {}}
        return TransferPlan(
            senders=tuple(json.dumps(rest if rank else sender).encode() for rank in range(len(senders))),
            links={
                name: json.dumps({**common, "path": path.value, "socket": first["socket"]}).encode()
                for name, path in paths.items()
            },
            summary={
                "buckets": f"{len(packed)} of at most {limit >> 20} MiB ({memory / 2**20:.1f} MiB the largest)",
                "bytes": str(sum(buckets.nbytes(spec) for spec in specs)),
                "paths": ", ".join(f"{name}: {path.value}" for name, path in paths.items()),
            },
        )

    def _path(self, name: str, sender: Mapping[str, str], link: Mapping[str, str]) -> Path:
        if self._config.path != Path.shared_memory and sender["process"] == link["process"]:
            return Path.in_process
        if self._config.path != Path.in_process and sender["host"] == link["host"]:
            return Path.shared_memory
        where = "in another process" if sender["host"] == link["host"] else f"on host {link['host'].split()[0]!r}"
        raise CapabilityError(
            f"engine {name!r} is {where}, the trainer's first rank on {sender['host'].split()[0]!r}; "
            f"sync.path {self._config.path.value!r} does not reach it",
            fix="place them together, set sync.path=auto, or choose a transport that crosses hosts",
        )
