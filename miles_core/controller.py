"""The controller of one run: open, drive, close.

`Controller.open` builds engines and trainer from what `prepare` checked, still without touching the disk; only then is
the run directory made. `Controller.run` hands everything to the one loop (`schedule.Loop`).
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from miles_core.columns import collate
from miles_core.config.schema import Policy
from miles_core.contracts.engine import Engine
from miles_core.contracts.launcher import Tracker, Workers, WorkerSpec
from miles_core.contracts.learning import Output
from miles_core.errors import CheckpointError, PluginLoadError, blamed
from miles_core.feed import TaskFeed
from miles_core.judge import Judge
from miles_core.learner import Learner
from miles_core.ledger import Ledger
from miles_core.passes import CALL_TIMEOUT_S, Trainer, with_finite
from miles_core.pool import Pool
from miles_core.prepare import Parts, Prepared, check_lengths, check_outputs, sampling_of
from miles_core.provider import Place
from miles_core.publish import Publisher, Publishers
from miles_core.records import Group, Metric, Version, group_id
from miles_core.remote import RemoteSampler, SamplerEndpoint
from miles_core.rollouts import Rollouts
from miles_core.run import RunDir
from miles_core.sampler import Sampler, SamplingPolicy, demonstrations
from miles_core.schedule import Loop, PolicySetup, RunResult, Stop
from miles_core.waits import GO_ON, close_all
from miles_core.wiring import Wiring, wire

START_TIMEOUT_S = 1800.0
SHOW = "see where with --traceback; the plugin that raised it is there"

OnEvent = Callable[[str, Mapping[str, Any]], None]


@dataclass
class _Checkpoints:
    """Writes a consistent cut: trainer state, then the ledger, then the commit marker."""

    run: RunDir
    workers: Workers

    async def save(self, step: int, ledger: Mapping[str, Any], *, best: bool) -> Path:
        draft = self.run.begin_checkpoint(step)
        try:
            what = f"the trainer could not save step {step}; earlier checkpoints are valid"
            with blamed(what, CheckpointError, GO_ON):
                await self.workers.call("save", draft / "trainer", timeout_s=CALL_TIMEOUT_S)
            done = await asyncio.to_thread(self.run.commit_checkpoint, draft, step, ledger)
        except Exception:  # not where this is cancelled: threads still write. A draft never counts
            shutil.rmtree(draft, ignore_errors=True)
            raise
        if best:
            self.run.point_best(step)
        return done.folder


@dataclass
class Controller:
    """Everything of one run in the controller's process. Make one with `open`, close it with `close`."""

    prepared: Prepared
    trainer: Workers
    policies: Sequence[PolicySetup]
    publishers: Publishers | None
    sampler: Sampler | RemoteSampler

    @staticmethod
    async def open(prepared: Prepared, on_event: OnEvent) -> Controller:
        """Start trainer and engines and connect them; nothing is written to disk."""
        wiring, run, parts = prepared.wiring, prepared.wiring.run, prepared.parts
        try:
            with blamed("trainer and engines cannot be started", PluginLoadError, SHOW):
                launcher = wiring.build(run.launcher, Place.CONTROLLER)
                ranks, gpus = run.backend.core.ranks, run.backend.core.gpus_per_rank
                spec = _spec(prepared, Place.TRAINER, "miles_core.wiring:trainer_worker", ranks, gpus)
                trainer = await launcher.start(spec)
                policies = [await _policy(prepared, policy, Trainer(trainer)) for policy in run.policies.values()]
                pool = _pool(wiring, parts, Place.CONTROLLER, on_event, {})
                await pool.start(START_TIMEOUT_S)
                check_lengths(wiring, parts, pool.engines.values())
                remote = await _remote_sampler(prepared, launcher, pool)
                sampler = remote or _sampler(wiring, parts, pool)
                publishers = _publishers(prepared, trainer, pool, on_event, remote) if run.engines else None
            return Controller(prepared, trainer, policies, publishers, sampler)
        except BaseException:
            with suppress(Exception):  # what failed first is the better news
                await close_all(wiring.closers())
            raise

    async def run(self, run_dir: RunDir, ledger: Ledger, trackers: Sequence[Tracker], stop: Stop) -> RunResult:
        """Drive the loop to its end or to a stop request. Raises the first error of any side."""
        run = self.prepared.wiring.run
        texts = {name: policy.renderer.text for name, policy in self.prepared.parts.sampling.items()}
        loop = Loop(
            policies=self.policies,
            ledger=ledger,
            sampler=self.sampler,
            publisher=self.publishers,
            checkpoint=_Checkpoints(run_dir, self.trainer),
            steps=run.run.steps,
            stop=stop,
            checkpoint_every=run.run.checkpoint_every,
            evaluation=run.eval,
            trackers=trackers,
            observers=self.prepared.wiring.catalogue.pm.hook,
            rollouts=Rollouts(run_dir.path / "rollouts", texts),
        )
        return await loop.run()

    async def close(self) -> None:
        await close_all([self.sampler.close, *self.prepared.wiring.closers()])


def _spec(prepared: Prepared, place: Place, factory: str, count: int, gpus: float = 0, **payload: Any) -> WorkerSpec:
    """How `count` processes of the run come to be; `payload` is what the factory gets beside the wiring."""
    payload |= prepared.wiring.payload(prepared.lock)
    threads = prepared.wiring.run.run.threads
    return WorkerSpec(place=place, factory=factory, count=count, payload=payload, threads=threads, gpus=gpus)


async def _judges(prepared: Prepared, policy: Policy) -> dict[str, Judge]:
    """Roles of the policy that engines hold, by the engine's name."""
    wiring, judges = prepared.wiring, dict[str, Judge]()
    for name, role in policy.roles.items():
        if part := wiring.run.judges.get(role.engine):
            source = wiring.sources[policy.name][name]
            renderer = prepared.parts.sampling[policy.name].renderer
            engine = wiring.build(part, Place.CONTROLLER, policy=policy.name, model=source, renderer=renderer)
            version = Version(policy=policy.name, lineage=0, number=0)
            judges[part.name] = Judge(engine, name, source, version, policy.schedule.stall_deadline_s)
            await judges[part.name].start()
    return judges


async def _policy(prepared: Prepared, policy: Policy, trainer: Trainer) -> PolicySetup:
    """One policy with its learner and its tasks, as the loop needs it."""
    run, parts, part = prepared.wiring.run, prepared.parts, prepared.parts.sampling[policy.name]
    terms = (await trainer.workers.call("declare", policy.name, timeout_s=START_TIMEOUT_S))[0]
    judges, sampling = await _judges(prepared, policy), sampling_of(run)
    learner = Learner(
        policy,
        run.run.seed,
        parts.stages[policy.name],
        terms,
        trainer,
        part.columns,
        max_new_tokens=None if sampling is None else sampling.max_new_tokens,
        scorers={**parts.scorers, **judges},
    )
    check_outputs(
        prepared.wiring.sources[policy.name], [*learner.outputs, *(o for term in terms for o in term.outputs)]
    )
    for judge in judges.values():
        judge.k = max((output.k for output in learner.outputs if output.role == judge.role), default=0)
    tasks = TaskFeed(
        {key: env.tasks("train") for key, env in part.envs.items()},
        {key: env.tasks("eval") for key, env in part.envs.items() if "eval" in env.task_splits},
        {key: env.core.weight for key, env in policy.envs.items()},
    )
    eval_sampling = evaluate = None
    if run.eval.every is not None and sampling is not None:
        eval_sampling = replace(sampling, temperature=run.eval.temperature, top_p=1.0, top_k=0)
    elif run.eval.every is not None:
        evaluate = partial(_evaluation_loss, part, tasks, run.eval.tasks, trainer)
    return PolicySetup(
        name=policy.name,
        schedule=policy.schedule,
        tasks=tasks,
        learner=learner,
        share=policy.share,
        filters=prepared.filters[policy.name],
        sampling=sampling if policy.algorithm.keys.episodes == "sampled" else None,
        eval_sampling=eval_sampling,
        evaluate=evaluate,
    )


async def _evaluation_loss(
    policy: SamplingPolicy, tasks: TaskFeed, count: int, trainer: Trainer, step: int
) -> Mapping[str, Metric]:
    """`eval/loss` of a policy that learns from demonstrations without an engine: mean -log π over their tokens."""
    groups = [
        Group(
            id=group_id(task.id, 0),
            policy=policy.name,
            slot=-1,
            attempt=0,
            task=task,
            episodes=demonstrations(policy, task, 0, 1),
        )
        for _, task in tasks.evaluation(count)
    ]
    batch = collate(policy.name, step, groups, policy.columns)
    asked = Output(name="logprobs")
    scored = await trainer.score(batch, (asked,))
    batch = with_finite(batch, {asked.column: scored[asked.column]}, (), "the evaluation")
    logprobs = batch.columns[asked.column][batch.kept]
    return {"eval/loss": (-float(logprobs.sum(dtype="float64")), float(len(logprobs)))}


def _pool(wiring: Wiring, parts: Parts, place: Place, on_event: OnEvent | None, addresses: Mapping[str, str]) -> Pool:
    """A pool of the engines (of their clients, in samplers). One that serves several policies offers `policies`."""
    run = wiring.run
    first = next(iter(run.policies))
    engines: dict[str, Engine] = {}
    for part in run.engines.values():
        for index in range(part.core.count):
            name = part.name if part.core.count == 1 else f"{part.name}-{index}"
            engines[name] = wiring.build(
                replace(part, name=name),
                place,
                policy=first,
                model=wiring.sources[first]["actor"],
                renderer=parts.sampling[first].renderer,
                address=addresses.get(name, ""),
            )
    return Pool(engines, on_event=on_event)


def _publishers(
    prepared: Prepared, trainer: Workers, pool: Pool, on_event: OnEvent, remote: RemoteSampler | None
) -> Publishers:
    wiring, sync = prepared.wiring, prepared.wiring.run.sync
    assert sync is not None
    publishers = {}
    for name, policy in wiring.run.policies.items():
        links = {
            key: wiring.build(sync, Place.ENGINE, policy=name, engine=engine, extensions=prepared.parts.extensions)
            for key, engine in pool.engines.items()
        }
        publishers[name] = Publisher(
            pool,
            wiring.build(sync, Place.CONTROLLER, policy=name),
            links,
            trainer,
            sync.core,
            policy.schedule.on_update.value,
            policy=name,
            on_event=on_event,
            on_serving=remote.follow if remote else Publisher.on_serving,
        )
    return Publishers(publishers)


def _sampler(wiring: Wiring, parts: Parts, pool: Pool) -> Sampler:
    return Sampler(
        parts.sampling,
        pool.generate,
        run_seed=wiring.run.run.seed,
        scorers=parts.scorers,
        extensions=parts.extensions,
        abort_requests=pool.abort,
        generate_many=pool.generate_many,
    )


async def _remote_sampler(prepared: Prepared, launcher: Any, pool: Pool) -> RemoteSampler | None:
    """Sampler processes, where a policy asks for them. They reach the engines that have an `address` of their own."""
    schedules = [policy.schedule for policy in prepared.wiring.run.policies.values()]
    processes = max(schedule.samplers for schedule in schedules)
    if processes == 0 or not pool.engines:
        return None
    addresses = {name: str(getattr(engine, "address", "")) for name, engine in pool.engines.items()}
    factory = "miles_core.controller:sampler_worker"
    workers = await launcher.start(_spec(prepared, Place.SAMPLER, factory, processes, engines=addresses))
    await workers.call("start", timeout_s=START_TIMEOUT_S)
    return RemoteSampler(workers, deadline_s=max(schedule.episode_deadline_s for schedule in schedules))


def sampler_worker(
    *, rank: int, count: int, cancelled: Callable[[], bool], engines: Mapping[str, str], **payload: Any
) -> SamplerEndpoint:
    """Factory named in the samplers' `WorkerSpec`: builds engine clients, environments and scorers of its own."""
    wiring = wire(**payload)
    try:
        parts = Parts.build(wiring, Place.SAMPLER)
        pool = _pool(wiring, parts, Place.SAMPLER, None, engines)
        return SamplerEndpoint(_sampler(wiring, parts, pool), pool, wiring.closers())
    except BaseException:
        with suppress(Exception), ThreadPoolExecutor(1) as thread:  # a loop may be running in this one
            thread.submit(asyncio.run, close_all(wiring.closers())).result()
        raise
