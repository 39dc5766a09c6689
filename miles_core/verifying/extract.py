"""Finds the answer in what the model wrote, and says where it stood or why there is none. Linear in the text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Extract(StrEnum):
    tag = "tag"
    boxed = "boxed"
    last_number = "last_number"
    last_line = "last_line"
    first_line = "first_line"
    whole = "whole"


#: What a prompt must say for the answer to stand there.
ASKED = {
    Extract.tag: "Give the final answer between <{tag}> and </{tag}>.",
    Extract.boxed: "Put the final answer inside \\boxed{{}}.",
    Extract.last_number: "",
    Extract.last_line: "Write the final answer alone on the last line.",
    Extract.first_line: "Write the final answer alone on the first line.",
    Extract.whole: "",
}
SHOWN = 300  # characters of an answer that `info` holds
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_TAIL = 20_000  # `last_number` looks this far back


@dataclass(frozen=True, kw_only=True)
class Found:
    """`answer` is `None` where nothing was found; `why` says where it stood, or what was missing. `place` is its index
    in `extract`."""

    answer: str | None
    why: str
    place: int = -1


def find(text: str, places: Sequence[Extract], tag: str) -> Found:
    """The answer of the first place that has one."""
    missing = []
    for index, place in enumerate(places):
        answer, why = _tag(text, tag) if place is Extract.tag else _PLACES[place](text)
        if answer is not None:
            return Found(answer=answer, why=why, place=index)
        missing.append(why)
    return Found(answer=None, why="; ".join(missing))


def _tag(text: str, tag: str) -> tuple[str | None, str]:
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    if end < 0:
        begun = opening in text
        return None, f"{opening} is never closed" if begun else f"no {opening} in the text"
    start = text.rfind(opening, 0, end)
    if start < 0:
        return None, f"{closing} without {opening} before it"
    inner = text[start + len(opening) : end].strip()
    return (inner, f"inside {opening}") if inner else (None, f"{opening} is empty")


def _boxed(text: str) -> tuple[str | None, str]:
    r"""Braces of the last \boxed{…}, balanced."""
    at = text.rfind("\\boxed{")
    if at < 0:
        return None, "no \\boxed{} in the text"
    depth, start = 0, at + len("\\boxed")
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            inner = text[start + 1 : i].strip()
            return (inner, "inside \\boxed{}") if inner else (None, "\\boxed{} is empty")
    return None, "\\boxed{ is never closed"


def _last_number(text: str) -> tuple[str | None, str]:
    found = _NUMBER.findall(text[-_TAIL:])
    return (found[-1].rstrip(","), "the last number") if found else (None, "no number in the text")


def _line(which: int, word: str) -> Callable[[str], tuple[str | None, str]]:
    def find_line(text: str) -> tuple[str | None, str]:
        lines = text.strip().splitlines()
        return (lines[which].strip(), f"the {word} line") if lines else (None, "nothing was written")

    return find_line


def _whole(text: str) -> tuple[str | None, str]:
    return (text.strip(), "the whole text") if text.strip() else (None, "nothing was written")


_PLACES: dict[Extract, Callable[[str], tuple[str | None, str]]] = {
    Extract.boxed: _boxed,
    Extract.last_number: _last_number,
    Extract.last_line: _line(-1, "last"),
    Extract.first_line: _line(0, "first"),
    Extract.whole: _whole,
}


def demonstrated(answer: str, place: Extract, tag: str) -> str:
    """`answer` as a reference would write it at `place`."""
    return {Extract.tag: f"<{tag}>{answer}</{tag}>", Extract.boxed: f"\\boxed{{{answer}}}"}.get(place, answer)


def shown(answer: str) -> str:
    """An answer in one short line."""
    text = " ".join(answer[: 4 * SHOWN].split())
    return text if len(answer) <= SHOWN else f"{text[:SHOWN]} … ({len(answer):,} characters)"
