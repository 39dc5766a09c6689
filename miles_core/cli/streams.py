"""The standard streams of a command: whoever reads them may leave, and the command ends as it would have."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from miles_core.errors import ExportError


class Stream:
    """Standard output or error. Once its reader has gone away (`miles show RUN | head`), the rest goes nowhere, and so
    does, on standard error, what cannot be written at all; an output that cannot be written is an `ExportError`."""

    def __init__(self, stream: Any, *, matters: bool) -> None:
        self._stream, self._matters = stream, matters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, method: Any, *args: Any) -> None:
        try:
            method(*args)
        except OSError as error:
            # What is still buffered would fail again when Python ends, and change the exit code.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if self._matters and not isinstance(error, BrokenPipeError):
                fix = "free space there, or send it elsewhere"
                raise ExportError(f"the output cannot be written: {error}", fix=fix) from error


def settle() -> None:
    """Make this process's standard streams such. One that was closed (`2>&-`) leads nowhere: else the next file that is
    opened would take its number, and be written into by every library that complains."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # what an old terminal cannot show is spelled out
    sys.stdout = Stream(sys.stdout, matters=True)
    sys.stderr = Stream(sys.stderr, matters=False)


def shout(text: str) -> None:
    """Say on standard error what a signal handler has to say: it may have interrupted a print."""
    with suppress(OSError):
        os.write(2, text.encode())
