"""What every scorer here rates: one item a trajectory, as text; and the shell around them that keeps the contract."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_algo_rewards.config import Turns
from miles_core.errors import CapabilityError, RewardError
from miles_core.records import Array, Message, Origin, Ref, Task, Trajectory

if TYPE_CHECKING:
    from miles_core.contracts.rendering import Renderer


@dataclass(frozen=True, kw_only=True)
class Item:
    """One trajectory as a rater sees it. `prompt` is text, or messages; without a task, the prompt's tokens as text."""

    id: str
    group: str
    text: str
    finish: str
    prompt: str | tuple[Message, ...]
    task: str = ""
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        prompt = self.prompt
        messages = prompt if isinstance(prompt, str) else [{"role": m.role, "content": m.content} for m in prompt]
        fields = {name: getattr(self, name) for name in ("id", "group", "task", "text", "finish", "answer")}
        return {**fields, "prompt": messages, "metadata": dict(self.metadata)}


Rate = Callable[[Sequence[Item]], Awaitable[Sequence[float]]]


class Rater:
    """Keeps `contracts.environment.Scorer` around `rate`: a finite number for each item.

    Gives any column that ends in `.reward`: a float64 scalar per trajectory. Raises `CapabilityError` for others, and
    `RewardError` naming the trajectory where a number is missing or not finite.
    """

    def __init__(
        self, name: str, rate: Rate, renderer: Renderer, turns: Turns, close: Callable[[], None] | None = None
    ) -> None:
        self._name = name
        self._rate = rate
        self._renderer = renderer
        self._turns = turns
        self._close = close

    async def score(
        self, trajectories: Sequence[Trajectory], want: Sequence[str], tasks: Sequence[Task] = ()
    ) -> Mapping[str, Sequence[Array | Ref]]:
        for column in want:
            if not column.endswith(".reward"):
                raise CapabilityError(
                    f"the scorer {self._name!r} gives a reward, and {column!r} is something else",
                    fix=f"name {self._name}.reward, or choose a scorer that gives {column!r}",
                )
        given: Sequence[Task | None] = tasks or [None] * len(trajectories)
        items = [self._item(t, task) for t, task in zip(trajectories, given, strict=True)]
        rewards = list(await self._rate(items)) if items else []
        if len(rewards) != len(items):
            raise RewardError(
                f"the scorer {self._name!r} gave {len(rewards)} rewards for {len(items)} answers",
                fix="give one number an answer, in their order",
            )
        return {column: self._checked(items, rewards) for column in want}

    def _checked(self, items: Sequence[Item], rewards: Sequence[float]) -> list[Array | Ref]:
        found: list[Array | Ref] = []
        for item, reward in zip(items, rewards, strict=True):
            number = np.float64(reward) if isinstance(reward, int | float | np.number) else np.float64("nan")
            if not np.isfinite(number):
                raise RewardError(
                    f"the scorer {self._name!r} gave {reward!r} as the reward of {item.id!r}",
                    fix="give a finite number",
                )
            found.append(np.asarray(number))
        return found

    def _item(self, trajectory: Trajectory, task: Task | None) -> Item:
        texts = [self._renderer.text(ids) for ids in turns_of(trajectory)]
        fields: dict[str, Any] = {"prompt": self._prompt(trajectory)}
        if task is not None:
            fields = {"prompt": task.prompt, "task": task.id, "answer": task.answer, "metadata": task.metadata}
        return Item(
            id=trajectory.id,
            group=trajectory.id.rsplit("/", 2)[0],
            text="\n".join(texts) if self._turns is Turns.all else (texts or [""])[-1],
            finish=str(trajectory.finish),
            **fields,
        )

    def _prompt(self, trajectory: Trajectory) -> str:
        tokens = np.asarray(trajectory.columns["tokens"])
        asked = tokens[np.asarray(trajectory.columns["origin"]) == Origin.PROMPT]
        return self._renderer.tokenizer.decode(asked.tolist())

    async def close(self) -> None:
        if self._close is not None:
            self._close()


def turns_of(trajectory: Trajectory) -> list[list[int]]:
    """The token ids of each run of tokens that the policy sampled, in order."""
    tokens = np.asarray(trajectory.columns["tokens"])
    sampled = np.asarray(trajectory.columns["origin"]) == Origin.SAMPLED
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sampled, [False]]).astype(np.int8)))
    return [tokens[start:end].tolist() for i, (start, end) in enumerate(pairwise(edges)) if i % 2 == 0]


def groups_of(items: Sequence[Item]) -> dict[str, list[int]]:
    """Positions of the items of each group, in order of first appearance."""
    found: dict[str, list[int]] = {}
    for index, item in enumerate(items):
        found.setdefault(item.group, []).append(index)
    return found
