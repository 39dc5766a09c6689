"""Publishing a version: export, stage, carry, verify, activate; and who is left out when a member fails.

One order of calls for every transport. `connect` whenever membership changed (describe, plan, connect); then
- `phase: live`: every rank and every link stages; members pause; every rank and every link carries at once; receipts
  pass the gate; members resume.
- `phase: staged`: ranks stage; ranks carry while links stage (the bytes travel, members sample on); members pause;
  links carry (they only swap); receipts pass the gate; members resume.

The first error of any side cancels the other. A member at fault is quarantined and is sent everything again at a later
publication; the rest is tried again without it. Below `sync.min_engines` the run stops with every reason. No member
samples between the first byte of a version and the admission of its receipt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from miles_core.config.schema import SyncKeys
from miles_core.contracts.engine import Health
from miles_core.contracts.launcher import Workers
from miles_core.contracts.weights import Evidence, Link, Manifest, Receipt, TensorSpec, Transport
from miles_core.errors import DeadlineError, WeightError, blamed, clause
from miles_core.pool import Pool
from miles_core.records import Version
from miles_core.waits import CANCEL_GRACE_S, cancel


class _AtFaultError(Exception):
    """Members that failed, with their errors; the publication may go on without them."""

    def __init__(self, faults: Mapping[str, BaseException]) -> None:
        self.faults = faults


@dataclass(eq=False)
class Publisher:
    """Publishes the weights of one policy to the members of a pool.

    `links` has one link per engine of `pool`, by name, built for `policy`. `trainer`'s workers have the methods
    `specs(policy)`, `describe(policy)`, `connect(policy, plan)`, `stage(version)` and `carry(version)`.
    `on_serving(state)` is awaited with what pools in sampler processes `follow`, before engines are held and after each
    publication.
    Runs with several policies make one publisher each, over one pool, and hand them out through `Publishers`.
    """

    pool: Pool
    transport: Transport
    links: Mapping[str, Link]
    trainer: Workers
    keys: SyncKeys
    on_update: Literal["in_place", "recompute", "abort", "finish"] = "in_place"
    policy: str = "main"
    on_event: Callable[[str, Mapping[str, Any]], None] = lambda kind, fields: None
    on_serving: Callable[[Mapping[str, Any]], Awaitable[None]] = lambda state: asyncio.sleep(0)

    def __post_init__(self) -> None:
        self._deadline = 0.0  # of the publication that goes on
        self._connected: tuple[Any, ...] = ()
        self._specs: Sequence[TensorSpec] = ()
        self._last: Version | None = None
        self.pool.gate.minimum = Evidence(str(self.keys.verify))
        self.pool.gate.within = self.keys.verify_within
        self.pool.min_engines = max(self.pool.min_engines, self.keys.min_engines)

    async def publish(self, version: Version, changed: bool = True) -> Mapping[str, Receipt]:
        """Give `version` to every member: its receipts by engine name; empty where an alias was enough.

        Raises `QuorumError` where fewer than `sync.min_engines` members can serve it, `DeadlineError` where the
        trainer did not finish in time, and what the trainer raised.
        """
        async with self.pool.updating:
            started = time.perf_counter()
            receipts: dict[str, Receipt] = {}
            members = await self._candidates()
            if not members:
                self.pool.check_quorum(publishing=True)
            if not changed and self._last is not None and members.keys() <= set(self.pool.gate.serving(self._last)):
                self.pool.alias(self._last, version)
            else:
                receipts = await self._with_retries(version, members)
            self._last = version
            self.pool.check_quorum(publishing=True)  # a request may have lost a member meanwhile
            await self.on_serving(self.pool.state())
            told = {"version": str(version), "alias": not receipts, "engines": list(self.pool.gate.serving(version))}
            spent = {"bytes": sum(r.nbytes for r in receipts.values()), "seconds": time.perf_counter() - started}
            self.on_event("weights_carried", {**told, **spent})
            return receipts

    async def _with_retries(self, version: Version, members: Mapping[str, Link]) -> dict[str, Receipt]:
        while True:
            try:
                return await self._once(version, members)
            except _AtFaultError as fault:
                for name, error in fault.faults.items():
                    self.pool.quarantine(name, f"{version}: {clause(error)}")
                members = {name: link for name, link in members.items() if name not in fault.faults}
                if len(members) < self.pool.min_engines:
                    for name in members:  # they wait, paused, and have no receipt: leave nothing half-open
                        self.pool.quarantine(name, f"{version}: too few members for a publication")
                    self.pool.check_quorum(publishing=True)

    async def _candidates(self) -> dict[str, Link]:
        """Members, and quarantined ones that say they are well: those are sent everything again."""
        health = await self._health(self.pool.quarantined())
        well = {*self.pool.members(), *(name for name, state in health.items() if state.ok)}
        return {name: link for name, link in self.links.items() if name in well}

    async def _once(self, version: Version, links: Mapping[str, Link]) -> dict[str, Receipt]:
        self._deadline = time.monotonic() + self.keys.deadline_s
        if self._connected != (list(links), self.pool.losses.total()):
            await self._connect(links)
            self._connected = (list(links), self.pool.losses.total())
        manifest = await self._stage(version)

        staged = self.transport.phase == "staged"
        carry = self._call("carry", version) if staged else None
        await self._both(carry, {n: link.stage(manifest) for n, link in links.items()})
        await self.on_serving(self.pool.state(held=[*links]))
        await self._both(None, {n: self.pool.hold(n, self.on_update) for n in links})
        carry = None if staged else self._call("carry", version)
        found = await self._both(carry, {n: link.carry(manifest) for n, link in links.items()})
        self._admit(manifest, found)
        await self._both(None, {n: self.pool.release(n) for n in links})
        return found

    async def _connect(self, links: Mapping[str, Link]) -> None:
        """Plan anew for this membership and hand every side its part."""
        specs = (await self._call("specs", self.policy))[0]
        senders = await self._call("describe", self.policy)
        blobs = await self._both(None, {name: link.describe() for name, link in links.items()})
        with blamed("the transport cannot plan", WeightError, "choose another sync plugin, or mend this one"):
            plan = self.transport.plan(specs, senders, blobs)
        if len(plan.senders) != len(senders) or set(plan.links) != set(links):
            raise WeightError(
                f"the transport planned {len(plan.senders)} senders and links {sorted(plan.links)}; "
                f"there are {len(senders)} and {sorted(links)}",
                fix="return one blob per rank and one per link from plan()",
            )
        ranks = asyncio.gather(*(self._call("connect", self.policy, b, rank=r) for r, b in enumerate(plan.senders)))
        await self._both(ranks, {name: link.connect(plan.links[name]) for name, link in links.items()})
        self._specs = specs

    async def _stage(self, version: Version) -> Manifest:
        manifest = (await self._call("stage", version))[0]
        if not isinstance(manifest, Manifest) or manifest.version != version:
            found = getattr(manifest, "version", type(manifest).__name__)
            raise WeightError(
                f"rank 0 staged {found} when {version} was asked for", fix="return the manifest of the asked version"
            )
        missing = sorted({spec.name for spec in self._specs} - set(manifest.digests))
        if missing:
            what = f"{version} was staged without {len(missing)} tensors of the dry pass, {missing[0]!r} first"
            raise WeightError(what, fix="export the same tensors with and without `meta`")
        return manifest

    def _admit(self, manifest: Manifest, found: Mapping[str, Receipt]) -> None:
        """Put every receipt before the gate; the members that it refuses are at fault."""
        faults: dict[str, BaseException] = {}
        for name, receipt in found.items():
            try:
                if receipt.engine != name:
                    what = f"the link of {name!r} returned a receipt of {receipt.engine!r}"
                    raise WeightError(what, fix="write the engine's own name on its receipt")
                self.pool.gate.admit(manifest, receipt)
                self.pool.readmit(name)
            except WeightError as error:
                faults[name] = error
        if faults:
            raise _AtFaultError(faults)

    def _left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    async def _call(self, method: str, *args: Any, rank: int | None = None) -> list[Any]:
        with blamed(f"the trainer failed in {method!r}", WeightError, "see the cause with --traceback, then --resume"):
            return await self.trainer.call(method, *args, rank=rank, timeout_s=self._left_s())

    async def _both(self, main: Awaitable[Any] | None, sides: Mapping[str, Awaitable[Any]]) -> dict[str, Any]:
        """Run the trainer's side and every member's side at once: the members' results.

        The first error or the deadline cancels the rest. Raises `_AtFaultError` where members are at fault, else what
        the trainer's side raised.
        """
        tasks = {name: asyncio.ensure_future(side) for name, side in sides.items()}
        trainer = [] if main is None else [asyncio.ensure_future(main)]
        try:
            waiting: list[asyncio.Future[Any]] = [*tasks.values(), *trainer]
            _, late = await asyncio.wait(waiting, timeout=self._left_s(), return_when=asyncio.FIRST_EXCEPTION)
            faults = {n: e for n, t in tasks.items() if t.done() and (e := t.exception()) is not None}
            error = trainer[0].exception() if trainer and trainer[0].done() else None
        finally:
            if trainer and not trainer[0].done():
                self.trainer.interrupt()
            await cancel(tasks.values())
            if trainer:  # it comes back by itself
                await asyncio.wait(trainer, timeout=CANCEL_GRACE_S)
                await cancel(trainer)
        if not (faults or error or late):
            return {name: task.result() for name, task in tasks.items()}
        slow = [name for name, task in tasks.items() if task in late]
        passed = DeadlineError(
            f"publication passed {self.keys.deadline_s:g} s, waiting for {slow or 'the trainer'}",
            fix="raise sync.deadline_s, or find out why the transport is slow",
        )
        faults = faults or await self._unwell(tasks if error else slow)
        if not (faults or error):  # the deadline passed, and every member says that it is well
            faults = dict.fromkeys(slow, passed)
        if not faults:
            raise error or passed
        raise _AtFaultError(faults) from next(iter(faults.values()))

    async def _unwell(self, names: Iterable[str]) -> dict[str, BaseException]:
        return {
            name: WeightError(f"engine {name!r} is not well: {state.detail}", fix="see the engine's log")
            for name, state in (await self._health(names)).items()
            if not state.ok
        }

    async def _health(self, names: Iterable[str]) -> dict[str, Health]:
        names = list(names)
        return dict(zip(names, await asyncio.gather(*map(self.pool.health, names)), strict=True))


@dataclass(frozen=True)
class Publishers:
    """One publisher per policy behind one `publish`."""

    of: Mapping[str, Publisher]

    async def publish(self, version: Version, changed: bool = True) -> Mapping[str, Receipt]:
        return await self.of[version.policy].publish(version, changed)
