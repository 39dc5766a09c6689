"""Environment `parity`: `73>` is answered by `1`, because 3 is odd; `48>` by `0`."""

from dataclasses import dataclass

from miles_core import hookimpl
from miles_core.config.schema import opt
from miles_core.errors import DataError
from miles_core.provider import Provider
from miles_core.records import Score, Task
from miles_core.seeds import generator


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    seed: int = opt(0, "order of the tasks", low=0)


class Tasks:
    """All numbers of two digits; every fifth is for evaluation."""

    def __init__(self, name, split, seed):
        self.name, self.split, self.seed = name, split, seed
        self.items = [i for i in range(100) if ((i + i // 10) % 5 == 4) == (split == "eval")]
        self.size = len(self.items)

    def task(self, position):
        epoch, at = divmod(position, self.size)
        order = generator(self.seed, self.name, self.split, epoch).permutation(self.size)
        item = self.items[order[at]]
        return Task(id=f"{self.name}:{self.split}:{item}", prompt=f"{item:02d}>", answer=str(item % 2))


class Parity:
    task_splits = ("train", "eval")

    def __init__(self, name, config):
        self.name, self.config = name, config

    def tasks(self, split):
        if split not in self.task_splits:
            raise DataError(f"{self.name} has no split {split!r}", fix="use train or eval")
        return Tasks(self.name, split, self.config.seed)

    async def score(self, task, context):
        right = context.text == task.answer
        return Score(
            reward=0.5 * (context.text[:1] == task.answer) + 0.5 * right,
            info={"answer": context.text, "verdict": "right" if right else "wrong"},
        )


@hookimpl
def miles_env():
    return Provider(
        name="parity",
        config=ParityConfig,
        build=lambda config, context: Parity(context.name, config),
        summary="is the last digit odd?",
    )
