"""Who holds the devices: tenants on shared devices take turns by phase.

Where trainer and engines share devices, the phases `sample`, `train` and `publish` exclude each other, and each has its
own set of things in device memory (an engine's `weights` and `kv`, a trainer's `params`, `grads` and `optim`).
`Residency.turn(phase)` waits until no other phase holds the devices, moves out what the phase does not need, then
moves in what it does; several holders of one phase share a turn. Where devices are not shared every turn is free.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from miles_core.errors import DeadlineError

Phase = Literal["sample", "train", "publish"]


class Tenant(Protocol):
    """Something that can leave device memory and come back, by tags that it names itself."""

    async def offload(self, tags: Sequence[str]) -> None: ...

    async def onload(self, tags: Sequence[str]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Lodger:
    """A tenant and the tags that it needs resident in each phase. `resident` is what is there at the start."""

    tenant: Tenant
    needs: Mapping[Phase, frozenset[str]]
    resident: frozenset[str] = field(default_factory=frozenset)


class Residency:
    """The devices of one group of colocated tenants, or (without lodgers) devices that nobody shares."""

    def __init__(self, lodgers: Mapping[str, Lodger] | None = None) -> None:
        self._lodgers = dict(lodgers or {})
        self._resident = {name: set(lodger.resident) for name, lodger in self._lodgers.items()}
        self._phase: Phase | None = None
        self._holders = 0
        self._queue: deque[tuple[Phase, asyncio.Future[None]]] = deque()
        self._moving = asyncio.Lock()

    @property
    def resident(self) -> dict[str, frozenset[str]]:
        """What each lodger has in device memory now."""
        return {name: frozenset(tags) for name, tags in self._resident.items()}

    @asynccontextmanager
    async def turn(self, phase: Phase, deadline_s: float = 600.0) -> AsyncIterator[None]:
        """Hold the devices for `phase`. First come, first served: a waiting phase is not overtaken.

        Raises `DeadlineError` naming the phase that holds them; what a tenant raises surfaces, and the turn ends.
        """
        if not self._lodgers:
            yield
            return
        await self._enter(phase, deadline_s)
        try:
            async with self._moving:
                await self._settle(phase)
            yield
        finally:
            self._leave()

    async def _enter(self, phase: Phase, deadline_s: float) -> None:
        if not self._queue and self._phase in (None, phase):
            self._phase = phase
            self._holders += 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((phase, place))
        try:
            await asyncio.wait_for(asyncio.shield(place), deadline_s)
        except BaseException as error:
            if place.done():  # the turn came in the same moment: give it back
                self._leave()
            else:
                self._queue.remove((phase, place))
                self._call_up()
            if isinstance(error, TimeoutError):
                raise DeadlineError(
                    f"phase {phase!r} waited {deadline_s:g} s for the devices, which {self._phase!r} holds",
                    fix="raise the deadline, or place trainer and engines on devices of their own",
                ) from None
            raise

    async def _settle(self, phase: Phase) -> None:
        """Everything out first, then in: both sets never have to fit at once."""
        wanted = {name: lodger.needs.get(phase, frozenset()) for name, lodger in self._lodgers.items()}
        for name, lodger in self._lodgers.items():
            leaving = sorted(self._resident[name] - wanted[name])
            if leaving:
                await lodger.tenant.offload(leaving)
                self._resident[name] -= set(leaving)
        for name, lodger in self._lodgers.items():
            coming = sorted(wanted[name] - self._resident[name])
            if coming:
                await lodger.tenant.onload(coming)
                self._resident[name] |= set(coming)

    def _leave(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._phase = None
        self._call_up()

    def _call_up(self) -> None:
        """Let the first in the queue in, and those of its phase right behind it."""
        while self._queue and self._phase in (None, self._queue[0][0]):
            self._phase, place = self._queue.popleft()
            self._holders += 1
            place.set_result(None)
