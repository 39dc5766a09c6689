"""What the loop drives: the Protocols of its collaborators, a policy's setup, and the result of a run.

They stand apart so that the loop itself can be read on its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from miles_core.config.schema import ScheduleConfig
from miles_core.contracts.learning import Filter
from miles_core.ledger import Lease
from miles_core.records import Group, Metric, Sampling, Task, Version

#: What training made of an episode, by the episode's id.
Learnt = Callable[[str], Mapping[str, float]]


class Tasks(Protocol):
    """Tasks of one policy over all its environments (`feed.TaskFeed` is the implementation)."""

    def task(self, position: int) -> tuple[str, Task, int]:
        """(environment, task, attempt) of a position of the training split: a pure function of the position, so that
        (task id, attempt) is different for every position. Raises `LateDataError`."""

    def evaluation(self, count: int) -> Sequence[tuple[str, Task]]:
        """The first `count` tasks of the eval split(s); empty where there is none."""


class Sampler(Protocol):
    """Runs the episodes of a lease (`sampler.Sampler`). One for all policies."""

    async def run(self, lease: Lease, *, group_size: int, sampling: Sampling | None, split: str) -> Group:
        """All episodes of the lease's task, failed ones included with their reason. `sampling` is `None` where the
        group is made of demonstrations. Raises only what must stop the run."""

    async def abort(self, lease_ids: Sequence[str]) -> None:
        """End these leases' requests; their `run` may raise or return, its result is not used."""


class Learner(Protocol):
    """Trains one policy (`learner.Learner`). `changed` says whether the last step changed the actor's weights; a
    learner without that attribute always did. `learnt`, where there is one, is for readable samples."""

    async def step(self, step: int, groups: Sequence[Group]) -> Mapping[str, Metric]:
        """Consume one batch, groups in slot order. Metrics by `side/name`."""


class Publisher(Protocol):
    """Publishes versions to the engines (`publish.Publisher`)."""

    async def publish(self, version: Version, changed: bool = True) -> Mapping[str, Any]:
        """Returns once every remaining engine serves `version`: receipts by engine (empty where there are none)."""


class Checkpoint(Protocol):
    """Writes `checkpoints/step_NNNNNN/{trainer/, ledger.json, COMMIT}`; the caller of `Loop` implements it."""

    async def save(self, step: int, ledger: Mapping[str, Any], *, best: bool) -> Path:
        """Save trainer state and `ledger` (JSON), commit last, and move the `best` pointer where `best`. `step` counts
        rounds consumed. No training step runs meanwhile; sampling may. Raises `CheckpointError`."""


class RolloutSink(Protocol):
    """Keeps readable samples of a step (`rollouts/`)."""

    def write(self, policy: str, step: int, split: str, groups: Sequence[Group], learnt: Learnt = ...) -> None: ...


class Stop(Protocol):
    """A `threading.Event`: once set, the step in progress is finished and saved, and `run` returns `interrupted`."""

    def is_set(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class PolicySetup:
    """One policy of the run, as the loop needs it.

    `sampling` is `None` where groups are made of demonstrations (then nothing is ever stale, and no version needs to be
    published except before an evaluation by engines). `eval_sampling` is `None` where engines do not evaluate;
    `evaluate` then may: given the rounds consumed, it reports `eval/loss` of demonstrations.
    """

    name: str
    schedule: ScheduleConfig
    tasks: Tasks
    learner: Learner
    share: int = 1
    filters: Mapping[str, Filter] = field(default_factory=dict)
    sampling: Sampling | None = None
    eval_sampling: Sampling | None = None
    evaluate: Callable[[int], Awaitable[Mapping[str, Metric]]] | None = None


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """`status` is `finished` or `interrupted`. `step` counts rounds consumed (a round is `share` steps of every
    policy; with one policy, steps); `best` is the best evaluation's step and value, where there was one."""

    status: str
    step: int
    best: tuple[int, float] | None
