"""Start or resume a run: from a run file to its result, in one call. What `miles run` calls, and what tests call.

The order is a promise: everything that bad input can get wrong is found before the run directory exists.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from miles_core.compatibility import check_lock
from miles_core.config.binding import join
from miles_core.config.schema import Policy, RunFile
from miles_core.controller import Controller
from miles_core.discovery import Catalogue
from miles_core.errors import CheckpointError, MilesError, ResumeError, RunDirError, StoppedError, blamed, met_late
from miles_core.export import export_cached
from miles_core.journal import Journal
from miles_core.ledger import Ledger
from miles_core.passes import CALL_TIMEOUT_S
from miles_core.prepare import Prepared, prepare
from miles_core.progress import Reports
from miles_core.provider import Place
from miles_core.run import Checkpoint, RunDir, check_resume, refuse_existing
from miles_core.schedule import RunResult, Stop
from miles_core.waits import GO_ON

#: What math libraries read when they are first imported.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

#: New objects, less freed ones, after which the garbage collector looks at them while a run goes on.
COLLECT_AFTER = 100_000


@dataclass(frozen=True, kw_only=True)
class Resume:
    """What a resume goes on from: the run and its latest checkpoint (`None`: from the beginning)."""

    run: RunDir
    checkpoint: Checkpoint | None
    changes: Mapping[str, Any]


def run_path(run_file: RunFile) -> Path:
    """The run directory: `run.dir`, else `runs/<name>`."""
    return Path(run_file.run.dir) if run_file.run.dir else Path("runs") / run_file.run.name


async def execute(
    run_file: RunFile,
    catalogue: Catalogue,
    stop: Stop,
    *,
    resume: bool = False,
    on_begin: Callable[[], None] = lambda: None,
) -> RunResult:
    """Run to the end or to a stop request. Raises `InputError`s before anything is created, `StoppedError`s later.

    `on_begin` is called once, when the run directory is about to be written.
    """
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(run_file.run.threads)))
    path = run_path(run_file)
    # The run directory is this process's until the end; models are exported for no run that is refused.
    with ExitStack() as holding, ExitStack() as exports:
        going_on = _resume(run_file, path, catalogue, holding) if resume else None
        if going_on is None:
            refuse_existing(path)
        reports, controller = Reports(), None
        try:
            export = partial(export_cached, undo=exports)
            prepared = prepare(run_file, catalogue, path, export, going_on.run.lock() if going_on else None)
            if going_on is not None:
                going_on = replace(going_on, changes={**going_on.changes, **_rescored(going_on, prepared)})
            controller = await Controller.open(prepared, lambda kind, fields: reports.event(kind, **fields))
            if going_on is not None and (begun := going_on.checkpoint):
                with blamed(f"{begun.folder} cannot be loaded", CheckpointError, "remove it, then try again"):
                    await controller.trainer.call("load", begun.trainer, timeout_s=CALL_TIMEOUT_S)
            reports.trackers = tuple(prepared.wiring.build(t, Place.CONTROLLER) for t in run_file.trackers.values())
            on_begin()
            config = (run_file.tree, run_file.origins, prepared.lock)
            if going_on is None:
                run = RunDir.create(path, *config)
                holding.enter_context(run.hold())
            else:
                run = going_on.run
                with blamed(f"{path} cannot be written", RunDirError, "free space there, then try again"):
                    run.write_config(*config)
            exports.pop_all()  # from here on nothing is undone
            with _rare_collections():
                result = await _drive(controller, prepared, run, going_on, reports, stop)
        except BaseException:
            with suppress(Exception):  # what stopped the run is the better news
                if controller is not None:
                    await controller.close()
            raise
        await controller.close()
        return result


@contextmanager
def _rare_collections() -> Iterator[None]:
    """While a run goes on, the garbage collector leaves alone what was loaded before it, and looks less often: going
    through all of torch and transformers takes as long as a step of a small model."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _resume(run_file: RunFile, path: Path, catalogue: Catalogue, holding: ExitStack) -> Resume:
    run = RunDir.open(path)
    holding.enter_context(run.hold())
    check_lock(run.lock(), catalogue)  # first: another core may spell the same configuration with further keys
    changes = check_resume(run.tree(), run_file.tree, path)
    checkpoint = run.latest()
    if checkpoint is not None and checkpoint.step >= run_file.run.steps:
        raise ResumeError(
            f"{path} has all of its {run_file.run.steps} steps already",
            fix=f"give it more, e.g. run.steps={2 * run_file.run.steps}, or look at it with `miles show`",
        )
    if checkpoint is not None:
        checkpoint.check()
    return Resume(run=run, checkpoint=checkpoint, changes={k: list(v) for k, v in changes.items()})


async def _drive(
    controller: Controller, prepared: Prepared, run: RunDir, resume: Resume | None, reports: Reports, stop: Stop
) -> RunResult:
    run_file = prepared.wiring.run
    hooks = prepared.wiring.catalogue.pm.hook
    journal = Journal(run.path / "journal")
    try:
        ledger = _ledger(prepared, journal, resume)
        checkpoint = resume.checkpoint if resume else None
        info = {
            "name": run_file.run.name,
            "dir": str(run.path),
            "steps": run_file.run.steps,
            "first_step": checkpoint.step if checkpoint else 0,
            "lineage": ledger.lineage,
            "policies": list(run_file.policies),
            "summary": "; ".join(_summary(policy, run_file.origins) for policy in run_file.policies.values()),
        }
        reports.start(info)
        for what, (was, now) in (resume.changes if resume else {}).items():
            reports.event("changed", what=what, was=was, now=now)
        with blamed("an observer of the start of the run failed", StoppedError, GO_ON):
            hooks.miles_on_run_start(info=info)
        result = await controller.run(run, ledger, reports.trackers, stop)
    except BaseException as error:
        status = type(error).__name__
        if isinstance(error, MilesError):
            met_late(error)
            status = error.code
        for end in (journal.close, lambda: hooks.miles_on_run_end(status=status), lambda: reports.close(status)):
            with suppress(Exception):  # what stopped the run is the better news
                end()
        raise
    with suppress(StoppedError):  # everything was synced with the last checkpoint
        journal.close()
    with blamed("an observer of the end of the run failed", StoppedError, GO_ON):
        hooks.miles_on_run_end(status=result.status)
    reports.close(result.status)
    return result


def _rescored(resume: Resume, prepared: Prepared) -> dict[str, list[str]]:
    """Environments that score with other code than before: a mended reward goes on, and is said to be another."""
    before, now = resume.run.lock().get("scoring", {}), prepared.lock["scoring"]
    return {f"scoring of {k}": [before[k], now[k]] for k in now if before.get(k, now[k]) != now[k]}


def _ledger(prepared: Prepared, journal: Journal, resume: Resume | None) -> Ledger:
    run_file = prepared.wiring.run
    schedules = {p.name: p.schedule for p in run_file.policies.values()}
    large = {spec.name for specs in prepared.parts.sampling.values() for spec in specs.columns.values() if spec.large}
    omit = frozenset(large if run_file.run.journal == "light" else ())
    if resume is None:
        return Ledger(journal, schedules, omit=omit)
    # Killed before the first checkpoint: everything again, on a new lineage.
    empty = Ledger(None, schedules).snapshot() | {"journal": [0, 0]}
    snapshot = resume.checkpoint.ledger() if resume.checkpoint else empty
    return Ledger.resume(snapshot, journal, schedules, omit=omit, changes=resume.changes)


def _summary(policy: Policy, origins: Mapping[str, str]) -> str:
    """Readable: what learns what, how; and which fields of the algorithm its preset did not set."""
    envs, schedule = "+".join(part.use for part in policy.envs.values()), policy.schedule
    start = join(policy.at, "algorithm.")
    said = [path for path, by in origins.items() if by in ("file", "command line")]
    own = {path.removeprefix(start).partition(".")[0] for path in said if path.startswith(start)} - {"use"}
    what = policy.algorithm.preset + (f" (set here: {', '.join(sorted(own))})" if own else "")
    size = f"{schedule.groups_per_step} x {schedule.group_size} a step"
    return f"{what} on {envs}, {size}, max staleness {schedule.max_staleness}"
