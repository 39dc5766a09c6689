"""Options of the penalties (stages) and of the scorers."""

import re
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from miles_core.config.schema import opt


class Siblings(StrEnum):
    mean = "mean"
    last = "last"
    min = "min"
    max = "max"


class Turns(StrEnum):
    last = "last"
    all = "all"


class Whole(StrEnum):
    search = "search"
    full = "full"


class Absent(StrEnum):
    refuse = "refuse"
    zero = "zero"


class Output(StrEnum):
    logit = "logit"
    probability = "probability"


@dataclass(frozen=True, kw_only=True)
class ComposeConfig:
    """Stage `compose`: R gains Σ weight · component, and (base − 1) · Episode.reward."""

    weights: dict[str, float] = opt(
        {}, "component -> weight; a component that the environment reports by its name, a scorer's as NAME.reward"
    )
    base: float = opt(1.0, "weight of Episode.reward itself; 0 leaves only the components")
    siblings: Siblings = opt(Siblings.mean, "which of an episode's trajectories a scorer's reward is taken from")
    absent: Absent = opt(Absent.refuse, "a component that no episode of a step reports: refuse it, or count 0")

    def __post_init__(self) -> None:
        if not self.weights and self.base == 1:
            raise ValueError("weights is empty and base is 1; nothing would be composed")


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """Stage `rank`: R gains weight · the episode's rank within its group, from 0 (lowest) to 1 (highest)."""

    of: str = opt("reward", "what is ranked: `reward`, a component that the environment reports, or NAME.reward")
    weight: float = opt(1.0, "factor of the rank; below 0 the lowest gain most")
    base: float = opt(1.0, "weight of Episode.reward itself; 0 leaves only the rank")
    siblings: Siblings = opt(Siblings.mean, "which of an episode's trajectories a scorer's reward is taken from")
    absent: Absent = opt(Absent.refuse, "a component that no episode of a step reports: refuse it, or count 0")


@dataclass(frozen=True, kw_only=True)
class DuplicatesConfig:
    """Stage `duplicates`: minus weight · the share of the group's other episodes that sampled the very same tokens."""

    weight: float = opt(0.5, "cost of an answer that all others gave too", unit="reward", low=0)


@dataclass(frozen=True, kw_only=True)
class FormatConfig:
    """Scorer `format`: one number where the answer's text has a pattern, another where not."""

    pattern: str = opt("", "regular expression of Python's re; `.` also matches line ends")
    match: Whole = opt(Whole.search, "search: somewhere in the text; full: the whole text")
    turns: Turns = opt(Turns.last, "the text of the last sampled turn, or of all of them, one a line")
    right: float = opt(0.0, "reward of a text that fits")
    wrong: float = opt(-1.0, "reward of a text that does not")

    def __post_init__(self) -> None:
        if not self.pattern:
            raise ValueError("pattern is empty; it must be a regular expression")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern is {self.pattern!r}, which is no regular expression: {error}") from error


@dataclass(frozen=True, kw_only=True)
class GroupRewardConfig:
    """Scorer `group-reward`: a Python function that sees all answers to one task at once."""

    function: str = opt("", "`module:function` or `file.py:function`, beside the run file or installed")
    turns: Turns = opt(Turns.last, "the text of the last sampled turn, or of all of them, one a line")
    concurrency: int = opt(8, "groups at once; a plain function is called for one group after the other", low=1)
    deadline_s: float = opt(60.0, "deadline of one group", unit="s", low=0.001)

    def __post_init__(self) -> None:
        if not all(self.function.rpartition(":")):
            raise ValueError(f"function is {self.function!r}; it must be module:function or file.py:function")


@dataclass(frozen=True, kw_only=True)
class HttpRewardConfig:
    """Scorer `http-reward`: POSTs answers as JSON and gets a number for each."""

    url: str = opt("", "http:// or https:// address that answers are posted to")
    turns: Turns = opt(Turns.last, "the text of the last sampled turn, or of all of them, one a line")
    batch_size: int = opt(16, "answers a request", unit="answers", low=1)
    whole_groups: bool = opt(False, "a request holds whole groups, however large: for services that compare answers")
    concurrency: int = opt(4, "requests at once", unit="requests", low=1)
    deadline_s: float = opt(30.0, "deadline of one attempt, from connecting to the last byte", unit="s", low=0.001)
    retries: int = opt(4, "further attempts after one that failed", low=0)
    backoff_s: float = opt(0.5, "wait before the first further attempt; doubles each time", unit="s", low=0)
    backoff_max_s: float = opt(30.0, "longest wait, also of one that the service asks for", unit="s", low=0)
    token_file: str = opt("", "file whose first line is sent as `Authorization: Bearer …`; no such header where empty")

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url is {self.url!r}; it must be http://HOST[:PORT]/PATH or https://…")
        if parts.username or parts.password:
            raise ValueError(
                "url holds a user or a password, which would be written to the run directory; use token_file"
            )


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """Scorer `reward-model`: a sequence classifier from a local folder, in this process."""

    source: str = opt("", "folder of a transformers model with its tokenizer")
    turns: Turns = opt(Turns.last, "the text of the last sampled turn, or of all of them, one a line")
    label: int = opt(0, "which of the model's outputs is the reward", low=0)
    output: Output = opt(Output.logit, "the output itself; or its probability (sigmoid of one, softmax of several)")
    max_tokens: int | None = opt(None, "longest input, cut at its beginning; the model's own limit where null", low=1)
    batch_tokens: int = opt(8192, "padded tokens of one forward", unit="tokens", low=1)
    device: str = opt("cpu", "torch device")
    scale: float = opt(1.0, "factor of the reward")

    def __post_init__(self) -> None:
        if not self.source:
            raise ValueError("source is empty; it must be a folder")
