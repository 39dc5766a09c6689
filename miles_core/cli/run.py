"""`miles run`: train, with progress; the first Ctrl-C finishes the step and saves, the second stops at once."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from miles_core.cli.leaving import GRACE_S, leave_within
from miles_core.cli.streams import shout
from miles_core.errors import EXIT_INTERRUPTED, EXIT_STOPPED, ConfigError, MilesError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(
    file: Annotated[Path, typer.Argument(help="a run file; with --resume also a run directory")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, e.g. optimizer.lr=2e-4")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the run's latest checkpoint")] = False,
) -> None:
    """Validate everything, then train, showing progress. Results lie in the run directory."""
    from miles_core.config.compose import load, reload
    from miles_core.discovery import scan
    from miles_core.driver import execute, run_path
    from miles_core.run import RunDir

    catalogue = scan()
    if file.is_dir():
        if not resume:
            go_on = f"miles run {shlex.quote(str(file))} --resume, to go on with it"
            fix = go_on if (file / "resolved.yaml").is_file() else "name a run file in it, e.g. recipes/quickstart.yaml"
            raise ConfigError(f"{file} is a directory, not a run file", fix=fix)
        RunDir.open(file)  # says so where it is none
        run_file = reload(file, (*(overrides or ()), f"run.dir={json.dumps(str(file))}"), catalogue=catalogue)
    elif resume and not file.suffix and not file.exists():
        RunDir.open(file)  # says that there is none
    else:
        run_file = load(file, tuple(overrides or ()), catalogue=catalogue)
    path = run_path(run_file)
    go_on = f"miles run {shlex.quote(str(path))} --resume"
    stop, begun = threading.Event(), threading.Event()

    planned = RunDir.open(path).tree()["run"]["steps"] if resume and path.is_dir() else run_file.run.steps
    decays = any(r.optimizer.decay != "constant" for p in run_file.policies.values() for r in p.roles.values())
    stretched = decays and planned != run_file.run.steps

    def begin() -> None:
        begun.set()
        if stretched:
            _tell(f"the learning rate decays over {run_file.run.steps} steps from here on; it did over {planned}")
        done = RunDir(path)
        lines = done.metrics() if resume else ()
        trained = max((line["step"] + 1 for line in lines if line.get("type") == "train"), default=0)
        if trained and done.latest() is None:
            told = f"{path} has no checkpoint: it starts again from step 0, on a new lineage"
            _tell(f"{told} (its metrics show {trained} steps of before)")

    async def drive() -> object:
        wake, woken = socket.socketpair()
        for end in (wake, woken):
            end.setblocking(False)
        # A signal may reach any thread: this ends the wait of the event loop, so that its handler runs at once.
        asyncio.get_running_loop().add_reader(woken, lambda: woken.recv(64))
        before_fd = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        try:
            return await execute(run_file, catalogue, stop, resume=resume, on_begin=begin)
        except MilesError as error:
            if error.exit_code == EXIT_STOPPED and (path / "resolved.yaml").is_file():
                error.fix += f"\nResume: {go_on}"
            leaving.append(leave_within(GRACE_S, error.exit_code, str(error)))
            raise
        finally:
            signal.set_wakeup_fd(before_fd)
            asyncio.get_running_loop().remove_reader(woken)
            wake.close()
            woken.close()

    leaving: list[threading.Timer] = []
    before = {number: signal.signal(number, _Interrupt(stop, begun, go_on)) for number in SIGNALS}
    try:
        result = asyncio.run(drive())
    except (Exception, SystemExit) as error:
        if begun.is_set() and not isinstance(error, MilesError):
            _tell(f"what was journalled is safe. Go on: {go_on}")
        raise
    finally:
        for timer in leaving:
            timer.cancel()
        for number, handler in before.items() if not stop.is_set() else ():  # a second one may still come
            signal.signal(number, handler)
    status = getattr(result, "status", "finished")
    if status == "interrupted":
        _tell(f"\ninterrupted and saved. Go on: {go_on}")
        raise typer.Exit(EXIT_INTERRUPTED)
    _tell(f"finished: {path}. Look at it: miles show {shlex.quote(str(path))}")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Interrupt:
    """What Ctrl-C (or SIGTERM) does. Before the run begins, the first ends the command; then the first finishes the
    step, and the second stops at once. A handler may interrupt a print, hence `shout`."""

    def __init__(self, stop: threading.Event, begun: threading.Event, go_on: str) -> None:
        self._stop, self._begun, self._go_on = stop, begun, go_on
        self._seen = False

    def __call__(self, number: int, frame: object) -> None:
        if self._seen:
            # Every finished group was journalled when it finished; waiting for a thread would not be "at once".
            go_on = f". Go on: {self._go_on}" if self._begun.is_set() else ""
            shout(f"\nstopped at once{go_on}\n")
            os._exit(EXIT_INTERRUPTED)
        self._seen = True
        if not self._begun.is_set():
            shout("\ninterrupted before the run began\n")
            raise KeyboardInterrupt
        self._stop.set()
        shout("\nfinishing the step, then saving; Ctrl-C again stops at once\n")
