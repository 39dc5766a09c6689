"""Episodes of a lease: sessions around the pool, environments, rewards; and demonstrations as episodes.

Runs inside the controller, or in a worker process that holds engine clients of its own (`remote.py`). Promises:
every random choice comes from (run seed, policy, task, attempt, member, turn), never from arrival order; a failing
episode (an exception, a deadline, a NaN reward) is returned as failed with its reason, never lost and never trained;
what an engine or the data did wrong stops the run. Rewards are passed on, not judged.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from numbers import Real
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from miles_core.answers import plain_trajectories
from miles_core.columns import CORE_COLUMNS, ColumnSpec, validate
from miles_core.contracts.engine import Completion, Request
from miles_core.contracts.environment import EpisodeContext, MultiTurn
from miles_core.drafts import drafts, seal
from miles_core.errors import (
    DeadlineError,
    EngineError,
    InputError,
    LateDataError,
    MilesError,
    PluginContractError,
    RewardError,
)
from miles_core.records import (
    Episode,
    Finish,
    Group,
    Origin,
    Sampling,
    Score,
    Status,
    Trajectory,
    episode_id,
    group_id,
    trajectory_id,
)
from miles_core.seeds import family, generator
from miles_core.session import STANDARD_COLUMNS, EpisodeFailedError, Generate, Session
from miles_core.waits import STOPS, cancel

if TYPE_CHECKING:
    from miles_core.contracts.environment import Environment, Scorer
    from miles_core.contracts.rendering import Renderer
    from miles_core.ledger import Lease
    from miles_core.records import Array, Prompt, Task

T = TypeVar("T")

_RequestDraft, _EpisodeDraft = drafts(Request), drafts(Episode)

#: What extensions leave as it is, since trajectories and accounts say it.
_KEPT: dict[str, Callable[[Request], Any]] = {
    **{key: attrgetter(key) for key in ("id", "policy", "sampling", "seed", "resume")},
    "prompt's tokens": lambda request: isinstance(request.prompt, Mapping) and request.prompt.get("tokens"),
}
_OK, _TRUNCATED, _CUT = Status.OK, Status.TRUNCATED, Finish.LENGTH  # CPython 3.11 calls a function for each look-up


@dataclass(frozen=True, kw_only=True)
class SamplingPolicy:
    """What sampling needs of one policy.

    `want` names the engine capabilities that training needs beside `logprobs` (`keep_ids` where top_p or top_k cut the
    distribution). `columns` are all declared columns, against which trajectories are checked. With `rewarded`, an
    episode without a reward stops the run.
    """

    name: str
    renderer: Renderer
    envs: Mapping[str, Environment]
    want: frozenset[str] = frozenset()
    columns: Mapping[str, ColumnSpec] = field(default_factory=lambda: CORE_COLUMNS)
    deadline_s: float = 600.0
    rewarded: bool = False


@dataclass(kw_only=True, slots=True)
class _Shared:
    """What the episodes of one lease have in common, made once for all of them; and what runs of them."""

    policy: SamplingPolicy
    lease: Lease
    names: Sequence[str]  # of the episodes
    env: Environment
    multi_turn: bool
    sampling: Sampling
    deadline: float
    seed_of: Callable[[int, int], int]  # (member, turn)
    context: Mapping[str, Any]  # what `EpisodeContext` has for all members
    requests: set[str] = field(default_factory=set)
    tasks: list[asyncio.Task[Episode]] = field(default_factory=list)
    ended: str = ""  # why its episodes were ended from outside
    ids: Array | None = None
    texts: dict[tuple[int, ...], str] = field(default_factory=dict)

    def root(self) -> Array:
        """The prompt's ids."""
        if self.ids is None:
            render, task = self.policy.renderer.prompt, self.lease.task
            self.ids = np.asarray(_rendered(task, render, task.prompt), np.int32)
        return self.ids

    def text(self, sampled: list[int]) -> str:
        """Of sampled ids: answers of a group are often the same."""
        if (text := self.texts.get(key := tuple(sampled))) is None:
            text = self.texts[key] = self.policy.renderer.text(sampled)
        return text


@dataclass(eq=False)
class Sampler:
    """Runs the episodes of leases, for all policies.

    `generate`, `abort_requests`, `generate_many` are `Pool`'s methods; all `None` where nothing samples.
    """

    policies: Mapping[str, SamplingPolicy]
    generate: Callable[[Request], Awaitable[Completion]] | None
    _: KW_ONLY
    run_seed: int
    scorers: Mapping[str, Scorer] = field(default_factory=dict)
    extensions: Sequence[Any] = ()
    abort_requests: Callable[[Sequence[str]], Awaitable[None]] | None = None
    generate_many: Callable[[Sequence[Request]], Awaitable[list[Completion | Exception]]] | None = None

    def __post_init__(self) -> None:
        self._edits = [e.request for e in self.extensions if hasattr(e, "request")]
        self._collects = [e.collect for e in self.extensions if hasattr(e, "collect")]
        self._running: dict[str, _Shared] = {}  # by lease id

    async def run(self, lease: Lease, *, group_size: int, sampling: Sampling | None, split: str) -> Group:
        """All episodes of the lease, by member, failed ones included.

        With `sampling` `None` the group is made of the task's demonstrations (see `demonstrations`). Raises
        `RewardError` for a reward that is not a number, and what engines and data raise; a lease that was aborted
        returns failed episodes.
        """
        policy, task, attempt = self.policies[lease.policy], lease.task, lease.attempt
        if sampling is None:
            episodes = demonstrations(policy, task, attempt, group_size)
        else:
            episodes = await self._sampled(policy, lease, group_size, sampling, split)
        return Group(id=lease.group, policy=policy.name, slot=lease.slot, attempt=attempt, task=task, episodes=episodes)

    async def _sampled(
        self, policy: SamplingPolicy, lease: Lease, group_size: int, sampling: Sampling, split: str
    ) -> tuple[Episode, ...]:
        """All at once; the first error cancels the siblings and surfaces with its own text."""
        loop, seed = asyncio.get_running_loop(), self.run_seed
        env, group = policy.envs[lease.env], lease.group
        shared = self._running[lease.id] = _Shared(
            policy=policy,
            lease=lease,
            names=[episode_id(group, member) for member in range(group_size)],
            env=env,
            multi_turn=hasattr(env, "episode"),  # a Protocol check would cost ten times as much a lease
            sampling=sampling,
            deadline=loop.time() + policy.deadline_s,
            seed_of=family(seed, policy.name, "sample", lease.task.id, lease.attempt),
            context={
                "renderer": policy.renderer,
                "sampling": sampling,
                "rng": functools.partial(generator, seed, policy.name, "episode", lease.task.id, lease.attempt),
                "split": split,
                "deadline_s": policy.deadline_s,
                "scorers": self.scorers,
            },
        )
        timer = loop.call_at(shared.deadline, self._end, shared, f"passed its deadline of {policy.deadline_s:g} s")
        try:
            if self.generate_many is not None and getattr(env, "instant", False) and not shared.multi_turn:
                return await self._together(shared, group_size)
            ask = functools.partial(self._ask, shared)
            shared.tasks = [asyncio.ensure_future(self._episode(shared, m, ask)) for m in range(group_size)]
            try:
                return tuple(await asyncio.gather(*shared.tasks))
            except asyncio.CancelledError:
                if not shared.ended or cast("asyncio.Task[Any]", asyncio.current_task()).cancelling():
                    raise
                return tuple(_failed(shared, member, shared.ended) for member in range(group_size))  # before they began
            finally:
                await cancel(shared.tasks)
        finally:
            timer.cancel()
            del self._running[lease.id]

    async def _together(self, shared: _Shared, group_size: int) -> tuple[Episode, ...]:
        """One wait for all answers of the group, then one verdict after the other: no task a member."""
        lease, policy, task = shared.lease, shared.policy, asyncio.current_task()
        assert self.generate_many is not None and task is not None
        shared.tasks = [task]
        requests: list[Request] = []
        try:
            same: dict[str, Any] = {"policy": policy.name, "prompt": {"tokens": shared.root()}, "want": policy.want}
            same |= {"sampling": shared.sampling, "deadline_s": policy.deadline_s}
            seeds = [shared.seed_of(member, 0) for member in range(group_size)]
            requests = [_RequestDraft(id=f"{lease.id}/{m}/0", seed=seed, **same) for m, seed in enumerate(seeds)]
            for request in requests:
                seal(request, Request)
            if self._edits:
                requests = [self._edited(request) for request in requests]
            shared.requests.update([request.id for request in requests])
            results = await self.generate_many(requests)
        except asyncio.CancelledError:
            if not shared.ended or task.uncancel():  # somebody else cancelled it too
                raise
            return tuple(_failed(shared, member, shared.ended) for member in range(group_size))
        except Exception as error:
            results = [error] * group_size
        if requests and not self._collects and "keep_ids" not in policy.want:
            plain = plain_trajectories(shared.names, shared.root(), results, shared.sampling)
            if plain is not None:
                return await self._judged(shared, plain, results)
        episodes = []
        for member, (result, sent) in enumerate(itertools.zip_longest(results, requests)):
            answered = functools.partial(self._answered, shared, result, sent)
            episodes.append(await self._episode(shared, member, answered))
        return tuple(episodes)

    async def _judged(self, shared: _Shared, plain: list[Trajectory], answers: list[Any]) -> tuple[Episode, ...]:
        """The episodes of plain answers, of which the trajectories were made."""
        episodes, score = [], shared.env.score
        for member, (trajectory, answer) in enumerate(zip(plain, answers, strict=True)):
            try:
                told = _told(shared, member, trajectory, answer.columns["tokens"])
                episode = _finished(shared, member, (trajectory,), await score(shared.lease.task, told))
            except STOPS:
                raise
            except BaseException as error:
                episode = _ended(shared, member, error)
            episodes.append(episode)
        return tuple(episodes)

    async def _answered(
        self, shared: _Shared, result: Completion | Exception, sent: Request, asked: Request
    ) -> tuple[Completion, Mapping[str, Any]]:
        """What a session samples with where the answer is there already: `sent` is `asked`, edited by extensions."""
        if isinstance(result, Exception):
            raise result
        return result, self._extra(shared, sent, result)

    async def abort(self, lease_ids: Sequence[str]) -> None:
        """End these leases: their episodes come back failed, with the reason `aborted`."""
        running = [self._running[lease] for lease in lease_ids if lease in self._running]
        requests = [request for shared in running for request in shared.requests]
        if requests and self.abort_requests is not None:
            await self.abort_requests(requests)
        for shared in running:
            if shared.lease.id in self._running:  # else it ended meanwhile, and its task does something else
                self._end(shared, "aborted")

    def _end(self, shared: _Shared, why: str) -> None:
        if not shared.ended:
            shared.ended = why
            for task in shared.tasks:
                task.cancel()

    async def close(self) -> None:
        """Cancel what still runs."""
        await self.abort(list(self._running))

    # --- one episode -------------------------------------------------------------------------------------------------

    async def _episode(self, shared: _Shared, member: int, ask: Generate) -> Episode:
        lease, policy = shared.lease, shared.policy
        session = Session(
            id=shared.names[member],
            policy=policy.name,
            prompt=lease.task.prompt,
            renderer=policy.renderer,
            generate=ask,
            sampling=shared.sampling,
            seed_of=lambda turn: shared.seed_of(member, turn),
            request_id=f"{lease.id}/{member}",
            want=policy.want,
            columns=policy.columns,
            deadline=shared.deadline,
            root=shared.root,
        )
        try:
            return await self._played(shared, member, session)
        except STOPS:
            raise
        except BaseException as error:
            return _ended(shared, member, error, session.failure)

    async def _played(self, shared: _Shared, member: int, session: Session) -> Episode:
        if shared.multi_turn:
            context = _context(shared, member)
            score = await cast("MultiTurn", shared.env).episode(shared.lease.task, session, context)
            return _finished(shared, member, session.trajectories(), score)
        await session.answer()
        (trajectory,) = session.trajectories()
        written = cast("Array", trajectory.columns["tokens"])[len(shared.root()) :]
        told = _told(shared, member, trajectory, written)
        return _finished(shared, member, (trajectory,), await shared.env.score(shared.lease.task, told))

    async def _ask(self, shared: _Shared, request: Request) -> tuple[Completion, Mapping[str, Any]]:
        """What sessions sample with: the pool, with the run's extensions around it."""
        assert self.generate is not None
        request = self._edited(request)
        shared.requests.add(request.id)
        try:
            completion = await self.generate(request)
        finally:
            shared.requests.discard(request.id)
        return completion, self._extra(shared, request, completion)

    def _edited(self, request: Request) -> Request:
        """What extensions make of a request. Trajectories say how they were sampled: that stays as it was."""
        sent = request
        for edit in self._edits:
            sent = edit(sent)
        if not isinstance(sent, Request):
            raise PluginContractError(f"an extension made {sent!r:.80} of a request", fix="return the request")
        for key, of in _KEPT.items() if sent is not request else ():
            if (new := of(sent)) is not (old := of(request)) and not np.array_equal(new, old):
                what = f"an extension changed the {key} of request {request.id!r} from {old!r:.80} to {new!r:.80}"
                raise PluginContractError(what, fix="edit what else a request has, or set rollout.* in the run file")
        return sent

    def _extra(self, shared: _Shared, request: Request, completion: Completion) -> Mapping[str, Any]:
        """What a completion has beside the columns that every engine gives."""
        columns, declared = completion.columns, shared.policy.columns  # what has a declared name is kept as it is
        extra = {k: v for k, v in columns.items() if k not in STANDARD_COLUMNS and k in declared}
        for collect in self._collects:
            extra |= collect(completion.columns, request)
        return extra


class _Context(EpisodeContext):
    """What all members have in common is looked up when it is first asked for. So is `rng`, which most environments
    never ask for, and which is the dearest field by far."""

    def __getattr__(self, name: str) -> Any:
        common, member = self.__dict__.get("_of", ({}, 0))
        if name not in common:
            raise AttributeError(name)
        return self.__dict__.setdefault(name, common[name](member) if name == "rng" else common[name])


def _context(shared: _Shared, member: int, **answer: Any) -> EpisodeContext:
    context = object.__new__(_Context)
    answer["_of"] = shared.context, member
    object.__setattr__(context, "__dict__", answer)
    return context


def _told(shared: _Shared, member: int, answer: Trajectory, written: Array) -> EpisodeContext:
    """What a single-turn environment is told of an answer; its tokens are `written`."""
    if shared.ended:  # while another of its group was judged, in the same task
        raise asyncio.CancelledError
    text = shared.text(written.tolist())
    return _context(shared, member, text=text, finish=answer.finish, trajectories=(answer,))


def _rendered(task: Task, render: Callable[..., T], *shown: Prompt) -> T:
    """What renderers refuse was to be found before the run; here it is a bad task met late."""
    try:
        return render(*shown)
    except InputError as error:
        raise LateDataError(f"task {task.id!r} cannot be shown to the model: {error.message}", fix=error.fix) from error


def _ended(shared: _Shared, member: int, error: BaseException, failure: BaseException | None = None) -> Episode:
    """The failed episode that `error` leaves; `failure` is what its session met before. Raises what stops the run: what
    core, engines and data say, but not a request's deadline. `sys.exit()` or a panic in a reward fails its episode, and
    not the event loop."""
    if isinstance(error, asyncio.CancelledError):
        if not shared.ended or cast("asyncio.Task[Any]", asyncio.current_task()).uncancel():
            raise error
        return _failed(shared, member, shared.ended)
    for cause in (failure, error):
        if isinstance(cause, MilesError) and not isinstance(cause, DeadlineError):
            if type(cause) is EngineError:  # it does not know its task; whoever must mend the task needs that
                cause = EngineError(f"task {shared.lease.task.id!r}: {cause.message}", fix=cause.fix)
            raise cause from (error if error is not cause else None)
    kind = "" if isinstance(error, EpisodeFailedError) else type(error).__name__
    return _failed(shared, member, ": ".join(filter(None, (kind, str(error)))))


def _failed(shared: _Shared, member: int, why: str) -> Episode:
    name = shared.names[member]
    why = f"task {shared.lease.task.id}, episode {name}: {why}"
    return Episode(id=name, member=member, trajectories=(), status=Status.FAILED, error=why)


def _finished(shared: _Shared, member: int, trajectories: tuple[Trajectory, ...], score: Score) -> Episode:
    task, name = shared.lease.task.id, shared.names[member]
    if not isinstance(score, Score):
        what = f"environment of task {task!r} returned {type(score).__name__} in place of a Score"
        raise RewardError(what, fix="return miles_core.records.Score(reward=…)")
    reward, components = score.reward, score.components
    if components or type(reward) is not float or not math.isfinite(reward):  # all is well with most
        if reward is not None or shared.policy.rewarded:
            reward = _number(reward, task, name, "reward")
        components = {k: _number(value, task, name, f"component {k!r}") for k, value in components.items()}
        for key, value in (("reward", reward), *components.items()):
            if value is not None and not math.isfinite(value):
                ids = ", ".join(t.id for t in trajectories) or "none"
                return _failed(shared, member, f"{key} is {value}, trajectories {ids}")
    info, end = score.info, _TRUNCATED if _CUT in [t.finish for t in trajectories] else _OK
    episode = _EpisodeDraft(
        id=name, member=member, trajectories=trajectories, reward=reward, components=components, info=info, status=end
    )
    seal(episode, Episode)
    return episode


def _number(value: Any, task: str, name: str, what: str) -> float:
    if not isinstance(value, Real | np.bool_):
        raise RewardError(
            f"the {what} of task {task!r}, episode {name!r}, is not a number: {value!r} ({type(value).__name__})",
            fix="return a number from the environment or reward function, then resume the run",
        )
    return float(value)


def demonstrations(policy: SamplingPolicy, task: Task, attempt: int, group_size: int) -> tuple[Episode, ...]:
    """A task's reference answers as episodes without reward.

    Group size 1: the demonstration whose turn it is (attempt modulo their number). Group size 2: the first as chosen
    (`preference` +1), the second as rejected (-1). Raises `LateDataError` where the task has too few.
    """
    if len(task.demonstrations) < group_size:
        what = f"task {task.id!r} has {len(task.demonstrations)} demonstrations; {group_size} are needed"
        raise LateDataError(what, fix="give every row its demonstrations, or choose an algorithm that samples")
    group = group_id(task.id, attempt)
    if group_size == 1:
        chosen = [(task.demonstrations[attempt % len(task.demonstrations)], 0)]
    else:
        chosen = list(zip(task.demonstrations[:group_size], (1, -1), strict=False))
    episodes = []
    for member, (answer, preference) in enumerate(chosen):
        name = episode_id(group, member)
        ids, shown = _rendered(task, policy.renderer.demonstration, task.prompt, answer)
        trainable = np.asarray(shown, bool)
        trajectory = Trajectory(
            id=trajectory_id(name, 0),
            length=len(ids),
            columns={
                "tokens": np.asarray(ids, np.int32),
                "origin": np.where(trainable, Origin.DEMONSTRATION, Origin.PROMPT).astype(np.uint8),
                "trainable": trainable,
            },
        )
        validate(trajectory, policy.columns)
        episodes.append(Episode(id=name, member=member, trajectories=(trajectory,), preference=preference))
    return tuple(episodes)
