"""The environment: task sources by position, splits by a hash of the question, and the verdict."""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from typing import TYPE_CHECKING

from miles_core.errors import DataError
from miles_core.records import Score, Task
from miles_core.seeds import derive
from miles_env_arithmetic.config import ArithmeticConfig, Match
from miles_env_arithmetic.questions import corrupt, draw

if TYPE_CHECKING:
    from miles_core.contracts.environment import EpisodeContext

#: Draws before a split counts as empty; with an eval share of 1 % a question is found in 100 draws on average.
MAX_DRAWS = 20_000
_RUN = re.compile(r"-?[0-9a-z]+")


def split_of(question: str, eval_share: float) -> str:
    """`train` or `eval`: a property of the question's text alone, so that no seed can make the splits meet."""
    digest = hashlib.sha256(question.encode()).digest()
    return "eval" if int.from_bytes(digest[:8], "big") < eval_share * 2**64 else "train"


class Tasks:
    """Keeps the contract `TaskSource`: endless, every position drawn from its own seed."""

    size: int | None = None

    def __init__(self, config: ArithmeticConfig, name: str, split: str, seed: int, policy: str) -> None:
        self._config, self._name, self._split = config, name, split
        # Evaluation asks the same questions whatever the run's seed, so that runs compare.
        self._stream = (seed, policy) if split == "train" else (0, "eval")

    def task(self, position: int) -> Task:
        """The task at `position`. Raises `DataError` where this difficulty has no question in the split."""
        seed, policy = self._stream
        rng = random.Random(derive(seed, policy, "arithmetic", self._name, self._split, position))
        question, answer = self._draw(rng)
        noisy = rng.random() < self._config.reference_noise
        return Task(
            id=f"{self._name}:{self._split}:{position}",
            prompt=self._config.template.replace("{question}", question),
            answer=answer,
            demonstrations=(corrupt(answer, rng) if noisy else answer,),
            metadata={"task": self._config.task.value, "question": question},
        )

    def _draw(self, rng: random.Random) -> tuple[str, str]:
        for _ in range(MAX_DRAWS):
            question, answer = draw(self._config, rng)
            if split_of(question, self._config.eval_share) == self._split:
                return question, answer
        raise DataError(
            f"environment {self._name!r}: none of {MAX_DRAWS} questions of {self._config.task.value} with digits"
            f" {self._config.digits} belongs to split {self._split!r}; there are too few different ones",
            fix=f"raise digits or terms, or choose an eval_share that leaves room (it is {self._config.eval_share})",
        )


class Arithmetic:
    """Keeps the contract `Environment`, single-turn."""

    task_splits = ("train", "eval")

    def __init__(self, config: ArithmeticConfig, *, name: str, seed: int, policy: str = "main") -> None:
        self._config, self._name, self._seed, self._policy = config, name, seed, policy
        self._last = config.match == Match.last
        self.instant = config.delay_s == 0  # nothing to wait for: groups may be scored in one go

    def tasks(self, split: str) -> Tasks:
        """Raises `DataError` for a split that does not exist, or that has no question."""
        if split not in self.task_splits:
            raise DataError(
                f"environment {self._name!r} has no split {split!r}", fix="ask for " + " or ".join(self.task_splits)
            )
        source = Tasks(self._config, self._name, split, self._seed, self._policy)
        source.task(0)  # an empty split shows here, before the run
        return source

    async def score(self, task: Task, context: EpisodeContext) -> Score:
        """1 where the answer is right, else 0; after the configured delay."""
        if self._config.delay_s > 0:
            # Pareto: delay_s / U^(1/index), U uniform in (0, 1].
            stretch = (1.0 - float(context.rng.random())) ** (-1.0 / self._config.delay_tail)
            await asyncio.sleep(min(self._config.delay_s * stretch, self._config.delay_max_s))
        said = self._said(context.text)
        right = said == task.answer
        return Score(
            reward=1.0 if right else 0.0,
            info={"answer": said, "verdict": "right" if right else "wrong"},
        )

    def _said(self, text: str) -> str:
        if self._last:
            runs = _RUN.findall(text)
            return runs[-1] if runs else ""
        return text.strip()
