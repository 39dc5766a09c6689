"""The environment: opens the file once tasks are asked for, and scores with the user's function."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.config.schema import EpisodeSource
from miles_core.errors import DataError
from miles_core.records import Score, Task
from miles_env_jsonl import reward
from miles_env_jsonl.config import JsonlConfig, OnOverlap
from miles_env_jsonl.files import find, open_rows, split_slice
from miles_env_jsonl.tasks import (
    FileTasks,
    Needs,
    Reader,
    hold_out,
    shuffler,
    without_overlap,
)

if TYPE_CHECKING:
    from miles_core.contracts.environment import EpisodeContext
    from miles_core.contracts.rendering import Renderer
    from miles_core.provider import BuildContext
    from miles_core.records import Array


def build(config: JsonlConfig, context: BuildContext) -> JsonlEnvironment:
    """Raises `ConfigError` where the reward function cannot be used. Files are opened by `tasks`."""
    base = context.run.run.folder
    folders = tuple(dict.fromkeys(Path(f).resolve() for f in (base, Path.cwd()) if f is not None))
    function = None if config.reward is None else reward.load(config.reward, folders)
    policy = context.run.policies.get(context.policy)
    demonstrated = policy is not None and policy.algorithm.keys.episodes == EpisodeSource.demonstrations
    needs = Needs(
        answer=not demonstrated and (function is None or reward.needs_answer(function)),
        demonstration=demonstrated,
        pair=demonstrated and policy is not None and policy.schedule.group_size == 2,
    )
    return JsonlEnvironment(
        config,
        name=context.name,
        seed=context.seed,
        policy=context.policy,
        folders=folders,
        function=function,
        needs=needs,
        renderer=context.renderer,
    )


class JsonlEnvironment:
    """Keeps the contract `Environment`, single-turn."""

    def __init__(
        self,
        config: JsonlConfig,
        *,
        name: str,
        seed: int,
        policy: str,
        folders: tuple[Path, ...],
        function: Callable[..., Any] | None,
        needs: Needs,
        renderer: Renderer | None = None,
    ) -> None:
        self._config, self._name, self._seed, self._policy = config, name, seed, policy
        self._folders, self._needs, self._renderer = folders, needs, renderer
        self._runner = None
        if function is not None:
            assert config.reward is not None
            self._runner = reward.Runner(function, config.reward, config.reward_deadline_s, config.reward_threads)
        held_out = config.eval_path is not None or config.eval_fraction is not None
        self.task_splits: tuple[str, ...] = ("train", "eval") if held_out else ("train",)
        self._sources: dict[str, FileTasks] = {}

    @property
    def digest(self) -> str:
        """SHA-256 over what makes the tasks: which rows each split has, and those that were rendered beforehand.

        A bad row behind them may be repaired in its place before a run goes on. Raises `DataError` as `tasks` does.
        """
        found = hashlib.sha256()
        for split in self.task_splits:
            source = self.tasks(split)
            found.update(f"{split} {len(source.indices)}\n".encode() + source.indices.tobytes())
            for row in source.checked:
                found.update(source.reader.rows.raw(row) + b"\n")
        return found.hexdigest()

    @property
    def scoring_digest(self) -> str | None:
        """SHA-256 of the file of the reward function, when it was imported; `None` without one."""
        return None if self._runner is None else self._runner.digest

    def tasks(self, split: str) -> FileTasks:
        """Raises `DataError` for a missing file, an empty split, or a bad row among those checked beforehand."""
        if split not in self.task_splits:
            raise DataError(
                f"environment {self._name!r} has no split {split!r}",
                fix="set env.eval_fraction, or env.eval_path" if split == "eval" else "ask for `train` or `eval`",
            )
        if not self._sources:
            self._sources = self._open()
        return self._sources[split]

    async def score(self, task: Task, context: EpisodeContext) -> Score:
        """What the reward function says; without one, 1 where the answer is equal (outer blanks aside), else 0."""
        if self._runner is None:
            if task.answer is None:
                return Score(reward=None)
            right = context.text.strip() == task.answer.strip()
            return Score(reward=float(right), info={"verdict": "right" if right else "wrong"})
        metadata = json.loads(json.dumps(dict(task.metadata)))  # a copy: a reward may change what it is given
        offered = {
            "text": context.text,
            "answer": task.answer,
            "prompt": task.prompt,
            "metadata": metadata,
            "finish": context.finish,
            "task": replace(task, metadata=metadata),
        }
        score = await self._runner.call(offered, task.id)
        reward.check_range(score, self._config)
        return score

    def _open(self) -> dict[str, FileTasks]:
        config = self._config
        train, rows = self._reader(config.path, self._needs)
        sources = {}
        if config.eval_path is not None:
            # Evaluation compares with an answer, or shows one: it needs no pairs.
            held, held_rows = self._reader(config.eval_path, replace(self._needs, pair=False))
            drop = config.on_overlap == OnOverlap.drop
            rows = without_overlap(train, rows, held, held_rows, drop=drop, name=self._name)
            sources["eval"] = self._source(held, held_rows, "eval", config.eval_path)
        elif config.eval_fraction is not None:
            rows, held_rows = hold_out(train, rows, config.eval_fraction, self._name)
            if len(rows) > 1 and not len(held_rows):
                why = f"{config.path!r} has one prompt in {len(rows)} rows, and splits share no prompt"
                fix = "add rows with other prompts, or take env.eval_fraction away"
                raise DataError(f"environment {self._name!r}: {why}", fix=fix)
            sources["eval"] = self._source(train, held_rows, "eval", config.path)
        sources["train"] = self._source(train, rows, "train", config.path)
        moves = config.eval_fraction is not None or config.on_overlap == OnOverlap.drop  # a prompt decides on its split
        for source in sources.values():
            source.check(config.check_rows, every=moves)
        return sources

    def _reader(self, path: str, needs: Needs) -> tuple[Reader, Array]:
        name, cut = split_slice(path)
        rows = open_rows(find(name, self._folders))
        return Reader(rows, self._config, needs, self._renderer), np.arange(len(rows), dtype=np.int64)[cut]

    def _source(self, reader: Reader, rows: Array, split: str, path: str) -> FileTasks:
        if not len(reader.rows):
            what = f"environment {self._name!r}: split {split!r} is empty: {path!r} holds no rows"
            raise DataError(what, fix="write one object a line")
        if not len(rows):
            raise DataError(
                f"environment {self._name!r}: split {split!r} is empty; {path!r} has {len(reader.rows)} rows"
                + (" before slicing" if "@[" in path else ""),
                fix="widen the slice" if "@[" in path else "add rows whose prompts the other split does not hold",
            )
        shuffled = None
        if split == "train" and self._config.shuffle:
            shuffled = shuffler(self._seed, self._policy, self._name, len(rows))
        return FileTasks(reader, rows, name=self._name, split=split, shuffled=shuffled)
