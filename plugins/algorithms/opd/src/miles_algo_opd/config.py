"""Options of the presets, the stage, the term and the scorer. The coefficient of the term is core's (`coef`)."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from enum import StrEnum
from typing import Any

from miles_core.config.schema import opt


class Direction(StrEnum):
    reverse = "reverse"
    forward = "forward"


class Support(StrEnum):
    student = "student"
    teacher = "teacher"
    union = "union"


class Tail(StrEnum):
    none = "none"
    renormalise = "renormalise"
    bucket = "bucket"


class Style(StrEnum):
    sglang = "sglang"
    vllm = "vllm"


class Vocabulary(StrEnum):
    check = "check"
    same = "same"


@dataclass(frozen=True, kw_only=True)
class OpdPreset:
    """Preset `opd` (Lu and Thinking Machines Lab, "On-Policy Distillation", 2025; Agarwal et al., arXiv 2306.13649):
    the advantage of a sampled token is −(π_p − π_T), through the clipped ratio, mean over tokens.

    No options of its own. Deviations: ratios are clipped at .2/.2, which does nothing with one update a step.
    """


@dataclass(frozen=True, kw_only=True)
class OpdTopkPreset:
    """Preset `opd_topk` (GKD, Agarwal et al., arXiv 2306.13649, on the student's own samples): KL(student‖teacher) over
    the student's k most likely tokens and one bucket for the rest, mean over tokens.

    No options of its own; `distill.k` must be given. Deviations: top-k with a bucket instead of the whole vocabulary.
    """


@dataclass(frozen=True, kw_only=True)
class OpdConfig:
    """Stage `opd`: A_t ← A_t − coef·(π_p − π_T)_t, before whitening; A is 0 where the run has no advantage stage."""

    coef: float = opt(1.0, "λ: weight of the teacher beside the task's advantage", low=0)


@dataclass(frozen=True, kw_only=True)
class TopkKlConfig:
    """Term `topk_kl`: KL between student and teacher over a set of tokens at each position."""

    k: int = opt(MISSING, "tokens of the set that each model gives; must be given", unit="tokens", low=1)
    direction: Direction = opt(Direction.reverse, "reverse: KL(student‖teacher); forward: KL(teacher‖student)")
    support: Support = opt(Support.student, "whose k most likely tokens: those of one, or of both")
    tail: Tail = opt(Tail.bucket, "the rest of the vocabulary: left out, conditioned away, or one outcome")


@dataclass(frozen=True, kw_only=True)
class HttpTeacherConfig:
    """Scorer `http-teacher`: log-probabilities of teachers behind HTTP. Token ids go in, never text.

    One teacher at `url`, or several in `teachers`, chosen by what stands in the task's metadata under `route` (by the
    name of the task's environment where `route` is null).
    """

    url: str = opt("", "address of the only teacher, such as http://host:30000")
    teachers: dict[str, Any] = opt({}, "addresses of several teachers, by the route that leads to them")
    route: str | None = opt(None, "key of Task.metadata that holds the route; the environment's name where null")
    default: str | None = opt(None, "teacher of tasks without a known route; an error where null")
    style: Style = opt(Style.sglang, "sglang: POST /generate; vllm: POST /v1/completions with prompt_logprobs")
    model: str = opt("", "name of the model that a vllm server is asked for; its only one where empty")
    k: int | None = opt(None, "how many tokens top-k columns hold; that of the run's topk_kl where null", low=1)
    vocabulary: Vocabulary = opt(
        Vocabulary.check, "check: compare the texts that the teacher gives to ids; same: you say that they are equal"
    )
    echoes_temperature: bool = opt(False, "the service applies `logprob_temperature` and says so in its answer")
    deadline_s: float = opt(120.0, "deadline of one request", unit="s", low=0.001)
    retries: int = opt(4, "further attempts where the service is busy, broken or away", low=0, high=100)
    backoff_s: float = opt(0.5, "wait before the first further attempt; it doubles each time", unit="s", low=0)
    concurrency: int = opt(16, "requests at a time, to each teacher", unit="requests", low=1)

    def __post_init__(self) -> None:
        if bool(self.url) == bool(self.teachers):
            given = "both" if self.url else "neither"
            raise ValueError(f"url and teachers: {given} given; name one teacher by url, or several in teachers")
        for name, url in self.addresses().items():
            if not isinstance(url, str) or not url.startswith(("http://", "https://")):
                raise ValueError(f"the address of teacher {name!r} is {url!r}; it must start with http:// or https://")
        if self.default is not None and self.default not in self.teachers:
            raise ValueError(f"default is {self.default!r}, which is no teacher; teachers: {sorted(self.teachers)}")

    def addresses(self) -> dict[str, str]:
        """Name of each teacher -> its address; the only one has the name `teacher`."""
        return {"teacher": self.url} if self.url else dict(self.teachers)
