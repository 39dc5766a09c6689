"""Options of the environment `jsonl`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from miles_core.config.schema import opt


class OnOverlap(StrEnum):
    refuse = "refuse"
    drop = "drop"


@dataclass(frozen=True, kw_only=True)
class JsonlConfig:
    path: str = opt("", "JSONL or Parquet file of the training tasks; a slice as `file@[start:end]`")
    eval_path: str | None = opt(None, "file of the evaluation tasks, sliced alike")
    eval_fraction: float | None = opt(
        None, "share of the different prompts of `path` to hold out instead", low=0, high=1
    )
    on_overlap: OnOverlap = opt(OnOverlap.refuse, "what to do with a training prompt that `eval_path` holds too")
    prompt_field: str = opt("prompt", "field of the prompt, a string or messages")
    answer_field: str = opt("answer", "field of the answer, a string or number")
    demonstration_field: str = opt("demonstration", "field of the reference that supervised training shows")
    chosen_field: str = opt(
        "chosen", "field of the better answer of a pair, for algorithms that learn from preferences"
    )
    rejected_field: str = opt("rejected", "field of the worse answer of a pair")
    metadata_field: str = opt("metadata", "field of further data, an object")
    shuffle: bool = opt(True, "shuffle the training rows, anew each epoch")
    reward: str | None = opt(
        None, "`module:function` or `file.py:function`; exact comparison with the answer where null"
    )
    reward_range: list[float] | None = opt(
        None,
        "least and most that an answer may earn, e.g. [0, 1]: anything else fails its episode; any number where null",
    )
    reward_deadline_s: float = opt(60.0, "deadline of one call of the reward function", unit="s", low=0.001)
    reward_threads: int = opt(8, "calls of a plain reward function at once", unit="threads", low=1)
    check_rows: int | None = opt(
        100_000,
        "rows read before the run, all where null; of these the first 10,000 (20 MB) are rendered",
        unit="rows",
        low=1,
    )

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path is empty; name the JSONL or Parquet file of the tasks")
        if self.eval_path is not None and self.eval_fraction is not None:
            raise ValueError(
                f"eval_path is {self.eval_path!r} and eval_fraction is {self.eval_fraction}; give one of them"
            )
        if self.eval_fraction is not None and not 0 < self.eval_fraction < 1:
            raise ValueError(f"eval_fraction is {self.eval_fraction}; both splits need rows, so between 0 and 1")
        if self.reward_range is not None and (
            len(self.reward_range) != 2 or self.reward_range[0] >= self.reward_range[1]
        ):
            raise ValueError(f"reward_range is {self.reward_range}; write two numbers, the lesser first, e.g. [0, 1]")
        if self.reward is not None and not all(self.reward.rpartition(":")[::2]):
            raise ValueError(f"reward is {self.reward!r}; write it as module:function")
