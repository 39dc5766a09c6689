"""The scorer `http-teacher`: what teachers behind HTTP say of sampled tokens.

Columns: `<role>.logprobs`, `<role>.topk_ids`, `<role>.topk_logprobs`; 0 where a token is not trainable. One request a
trajectory, several at a time, each with a deadline and a bounded number of attempts. An answer that is not about the
tokens that were sent, or not finite, is an error that names teacher and trajectory, never a number to train on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from miles_algo_opd.dialects import DIALECTS, Asked, Row, Unusable
from miles_algo_opd.http_json import Failed, post
from miles_core.errors import CapabilityError, CombinationError, EngineError, LearnerError

if TYPE_CHECKING:
    from miles_algo_opd.config import HttpTeacherConfig
    from miles_core.contracts.rendering import Tokenizer
    from miles_core.provider import BuildContext
    from miles_core.records import Array, Ref, Task, Trajectory

COLUMNS = ("logprobs", "topk_ids", "topk_logprobs")
#: Ids whose texts are compared, spread over the vocabulary.
PROBES = 256


def http_teacher(config: HttpTeacherConfig, context: BuildContext) -> HttpTeacher:
    """Built where the run's sampling fits a teacher behind HTTP. Raises `CombinationError` where it does not."""
    where = f"the scorer {context.name!r} (http-teacher)"
    for part in context.run.engines.values():
        keys = part.core
        if keys.temperature != 1 and not config.echoes_temperature:
            raise CombinationError(
                f"{part.at}.temperature is {keys.temperature:g}, and {where} scores prompts at temperature 1",
                fix=f"write {part.at}.temperature: 1.0, or scorers.{context.name}.echoes_temperature: true for a "
                "service that applies `logprob_temperature` and repeats it in its answer",
            )
        if keys.top_p < 1 or keys.top_k is not None:
            raise CombinationError(
                f"{part.at} samples with top_p {keys.top_p:g} and top_k {keys.top_k}, and {where} scores over the "
                "whole vocabulary",
                fix=f"write {part.at}.top_p: 1.0 and {part.at}.top_k: null, or make the teacher a model of the backend",
            )
    tokenizer = getattr(context.renderer, "tokenizer", None)
    if config.vocabulary == "check" and tokenizer is None:
        raise CombinationError(
            f"{where} would compare vocabularies, and a run with several policies has no tokenizer of its own",
            fix=f"write scorers.{context.name}.vocabulary: same, if teacher and student have the same one",
        )
    return HttpTeacher(context.name, config, tokenizer, config.k or _k_of(context))


def _k_of(context: BuildContext) -> int:
    """The k of the run's topk_kl; 0 where it has none."""
    parts = [policy.algorithm.one("distill") for policy in context.run.policies.values()]
    return max((getattr(part.options, "k", 0) for part in parts if part is not None), default=0)


class HttpTeacher:
    """See `miles_core.contracts.environment.Scorer`."""

    def __init__(self, name: str, config: HttpTeacherConfig, tokenizer: Tokenizer | None, k: int) -> None:
        self._name = name
        self._config = config
        self._k = k
        self._tokenizer = tokenizer
        self._dialect = DIALECTS[config.style.value]()
        self._teachers = config.addresses()
        self._slots = {name: asyncio.Semaphore(config.concurrency) for name in self._teachers}
        self._checked: dict[str, asyncio.Lock] = {name: asyncio.Lock() for name in self._teachers}
        self._same: set[str] = set() if config.vocabulary == "check" else set(self._teachers)

    async def score(
        self, trajectories: Sequence[Trajectory], want: Sequence[str], tasks: Sequence[Task] = ()
    ) -> Mapping[str, Sequence[Array | Ref]]:
        """Columns [length] or [length, k]: log-probabilities float32, ids int32.

        Raises `CapabilityError` for other columns, `EngineError` where a teacher cannot be reached or understood,
        `LearnerError` where its numbers are not finite.
        """
        kinds = {name: name.rpartition(".")[2] for name in want}
        odd = sorted(name for name, kind in kinds.items() if kind not in COLUMNS)
        if odd:
            raise CapabilityError(
                f"http-teacher has no column {odd[0]!r}; it has " + ", ".join(f"<role>.{c}" for c in COLUMNS),
                fix="choose parts that need only these (opd, or topk_kl with support: teacher)",
            )
        k = self._k if any(kind.startswith("topk") for kind in kinds.values()) else 0
        if not k and any(kind.startswith("topk") for kind in kinds.values()):
            raise CapabilityError(
                f"{want} was asked of {self._name!r}, which was not told how many tokens that is",
                fix=f"write scorers.{self._name}.k",
            )
        teachers = [self._route(t, tasks[i] if tasks else None) for i, t in enumerate(trajectories)]
        try:
            async with asyncio.TaskGroup() as group:
                waiting = [
                    group.create_task(self._one(teacher, t, k))
                    for teacher, t in zip(teachers, trajectories, strict=True)
                ]
        except BaseExceptionGroup as several:  # the others were cancelled
            raise several.exceptions[0] from several
        scored = [task.result() for task in waiting]
        return {name: [columns[kind] for columns in scored] for name, kind in kinds.items()}

    async def close(self) -> None:
        """Nothing stays open between requests."""

    def _route(self, trajectory: Trajectory, task: Task | None) -> str:
        if len(self._teachers) == 1 and self._config.url:
            return next(iter(self._teachers))
        key, found = self._config.route, None
        if task is not None:
            found = task.metadata.get(key) if key is not None else task.id.partition(":")[0]
        if isinstance(found, str) and found in self._teachers:
            return found
        if self._config.default is not None:
            return self._config.default
        what = f"metadata {key!r}" if key is not None else "environment"
        raise LearnerError(
            f"no teacher for trajectory {trajectory.id!r}: its {what} is {found!r}; teachers: {sorted(self._teachers)}",
            fix=f"add it to scorers.{self._name}.teachers, or name a default",
        )

    async def _one(self, teacher: str, trajectory: Trajectory, k: int) -> dict[str, Array]:
        n = trajectory.length
        trainable = np.asarray(trajectory.columns["trainable"])[:, None].copy()
        trainable[:1] = False
        logprobs, ids, top = np.zeros((n, 1)), np.zeros((n, k), np.int32), np.zeros((n, k))
        if trainable.any():
            async with self._slots[teacher]:
                await self._same_vocabulary(teacher)
                rows = await self._ask(teacher, self._asked(trajectory, k), f"trajectory {trajectory.id!r}")
            logprobs[1:, 0] = [row.logprob for row in rows]
            if k:
                ids[1:] = [[i for i, _ in row.top] for row in rows]
                top[1:] = [[p for _, p in row.top] for row in rows]
        logprobs, ids, top = (np.where(trainable, x, 0) for x in (logprobs, ids, top))
        bad = ~np.isfinite(logprobs).all(1) | ~np.isfinite(top).all(1) | (logprobs > 1e-3).any(1) | (top > 1e-3).any(1)
        if bad.any():
            t = int(np.flatnonzero(bad)[0])
            raise LearnerError(
                f"teacher {teacher!r} gives token {t} of trajectory {trajectory.id!r} the log-probability "
                f"{logprobs[t, 0]} (top {top[t].tolist()})",
                fix="check the teacher's weights and number format",
            )
        return {
            "logprobs": logprobs[:, 0].astype(np.float32),
            "topk_ids": ids.astype(np.int32),
            "topk_logprobs": top.astype(np.float32),
        }

    def _asked(self, trajectory: Trajectory, k: int) -> Asked:
        tokens = [int(t) for t in np.asarray(trajectory.columns["tokens"])]
        sampling = trajectory.sampling
        temperature = 1.0 if sampling is None else sampling.temperature
        if sampling is not None and (sampling.top_p < 1 or sampling.top_k > 0):
            raise LearnerError(
                f"trajectory {trajectory.id!r} was sampled with top_p {sampling.top_p:g} and top_k {sampling.top_k}; a "
                "teacher behind HTTP scores over the whole vocabulary",
                fix="sample with top_p 1 and without top_k, or make the teacher a model of the backend",
            )
        if temperature != 1 and not self._config.echoes_temperature:
            raise LearnerError(
                f"trajectory {trajectory.id!r} was sampled at temperature {temperature:g}; a teacher behind HTTP "
                "scores at temperature 1",
                fix="sample at temperature 1, or set echoes_temperature for a service that applies and repeats it",
            )
        return Asked(tokens=tokens, k=k, temperature=temperature)

    async def _ask(self, teacher: str, asked: Asked, what: str) -> list[Row]:
        url = self._teachers[teacher].rstrip("/") + self._dialect.path
        body = self._dialect.request(asked, self._config.model)
        attempts = self._config.retries + 1
        for attempt in range(attempts):
            try:
                return self._dialect.rows(await post(url, body, self._config.deadline_s), asked)
            except Failed as failure:
                if not failure.again or attempt + 1 == attempts:
                    tried = f"{attempt + 1} attempt{'s' if attempt else ''}"
                    raise EngineError(
                        f"teacher {teacher!r} at {url} did not score {what}: {failure} ({tried})",
                        fix="look at the service's log, then go on with --resume",
                    ) from failure
                await asyncio.sleep(self._config.backoff_s * 2**attempt)
            except Unusable as error:
                raise EngineError(
                    f"teacher {teacher!r} at {url} answered {what} with something else: {error}",
                    fix=f"check that the service speaks {self._config.style.value} and serves the right model",
                ) from error
        raise AssertionError("unreachable")

    async def _same_vocabulary(self, teacher: str) -> None:
        """Once: the teacher's texts of ids from all over the vocabulary are ours."""
        async with self._checked[teacher]:
            if teacher in self._same or self._tokenizer is None:
                return
            size = self._tokenizer.vocab_size
            ids = sorted({int(i) for i in np.linspace(0, size - 1, min(size, PROBES))})
            sent = [ids[0], *ids]  # nothing is said of the first
            rows = await self._ask(teacher, Asked(tokens=sent, texts=True), f"{len(ids)} ids to compare vocabularies")
            told = [(i, row.text) for i, row in zip(ids, rows, strict=True) if row.text is not None]
            if not told:
                raise EngineError(
                    f"teacher {teacher!r} does not tell the texts of token ids, so vocabularies cannot be compared",
                    fix=f"write scorers.{self._name}.vocabulary: same, if teacher and student have the same one",
                )
            for i, text in told:
                ours = self._tokenizer.decode([i], skip_special=False)
                if not _alike(ours, text):
                    raise CombinationError(
                        f"token {i} is {ours!r} to the student and {text!r} to teacher {teacher!r}: their vocabularies "
                        "differ, and log-probabilities of ids cannot be compared",
                        fix="choose a teacher with the student's tokenizer",
                    )
            self._same.add(teacher)


def _alike(ours: str, theirs: str) -> bool:
    """Services differ in how they show spaces and pieces of a character; such texts say nothing."""
    a, b = (text.replace("▁", " ").replace("Ġ", " ").strip() for text in (ours, theirs))
    return a == b or not a or not b or "�" in a + b
