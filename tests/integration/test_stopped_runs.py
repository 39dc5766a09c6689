"""What stops a run that has begun, through the command line: exit code 3, the cause in its own words, how to resume,
and a resume that works. And Ctrl-C, once and twice, wherever it comes.
"""

import asyncio
import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from miles_core import run as run_module
from miles_core.builtin.jsonl import LineFile
from miles_core.cli.accounting import check_history
from miles_core.config.compose import load
from miles_core.files import Files
from miles_core.journal import Journal, read
from miles_core.records import Version
from miles_core.run import RunDir
from miles_core.testing.toys.backend import ToyBackend
from miles_core.testing.toys.engine import ToyEngine
from miles_core.testing.toys.envs import EchoEnvironment, EchoTasks
from miles_core.testing.toys.parts import CentredAdvantage, SpreadFilter
from miles_core.testing.toys.sync import ToyLink, ToySender

RUN = Path("runs/toy")
SMALL = ("run.steps=3", "run.checkpoint_every=1", "schedule.groups_per_step=2", "schedule.group_size=2")


def stopped(said, code, *words, resumable=True):
    """Exit code 3, and the last message is one, with the cause, a fix and how to resume."""
    assert said.code == 3, (said.code, said.err)
    assert said.err.startswith(f"{code}: "), said.err
    assert said.err.count("MILES-E") == 1 and said.err.count("\nFix: ") == 1, said.err
    assert "Traceback" not in said.err and len(said.err) < 1500, said.err
    if resumable:
        assert said.err.endswith(f"\nResume: miles run {RUN} --resume\n"), said.err
    for word in words:
        assert word in said.err, (word, said.err)


def whole(steps):
    """The run is finished, its journal tells one valid history, and every step was trained."""
    schedules = {name: p.schedule for name, p in load(RUN / "resolved.yaml", ()).policies.items()}
    assert check_history(read(RUN / "journal"), schedules, finished=True) == []
    assert RunDir.open(RUN).latest().step == steps
    return losses(RUN)


def losses(run):
    """Loss of every step; a step that was trained again keeps its last value."""
    found = {line["step"]: line["train/loss"]["value"] for line in RunDir.open(run).metrics() if "train/loss" in line}
    return [value for _, value in sorted(found.items())]


def events(kind, run=RUN):
    lines = (run / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["type"] == kind]


@pytest.fixture
def resumes(miles):
    """Resume from what a stop left: it finishes, with a valid history."""

    def check(*overrides, steps=3):
        said = miles("run", str(RUN), "--resume", *overrides)
        assert said.code == 0, said.err
        return whole(steps)

    return check


def raising(error, nth=1):
    """A function that raises `error` at its `nth` call and from then on; before, it calls the original."""
    calls = itertools.count(1)

    def patch(monkeypatch, owner, name, *, is_async=False):
        original = getattr(owner, name)

        async def waits(*args, **kwargs):
            if next(calls) >= nth:
                raise error
            return await original(*args, **kwargs)

        def works(*args, **kwargs):
            if next(calls) >= nth:
                raise error
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, waits if is_async else works)

    return patch


def test_a_resume_that_cannot_load_leaves_the_run_as_it_was(miles, resumes, monkeypatch):
    assert miles("run", "toy.yaml", *SMALL).code == 0
    before = {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file() and path.name != "lock"}
    with monkeypatch.context() as patch:
        raising(RuntimeError("no memory"))(patch, ToyBackend, "load")
        said = miles("run", str(RUN), "--resume", "run.steps=5")
    stopped(said, "MILES-E306", "checkpoints/step_000003 cannot be loaded", "no memory")
    assert {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file() and path.name != "lock"} == before
    assert len(resumes("run.steps=4", steps=4)) == 4


# --- rewards and rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "why"), [("nan", "reward is nan"), ("error", "RuntimeError: injected failure on")])
def test_a_failed_episode_is_counted_with_task_and_trajectory(miles, fault, why):
    assert miles("run", "toy.yaml", *SMALL, f"env.fault={fault}", "env.fault_every=7").code == 0
    failed = events("episode_failed")
    assert failed and all(why in event["why"] for event in failed)
    for event in failed:
        task, _, _ = event["episode"].partition("#")
        assert f"task {task}, episode {event['episode']}" in event["why"]
        if fault == "nan":
            assert f"trajectories {event['episode']}/0" in event["why"]
    lines = [line for line in RunDir.open(RUN).metrics() if "rollout/failed_episodes" in line]
    dropped = sum(line["rollout/dropped"]["num"] for line in lines)
    assert dropped > 0 and len(failed) == 2 * dropped
    whole(3)
    told = [line.split(maxsplit=1) for line in miles("audit", str(RUN)).out.splitlines() if "episodes left" in line]
    assert sum(int(count) for count, _ in told) == dropped and not any("task " in reason for _, reason in told)
    assert fault == "error" or len(told) == 1  # the error names its task itself


def test_a_failed_episode_that_shrinks_its_group_is_in_the_metrics(miles, monkeypatch):
    original, calls = EchoEnvironment.score, itertools.count()

    async def score(self, task, context):
        result = await original(self, task, context)
        return result if next(calls) % 5 else type(result)(reward=float("nan"))

    monkeypatch.setattr(EchoEnvironment, "score", score)
    more = ("schedule.group_size=4", "schedule.on_failed_episode=shrink", "schedule.min_group_size=2")
    assert miles("run", "toy.yaml", *SMALL, *more).code == 0
    lines = [
        line["rollout/failed_episodes"]["num"]
        for line in RunDir.open(RUN).metrics()
        if "rollout/failed_episodes" in line
    ]
    assert sum(lines) == len(events("episode_failed")) > 0


def test_nothing_but_failures_stops_with_their_reason(miles):
    said = miles("run", "toy.yaml", *SMALL, "env.fault=nan", "env.fault_every=1", "schedule.max_leases_per_slot=3")
    stopped(said, "MILES-E304", "used 3 leases", "reward is nan (e.g. task toy:")
    assert (
        "Fix: mend the reward or environment" in said.err
        and said.err.count("reward is nan") == 1
        and ": 3 x 0 of 2 episodes left" in said.err
    )


class Panic(BaseException):
    """As extensions in Rust raise it."""


@pytest.mark.parametrize(("error", "told"), [(SystemExit(3), "SystemExit: 3"), (Panic("unwrap"), "Panic: unwrap")])
def test_a_reward_that_leaves_is_a_failed_episode(miles, monkeypatch, error, told):
    async def score(self, task, context):
        raise error

    monkeypatch.setattr(EchoEnvironment, "score", score)
    said = miles("run", "toy.yaml", *SMALL, "eval={every: 1, tasks: 4}", "trackers={console: {}, jsonl: {}}")
    stopped(said, "MILES-E304", told)
    assert "never retrieved" not in said.err
    assert "evaluation after 0 steps (greedy, 4 tasks): reward 0.000" in said.out
    assert "4 of 4 episodes FAILED: task " in said.out


def test_a_reward_that_is_no_number_stops(miles, resumes, monkeypatch):
    with monkeypatch.context() as patched:
        original, calls = EchoEnvironment.score, itertools.count()

        async def score(self, task, context):
            result = await original(self, task, context)
            return result if next(calls) < 6 else type(result)(reward="one")

        patched.setattr(EchoEnvironment, "score", score)
        said = miles("run", "toy.yaml", *SMALL)
    stopped(said, "MILES-E305", "is not a number: 'one' (str)", "task 'toy:train:", "episode 'toy:train:")
    resumes()


ROWS = "".join(f'{{"prompt": "{i:02}>", "answer": "{i % 10}"}}\n' for i in range(20))


def test_a_late_bad_row_stops_with_file_and_line_and_is_mended(miles, resumes):
    file = Path("tasks.jsonl")
    lines = ROWS.splitlines()
    file.write_text("\n".join([*lines[:4], '{"prompt": "04>"}      ', *lines[5:]]))
    data = ("env={use: jsonl, path: tasks.jsonl, shuffle: false, check_rows: 1}",)
    said = miles("run", "toy.yaml", *SMALL, *data)
    stopped(said, "MILES-E801", "tasks.jsonl:5: no field 'answer'")
    file.write_text(ROWS)
    resumes()


@pytest.mark.parametrize("error", [KeyError("no such column"), OSError(errno.EIO, "Input/output error")])
def test_an_environment_whose_tasks_fail_late(miles, resumes, monkeypatch, error):
    with monkeypatch.context() as patched:
        raising(error, nth=5)(patched, EchoTasks, "task")
        said = miles("run", "toy.yaml", *SMALL)
    stopped(said, "MILES-E801", "environment 'toy', task 3", type(error).__name__)
    resumes()


def test_a_score_that_the_journal_cannot_hold(miles, resumes, monkeypatch):
    from miles_core.records import Score

    async def score(self, task, context):
        return Score(reward=1.0, info={"what": object()})

    with monkeypatch.context() as patched:
        patched.setattr(EchoEnvironment, "score", score)
        said = miles("run", "toy.yaml", *SMALL)
    stopped(said, "MILES-E200", "JSON", "score's info")
    resumes()


# --- no space --------------------------------------------------------------------------------------------------------

#: Every place where a run writes: owner, name. `RunDir.create` is bad input's and stands in `test_bad_input.py`.
WRITES = [
    (Files, "create"),
    (Files, "write"),
    (Files, "sync"),
    (Files, "sync_folder"),
    (run_module, "write_durably"),
    (run_module, "flush"),
    (os, "rename"),
    (os, "replace"),
    (Path, "mkdir"),
    (Path, "write_text"),
    (ToyBackend, "save"),
    (os, "pwrite"),
]


class FullDisk:
    """Counts writes; from number `full` on there is no space. A torn write leaves half of its bytes."""

    def __init__(self, monkeypatch, full):
        self.count, self.full = 0, full
        for owner, name in WRITES:
            self._patch(monkeypatch, owner, name)

    def _patch(self, monkeypatch, owner, name):
        original = getattr(owner, name)

        def limited(*args, **kwargs):
            if not RUN.exists():
                return original(*args, **kwargs)
            self.count += 1
            if self.count > self.full:
                if (owner, name) == (Files, "write"):
                    fd, parts = args[1:]
                    os.write(fd, b"".join(parts)[: sum(map(len, parts)) // 2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, limited)


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_no_space_at_any_write_leaves_the_last_checkpoint_and_a_resume_that_works(miles, monkeypatch, stride):
    with monkeypatch.context() as patched:
        disk = FullDisk(patched, full=10**9)
        assert miles("run", "toy.yaml", *SMALL).code == 0
    expected, writes = whole(3), disk.count
    assert len(expected) == 3 and writes > 60
    seen = set()
    for full in range(0, writes, stride):
        os.rename("runs", f"before{full}")
        with monkeypatch.context() as patched:
            FullDisk(patched, full)
            said = miles("run", "toy.yaml", *SMALL)
        kept = RunDir.open(RUN).checkpoints()
        for checkpoint in kept:
            assert checkpoint.ledger() and any(checkpoint.trainer.iterdir())
        done = kept[-1].step if kept else 0
        if said.code == 0:
            assert done == 3 and full >= writes - 4, "only after the last checkpoint"
            continue
        seen.add(said.err[:10])
        stopped(said, said.err[:10], "No space left on device")
        said = miles("run", str(RUN), "--resume")
        if done == 3:
            assert said.code == 2 and "has all of its 3 steps" in said.err
            continue
        assert said.code == 0, (full, said.err)
        assert whole(3) == expected, full
    assert stride > 1 or seen == {"MILES-E302", "MILES-E306", "MILES-E850"}


def test_no_space_while_resuming(miles, resumes, monkeypatch):
    with monkeypatch.context() as patched:
        raising(RuntimeError("once"), nth=2)(patched, ToyBackend, "update")
        stopped(miles("run", "toy.yaml", *SMALL), "MILES-E700", "once")
    for full in range(0, 40, 3):
        with monkeypatch.context() as patched:
            FullDisk(patched, full)
            said = miles("run", str(RUN), "--resume")
        if said.code == 0:
            break
        assert "No space left on device" in said.err
        if said.err.startswith("MILES-E903"):
            assert said.code == 2, "nothing has begun yet"
        else:
            stopped(said, said.err[:10])
    else:
        resumes()


@pytest.mark.parametrize("method", ["start", "metrics", "event", "close"])
def test_a_tracker_that_fails(miles, monkeypatch, method):
    from miles_core.testing.toys.tracker import ToyTracker

    with monkeypatch.context() as patched:
        raising(ConnectionError("the server is gone"))(patched, ToyTracker, method)
        said = miles("run", "toy.yaml", *SMALL, "trackers={toy: {}, jsonl: {}}")
    stopped(said, "MILES-E850", "ToyTracker", "the server is gone")
    said = miles("run", str(RUN), "--resume", "trackers.toy=null")
    assert said.code == 0 or "has all of its" in said.err
    whole(3)


def test_a_metrics_file_that_cannot_be_written(miles, resumes, monkeypatch):
    with monkeypatch.context() as patched:
        raising(OSError(errno.ENOSPC, "No space left on device"), nth=9)(patched, os, "pwrite")
        said = miles("run", "toy.yaml", *SMALL)
    stopped(said, "MILES-E850", "No space left on device", ".jsonl")
    assert LineFile  # the file of lines is what writes with pwrite
    resumes()


# --- a side that raises ----------------------------------------------------------------------------------------------

SIDES = {
    "engine": (ToyEngine, "generate", True, "MILES-E600", 7),
    "pause": (ToyEngine, "pause", True, "MILES-E401", 2),
    "update": (ToyBackend, "update", False, "MILES-E700", 2),
    "score": (ToyBackend, "score", False, "MILES-E700", 1),
    "save": (ToyBackend, "save", False, "MILES-E306", 2),
    "sender stage": (ToySender, "stage", False, "MILES-E400", 2),
    "sender carry": (ToySender, "carry", False, "MILES-E400", 2),
    "link": (ToyLink, "carry", True, "MILES-E401", 2),
    "advantage": (CentredAdvantage, "__call__", False, "MILES-E500", 2),
    "filter": (SpreadFilter, "__call__", False, "MILES-E300", 3),
}


@pytest.mark.parametrize("side", SIDES)
def test_the_first_error_of_any_side_surfaces_and_a_resume_goes_on(miles, resumes, monkeypatch, side):
    owner, name, is_async, code, nth = SIDES[side]
    more = {
        "score": ("schedule.updates_per_step=2",),
        "filter": ("algorithm.filters={toy: {}}",),
    }.get(side, ())
    with monkeypatch.context() as patched:
        raising(RuntimeError(f"the {side} broke"), nth)(patched, owner, name, is_async=is_async)
        said = miles("run", "toy.yaml", *SMALL, *more)
    stopped(said, code, f"RuntimeError: the {side} broke")
    [end] = events("run_end")
    assert end["status"] == code
    resumes()


@pytest.mark.parametrize(
    "told", [{"number": 7}, {"policy": "critic"}, {"lineage": 1}, {"number": -1}, {"number": 0}], ids=str
)
def test_tokens_of_a_version_that_was_never_published_or_is_out_of_use_stop_the_run(miles, resumes, monkeypatch, told):
    generate, asked = ToyEngine.generate, []

    async def strange(self, request):
        done, _ = await generate(self, request), asked.append(request)
        if len(asked) != 6:
            return done
        return replace(done, spans=tuple(replace(s, version=replace(s.version, **told)) for s in done.spans))

    with monkeypatch.context() as patched:
        patched.setattr(ToyEngine, "generate", strange)
        said = miles("run", "toy.yaml", *SMALL)
    version = replace(Version(policy="main", lineage=0, number=1), **told)
    due = "where a published version of 'main', from number 1 on, was due"
    stopped(said, "MILES-E600", f"tokens of {version} {due}", "engine 'toy'")
    resumes()


def test_an_error_while_a_checkpoint_is_being_committed_never_tears_it(miles, resumes, monkeypatch):
    commit, generate, committing, asked = RunDir.commit_checkpoint, ToyEngine.generate, [], []

    def slow(self, draft, step, ledger):
        committing.append(step)
        time.sleep(0.5)
        return commit(self, draft, step, ledger)

    async def failing(self, request):
        asked.append(request)
        for _ in range(3000 if len(asked) > 4 else 0):  # the save of a step begins while the next one is sampled
            if not committing:
                await asyncio.sleep(0.01)
        if committing:
            raise RuntimeError("while it is saved")
        return await generate(self, request)

    with monkeypatch.context() as patched:
        patched.setattr(RunDir, "commit_checkpoint", slow)
        patched.setattr(ToyEngine, "generate", failing)
        stopped(miles("run", "toy.yaml", *SMALL), "MILES-E600", "while it is saved")
    assert committing == [1]
    [checkpoint] = RunDir.open(RUN).checkpoints()  # its thread went on, undisturbed
    assert any(checkpoint.trainer.iterdir())
    resumes()


@pytest.mark.parametrize("hook", ["run_start", "step", "weights", "checkpoint", "run_end"])
def test_an_observer_that_raises(miles, site, hook):
    arguments = {"run_start": "info", "run_end": "status"}.get(hook, "step" if hook != "weights" else "version")
    code = f"""
        from dataclasses import dataclass
        from miles_core import hookimpl
        from miles_core.provider import Provider
        from miles_core.testing.toys.tracker import ToyTracker
        @dataclass(frozen=True, kw_only=True)
        class Config:
            pass
        @hookimpl
        def miles_tracker():
            return Provider(name="nosy", config=Config, build=lambda config, context: ToyTracker(context.run_dir))
        @hookimpl
        def miles_on_{hook}({arguments}):
            raise RuntimeError("it was watching")
    """
    site("acme-nosy", "miles.tracker.v1", {"nosy": "acme_nosy"}, {"acme_nosy": code})
    said = miles("run", "toy.yaml", *SMALL, "trackers={nosy: {}, jsonl: {}}")
    way = "then go on with --resume; it says how, if a plugin's files changed"
    stopped(said, "MILES-E300", "observer", "RuntimeError: it was watching", way)


# --- a side that hangs -----------------------------------------------------------------------------------------------


def test_a_stuck_environment_passes_its_deadline(miles, resumes):
    slow = ("env.delay_s=1000000", "schedule.episode_deadline_s=0.2", "schedule.max_leases_per_slot=2")
    said = miles("run", "toy.yaml", *SMALL, *slow)
    stopped(said, "MILES-E304", "deadline of 0.2 s")
    assert all("passed its deadline" in event["why"] for event in events("episode_failed"))


def test_a_stuck_engine_passes_its_deadline(miles):
    slow = ("rollout.step_s=1000000", "schedule.episode_deadline_s=0.2", "schedule.max_leases_per_slot=2")
    stopped(miles("run", "toy.yaml", *SMALL, *slow), "MILES-E304", "0.2 s")


def test_a_sampling_side_that_is_silent_stalls(miles):
    said = miles("run", "toy.yaml", *SMALL, "rollout.step_s=1000000", "schedule.stall_deadline_s=0.3")
    stopped(said, "MILES-E303", "nothing happened for 0.3 s", "toy:train:")


HANG = """
    import threading, time
    from miles_core.builtin import inline
    from miles_core import controller
    from miles_core.cli import leaving, main, run
    inline.CLOSE_TIMEOUT_S = controller.CLOSE_TIMEOUT_S = 1.0
    leaving.GRACE_S = run.GRACE_S = 1.0
    __import__("sys").modules["miles_core.cli.main"].GRACE_S = 1.0
    from miles_core.testing.toys.{module} import {owner}
    def hang(*args, **kwargs):
        time.sleep(100000)
    {owner}.{name} = hang
"""


@pytest.mark.parametrize(
    ("module", "owner", "name", "code", "overrides"),
    [
        ("backend", "ToyBackend", "update", "MILES-E303", ["schedule.stall_deadline_s=3.0"]),
        ("backend", "ToyBackend", "save", "MILES-E303", ["schedule.stall_deadline_s=3.0"]),
        ("sync", "ToySender", "carry", "MILES-E401", ["sync.deadline_s=3.0"]),
    ],
)
def test_a_process_with_a_hanging_thread_ends(command, module, owner, name, code, overrides):
    before = HANG.format(module=module, owner=owner, name=name)
    said = command("run", "toy.yaml", *SMALL, *overrides, before=before, timeout=90)
    assert said.code == 3, said.err
    assert code in said.err and f"Resume: miles run {RUN} --resume" in said.err
    done = command("run", str(RUN), "--resume")
    assert done.code == 0, done.err
    whole(3)


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


def pressing(monkeypatch, owner, name, nth, *, is_async=True):
    """Press Ctrl-C at the nth call."""
    original, calls = getattr(owner, name), itertools.count(1)

    async def waits(*args, **kwargs):
        if next(calls) == nth:
            os.kill(os.getpid(), signal.SIGINT)
        return await original(*args, **kwargs)

    def works(*args, **kwargs):
        if next(calls) == nth:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, waits if is_async else works)


EVALUATED = ("eval={every: 1, tasks: 6, temperature: 1.0}",)
MOMENTS = {
    "first publish": (ToyLink, "carry", 1, 0, EVALUATED),
    "first evaluation": (ToyEngine, "generate", 3, 0, EVALUATED),
    "first generation": (ToyEngine, "generate", 3, 1, ()),
    "a later publish": (ToyLink, "carry", 2, 1, ()),
    "a later evaluation": (ToyEngine, "generate", 12, 1, EVALUATED),
    "a later generation": (ToyEngine, "generate", 7, 2, ("run.checkpoint_every=null",)),
    "training": (ToyBackend, "update", 2, 2, ()),
    "a save": (ToyBackend, "save", 1, 1, ()),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(miles, resumes, monkeypatch, moment):
    owner, name, nth, step, more = MOMENTS[moment]
    with monkeypatch.context() as patched:
        pressing(patched, owner, name, nth, is_async=owner is not ToyBackend)
        said = miles("run", "toy.yaml", *SMALL, *more)
    assert said.code == 130, said.err
    assert "finishing the step, then saving; Ctrl-C again stops at once" in said.err
    assert said.err.endswith(f"interrupted and saved. Go on: miles run {RUN} --resume\n")
    assert RunDir.open(RUN).latest().step == step
    resumed = resumes()
    assert miles("run", "toy.yaml", *SMALL, *more, "run.name=whole").code == 0
    assert resumed == losses(Path("runs/whole"))


def test_ctrl_c_before_the_run_begins_creates_nothing(miles, monkeypatch):
    before, found = sorted(Path().rglob("*")), signal.getsignal(signal.SIGINT)  # a shell's background job ignores it
    pressing(monkeypatch, EchoTasks, "task", 1, is_async=False)
    said = miles("run", "toy.yaml", *SMALL)
    assert said.code == 130 and "interrupted before the run began" in said.err
    assert sorted(Path().rglob("*")) == before
    assert signal.getsignal(signal.SIGINT) is found


TWICE = """
    import os, signal, time
    from miles_core.testing.toys.{module} import {owner}
    original, calls = {owner}.{name}, [0]
    {word} pressed(*args, **kwargs):
        calls[0] += 1
        if calls[0] == {nth}:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)  # two signals at once would be one
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        return {wait} original(*args, **kwargs)
    {owner}.{name} = pressed
"""


@pytest.mark.parametrize(
    ("module", "owner", "name", "nth", "is_async"),
    [
        ("sync", "ToyLink", "carry", 1, True),
        ("sync", "ToyLink", "carry", 2, True),
        ("engine", "ToyEngine", "generate", 3, True),
        ("engine", "ToyEngine", "generate", 9, True),
        ("backend", "ToyBackend", "update", 2, False),
        ("backend", "ToyBackend", "save", 2, False),
    ],
)
def test_ctrl_c_twice_stops_at_once_and_loses_nothing_that_was_journalled(command, module, owner, name, nth, is_async):
    word, wait = ("async def", "await") if is_async else ("def", "")
    before = TWICE.format(module=module, owner=owner, name=name, nth=nth, word=word, wait=wait)
    said = command("run", "toy.yaml", *SMALL, before=before)
    assert said.code == 130, said.err
    assert f"stopped at once. Go on: miles run {RUN} --resume" in said.err
    frames = list(read(RUN / "journal"))
    slots = {f.header["id"]: f.header["slot"] for f in frames if f.kind == "lease"}
    finished = {f.header["lease"] for f in frames if f.kind == "group"}
    latest = RunDir.open(RUN).latest()
    step = latest.step if latest else 0
    done = command("run", str(RUN), "--resume")
    assert done.code == 0, done.err
    resumed = whole(3)
    [lineage] = [f.header for f in read(RUN / "journal") if f.kind == "lineage"]
    assert set(lineage["kept"]) == {lease for lease in finished if slots[lease] // 2 == step}
    done = command("run", "toy.yaml", *SMALL, "run.name=whole")
    assert resumed == losses(Path("runs/whole"))


@pytest.mark.slow
def test_ctrl_c_during_a_long_generation_of_a_real_process(miles):
    """From the keyboard: the whole process group gets the signal, workers in processes too."""
    processes = (
        "launcher=toy-processes",
        "rollout={use: toy-socket, max_new_tokens: 2, step_s: 0.4}",
        "sync=toy-socket",
    )
    start = [Path(sys.executable).with_name("miles"), "run", "toy.yaml", *SMALL, "run.steps=100", *processes]
    process = subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (RUN / "events.jsonl").is_file():
        time.sleep(0.05)
    while time.monotonic() < deadline and not events("published"):
        time.sleep(0.05)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted and saved" in err
    assert RunDir.open(RUN).latest().step == 1


def test_an_internal_error_of_a_run_still_says_how_to_go_on(miles, monkeypatch):
    from miles_core.ledger import Ledger

    raising(AssertionError("a bug"))(monkeypatch, Ledger, "claim")
    said = miles("run", "toy.yaml", *SMALL)
    assert said.code == 70
    assert "MILES-E000: internal error: AssertionError: a bug" in said.err
    assert f"Go on: miles run {RUN} --resume" in said.err


def test_audit_proves_a_run_and_names_what_was_forged(miles):
    assert miles("run", "toy.yaml", *SMALL).code == 0
    said = miles("audit", str(RUN))
    assert said.code == 0 and "every promise held" in said.out and ", finished" in said.out, said.out
    trained = next(f.header for f in read(RUN / "journal") if f.kind == "trained")
    journal = Journal(RUN / "journal")
    journal.append("trained", {key: value for key, value in trained.items() if key != "kind"})
    journal.close()
    said = miles("audit", str(RUN))
    assert said.code == 1 and "broken promises" in said.out
    assert "step 0 of policy main was trained where step 3 was due" in said.out
    assert miles("audit", "runs/none").code == 2
