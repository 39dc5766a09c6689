"""What every launcher and every tracker promises."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from miles_core.contracts.launcher import WorkerSpec
from miles_core.errors import CapabilityError, DeadlineError, MilesError, StoppedError, WeightError
from miles_core.provider import Place
from miles_core.records import Version
from miles_core.testing.suite import Conformance, check, refuses_async

FACTORY = "miles_core.testing.suites.workers:echo_worker"


class LauncherConformance(Conformance):
    """With one worker always; with three where the launcher starts so many (`in_process` ones need not)."""

    kind = "launcher"
    places: ClassVar[tuple[Place, ...]] = (Place.CONTROLLER,)
    seconds = 30.0  # how long calls that should be quick may take on a busy machine

    def example(self, place: Place) -> Any:
        return self.build(place)

    def with_workers(self, count: int, work: Callable[[Any], Awaitable[None]], **payload: Any) -> bool:
        """Run `work(workers)`; `False` where the launcher does not start so many workers."""

        async def inside() -> bool:
            launcher = self.build(Place.CONTROLLER)
            spec = WorkerSpec(place=Place.TRAINER, factory=FACTORY, count=count, payload=payload)
            try:
                try:
                    workers = await launcher.start(spec)
                except CapabilityError:
                    check("one worker can be started", count > 1)
                    return False
                await work(workers)
            except BaseException:
                with contextlib.suppress(Exception):  # what went wrong first is what matters
                    await launcher.close()
                raise
            await launcher.close()
            return True

        return bool(self.run(inside()))

    def test_one_worker(self) -> None:
        async def one(workers: Any) -> None:
            count = workers.count
            check("count says how many workers there are", count == 1, count)
            found = await workers.call("where", timeout_s=self.seconds)
            check("a call returns one result per worker", len(found) == 1 and found[0][:2] == (0, 1), found)
            payload = (await workers.call("payload", timeout_s=self.seconds))[0]
            given = {"text": "ä", "number": 7, "nested": {"list": [1, None, True]}}
            check("the payload arrives unchanged", payload == given, payload)
            await self._values(workers)
            await self._errors(workers)

        self.with_workers(1, one, text="ä", number=7, nested={"list": [1, None, True]})

    async def _values(self, workers: Any) -> None:
        bits = np.array([0x80000000, 0x7FC01234, 1], np.uint32).view(np.float32).reshape(3, 1)
        version = Version(policy="main", lineage=1, number=2)
        array, back, nothing = (await workers.call("echo", bits, version, None, timeout_s=self.seconds))[0]
        same = array.dtype == bits.dtype and array.tobytes() == bits.tobytes() and array.shape == bits.shape
        check("arrays travel bit for bit", same, array)
        check("records travel", back == version and nothing is None, back)
        large = np.arange(3_000_000, dtype=np.float64)
        found = (await workers.call("echo", large, timeout_s=self.seconds))[0][0]
        check("large arrays travel", np.array_equal(found, large), found[:5])
        threads = [(await workers.call("on_its_thread", timeout_s=self.seconds))[0] for _ in range(3)]
        check("plain methods run on the thread that built the worker", all(threads), threads)

    async def _errors(self, workers: Any) -> None:
        try:
            await workers.call("refuse", "not these weights", "send others", timeout_s=self.seconds)
        except WeightError as error:
            kept = error.message == "not these weights" and error.fix == "send others"
            check("our errors arrive with text and fix", kept, str(error))
        except Exception as error:
            check("our errors arrive as they are", False, repr(error))
        try:
            await workers.call("fail", 0, "a library's own text", timeout_s=self.seconds)
        except Exception as error:
            check("other errors arrive with their own text", "a library's own text" in str(error), repr(error))
        else:
            check("an error of a worker is raised", False)
        again = (await workers.call("echo", 1, timeout_s=self.seconds))[0]
        check("a worker survives its errors", again == [1], again)

    def test_deadline_and_interrupt(self) -> None:
        async def waits(workers: Any) -> None:
            late = workers.call("wait", 1.0, timeout_s=0.1)
            await refuses_async("a call past its timeout raises DeadlineError", DeadlineError, late)
            running = asyncio.ensure_future(workers.call("wait", self.seconds, timeout_s=2 * self.seconds))
            await asyncio.sleep(1.2)
            started = time.monotonic()
            workers.interrupt()
            found = await running
            early = found == ["interrupted"] and time.monotonic() - started < self.seconds / 2
            check("interrupt turns cancelled() true in a running call", early, found)
            flags = await workers.call("is_cancelled", timeout_s=self.seconds)
            check("cancelled() is false again in the next call", flags == [False], flags)

        self.with_workers(1, waits)

    def test_coroutines(self) -> None:
        async def together(workers: Any) -> None:
            calls = [workers.call("meet", timeout_s=2.0) for _ in range(2)]
            try:
                found = await asyncio.gather(*calls)
            except DeadlineError:
                found = []
            check("coroutines of one worker run together", found == [["met"], ["met"]], found)

        self.with_workers(1, together)

    def test_failing_factory(self) -> None:
        async def fails() -> None:
            launcher = self.build(Place.CONTROLLER)
            try:
                spec = WorkerSpec(place=Place.TRAINER, factory=FACTORY, payload={"fail": 0})
                try:
                    await launcher.start(spec)
                except Exception as error:
                    told = "this worker cannot be built" in str(error)
                    check("an error of the factory surfaces with its own text", told, repr(error))
                else:
                    check("a worker that cannot be built is an error", False)
            finally:
                await launcher.close()

        self.run(fails())

    def test_close(self) -> None:
        with self.folder() as folder:
            mark = folder / "closed"

            async def closes(workers: Any) -> None:
                await workers.close()
                check("close closes the worker objects", Path(f"{mark}.0").exists(), list(folder.iterdir()))
                try:
                    await workers.close()
                except Exception as error:
                    check("closing workers twice is harmless", False, repr(error))

            self.with_workers(1, closes, closed_file=str(mark))

    def test_many_workers(self) -> None:
        async def many(workers: Any) -> None:
            found = await workers.call("where", timeout_s=self.seconds)
            order = [(rank, count) for rank, count, _ in found]
            check("results come in rank order", order == [(0, 3), (1, 3), (2, 3)], found)
            only = await workers.call("where", rank=1, timeout_s=self.seconds)
            check("rank calls one worker only", [r[0] for r in only] == [1], only)
            started = time.monotonic()
            failing = workers.call("slow_or_fail", 2, self.seconds, timeout_s=2 * self.seconds)
            try:
                await failing
            except Exception as error:
                told = "the quick one failed" in str(error) and time.monotonic() - started < self.seconds / 2
                check("the first error ends the wait for the others", told, (repr(error), time.monotonic() - started))
            workers.interrupt()
            if "in_process" not in self.offered():
                processes = {pid for _, _, pid in found}
                check("workers have processes of their own", len(processes) == 3, processes)
                await self._death(workers)

        if not self.with_workers(3, many):
            check("a launcher of processes starts several workers", "in_process" in self.offered())

    async def _death(self, workers: Any) -> None:
        waiting = asyncio.ensure_future(workers.call("wait", self.seconds, timeout_s=2 * self.seconds))
        await asyncio.sleep(0.05)
        dying = workers.call("die", rank=1, timeout_s=self.seconds)
        workers.interrupt()
        await asyncio.gather(waiting, return_exceptions=True)
        label = "a worker that dies stops its calls with StoppedError"
        try:
            await dying
        except DeadlineError as error:
            check(label, False, repr(error))
        except StoppedError:
            pass
        except Exception as error:
            check(label, False, repr(error))
        else:
            check(label, False, "no error")
        again = workers.call("echo", 1, rank=1, timeout_s=5.0)
        await refuses_async("a dead worker refuses further calls", StoppedError, _not_late(again))
        other = (await workers.call("echo", 1, rank=0, timeout_s=self.seconds))[0]
        check("the death of one worker leaves others alive", other == [1], other)


async def _not_late(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except DeadlineError as error:
        raise RuntimeError("it waited for its deadline") from error


class TrackerConformance(Conformance):
    """Numbers of every kind, a resume in the same folder, and no change of what it is told."""

    kind = "tracker"
    places: ClassVar[tuple[Place, ...]] = (Place.CONTROLLER,)

    def example(self, place: Place) -> Any:
        return self.build(place)

    def info(self, folder: Path, **given: Any) -> dict[str, Any]:
        base = {"name": "conformance", "dir": str(folder), "steps": 3, "first_step": 0, "lineage": 0}
        return {**base, "policies": ["main"], "summary": "a run of the conformance kit", **given}

    def _one_run(self, folder: Path, **given: Any) -> None:
        tracker = self.build(Place.CONTROLLER, run_dir=folder)
        info = self.info(folder, **given)
        values = {"loss": (1.5, 1.0), "nothing": (0.0, 0.0), "nan": (float("nan"), 1.0), "inf": (float("inf"), 1.0)}
        fields = {"version": "main@0.1", "seconds": 0.25, "alias": False, "engines": ["a"], "reason": None}
        before = (repr(info), repr(values), repr(fields))
        try:
            tracker.start(info)
            for step in range(info["first_step"], 3):
                for side in ("train", "rollout", "eval", "time", "sync"):
                    tracker.metrics(step, side, values, "main")
                for kind in ("group_finished", "lease_dropped", "published", "checkpoint", "conformance_unknown"):
                    tracker.event(kind, fields)
            tracker.close("finished")
        except Exception as error:
            check("a tracker takes whatever a run reports", False, repr(error))
        check("a tracker changes nothing that it is told", before == (repr(info), repr(values), repr(fields)))
        try:
            tracker.close("finished")
        except Exception as error:
            check("closing a tracker twice is harmless", False, repr(error))

    def test_runs(self) -> None:
        with self.folder() as folder:
            self._one_run(folder)
            written = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
            self._one_run(folder, first_step=2, lineage=1)
            lost = [p.name for p, old in written.items() if not p.exists() or not p.read_bytes().startswith(old)]
            check("a resumed run keeps what was recorded", not lost, lost)

    def test_a_run_that_never_started(self) -> None:
        with self.folder() as folder:
            tracker = self.build(Place.CONTROLLER, run_dir=folder)
            try:
                tracker.close("MILES-E100")
            except MilesError as error:
                check("a tracker that was never started closes quietly", False, str(error))
            except Exception as error:
                check("a tracker that was never started can be closed", False, repr(error))
