"""The launcher and tracker suites: pass on toys and built-ins, and every assertion sees what is broken for it."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from miles_core.contracts.launcher import WorkerSpec
from miles_core.errors import CapabilityError, DeadlineError, StoppedError
from miles_core.testing import LauncherConformance, TrackerConformance
from miles_core.testing.toys.launcher import ProcessWorkers, ThreadWorkers, ToyLauncher
from miles_core.testing.toys.tracker import ToyTracker

from .mutants import broken_suite, must_fail, own_labels, plugin


def threads(offers=("in_process",), **methods):
    kind = type("Broken", (ThreadWorkers,), methods)
    return broken_suite(
        LauncherConformance,
        plugin(lambda config, context: ToyLauncher(kind, 20.0), offers=offers),
        seconds=3.0,
        deadline_s=20.0,
    )


def processes(**methods):
    kind = type("Broken", (ProcessWorkers,), methods)
    return broken_suite(
        LauncherConformance, plugin(lambda config, context: ToyLauncher(kind, 20.0)), seconds=3.0, deadline_s=20.0
    )


def call(edit):
    """Workers whose results go through `edit(method, results)`."""

    async def changed(self, method, *args, rank=None, timeout_s):
        return edit(method, await ThreadWorkers.call(self, method, *args, rank=rank, timeout_s=timeout_s))

    return threads(call=changed)


def errors(edit):
    """Workers whose errors go through `edit(error)`."""

    async def changed(self, method, *args, rank=None, timeout_s):
        try:
            return await ThreadWorkers.call(self, method, *args, rank=rank, timeout_s=timeout_s)
        except Exception as error:
            found = edit(error)
            if isinstance(found, Exception):
                raise found from error
            return found

    return threads(call=changed)


def no_workers(self, spec: WorkerSpec):
    raise CapabilityError("none", fix="none")


def one_worker(self, spec: WorkerSpec):
    if spec.count != 1:
        raise CapabilityError("one only", fix="one")
    ThreadWorkers.__init__(self, spec)


async def starts_and_miscounts(self, timeout_s):
    await ThreadWorkers.start(self, timeout_s)
    self.count = 7


async def calls_those_there_are(self, method, *args, rank=None, timeout_s):
    self.count = len(self._workers)
    try:
        return await ThreadWorkers.call(self, method, *args, rank=rank, timeout_s=timeout_s)
    finally:
        self.count = 7


def loses_payload(self, spec):
    from dataclasses import replace

    fine = {k: v for k, v in spec.payload.items() if k not in ("text", "number")}
    ThreadWorkers.__init__(self, replace(spec, payload=fine))


def each(results, edit):
    return [[edit(v) for v in r] if isinstance(r, list) else r for r in results]


def clean_arrays(value):
    return np.nan_to_num(value) if isinstance(value, np.ndarray) and value.size < 10 else value


def cut_large(value):
    return value[:1000] if isinstance(value, np.ndarray) and value.size > 1000 else value


async def new_threads(self, method, *args, rank=None, timeout_s):
    ranks = range(self.count) if rank is None else [rank]
    return [await asyncio.to_thread(getattr(self._workers[r], method), *args) for r in ranks]


async def waits_for_all(self, method, *args, rank=None, timeout_s):
    ranks = range(self.count) if rank is None else [rank]
    found = await asyncio.wait_for(
        asyncio.gather(*(self._one(r, method, args) for r in ranks), return_exceptions=True), timeout_s
    )
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


async def calls_everybody(self, method, *args, rank=None, timeout_s):
    return await ThreadWorkers.call(self, method, *args, rank=None if method == "where" else rank, timeout_s=timeout_s)


async def one_call_at_a_time(self, method, *args, rank=None, timeout_s):
    self.lock = getattr(self, "lock", None) or asyncio.Lock()
    async with self.lock:
        return await ThreadWorkers.call(self, method, *args, rank=rank, timeout_s=timeout_s)


def stays_cancelled(self):
    for rank, event in enumerate(self._cancelled):
        event.set()
        self._workers[rank].is_cancelled = lambda: True


async def starts_anyway(self, timeout_s):
    try:
        await ThreadWorkers.start(self, timeout_s)
    except Exception:
        return


async def starts_without_reason(self, timeout_s):
    try:
        await ThreadWorkers.start(self, timeout_s)
    except Exception:
        raise StoppedError("a worker did not start", fix="look") from None


async def forgets_workers(self):
    self._workers = []


async def close_once(self):
    if getattr(self, "gone", False):
        raise RuntimeError("gone")
    self.gone = True
    await ThreadWorkers.close(self)


async def dead_by_deadline(self, method, *args, rank=None, timeout_s):
    try:
        return await ProcessWorkers.call(self, method, *args, rank=rank, timeout_s=timeout_s)
    except StoppedError as error:
        if "ended" in error.message:
            raise DeadlineError("late", fix="wait") from error
        raise


async def revives(self, method, *args, rank=None, timeout_s):
    if rank == 1 and self.processes[1].dead:
        return [list(args)]
    return await ProcessWorkers.call(self, method, *args, rank=rank, timeout_s=timeout_s)


async def dies_together(self, method, *args, rank=None, timeout_s):
    if method == "echo" and any(p.dead for p in self.processes):
        for process in self.processes:
            if not process.dead:
                process.popen.kill()
                process.popen.wait()
        if rank == 0:
            return [None]
    return await ProcessWorkers.call(self, method, *args, rank=rank, timeout_s=timeout_s)


def reverses(method, results):
    return results[::-1]


LAUNCHERS = {
    "one worker can be started": threads(__init__=no_workers),
    "count says how many workers there are": threads(start=starts_and_miscounts, call=calls_those_there_are),
    "a call returns one result per worker": call(lambda m, r: r * 2 if m == "where" else r),
    "the payload arrives unchanged": threads(__init__=loses_payload),
    "arrays travel bit for bit": call(lambda m, r: each(r, clean_arrays)),
    "records travel": call(lambda m, r: each(r, lambda v: str(v) if type(v).__name__ == "Version" else v)),
    "large arrays travel": call(lambda m, r: each(r, cut_large)),
    "plain methods run on the thread that built the worker": threads(call=new_threads),
    "our errors arrive with text and fix": errors(
        lambda e: type(e)(e.message, fix="ask") if type(e).__name__ == "WeightError" else e
    ),
    "our errors arrive as they are": errors(lambda e: RuntimeError(str(e))),
    "other errors arrive with their own text": errors(
        lambda e: e if type(e).__name__ in ("WeightError", "DeadlineError") else StoppedError("it failed", fix="look")
    ),
    "an error of a worker is raised": errors(lambda e: e if type(e).__name__ == "WeightError" else [None]),
    "a worker survives its errors": errors(lambda e: e),
    "a call past its timeout raises DeadlineError": errors(lambda e: TimeoutError(str(e))),
    "interrupt turns cancelled() true in a running call": threads(interrupt=lambda self: None),
    "cancelled() is false again in the next call": threads(interrupt=stays_cancelled),
    "coroutines of one worker run together": threads(call=one_call_at_a_time),
    "an error of the factory surfaces with its own text": threads(start=starts_without_reason),
    "a worker that cannot be built is an error": threads(start=starts_anyway),
    "close closes the worker objects": threads(close=forgets_workers),
    "closing workers twice is harmless": threads(close=close_once),
    "results come in rank order": call(reverses),
    "rank calls one worker only": threads(call=calls_everybody),
    "the first error ends the wait for the others": threads(call=waits_for_all),
    "workers have processes of their own": threads(offers=()),
    "a launcher of processes starts several workers": threads(offers=(), __init__=one_worker),
    "a worker that dies stops its calls with StoppedError": processes(call=dead_by_deadline),
    "a dead worker refuses further calls": processes(call=revives),
    "the death of one worker leaves others alive": processes(call=dies_together),
}


async def dies_of_errors(self, method, *args, rank=None, timeout_s):
    if getattr(self, "hurt", False) and method == "echo":
        return [None]
    try:
        return await ThreadWorkers.call(self, method, *args, rank=rank, timeout_s=timeout_s)
    except Exception:
        self.hurt = True
        raise


LAUNCHERS["a worker survives its errors"] = threads(call=dies_of_errors)


def tracker(**methods):
    kind = type("Broken", (ToyTracker,), methods)
    return broken_suite(TrackerConformance, plugin(lambda config, context: kind(context.run_dir)))


def divides(self, step, side, values, policy):
    for num, den in values.values():
        int(num / den)


def edits(self, step, side, values, policy):
    values["seen"] = (1.0, 1.0)


def truncates(self, info):
    if self._path is not None:
        self._path.write_text("")
    ToyTracker.start(self, info)


def closes_once(self, status):
    if self.__dict__.setdefault("done", False):
        raise RuntimeError("closed")
    self.done = True


def must_have_started(self, status):
    if not self.records:
        raise RuntimeError("never started")


def must_have_started_politely(self, status):
    if not self.records:
        raise StoppedError("never started", fix="start")


TRACKERS = {
    "a tracker takes whatever a run reports": tracker(metrics=divides),
    "a tracker changes nothing that it is told": tracker(metrics=edits),
    "closing a tracker twice is harmless": tracker(close=closes_once),
    "a resumed run keeps what was recorded": tracker(start=truncates),
    "a tracker that was never started can be closed": tracker(close=must_have_started),
    "a tracker that was never started closes quietly": tracker(close=must_have_started_politely),
}


def test_every_label_has_a_mutant():
    assert own_labels(LauncherConformance) == set(LAUNCHERS)
    assert own_labels(TrackerConformance) == set(TRACKERS)


@pytest.mark.parametrize("label", [*LAUNCHERS, *TRACKERS])
def test_a_broken_one_is_seen(label):
    must_fail(label, {**LAUNCHERS, **TRACKERS}[label])


class TestThreads(LauncherConformance):
    name = "toy"


class TestProcesses(LauncherConformance):
    name = "toy-processes"


class TestInline(LauncherConformance):
    name = "inline"


class TestToyTracker(TrackerConformance):
    name = "toy"


class TestJsonl(TrackerConformance):
    name = "jsonl"


class TestConsole(TrackerConformance):
    name = "console"


ORPHAN = """
import asyncio, os, signal
from miles_core.contracts.launcher import WorkerSpec
from miles_core.testing.toys.launcher import ProcessWorkers, ToyLauncher

async def main():
    spec = WorkerSpec(place="trainer", factory="miles_core.testing.suites.workers:echo_worker", count=2)
    workers = await ToyLauncher(ProcessWorkers, 60.0).start(spec)
    print(*(p.popen.pid for p in workers.processes), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_workers_end_when_their_parent_is_killed():
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=120)
    children = [int(pid) for pid in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL and len(children) == 2
    stop = time.monotonic() + 30.0
    while time.monotonic() < stop and any(_alive(pid) for pid in children):
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in children)


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = f"/proc/{pid}/stat"
    return not (os.path.exists(status) and open(status).read().rpartition(")")[2].split()[0] == "Z")
