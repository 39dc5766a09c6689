"""A run's checkpoint as a Hugging Face folder: for `miles export`, and for runs that start from another run.

The trainer of the run is built once more in this process, its state loaded, its actor written. The folder appears
whole or not at all.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path

from miles_core.config.compose import from_tree
from miles_core.discovery import scan
from miles_core.errors import CheckpointError, ExportError, InputError, MilesError, RunExistsError, blamed
from miles_core.prepare import build_renderer, model_sources
from miles_core.provider import Place
from miles_core.run import RunDir
from miles_core.wiring import TrainerWorker, Wiring


def export_cached(run_dir: Path, step: int | None, undo: ExitStack | None = None) -> Path:
    """The exported folder of a run's checkpoint (`step`, else best, else latest), made on first use and kept in the
    run's `exports/`. What is made is removed again by closing `undo`, for runs that are refused after it. Raises
    `RunNotFoundError` where there is no such checkpoint."""
    run = RunDir.open(run_dir)
    checkpoint = run.checkpoint(step)
    folder = run.path / "exports" / checkpoint.folder.name
    if not folder.exists():
        export(run, checkpoint.step, folder)
        if undo is not None:
            undo.callback(_remove, folder)
    return folder


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # others may lie there
        folder.parent.rmdir()


def export(run: RunDir, step: int | None, folder: Path, policy: str = "") -> int:
    """Write the actor of `policy` (the only one, or the first) at a checkpoint to `folder`: the step that was written.

    Raises `RunExistsError` where `folder` exists, `RunNotFoundError` where the checkpoint does not.
    """
    if os.path.exists(folder):
        raise RunExistsError(f"{folder} exists", fix="name a folder that does not exist")
    checkpoint = run.checkpoint(step)
    try:
        checkpoint.check()
    except CheckpointError as error:  # no run began that it could stop
        raise ExportError(error.message, fix=error.fix) from error
    catalogue = scan()
    tree = run.tree()
    try:
        run_file = from_tree(tree, catalogue)
    except MilesError as error:
        error.message = f"the run {run.path} cannot be read again: {error.message}"
        raise
    chosen = run_file.policies.get(policy) if policy else next(iter(run_file.policies.values()))
    if chosen is None:
        raise InputError(
            f"the run has no policy {policy!r}; it has {list(run_file.policies)}", fix="name one of these by --policy"
        )
    wiring = Wiring(run_file, catalogue, run.path, model_sources(run_file, catalogue, export_cached, run.lock()))
    renderer = build_renderer(wiring, chosen, Place.CONTROLLER)
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    worker = TrainerWorker(wiring, 0, 1, lambda: False)
    fix = "free space there, or name another folder; a new run may start from that (model.source=FOLDER)"
    try:
        worker.load(checkpoint.trainer)
        with blamed(f"{folder} cannot be written", ExportError, fix):
            draft.mkdir(parents=True)
            worker.save_model(chosen.name, draft)
            renderer.tokenizer.save(draft)
            os.rename(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        worker.close()
    return checkpoint.step
