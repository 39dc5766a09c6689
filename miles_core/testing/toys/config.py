"""Options of the toy plugins. Dataclasses only: nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from miles_core.config.schema import opt

ALPHABET = "0123456789>+?"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model `toy`. `vocab_size` and `order` also stand in `model.architecture`, which wins."""

    vocab_size: int = opt(2 + len(ALPHABET), "size of the vocabulary", unit="tokens", low=3)
    order: int = opt(2, "how many tokens back the model sees", unit="tokens", low=1)
    scale: float = opt(0.01, "standard deviation of the initial weights", low=0)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer `toy`. `model.alphabet` wins where it is set."""


@dataclass(frozen=True, kw_only=True)
class NoConfig:
    """No options."""


class Fault(StrEnum):
    none = "none"
    error = "error"
    nan = "nan"
    text = "text"


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """Environments `toy` and `toy-multiturn`: echo the last digit of the prompt."""

    tasks: int = opt(100, "tasks of both splits together", unit="tasks", low=5)
    delay_s: float = opt(0.0, "longest wait before a score; each task draws its own, most are short", unit="s", low=0)
    turns: int = opt(2, "turns of a multi-turn episode", unit="turns", low=1)
    branches: int = opt(1, "leaves of a multi-turn episode", low=1)
    fault: Fault = opt(Fault.none, "what is wrong with the episodes that `fault_every` picks")
    fault_every: int = opt(5, "every so many scores of a task source is faulty", low=1)
    seed: int = opt(0, "seed of the order of tasks", low=0)
    scorer: str = opt("", "a scorer of the run that `toy` asks for the component `length`; none where empty")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Engine `toy`, in-process."""

    step_s: float = opt(0.0, "time between two decode steps", unit="s", low=0)
    slots: int = opt(256, "requests that decode together", unit="requests", low=1)


@dataclass(frozen=True, kw_only=True)
class SocketEngineConfig(EngineConfig):
    """Engine `toy-socket`: a server on 127.0.0.1 owned by the controller, and clients in samplers."""

    port: int = opt(0, "TCP port; chosen by the system where 0", low=0)
    own_process: bool = opt(False, "the server runs in a process of its own, without renderer and extensions")
    connect_s: float = opt(10.0, "deadline for reaching the server", unit="s", low=0.001)


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """Backend `toy`."""

    micro_groups: int = opt(0, "groups a micro-batch; 0 for the whole minibatch", unit="groups", low=0)


class Phase(StrEnum):
    live = "live"
    staged = "staged"


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Transports `toy` (in one process) and `toy-socket` (TCP on 127.0.0.1)."""

    phase: Phase = opt(Phase.live, "carry inside the pause, or before it")
    bucket_bytes: int = opt(4096, "bytes handed over at once", unit="bytes", low=1)


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """Stages of the toys. `coef` scales what the stage does; `high` bounds correction weights."""

    coef: float = opt(1.0, "factor")
    high: float = opt(2.0, "upper bound of a correction weight", low=0)
    reject: bool = opt(False, "whether a correction rejects what it bounds")


@dataclass(frozen=True, kw_only=True)
class TermConfig:
    """Terms of the toys."""

    clip: float = opt(0.2, "how far a ratio may move", low=0)


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """Filter `toy`."""

    minimum: float = opt(0.0, "smallest spread of rewards in a group that is kept", low=0)


@dataclass(frozen=True, kw_only=True)
class ScorerConfig:
    """Scorer `toy`: a teacher that finds every token equally likely."""

    vocab_size: int = opt(2 + len(ALPHABET), "size of its vocabulary", unit="tokens", low=2)


@dataclass(frozen=True, kw_only=True)
class LauncherConfig:
    """Launchers `toy` (threads) and `toy-processes`."""

    start_s: float = opt(60.0, "deadline for a worker to be built", unit="s", low=0.001)


@dataclass(frozen=True, kw_only=True)
class ExtensionConfig:
    """Extension `toy`."""

    delta: bool = opt(True, "train an additive bias in place of the model's own weights")
    replay: bool = opt(True, "bring the engine's column `toy.previous` and check it in training")
    steps: int | None = opt(None, "sets run.steps", unit="steps", low=1)
