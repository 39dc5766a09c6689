"""Options of `sync: {use: bucketed}`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from miles_core.config.schema import opt


class Path(StrEnum):
    auto = "auto"
    in_process = "in_process"
    shared_memory = "shared_memory"


@dataclass(frozen=True, kw_only=True)
class BucketedConfig:
    """How weights travel. A tensor larger than a bucket makes the bucket as large as itself."""

    bucket_mib: int = opt(64, "size of a bucket; at most two exist at a time", unit="MiB", low=1)
    path: Path = opt(Path.auto, "`auto`: in-process where trainer and engine share one, else shared memory")
