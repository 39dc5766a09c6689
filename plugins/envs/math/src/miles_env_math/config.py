"""Options of the environment `math`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from miles_core.config.schema import opt
from miles_core.verifying.extract import Extract
from miles_core.verifying.prompts import PromptConfig


class OnOverlap(StrEnum):
    refuse = "refuse"
    drop = "drop"


class Reference(StrEnum):
    auto = "auto"
    whole = "whole"
    boxed = "boxed"
    hashes = "hashes"


class Unjudged(StrEnum):
    fail = "fail"
    zero = "zero"


@dataclass(frozen=True, kw_only=True)
class MathConfig:
    path: str = opt("", "JSONL or Parquet file of the training problems")
    eval_path: str | None = opt(None, "file of the evaluation problems")
    eval_fraction: float | None = opt(None, "share of the different problems of `path` to hold out", low=0, high=1)
    on_overlap: OnOverlap = opt(OnOverlap.refuse, "what to do with a training problem that `eval_path` holds too")
    shuffle: bool = opt(True, "shuffle the training problems, anew each epoch")
    problem_field: str = opt("problem", "field of the problem's text")
    answer_field: str = opt("answer", "field of the reference answer, or of a solution that ends in it")
    choices_field: str | None = opt("choices", "field of a multiple-choice problem's options, a list; none where null")
    keep_fields: list[str] = opt([], "further fields that tasks carry as metadata, e.g. [subject, level]")
    reference: Reference = opt(
        Reference.auto, "where a reference stands in its field: after ####, inside \\boxed{}, the whole; auto looks"
    )
    prompt: PromptConfig = field(default_factory=PromptConfig, metadata={"help": "how a problem becomes a prompt"})
    extract: list[Extract] = opt(
        [Extract.boxed],
        "where the answer stands: tag, boxed, last_number, last_line, first_line, whole; tried in order",
    )
    tag: str = opt("answer", "the tag of `extract: [tag]`, without brackets")
    max_answer_chars: int = opt(2000, "an extracted answer that is longer earns 0 unseen", unit="characters", low=1)
    format_reward: float = opt(0.0, "added where the answer was found in the first place of `extract`", low=0)
    decimals: int = opt(6, "decimal places to which numbers are compared", unit="digits", low=0, high=30)
    strict: bool = opt(True, "names of variables matter, and a set is no tuple")
    unjudged: Unjudged = opt(
        Unjudged.fail, "what becomes of an answer that takes too long or too much memory: a failed episode, or 0"
    )
    deadline_s: float = opt(5.0, "deadline of one verdict", unit="s", low=0.01)
    workers: int = opt(1, "processes that judge", unit="processes", low=1)
    memory_mib: int = opt(2048, "address space of each of them", unit="MiB", low=512)
    check_references: int = opt(
        64, "references read before the run; the others when their task comes", unit="rows", low=0
    )

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path is empty; name the JSONL or Parquet file of the problems")
        if self.eval_path is not None and self.eval_fraction is not None:
            raise ValueError(f"eval_path is {self.eval_path!r} and eval_fraction is {self.eval_fraction}; give one")
        if self.eval_fraction is not None and not 0 < self.eval_fraction < 1:
            raise ValueError(f"eval_fraction is {self.eval_fraction}; both splits need problems, so between 0 and 1")
        if not self.extract:
            raise ValueError("extract is empty; name at least one place")
        if not self.tag or set("<> /") & set(self.tag):
            raise ValueError(f"tag is {self.tag!r}; write a word without brackets, e.g. answer")
