"""Turns of phases on shared devices."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.errors import DeadlineError
from miles_core.residency import Lodger, Residency


class Tenant:
    def __init__(self, name, log):
        self.name, self.log, self.fail = name, log, None

    async def offload(self, tags):
        self.log.append(("out", self.name, tuple(tags)))
        await asyncio.sleep(0)

    async def onload(self, tags):
        if self.fail:
            raise self.fail
        self.log.append(("in", self.name, tuple(tags)))
        await asyncio.sleep(0)


def make():
    log = []
    engine, trainer = Tenant("engine", log), Tenant("trainer", log)
    lodgers = {
        "engine": Lodger(
            tenant=engine,
            needs={"sample": frozenset({"weights", "kv"}), "publish": frozenset({"weights"})},
            resident=frozenset({"weights", "kv"}),
        ),
        "trainer": Lodger(
            tenant=trainer,
            needs={"train": frozenset({"params", "optim"}), "publish": frozenset({"params"})},
        ),
    }
    return Residency(lodgers), log, engine, trainer


def test_moves_out_before_it_moves_in():
    async def main():
        residency, log, _, _ = make()
        for phase in ("sample", "train", "publish", "sample"):
            async with residency.turn(phase):
                pass
        assert log == [
            ("out", "engine", ("kv", "weights")),
            ("in", "trainer", ("optim", "params")),
            ("out", "trainer", ("optim",)),
            ("in", "engine", ("weights",)),
            ("out", "trainer", ("params",)),
            ("in", "engine", ("kv",)),
        ]
        assert residency.resident == {"engine": {"weights", "kv"}, "trainer": frozenset()}

    asyncio.run(main())


def test_unshared_devices_are_free():
    async def main():
        residency = Residency()
        async with residency.turn("train"), residency.turn("sample", 0.001):
            pass

    asyncio.run(main())


def test_a_deadline_names_the_holder_and_leaves_the_queue_sound():
    async def main():
        residency, _, _, _ = make()
        async with residency.turn("sample"):
            with pytest.raises(DeadlineError, match=r"'train' waited 0.01 s for the devices, which 'sample' holds"):
                async with residency.turn("train", 0.01):
                    pass
            async with residency.turn("sample", 0.01):  # the one that gave up blocks nobody
                pass
        async with residency.turn("train", 0.01):
            pass

    asyncio.run(main())


def test_those_behind_one_that_gave_up_are_let_in():
    async def main():
        residency, _, _, _ = make()

        async def enter(phase, deadline_s):
            async with residency.turn(phase, deadline_s):
                pass

        async with residency.turn("sample"):
            train = asyncio.create_task(enter("train", 0.05))
            await asyncio.sleep(0)
            behind = asyncio.create_task(enter("sample", 5.0))
            with pytest.raises(DeadlineError):
                await train
            await asyncio.wait_for(behind, 1.0)

    asyncio.run(main())


def test_a_failing_tenant_ends_the_turn():
    async def main():
        residency, _, _, trainer = make()
        trainer.fail = RuntimeError("no memory")
        with pytest.raises(RuntimeError, match="no memory"):
            async with residency.turn("train"):
                pass
        trainer.fail = None
        async with residency.turn("train", 0.01):
            assert residency.resident["trainer"] == {"params", "optim"}

    asyncio.run(main())


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from(["sample", "train", "publish"]), st.integers(0, 3), st.booleans()), max_size=12)
)
def test_phases_never_overlap_and_everyone_gets_a_turn(jobs):
    async def main():
        residency, _, _, _ = make()
        inside, served = [], 0

        async def job(phase, rounds):
            nonlocal served
            async with residency.turn(phase, 5.0):
                inside.append(phase)
                try:
                    for _ in range(rounds):
                        assert set(inside) == {phase}
                        await asyncio.sleep(0)
                finally:
                    inside.remove(phase)
            served += 1

        tasks = [asyncio.create_task(job(phase, rounds)) for phase, rounds, _ in jobs]
        await asyncio.sleep(0)
        for task, (_, _, cancel) in zip(tasks, jobs, strict=True):
            if cancel:
                task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results)
        assert served >= sum(not cancel for _, _, cancel in jobs)
        async with residency.turn("train", 0.1):  # nobody was forgotten inside
            pass

    asyncio.run(main())
