"""How a service is asked for log-probabilities of a prompt, and how its answer reads: SGLang's and vLLM's words.

Both take token ids and answer with token ids beside every number, which is checked: an answer about other tokens is
never taken. Scored prompt log-probabilities of both are those at temperature 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


class Unusable(Exception):
    """The answer does not say what was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`tokens` of one sequence; `k` most likely alternatives at each position (0: none); `texts`: of every token.

    A `temperature` other than 1 is sent as `logprob_temperature`, and the answer must repeat it under that name.
    """

    tokens: Sequence[int]
    k: int = 0
    texts: bool = False
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One position: the token's log-probability and text, and (id, log-probability) of the most likely tokens."""

    logprob: float
    text: str | None
    top: tuple[tuple[int, float], ...] = ()


class Sglang:
    """`POST /generate`: `input_token_logprobs` holds [log-probability or null, id, text or null] for each token."""

    path = "/generate"

    def request(self, asked: Asked, model: str) -> Json:
        body: Json = {
            "input_ids": list(asked.tokens),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        if asked.k:
            body["top_logprobs_num"] = asked.k
        if asked.texts:
            body["return_text_in_logprobs"] = True
        if asked.temperature != 1:
            body["logprob_temperature"] = asked.temperature
        return body

    def rows(self, answer: Any, asked: Asked) -> list[Row]:
        """A row for each token but the first."""
        info = _field(answer, "meta_info", dict)
        _check_temperature(info, asked)
        found = _field(info, "input_token_logprobs", list)
        _check_length("input_token_logprobs", found, asked)
        tops = _field(info, "input_top_logprobs", list) if asked.k else [None] * len(found)
        _check_length("input_top_logprobs", tops, asked)
        rows = []
        for t in range(1, len(asked.tokens)):
            logprob, token, text = _triple(found[t], f"input_token_logprobs[{t}]")
            if token != asked.tokens[t]:
                raise Unusable(f"input_token_logprobs[{t}] is about token {token}; token {asked.tokens[t]} was sent")
            top = tuple(_triple(entry, f"input_top_logprobs[{t}]")[1::-1] for entry in tops[t] or ())
            rows.append(Row(logprob=logprob, text=text, top=_top(top, asked.k, t)))
        return rows


class Vllm:
    """`POST /v1/completions`: `prompt_logprobs` holds null, then {id: {logprob, rank, decoded_token}}."""

    path = "/v1/completions"

    def request(self, asked: Asked, model: str) -> Json:
        body: Json = {
            "prompt": list(asked.tokens),
            "max_tokens": 1,  # the fewest that it accepts
            "temperature": 0,
            "prompt_logprobs": asked.k,  # the prompt's own token always comes along
        }
        if model:
            body["model"] = model
        if asked.temperature != 1:
            body["logprob_temperature"] = asked.temperature
        return body

    def rows(self, answer: Any, asked: Asked) -> list[Row]:
        """A row for each token but the first."""
        _check_temperature(answer, asked)
        choices = _field(answer, "choices", list)
        if len(choices) != 1:
            raise Unusable(f"choices has {len(choices)} entries; one prompt was sent")
        found = _field(choices[0], "prompt_logprobs", list)
        _check_length("prompt_logprobs", found, asked)
        rows = []
        for t in range(1, len(asked.tokens)):
            entries = found[t]
            own = entries.get(str(asked.tokens[t])) if isinstance(entries, Mapping) else None
            if not isinstance(own, Mapping):
                raise Unusable(f"prompt_logprobs[{t}] lacks token {asked.tokens[t]}, which was sent")
            read = [(int(i), _number(e, t), e.get("rank")) for i, e in entries.items()]
            # The prompt's own token comes along whatever its rank, and must not fill a hole in the top.
            read = [e for e in read if not isinstance(e[2], int) or e[2] <= asked.k]
            read.sort(key=lambda e: -e[1])
            top = tuple((i, logprob) for i, logprob, _ in read[: asked.k])
            text = own.get("decoded_token")
            rows.append(Row(logprob=_number(own, t), text=text, top=_top(top, asked.k, t)))
        return rows


DIALECTS: dict[str, type[Sglang | Vllm]] = {"sglang": Sglang, "vllm": Vllm}


def _field(data: Any, name: str, kind: type) -> Any:
    value = data.get(name) if isinstance(data, Mapping) else None
    if not isinstance(value, kind):
        raise Unusable(f"the answer has no {name}")
    return value


def _check_length(name: str, found: Sequence[Any], asked: Asked) -> None:
    if len(found) != len(asked.tokens):
        raise Unusable(f"{name} has {len(found)} entries for {len(asked.tokens)} tokens")


def _check_temperature(info: Any, asked: Asked) -> None:
    if asked.temperature == 1:
        return
    told = info.get("logprob_temperature") if isinstance(info, Mapping) else None
    if not isinstance(told, int | float) or abs(told - asked.temperature) > 1e-6 * asked.temperature:
        raise Unusable(
            f"logprob_temperature is {told!r}; {asked.temperature:g} was asked for, and a teacher at another "
            "temperature than the student's is another teacher"
        )


def _triple(entry: Any, where: str) -> tuple[float, int, str | None]:
    if not isinstance(entry, list | tuple) or len(entry) < 2 or not isinstance(entry[1], int):
        raise Unusable(f"{where} is {entry!r}; [log-probability, id, text] was expected")
    if not isinstance(entry[0], int | float):
        raise Unusable(f"{where} has the log-probability {entry[0]!r}")
    return float(entry[0]), entry[1], entry[2] if len(entry) > 2 else None


def _number(entry: Any, t: int) -> float:
    value = entry.get("logprob") if isinstance(entry, Mapping) else None
    if not isinstance(value, int | float):
        raise Unusable(f"prompt_logprobs[{t}] has the log-probability {value!r}")
    return float(value)


def _top(top: tuple[tuple[int, float], ...], k: int, t: int) -> tuple[tuple[int, float], ...]:
    if len(top) != k or len({i for i, _ in top}) != k:
        raise Unusable(f"position {t} has {len(top)} of the {k} most likely tokens")
    return top
