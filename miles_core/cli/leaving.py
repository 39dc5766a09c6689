"""Leaving a process in which something hangs: Python waits at its end for threads that may never return."""

from __future__ import annotations

import os
import sys
import threading

#: How long closing, and then the end of the interpreter, may take once the outcome is known.
GRACE_S = 15.0


def leave_within(seconds: float, code: int, words: str = "") -> threading.Timer:
    """End this process with `code` unless it ended by itself, or the timer was cancelled, within `seconds`; say `words`
    first, which nobody else could."""

    def leave() -> None:
        if words:
            print(words, file=sys.stderr)
        sys.stderr.flush()
        os._exit(code)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    return timer
