"""`miles run`: train, with progress; the first Ctrl-C finishes the step and saves, the second stops at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from miles_core.errors import EXIT_INTERRUPTED, InputError, StoppedError


def run(
    file: Annotated[Path, typer.Argument(help="a run file; with --resume also a run directory")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, e.g. optimizer.lr=2e-4")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the run's latest checkpoint")] = False,
) -> None:
    """Validate everything, then train, showing progress. Results lie in the run directory."""
    from miles_core.config.compose import load, reload
    from miles_core.discovery import scan
    from miles_core.driver import execute, run_path

    catalogue = scan()
    if file.is_dir():
        if not resume:
            raise InputError(
                f"{file} is a directory, not a run file", fix=f"miles run {file} --resume, to go on with it"
            )
        run_file = reload(file, (*(overrides or ()), f"run.dir={file}"), catalogue=catalogue)
    else:
        run_file = load(file, tuple(overrides or ()), catalogue=catalogue)
    path = run_path(run_file)
    stop = threading.Event()

    async def drive() -> object:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, _interrupt, stop, path)
        loop.add_signal_handler(signal.SIGTERM, _interrupt, stop, path)
        return await execute(run_file, catalogue, stop, resume=resume)

    try:
        result = asyncio.run(drive())
    except StoppedError as error:
        if (path / "resolved.yaml").is_file():
            error.fix += f"\nResume: miles run {path} --resume"
        raise
    status = getattr(result, "status", "finished")
    if status == "interrupted":
        print(f"\ninterrupted and saved. Go on: miles run {path} --resume", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED)
    print(f"finished: {path}. Look at it: miles show {path}", file=sys.stderr)


def _interrupt(stop: threading.Event, path: Path) -> None:
    if stop.is_set():
        # Every finished group was journalled when it finished; waiting for a training thread would not be "at once".
        print(f"\nstopped at once. Go on: miles run {path} --resume", file=sys.stderr, flush=True)
        os._exit(EXIT_INTERRUPTED)
    stop.set()
    print("\nfinishing the step, then saving; Ctrl-C again stops at once", file=sys.stderr, flush=True)
