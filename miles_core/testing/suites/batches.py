"""Small groups and batches that suites feed to stages, terms, filters and backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from miles_core.columns import CORE_COLUMNS, Batch, ColumnSpec, Level, collate
from miles_core.records import Episode, Finish, Group, Origin, Sampling, Span, Status, Task, Trajectory, Version

Array = np.ndarray[Any, Any]


def trajectory(
    name: str, prompt: Sequence[int], answer: Sequence[int], *, temperature: float = 1.0, **columns: Array
) -> Trajectory:
    """A sampled answer after a prompt; `columns` are added as they are."""
    tokens = np.array([*prompt, *answer], np.int32)
    n, sampled = len(tokens), np.arange(len(tokens)) >= len(prompt)
    version = Version(policy="main", lineage=0, number=0)
    spans = (Span(start=len(prompt), end=n, version=version),) if len(answer) else ()
    given: dict[str, Any] = {
        "tokens": tokens,
        "origin": np.where(sampled, Origin.SAMPLED, Origin.PROMPT).astype(np.uint8),
        "trainable": sampled,
        "behaviour_logprobs": np.where(sampled, -1.0, 0.0).astype(np.float32),
    }
    sampling = Sampling(max_new_tokens=max(len(answer), 1), temperature=temperature)
    return Trajectory(
        id=name,
        length=n,
        columns=given | columns,
        spans=spans,
        finish=Finish.STOP,
        sampling=sampling,
        engine="engine-0",
    )


def group(
    index: int, answers: Sequence[Sequence[int]], rewards: Sequence[float | None], prompt: Sequence[int]
) -> Group:
    """One group: an answer and a reward for each episode."""
    name = f"conformance:train:{index}"
    episodes = []
    for member, (answer, reward) in enumerate(zip(answers, rewards, strict=True)):
        identity = f"{name}#0/{member}"
        episodes.append(
            Episode(
                id=identity,
                member=member,
                trajectories=(trajectory(f"{identity}/0", prompt, answer),),
                reward=reward,
                status=Status.OK,
            )
        )
    task = Task(id=name, prompt="?", answer="!")
    return Group(id=f"{name}#0", policy="main", slot=index, attempt=0, task=task, episodes=tuple(episodes))


def groups(vocab_size: int = 15, seed: int = 0, *, sizes: Sequence[int] = (4, 3, 2, 5)) -> list[Group]:
    """Groups of several sizes with ragged answers and rewards that differ within each group."""
    rng = np.random.default_rng(seed)
    made = []
    for index, size in enumerate(sizes):
        prompt = rng.integers(2, vocab_size, int(rng.integers(1, 5))).tolist()
        answers = [rng.integers(2, vocab_size, int(rng.integers(1, 6))).tolist() for _ in range(size)]
        rewards = [float(r) for r in rng.permutation(size) / size + rng.random()]
        made.append(group(index, answers, rewards, prompt))
    return made


def batch_of(made: Sequence[Group], specs: Mapping[str, ColumnSpec] = CORE_COLUMNS) -> Batch:
    return collate("main", 3, list(made), specs)


def with_column(batch: Batch, name: str, values: Array, level: Level = Level.UNIT) -> Batch:
    """The batch with one more column; its spec is core's, or made up."""
    spec = CORE_COLUMNS.get(name) or ColumnSpec(name=name, level=level, dtype=str(values.dtype))
    return batch.with_columns({name: values}, [spec])


def spread(batch: Batch, seed: int = 0) -> Array:
    """float32 [units]: something different at each trainable unit, 0 elsewhere."""
    rng = np.random.default_rng(seed)
    return np.where(batch.columns["trainable"], rng.standard_normal(batch.units), 0.0).astype(np.float32)


def by_trajectory(batch: Batch, column: Array) -> dict[str, Array]:
    """Trajectory id -> its rows of a unit column: the same whatever the order of the batch."""
    return {n: column[batch.offsets[i] : batch.offsets[i + 1]] for i, n in enumerate(batch.trajectory_ids)}


def by_episode(batch: Batch, column: Array) -> dict[str, Any]:
    return dict(zip(batch.episode_ids, column, strict=True))
