"""Options of the environment `arithmetic`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from miles_core.config.schema import opt


class TaskKind(StrEnum):
    sort = "sort"
    reverse = "reverse"
    add = "add"
    subtract = "subtract"
    multiply = "multiply"
    modular = "modular"
    occurrences = "occurrences"
    maximum = "maximum"


class Symbols(StrEnum):
    digits = "digits"
    letters = "letters"


class Match(StrEnum):
    exact = "exact"
    last = "last"


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig:
    task: TaskKind = opt(TaskKind.sort, "kind of task")
    digits: int = opt(5, "length of the string, or most digits of a number", unit="characters", low=1, high=200)
    min_digits: int | None = opt(None, "least length, drawn uniformly up to `digits`; `digits` where null", low=1)
    symbols: Symbols = opt(Symbols.digits, "what strings of sort, reverse and occurrences are made of")
    terms: int = opt(2, "numbers in add, modular and maximum", unit="numbers", low=2, high=100)
    modulus: int = opt(10, "modulus of modular", low=2)
    padded: bool = opt(False, "answers of add and multiply have a fixed width, filled with zeros on the left")
    reversed_answer: bool = opt(False, "answers of add and multiply begin with the least significant digit")
    template: str = opt("{question}", "the prompt, with {question} where the question stands")
    match: Match = opt(Match.exact, "`exact` compares the whole answer; `last` its last run of letters or digits")
    reference_noise: float = opt(0.0, "share of demonstrations with one character replaced", low=0, high=1)
    eval_share: float = opt(0.1, "share of all questions that belong to the eval split", low=0, high=1)
    delay_s: float = opt(0.0, "least time that a verdict takes; 0 for no delay", unit="s", low=0)
    delay_tail: float = opt(1.5, "Pareto index of the delay; smaller is a longer tail", low=0.1)
    delay_max_s: float = opt(10.0, "longest delay", unit="s", low=0)

    def __post_init__(self) -> None:
        if self.min_digits is not None and self.min_digits > self.digits:
            raise ValueError(f"min_digits is {self.min_digits}, above digits, which is {self.digits}")
        if "{question}" not in self.template:
            raise ValueError(f"template is {self.template!r}, without {{question}}")
        if not 0 < self.eval_share < 1:
            raise ValueError(f"eval_share is {self.eval_share}; both splits need questions, so between 0 and 1")
        if self.delay_max_s < self.delay_s:
            raise ValueError(f"delay_max_s is {self.delay_max_s}, below delay_s, which is {self.delay_s}")
