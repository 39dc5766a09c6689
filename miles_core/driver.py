"""Start or resume a run: from a run file to its result, in one call. What `miles run` calls, and what tests call.

The order is a promise: everything that bad input can get wrong is found before the run directory exists.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.compatibility import check_lock
from miles_core.controller import Controller, describe_failure
from miles_core.errors import JournalError, ResumeError
from miles_core.export import export_cached
from miles_core.journal import Journal
from miles_core.ledger import Ledger
from miles_core.prepare import Prepared, prepare
from miles_core.provider import Place
from miles_core.run import Checkpoint, RunDir, check_resume, refuse_existing

if TYPE_CHECKING:
    from miles_core.config.schema import RunFile
    from miles_core.contracts.launcher import Tracker
    from miles_core.discovery import Catalogue
    from miles_core.schedule import RunResult, Stop

#: What math libraries read when they are first imported.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class Resume:
    """What a resume goes on from: the run and its latest checkpoint (`None`: from the beginning)."""

    run: RunDir
    checkpoint: Checkpoint | None
    changes: Mapping[str, Any]


def run_path(run_file: RunFile) -> Path:
    """The run directory: `run.dir`, else `runs/<name>`."""
    return Path(run_file.run.dir) if run_file.run.dir else Path("runs") / run_file.run.name


async def execute(run_file: RunFile, catalogue: Catalogue, stop: Stop, *, resume: bool = False) -> RunResult:
    """Run to the end or to a stop request. Raises `InputError`s before anything is created, `StoppedError`s later."""
    set_threads(run_file.run.threads)
    path = run_path(run_file)
    going_on = _resume(run_file, path, catalogue) if resume else None
    if going_on is None:
        refuse_existing(path)
    prepared = prepare(run_file, catalogue, path, export_cached)
    trackers = _Relay()
    controller = await Controller.open(prepared, trackers.event)
    try:
        trackers.trackers = [prepared.wiring.build(part, Place.CONTROLLER) for part in run_file.trackers.values()]
        run = _directory(prepared, path, going_on)
        return await _drive(controller, prepared, run, going_on, trackers, stop)
    finally:
        await controller.close()


def _resume(run_file: RunFile, path: Path, catalogue: Catalogue) -> Resume:
    run = RunDir.open(path)
    changes = check_resume(run.tree(), run_file.tree, path)
    check_lock(run.lock(), catalogue)
    checkpoint = run.latest()
    if checkpoint is not None and checkpoint.step >= run_file.run.steps:
        raise ResumeError(
            f"{path} has all of its {run_file.run.steps} steps already",
            fix=f"give it more, e.g. run.steps={2 * run_file.run.steps}, or look at it: miles show {path}",
        )
    return Resume(run=run, checkpoint=checkpoint, changes={k: list(v) for k, v in changes.items()})


def _directory(prepared: Prepared, path: Path, resume: Resume | None) -> RunDir:
    run_file = prepared.wiring.run
    if resume is None:
        return RunDir.create(path, run_file.tree, run_file.origins, prepared.lock)
    resume.run.write_config(run_file.tree, run_file.origins, prepared.lock)
    return resume.run


async def _drive(
    controller: Controller,
    prepared: Prepared,
    run: RunDir,
    resume: Resume | None,
    trackers: _Relay,
    stop: Stop,
) -> RunResult:
    run_file = prepared.wiring.run
    hooks = prepared.wiring.catalogue.pm.hook
    journal = Journal(run.path / "journal")
    status = "finished"
    try:
        ledger = _ledger(prepared, journal, resume)
        first = resume.checkpoint.step if resume and resume.checkpoint else 0
        if resume is not None and resume.checkpoint is not None:
            await controller.trainer.call("load", str(resume.checkpoint.trainer), timeout_s=7200.0)
        info = {
            "name": run_file.run.name,
            "dir": str(run.path),
            "steps": run_file.run.steps,
            "first_step": first,
            "lineage": ledger.lineage,
            "policies": list(run_file.policies),
            "summary": summary(run_file),
        }
        trackers.start(info)
        hooks.miles_on_run_start(info=info)
        result = await controller.run(run, ledger, trackers.trackers, stop)
        status = result.status
        return result
    except BaseException as error:
        status = describe_failure(error)
        raise
    finally:
        with suppress(JournalError):  # what stopped the run is the better news; a journal that failed says so itself
            journal.close()
        hooks.miles_on_run_end(status=status)
        trackers.close(status)


def _ledger(prepared: Prepared, journal: Journal, resume: Resume | None) -> Ledger:
    run_file = prepared.wiring.run
    schedules = {p.name: p.schedule for p in run_file.policies.values()}
    large = {spec.name for specs in prepared.columns.values() for spec in specs.values() if spec.large}
    omit = frozenset(large if run_file.run.journal == "light" else ())
    if resume is None:
        return Ledger(journal, schedules, omit=omit)
    if resume.checkpoint is None:  # killed before the first checkpoint: everything again, on a new lineage
        snapshot = Ledger(None, schedules, omit=omit).snapshot() | {"journal": [0, 0]}
    else:
        snapshot = resume.checkpoint.ledger()
    return Ledger.resume(snapshot, journal, schedules, omit=omit, changes=resume.changes)


class _Relay:
    """Events to all trackers, from before they exist to after they are closed."""

    def __init__(self) -> None:
        self.trackers: Sequence[Tracker] = ()

    def start(self, info: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.start(info)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.event(kind, fields)

    def close(self, status: str) -> None:
        for tracker in self.trackers:
            tracker.close(status)
        self.trackers = ()


def set_threads(threads: int, environment: Callable[[str, str], None] | None = None) -> None:
    """Give this process's math libraries `threads` threads, before they are first imported."""
    write = environment or os.environ.__setitem__
    for variable in THREAD_VARIABLES:
        write(variable, str(threads))


def summary(run_file: RunFile) -> str:
    """One readable line: what learns what, how."""
    parts = [
        f"{p.algorithm.preset} on {'+'.join(part.use for part in p.envs.values())}, "
        f"{p.schedule.groups_per_step} x {p.schedule.group_size} a step, max staleness {p.schedule.max_staleness}"
        for p in run_file.policies.values()
    ]
    return "; ".join(parts)
