"""Options of the environment `reasoning-gym`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from miles_core.config.schema import opt
from miles_core.verifying.extract import Extract
from miles_core.verifying.prompts import PromptConfig

Level = int | dict[str, int] | None


class Ranges(StrEnum):
    inclusive = "inclusive"
    upper_bound = "upper_bound"


class EvalStage(StrEnum):
    first = "first"
    last = "last"


class Unjudged(StrEnum):
    fail = "fail"
    zero = "zero"


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    level: Level = opt(None, "difficulty level of the data set's own curriculum: a number, or one an attribute")
    options: dict[str, Any] = opt({}, "options that differ in this stage")


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """Stages that follow each other as tasks are handed out: a function of the task's position, and so resumable."""

    every: int = opt(1000, "tasks of the environment that a stage lasts; the last one has no end", unit="tasks", low=1)
    levels: list[int] = opt([], "stages that differ by level alone")
    stages: list[StageConfig] = opt([], "stages with options of their own, in place of `levels`")
    review: float = opt(0.0, "share of tasks drawn from earlier stages", low=0, high=1)
    evaluate: EvalStage = opt(EvalStage.last, "the stage that evaluation asks for")

    def __post_init__(self) -> None:
        if bool(self.levels) == bool(self.stages):
            raise ValueError("give levels or stages, one of them" + (", not both" if self.levels else ""))
        if len(self.all()) < 2:
            raise ValueError("a curriculum of one stage changes nothing; give two, or set `level` in its place")

    def all(self) -> tuple[StageConfig, ...]:
        return tuple(self.stages) or tuple(StageConfig(level=level) for level in self.levels)


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """One entry of `datasets`."""

    dataset: str = opt("", "name in reasoning-gym; the entry's own key where empty")
    weight: float = opt(1.0, "share of tasks, relative to the other entries", low=0)
    options: dict[str, Any] = opt({}, "fields of the data set's own config, e.g. {min_words: 3}")
    level: Level = opt(None, "difficulty level of the data set's own curriculum: a number, or one an attribute")
    ranges: Ranges = opt(Ranges.inclusive, "whether a level's ranges hold the easier levels too")
    curriculum: CurriculumConfig | None = opt(None, "levels that follow each other")
    unsound: bool = opt(False, "take a data set whose verifier is known to pay for wrong answers")


@dataclass(frozen=True, kw_only=True)
class ReasoningGymConfig:
    dataset: str = opt("", "name of the data set; or give `datasets`")
    options: dict[str, Any] = opt({}, "fields of the data set's own config, e.g. {min_words: 3}")
    level: Level = opt(None, "difficulty level of the data set's own curriculum: a number, or one an attribute")
    ranges: Ranges = opt(Ranges.inclusive, "whether a level's ranges hold the easier levels too")
    curriculum: CurriculumConfig | None = opt(None, "levels that follow each other")
    unsound: bool = opt(False, "take a data set whose verifier is known to pay for wrong answers")
    datasets: dict[str, DatasetConfig] = opt({}, "a weighted mixture: name -> weight, options, level, curriculum")
    modules: list[str] = opt([], "modules or files that register further data sets with reasoning-gym")
    eval_share: float = opt(0.25, "share of all questions that belong to the eval split", low=0, high=1)
    prompt: PromptConfig = field(default_factory=PromptConfig, metadata={"help": "how a question becomes a prompt"})
    extract: list[Extract] = opt(
        [Extract.tag], "where the answer stands: tag, boxed, last_number, last_line, first_line, whole; tried in order"
    )
    tag: str = opt("answer", "the tag of `extract: [tag]`, without brackets")
    max_answer_chars: int = opt(10_000, "an extracted answer that is longer earns 0 unseen", unit="characters", low=1)
    threshold: float | None = opt(None, "verifier's score from which the reward is 1, else 0; as scored where null")
    format_reward: float = opt(0.0, "added where the answer was found in the first place of `extract`", low=0)
    unjudged: Unjudged = opt(
        Unjudged.fail, "what becomes of an answer on which the verifier raises, hangs or dies: a failed episode, or 0"
    )
    deadline_s: float = opt(10.0, "deadline of one verdict, and of generating one item", unit="s", low=0.01)
    workers: int = opt(1, "processes that generate and judge", unit="processes", low=1)
    memory_mib: int = opt(4096, "address space of each of them; a verifier that wants more raises", unit="MiB", low=512)

    def __post_init__(self) -> None:
        if bool(self.dataset) == bool(self.datasets):
            raise ValueError("give dataset (one) or datasets (a mixture)" + (", not both" if self.dataset else ""))
        alone = [n for n in ("options", "level", "curriculum", "unsound") if getattr(self, n)]
        if self.datasets and alone:
            raise ValueError(f"{', '.join(alone)} belong to the entries of datasets where there is a mixture")
        if self.datasets and not any(d.weight > 0 for d in self.datasets.values()):
            raise ValueError("every weight of datasets is 0")
        if not 0 < self.eval_share < 1:
            raise ValueError(f"eval_share is {self.eval_share}; both splits need questions, so between 0 and 1")
        if not self.extract:
            raise ValueError("extract is empty; name at least one place")
        if not self.tag or set("<> /") & set(self.tag):
            raise ValueError(f"tag is {self.tag!r}; write a word without brackets, e.g. answer")

    def entries(self) -> dict[str, DatasetConfig]:
        """The mixture, a single data set as a mixture of one; entries of weight 0 left out."""
        if self.dataset:
            one = DatasetConfig(
                dataset=self.dataset,
                options=self.options,
                level=self.level,
                ranges=self.ranges,
                curriculum=self.curriculum,
                unsound=self.unsound,
            )
            return {self.dataset: one}
        return {name: entry for name, entry in self.datasets.items() if entry.weight > 0}
