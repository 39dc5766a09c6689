"""The run directory: what is in it, how a checkpoint becomes valid, and what may differ on a resume.

`runs/<name>/`: `resolved.yaml` (itself a run file; each value's origin stands behind it as a comment, a digest of all
values at its end), `plugins.lock` (also where each model was found), `lock` (who runs here; held while it does),
`events.jsonl`, `metrics.jsonl`, `journal/`, `rollouts/`, `checkpoints/`, `weights/`, `exports/`. A checkpoint is
`checkpoints/step_NNNNNN/{trainer/, ledger.json, COMMIT}`; it counts only once COMMIT is there, which is written last,
after everything else was flushed to disk, and holds the digest of every file. `checkpoints/best` names the best one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from miles_core.config.reading import parse, written
from miles_core.errors import (
    CheckpointError,
    MilesError,
    ResumeError,
    RunBusyError,
    RunDirError,
    RunExistsError,
    RunNotFoundError,
    blamed,
)
from miles_core.files import flush, lines_of

SEAL = "# sha256 of these values: "

#: What may change on `--resume` (design §6, decision 0010), as patterns over dotted paths.
MAY_CHANGE = (
    r"(launcher|trackers|eval)(\..*)?",
    r"run\.(checkpoint_every|threads|name|dir)",
    r"(rollout|engines\.[^.]+)\.(count|gpus)",
    r"backend\.(ranks|gpus_per_rank)",
    r"(policies\.[^.]+\.)?schedule\.(samplers|max_leases_per_slot)",
    r"sync\.min_engines",
)
#: What may only grow then, where it is none of these.
_MAY_GROW = r"run\.steps|(?!.*\.architecture\.).*deadline_s"


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: the state after `step` consumed steps."""

    step: int
    folder: Path

    @property
    def trainer(self) -> Path:
        return self.folder / "trainer"

    def check(self) -> None:
        """Raise `CheckpointError` where a file is not what was committed. (COMMIT of 0.1.0 holds a number alone.)"""
        fix = f"restore it, or do without this checkpoint: rm -r {shlex.quote(str(self.folder))}"
        with blamed(f"the checkpoint {self.folder} cannot be checked", CheckpointError, fix):
            known = json.loads((self.folder / "COMMIT").read_text())
            files = dict(known["files"]) if isinstance(known, dict) else {}
            found = _digests(self.folder, [name for name in files if (self.folder / name).is_file()])
        for name, digest in files.items():
            if found.get(name) != digest:
                why = "is not what was saved" if name in found else "is gone"
                raise CheckpointError(f"the checkpoint {self.folder}: {name} {why}", fix=fix)

    def ledger(self) -> dict[str, Any]:
        """The ledger's snapshot. Raises `CheckpointError` where it cannot be read."""
        fix = f"remove {self.folder} and resume from the checkpoint before it"
        return _read_json(self.folder / "ledger.json", CheckpointError, fix)


@dataclass(frozen=True)
class RunDir:
    """Paths and durable writes of one run."""

    path: Path

    @staticmethod
    def create(path: Path, tree: Mapping[str, Any], origins: Mapping[str, str], lock: Mapping[str, Any]) -> RunDir:
        """Make the directory, whole or not at all; `RunExistsError` where it exists."""
        refuse_existing(path)
        draft = path.with_name(f".{path.name[:99]}.{os.getpid()}.draft")  # another process may be making it, too
        shutil.rmtree(draft, ignore_errors=True)
        new = [parent for parent in path.parents if not parent.exists()]
        try:
            for folder in ("journal", "rollouts", "checkpoints", "weights"):
                (draft / folder).mkdir(parents=True)
            RunDir(draft).write_config(tree, origins, lock)
            os.rename(draft, path)  # replaces an empty directory
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            with suppress(OSError):
                for parent in new:
                    parent.rmdir()
            refuse_existing(path)
            raise _cannot_make(path, str(error)) from error
        return RunDir(path)

    @staticmethod
    def open(path: Path) -> RunDir:
        """An existing run; `RunNotFoundError` where there is none."""
        if not os.path.isfile(path / "resolved.yaml"):  # also where looking is forbidden
            raise RunNotFoundError(
                f"{path} is no run directory: it has no resolved.yaml", fix="name a folder that `miles run` made"
            )
        return RunDir(path)

    def hold(self) -> TextIO:
        """Keep other processes out until the returned file is closed, or this process dies. Raises `RunBusyError`."""
        with blamed(f"{self.path} cannot be locked", RunDirError, "run where files can be written and locked"):
            file = open(self.path / "lock", "a+")  # a line a process, the one that holds it last
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                who = f"process {(self.path / 'lock').read_text().split()[-1]} is running in {self.path}"
                raise RunBusyError(who, fix="let it end, or stop it, before --resume") from error
            print(os.getpid(), file=file, flush=True)
            return file

    def write_config(self, tree: Mapping[str, Any], origins: Mapping[str, str], lock: Mapping[str, Any]) -> None:
        lines = [SEAL + _seal(tree), *annotated_yaml(tree, origins)]  # above, so that a file that was cut has it
        write_durably(self.path / "resolved.yaml", "\n".join(lines) + "\n")
        write_durably(self.path / "plugins.lock", json.dumps(lock, indent=1, sort_keys=True, default=dict) + "\n")

    def tree(self) -> dict[str, Any]:
        """`resolved.yaml` as a plain tree. Raises `ResumeError` where its values are not those that were written."""
        file = self.path / "resolved.yaml"
        with blamed(f"{file} cannot be read", ResumeError, "restore it, or start a new run"):
            text = file.read_text(encoding="utf-8")  # once: a run that goes on may replace it meanwhile
            tree, seal = dict(parse(text, str(file)) or {}), re.search(f"^{SEAL}(.*)$", text, re.MULTILINE)
        if (seal[1].strip() != _seal(tree)) if seal else "run" not in tree:  # miles-core 0.1.0 wrote no seal
            raise ResumeError(
                f"{file} was changed: its values are not those that the run wrote there",
                fix="undo the change; --resume takes values by key=value, and others need a new run",
            )
        return tree

    def lock(self) -> dict[str, Any]:
        return _read_json(self.path / "plugins.lock", ResumeError, "restore it, or start a new run")

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Lines of `metrics.jsonl`; a torn last line is skipped."""
        return self._lines("metrics.jsonl")

    def events(self) -> Iterator[dict[str, Any]]:
        """Lines of `events.jsonl`, alike."""
        return self._lines("events.jsonl")

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        file = self.path / name
        for line in lines_of(file):
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def checkpoints(self) -> list[Checkpoint]:
        """Committed checkpoints, oldest first."""
        commits = sorted((self.path / "checkpoints").glob("step_*/COMMIT"))
        return [Checkpoint(int(file.parent.name.removeprefix("step_")), file.parent) for file in commits]

    def latest(self) -> Checkpoint | None:
        return next(reversed(self.checkpoints()), None)

    def best(self) -> Checkpoint | None:
        """The checkpoint that `checkpoints/best` names."""
        pointer = self.path / "checkpoints" / "best"
        name = pointer.read_text().strip() if pointer.is_file() else ""
        return next((c for c in self.checkpoints() if c.folder.name == name), None)

    def checkpoint(self, step: int | None = None) -> Checkpoint:
        """The asked checkpoint: of `step`, else the best, else the latest."""
        found = self.checkpoints()
        wanted = [c for c in found if c.step == step] if step is not None else [self.best(), *reversed(found)]
        chosen = next(filter(None, wanted), None)
        if chosen is None:
            what, fix = "no checkpoint", "let the run reach one first"
            if found:
                have = ", ".join(str(c.step) for c in found)
                what, fix = f"no checkpoint of step {step}; it has: {have}", "name one of these"
            raise RunNotFoundError(f"{self.path} has {what}", fix=fix)
        return chosen

    def begin_checkpoint(self, step: int) -> Path:
        """An empty folder to write a checkpoint into; `commit_checkpoint` makes it valid."""
        draft = self.path / "checkpoints" / f".step_{step:06d}.draft"
        for stale in draft.parent.glob(".step_*.draft"):  # of a save that was cut off
            shutil.rmtree(stale, ignore_errors=True)
        with _writing(step):
            (draft / "trainer").mkdir(parents=True)
        return draft

    def commit_checkpoint(self, draft: Path, step: int, ledger: Mapping[str, Any]) -> Checkpoint:
        """Write the ledger, flush everything, rename, and write COMMIT last. Raises `CheckpointError`; the draft never
        counts, and an older checkpoint of the same step is replaced only by a complete one."""
        folder = self.path / "checkpoints" / f"step_{step:06d}"
        with _writing(step):
            write_durably(draft / "ledger.json", json.dumps(ledger, sort_keys=True, separators=(",", ":")))
            files = sorted(file for file in draft.rglob("*") if file.is_file())
            for file in files:
                flush(file)
            digests = _digests(draft, [str(file.relative_to(draft)) for file in files])
            if folder.exists():
                (folder / "COMMIT").unlink(missing_ok=True)
                shutil.rmtree(folder)
            os.rename(draft, folder)
            write_durably(folder / "COMMIT", json.dumps({"step": step, "files": digests}, indent=1) + "\n")
            flush(folder.parent)
        return Checkpoint(step, folder)

    def point_best(self, step: int) -> None:
        with _writing(step):
            write_durably(self.path / "checkpoints" / "best", f"step_{step:06d}\n")


def _seal(tree: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _digests(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """SHA-256 of these files of `folder`, by name."""

    def digest(name: str) -> str:
        with open(folder / name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as threads:  # hashing leaves the interpreter to others
        return dict(zip(names, threads.map(digest, names), strict=True))


def _writing(step: int) -> AbstractContextManager[None]:
    fix = "free space, then go on with --resume; earlier checkpoints are valid"
    return blamed(f"the checkpoint of step {step} could not be written", CheckpointError, fix)


def _read_json(path: Path, kind: type[MilesError], fix: str) -> dict[str, Any]:
    with blamed(f"{path} cannot be read", kind, fix):
        return dict(json.loads(path.read_text()))


def _cannot_make(path: Path, why: str) -> RunDirError:
    return RunDirError(
        f"the run directory {path} cannot be made: {why}", fix="free space there, or name another place by run.dir=…"
    )


def refuse_existing(path: Path) -> None:
    """Raise `RunExistsError` where `path` exists and holds anything, `RunDirError` where it can never be made."""
    if os.path.lexists(path) and (path.is_symlink() or not path.is_dir() or any(path.iterdir())):
        another = "start another with run.name=… (or run.dir=…, where that is set)"
        if not (path / "resolved.yaml").is_file():
            raise RunExistsError(f"{path} exists, and is no run directory", fix=another)
        raise RunExistsError(f"the run directory {path} exists", fix=f"go on with it by --resume, or {another}")
    both, parents = ("resolved.yaml", "plugins.lock"), Path(os.path.realpath(path)).parents
    if within := next((p for p in parents if all(os.path.isfile(p / name) for name in both)), None):
        why = f"the run directory {path} would lie inside the run directory {within}"
        raise RunDirError(why, fix="name a place outside of it by run.dir=…")
    above = next((p for p in parents if os.path.exists(p)), Path("/"))
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise _cannot_make(path, f"{above} is {'not writable' if above.is_dir() else 'no directory'}")


def write_durably(path: Path, text: str) -> None:
    """Replace `path` by `text` so that a crash leaves the old or the new file, never half of one."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    flush(draft)
    os.replace(draft, path)


def annotated_yaml(tree: Mapping[str, Any], origins: Mapping[str, str], prefix: str = "", depth: int = 0) -> list[str]:
    """The tree as YAML lines (scalars and lists as JSON, which YAML 1.2 contains), origins as comments."""
    lines: list[str] = []
    for key, value in tree.items():
        path = f"{prefix}{key}"
        name = key if re.fullmatch(r"[A-Za-z_][\w.-]*", str(key), re.ASCII) else written(str(key))
        head = f"{'  ' * depth}{name}:"
        if isinstance(value, Mapping) and value:
            lines += [head, *annotated_yaml(value, origins, f"{path}.", depth + 1)]
        else:
            origin = f"  # {origins[path]}" if origins.get(path) else ""
            lines.append(f"{head} {written(value)}{origin}")
    return lines


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted path; an empty mapping is a leaf."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves |= flatten(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def check_resume(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> dict[str, tuple[Any, Any]]:
    """Differences that a resume may carry, by path as (old, new); where the run lies is none. Raises `ResumeError`
    naming those that it may not."""
    before, after, absent = flatten(old), flatten(new), object()
    keys = [k for k in sorted(before.keys() | after.keys()) if before.get(k, absent) != after.get(k, absent)]
    differences = {key: (before.get(key), after.get(key)) for key in keys}
    refused = {k: v for k, v in differences.items() if not any(re.fullmatch(p, k) for p in MAY_CHANGE)}
    for key in [key for key in refused if re.fullmatch(_MAY_GROW, key)]:
        was, now = differences[key]
        if isinstance(was, int | float) and isinstance(now, int | float) and was < now:
            del refused[key]
    if refused:
        rows = "; ".join(f"{k}: was {json.dumps(was)}, now {json.dumps(now)}" for k, (was, now) in refused.items())
        raise ResumeError(
            f"{path} was started with another configuration: {rows}",
            fix="take the old values (`miles run RUN --resume` does), or start a new run. What may change: launcher, "
            "trackers, eval, run.steps (upwards) and .checkpoint_every/threads/name/dir, deadlines (upwards), "
            "schedule.samplers and .max_leases_per_slot, sync.min_engines, count and gpus of engines, ranks and "
            "gpus_per_rank of the backend",
        )
    return {key: both for key, both in differences.items() if key not in ("run.dir", "run.name")}
