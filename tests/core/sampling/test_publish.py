"""Publishing: order of calls per phase, refusal, quarantine and return, deadlines, first error of any side."""

import asyncio

import pytest
from sampling_fakes import SPEC, FakeEngine, a_while, request, version

from miles_core.config.schema import SyncKeys, Verify
from miles_core.contracts.weights import Evidence, Manifest, Receipt, TransferPlan
from miles_core.errors import DeadlineError, QuorumError, WeightError
from miles_core.pool import Pool
from miles_core.publish import Publisher, Publishers
from miles_core.weights import make_manifest


class Trainer:
    """Two ranks; `fail[method]` is raised, `hang` methods wait until interrupted."""

    count = 2

    def __init__(self, log):
        self.log, self.fail, self.hang = log, {}, set()
        self.interrupted = asyncio.Event()
        self.staged = None

    async def call(self, method, *args, rank=None, timeout_s):
        self.log.append(f"trainer.{method}" + ("" if rank is None else f".{rank}"))
        assert 0 < timeout_s <= 600
        await asyncio.sleep(0.001)
        if method in self.fail:
            raise self.fail[method]
        if method in self.hang:
            try:
                await asyncio.wait_for(self.interrupted.wait(), timeout_s)
            except TimeoutError:
                raise DeadlineError(f"{method} late", fix="x") from None
        if method == "specs":
            return [[SPEC], [SPEC]]
        if method == "describe":
            return [b"s0", b"s1"]
        if method == "stage":
            self.staged = make_manifest(args[0], [SPEC], {"w": [f"digest of {args[0]}"]})
            return [self.staged, None]
        return [None] * (1 if rank is not None else 2)

    def interrupt(self):
        self.log.append("trainer.interrupt")
        self.interrupted.set()

    async def close(self):
        pass


class Transport:
    def __init__(self, phase):
        self.phase, self.plans = phase, []

    def plan(self, specs, senders, links):
        self.plans.append((list(specs), list(senders), sorted(links)))
        return TransferPlan(senders=tuple(b"p" + s for s in senders), links={n: b"l" for n in links})


class Link:
    def __init__(self, name, log):
        self.name, self.log = name, log
        self.changes, self.fail, self.hang = {}, {}, set()

    async def _do(self, method):
        self.log.append(f"{self.name}.{method}")
        await asyncio.sleep(0.001)
        if method in self.hang:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.log.append(f"{self.name}.{method}.cancelled")
                raise
        if method in self.fail:
            raise self.fail[method]

    async def describe(self):
        await self._do("describe")
        return self.name.encode()

    async def connect(self, plan):
        await self._do("connect")

    async def stage(self, manifest: Manifest):
        await self._do("stage")

    async def carry(self, manifest: Manifest):
        await self._do("carry")
        fields = {
            "engine": self.name,
            "version": manifest.version,
            "evidence": Evidence.LIVE,
            "digests": dict(manifest.digests),
            "root": manifest.root,
            "nbytes": 4,
            "seconds": 0.001,
        }
        return Receipt(**(fields | self.changes))

    async def close(self):
        self.log.append(f"{self.name}.close")


class Rig:
    def __init__(self, count=2, phase="live", mode="in_place", **keys):
        self.log, self.events, self.carried = [], [], []
        self.engines = {f"e{i}": FakeEngine(f"e{i}") for i in range(count)}
        for name, engine in self.engines.items():
            self._record(name, engine)
        self.pool = Pool(self.engines, on_event=self.event)
        self.trainer = Trainer(self.log)
        self.links = {name: Link(name, self.log) for name in self.engines}
        self.transport = Transport(phase)
        self.states = []
        self.publisher = Publisher(
            self.pool,
            self.transport,
            self.links,
            self.trainer,
            SyncKeys(**({"deadline_s": 5.0} | keys)),
            mode,
            on_event=self.event,
            on_serving=self.serving,
        )

    def event(self, kind, fields):
        self.events.append(kind)
        if kind == "weights_carried":
            self.carried.append(fields)

    async def serving(self, state):
        self.states.append(state)

    def _record(self, name, engine):
        pause, resume = engine.pause, engine.resume

        async def paused(mode):
            self.log.append(f"{name}.pause.{mode}")
            await pause(mode)

        async def resumed():
            self.log.append(f"{name}.resume")
            await resume()

        engine.pause, engine.resume = paused, resumed

    def serves(self):
        return {n: self.pool.gate.version(n, "main") for n in self.engines}


def run(coroutine):
    return asyncio.run(coroutine)


def test_live_order_of_calls():
    async def main():
        rig = Rig(1, mode="recompute")
        receipts = await rig.publisher.publish(version(0))
        assert rig.log == [
            "trainer.specs",
            "trainer.describe",
            "e0.describe",
            "trainer.connect.0",
            "trainer.connect.1",
            "e0.connect",
            "trainer.stage",
            "e0.stage",
            "e0.pause.recompute",
            "e0.carry",
            "trainer.carry",
            "e0.resume",
        ]
        assert rig.transport.plans == [([SPEC], [b"s0", b"s1"], ["e0"])]
        assert receipts["e0"].version == version(0) and rig.serves() == {"e0": version(0)}
        assert rig.carried[0]["bytes"] == 4 and rig.carried[0]["engines"] == ["e0"]
        rig.log.clear()
        await rig.publisher.publish(version(1))  # the connection is kept
        assert rig.log[:2] == ["trainer.stage", "e0.stage"]
        assert rig.states[-1]["gate"]["serves"]["e0"] == [version(1)]
        assert rig.events == ["weights_carried", "weights_carried"]

    run(main())


def test_staged_carries_before_the_pause():
    async def main():
        rig = Rig(1, phase="staged")
        await rig.publisher.publish(version(0))
        late = rig.log[rig.log.index("trainer.stage") :]
        assert late[:1] == ["trainer.stage"] and set(late[1:3]) == {"trainer.carry", "e0.stage"}
        assert late[3:] == ["e0.pause.in_place", "e0.carry", "e0.resume"]

    run(main())


@pytest.mark.parametrize(
    "changes",
    [
        {"digests": {}},
        {"digests": {"w": ("wrong",)}},
        {"version": version(9)},
        {"evidence": Evidence.RECEIVED},
        {"engine": "e9"},
    ],
)
def test_a_receipt_that_proves_nothing_quarantines_its_member(changes):
    async def main():
        rig = Rig(2)
        rig.links["e1"].changes = changes
        receipts = await rig.publisher.publish(version(0))
        assert set(receipts) == {"e0"}
        assert rig.serves() == {"e0": version(0), "e1": None}
        assert rig.pool.quarantined().keys() == {"e1"}
        # It was never resumed, and the transport was planned anew without it.
        assert "e1.resume" not in rig.log
        assert [p[2] for p in rig.transport.plans] == [["e0", "e1"], ["e0"]]

    run(main())


def test_the_only_member_refused_stops_the_run_with_the_reason():
    async def main():
        rig = Rig(1)
        rig.links["e0"].changes = {"digests": {"w": ("wrong",)}}
        with pytest.raises(QuorumError, match=r"0 of 1 engines remain.*tensor 'w' differs in piece 0"):
            await rig.publisher.publish(version(0))
        assert rig.serves() == {"e0": None} and "e0.resume" not in rig.log

    run(main())


def test_min_engines_counts_members():
    async def main():
        rig = Rig(3, min_engines=3)
        rig.links["e2"].fail["carry"] = WeightError("torn", fix="x")
        with pytest.raises(QuorumError, match=r"sync.min_engines is 3"):
            await rig.publisher.publish(version(0))
        assert set(rig.serves().values()) == {None}

    run(main())


def test_a_quarantined_member_returns_through_a_full_resync():
    async def main():
        rig = Rig(2)
        await rig.publisher.publish(version(0))
        rig.links["e1"].fail["carry"] = WeightError("torn", fix="x")
        await rig.publisher.publish(version(1))
        assert rig.serves() == {"e0": version(1), "e1": None}
        rig.links["e1"].fail.clear()
        rig.engines["e1"].ok = False
        await rig.publisher.publish(version(2))  # not well: left alone
        assert rig.pool.members() == ("e0",)
        rig.engines["e1"].ok = True
        rig.log.clear()
        await rig.publisher.publish(version(3))
        assert "e1.connect" in rig.log and rig.log[-1].endswith("resume")
        assert rig.serves() == {"e0": version(3), "e1": version(3)}
        assert rig.pool.quarantined() == {} and "engine_returned" in rig.events

    run(main())


def test_a_member_lost_and_found_between_publications_is_connected_anew():
    async def main():
        rig = Rig(2)
        await rig.publisher.publish(version(0))
        rig.pool.quarantine("e1", "its connection broke")
        rig.log.clear()
        await rig.publisher.publish(version(1))
        assert {"e0.connect", "e1.connect"} <= set(rig.log)

    run(main())


def test_an_alias_is_not_enough_for_a_member_that_returns():
    async def main():
        rig = Rig(2)
        await rig.publisher.publish(version(0))
        assert await rig.publisher.publish(version(1), changed=False) == {}
        assert set(rig.serves().values()) == {version(1)}
        rig.pool.quarantine("e1", "away")
        receipts = await rig.publisher.publish(version(2), changed=False)
        assert set(receipts) == {"e0", "e1"} and set(rig.serves().values()) == {version(2)}

    run(main())


def test_the_first_publication_is_never_an_alias():
    async def main():
        rig = Rig(1)
        assert set(await rig.publisher.publish(version(0), changed=False)) == {"e0"}

    run(main())


def test_trainer_error_cancels_links_and_surfaces():
    async def main():
        rig = Rig(2)
        rig.trainer.fail["carry"] = WeightError("no space", fix="x")
        for link in rig.links.values():
            link.hang.add("carry")
        with pytest.raises(WeightError, match="no space"):
            await rig.publisher.publish(version(0))
        assert {"e0.carry.cancelled", "e1.carry.cancelled"} <= set(rig.log)
        assert set(rig.serves().values()) == {None}

    run(main())


def test_link_error_interrupts_the_trainer_and_the_rest_goes_on():
    async def main():
        rig = Rig(2)
        rig.trainer.hang.add("carry")
        rig.links["e1"].fail["carry"] = WeightError("cable", fix="x")

        def interrupt():
            rig.log.append("trainer.interrupt")
            rig.trainer.hang.clear()
            rig.trainer.interrupted.set()

        rig.trainer.interrupt = interrupt
        receipts = await rig.publisher.publish(version(0))
        assert "trainer.interrupt" in rig.log and set(receipts) == {"e0"}

    run(main())


def test_a_trainer_error_while_an_engine_is_dead_is_the_engines_fault():
    async def main():
        rig = Rig(2)
        real = rig.trainer.call

        async def call(method, *args, **kw):
            if method == "carry" and "e1" in rig.pool.members():
                raise WeightError("the link closed", fix="x")
            return await real(method, *args, **kw)

        rig.trainer.call = call
        rig.links["e1"].hang.add("carry")
        rig.engines["e1"].ok = False
        assert set(await rig.publisher.publish(version(0))) == {"e0"}
        assert "not well" in rig.pool.quarantined()["e1"]

    run(main())


def test_a_member_past_the_deadline_is_quarantined():
    async def main():
        rig = Rig(2, deadline_s=1.0)
        rig.links["e1"].hang.add("carry")
        assert set(await rig.publisher.publish(version(0))) == {"e0"}
        assert "passed 1 s, waiting for ['e1']" in rig.pool.quarantined()["e1"]
        assert "e1.carry.cancelled" in rig.log

    run(main())


def test_a_trainer_past_the_deadline_stops_the_run():
    async def main():
        rig = Rig(1, deadline_s=1.0)
        rig.trainer.hang.add("stage")
        with pytest.raises(DeadlineError, match="stage late"):
            await rig.publisher.publish(version(0))

    run(main())


def test_a_member_that_cannot_pause_is_at_fault():
    async def main():
        rig = Rig(2)

        async def broken(mode):
            raise OSError("gone")

        rig.engines["e0"].pause = broken
        assert set(await rig.publisher.publish(version(0))) == {"e1"}
        assert "gone" in rig.pool.quarantined()["e0"]

    run(main())


def test_staged_manifest_must_be_the_asked_version_and_whole():
    async def main():
        rig = Rig(1)
        real = rig.trainer.call

        async def other(method, *args, **kw):
            if method == "stage":
                return [make_manifest(version(7), [SPEC], {"w": ["x"]})]
            return await real(method, *args, **kw)

        rig.trainer.call = other
        with pytest.raises(WeightError, match=r"staged main@0.7 when main@0.0 was asked for"):
            await rig.publisher.publish(version(0))

        async def empty(method, *args, **kw):
            return [make_manifest(version(0), [], {})] if method == "stage" else await real(method, *args, **kw)

        rig.trainer.call = empty
        with pytest.raises(WeightError, match="without 1 tensors of the dry pass, 'w' first"):
            await rig.publisher.publish(version(0))

    run(main())


def test_a_plan_must_cover_every_side():
    async def main():
        rig = Rig(2)
        rig.transport.plan = lambda specs, senders, links: TransferPlan(senders=(b"a",), links={"e0": b""})
        with pytest.raises(WeightError, match=r"planned 1 senders and links \['e0'\]; there are 2 and"):
            await rig.publisher.publish(version(0))

    run(main())


def test_requests_wait_for_the_receipt():
    """A request that arrives while weights travel starts only after the gate has admitted the member."""

    async def main():
        rig = Rig(1)
        await rig.publisher.publish(version(0))
        rig.trainer.hang.add("carry")
        publishing = asyncio.create_task(rig.publisher.publish(version(1)))
        while "e0.pause.in_place" not in rig.log[-3:]:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        asking = asyncio.create_task(rig.pool.generate(request("late")))
        await asyncio.sleep(0.02)
        assert "late" not in rig.engines["e0"].seen
        rig.engines["e0"].version = version(1)
        rig.trainer.interrupted.set()
        await publishing
        assert {s.version for s in (await asking).spans} == {version(1)}

    run(main())


def test_weaker_verify_is_taken_from_the_config():
    async def main():
        rig = Rig(1, verify=Verify.received)
        rig.links["e0"].changes = {"evidence": Evidence.RECEIVED}
        assert set(await rig.publisher.publish(version(0))) == {"e0"}

    run(main())


def test_publishers_route_by_policy():
    async def main():
        rig = Rig(1)
        other = Publisher(rig.pool, Transport("live"), rig.links, rig.trainer, SyncKeys(), policy="other")
        both = Publishers({"main": rig.publisher, "other": other})
        await both.publish(version(0))
        await both.publish(version(4, "other"))
        assert rig.pool.gate.version("e0", "main") == version(0)
        assert rig.pool.gate.version("e0", "other") == version(4, "other")

    run(main())


def test_a_member_that_returned_for_another_policy_is_sent_this_one_again():
    """An alias would leave it without: it serves nothing of this policy."""

    async def main():
        rig = Rig(2)
        other = Publisher(rig.pool, Transport("live"), rig.links, rig.trainer, SyncKeys(), policy="other")
        await rig.publisher.publish(version(0))
        await other.publish(version(0, "other"))
        rig.pool.quarantine("e1", "a connection broke")
        await other.publish(version(1, "other"))
        assert rig.pool.members() == ("e0", "e1") and rig.serves() == {"e0": version(0), "e1": None}
        assert set(await rig.publisher.publish(version(1), changed=False)) == {"e0", "e1"}
        assert rig.serves() == {"e0": version(1), "e1": version(1)}
        assert await rig.publisher.publish(version(2), changed=False) == {}

    run(main())


async def gone(manifest):
    """In the place of a link's `carry`."""
    await asyncio.sleep(0.02)
    raise ConnectionResetError("e0 is gone")


@pytest.mark.parametrize("follows", [False, True])
def test_publications_that_are_tried_again_end_a_request_as_often_as_they_must(follows):
    """e0 fails in every publication and is well again at the next. A request that e1 has not begun to answer is ended
    twice by each; `follows`: through the pool of a sampler process."""

    async def main():
        rig = Rig(2, mode="abort")
        pool = Pool(rig.engines) if follows else rig.pool

        async def serving(state):
            if follows:
                pool.follow(state)

        rig.publisher.on_serving = serving
        await rig.publisher.publish(version(0))
        rig.links["e0"].carry = gone
        rig.engines["e1"].limit = 0  # nothing is sampled meanwhile
        pool._members["e0"].load = 5
        task = asyncio.create_task(pool.generate(request(deadline_s=30.0)))
        await a_while()
        for number in range(1, 6):
            assert set(await rig.publisher.publish(version(number))) == {"e1"}
            await a_while()
        assert len(rig.engines["e1"].seen) > 5
        rig.engines["e1"].limit = 9
        assert (await asyncio.wait_for(task, 20)).columns["tokens"].tolist() == [0, 1, 2, 3]

    run(main())


@pytest.mark.parametrize("mode", ["in_place", "abort"])
@pytest.mark.parametrize("follows", [False, True])
def test_a_publication_that_brings_a_member_back_is_waited_for(follows, mode):
    """e1 comes back in the publication in which e0, the last one, is lost: the request goes on there. `follows`: in the
    pool of a sampler process."""

    async def main():
        rig = Rig(2, mode=mode)
        pool = Pool(rig.engines) if follows else rig.pool

        async def serving(state):
            if follows:
                pool.follow(state)
                await a_while()

        rig.publisher.on_serving = serving
        await rig.publisher.publish(version(0))
        rig.pool.quarantine("e1", "a connection broke")
        if follows:
            pool.follow(rig.pool.state())
        rig.engines["e0"].limit = 0
        task = asyncio.create_task(pool.generate(request(deadline_s=30.0)))
        await a_while()
        rig.links["e0"].carry = gone
        assert set(await rig.publisher.publish(version(1))) == {"e1"}
        done = await asyncio.wait_for(task, 20)
        assert (done.engine, {span.version for span in done.spans}) == ("e1", {rig.engines["e1"].version})
        assert rig.pool.members() == pool.members() == ("e1",)

    run(main())


@pytest.mark.parametrize("changed", [True, False])
def test_a_quorum_that_a_request_lost_during_a_publication_is_missed_at_its_end(changed):
    async def main():
        rig = Rig(2, min_engines=2)
        await rig.publisher.publish(version(0))

        resume, alias = rig.engines["e0"].resume, rig.pool.alias

        async def resumed():
            rig.pool.quarantine("e1", "a request found it gone")
            await resume()

        def aliased(old, new):
            rig.pool.quarantine("e1", "a request found it gone")
            alias(old, new)

        rig.engines["e0"].resume, rig.pool.alias = resumed, aliased
        with pytest.raises(QuorumError, match=r"1 of 2 engines remain.*a request found it gone"):
            await rig.publisher.publish(version(1), changed=changed)

    run(main())
