"""Tasks of one policy by position, over several environments by weight.

Which environment a position belongs to, and which of its tasks, is a pure function of the position: environments are
interleaved so that after any number of positions each has had its share, within one task. Attempt counts how often the
same item was handed out before, so that (task, attempt) differs for every position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from miles_core.errors import DataError, LateDataError, blamed

if TYPE_CHECKING:
    from miles_core.contracts.environment import TaskSource
    from miles_core.records import Task


class TaskFeed:
    """`train` and `eval` map an environment's instance name to its source; `weights` are relative and positive."""

    def __init__(
        self,
        train: Mapping[str, TaskSource],
        evaluation: Mapping[str, TaskSource],
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._train = dict(train)
        self._eval = dict(evaluation)
        given = {name: (weights or {}).get(name, 1.0) for name in self._train}
        total = sum(given.values())
        self._share = {name: weight / total for name, weight in given.items() if weight > 0}
        self._counts = dict.fromkeys(self._share, 0)
        self._order: list[tuple[str, int]] = []  # position -> (environment, position within it)

    def task(self, position: int) -> tuple[str, Task, int]:
        """(environment, task, attempt) of a position of the training split."""
        self._extend(position)
        env, inner = self._order[position]
        source = self._train[env]
        try:
            with blamed(f"environment {env!r}, task {inner}", LateDataError, "mend what the environment reads"):
                task = source.task(inner)
        except DataError as error:
            raise LateDataError(error.message, fix=error.fix) from error
        if not task.id:
            raise LateDataError(f"environment {env!r} gave task {inner} no id", fix="give every task an id")
        return env, task, inner // source.size if source.size else 0

    def evaluation(self, count: int) -> Sequence[tuple[str, Task]]:
        """The first `count` tasks of the eval splits, in turn over environments; no task twice."""
        found: list[tuple[str, Task]] = []
        index = 0
        sizes = {name: count if source.size is None else source.size for name, source in self._eval.items()}
        while len(found) < count and any(index < size for size in sizes.values()):
            for name, source in self._eval.items():
                if index < sizes[name] and len(found) < count:
                    found.append((name, source.task(index)))
            index += 1
        return found

    def _extend(self, position: int) -> None:
        """Give each next position to the environment that is furthest behind its share (the first of them)."""
        while len(self._order) <= position:
            n = len(self._order) + 1
            env = max(self._share, key=lambda name: self._share[name] * n - self._counts[name])
            self._order.append((env, self._counts[env]))
            self._counts[env] += 1
