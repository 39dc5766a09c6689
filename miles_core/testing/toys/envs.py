"""Toy environments: echo the last digit of a prompt of two digits (`73>` is answered by `3`).

`toy` scores one turn; `toy-multiturn` asks again (`+`) for `turns` turns, and may branch its last turn.
Reward 0.5 for the right first character and 0.5 more for nothing else after it, so that chance already finds some.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.contracts.environment import EpisodeContext, Session
from miles_core.errors import DataError
from miles_core.records import Message, Score, Task
from miles_core.seeds import derive, generator
from miles_core.testing.toys.config import EnvConfig, Fault
from miles_core.testing.toys.table import uniform

if TYPE_CHECKING:
    from miles_core.records import Prompt

EVAL_EVERY = 5  # about every fifth item belongs to `eval`


class EchoTasks:
    """Items of one split, shuffled anew each epoch."""

    def __init__(self, name: str, split: str, items: list[int], seed: int) -> None:
        self._name = name
        self._split = split
        self._items = items
        self._seed = seed
        self._orders: dict[int, Any] = {}
        self.size: int | None = len(items)

    def task(self, position: int) -> Task:
        if position < 0:
            raise DataError(f"task position {position} is negative", fix="count positions from 0")
        epoch, at = divmod(position, len(self._items))
        if epoch not in self._orders:
            rng = generator(self._seed, self._name, "order", self._split, epoch)
            self._orders = {epoch: rng.permutation(len(self._items))}
        index = int(self._orders[epoch][at])
        item = self._items[index]
        first, last = str(item // 10 % 10), str(item % 10)
        wrong = str((item + 1) % 10)
        return Task(
            id=f"{self._name}:{self._split}:{index}",
            prompt=f"{first}{last}>",
            answer=last,
            demonstrations=(last, wrong),
            metadata={"item": item},
        )


class EchoEnvironment:
    """Single turn."""

    task_splits: tuple[str, ...] = ("train", "eval")

    def __init__(self, name: str, config: EnvConfig) -> None:
        self._name = name
        self._config = config
        self.instant = config.delay_s == 0 and not config.scorer

    def tasks(self, split: str) -> EchoTasks:
        if split not in self.task_splits:
            raise DataError(
                f"environment {self._name!r} has no split {split!r}; it has {list(self.task_splits)}",
                fix="name one of its splits",
            )
        # Shifted by one each ten, so that every last digit stands in both splits.
        chosen = [i for i in range(self._config.tasks) if ((i + i // 10) % EVAL_EVERY == 4) == (split == "eval")]
        return EchoTasks(self._name, split, chosen, self._config.seed)

    async def score(self, task: Task, context: EpisodeContext) -> Score:
        await self._wait(task)
        reward = echo_reward(context.text, task.answer or "")
        score = self._faulty(task, reward, {"answer": context.text, "verdict": "right" if reward == 1.0 else "wrong"})
        if not self._config.scorer:
            return score
        scorer = context.scorers[self._config.scorer]
        lengths = (await scorer.score(context.trajectories, ["toy.length"]))["toy.length"]
        return replace(
            score, components={**score.components, "length": float(np.mean([np.asarray(n) for n in lengths]))}
        )

    async def _wait(self, task: Task) -> None:
        if self._config.delay_s > 0:
            u = float(uniform(np.array([derive(self._config.seed, self._name, "delay", task.id)]), np.array([0]))[0])
            await asyncio.sleep(self._config.delay_s * u**4)

    def _faulty(self, task: Task, reward: float, info: dict[str, str]) -> Score:
        fault = self._config.fault
        if fault != Fault.none and task.metadata["item"] % self._config.fault_every == 0:
            if fault == Fault.error:
                raise RuntimeError(f"injected failure on {task.id}")
            broken: Any = float("nan") if fault == Fault.nan else "one"
            return Score(reward=broken)
        return Score(reward=reward, components={"first": min(reward, 0.5)}, info=info)


class MultiTurnEchoEnvironment(EchoEnvironment):
    """Several turns; the reward is the mean over turns and leaves."""

    async def episode(self, task: Task, session: Session, context: EpisodeContext) -> Score:
        answer = task.answer or ""
        new: Prompt | tuple[Message, ...] = task.prompt
        parent: int | None = None
        rewards: list[float] = []
        texts: list[str] = []
        for turn in range(self._config.turns):
            leaves = self._config.branches if turn == self._config.turns - 1 else 1
            said = [await session.sample(new, parent=parent) for _ in range(leaves)]
            rewards.append(sum(echo_reward(s.text, answer) for s in said) / leaves)
            texts += [s.text for s in said]
            if any(s.finish != "stop" for s in said):
                break  # a turn that was cut off cannot be extended; the turns that it costs earn nothing
            parent = said[0].node
            new = (Message(role="user", content=f"+{answer}>"),)
        await self._wait(task)
        return self._faulty(task, sum(rewards) / self._config.turns, {"answer": " ".join(texts)})


def echo_reward(text: str, answer: str) -> float:
    return 0.5 * (text[:1] == answer) + 0.5 * (text == answer)
