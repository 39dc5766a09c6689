"""The few file operations that must survive a crash, behind one small class, so that tests can fail any of them.

Bytes handed to the operating system survive the death of the process; `sync` makes them survive the machine's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def flush(path: Path) -> None:
    """Make what a file holds, or which entries a folder has, survive a power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def lines_of(path: Path) -> list[str]:
    """Lines of a file of JSON lines that are not blank, none where it is missing. A line ends in a line feed alone:
    strings hold other separators, such as U+2028, as they are. Bytes that are no UTF-8 (a torn line's) are replaced."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [line for line in text.split("\n") if line.strip()]


class Files:
    """Real files. Tests subclass it and raise `OSError` from the n-th call, or write only a part."""

    def create(self, path: Path) -> int:
        """A descriptor of a new file, for appending. Raises `FileExistsError`."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, parts: Sequence[bytes]) -> None:
        """Append all parts, however many calls the system needs."""
        written = os.writev(fd, parts)  # one call for a small frame, and no copy of a large one
        if written < sum(map(len, parts)):
            rest = memoryview(b"".join(parts))[written:]
            while rest:
                rest = rest[os.write(fd, rest) :]

    def truncate(self, path: Path, size: int) -> None:
        """Cut a file to `size` bytes and sync it."""
        os.truncate(path, size)
        flush(path)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def sync_folder(self, folder: Path) -> None:
        """Make new entries of `folder` survive a power loss."""
        flush(folder)
