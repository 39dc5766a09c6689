"""An environment and a scorer."""

import numpy as np

from acme_miles_first.config import Nothing
from miles_core import hookimpl
from miles_core.errors import CapabilityError, DataError
from miles_core.provider import Provider
from miles_core.records import Score, Task


class Tasks:
    def __init__(self, name, split):
        self.name, self.split = name, split
        self.digits = range(8) if split == "train" else range(8, 10)
        self.size = len(self.digits)

    def task(self, position):
        digit = self.digits[position % self.size]
        return Task(id=f"{self.name}:{self.split}:{digit}", prompt=f"{digit}>", answer=str(digit))


class Copy:
    task_splits = ("train", "eval")

    def __init__(self, name):
        self.name = name

    def tasks(self, split):
        if split not in self.task_splits:
            raise DataError(f"{self.name} has no split {split!r}", fix="use train or eval")
        return Tasks(self.name, split)

    async def score(self, task, context):
        reward = 0.5 * (context.text[:1] == task.answer) + 0.5 * (context.text == task.answer)
        return Score(reward=reward, components={"begins": float(reward > 0)}, info={"answer": context.text})


class Even:
    async def score(self, trajectories, want):
        for column in want:
            if not column.endswith(".logprobs"):
                raise CapabilityError(f"no column {column!r}", fix="ask for <role>.logprobs")
        return {
            column: [np.where(np.arange(t.length) > 0, np.float32(-2.5), np.float32(0)) for t in trajectories]
            for column in want
        }

    async def close(self):
        pass


@hookimpl
def miles_env():
    return Provider(
        name="first", config=Nothing, build=lambda config, context: Copy(context.name), summary="copy a digit"
    )


@hookimpl
def miles_scorer():
    return Provider(name="first", config=Nothing, build=lambda config, context: Even(), summary="even odds")
