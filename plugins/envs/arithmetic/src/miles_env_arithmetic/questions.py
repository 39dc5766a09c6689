"""The questions: one pure function per kind of task, from a random stream to (question, answer)."""

from __future__ import annotations

import random
from collections.abc import Callable

from miles_env_arithmetic.config import ArithmeticConfig, Symbols, TaskKind

DIGITS = "0123456789"
LETTERS = "abcdefghijklmnopqrstuvwxyz"

Question = tuple[str, str]


def draw(config: ArithmeticConfig, rng: random.Random) -> Question:
    """A question and its only right answer."""
    return _KINDS[config.task](config, rng)


def corrupt(answer: str, rng: random.Random) -> str:
    """`answer` with exactly one digit or letter replaced by another of its kind; a sign stays."""
    places = [i for i, c in enumerate(answer) if c in DIGITS or c in LETTERS]
    place = rng.choice(places)
    alphabet = DIGITS if answer[place] in DIGITS else LETTERS
    other = rng.choice([c for c in alphabet if c != answer[place]])
    return answer[:place] + other + answer[place + 1 :]


def _length(c: ArithmeticConfig, rng: random.Random) -> int:
    return c.digits if c.min_digits is None else rng.randint(c.min_digits, c.digits)


def _string(c: ArithmeticConfig, rng: random.Random) -> str:
    alphabet = DIGITS if c.symbols == Symbols.digits else LETTERS
    return "".join(rng.choices(alphabet, k=_length(c, rng)))


def _number(c: ArithmeticConfig, rng: random.Random) -> int:
    """Uniform below 10**length, so small numbers stay possible."""
    return rng.randrange(10 ** _length(c, rng))


def _shown(c: ArithmeticConfig, value: int, width: int) -> str:
    text = str(value).zfill(width) if c.padded else str(value)
    return text[::-1] if c.reversed_answer else text


def _sort(c: ArithmeticConfig, rng: random.Random) -> Question:
    text = _string(c, rng)
    return f"{text}>", "".join(sorted(text))


def _reverse(c: ArithmeticConfig, rng: random.Random) -> Question:
    text = _string(c, rng)
    return f"{text}>", text[::-1]


def _add(c: ArithmeticConfig, rng: random.Random) -> Question:
    numbers = [_number(c, rng) for _ in range(c.terms)]
    width = len(str(c.terms * (10**c.digits - 1)))
    return "+".join(map(str, numbers)) + "=", _shown(c, sum(numbers), width)


def _subtract(c: ArithmeticConfig, rng: random.Random) -> Question:
    a, b = _number(c, rng), _number(c, rng)
    return f"{a}-{b}=", str(a - b)


def _multiply(c: ArithmeticConfig, rng: random.Random) -> Question:
    a, b = _number(c, rng), _number(c, rng)
    return f"{a}*{b}=", _shown(c, a * b, 2 * c.digits)


def _modular(c: ArithmeticConfig, rng: random.Random) -> Question:
    numbers = [_number(c, rng) for _ in range(c.terms)]
    return "+".join(map(str, numbers)) + f" mod {c.modulus}=", str(sum(numbers) % c.modulus)


def _occurrences(c: ArithmeticConfig, rng: random.Random) -> Question:
    text = _string(c, rng)
    wanted = rng.choice(DIGITS if c.symbols == Symbols.digits else LETTERS)
    return f"{text},{wanted}>", str(text.count(wanted))


def _maximum(c: ArithmeticConfig, rng: random.Random) -> Question:
    numbers = [_number(c, rng) for _ in range(c.terms)]
    return ",".join(map(str, numbers)) + ">", str(max(numbers))


_KINDS: dict[TaskKind, Callable[[ArithmeticConfig, random.Random], Question]] = {
    TaskKind.sort: _sort,
    TaskKind.reverse: _reverse,
    TaskKind.add: _add,
    TaskKind.subtract: _subtract,
    TaskKind.multiply: _multiply,
    TaskKind.modular: _modular,
    TaskKind.occurrences: _occurrences,
    TaskKind.maximum: _maximum,
}
