"""Multiple-choice problems: how they are asked, and which option an answer names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_uppercase

MOST = len(ascii_uppercase)
_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mbox|mathbf)\{([^{}]*)\}|[*$]")
_ALONE = re.compile(r"\(?([A-Za-z])\)?[.):]?")
_LABEL = re.compile(r"\(?([A-Z])[).:]\s")
_SAID = re.compile(r"answer(?:\s+is)?\s*:?\s*\(?([A-Z])(?![A-Za-z])", re.IGNORECASE)
_NAMED = re.compile(r"(?<![A-Za-z])([A-Z])(?![A-Za-z'])")
_TAIL = 2000  # characters at the end that are looked at


def asked(problem: str, choices: Sequence[str]) -> str:
    """The problem with its options, one a line: `A. …`."""
    return "\n".join([problem, *(f"{letter}. {text}" for letter, text in zip(ascii_uppercase, choices, strict=False))])


def named(answer: str, choices: Sequence[str]) -> tuple[str, str]:
    """(letter, how it was named), or ("", why it is none)."""
    letters = ascii_uppercase[: len(choices)]
    text = " ".join(_MARKUP.sub(r"\1", answer[-_TAIL:]).split())
    known = {_plain(choice): letter for letter, choice in zip(letters, choices, strict=False)}
    if alone := _ALONE.fullmatch(text.strip(" .")):
        letter = alone[1].upper()
        return (letter, "") if letter in letters else ("", f"{letter} is none of {letters[0]} to {letters[-1]}")
    if letter := known.get(_plain(text), ""):
        return letter, "by its text"
    if (label := _LABEL.match(text)) and label[1] in letters:
        return label[1], ""
    for pattern, how in ((_SAID, "after the word answer"), (_NAMED, "the only letter named")):
        found = [letter.upper() for letter in pattern.findall(text) if letter.upper() in letters]
        if found and (pattern is _SAID or len(set(found)) == 1):
            return found[-1], how
        if found:
            return "", f"it names {', '.join(sorted(set(found)))}"
    return "", f"it names none of {letters[0]} to {letters[-1]}"


def letter_of(reference: str | int, choices: Sequence[str]) -> str:
    """The letter that a reference means: a letter, a number counted from 0, or an option's own text; "" for none."""
    letters = ascii_uppercase[: len(choices)]
    if isinstance(reference, int):
        return letters[reference] if 0 <= reference < len(letters) else ""
    same = [letter for letter, choice in zip(letters, choices, strict=False) if choice.strip() == reference.strip()]
    if len(same) == 1:
        return same[0]
    bare = _ALONE.fullmatch(reference.strip())
    letter = bare[1].upper() if bare else ""
    return letter if letter and letter in letters else ""


def _plain(text: str) -> str:
    return " ".join(_MARKUP.sub(r"\1", text).split()).strip(" .").casefold()
