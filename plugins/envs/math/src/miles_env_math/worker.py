r"""The child process: reads references and answers with math-verify, and compares them. The parent never imports it.

An answer is read as if it stood inside `\boxed{}`, so that `1/2`, `\frac12` and `50\%` all are; a text with delimiters
of its own (`$…$`, `\boxed{}`) is searched as math-verify does. Nothing is printed that math-verify evaluated: the
text of a tower of powers has no end.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from functools import lru_cache
from typing import Any

from miles_core.verifying.sandbox import Refused, said, serve

_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}")


def start(settings: dict[str, Any]) -> Judge:
    try:
        import math_verify  # noqa: F401 - read before the process is confined
    except Exception as error:
        raise Refused(f"math-verify cannot be imported: {said(error)}", "pip install miles-env-math") from error
    logging.disable(logging.CRITICAL)
    judge = Judge(settings["decimals"], settings["strict"])
    judge.verify("\\frac{1}{2} + \\sqrt{2}", "x^2", search=False)  # grammar and rules are loaded at first use
    return judge


class Judge:
    def __init__(self, decimals: int, strict: bool) -> None:
        self._decimals, self._strict = decimals, strict

    def reference(self, text: str) -> dict[str, Any]:
        """Whether `text` can be compared with anything (a tower of powers cannot): ends the process where it cannot."""
        return self.verify(text, "1", search=False)

    def verify(self, reference: str, answer: str, search: bool) -> dict[str, Any]:
        """Whether `answer` is equal to `reference`, as mathematics or as text. With `search`, it is somewhere in a
        longer text."""
        from math_verify import verify

        read = _read(answer, search)
        texts = {_plain(part) for part in (answer, *read) if isinstance(part, str)}
        same = _plain(reference) in texts or verify(
            list(_read(reference, False)),
            list(read),
            float_rounding=self._decimals,
            strict=self._strict,
            timeout_seconds=None,  # the parent's deadline holds, and needs no help from Python
        )
        return {"equal": bool(same), "read": _shown(read)}


@lru_cache(maxsize=256)
def _read(text: str, search: bool) -> tuple[Any, ...]:
    """What math-verify finds: expressions, and the text that it read them from."""
    from math_verify import parse

    own = search or "\\boxed" in text or "$" in text.replace("\\$", "") or text.count("{") != text.count("}")
    return tuple(parse(text if own else f"\\boxed{{{text}}}", parsing_timeout=None))


def _shown(read: tuple[Any, ...]) -> str:
    return next((part for part in read if isinstance(part, str)), "")[:300]


def _plain(text: str) -> str:
    return " ".join(_TEXT.sub(r"\1", text).split()).strip(" $.").casefold()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    serve(start, given["deadline_s"], given["memory_mib"], given)
