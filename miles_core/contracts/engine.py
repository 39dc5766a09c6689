"""Kind `rollout`: an engine samples from a model. Places: controller and sampler (a client, or the engine in-process).

An engine is named, serves one or several policies' weights, and replaces them through *weight ports* only. All methods
are coroutines called from one event loop; an engine that computes in-process does so off that loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from miles_core.contracts.weights import WeightPort
from miles_core.records import Array, Finish, Ref, Sampling, Span

#: What happens to requests in flight while paused: `in_place` keeps them and their cache, `recompute` keeps their
#: tokens and recomputes the cache under the new weights, `abort` ends them (tokens so far come back), `finish` waits.
PauseMode = Literal["in_place", "recompute", "abort", "finish"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call for tokens.

    `prompt` holds at least `tokens` int32 [n]. `resume` holds tokens sampled by an earlier, aborted call of the same
    request: they are context, are not returned again, and count against `sampling.max_new_tokens`; the draw of new
    token i (counted from the first token of the first call) depends on (seed, i) only. `want` names capabilities
    beside `logprobs`: `keep_ids`, `routed_experts`, …; an engine that does not offer one raises `CapabilityError`.

    `prompt_logprobs` wants log-probabilities of the prompt itself; `prompt_top_logprobs:K` beside it (K from 1 to the
    size of the vocabulary), each position's K likeliest tokens too. Where it is wanted, `sampling.max_new_tokens` may
    be 0: nothing is sampled, and the completion has no tokens, no spans and finish `length`.
    """

    id: str
    policy: str
    prompt: Mapping[str, Array | Ref]
    sampling: Sampling
    seed: int
    resume: Array | None = None
    want: frozenset[str] = frozenset()
    deadline_s: float = 600.0
    session: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What was sampled by one call.

    `columns`: `tokens` int32 [n] (a stop token is included), `logprobs` float32 [n] of the distribution that was really
    sampled (tempered, cut, renormalised); `keep_ids` int32 flat with `keep_counts` int32 [n] where wanted; others as
    their capability says. Spans count from this call's first token.

    Capability `prompt_logprobs`, where wanted: `prompt_logprobs` float32 [len(prompt)], of each prompt token given
    those before it (0 at the first), at temperature 1 over the whole vocabulary, all under one version: that of the
    first span. With `prompt_top_logprobs:K`: `prompt_topk_ids` int32 and `prompt_topk_logprobs` float32
    [len(prompt), K], most likely first (zeros at the first token). A request that was aborted before its prompt was
    computed has none of them.
    """

    request: str
    columns: Mapping[str, Array | Ref]
    spans: tuple[Span, ...]
    finish: Finish
    engine: str
    info: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """`ok` and, where not, why. `running` and `waiting` count requests."""

    ok: bool
    detail: str = ""
    running: int = 0
    waiting: int = 0


@runtime_checkable
class Engine(Protocol):
    """Samples tokens. Capabilities say more (`logprobs`, `pause.in_place`, `weights.tensors`, `batch_invariant`, …).

    An engine that clients in other processes can reach also has an attribute `address: str`; a client of it, built in a
    sampler, finds that address in its `BuildContext`. One that serves several policies at once offers `policies`. One
    that has `async generate_many(requests) -> list[Completion | Exception]` answers requests that come together in one
    wait, an error in the place of the answer that it kept from coming; it is asked so where nothing can be done with
    one answer before the last. One with an attribute `longest_prompt: int` (tokens, once it has started) is not begun
    with tasks that are known to be longer.
    """

    name: str

    async def start(self) -> None:
        """Be ready to take requests or weights. Weights of version 0 arrive through a port before the first request."""

    async def generate(self, request: Request) -> Completion:
        """Sample. Raises `DeadlineError` past `request.deadline_s`, `EngineError` where the engine fails."""

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests (all where `None`): their `generate` returns what was sampled, with finish `abort`."""

    async def pause(self, mode: PauseMode) -> None:
        """Return when no step is running and none will start before `resume`."""

    async def resume(self) -> None: ...

    def port(self, name: str) -> WeightPort:
        """The weight port `tensors`, `group`, `checkpoint` or `regions`; `CapabilityError` where it has none."""

    async def health(self) -> Health: ...

    async def close(self) -> None: ...
