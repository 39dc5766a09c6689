"""Episodes: rewards, failures and their reasons, what stops a run, seeds, demonstrations, abort, workers."""

import asyncio
import copy
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from sampling_fakes import FakeEngine, FakeRenderer, a_while, admit, answer

from miles_core.columns import CORE_COLUMNS, ColumnSpec, Level
from miles_core.errors import (
    DataError,
    DeadlineError,
    EngineError,
    LateDataError,
    PluginContractError,
    QuorumError,
    RewardError,
)
from miles_core.pool import Pool
from miles_core.records import Finish, Origin, Sampling, Score, Status, Task
from miles_core.remote import RemoteSampler, SamplerEndpoint
from miles_core.sampler import Sampler, SamplingPolicy
from miles_core.seeds import derive
from miles_core.waits import cancel

TASK = Task(id="env:train:0", prompt="p>", answer="ok", demonstrations=("first", "second"))


SAMPLING = Sampling(max_new_tokens=8)


@dataclass
class FakeLease:
    id: str = "L1"
    policy: str = "main"
    slot: int = 3
    task: Task = TASK
    attempt: int = 0
    env: str = "env"
    position: int = 0
    split: str = "train"
    started_version: int = 0

    @property
    def group(self):
        return f"{self.task.id}#{self.attempt}"


@dataclass
class Env:
    """Scores by `give(task, context)`."""

    give: object = 1.0
    task_splits: tuple = ("train",)
    contexts: list = field(default_factory=list)

    def tasks(self, split):
        raise NotImplementedError

    async def score(self, task, context):
        self.contexts.append(context)
        found = self.give(task, context) if callable(self.give) else self.give
        if isinstance(found, BaseException):
            raise found
        return found if isinstance(found, Score) or found == "raw" else Score(reward=found)


@pytest.fixture(autouse=True, params=["a task each", "in one wait"])
def together(request, monkeypatch):
    """Everything here holds for both ways to sample a group."""
    if request.param == "in one wait":
        monkeypatch.setattr(Env, "instant", True, raising=False)
    return request.param == "in one wait"


def make(env, generate=None, *, seed=7, extensions=(), abort_requests=None, **policy):
    asked = []

    async def plain(request):
        asked.append(request)
        await asyncio.sleep(0)
        return answer(request, "ok")

    async def one(request):
        try:
            return await (generate or plain)(request)
        except DeadlineError as error:
            return error

    async def many(requests):  # as the pool does it
        tasks = [asyncio.ensure_future(one(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            await cancel(tasks)

    made = SamplingPolicy(name="main", renderer=FakeRenderer(), envs={"env": env}, **policy)
    more = {"extensions": extensions, "abort_requests": abort_requests, "generate_many": many}
    return Sampler({"main": made}, generate or plain, run_seed=seed, **more), asked


def run(sampler, lease=None, size=2, split="train", sampling=SAMPLING):
    async def main():
        return await sampler.run(lease or FakeLease(), group_size=size, sampling=sampling, split=split)

    return asyncio.run(main())


def test_a_group_by_hand():
    env = Env(give=lambda task, context: Score(reward=0.5, components={"form": True}, info={"got": context.text}))
    sampler, asked = make(env)
    group = run(sampler)
    assert (group.id, group.policy, group.slot, group.attempt, group.task) == ("env:train:0#0", "main", 3, 0, TASK)
    assert [e.id for e in group.episodes] == ["env:train:0#0/0", "env:train:0#0/1"]
    assert [e.reward for e in group.episodes] == [0.5, 0.5]
    assert group.episodes[0].components == {"form": 1.0} and group.episodes[0].info == {"got": "ok"}
    assert group.episodes[1].status == Status.OK and len(group.episodes[1].trajectories) == 1
    assert sorted(r.id for r in asked) == ["L1/0/0", "L1/1/0"]
    assert {r.seed for r in asked} == {derive(7, "main", "sample", "env:train:0", 0, m, 0) for m in (0, 1)}
    context = env.contexts[0]
    assert context.trajectories == group.episodes[0].trajectories and context.split == "train"


def test_seeds_do_not_depend_on_lease_or_order_and_generators_differ():
    env = Env(give=lambda task, context: float(context.rng.random()))
    first = run(make(env)[0])
    again = run(make(env)[0], FakeLease(id="other", slot=9, started_version=4))
    later = run(make(env)[0], FakeLease(attempt=1))
    rewards = [[e.reward for e in g.episodes] for g in (first, again, later)]
    assert rewards[0] == rewards[1] and rewards[0] != rewards[2]
    assert rewards[0][0] != rewards[0][1]


def test_truncated_episodes_say_so():
    async def cut(request):
        return answer(request, "ok", finish=Finish.LENGTH)

    assert {e.status for e in run(make(Env(), cut)[0]).episodes} == {Status.TRUNCATED}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("nan")])
def test_a_reward_that_is_not_finite_is_a_failed_episode(value):
    sampler, _ = make(Env(give=lambda task, context: value))
    for episode in run(sampler).episodes:
        assert episode.status == Status.FAILED and not episode.trajectories and episode.reward is None
        assert f"task env:train:0, episode {episode.id}: reward is" in episode.error
        assert f"trajectories {episode.id}/0" in episode.error


def test_a_component_that_is_not_finite_is_a_failed_episode_too():
    sampler, _ = make(Env(give=Score(reward=1.0, components={"style": float("nan")})))
    assert "style is nan" in run(sampler).episodes[0].error


@pytest.mark.parametrize("value", ["1.0", [1.0], None, 1j])
def test_a_reward_that_is_no_number_stops_the_run(value):
    sampler, _ = make(Env(give=lambda task, context: Score(reward=value)), rewarded=True)
    with pytest.raises(RewardError, match=r"reward of task 'env:train:0', episode 'env:train:0#0/\d', is not a number"):
        run(sampler)


@pytest.mark.parametrize("value", [True, np.bool_(True), 1, np.int64(1), np.float32(1)])
def test_numbers_of_every_kind_are_rewards(value):
    group = run(make(Env(give=lambda task, context: Score(reward=value)), rewarded=True)[0])
    assert [type(e.reward) for e in group.episodes] == [float, float] and group.episodes[0].reward == 1.0


def test_unrewarded_episodes_and_wrong_results():
    assert run(make(Env(give=Score(reward=None)))[0]).episodes[0].reward is None
    with pytest.raises(RewardError, match="returned str in place of a Score"):
        run(make(Env(give="raw"))[0])


def test_an_exception_in_the_environment_is_a_failed_episode():
    sampler, _ = make(Env(give=lambda task, context: KeyError("answer")))
    episode = run(sampler).episodes[0]
    assert episode.status == Status.FAILED
    assert episode.error == "task env:train:0, episode env:train:0#0/0: KeyError: 'answer'"


def test_one_failure_leaves_the_siblings_alone():
    calls = iter([ValueError("odd"), 1.0])
    group = run(make(Env(give=lambda task, context: next(calls)))[0])
    assert sorted(e.status for e in group.episodes) == [Status.FAILED, Status.OK]


@pytest.mark.parametrize("error", [EngineError("boom", fix="x"), QuorumError("none left", fix="x")])
def test_engine_errors_stop_the_run_and_cancel_siblings(error):
    cancelled = []

    async def generate(request):
        if request.id.endswith("/1/0"):
            raise error
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(request.id)
            raise

    async def main():
        sampler, _ = make(Env(), generate)
        with pytest.raises(type(error), match=error.message):
            await sampler.run(FakeLease(), group_size=2, sampling=SAMPLING, split="train")
        assert cancelled == ["L1/0/0"]  # before the error surfaces, not when the loop ends
        assert not [timer for timer in asyncio.get_running_loop()._scheduled if not timer.cancelled()]

    asyncio.run(main())


def test_an_engine_that_refuses_a_request_is_told_with_the_task():
    async def generate(request):
        raise EngineError(f"the prompt of request {request.id!r} has 80 tokens", fix="shorten it")

    with pytest.raises(EngineError, match=r"E600: task 'env:train:0': the prompt of request 'L1/0/0' has 80") as e:
        run(make(Env(), generate)[0])
    assert e.value.fix == "shorten it" and isinstance(e.value.__cause__, EngineError)


@pytest.mark.parametrize("sampling", [SAMPLING, None])
def test_a_task_that_cannot_be_rendered_is_late_data_with_its_id(sampling, monkeypatch):
    def refuse(*args):
        raise DataError("no token for 'A'", fix="use the characters of the model")

    for method in ("prompt", "demonstration"):
        monkeypatch.setattr(FakeRenderer, method, refuse)
    with pytest.raises(LateDataError, match="task 'env:train:0' cannot be shown to the model: no token for 'A'") as e:
        lease = FakeLease(task=replace(TASK, demonstrations=("x",)))
        run(make(Env())[0], lease, size=1, sampling=sampling)
    assert e.value.exit_code == 3 and e.value.fix == "use the characters of the model"


def test_a_renderer_that_breaks_fails_its_episodes(monkeypatch):
    monkeypatch.setattr(FakeRenderer, "prompt", lambda self, prompt: 1 // 0)
    group = run(make(Env())[0])
    assert [e.status for e in group.episodes] == [Status.FAILED] * 2
    assert all("ZeroDivisionError" in e.error for e in group.episodes)


def test_late_data_stops_the_run():
    with pytest.raises(LateDataError, match="row 7"):
        run(make(Env(give=lambda task, context: LateDataError("row 7", fix="x")))[0])


def test_an_environment_cannot_hide_an_engine_error():
    class Hiding(Env):
        async def episode(self, task, session, context):
            try:
                await session.sample()
            except EngineError:
                raise ValueError("something else") from None

    async def generate(request):
        raise EngineError("boom", fix="x")

    with pytest.raises(EngineError, match="boom"):
        run(make(Hiding(), generate)[0])


def test_deadlines_fail_the_episode():
    async def slow(request):
        await asyncio.sleep(5)

    assert "passed its deadline of 0.5 s" in run(make(Env(), slow, deadline_s=0.5)[0]).episodes[0].error

    async def late(request):
        raise DeadlineError("no answer", fix="x")

    assert "DeadlineError" in run(make(Env(), late)[0]).episodes[0].error


def test_a_verdict_that_does_not_come_ends_with_its_group():
    """Of all members, also where an environment that says it never waits does so."""

    class Waiting(Env):
        async def score(self, task, context):
            await asyncio.sleep(60)

    group = run(make(Waiting(), deadline_s=0.5)[0], size=4)
    assert [e.error.rsplit(": ", 1)[1] for e in group.episodes] == ["passed its deadline of 0.5 s"] * 4


def test_a_silent_engine_meets_the_deadline():
    async def main():
        engine = FakeEngine("e0")
        engine.gate.clear()
        pool = Pool({"e0": engine})
        admit(pool, "e0")
        sampler, _ = make(Env(), pool.generate, deadline_s=0.5)
        group = await sampler.run(FakeLease(), group_size=2, sampling=SAMPLING, split="train")
        assert [e.error.rsplit(": ", 1)[1] for e in group.episodes] == ["passed its deadline of 0.5 s"] * 2
        assert len(engine.seen) == 2 and not pool._calls
        assert asyncio.current_task().cancelling() == 0

    asyncio.run(main())


def test_multi_turn_environments_drive_the_session():
    class Talk(Env):
        async def episode(self, task, session, context):
            first = await session.sample()
            second = await session.sample("again")
            return Score(reward=float(second.node - first.node))

    sampler, asked = make(Talk())
    group = run(sampler, size=1)
    assert group.episodes[0].reward == 1.0
    assert [r.id for r in asked] == ["L1/0/0", "L1/0/1"]
    assert asked[1].seed == derive(7, "main", "sample", "env:train:0", 0, 0, 1)
    assert asked[0].session == asked[1].session == "env:train:0#0/0"
    assert group.episodes[0].trajectories[0].length == len("p>ok") + 1 + len("again") + 2 + len("ok") + 1


def test_extending_a_cut_turn_fails_the_episode_only():
    class Talk(Env):
        async def episode(self, task, session, context):
            await session.sample()
            await session.sample("again")

    async def cut(request):
        return answer(request, "ok", finish=Finish.LENGTH)

    episode = run(make(Talk(), cut)[0], size=1).episodes[0]
    assert episode.status == Status.FAILED and "cannot be extended" in episode.error


def test_extensions_edit_requests_and_collect_columns():
    class Extension:
        name = "x"

        def request(self, request):
            from dataclasses import replace

            return replace(request, want=request.want | {"x.col"})

        def collect(self, raw, request):
            assert "x.col" in request.want
            return {"x.col": raw["tokens"] * 2}

    columns = CORE_COLUMNS | {"x.col": ColumnSpec(name="x.col", level=Level.UNIT, dtype="int32", fill=-1)}
    sampler, _ = make(Env(), extensions=[Extension()], columns=columns)
    (trajectory,) = run(sampler, size=1).episodes[0].trajectories
    assert trajectory.columns["x.col"].tolist() == [-1, -1, 2 * ord("o"), 2 * ord("k"), 2]


def test_columns_that_an_engine_collected_itself_are_kept_when_declared():
    async def generate(request):
        return answer(request, "ok", **{"x.col": np.array([1, 2, 3], np.int32), "junk": np.zeros(9)})

    columns = CORE_COLUMNS | {"x.col": ColumnSpec(name="x.col", level=Level.UNIT, dtype="int32", fill=-1)}
    (trajectory,) = run(make(Env(), generate, columns=columns)[0], size=1).episodes[0].trajectories
    assert trajectory.columns["x.col"].tolist() == [-1, -1, 1, 2, 3] and "junk" not in trajectory.columns


def test_demonstrations_take_turns_and_pair_up():
    sampler, asked = make(Env())
    one = run(sampler, size=1, sampling=None)
    (trajectory,) = one.episodes[0].trajectories
    assert trajectory.columns["tokens"].tolist() == [*map(ord, "p>first"), 1]
    assert trajectory.columns["origin"].tolist() == [Origin.PROMPT] * 2 + [Origin.DEMONSTRATION] * 6
    assert trajectory.columns["trainable"].tolist() == [False] * 2 + [True] * 6
    assert one.episodes[0].reward is None and not trajectory.spans
    next_time = run(sampler, FakeLease(attempt=1), size=1, sampling=None)
    assert next_time.episodes[0].trajectories[0].columns["tokens"].tolist() == [*map(ord, "p>second"), 1]
    pair = run(sampler, size=2, sampling=None)
    assert [e.preference for e in pair.episodes] == [1, -1] and [e.member for e in pair.episodes] == [0, 1]
    assert not asked


def test_a_task_without_demonstrations_is_late_bad_data():
    sampler, _ = make(Env())
    with pytest.raises(LateDataError, match="task 'env:train:9' has 0 demonstrations; 1 are needed"):
        run(sampler, FakeLease(task=Task(id="env:train:9", prompt="p")), size=1, sampling=None)


def test_abort_returns_failed_episodes_and_ends_requests():
    async def main():
        ended = []

        async def generate(request):
            await asyncio.sleep(30)

        async def abort_requests(ids):
            ended.extend(sorted(ids))

        sampler, _ = make(Env(), generate, abort_requests=abort_requests)
        job = asyncio.create_task(
            sampler.run(FakeLease(), group_size=2, sampling=Sampling(max_new_tokens=1), split="train")
        )
        await asyncio.sleep(0.01)
        await sampler.abort(["L1", "unknown"])
        group = await job
        assert [e.error.rsplit(": ", 1)[1] for e in group.episodes] == ["aborted", "aborted"]
        assert ended == ["L1/0/0", "L1/1/0"]
        assert not sampler._running

    asyncio.run(main())


def test_cancelling_the_lease_cancels_its_episodes():
    async def main():
        started = []

        async def generate(request):
            started.append(request.id)
            await asyncio.sleep(30)

        sampler, _ = make(Env(), generate)
        job = asyncio.create_task(
            sampler.run(FakeLease(), group_size=2, sampling=Sampling(max_new_tokens=1), split="train")
        )
        await asyncio.sleep(0.01)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert len(started) == 2 and not sampler._running

    asyncio.run(main())


class LocalWorkers:
    """Workers in this process: what a launcher hands out."""

    def __init__(self, *endpoints):
        self.endpoints, self.count, self.calls = endpoints, len(endpoints), []

    async def call(self, method, *args, rank=None, timeout_s):
        assert timeout_s > 0
        self.calls.append((method, rank))
        chosen = self.endpoints if rank is None else [self.endpoints[rank]]
        return [await getattr(e, method)(*args) for e in chosen]

    def interrupt(self):
        pass

    async def close(self):
        for endpoint in self.endpoints:
            await endpoint.close()


def test_samplers_in_workers_follow_the_controllers_gate():
    async def main():
        controller = Pool({"e0": FakeEngine("e0")})
        endpoints = []
        for _ in range(2):
            pool = Pool({"e0": FakeEngine("e0")})
            sampler, _ = make(Env(), pool.generate, abort_requests=pool.abort)
            endpoints.append(SamplerEndpoint(sampler, pool, []))
        workers = LocalWorkers(*endpoints)
        remote = RemoteSampler(workers, deadline_s=5.0)
        jobs = [
            asyncio.create_task(
                remote.run(FakeLease(id=f"L{i}"), group_size=2, sampling=Sampling(max_new_tokens=4), split="train")
            )
            for i in range(4)
        ]
        await asyncio.sleep(0.02)
        assert not any(job.done() for job in jobs)  # no receipt yet, in any process
        admit(controller, "e0")
        await remote.follow(controller.state())
        groups = await asyncio.gather(*jobs)
        assert all(e.status == Status.TRUNCATED for g in groups for e in g.episodes)
        assert sorted(rank for method, rank in workers.calls if method == "run") == [0, 0, 1, 1]
        await remote.abort(["L0"])  # finished: nothing to do
        assert ("abort", 0) not in workers.calls
        await remote.close()

    asyncio.run(main())


class Collecting:
    def collect(self, columns, request):
        return {}


@pytest.mark.parametrize("extensions", [(), (Collecting(),)], ids=["plain", "collected"])
def test_a_deadline_ends_every_episode_of_a_group_that_waits_while_it_is_judged(extensions):
    class Waiting(Env):
        async def score(self, task, context):
            await asyncio.sleep(5)

    async def main():
        sampler, _ = make(Waiting(), extensions=extensions, deadline_s=0.05)
        running = sampler.run(FakeLease(), group_size=3, sampling=SAMPLING, split="train")
        group = await asyncio.wait_for(running, 20)
        assert [e.status for e in group.episodes] == [Status.FAILED] * 3
        assert all("passed its deadline" in e.error for e in group.episodes)
        assert asyncio.current_task().cancelling() == 0

    asyncio.run(main())


EDITS = {
    "sampling": lambda request: replace(request, sampling=replace(request.sampling, temperature=2.0)),
    "length": lambda request: replace(request, sampling=replace(request.sampling, max_new_tokens=20)),
    "id": lambda request: replace(request, id="other"),
    "policy": lambda request: replace(request, policy="critic"),
    "resume": lambda request: replace(request, resume=np.zeros(3, np.int32)),
    "seed": lambda request: replace(request, seed=3),
    "prompt": lambda request: replace(request, prompt={"tokens": request.prompt["tokens"][1:]}),
    "no prompt": lambda request: replace(request, prompt={}),
    "a list": lambda request: replace(request, prompt=request.prompt["tokens"].tolist()),
    "a text": lambda request: replace(request, prompt="789"),
    "nothing": lambda request: None,
}


@pytest.mark.parametrize("what", EDITS)
def test_an_extension_may_not_edit_what_trajectories_say_of_a_request(together, what):
    class Odd:
        request = staticmethod(EDITS[what])

    sampler, asked = make(Env(), extensions=[Odd()])
    prompts = dict.fromkeys(("prompt", "no prompt", "a list", "a text"), "prompt's tokens")
    told = {"length": "sampling", **prompts}.get(what, what)
    with pytest.raises(PluginContractError, match=rf"extension (changed the {told} of request|made None of)"):
        run(sampler)
    assert not asked


SAME = {
    "a deep copy": copy.deepcopy,
    "equal fields": lambda r: replace(r, sampling=replace(r.sampling), id="".join(list(r.id)), want=frozenset(r.want)),
    "other arrays": lambda r: replace(r, prompt={"tokens": r.prompt["tokens"].astype(np.int64)}),
}


@pytest.mark.parametrize("what", SAME)
def test_an_extension_may_write_the_same_anew(together, what):
    class Anew:
        request = staticmethod(SAME[what])

    sampler, asked = make(Env(), extensions=[Anew()])
    assert [e.status for e in run(sampler).episodes] == [Status.OK] * 2
    assert len(asked) == 2


def test_an_extension_may_edit_what_else_a_request_has(together):
    class More:
        def request(self, request):
            shown = {**request.prompt, "images": np.zeros(2, np.int32)}
            return replace(request, want=request.want | {"more"}, deadline_s=7.0, prompt=shown)

    sampler, asked = make(Env(), extensions=[More()])
    assert [e.status for e in run(sampler).episodes] == [Status.OK] * 2
    assert [(r.want, r.deadline_s, len(r.prompt)) for r in asked] == [(frozenset({"more"}), 7.0, 2)] * 2


def test_a_late_abort_leaves_whoever_has_gone_on_alone():
    async def main():
        lease, done = FakeLease(), asyncio.Event()

        async def generate(request):
            await asyncio.sleep(0.01)
            return answer(request, "ok")

        async def abort_requests(ids):
            await done.wait()  # the engine ends them at once and takes a moment to say so

        sampler, _ = make(Env(), generate, abort_requests=abort_requests)

        async def worker():
            group = await sampler.run(lease, group_size=2, sampling=SAMPLING, split="train")
            done.set()
            await asyncio.sleep(0.02)  # to send it on
            return group

        task = asyncio.create_task(worker())
        await asyncio.sleep(0.005)
        await sampler.abort([lease.id])
        assert [e.status for e in (await task).episodes] == [Status.OK] * 2 and task.cancelling() == 0

    asyncio.run(main())


def test_a_cancellation_from_outside_is_not_lost_in_a_deadline():
    async def main():
        async def generate(request):
            await asyncio.sleep(5)

        sampler, _ = make(Env(), generate)
        task = asyncio.create_task(sampler.run(FakeLease(), group_size=2, sampling=SAMPLING, split="train"))
        await asyncio.sleep(0.01)
        sampler._end(sampler._running["L1"], "passed its deadline")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 1)

    asyncio.run(main())


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("instant", [False, True])
def test_a_lease_that_is_aborted_as_it_begins_has_failed_episodes(instant, turns):
    class Instant(Env):
        pass

    Instant.instant = instant

    async def main():
        pool = Pool({"e0": FakeEngine("e0")})
        admit(pool, "e0")
        pool.engines["e0"].limit = 0
        sampler, _ = make(Instant(), pool.generate, abort_requests=pool.abort)
        task = asyncio.create_task(sampler.run(FakeLease(), group_size=2, sampling=SAMPLING, split="train"))
        for _ in range(turns):
            await asyncio.sleep(0)
        await sampler.abort([FakeLease().id])
        group = await asyncio.wait_for(task, 20)
        assert [e.status for e in group.episodes] == [Status.FAILED] * 2
        assert all("aborted" in e.error for e in group.episodes)

    asyncio.run(main())


@pytest.mark.parametrize("instant", [False, True])
def test_a_lease_that_is_cancelled_and_then_aborted_is_cancelled(instant):
    """In one turn, before it hears of either."""

    class Waiting(Env):
        async def score(self, task, context):
            await asyncio.sleep(60)

    Waiting.instant = instant

    async def main():
        sampler, _ = make(Waiting(), deadline_s=60.0)
        task = asyncio.create_task(sampler.run(FakeLease(), group_size=2, sampling=SAMPLING, split="train"))
        await a_while()
        task.cancel()
        await sampler.abort([FakeLease().id])
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 20)

    asyncio.run(main())
