"""The records that travel through a run: tasks, trajectories, episodes, groups, versions.

All are frozen. They hold NumPy arrays, never tensors. Identifiers: task `<env>:<split>:<index>`, group
`<task>#<attempt>`, episode `<group>/<member>`, trajectory `<episode>/<leaf>`. `columns.py` says what a column is and
turns groups into a batch; `validate()` there runs at the borders of the system only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
else:
    Array = Any  # importable without NumPy

#: (numerator, denominator): metrics are added up before they are divided.
Metric = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Version:
    """Published weights. `number` is the count of steps consumed; `lineage` grows by one at every resume."""

    policy: str
    lineage: int
    number: int

    def __str__(self) -> str:
        return f"{self.policy}@{self.lineage}.{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The version that sampled tokens `start` to `end` (half-open, within one trajectory or completion)."""

    start: int
    end: int
    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message. `role` is `system`, `user`, `assistant` or `tool`."""

    role: str
    content: str


Prompt = str | tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt with its metadata: what an environment hands out.

    `demonstrations` are reference answers for presets that do not sample; a demonstration is a string (the answer) or
    messages that continue the prompt. `metadata` is JSON.
    """

    id: str
    prompt: Prompt
    answer: str | None = None
    demonstrations: tuple[Prompt, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Finish(StrEnum):
    """Why an engine stopped. Said by the engine, never guessed from token ids."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Origin:
    """Values of the column `origin` (uint8): where a token came from."""

    PROMPT = 0
    SAMPLED = 1
    ENVIRONMENT = 2
    DEMONSTRATION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters. Those that shape the distribution are trajectory columns too and are applied in training.

    `temperature` 0 means greedy and is allowed in evaluation only; `top_k` 0 and `top_p` 1 mean the whole vocabulary.
    Logits are divided by `temperature`, then cut by `top_k`, then by `top_p` (smallest set with mass >= p), then
    renormalised (`numerics.md`).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise TypeError(f"stop={self.stop!r} would stop at each of its characters; give a tuple of strings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """A large column that lives elsewhere: ranks resolve it, the controller never sees its bytes."""

    key: str
    nbytes: int
    digest: str
    durable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sequence of an episode: columns along tokens (`axis="token"`) or denoising steps (`axis="step"`).

    `columns` maps a column's name to an array whose first dimension is `length` for unit columns, or to a `Ref`.
    Always present on the token axis: `tokens` int32, `origin` uint8, `trainable` bool; and where sampled,
    `behaviour_logprobs` float32 (0 where not sampled). `spans` cover exactly what was sampled.
    """

    id: str
    length: int
    columns: Mapping[str, Array | Ref]
    spans: tuple[Span, ...] = ()
    finish: Finish = Finish.STOP
    sampling: Sampling | None = None
    engine: str = ""
    axis: str = "token"


class Rows(Mapping[str, Array]):
    """Columns of one trajectory: rows `start` to `stop` of columns that its whole group shares, cut when asked for."""

    __slots__ = ("shared", "start", "stop")

    def __init__(self, shared: Mapping[str, Array], start: int, stop: int) -> None:
        self.shared, self.start, self.stop = shared, start, stop

    def __getitem__(self, name: str) -> Array:
        return self.shared[name][self.start : self.stop]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shared)

    def __len__(self) -> int:
        return len(self.shared)


def shared_columns(trajectories: Sequence[Trajectory]) -> Mapping[str, Array] | None:
    """The columns of which these trajectories are all rows, end to end; `None` where each has its own."""
    at, shared = 0, None
    for trajectory in trajectories:
        rows = trajectory.columns
        if type(rows) is not Rows or rows.start != at or (shared is not None and rows.shared is not shared):
            return None
        at, shared = rows.stop, rows.shared
    return shared if shared is not None and all(len(column) == at for column in shared.values()) else None


class Status(StrEnum):
    """How an episode ended."""

    OK = "ok"
    TRUNCATED = "truncated"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One run of an environment on a task, and the only home of the reward.

    `reward` is `None` where nothing is rewarded. `components` are named parts of it; `info` is short readable text
    (extracted answer, verdict, why) for `miles show`. A failed episode has no trajectories to train on and says why.
    """

    id: str
    member: int
    trajectories: tuple[Trajectory, ...]
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, str] = field(default_factory=dict)
    status: Status = Status.OK
    error: str = ""
    preference: int = 0  # +1 chosen, -1 rejected, 0 where there is no preference


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The episodes sampled for one task: the unit of advantage normalisation, buffering and leasing."""

    id: str
    policy: str
    slot: int
    attempt: int
    task: Task
    episodes: tuple[Episode, ...]


def group_id(task_id: str, attempt: int) -> str:
    return f"{task_id}#{attempt}"


def episode_id(group: str, member: int) -> str:
    return f"{group}/{member}"


def trajectory_id(episode: str, leaf: int) -> str:
    return f"{episode}/{leaf}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What an environment says of one episode. A reward of `None` means not rewarded."""

    reward: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, str] = field(default_factory=dict)


def spans_of(numbers: Sequence[Version], start: int = 0) -> tuple[Span, ...]:
    """Run-length encode one version per sampled token, the first token standing at `start`."""
    spans = []
    for version, run in groupby(numbers):
        end = start + len(list(run))
        spans.append(Span(start=start, end=end, version=version))
        start = end
    return tuple(spans)
