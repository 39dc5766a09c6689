"""The standard streams of a command: whoever reads them may leave, and the command ends as it would have."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import Any

from miles_core.errors import ExportError


class Stream:
    """Standard output or error. Once its reader has gone away (`miles show RUN | head`, or a terminal that was closed),
    the rest goes nowhere, and so does, on standard error, what cannot be written at all; an output that cannot be
    written is an `ExportError`, which `flush` raises once more: a library may have caught the first."""

    def __init__(self, stream: Any, *, matters: bool) -> None:
        self._stream, self._matters = stream, matters
        self._failed: ExportError | None = None
        self._gone = {errno.EPIPE, errno.EIO} if stream.isatty() else {errno.EPIPE}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def _try(self, method: Any, *args: Any) -> None:
        try:
            method(*args)
        except OSError as error:
            # What is still buffered would fail again when Python ends, and change the exit code.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if self._matters and error.errno not in self._gone:
                fix = "free space there, or send it elsewhere"
                self._failed = ExportError(f"the output cannot be written: {error}", fix=fix)
                raise self._failed from error


def settle() -> None:
    """Make this process's standard streams such. One that was closed (`2>&-`) leads nowhere: else the next file that is
    opened would take its number, here or in a worker process, and be written into by every library that complains."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, mode)
            os.set_inheritable(nowhere.fileno(), True)
            setattr(sys, name, nowhere)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # what an old terminal cannot show is spelled out
    sys.stdout = Stream(sys.stdout, matters=True)
    sys.stderr = Stream(sys.stderr, matters=False)


def shout(text: str) -> None:
    """Say on standard error what a signal handler has to say: it may have interrupted a print."""
    with suppress(OSError):
        os.write(2, text.encode())
