"""Kinds `env` and `scorer`: where tasks come from, and what an answer is worth.

An environment is built in the controller (to hand out tasks) and in every sampler (to run episodes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

    from miles_core.contracts.rendering import Renderer
    from miles_core.records import Array, Message, Prompt, Ref, Sampling, Score, Task, Trajectory


@runtime_checkable
class TaskSource(Protocol):
    """Tasks of one split by position: deterministic and therefore resumable from a number.

    `size` counts the tasks, `None` where they are generated without end. `task(position)` accepts any position >= 0:
    finite sources wrap round (epoch = position // size, shuffled anew each epoch where they shuffle). The task's id is
    that of the underlying item: `<env>:<split>:<index>`. Core counts attempts per item as the epoch.

    A source that has rendered its tasks beforehand may have attributes `longest: tuple[int, str] | None`, the tokens of
    the longest prompt and where it stands (file and line), and `longest_shown` alike, of a prompt with its
    demonstration. They are held against `Engine.longest_prompt` and the positions of the model.
    """

    size: int | None

    def task(self, position: int) -> Task:
        """Raises `DataError` (before the run: core probes position 0) or `LateDataError` naming file and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One sampled turn of a session. `node` is the session's handle for branching."""

    node: int
    text: str
    message: Message
    finish: str
    tokens: int


@runtime_checkable
class Session(Protocol):
    """A tree of token segments, as an environment sees it: say something, get a turn."""

    async def sample(self, new: Prompt | Sequence[Message] = (), *, parent: int | None = None, **sampling: Any) -> Turn:
        """Encode `new` after `parent` (default: the latest turn; the root at first) and sample. Keyword arguments
        override sampling parameters of the run (`stop` is a tuple).

        At the root an empty `new` is the task's prompt: `await session.sample()` begins most episodes. A turn whose
        `finish` is not `stop` was cut off and cannot be extended: an episode that tries is a failed one, so look at
        `Turn.finish` before you go on.
        """


@dataclass(frozen=True, kw_only=True)
class EpisodeContext:
    """What an environment may use besides its task. `text` is the last turn's text, for single-turn scoring."""

    renderer: Renderer
    sampling: Sampling
    rng: np.random.Generator
    split: str
    deadline_s: float
    scorers: Mapping[str, Scorer] = field(default_factory=dict)
    text: str = ""
    finish: str = ""
    trajectories: tuple[Trajectory, ...] = ()


@runtime_checkable
class Environment(Protocol):
    """Kind `env`. `task_splits` holds `train` and, where evaluation is possible, `eval`; they never share a task.

    A single-turn environment writes `score`; a multi-turn one writes `episode` as well, and core then calls that
    (`MultiTurn`). A raised exception is a failed episode, counted with task and reason. One whose `score` never waits
    for anything may have an attribute `instant = True`: a group is then sampled in one wait and scored in one go. One
    with an attribute `digest: str`, of what it reads its tasks from, is not resumed on other tasks. With one
    `scoring_digest: str`, of the code of a reward, a resume under other code is said and recorded in the lineage.
    """

    task_splits: tuple[str, ...]

    def tasks(self, split: str) -> TaskSource: ...

    async def score(self, task: Task, context: EpisodeContext) -> Score: ...


@runtime_checkable
class MultiTurn(Environment, Protocol):
    """An environment that drives the session itself."""

    async def episode(self, task: Task, session: Session, context: EpisodeContext) -> Score: ...


@runtime_checkable
class Scorer(Protocol):
    """Kind `scorer`: teacher, reward model, reference as a service. Called in the episode or in the learner."""

    async def score(
        self, trajectories: Sequence[Trajectory], want: Sequence[str], tasks: Sequence[Task] = ()
    ) -> Mapping[str, Sequence[Array | Ref]]:
        """Column name -> one array per trajectory.

        `want` are names `<role or scorer>.<column>`; what stands after the last dot says what is wanted: `reward` is a
        scalar per trajectory, other columns have a row per unit (`logprobs`: 0 at the first token). `tasks[i]` is the
        task of `trajectories[i]`; empty where the caller has none.
        """

    async def close(self) -> None: ...
