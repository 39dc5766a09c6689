"""The one loop: slots, admission by staleness, batch assembly, training, publication, evaluation, checkpoints.

Everything that it drives is injected (`collaborators.py`). Synchronous and asynchronous runs are the same code: only
`schedule.max_staleness` differs. With `max_staleness: 0` and `order: slot` nothing that is trained depends on timing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from miles_core.admission import check_versions, failed_episodes, fit_group, is_stale, limit, mask_stale, versions_of
from miles_core.collaborators import Checkpoint, PolicySetup, Publisher, RolloutSink, RunResult, Sampler, Stop
from miles_core.config.schema import EvalConfig, OnStale
from miles_core.contracts.launcher import Tracker
from miles_core.errors import LedgerError, StoppedError, blamed
from miles_core.ledger import Lease, Ledger, Open
from miles_core.progress import Reports, evaluation_metrics, rollout_metrics, sampled
from miles_core.records import Group, Sampling, Version
from miles_core.side import Side
from miles_core.waits import CANCEL_GRACE_S, GO_ON, cancel, cancelled, within

__all__ = ["Loop", "PolicySetup", "RunResult", "Stop"]

T = TypeVar("T")
Accept = Callable[[Lease, Group], None]


@dataclass(kw_only=True, eq=False)
class Loop:
    """One run. Build a new one for every process; a resumed run differs only in its `ledger` (`Ledger.resume`).

    `publisher` is `None` where no engine exists, `checkpoint` is `None` in tests. `steps` is `run.steps`: rounds in
    all, also when resumed; policy p trains `steps * share` steps of its own. Trackers get `metrics` and `event` here;
    their `start` and `close` are the caller's. `observers` is pluggy's `pm.hook`, of which the loop calls
    `miles_on_step`, `miles_on_weights` and `miles_on_checkpoint`.
    """

    policies: Sequence[PolicySetup]
    ledger: Ledger
    sampler: Sampler
    publisher: Publisher | None
    checkpoint: Checkpoint | None
    steps: int
    stop: Stop
    checkpoint_every: int | None = None
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    trackers: Sequence[Tracker] = ()
    observers: Any = None
    rollouts: RolloutSink | None = None

    def __post_init__(self) -> None:
        self._sides = [Side(setup, self.ledger) for setup in self.policies]
        self._reports = Reports(self.trackers)
        self._deadline_s = min(setup.schedule.stall_deadline_s for setup in self.policies)
        self._round = 0
        self._saved = -1
        self._closing = False

    async def run(self) -> RunResult:
        """Drive the run to its end or to a stop request.

        Raises the first error of any side, after the other sides were cancelled: `DeadlineError`, `StarvedError`,
        `JournalError`, `CheckpointError`, or what a collaborator raised.
        """
        self._wake = asyncio.Event()
        self._failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        main = asyncio.ensure_future(self._rounds())
        grace_s = CANCEL_GRACE_S
        try:
            both: list[asyncio.Future[Any]] = [main, self._failure]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                raise self._failure.result()
            return main.result()
        except asyncio.CancelledError:
            grace_s = 1.0  # the second Ctrl-C: what is journalled is safe
            raise
        finally:
            await self._cleanup(main, grace_s)

    # --- the run, round by round -------------------------------------------------------------------------------------

    async def _rounds(self) -> RunResult:
        self._round = self._sides[0].book.consumed // self._sides[0].setup.share
        if self.ledger.lineage:
            self._saved = self._round  # resumed from there
        for side in self._sides:
            await self._publish(side, first=True)
        evaluated = self.ledger.notes.get("evaluated") == self._round
        if self._evaluation_due(self._round) and not evaluated and not self.stop.is_set():
            await self._evaluate(self._round)
        best = False
        while self._round < self.steps and not self.stop.is_set():
            for side in self._sides:
                for _ in range(side.setup.share):
                    await self._step(side)
            done = self._round + 1
            stopping, best = self.stop.is_set(), False
            if self._evaluation_due(done) and (not stopping or done == self.steps):
                best = await self._evaluate(done)
            self._round = done
            due = self.checkpoint_every is not None and done % self.checkpoint_every == 0
            if (best or due) and not stopping and done < self.steps:
                await self._save(best)
        status = "finished" if self._round >= self.steps else "interrupted"
        await self._wind_down(status)
        if self._saved != self._round:
            await self._save(best)
        found = self.ledger.notes.get("best")
        return RunResult(status=status, step=self._round, best=(found[0], found[1]) if found else None)

    async def _step(self, side: Side) -> None:
        """One step of one policy: wait for its batch, train, account, publish, report."""
        clock = asyncio.get_running_loop().time
        name, schedule, step = side.name, side.schedule, side.book.consumed
        began = clock()
        chosen = await self._batch(side, step)
        leases = [entry.lease for entry in chosen]
        groups = self.ledger.claim(name, leases)
        if schedule.on_stale == OnStale.mask:
            groups = [mask_stale(group, step, schedule.max_staleness) for group in groups]
        values = {f"rollout/{key}": value for key, value in rollout_metrics(groups, step).items()}
        values["rollout/dropped"] = (side.dropped, side.ended)
        values["rollout/failed_episodes"] = (side.failed, 1)
        side.dropped = side.ended = side.failed = 0
        batched = clock()
        side.training = True
        self._admit(side)
        values |= await self._within(side.setup.learner.step(step, groups), f"training step {step} of policy {name!r}")
        side.training = False
        trained = clock()
        oldest = min((entry.versions[0] for entry in chosen if entry.versions), default=None)
        if oldest is not None and schedule.on_stale == OnStale.mask:
            oldest = max(oldest, step - schedule.max_staleness)
        self.ledger.trained(name, step, leases, oldest)
        side.changed |= bool(getattr(side.setup.learner, "changed", True))
        if self.rollouts is not None:
            self.rollouts.write(name, step, "train", groups, getattr(side.setup.learner, "learnt", lambda episode: {}))
        if side.demonstrations or side.book.consumed % schedule.publish_every == 0:
            await self._publish(side)
        self._admit(side)
        ended = clock()
        values["time/wait_s"] = (batched - began, 1)
        values["time/train_s"] = (trained - batched, 1)
        values["time/publish_s"] = (ended - trained, 1)
        values["time/step_s"] = (ended - began, 1)
        values["time/tokens_per_s"] = (values["rollout/tokens"][0], ended - began)
        self._reports.metrics(step, values, name)
        self._observed(f"step {step}", "miles_on_step", policy=name, step=step, metrics=values)

    # --- sampling ----------------------------------------------------------------------------------------------------

    def _admit(self, side: Side) -> None:
        """Drop what grew too old, and start every lease that the bound allows now."""
        if self._closing or side.book.published < 0:
            return
        self._evict(side)
        rounds = self._round + 1 if self.stop.is_set() else self.steps
        bound = limit(side.schedule, side.book.published, rounds * side.setup.share)
        while (slot := self.ledger.next_slot(side.name)) < bound:
            position = self.ledger.next_position(side.name, slot)
            env, task, attempt = side.setup.tasks.task(position)
            lease = self.ledger.lease(
                side.name, slot=slot, position=position, env=env, task=task, attempt=attempt, split="train"
            )
            job = self._sample(side, lease, side.schedule.group_size, side.setup.sampling, partial(self._accept, side))
            side.tasks[lease.id] = asyncio.ensure_future(job)

    async def _sample(self, side: Side, lease: Lease, size: int, sampling: Sampling | None, accept: Accept) -> None:
        """One lease from start to a finished group; never raises, errors go to `_fail`."""
        try:
            group = await self.sampler.run(lease, group_size=size, sampling=sampling, split=lease.split)
            if not self._closing:
                check_versions(group, side.published, lease.started_version)
                accept(lease, group)
        except asyncio.CancelledError:
            if not self._closing:
                self._fail(cancelled(f"lease {lease.id}"))
        except Exception as error:
            self._fail(error)
        finally:
            side.tasks.pop(lease.id, None)
            self._wake.set()

    def _accept(self, side: Side, lease: Lease, group: Group) -> None:
        """Journal a finished group, or drop it and start its replacement."""
        side.ended += 1
        side.failed += self._tell_failed(side, group)
        kept, why = fit_group(group, side.schedule)
        for name, check in side.setup.filters.items():
            if kept is None:
                break
            with blamed(f"filter {name!r} failed on group {group.id!r}", StoppedError, GO_ON):
                reason = check(kept)
            if reason is not None:
                kept, why = None, f"filter {name}: {reason}"
        if kept is None:
            side.dropped += 1
            versions = versions_of(group)
            self.ledger.drop(lease, why, newest=versions[1] if versions else None)
            self._reports.event("lease_dropped", policy=side.name, slot=lease.slot, task=lease.task.id, why=why)
            side.check_starved(lease.slot, self.ledger.reasons(side.name, lease.slot))
            self._admit(side)
            return
        self.ledger.finish(lease, kept)
        rewards = [e.reward for e in kept.episodes if e.reward is not None]
        groups, step = side.schedule.groups_per_step, side.next_step()
        waiting = self.ledger.waiting(side.name)
        own = [o for o in waiting if side.schedule.order == "ready" or o.lease.slot // groups == step]
        self._reports.event(
            "group_finished",
            policy=side.name,
            step=step,
            slot=lease.slot,
            task=lease.task.id,
            done=min(len(own), groups),
            of=groups,
            reward=sum(rewards) / len(rewards) if rewards else None,
            tokens=sum([sampled(t) for e in kept.episodes for t in e.trajectories]),
        )

    def _tell_failed(self, side: Side, group: Group, **more: Any) -> int:
        """Report the failed episodes of a group; how many."""
        failed = failed_episodes(group)
        for episode in failed:
            self._reports.event("episode_failed", policy=side.name, episode=episode.id, why=episode.error, **more)
        return len(failed)

    def _evict(self, side: Side) -> None:
        """Take out what no step can consume any more under the lag rule; its slot is free at once."""
        schedule = side.schedule
        for entry in self.ledger.waiting(side.name):
            lease = entry.lease
            own = lease.slot // schedule.groups_per_step
            step = own if schedule.order == "slot" else side.next_step()
            if not is_stale(entry.versions, step, schedule):
                continue
            assert entry.group is not None and entry.versions is not None
            tokens = [sampled(t) for e in entry.group.episodes for t in e.trajectories]
            side.dropped += 1
            if schedule.on_stale == OnStale.retry:
                self.ledger.give_back(lease, "stale")
                side.retries[lease.slot] += 1
                side.check_starved(lease.slot, Counter({"stale": side.retries[lease.slot]}))
            else:
                self.ledger.drop(lease, "stale", newest=entry.versions[1])
            self._reports.event(
                "lease_stale",
                policy=side.name,
                slot=lease.slot,
                task=lease.task.id,
                then=str(schedule.on_stale),
                lag=step - entry.versions[0],
                longest=max(tokens, default=0),
            )

    async def _batch(self, side: Side, step: int) -> list[Open]:
        """The groups of `step`, in slot order, once they are there."""
        while True:
            self._wake.clear()
            self._admit(side)
            chosen = side.choose(self.ledger.waiting(side.name), step)
            if chosen is not None:
                return chosen
            missing = self.ledger.in_flight(side.name)
            if not missing:
                raise LedgerError(
                    f"step {step} of policy {side.name!r} can never be filled: nothing is in flight and no lease may "
                    f"start (next slot {self.ledger.next_slot(side.name)}, published {side.book.published})",
                    fix="report this: the admission rule is broken",
                )
            first = ", ".join(f"{lease.task.id} (slot {lease.slot})" for lease in missing[:3])
            await self._within(self._wake.wait(), f"a group for step {step} of policy {side.name!r}, first {first}")

    # --- publication, evaluation, checkpoints ------------------------------------------------------------------------

    async def _publish(self, side: Side, *, first: bool = False, engines: bool = False) -> None:
        """Publish the consumed steps as a version. Policies that learn from demonstrations reach engines only when
        these are about to evaluate (`engines`)."""
        version = Version(policy=side.name, lineage=self.ledger.lineage, number=side.book.consumed)
        side.published.add(version)
        receipts: Mapping[str, Any] = {}
        changed = side.changed or first
        if self.publisher is not None and (engines or not side.demonstrations):
            receipts = await self._within(self.publisher.publish(version, changed), f"publishing {version}")
            side.served, side.changed = version.number, False
        self.ledger.publish(version, receipts, changed)
        if receipts:
            told = {"policy": side.name, "version": str(version), "changed": changed, "engines": sorted(receipts)}
            self._reports.event("published", step=version.number, **told)
            self._observed(str(version), "miles_on_weights", version=version, receipts=receipts)
        self._admit(side)

    def _evaluation_due(self, done: int) -> bool:
        every = self.evaluation.every
        return every is not None and (done % every == 0 or done == self.steps)

    async def _evaluate(self, done: int) -> bool:
        """Evaluate every policy that can be; whether this is the best so far (mean reward over policies, or -loss)."""
        every = self.evaluation.every or 1
        attempt = done // every + (1 if done % every else 0)
        values: list[float] = []
        for side in self._sides:
            setup = side.setup
            if setup.evaluate is not None:
                metrics = dict(await self._within(setup.evaluate(done), f"evaluating policy {side.name!r}"))
            elif setup.eval_sampling is not None:
                if self.publisher is not None and side.served != side.book.consumed:
                    await self._publish(side, engines=True)
                results = await self._sample_evaluation(side, done, attempt, setup.eval_sampling)
                if not results:
                    continue
                metrics = {f"eval/{key}": value for key, value in evaluation_metrics(results).items()}
                if self.rollouts is not None:
                    self.rollouts.write(side.name, done, "eval", [group for _, group in results])
            else:
                continue
            self._reports.metrics(done, metrics, side.name)
            for key, sign in (("eval/reward", 1), ("eval/loss", -1)):
                if key in metrics and metrics[key][1]:
                    values.append(sign * metrics[key][0] / metrics[key][1])
                    break
        self.ledger.notes["evaluated"] = done
        if not values:
            return False
        value = sum(values) / len(values)
        best = self.ledger.notes.get("best")
        if done == 0 or (best is not None and value < best[1]):
            return False  # before the first step there is no checkpoint that could be the best
        self.ledger.notes["best"] = [done, value]
        return True

    async def _sample_evaluation(
        self, side: Side, done: int, attempt: int, sampling: Sampling
    ) -> list[tuple[str, Group]]:
        groups: dict[str, Group] = {}

        def accept(lease: Lease, group: Group) -> None:
            groups[lease.id] = group
            self.ledger.evaluated(lease, done)
            self._tell_failed(side, group, evaluation=done)
            self._reports.event("evaluating", policy=side.name, step=done, done=len(groups), of=len(leases))

        leases = [
            self.ledger.lease(side.name, slot=-1, position=index, env=env, task=task, attempt=attempt, split="eval")
            for index, (env, task) in enumerate(side.setup.tasks.evaluation(self.evaluation.tasks))
        ]
        for lease in leases:
            side.tasks[lease.id] = asyncio.ensure_future(self._sample(side, lease, 1, sampling, accept))
        while len(groups) < len(leases):
            self._wake.clear()
            missing = len(leases) - len(groups)
            await self._within(self._wake.wait(), f"evaluating {missing} tasks of policy {side.name!r}")
        return [(lease.env, groups[lease.id]) for lease in leases]

    async def _save(self, best: bool) -> None:
        if self.checkpoint is None:
            return
        saved = f"the checkpoint of step {self._round}"
        folder = await self._within(self.checkpoint.save(self._round, self.ledger.snapshot(), best=best), saved)
        self._saved = self._round
        self._reports.event("checkpoint", step=self._round, best=best, folder=str(folder))
        self._observed(saved, "miles_on_checkpoint", step=self._round, folder=folder)

    def _observed(self, what: str, hook: str, **fields: Any) -> None:
        if self.observers is not None:
            with blamed(f"an observer of {what} failed", StoppedError, GO_ON):
                getattr(self.observers, hook)(**fields)

    # --- ends and errors ---------------------------------------------------------------------------------------------

    async def _within(self, awaited: Awaitable[T], what: str) -> T:
        """Wait for one thing, no longer than the stall deadline."""
        return await within(awaited, what, self._deadline_s)

    def _fail(self, error: Exception) -> None:
        """Remember the first error of any side; `run` cancels the others and raises it. What is abandoned at the end
        of a run may fail as it likes."""
        if not self._closing and not self._failure.done():
            self._failure.set_result(error)

    async def _wind_down(self, why: str) -> None:
        """Give back what is in flight; and where the run is finished, what waits too."""
        self._closing = True
        for side in self._sides:
            if side.tasks:
                aborting = self.sampler.abort(list(side.tasks))
                with suppress(Exception):  # what is abandoned may fail as it likes; the step is saved
                    await self._within(aborting, f"aborting what policy {side.name!r} still samples")
            await cancel(side.tasks.values())
            for lease in self.ledger.in_flight(side.name):
                self.ledger.give_back(lease, f"run {why}")
            for entry in self.ledger.waiting(side.name) if why == "finished" else ():
                self.ledger.give_back(entry.lease, f"run {why}")

    async def _cleanup(self, main: asyncio.Future[Any], grace_s: float) -> None:
        """Cancel whatever still runs and write down what was given back; never raises, never waits long."""
        self._closing = True
        await cancel([main, *(task for side in self._sides for task in side.tasks.values())], grace_s)
        self._failure.cancel()
        journal = self.ledger.journal
        with suppress(StoppedError):  # where the journal takes no more, a resume returns them
            for side in self._sides if journal is None or not journal.broken else ():
                for lease in self.ledger.in_flight(side.name):
                    self.ledger.give_back(lease, "run stopped")
