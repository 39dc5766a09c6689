"""The controller of one run: open, drive, close.

`Controller.open` builds engines and trainer from what `prepare` checked, still without touching the disk; only then is
the run directory made. `Controller.run` hands everything to the one loop (`schedule.Loop`).
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.columns import collate
from miles_core.contracts.launcher import WorkerSpec
from miles_core.contracts.learning import Output
from miles_core.errors import (
    BackendError,
    CheckpointError,
    CombinationError,
    MilesError,
    PluginLoadError,
    TrackerError,
    blamed,
    clause,
)
from miles_core.feed import TaskFeed
from miles_core.learner import Learner
from miles_core.pool import Pool
from miles_core.prepare import Prepared, build_renderer
from miles_core.provider import Place
from miles_core.publish import Publisher, Publishers
from miles_core.records import Group, Metric, Sampling, Task, group_id
from miles_core.rollouts import write_samples
from miles_core.sampler import RemoteSampler, Sampler, SamplerEndpoint, SamplingPolicy, demonstrations
from miles_core.schedule import Loop, PolicySetup, RunResult
from miles_core.wiring import Wiring, check_roles, column_specs, sources_from_plain, sources_to_plain, wire

if TYPE_CHECKING:
    from miles_core.columns import ColumnSpec
    from miles_core.config.schema import Policy, RunFile
    from miles_core.contracts.engine import Engine
    from miles_core.contracts.launcher import Tracker, Workers
    from miles_core.contracts.learning import UpdateResult
    from miles_core.ledger import Ledger
    from miles_core.records import Array
    from miles_core.run import RunDir
    from miles_core.schedule import Stop
    from miles_core.wiring import Sources

CALL_TIMEOUT_S = 7200.0  # one score, update or save of the trainer
START_TIMEOUT_S = 1800.0
CLOSE_TIMEOUT_S = 30.0  # one part; what hangs is left behind
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
        logprobs = (await self.trainer.score(batch, (Output(name="logprobs"),)))["proximal_logprobs"]
        return {"eval/loss": (-float(logprobs[batch.kept].sum(dtype="float64")), float(batch.kept.sum()))}


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
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        if best:
            self.run.point_best(step)
        return done.folder


@dataclass
class _Rollouts:
    """Readable samples, decoded by the policy's renderer."""

    folder: Path
    renderers: Mapping[str, Any]

    def write(self, policy: str, step: int, split: str, groups: Sequence[Group]) -> None:
        with blamed(f"samples of step {step} could not be written to {self.folder}", TrackerError, GO_ON):
            write_samples(self.folder, split, step, groups, self.renderers[policy].text)


@dataclass
class Controller:
    """Everything of one run in the controller's process. Make one with `open`, close it with `close`."""

    prepared: Prepared
    launcher: Any
    trainer: Workers
    learners: Mapping[str, Learner]
    pool: Pool | None
    publishers: Publishers | None
    sampler: Sampler | RemoteSampler
    _closers: list[Any] = field(default_factory=list)

    @staticmethod
    async def open(prepared: Prepared, on_event: Callable[[str, Mapping[str, Any]], None]) -> Controller:
        """Start trainer and engines and connect them; nothing is written to disk."""
        wiring, run = prepared.wiring, prepared.wiring.run
        closers: list[Any] = []
        try:
            launcher = wiring.build(run.launcher, Place.CONTROLLER)
            closers.append(launcher)
            payload = {
                "tree": run.tree,
                "lock": prepared.lock,
                "run_dir": str(wiring.run_dir),
                "sources": sources_to_plain(prepared.sources),
            }
            trainer = await launcher.start(
                WorkerSpec(
                    place=Place.TRAINER,
                    factory="miles_core.wiring:trainer_worker",
                    count=run.backend.core.ranks,
                    payload=payload,
                    threads=run.run.threads,
                    gpus=run.backend.core.gpus_per_rank,
                )
            )
            learners = {p.name: await _learner(prepared, p, trainer) for p in run.policies.values()}
            engines = build_engines(wiring, prepared.sources, prepared.renderers, Place.CONTROLLER)
            pool = Pool(engines, on_event=on_event) if engines else None
            if pool is not None:
                closers.append(pool)
                await pool.start(START_TIMEOUT_S)
            sampler = await _sampler(prepared, launcher, pool, payload)
            closers.append(sampler)
            publishers = None
            if pool is not None and run.sync is not None:
                follow = sampler.follow if isinstance(sampler, RemoteSampler) else None
                publishers = _publishers(prepared, trainer, pool, on_event, follow)
                closers.append(publishers)
            return Controller(prepared, launcher, trainer, learners, pool, publishers, sampler, closers)
        except BaseException as error:
            with suppress(Exception):  # what failed first is the better news
                await _close(closers)
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
            rollouts=_Rollouts(run_dir.path / "rollouts", self.prepared.renderers),
        )
        return await loop.run()

    def _setup(self, policy: Policy) -> PolicySetup:
        run, name = self.prepared.wiring.run, policy.name
        sampling = sampling_of(run)
        shown, tasks = policy.algorithm.keys.episodes == "demonstrations", self._tasks(policy)
        evaluation = None
        if sampling is not None and run.eval.every is not None:
            evaluation = Sampling(
                max_new_tokens=sampling.max_new_tokens,
                temperature=run.eval.temperature,
                stop=sampling.stop,
            )
        return PolicySetup(
            name=name,
            schedule=policy.schedule,
            tasks=tasks,
            learner=self.learners[name],
            share=policy.share,
            filters=self.prepared.filters[name],
            sampling=None if shown else sampling,
            eval_sampling=evaluation,
            evaluate=self._loss(policy, tasks) if shown and sampling is None and run.eval.every is not None else None,
        )

    def _loss(self, policy: Policy, tasks: TaskFeed) -> _EvaluationLoss:
        prepared, wiring = self.prepared, self.prepared.wiring
        sampling = _sampling_policies(wiring, prepared.renderers, prepared.envs, prepared.columns)[policy.name]
        return _EvaluationLoss(sampling, tasks.evaluation(wiring.run.eval.tasks), _Trainer(self.trainer))

    def _tasks(self, policy: Policy) -> TaskFeed:
        envs = self.prepared.envs[policy.name]
        evaluated = {key: env for key, env in envs.items() if "eval" in env.task_splits}
        return TaskFeed(
            {key: env.tasks("train") for key, env in envs.items()},
            {key: env.tasks("eval") for key, env in evaluated.items()},
            {key: part.core.weight for key, part in policy.envs.items()},
        )

    async def close(self) -> None:
        await _close(self._closers)


async def _close(closers: list[Any]) -> None:
    """Close in reverse order; every one is closed, the first failure surfaces."""
    errors = []
    while closers:
        try:
            await asyncio.wait_for(closers.pop().close(), CLOSE_TIMEOUT_S)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


async def _learner(prepared: Prepared, policy: Policy, trainer: Workers) -> Learner:
    terms = (await trainer.call("declare", policy.name, timeout_s=START_TIMEOUT_S))[0]
    stages = prepared.stages[policy.name]
    check_roles(policy, terms, stages)
    run = prepared.wiring.run
    return Learner(
        policy,
        run.run.seed,
        stages,
        terms,
        _Trainer(trainer),
        prepared.columns[policy.name],
        max_new_tokens=None if not run.engines else sampling_of(run).max_new_tokens,  # type: ignore[union-attr]
    )


def sampling_of(run: RunFile) -> Sampling | None:
    """Sampling parameters of training: those of the first engine section; `None` where nothing samples."""
    for part in run.engines.values():
        keys = part.core
        return Sampling(
            max_new_tokens=keys.max_new_tokens,
            temperature=keys.temperature,
            top_p=keys.top_p,
            top_k=keys.top_k or 0,
            stop=tuple(keys.stop),
        )
    return None


def build_engines(
    wiring: Wiring,
    sources: Sources,
    renderers: Mapping[str, Any],
    place: Place,
    addresses: Mapping[str, str] | None = None,
) -> dict[str, Engine]:
    """Engines (or their clients, in samplers) by name. An engine that serves several policies offers `policies`."""
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
                model=sources[first]["actor"],
                renderer=renderers[first],
                address=(addresses or {}).get(name, ""),
            )
    return engines


def _publishers(
    prepared: Prepared,
    trainer: Workers,
    pool: Pool,
    on_event: Callable[[str, Mapping[str, Any]], None],
    follow: Callable[[Mapping[str, Any]], Any] | None,
) -> Publishers:
    wiring, run = prepared.wiring, prepared.wiring.run
    assert run.sync is not None
    publishers = {}
    for policy in run.policies.values():
        name = policy.name
        links = {
            key: wiring.build(run.sync, Place.ENGINE, policy=name, engine=engine, extensions=prepared.extensions)
            for key, engine in pool.engines.items()
        }
        publishers[name] = Publisher(
            pool,
            wiring.build(run.sync, Place.CONTROLLER, policy=name),
            links,
            trainer,
            run.sync.core,
            policy.schedule.on_update.value,
            policy=name,
            on_event=on_event,
            on_serving=follow,
        )
    return Publishers(publishers)


def _sampling_policies(
    wiring: Wiring,
    renderers: Mapping[str, Any],
    envs: Mapping[str, Mapping[str, Any]],
    columns: Mapping[str, Mapping[str, ColumnSpec]],
) -> dict[str, SamplingPolicy]:
    sampling = sampling_of(wiring.run)
    cut = sampling is not None and (sampling.top_p < 1 or sampling.top_k > 0)
    return {
        p.name: SamplingPolicy(
            name=p.name,
            renderer=renderers[p.name],
            envs=envs[p.name],
            want=frozenset({"keep_ids"} if cut else ()),
            columns=columns[p.name],
            deadline_s=p.schedule.episode_deadline_s,
            rewarded=p.algorithm.keys.episodes == "sampled",
        )
        for p in wiring.run.policies.values()
    }


async def _sampler(
    prepared: Prepared, launcher: Any, pool: Pool | None, payload: Mapping[str, Any]
) -> Sampler | RemoteSampler:
    wiring, run = prepared.wiring, prepared.wiring.run
    processes = max(p.schedule.samplers for p in run.policies.values())
    if processes == 0 or pool is None:
        return Sampler(
            _sampling_policies(wiring, prepared.renderers, prepared.envs, prepared.columns),
            None if pool is None else pool.generate,
            run_seed=run.run.seed,
            scorers={key: wiring.build(part, Place.CONTROLLER) for key, part in run.scorers.items()},
            extensions=prepared.extensions,
            abort_requests=None if pool is None else pool.abort,
        )
    workers = await launcher.start(
        WorkerSpec(
            place=Place.SAMPLER,
            factory="miles_core.controller:sampler_worker",
            count=processes,
            payload={**payload, "engines": engine_addresses(pool)},
            threads=run.run.threads,
        )
    )
    await workers.call("start", timeout_s=START_TIMEOUT_S)
    return RemoteSampler(workers, deadline_s=max(p.schedule.episode_deadline_s for p in run.policies.values()))


def engine_addresses(pool: Pool) -> dict[str, str]:
    """Where each engine can be reached from another process, for engines that say so (`address`)."""
    return {name: str(address) for name, engine in pool.engines.items() if (address := getattr(engine, "address", ""))}


def sampler_worker(
    *,
    rank: int,
    count: int,
    cancelled: Callable[[], bool],
    tree: Mapping[str, Any],
    lock: Mapping[str, Any],
    run_dir: str,
    sources: Mapping[str, Any],
    engines: Mapping[str, str],
) -> SamplerEndpoint:
    """Factory named in the samplers' `WorkerSpec`: builds engine clients, environments and scorers of its own."""
    wiring = wire(tree, lock, run_dir)
    run, resolved = wiring.run, sources_from_plain(sources)
    renderers = {
        p.name: build_renderer(wiring, p, resolved[p.name]["actor"], Place.SAMPLER) for p in run.policies.values()
    }
    envs = {
        p.name: {
            key: wiring.build(part, Place.SAMPLER, policy=p.name, renderer=renderers[p.name])
            for key, part in p.envs.items()
        }
        for p in run.policies.values()
    }
    extensions = wiring.extensions(Place.SAMPLER)
    columns = {p.name: column_specs(wiring.stages(p), extensions) for p in run.policies.values()}
    pool = Pool(build_engines(wiring, resolved, renderers, Place.SAMPLER, engines))
    sampler = Sampler(
        _sampling_policies(wiring, renderers, envs, columns),
        pool.generate,
        run_seed=run.run.seed,
        scorers={key: wiring.build(part, Place.SAMPLER) for key, part in run.scorers.items()},
        extensions=extensions,
        abort_requests=pool.abort,
    )
    return SamplerEndpoint(sampler, pool)


def describe_failure(error: BaseException) -> str:
    """The error's code, or its class name: the status of a run that it ended."""
    return error.code if isinstance(error, MilesError) else type(error).__name__
