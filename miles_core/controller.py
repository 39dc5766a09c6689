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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.columns import collate
from miles_core.contracts.launcher import Tracker, Workers, WorkerSpec
from miles_core.contracts.learning import Output, UpdateResult
from miles_core.errors import (
    BackendError,
    CheckpointError,
    CombinationError,
    MilesError,
    PluginLoadError,
    blamed,
    clause,
)
from miles_core.feed import TaskFeed
from miles_core.judge import Judge
from miles_core.learner import Learner
from miles_core.passes import with_finite
from miles_core.pool import Pool
from miles_core.prepare import Parts, Prepared, sampling_of
from miles_core.provider import Place
from miles_core.publish import Publisher, Publishers
from miles_core.records import Array, Group, Metric, Task, Version, group_id
from miles_core.rollouts import Rollouts
from miles_core.sampler import RemoteSampler, Sampler, SamplerEndpoint, SamplingPolicy, demonstrations
from miles_core.schedule import Loop, PolicySetup, RunResult, Stop
from miles_core.waits import close_all
from miles_core.wiring import Wiring, wire

if TYPE_CHECKING:
    from miles_core.config.schema import Policy, RunFile
    from miles_core.contracts.engine import Engine
    from miles_core.ledger import Ledger
    from miles_core.run import RunDir

CALL_TIMEOUT_S = 7200.0  # one score, update or save of the trainer
START_TIMEOUT_S = 1800.0
SHOW = "see where with --traceback; the plugin that raised it is there"
GO_ON = "see the cause with --traceback, mend it, then go on with --resume"


@dataclass
class _Trainer:
    """The trainers as the learner calls them: one answer from all ranks."""

    workers: Workers

    async def score(self, batch: Any, outputs: Sequence[Output]) -> Mapping[str, Array]:
        return dict((await self._call("score", batch, tuple(outputs)))[0])

    async def update(self, minibatch: Any) -> UpdateResult:
        result: UpdateResult = (await self._call("update", minibatch))[0]
        return result

    async def blend(self, policy: str, dst: str, src: str, decay: float) -> None:
        await self._call("blend", policy, dst, src, decay)

    async def _call(self, method: str, *args: Any) -> list[Any]:
        with blamed(f"the trainer failed in {method!r}", BackendError, GO_ON):
            return await self.workers.call(method, *args, timeout_s=CALL_TIMEOUT_S)


@dataclass
class _EvaluationLoss:
    """`eval/loss` of a policy that learns from demonstrations without an engine: mean -log π over their tokens."""

    sampling: SamplingPolicy
    tasks: Sequence[tuple[str, Task]]
    trainer: _Trainer

    async def __call__(self, step: int) -> Mapping[str, Metric]:
        groups = [
            Group(
                id=group_id(task.id, 0),
                policy=self.sampling.name,
                slot=-1,
                attempt=0,
                task=task,
                episodes=demonstrations(self.sampling, task, 0, 1),
            )
            for _, task in self.tasks
        ]
        batch = collate(self.sampling.name, step, groups, self.sampling.columns)
        scored = await self.trainer.score(batch, (Output(name="logprobs"),))
        column = "proximal_logprobs"
        logprobs = with_finite(batch, {column: scored[column]}, (), "the evaluation").columns[column][batch.kept]
        return {"eval/loss": (-float(logprobs.sum(dtype="float64")), float(len(logprobs)))}


@dataclass
class _Checkpoints:
    """Writes a consistent cut: trainer state, then the ledger, then the commit marker."""

    run: RunDir
    workers: Workers

    async def save(self, step: int, ledger: Mapping[str, Any], *, best: bool) -> Path:
        draft = self.run.begin_checkpoint(step)
        try:
            with blamed(
                f"the trainer could not save step {step}; earlier checkpoints are valid", CheckpointError, GO_ON
            ):
                await self.workers.call("save", str(draft / "trainer"), timeout_s=CALL_TIMEOUT_S)
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
    learners: Mapping[str, Learner]
    publishers: Publishers | None
    sampler: Sampler | RemoteSampler

    @staticmethod
    async def open(prepared: Prepared, on_event: Callable[[str, Mapping[str, Any]], None]) -> Controller:
        """Start trainer and engines and connect them; nothing is written to disk."""
        wiring, run = prepared.wiring, prepared.wiring.run
        try:
            launcher = wiring.build(run.launcher, Place.CONTROLLER)
            base = WorkerSpec(
                place=Place.TRAINER,
                factory="miles_core.wiring:trainer_worker",
                count=run.backend.core.ranks,
                payload=wiring.payload(prepared.lock),
                threads=run.run.threads,
                gpus=run.backend.core.gpus_per_rank,
            )
            trainer = await launcher.start(base)
            judges = await _judges(prepared)
            learners = {p.name: await _learner(prepared, p, trainer, judges) for p in run.policies.values()}
            pool = publishers = remote = None
            if run.engines:
                pool = _pool(wiring, prepared.parts, Place.CONTROLLER, on_event=on_event)
                await pool.start(START_TIMEOUT_S)
                remote = await _remote_sampler(run, launcher, pool, base)
            sampler = remote or _sampler(wiring, prepared.parts, Place.CONTROLLER, pool)
            if pool is not None and run.sync is not None:
                follow = None if remote is None else remote.follow
                publishers = _publishers(prepared, trainer, pool, on_event, follow)
            return Controller(prepared, trainer, learners, publishers, sampler)
        except BaseException as error:
            with suppress(Exception):  # what failed first is the better news
                await close_all(wiring.closers())
            if isinstance(error, Exception) and not isinstance(error, MilesError):
                raise PluginLoadError(f"trainer and engines cannot be started: {clause(error)}", fix=SHOW) from error
            raise

    async def run(self, run_dir: RunDir, ledger: Ledger, trackers: Sequence[Tracker], stop: Stop) -> RunResult:
        """Drive the loop to its end or to a stop request. Raises the first error of any side."""
        run = self.prepared.wiring.run
        loop = Loop(
            policies=[self._setup(policy) for policy in run.policies.values()],
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
            rollouts=Rollouts(
                run_dir.path / "rollouts", {name: p.renderer.text for name, p in self.prepared.parts.sampling.items()}
            ),
        )
        return await loop.run()

    def _setup(self, policy: Policy) -> PolicySetup:
        run, name = self.prepared.wiring.run, policy.name
        sampling = sampling_of(run)
        shown = policy.algorithm.keys.episodes == "demonstrations"
        tasks = self._tasks(policy)
        eval_sampling = evaluate = None
        if run.eval.every is not None and sampling is not None:
            eval_sampling = replace(sampling, temperature=run.eval.temperature, top_p=1.0, top_k=0)
        elif run.eval.every is not None and shown:
            held_out = tasks.evaluation(run.eval.tasks)
            evaluate = _EvaluationLoss(self.prepared.parts.sampling[name], held_out, _Trainer(self.trainer))
        return PolicySetup(
            name=name,
            schedule=policy.schedule,
            tasks=tasks,
            learner=self.learners[name],
            share=policy.share,
            filters=self.prepared.filters[name],
            sampling=None if shown else sampling,
            eval_sampling=eval_sampling,
            evaluate=evaluate,
        )

    def _tasks(self, policy: Policy) -> TaskFeed:
        envs = self.prepared.parts.sampling[policy.name].envs
        return TaskFeed(
            {key: env.tasks("train") for key, env in envs.items()},
            {key: env.tasks("eval") for key, env in envs.items() if "eval" in env.task_splits},
            {key: part.core.weight for key, part in policy.envs.items()},
        )

    async def close(self) -> None:
        await close_all([self.sampler.close, *self.prepared.wiring.closers()])


async def _judges(prepared: Prepared) -> dict[str, Judge]:
    """Roles that engines hold, by the engine's name."""
    wiring, judges = prepared.wiring, dict[str, Judge]()
    for policy in wiring.run.policies.values():
        for name, role in policy.roles.items():
            if part := wiring.run.judges.get(role.engine):
                source = wiring.sources[policy.name][name]
                renderer = prepared.parts.sampling[policy.name].renderer
                engine = wiring.build(part, Place.CONTROLLER, policy=policy.name, model=source, renderer=renderer)
                version = Version(policy=policy.name, lineage=0, number=0)
                judges[part.name] = Judge(engine, name, source, version, policy.schedule.stall_deadline_s)
                await judges[part.name].start()
    return judges


async def _learner(prepared: Prepared, policy: Policy, trainer: Workers, judges: Mapping[str, Judge]) -> Learner:
    terms = (await trainer.call("declare", policy.name, timeout_s=START_TIMEOUT_S))[0]
    run = prepared.wiring.run
    sampling = sampling_of(run)
    learner = Learner(
        policy,
        run.run.seed,
        prepared.parts.stages[policy.name],
        terms,
        _Trainer(trainer),
        prepared.parts.sampling[policy.name].columns,
        max_new_tokens=None if sampling is None else sampling.max_new_tokens,
        scorers={**prepared.parts.scorers, **judges},
    )
    for output in learner.outputs:
        if judge := judges.get(getattr(policy.roles.get(output.role), "engine", "")):
            judge.k = max(judge.k, output.k)
    return learner


def _pool(
    wiring: Wiring,
    parts: Parts,
    place: Place,
    *,
    addresses: Mapping[str, str] | None = None,
    on_event: Callable[[str, Mapping[str, Any]], None] | None = None,
) -> Pool:
    """A pool of the engines (of their clients, in samplers). One that serves several policies offers `policies`."""
    run = wiring.run
    first = next(iter(run.policies))
    engines: dict[str, Engine] = {}
    for part in run.engines.values():
        loaded = wiring.catalogue.load(part.kind, part.use)
        if len(run.policies) > 1 and "policies" not in loaded.provider.offered(part.options):
            raise CombinationError(
                f"engine {part.name!r} ({part.use}) serves one policy; the run has {list(run.policies)}",
                fix="choose an engine that offers `policies`, or train one policy a run",
            )
        for index in range(part.core.count):
            name = part.name if part.core.count == 1 else f"{part.name}-{index}"
            engines[name] = wiring.build(
                replace(part, name=name),
                place,
                policy=first,
                model=wiring.sources[first]["actor"],
                renderer=parts.sampling[first].renderer,
                address=(addresses or {}).get(name, ""),
            )
    return Pool(engines, on_event=on_event)


def _publishers(
    prepared: Prepared,
    trainer: Workers,
    pool: Pool,
    on_event: Callable[[str, Mapping[str, Any]], None],
    follow: Callable[[Mapping[str, Any]], Any] | None,
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
            on_serving=follow,
        )
    return Publishers(publishers)


def _sampler(wiring: Wiring, parts: Parts, place: Place, pool: Pool | None) -> Sampler:
    return Sampler(
        parts.sampling,
        None if pool is None else pool.generate,
        run_seed=wiring.run.run.seed,
        scorers=parts.scorers,
        extensions=parts.extensions,
        abort_requests=None if pool is None else pool.abort,
        generate_many=None if pool is None else pool.generate_many,
    )


async def _remote_sampler(run: RunFile, launcher: Any, pool: Pool, trainer: WorkerSpec) -> RemoteSampler | None:
    """Sampler processes, where a policy asks for them. They reach the engines that have an `address` of their own."""
    schedules = [policy.schedule for policy in run.policies.values()]
    processes = max(schedule.samplers for schedule in schedules)
    if processes == 0:
        return None
    addresses = {name: str(getattr(engine, "address", "")) for name, engine in pool.engines.items()}
    spec = replace(
        trainer,
        place=Place.SAMPLER,
        factory="miles_core.controller:sampler_worker",
        count=processes,
        payload={**trainer.payload, "engines": addresses},
        gpus=0,
    )
    workers = await launcher.start(spec)
    await workers.call("start", timeout_s=START_TIMEOUT_S)
    return RemoteSampler(workers, deadline_s=max(schedule.episode_deadline_s for schedule in schedules))


def sampler_worker(
    *, rank: int, count: int, cancelled: Callable[[], bool], engines: Mapping[str, str], **payload: Any
) -> SamplerEndpoint:
    """Factory named in the samplers' `WorkerSpec`: builds engine clients, environments and scorers of its own."""
    wiring = wire(**payload)
    try:
        parts = Parts.build(wiring, Place.SAMPLER)
        pool = _pool(wiring, parts, Place.SAMPLER, addresses=engines)
        return SamplerEndpoint(_sampler(wiring, parts, Place.SAMPLER, pool), pool, wiring.closers())
    except BaseException:
        with suppress(Exception), ThreadPoolExecutor(1) as thread:  # a loop may be running in this one
            thread.submit(asyncio.run, close_all(wiring.closers())).result()
        raise
