"""Folders that are made once and checked whenever they are used.

A folder is made under another name and renamed when it is whole; its last file, the marker, lists the digest of every
other one. A folder without marker, or with other bytes than the marker says, is made again. One process at a time makes
a folder: others wait for it, up to a deadline.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from miles_core.errors import DeadlineError, ModelSourceError

MARKER = "miles-gguf.json"
LOCK = ".gguf.lock"
_CHUNK = 1 << 23
_POLL_S = 0.1


def digest(path: Path) -> str:
    """xxh3-128 of a file, in hexadecimal."""
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def is_whole(folder: Path) -> bool:
    """Whether every file that the marker lists has the bytes that it had when the folder was made."""
    try:
        files = json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"]
        return bool(files) and all(digest(folder / name) == found for name, found in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def once(cache: Path, name: str, deadline_s: float, make: Callable[[Path], None]) -> Path:
    """The folder `name` in `cache`, made by `make(empty folder)` where it is not there whole.

    Raises `DeadlineError` where another process makes it for longer than `deadline_s`, and `ModelSourceError` where the
    cache cannot be written.
    """
    folder = cache / name
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _alone(cache / LOCK, deadline_s, folder):
            if not is_whole(folder):
                _make(folder, make)
    except OSError as error:
        raise ModelSourceError(
            f"the model cannot be written into {cache}: {error}", fix="make room there, or make the folder writable"
        ) from error
    return folder


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    part = folder.parent / f".{folder.name}.part"
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed: nobody else holds the lock
    part.mkdir()
    try:
        make(part)
        files = {path.name: digest(path) for path in sorted(part.iterdir())}
        for path in part.iterdir():
            _to_disk(path)
        (part / MARKER).write_text(json.dumps({"format": 1, "files": files}, indent=2) + "\n", encoding="utf-8")
        _to_disk(part / MARKER)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _alone(path: Path, deadline_s: float, what: Path) -> Iterator[None]:
    """Hold the lock of `path`; the system lets go of it when a process ends, however it ends."""
    until = time.monotonic() + deadline_s
    with path.open("a+b") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise DeadlineError(
                        f"another process has been making {what} for over {deadline_s:g} s",
                        fix="wait for it to end, or end it, and start again",
                    ) from None
                time.sleep(_POLL_S)
        yield
