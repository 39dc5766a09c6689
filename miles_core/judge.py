"""A role that an engine holds: the role's own model, read from its folder, says what it thinks of the actor's tokens.

The engine serves nobody else: no version is published to it and no gate guards it. Log-probabilities are those of
prompts, at temperature 1 over the whole vocabulary; `config/rules.py` refuses runs that sample otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from miles_core.contracts.engine import Engine, Request
from miles_core.contracts.model import ModelSource
from miles_core.errors import EngineError, ModelSourceError
from miles_core.records import Array, Ref, Sampling, Task, Trajectory, Version

#: What a role's output is called in an engine's answer.
COLUMNS = {"logprobs": "prompt_logprobs", "topk_ids": "prompt_topk_ids", "topk_logprobs": "prompt_topk_logprobs"}


class Judge:
    """Keeps `contracts.environment.Scorer`. `k`: how many of the most likely tokens are asked for."""

    def __init__(self, engine: Engine, role: str, source: ModelSource, version: Version, deadline_s: float) -> None:
        if source.folder is None:
            raise ModelSourceError(
                f"role {role!r} is held by engine {engine.name!r}, and its model has no folder to be read from",
                fix=f"give roles.{role}.source a folder, a run, or what a resolver turns into a folder",
            )
        self._engine, self._folder, self._version, self._deadline_s = engine, source.folder, version, deadline_s
        self.role, self.k = role, 0

    async def start(self) -> None:
        await self._engine.start()
        port: Any = self._engine.port("checkpoint")
        await port.begin(self._version)
        await port.load(str(self._folder), ())
        await port.end(self._version)

    async def score(
        self, trajectories: Sequence[Trajectory], want: Sequence[str], tasks: Sequence[Task] = ()
    ) -> Mapping[str, Sequence[Array | Ref]]:
        wanted = {"prompt_logprobs"} | ({f"prompt_top_logprobs:{self.k}"} if self.k else set())
        requests = [
            Request(
                id=f"{self._version.policy}:{trajectory.id}",
                policy=self._version.policy,
                prompt={"tokens": trajectory.columns["tokens"]},
                sampling=Sampling(max_new_tokens=0),
                seed=0,
                want=frozenset(wanted),
                deadline_s=self._deadline_s,
            )
            for trajectory in trajectories
        ]
        answers = await asyncio.gather(*map(self._engine.generate, requests))
        found: dict[str, list[Array | Ref]] = {}
        for name in want:
            column = COLUMNS.get(name.rpartition(".")[2], "")
            lacking = next((answer.request for answer in answers if column not in answer.columns), None)
            if lacking is not None:
                raise EngineError(
                    f"engine {self._engine.name!r} gave no {column or name!r} for {lacking!r}",
                    fix="ask an engine for logprobs, topk_ids and topk_logprobs only",
                )
            found[name] = [np.asarray(answer.columns[column]) for answer in answers]
        return found

    async def close(self) -> None:
        """The engine is closed with the run's other parts."""
