"""What every environment and every scorer promises."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from miles_core.contracts.environment import EpisodeContext, MultiTurn, Turn
from miles_core.errors import CapabilityError, MilesError
from miles_core.provider import Place
from miles_core.records import Message, Ref, Sampling, Score, Task
from miles_core.testing.suite import Conformance, check, refuses, refuses_async
from miles_core.testing.suites import batches

LOOK = 200  # positions that are looked at


class ScriptedSession:
    """A session that always answers `text`; counts turns and keeps what it was told."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.told: list[Any] = []

    async def sample(self, new: Any = (), *, parent: int | None = None, **sampling: Any) -> Turn:
        self.told.append(new)
        message = Message(role="assistant", content=self.text)
        return Turn(node=len(self.told) - 1, text=self.text, message=message, finish="stop", tokens=len(self.text))


class EnvironmentConformance(Conformance):
    """Override `renderer`, and `wrong` where an environment pays for what it returns."""

    kind = "env"
    places: ClassVar[tuple[Place, ...]] = (Place.CONTROLLER, Place.SAMPLER)
    wrong = "\x00certainly no answer"  # a text that must earn less than the task's answer

    def renderer(self) -> Any:
        from miles_core.testing.toys.rendering import ToyRenderer, ToyTokenizer

        return ToyRenderer(ToyTokenizer("".join(map(chr, range(32, 127))) + "\n"))

    def example(self, place: Place) -> Any:
        return self.build(place, renderer=self.renderer(), name="conformance")

    def env(self) -> Any:
        return self.example(Place.CONTROLLER)

    def episode_context(self, text: str = "") -> EpisodeContext:
        return EpisodeContext(
            renderer=self.renderer(),
            sampling=Sampling(max_new_tokens=64),
            rng=np.random.default_rng(5),
            split="train",
            deadline_s=30.0,
            text=text,
            finish="stop",
        )

    async def score(self, env: Any, task: Task, text: str) -> Score:
        if isinstance(env, MultiTurn):
            found: Any = await env.episode(task, ScriptedSession(text), self.episode_context())
        else:
            found = await env.score(task, self.episode_context(text))
        check("a score is a Score", isinstance(found, Score), repr(found))
        assert isinstance(found, Score)
        return found

    def look(self, env: Any, split: str) -> list[Task]:
        source = env.tasks(split)
        n = LOOK if source.size is None else min(source.size, LOOK)
        return [source.task(i) for i in range(n)]

    # --- tasks -------------------------------------------------------------------------------------------------------

    def test_splits(self) -> None:
        env = self.env()
        check("there is a split named train", "train" in env.task_splits, env.task_splits)
        refuses("an unknown split is refused", MilesError, lambda: env.tasks("conformance-nonsense"))
        seen: dict[str, str] = {}
        prompts: dict[Any, str] = {}
        for split in env.task_splits:
            tasks = self.look(env, split)
            check("a split has tasks", tasks, split)
            for task in tasks:
                self._task(task, split)
                check("splits share no id", seen.setdefault(task.id, split) == split, task.id)
                same = prompts.setdefault((task.prompt, task.answer), split) == split
                check("splits share no task", same, (task.prompt, split))

    def _task(self, task: Task, split: str) -> None:
        check("a task is a Task", isinstance(task, Task), repr(task))
        start = f"conformance:{split}:"
        check("ids are <env>:<split>:<index>", task.id.startswith(start) and task.id != start, task.id)
        texts = isinstance(task.prompt, str) or (
            isinstance(task.prompt, tuple) and task.prompt and all(isinstance(m, Message) for m in task.prompt)
        )
        check("a prompt is a string or messages", texts, repr(task.prompt))
        good = all(isinstance(d, str) or all(isinstance(m, Message) for m in d) for d in task.demonstrations)
        check("demonstrations are strings or messages", good and isinstance(task.demonstrations, tuple), task)
        try:
            json.dumps(dict(task.metadata), allow_nan=False)
        except (TypeError, ValueError) as error:
            check("metadata is JSON", False, repr(error))

    def test_positions(self) -> None:
        env, other = self.env(), self.env()
        for split in env.task_splits:
            source, again = env.tasks(split), other.tasks(split)
            n = LOOK if source.size is None else source.size
            check("size is None or above 0", source.size is None or source.size > 0, source.size)
            straight = [source.task(i) for i in range(min(n, LOOK))]
            backwards = [again.task(i) for i in reversed(range(min(n, LOOK)))]
            same = straight == list(reversed(backwards))
            check("a position gives the same task, whatever was asked before", same, split)
            if source.size is not None and source.size <= LOOK:
                ids = sorted(t.id for t in straight)
                check("an epoch hands out every item once", len(set(ids)) == len(ids) == source.size, ids)
                beyond = sorted(again.task(source.size + i).id for i in range(source.size))
                check("positions beyond the size wrap round", beyond == ids, (beyond[:5], ids[:5]))
            by_id: dict[str, Task] = {}
            for position in (*range(min(n, 50)), *range(n, n + 50)):
                task = source.task(position)
                check("one id is one task", by_id.setdefault(task.id, task) == task, task.id)

    # --- scores ------------------------------------------------------------------------------------------------------

    def test_scores(self) -> None:
        async def scores() -> None:
            env = self.env()
            for task in self.look(env, "train")[:20]:
                good = None if task.answer is None else await self.score(env, task, task.answer)
                bad = await self.score(env, task, self.wrong)
                for found in (good, bad):
                    if found is not None:
                        self._score(found)
                again = await self.score(env, task, self.wrong)
                check("the same answer scores the same", again.reward == bad.reward, (again, bad))
                if good is not None and good.reward is not None and bad.reward is not None:
                    check("the right answer earns more than a wrong one", good.reward > bad.reward, (task, good, bad))
                empty = await self.score(env, task, "")
                self._score(empty)

        self.run(scores())

    def _score(self, found: Score) -> None:
        number = found.reward is None or (isinstance(found.reward, int | float | np.floating))
        check("a reward is a number or None", number, repr(found.reward))
        finite = found.reward is None or math.isfinite(found.reward)
        check("a reward is finite", finite, found.reward)
        parts = [v for v in found.components.values() if not (isinstance(v, int | float) and math.isfinite(v))]
        check("components are finite numbers", not parts, found.components)
        odd = {k: v for k, v in found.info.items() if not (isinstance(k, str) and isinstance(v, str))}
        check("info is text", not odd, odd)


class ScorerConformance(Conformance):
    """Override `want` with columns that your scorer gives, and `context` with what it needs."""

    kind = "scorer"
    places: ClassVar[tuple[Place, ...]] = (Place.CONTROLLER, Place.SAMPLER)
    want: ClassVar[tuple[str, ...]] = ("teacher.logprobs",)
    per_unit: ClassVar[tuple[str, ...]] = ("teacher.logprobs",)

    def example(self, place: Place) -> Any:
        return self.build(place)

    def trajectories(self) -> Sequence[Any]:
        made = batches.groups()
        return [t for g in made for e in g.episodes for t in e.trajectories]

    def test_scores(self) -> None:
        async def scores() -> None:
            scorer = self.example(Place.SAMPLER)
            rows = self.trajectories()
            before = [{k: np.array(v) for k, v in t.columns.items()} for t in rows]
            found = await scorer.score(rows, list(self.want))
            check("every wanted column comes back, and no other", set(found) == set(self.want), sorted(found))
            for name, values in found.items():
                check("a column has one entry per trajectory", len(values) == len(rows), (name, len(values)))
                for row, value in zip(rows, values, strict=True):
                    if name in self.per_unit and not isinstance(value, Ref):
                        shape = np.asarray(value).shape[:1]
                        check("unit columns have one row per unit", shape == (row.length,), (row.id, shape))
                    if not isinstance(value, Ref):
                        check("scores are finite", np.isfinite(np.asarray(value)).all(), (row.id, value))
            backwards = await scorer.score(list(reversed(rows)), list(self.want))
            pairs = [
                (np.asarray(a), np.asarray(b))
                for name in self.want
                for a, b in zip(found[name], reversed(list(backwards[name])), strict=True)
            ]
            close = all(np.allclose(a, b, atol=1e-5) for a, b in pairs)
            check("scores do not depend on the order of trajectories", close, pairs[0])
            same = all(
                np.array_equal(np.asarray(t.columns[k]), v)
                for t, b in zip(rows, before, strict=True)
                for k, v in b.items()
            )
            check("a scorer changes nothing that it is given", same)
            none = await scorer.score([], list(self.want))
            check(
                "no trajectories give empty columns",
                {k: len(v) for k, v in none.items()} == dict.fromkeys(self.want, 0),
                none,
            )
            odd = scorer.score(rows[:1], ["conformance.nonsense"])
            await refuses_async("a column that it does not have is refused with CapabilityError", CapabilityError, odd)
            await scorer.close()

        self.run(scores())
