"""Whoever reads a command's standard streams may leave, and a stream may lead nowhere: the command ends as it would."""

import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_core.cli.streams import Stream
from miles_core.errors import ExportError
from miles_core.journal import Journal, read
from miles_core.run import RunDir

MILES = Path(sys.executable).with_name("miles")
RUN = Path("runs/toy")
SMALL = ("run.steps=3", "run.checkpoint_every=1", "schedule.groups_per_step=2", "schedule.group_size=2")
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def shell(*arguments: str, streams: str) -> tuple[int, str]:
    """A command with its streams sent somewhere: its own exit code, and what is left of its words."""
    line = f"{shlex.join([str(MILES), *arguments])} {streams}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=False, env=BUFFERED)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("streams", ["| true", "2>&1 | true", "2>/dev/full", "2>&-", ">&-", ">&- 2>&-"])
def test_a_stream_that_breaks_changes_no_exit_code(miles, streams):
    assert shell("run", "toy.yaml", *SMALL, streams=streams)[0] == 0
    assert RunDir.open(RUN).latest().step == 3
    assert shell("audit", str(RUN), streams=streams)[0] == 0
    assert shell("show", str(RUN), streams=streams)[0] == 0
    assert shell("plugins", streams=streams)[0] == 0
    assert shell("run", "toy.yaml", *SMALL, streams=streams)[0] == 2, "the run directory exists"
    trained = next(f.header for f in read(RUN / "journal") if f.kind == "trained")
    journal = Journal(RUN / "journal")
    journal.append("trained", {key: value for key, value in trained.items() if key != "kind"})
    journal.close()
    assert shell("audit", str(RUN), streams=streams)[0] == 1


def test_an_output_that_cannot_be_written_is_an_error(miles):
    code, said = shell("plugins", streams=">/dev/full")
    assert code == 2 and said.startswith("MILES-E904: the output cannot be written"), said
    code, said = shell("run", "toy.yaml", "trackers={console: {}}", *SMALL, streams=">/dev/full")
    assert code == 3 and "MILES-E904: the output cannot be written" in said and "Resume: " in said, said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_that_nobody_reads_is_saved(miles, number):
    """`miles run … 2>&1 | head -1`, then Ctrl-C."""
    many = ("run.steps=100000", "env.delay_s=0.01", "trackers={jsonl: {}, console: {}}")
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [MILES, "run", "toy.yaml", *SMALL, *many], stdout=writer, stderr=writer, env=BUFFERED, start_new_session=True
    )
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (RUN / "checkpoints" / "step_000002").is_dir():
        time.sleep(0.02)
    os.killpg(process.pid, number)
    assert process.wait(60) == 130
    run = RunDir.open(RUN)
    assert run.latest().step == len([f for f in read(RUN / "journal") if f.kind == "trained"])


def test_a_stream_that_broke_stays_quiet(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as broken:
        stream = Stream(broken, matters=True)
        assert stream.write("a\n" * 100_000) == 200_000
        stream.flush()
        assert stream.isatty() is False and not stream.closed
    with open("/dev/full", "w") as full:
        assert Stream(full, matters=False).write("a\n" * 100_000) == 200_000
    with open("/dev/full", "w") as full, pytest.raises(ExportError, match="No space left"):
        Stream(full, matters=True).write("a\n" * 100_000)


def test_an_error_that_a_library_caught_is_told_in_the_end(miles):
    """Click tries the stream with an empty text, and swallows what that raises."""
    unbuffered = {**BUFFERED, "PYTHONUNBUFFERED": "1"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [MILES, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False, env=unbuffered
        )
    assert done.returncode == 2 and done.stderr.startswith("MILES-E904: the output cannot be written")


def test_a_terminal_that_was_closed_stops_no_run(miles):
    """As after `disown`: nothing but the output tells that it is gone."""
    ours, theirs = pty.openpty()
    arguments = ("run", "toy.yaml", *SMALL, "run.steps=60", "env.delay_s=0.01", "trackers={console: {style: plain}}")
    process = subprocess.Popen(
        [MILES, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    os.close(theirs)
    os.read(ours, 1)
    os.close(ours)
    assert process.wait(60) == 0
    assert RunDir.open(RUN).latest().step == 60


def children(pid: int) -> list[int]:
    own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return own + [further for child in own for further in children(child)]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_worker_processes_get_streams_that_lead_nowhere(miles):
    """What else would take their numbers is written into by whatever complains."""
    many = ("run.steps=100000", "env.delay_s=0.01", "schedule.samplers=1", "launcher=toy-processes")
    many += ("rollout={use: toy-socket, max_new_tokens: 2}", "sync=toy-socket")
    line = f"exec {shlex.join([str(MILES), 'run', 'toy.yaml', *SMALL, *many])} >&- 2>&-"
    process = subprocess.Popen(["bash", "-c", line], start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (RUN / "checkpoints" / "step_000002").is_dir():
            time.sleep(0.02)
        workers = children(process.pid)
        assert workers
        for worker in workers:
            assert [os.readlink(f"/proc/{worker}/fd/{number}") for number in (1, 2)] == ["/dev/null"] * 2
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def test_what_a_terminal_cannot_show_is_spelled_out(miles):
    assert shell("run", "toy.yaml", *SMALL, "run.steps=20", streams="")[0] == 0
    ascii_only = {**BUFFERED, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [MILES, "show", RUN], capture_output=True, text=True, timeout=120, check=False, env=ascii_only
    )
    assert done.returncode == 0 and "\\u28" in done.stdout, done.stderr


@pytest.mark.parametrize("env", [BUFFERED, {**BUFFERED, "PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"])
def test_the_module_leaves_as_the_command_does(miles, env):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "miles_core.cli", "plugins"]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False, env=env
        )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 2, done.stderr
