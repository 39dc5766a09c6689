"""Episodes in worker processes: the sampler that the controller calls, and what serves it in each process.

A process holds engine clients, environments and scorers of its own; its pool's gate follows the controller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miles_core.waits import close_all

if TYPE_CHECKING:
    from miles_core.contracts.launcher import Workers
    from miles_core.ledger import Lease
    from miles_core.records import Group, Sampling
    from miles_core.sampler import Sampler


class RemoteSampler:
    """A sampler in worker processes, as the controller calls it. The workers' objects have `run(lease, group_size,
    sampling, split)`, `abort(lease_ids)` and `follow(state)`; see `SamplerEndpoint`."""

    def __init__(self, workers: Workers, *, deadline_s: float = 600.0) -> None:
        """`deadline_s` is the episodes' own; a worker that is silent for longer than that and a margin is an error."""
        self._workers = workers
        self._deadline_s = deadline_s
        self._load = [0] * workers.count
        self._where: dict[str, int] = {}

    async def run(self, lease: Lease, *, group_size: int, sampling: Sampling | None, split: str) -> Group:
        """On the worker with the fewest leases."""
        rank = self._load.index(min(self._load))
        self._load[rank] += 1
        self._where[lease.id] = rank
        try:
            arguments = (lease, group_size, sampling, split)
            found = await self._workers.call("run", *arguments, rank=rank, timeout_s=1.5 * self._deadline_s + 30.0)
            group: Group = found[0]
            return group
        finally:
            self._load[rank] -= 1
            del self._where[lease.id]

    async def abort(self, lease_ids: Sequence[str]) -> None:
        by_rank: dict[int, list[str]] = {}
        for lease in filter(self._where.__contains__, lease_ids):
            by_rank.setdefault(self._where[lease], []).append(lease)
        calls = (self._workers.call("abort", ids, rank=rank, timeout_s=60.0) for rank, ids in by_rank.items())
        await asyncio.gather(*calls)

    async def follow(self, state: Mapping[str, Any]) -> None:
        """Pass the controller's serving state to every worker (`Publisher(on_serving=…)`)."""
        await self._workers.call("follow", dict(state), timeout_s=60.0)

    async def close(self) -> None:
        await self._workers.close()


class SamplerEndpoint:
    """What a sampler process serves to its `RemoteSampler`: its own sampler, and its own pool of engine clients.
    `closers` close what both were built from."""

    def __init__(self, sampler: Sampler, pool: Any, closers: Iterable[Callable[[], Any]]) -> None:
        self._sampler = sampler
        self._pool = pool
        self._closers = closers

    async def start(self) -> None:
        await self._pool.start()

    async def run(self, lease: Lease, group_size: int, sampling: Sampling | None, split: str) -> Group:
        return await self._sampler.run(lease, group_size=group_size, sampling=sampling, split=split)

    async def abort(self, lease_ids: Sequence[str]) -> None:
        await self._sampler.abort(lease_ids)

    async def follow(self, state: Mapping[str, Any]) -> None:
        self._pool.follow(state)

    async def close(self) -> None:
        await close_all([self._sampler.close, *self._closers])
