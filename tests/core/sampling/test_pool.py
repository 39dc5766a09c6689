"""The pool: gates, load, stickiness, lost members, pauses that abort, deadlines, quorum."""

import asyncio
import sys
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from sampling_fakes import FakeEngine, a_while, admit, request, version

from miles_core.contracts.engine import Completion, Health
from miles_core.errors import DeadlineError, EngineError, QuorumError
from miles_core.pool import Pool
from miles_core.records import Finish, Span
from miles_core.waits import close_all


def make(count=2, **options):
    engines = {f"e{i}": FakeEngine(f"e{i}") for i in range(count)}
    events = []
    pool = Pool(engines, on_event=lambda kind, fields: events.append((kind, fields)), **options)
    return pool, engines, events


def tokens(completion):
    return list(completion.columns["tokens"])


def test_nothing_runs_before_a_receipt():
    async def main():
        pool, engines, _ = make()
        task = asyncio.create_task(pool.generate(request()))
        await a_while()
        assert not task.done() and not engines["e0"].seen
        admit(pool, "e1")
        pool.readmit("e1")
        assert tokens(await task) == [0, 1, 2, 3]
        assert engines["e1"].seen == ["r"] and not engines["e0"].seen

    asyncio.run(main())


def test_policies_have_gates_of_their_own():
    async def main():
        pool, engines, _ = make()
        admit(pool, "e0", policy="other")
        admit(pool, "e1")
        await pool.generate(request())
        assert not engines["e0"].seen
        with pytest.raises(DeadlineError, match=r"'third' had no answer within 0.05 s \(no member serves its policy\)"):
            await pool.generate(request(policy="third", deadline_s=0.05))

    asyncio.run(main())


def test_least_load_and_sticky_sessions():
    async def main():
        pool, engines, _ = make(3)
        for name in engines:
            admit(pool, name)
            engines[name].gate.clear()
        tasks = [asyncio.create_task(pool.generate(request(f"r{i}", session=f"s{i % 3}"))) for i in range(6)]
        await a_while()
        where = {r: name for name, e in engines.items() for r in e.seen}
        assert sorted(len(e.seen) for e in engines.values()) == [2, 2, 2]
        assert all(where[f"r{i}"] == where[f"r{i + 3}"] for i in range(3))
        for e in engines.values():
            e.gate.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_only_the_newest_version_is_asked():
    async def main():
        pool, engines, _ = make()
        admit(pool, "e0", 3)
        admit(pool, "e1", 2)
        await asyncio.gather(*(pool.generate(request(f"r{i}")) for i in range(4)))
        assert len(engines["e0"].seen) == 4

    asyncio.run(main())


def test_a_pause_that_aborts_is_invisible_and_columns_continue():
    async def main():
        pool, engines, _ = make(1)
        engine = engines["e0"]
        engine.limit = 3
        admit(pool, "e0")
        task = asyncio.create_task(pool.generate(request(n=7)))
        await a_while()
        await pool.hold("e0", "abort")
        await a_while()
        assert not task.done()  # it waits for the member to be released
        engine.version, engine.limit = version(1), 100
        admit(pool, "e0", 1)
        await pool.release("e0")
        done = await task
        assert tokens(done) == list(range(7))
        assert list(done.columns["logprobs"]) == [-float(i) for i in range(7)]
        assert done.spans == (Span(start=0, end=3, version=version(0)), Span(start=3, end=7, version=version(1)))
        assert done.finish == Finish.LENGTH
        assert engine.resumed_from == [None, [0, 1, 2]]

    asyncio.run(main())


def test_resume_given_by_the_caller_stays_context():
    async def main():
        pool, engines, _ = make(1)
        admit(pool, "e0")
        done = await pool.generate(request(n=5, resume=np.array([0, 1], np.int32)))
        assert tokens(done) == [2, 3, 4]
        engines["e0"].limit = 1
        task = asyncio.create_task(pool.generate(request("s", n=5, resume=np.array([0, 1], np.int32))))
        await a_while()
        await pool.hold("e0", "abort")
        await a_while()
        engines["e0"].limit = 9
        await pool.release("e0")
        assert tokens(await task) == [2, 3, 4]
        assert engines["e0"].resumed_from[-1] == [0, 1, 2]

    asyncio.run(main())


def test_abort_ends_running_and_waiting_requests():
    async def main():
        pool, engines, _ = make(1)
        engines["e0"].limit = 2
        admit(pool, "e0")
        running = asyncio.create_task(pool.generate(request("a")))
        waiting = asyncio.create_task(pool.generate(request("b", policy="absent", want=frozenset({"keep_ids"}))))
        await a_while()
        await pool.abort(["a", "b", "unknown"])
        done, empty = await running, await waiting
        assert (tokens(done), done.finish) == ([0, 1], Finish.ABORT)
        assert (tokens(empty), empty.finish, empty.spans) == ([], Finish.ABORT, ())
        assert len(empty.columns["keep_counts"]) == 0

    asyncio.run(main())


def test_a_quarantined_member_loses_its_requests_to_others():
    async def main():
        pool, engines, events = make()
        for name in engines:
            admit(pool, name)
        engines["e0"].gate.clear()
        task = asyncio.create_task(pool.generate(request(session="s")))
        await a_while()
        assert engines["e0"].seen == ["r"]
        pool.quarantine("e0", "too slow")
        assert tokens(await task) == [0, 1, 2, 3]
        assert engines["e1"].seen == ["r"] and task.cancelling() == 0
        assert pool.quarantined() == {"e0": "too slow"} and pool.members() == ("e1",)
        assert events == [("engine_quarantined", {"engine": "e0", "reason": "too slow"})]
        assert pool.gate.version("e0", "main") is None

    asyncio.run(main())


def test_a_cancelled_caller_is_not_mistaken_for_a_lost_member():
    async def main():
        pool, engines, _ = make(1)
        admit(pool, "e0")
        engines["e0"].gate.clear()
        task = asyncio.create_task(pool.generate(request()))
        await a_while()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not pool._calls and pool._members["e0"].load == 0

    asyncio.run(main())


def test_a_dead_engine_is_quarantined_and_the_request_moves():
    async def main():
        pool, engines, _ = make()
        for name in engines:
            admit(pool, name)
        engines["e0"].raises, engines["e0"].ok = EngineError("boom", fix="x"), False
        assert tokens(await pool.generate(request())) == [0, 1, 2, 3]
        assert "boom" in pool.quarantined()["e0"] and "unplugged" in pool.quarantined()["e0"]

    asyncio.run(main())


def test_a_broken_connection_counts_as_dead_and_below_quorum_stops():
    async def main():
        pool, engines, _ = make(1)
        admit(pool, "e0")
        engines["e0"].raises = ConnectionResetError("peer")
        with pytest.raises(
            QuorumError, match=r"0 of 1 engines remain, sync.min_engines is 1 \(e0: ConnectionResetError: peer"
        ):
            await pool.generate(request())

    asyncio.run(main())


def test_an_error_of_a_healthy_engine_surfaces_with_its_own_text():
    async def main():
        pool, engines, _ = make()
        for name in engines:
            admit(pool, name)
            engines[name].raises = EngineError("prompt too long", fix="shorter")
        with pytest.raises(EngineError, match="prompt too long"):
            await pool.generate(request())
        assert not pool.quarantined()

    asyncio.run(main())


class Panic(BaseException):
    """As extensions in Rust raise it."""


@pytest.mark.parametrize("where", ["start", "generate", "health", "pause", "resume"])
def test_an_engine_that_panics_is_an_engine_that_failed(where):
    async def main():
        pool, engines, _ = make(count=1)
        admit(pool, "e0")

        async def panics(*_):
            raise Panic("unwrap")

        setattr(engines["e0"], where, panics)
        if where == "health":
            assert not (await pool.health("e0")).ok
            return
        with pytest.raises(EngineError if where == "generate" else RuntimeError, match="Panic: unwrap"):
            await {
                "start": lambda: pool.start(5),
                "generate": lambda: pool.generate(request("r")),
                "pause": lambda: pool.hold("e0", "in_place"),
                "resume": lambda: pool.release("e0"),
            }[where]()

    asyncio.run(main())


@pytest.mark.parametrize("where", ["start", "generate", "health", "pause", "resume"])
def test_an_engine_that_leaves_the_process_is_an_engine_that_failed(where):
    async def main():
        pool, engines, _ = make(count=1)
        admit(pool, "e0")

        async def leaves(*_):
            sys.exit(0)

        setattr(engines["e0"], where, leaves)
        if where == "start":
            with pytest.raises(RuntimeError, match="SystemExit: 0"):
                await pool.start(5)
        elif where in ("pause", "resume"):
            with pytest.raises(RuntimeError, match="SystemExit: 0"):
                await (pool.hold("e0", "in_place") if where == "pause" else pool.release("e0"))
        elif where == "health":
            assert not (await pool.health("e0")).ok
        else:
            with pytest.raises(EngineError, match=r"engine 'e0' failed at request .*SystemExit: 0"):
                await pool.generate(request("r"))

    asyncio.run(main())


def test_an_engine_that_ends_requests_for_nothing_is_given_up():
    async def main():
        pool, engines, _ = make(1)

        async def nothing(r):
            engines["e0"].seen.append(r.id)
            empty = {"tokens": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32)}
            return Completion(request=r.id, columns=empty, spans=(), finish=Finish.ABORT, engine="e0")

        engines["e0"].generate = nothing
        admit(pool, "e0")
        with pytest.raises(EngineError, match=r"failed 3 times \(e0: ended the request without a token"):
            await pool.generate(request())
        assert len(engines["e0"].seen) == 3

    asyncio.run(main())


def test_aliases_rename_what_engines_wrote():
    async def main():
        pool, _, _ = make(1)
        admit(pool, "e0", 0)
        pool.alias(version(0), version(1))
        done = await pool.generate(request())
        assert {s.version for s in done.spans} == {version(1)}

    asyncio.run(main())


def test_a_follower_pool_obeys_the_controller():
    async def main():
        pool, _, _ = make()
        follower, engines, _ = make()
        admit(pool, "e0")
        admit(pool, "e1")
        follower.follow(pool.state())
        engines["e0"].gate.clear()
        task = asyncio.create_task(follower.generate(request()))
        await a_while()
        pool.quarantine("e0", "gone")
        follower.follow(pool.state())
        assert tokens(await task) == [0, 1, 2, 3]
        assert follower.quarantined() == {"e0": "gone"}

    asyncio.run(main())


# --- requests that come together -------------------------------------------------------------------------------------


class Together(FakeEngine):
    """Answers many at once; `spoil` changes what it answers. `makes` is what its client makes of a cancellation: an
    error, or an answer of `makes` tokens."""

    def __init__(self, name):
        super().__init__(name)
        self.batches, self.spoil, self.makes = [], lambda results: results, None

    async def generate(self, request):
        try:
            return await super().generate(request)
        except asyncio.CancelledError:
            return self._made(request)

    async def generate_many(self, requests):
        self.batches.append([r.id for r in requests])
        try:
            results = await asyncio.gather(*map(self.generate, requests), return_exceptions=True)
        except asyncio.CancelledError:
            return [self._made(request) for request in requests]
        return self.spoil(results)

    def _made(self, request):
        if not isinstance(self.makes, int):
            raise self.makes or asyncio.CancelledError
        numbers = np.full(self.makes, 9, np.int32)
        return Completion(
            request=request.id,
            columns={"tokens": numbers, "logprobs": -numbers.astype(np.float32)},
            spans=(Span(start=0, end=self.makes, version=self.version),) if self.makes else (),
            finish=Finish.LENGTH if self.makes == request.sampling.max_new_tokens else Finish.ABORT,
            engine=self.name,
        )


MAKES = [
    None,
    EngineError("the connection was cancelled", fix="x"),
    DeadlineError("late", fix="x"),
    ConnectionResetError(),
    ValueError("closed"),
    0,
    1,
    2,
]


def together(count):
    engines = {f"e{i}": Together(f"e{i}") for i in range(count)}
    pool = Pool(engines)
    for name in engines:
        admit(pool, name)
    return pool, engines


def requests(n, **changes):
    return [request(f"r{i}", n=2 + i, **changes) for i in range(n)]


def test_what_comes_together_is_shared_out_and_answered_in_order():
    async def main():
        pool, engines = together(2)
        found = await pool.generate_many(requests(5))
        assert [tokens(done) for done in found] == [list(range(2 + i)) for i in range(5)]
        assert sorted(len(batch) for e in engines.values() for batch in e.batches) == [2, 3]
        assert not pool._calls and all(member.load == 0 for member in pool._members.values())

    asyncio.run(main())


def test_engines_that_cannot_and_engines_without_weights_are_asked_one_by_one():
    async def main():
        pool, _, _ = make(1)
        task = asyncio.create_task(pool.generate_many(requests(2)))
        await a_while()
        assert not task.done()
        admit(pool, "e0")
        pool.readmit("e0")
        assert [tokens(done) for done in await task] == [[0, 1], [0, 1, 2]]

    asyncio.run(main())


def test_a_pause_that_aborts_a_batch_is_invisible():
    async def main():
        pool, engines = together(1)
        engines["e0"].limit = 2
        task = asyncio.create_task(pool.generate_many(requests(3)))
        await a_while()
        await pool.hold("e0", "abort")
        await a_while()
        engines["e0"].limit = 100
        await pool.release("e0")
        assert [tokens(done) for done in await task] == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
        assert engines["e0"].resumed_from.count([0, 1]) == 2  # the two that had not ended

    asyncio.run(main())


def test_an_abort_that_was_asked_for_ends_the_request():
    async def main():
        pool, engines = together(1)
        engines["e0"].limit = 2
        task = asyncio.create_task(pool.generate_many(requests(2)))
        await a_while()
        await pool.abort(["r1"])
        first, second = await task
        assert (first.finish, second.finish, tokens(second)) == (Finish.LENGTH, Finish.ABORT, [0, 1])
        assert len(engines["e0"].seen) == 2

    asyncio.run(main())


def test_a_lost_member_loses_its_share_to_the_others():
    async def main():
        pool, engines = together(2)
        engines["e0"].limit = engines["e1"].limit = 1
        task = asyncio.create_task(pool.generate_many(requests(4)))
        await a_while()
        engines["e1"].limit = 100
        pool.quarantine("e0", "gone")
        assert [tokens(done) for done in await task] == [list(range(2 + i)) for i in range(4)]
        assert len(engines["e1"].seen) == 4 and asyncio.current_task().cancelling() == 0

    asyncio.run(main())


def test_errors_of_single_requests_and_deadlines():
    async def main():
        pool, engines = together(1)
        late, seen = DeadlineError("late", fix="wait"), []

        def spoil(results):
            seen.append(results)
            return [EngineError("moody", fix="x"), late, results[2]]

        engines["e0"].spoil = spoil
        found = await pool.generate_many(requests(3))
        assert tokens(found[0]) == [0, 1] and found[1] is late and tokens(found[2]) == [0, 1, 2, 3]
        assert engines["e0"].seen.count("r0") == 2 and engines["e0"].seen.count("r1") == 1
        engines["e0"].raises = EngineError("always", fix="x")
        with pytest.raises(EngineError, match="always"):
            await pool.generate_many(requests(3))
        engines["e0"].raises, engines["e0"].ok = OSError("unplugged"), False
        with pytest.raises(QuorumError, match="unplugged"):
            await pool.generate_many(requests(3))

    asyncio.run(main())


def test_another_number_of_answers_than_of_requests_stops_the_run():
    async def main():
        pool, engines = together(1)
        for spoil in (lambda results: results[1:], lambda results: [*results, results[0]], lambda results: None, iter):
            engines["e0"].spoil = spoil
            with pytest.raises(EngineError, match=r"engine 'e0' answered request 'r0' with .*where 3 answers were due"):
                await pool.generate_many(requests(3))
        assert not pool._calls and pool._members["e0"].load == 0

    asyncio.run(main())


async def one_in_flight(many, makes=None):
    """Two members, a request that stands still on one of them, and that one's name."""
    pool, engines = together(2)
    for engine in engines.values():
        engine.limit, engine.makes = 1, makes
    task = asyncio.create_task(pool.generate_many(requests(1)) if many else pool.generate(requests(1)[0]))
    await a_while()
    (name,) = [name for name, member in pool._members.items() if member.load]
    return pool, engines, task, name


@pytest.mark.parametrize("makes", MAKES, ids=repr)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("many", [False, True])
def test_a_caller_that_is_cancelled_as_its_member_is_lost_is_cancelled(many, first, makes):
    async def main():
        pool, _, task, name = await one_in_flight(many, makes)
        if first:
            task.cancel()
        pool.quarantine(name, "unplugged")
        if not first:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
        assert task.cancelling() == 1 and not pool._calls

    asyncio.run(main())


def test_cancelling_the_caller_cancels_the_batch():
    async def main():
        pool, engines = together(1)
        engines["e0"].limit = 1
        task = asyncio.create_task(pool.generate_many(requests(2)))
        await a_while()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not pool._calls and pool._members["e0"].load == 0

    asyncio.run(main())


def test_closing_goes_on_where_one_fails():
    async def main():
        _, engines, _ = make(3)

        async def fail():
            raise EngineError("no", fix="x")

        engines["e1"].close = fail
        with pytest.raises(EngineError, match="no"):
            await close_all([engine.close for engine in engines.values()])
        assert engines["e0"].closed and engines["e2"].closed

    asyncio.run(main())


class Slow(FakeEngine):
    """Fails every request that is in flight when it is told to; how it is takes it a while to say."""

    async def generate(self, request):
        self.seen.append(request.id)
        await self.gate.wait()
        if self.raises:
            raise self.raises
        return await super().generate(request)

    async def health(self):
        await asyncio.sleep(0.02)
        return await super().health()


def slow_and_well():
    engines = {"e0": Slow("e0"), "e1": FakeEngine("e1")}
    pool = Pool(engines)
    for name in engines:
        admit(pool, name)
    engines["e0"].gate.clear()
    return pool, engines


def test_a_member_that_dies_with_many_requests_loses_all_of_them_to_the_others():
    async def main():
        pool, engines = slow_and_well()
        tasks = [asyncio.create_task(pool.generate(request(f"r{i}"))) for i in range(6)]
        await a_while()
        assert len(engines["e0"].seen) == 3
        engines["e0"].raises, engines["e0"].ok = EngineError("connection lost", fix="x"), False
        engines["e0"].gate.set()
        assert [tokens(done) for done in await asyncio.gather(*tasks)] == [[0, 1, 2, 3]] * 6
        assert "connection lost" in pool.quarantined()["e0"] and not pool._calls

    asyncio.run(main())


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("follows", [True, False])
def test_a_member_that_was_lost_and_came_back_before_it_said_how_it_is_stays(ok, follows):
    """`follows`: the pool of a sampler process, which is told by the controller's."""

    async def main():
        pool, engines = slow_and_well()
        task = asyncio.create_task(pool.generate(request("r0")))
        await a_while()
        engines["e0"].raises, engines["e0"].ok = EngineError("connection lost", fix="x"), ok
        engines["e0"].gate.set()
        await asyncio.sleep(0.01)  # its health is on the way
        well = pool.state()
        if follows:
            gate = {**well["gate"], "serves": {"e1": well["gate"]["serves"]["e1"]}}
            pool.follow({**well, "gate": gate, "quarantined": {"e0": "another call noticed"}})
            pool.follow(well)
        else:
            pool.quarantine("e0", "another call noticed")
            admit(pool, "e0")
            pool.readmit("e0")
        engines["e0"].raises = None
        assert tokens(await task) == [0, 1, 2, 3] and not pool.quarantined()

    asyncio.run(main())


def test_the_loss_of_another_member_excuses_no_error():
    async def main():
        pool, engines = slow_and_well()
        task = asyncio.create_task(pool.generate(request("r0")))
        await a_while()
        engines["e0"].raises = EngineError("no such request", fix="x")
        engines["e0"].gate.set()
        await a_while()
        pool.quarantine("e1", "gone")
        with pytest.raises(EngineError, match="E600: no such request"):
            await task
        assert engines["e0"].seen == ["r0"]

    asyncio.run(main())


def spans(**odd):
    return (Span(**({"start": 0, "end": 2, "version": version(0)} | odd)),)


@pytest.mark.parametrize(
    ("spoilt", "why"),
    [
        (lambda done: None, "NoneType, which is no completion"),
        (lambda done: {"tokens": [1]}, "dict, which is no completion"),
        (lambda done: asyncio.CancelledError(), "CancelledError, which is no completion"),
        (lambda done: replace(done, finish="stop"), "finish 'stop', which is no Finish"),
        (lambda done: replace(done, columns=None), "no array of tokens"),
        (lambda done: replace(done, columns={}), "no array of tokens"),
        (lambda done: replace(done, columns=[1]), "no array of tokens"),
        (lambda done: replace(done, columns={"tokens": [[1], [1, 2]]}), "no array of tokens"),
        (lambda done: replace(done, spans=None), "version spans None"),
        (lambda done: replace(done, spans=(None,)), "version spans "),
        (lambda done: replace(done, spans=((0, 2, version(0)),)), "version spans "),
        (lambda done: replace(done, spans=spans(start=0.0)), "version spans "),
        (lambda done: replace(done, spans=spans(end=2.0)), "version spans "),
        (lambda done: replace(done, spans=spans(end=np.int64(2))), "version spans "),
        (lambda done: replace(done, spans=spans(end=True)), "version spans "),
        (lambda done: replace(done, spans=spans(version=["main", 0, 0])), "version spans "),
        (lambda done: replace(done, spans=spans(version=version(np.int64(0)))), "version spans "),
        (lambda done: replace(done, spans=spans(version=version(0, ["main"]))), "version spans "),
        (lambda done: replace(done, spans=spans(version=replace(version(0), lineage=0.0))), "version spans "),
        (lambda done: replace(done, columns={"tokens": 5}), "no array of tokens"),
        (lambda done: replace(done, columns={"tokens": np.zeros((2, 1), np.int32)}), "no array of tokens"),
        (lambda done: replace(done, columns={"tokens": np.zeros(3, np.int32)}), "3 tokens, 2 were asked for"),
        (lambda done: replace(done, request="other"), "the answer to 'other'"),
    ],
)
@pytest.mark.parametrize("many", [False, True])
def test_what_is_no_answer_to_its_request_stops_the_run(spoilt, why, many):
    class Odd(Together):
        async def generate(self, request):
            return spoilt(await super().generate(request))

    async def main():
        pool = Pool({"e0": Odd("e0")})
        admit(pool, "e0")
        with pytest.raises(EngineError, match=f"engine 'e0' answered request 'r0' with {why}"):
            await asyncio.wait_for(pool.generate_many(requests(1)) if many else pool.generate(requests(1)[0]), 5.0)
        assert not pool._calls and pool._members["e0"].load == 0

    asyncio.run(main())


def test_what_follows_an_aborted_part_is_counted_from_there():
    class Long(FakeEngine):
        async def generate(self, request):
            done = await super().generate(request)
            if request.resume is None:
                return done
            return replace(done, columns={name: np.resize(part, 3) for name, part in done.columns.items()})

    async def main():
        pool = Pool({"e0": Long("e0", tokens_at_once=2)})
        admit(pool, "e0")
        task = asyncio.create_task(pool.generate(request(n=4)))
        await a_while()
        await pool.hold("e0", "abort")
        await a_while()
        await pool.release("e0")
        with pytest.raises(EngineError, match="3 tokens, 2 were asked for"):
            await task

    asyncio.run(main())


def test_answers_in_another_order_than_the_requests_stop_the_run():
    async def main():
        pool, engines = together(1)
        engines["e0"].spoil = lambda results: results[::-1]
        with pytest.raises(EngineError, match="answered request 'r0' with the answer to 'r1'"):
            await pool.generate_many(requests(2))

    asyncio.run(main())


def test_each_request_of_a_batch_has_its_own_deadline():
    async def main():
        pool, engines = together(1)
        engines["e0"].limit = 1
        short, long = request("r0", deadline_s=0.1), request("r1", deadline_s=5.0)
        task = asyncio.create_task(pool.generate_many([short, long]))
        await a_while()
        await pool.hold("e0", "abort")
        await asyncio.sleep(0.15)
        assert not task.done()
        engines["e0"].limit = 100
        await pool.release("e0")
        first, second = await task
        assert isinstance(first, DeadlineError) and tokens(second) == [0, 1, 2, 3]

    asyncio.run(main())


@pytest.mark.parametrize("many", [False, True])
def test_what_was_aborted_does_not_begin_again_where_its_member_is_lost(many):
    async def main():
        pool, engines, task, name = await one_in_flight(many)

        async def hangs(request_ids=None):
            await asyncio.sleep(0.05)

        engines[name].abort = hangs
        aborting = asyncio.create_task(pool.abort(["r0"]))
        await a_while()
        pool.quarantine(name, "gone")
        done = (await task)[0] if many else await task
        await aborting
        assert done.finish == Finish.ABORT and tokens(done) == []

    asyncio.run(main())


def test_a_batch_that_is_aborted_with_all_of_its_tokens_is_complete():
    async def main():
        pool, engines = together(1)
        engines["e0"].spoil = lambda results: [replace(done, finish=Finish.ABORT) for done in results]
        (done,) = await pool.generate_many(requests(1))
        assert (done.finish, tokens(done), engines["e0"].seen) == (Finish.LENGTH, [0, 1], ["r0"])

    asyncio.run(main())


@pytest.mark.parametrize("makes", MAKES, ids=repr)
@pytest.mark.parametrize("many", [False, True])
def test_a_lost_request_moves_whatever_its_client_makes_of_the_cancellation(many, makes):
    async def main():
        pool, engines, task, name = await one_in_flight(many, makes)
        for engine in engines.values():
            engine.limit = 100
        engines[name].gate.clear()
        pool.quarantine(name, "gone")
        done = await asyncio.wait_for(task, 5.0)
        assert tokens(done[0] if many else done) == [0, 1]
        assert task.cancelling() == 0 and not pool._calls

    asyncio.run(main())


@pytest.mark.parametrize("makes", MAKES, ids=repr)
@pytest.mark.parametrize("many", [False, True])
def test_a_cancelled_caller_is_cancelled_whatever_its_client_makes_of_that(many, makes):
    async def main():
        pool, _, task, _ = await one_in_flight(many, makes)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
        assert not pool._calls and not pool.quarantined()

    asyncio.run(main())


@pytest.mark.parametrize("many", [False, True])
def test_a_client_that_cancels_its_own_request_is_a_broken_connection(many):
    async def main():
        pool, engines = together(2)

        async def cancelled(_):
            await asyncio.sleep(0)
            raise asyncio.CancelledError

        engines["e0"].generate = engines["e0"].generate_many = cancelled
        done = await asyncio.wait_for(pool.generate_many(requests(1)) if many else pool.generate(requests(1)[0]), 5)
        assert tokens(done[0] if many else done) == [0, 1]
        assert pool.quarantined()["e0"].startswith("OSError: its client cancelled the request")

    asyncio.run(main())


def test_publications_that_end_waiting_requests_are_no_fault_of_an_engine():
    """In a sampler process, which does not hold members and follows a publication when it is over."""

    async def main():
        pool, engines = together(1)
        engine = engines["e0"]
        engine.gate.clear()
        task = asyncio.create_task(pool.generate(request()))
        for n in range(6):
            await a_while()
            assert len(engine.seen) == n + 1
            await engine.abort()
            await a_while()
            pool.follow(pool.state())
        engine.gate.set()
        assert tokens(await asyncio.wait_for(task, 5)) == [0, 1, 2, 3]

    asyncio.run(main())


def followed(min_engines=1, held=()):
    """The controller's pool, and one that follows it and will be asked by way of e0, which is gone."""
    control, _ = together(2)
    follower, engines = together(2)
    control.min_engines = min_engines
    follower.follow(control.state(held=held))
    engines["e0"].raises, engines["e0"].ok = ConnectionResetError("reset"), False
    follower._members["e1"].load = 1
    return control, follower


def test_what_a_follower_lost_itself_comes_back_when_it_was_sent_weights():
    async def main():
        control, follower = followed()
        assert (await follower.generate(request())).engine == "e1"
        control.alias(version(0), version(1))
        follower.follow(control.state())
        assert set(follower.quarantined()) == {"e0"}
        admit(control, "e0", 2)
        follower.follow(control.state())
        assert not follower.quarantined()

    asyncio.run(main())


def test_a_follower_keeps_the_controllers_quorum():
    async def main():
        _, follower = followed(min_engines=2)
        with pytest.raises(QuorumError, match=r"1 of 2 engines remain, sync.min_engines is 2 .*reset"):
            await follower.generate(request())

    asyncio.run(main())


def test_a_follower_that_lost_a_member_during_a_publication_says_so_at_its_end():
    async def main():
        control, follower = followed(min_engines=2, held=["e1"])
        task = asyncio.create_task(follower.generate(request(deadline_s=30.0)))
        await a_while()
        assert follower.members() == ("e1",) and not task.done()
        with pytest.raises(QuorumError, match=r"1 of 2 engines remain, sync.min_engines is 2 .*reset"):
            follower.follow(control.state())
        assert (await asyncio.wait_for(task, 20)).engine == "e1"

    asyncio.run(main())


def test_what_was_aborted_does_not_begin_again_where_its_batch_fails():
    async def main():
        pool, engines, task, name = await one_in_flight(many=True)
        engines[name].spoil, engines[name].ok = lambda results: 1 / 0, False
        await pool.abort(["r0"])
        (done,) = await asyncio.wait_for(task, 5.0)
        assert done.finish == Finish.ABORT and tokens(done) == []
        assert sum(len(engine.seen) for engine in engines.values()) == 1

    asyncio.run(main())


@pytest.mark.parametrize("many", [False, True])
def test_what_a_library_left_of_a_cancellation_is_not_taken_for_one(many):
    """Timers of some libraries cancel the task that waits and swallow that, without taking it back."""

    async def main():
        pool, _ = together(2)

        async def caller():
            asyncio.current_task().cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1)
            assert asyncio.current_task().cancelling() == 1
            return await pool.generate_many(requests(1)) if many else [await pool.generate(requests(1)[0])]

        (done,) = await asyncio.wait_for(asyncio.create_task(caller()), 20)
        assert done.finish == Finish.LENGTH and len(tokens(done))

    asyncio.run(main())


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), EngineError("broken", fix="x")])
def test_a_caller_that_is_cancelled_while_its_member_says_how_it_is_is_cancelled(error):
    async def main():
        pool, engines = together(1)
        asked = asyncio.Event()

        async def health():
            asked.set()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            return Health(ok=True)

        engines["e0"].raises, engines["e0"].health = error, health
        task = asyncio.create_task(pool.generate(request(deadline_s=60.0)))
        await asyncio.wait_for(asked.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 20)

    asyncio.run(main())
