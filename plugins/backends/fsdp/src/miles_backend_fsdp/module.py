"""The module that `causal-lm` builds: a Hugging Face model, and a head that only computes what is asked for.

`forward` returns log-probabilities, entropies or values at needed positions only, never the logits of a whole batch.
All of it happens inside the forward of the root module, because that is where a sharding backend has the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from miles_backend_fsdp.attention import Rows
from miles_core.numerics.distill import ABSENT

#: Outputs of a value head.
VALUE_OUTPUTS = frozenset({"values", "bootstrap_value"})
#: Outputs that need log-probabilities of tokens other than the one that stands there.
DISTRIBUTION = frozenset({"token_logprobs", "topk_ids", "topk_logprobs", "rest_logprobs"})
#: Outputs of a language model's head.
LM_OUTPUTS = frozenset({"logprobs", "entropy"}) | DISTRIBUTION


@dataclass(frozen=True, slots=True)
class Kept:
    """The sets that sampling kept: `ids` int64 flat, `row` int64 the needed unit each belongs to, `has` bool [n].

    `outside` bool [n]: the unit's token is not in its own set; its log-probability is minus infinity.
    """

    ids: Tensor
    row: Tensor
    has: Tensor
    outside: Tensor


@dataclass(frozen=True, slots=True)
class Asked:
    """What the head computes at n needed units.

    `predictors` int64 [n] into the flattened grid; `targets` int64 [n]; `temperature` float32 [n] or `None` for 1;
    `kept` or `None` where no unit has a kept set; `ids` int64 [n, m] for `token_logprobs` and `rest_logprobs`; `k` for
    `topk_ids` and `topk_logprobs`, and for `rest_logprobs` where there are no `ids`; `ends` int64 [rows] into the grid
    for `bootstrap_value`.
    """

    names: tuple[str, ...]
    predictors: Tensor
    targets: Tensor
    temperature: Tensor | None = None
    kept: Kept | None = None
    ids: Tensor | None = None
    k: int = 0
    ends: Tensor | None = None


class CausalModule(nn.Module):
    """`lm` is the Hugging Face model; `value`, where the head is a value head, one linear output that begins at 0.

    `head` is `lm`, `value` (then `lm` has no head of its own), or `lm+value`: both on one trunk.
    """

    def __init__(self, lm: Any, vocabulary: int, head: str, logits_limit: int) -> None:
        super().__init__()
        self.lm = lm
        self.vocabulary = vocabulary  # without padding
        self.logits_limit = logits_limit  # elements
        self.value = None
        if head != "lm":
            with torch.device("meta"):  # where nothing is drawn
                self.value = nn.Linear(lm.config.hidden_size, 1, dtype=torch.float32)
            self.value.to_empty(device="cpu")
            nn.init.zeros_(self.value.weight)
            nn.init.zeros_(self.value.bias)
        self.gives = (LM_OUTPUTS if "lm" in head else frozenset()) | (VALUE_OUTPUTS if "value" in head else frozenset())
        if head == "value":
            lm.lm_head = nn.Identity()

    def forward(self, tokens: Tensor, positions: Tensor, rows: Rows | None, asked: Asked) -> dict[str, Tensor]:
        """Name -> [n], float32; `token_logprobs` [n, m], `topk_logprobs` [n, k], `topk_ids` int32 [n, k],
        `bootstrap_value` [rows]."""
        grid = self.lm.model(input_ids=tokens, position_ids=positions, use_cache=False, miles_rows=rows)[0]
        grid = grid.reshape(-1, grid.shape[-1])
        hidden = grid.index_select(0, asked.predictors)
        values: dict[str, Tensor] = {}
        if self.value is not None:
            if "values" in asked.names:  # cloned: no view may leave a sharded module
                values["values"] = self.value(hidden).float().squeeze(-1).clone()
            if asked.ends is not None:
                values["bootstrap_value"] = self.value(grid.index_select(0, asked.ends)).float().squeeze(-1).clone()
            asked = replace(asked, names=tuple(n for n in asked.names if n not in VALUE_OUTPUTS))
            if not asked.names:
                return values
        return values | self._head(hidden, asked)

    def _head(self, hidden: Tensor, asked: Asked) -> dict[str, Tensor]:
        """What the language model's head gives, in recomputed chunks where its logits would be many."""
        n = len(asked.predictors)
        step = max(1, self.logits_limit // self.lm.config.vocab_size)
        if n <= step:
            return self._read(hidden, asked)
        parts = []
        for start in range(0, n, step):
            part = hidden[start : start + step], _slice(asked, start, min(start + step, n))
            if torch.is_grad_enabled():
                parts.append(checkpoint(self._read, *part, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(self._read(*part))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _read(self, hidden: Tensor, asked: Asked) -> dict[str, Tensor]:
        logits = self.lm.lm_head(hidden)[:, : self.vocabulary].float()
        if asked.temperature is not None:
            logits = logits / asked.temperature[:, None]
        found: dict[str, Tensor] = {}
        full = functional.log_softmax(logits, -1) if set(asked.names) - {"logprobs"} else None
        if "logprobs" in asked.names:
            if asked.kept is not None:
                found["logprobs"] = _kept_logprobs(logits, asked.targets, asked.kept)
            elif full is not None:
                found["logprobs"] = -functional.nll_loss(full, asked.targets, reduction="none")
            else:
                found["logprobs"] = -functional.cross_entropy(logits, asked.targets, reduction="none")
        if full is not None and "entropy" in asked.names:
            found["entropy"] = -(full.exp() * full).sum(-1)
        if full is not None and DISTRIBUTION & set(asked.names):
            found |= _distribution(full if asked.kept is None else _cut(logits, asked.kept), asked)
        return found


def _slice(asked: Asked, start: int, end: int) -> Asked:
    kept = None
    if asked.kept is not None:
        inside = (asked.kept.row >= start) & (asked.kept.row < end)
        kept = Kept(
            asked.kept.ids[inside],
            asked.kept.row[inside] - start,
            asked.kept.has[start:end],
            asked.kept.outside[start:end],
        )
    return Asked(
        asked.names,
        asked.predictors[start:end],
        asked.targets[start:end],
        None if asked.temperature is None else asked.temperature[start:end],
        kept,
        None if asked.ids is None else asked.ids[start:end],
        asked.k,
    )


def _cut(logits: Tensor, kept: Kept) -> Tensor:
    """[n, vocabulary]: log-softmax over each unit's kept set, `ABSENT` outside it."""
    outside = kept.has[:, None].expand_as(logits).clone()
    outside[kept.row, kept.ids] = False
    return functional.log_softmax(logits.masked_fill(outside, ABSENT), -1).masked_fill(outside, ABSENT)


def _distribution(full: Tensor, asked: Asked) -> dict[str, Tensor]:
    """What of the whole distribution is asked for: at given ids, at the most likely ones, and outside of either."""
    found: dict[str, Tensor] = {}
    top = full.detach().topk(asked.k, -1).indices if asked.k else None
    ids = asked.ids if asked.ids is not None else top
    if "topk_ids" in asked.names and top is not None:
        found["topk_ids"] = top.int()
    if "topk_logprobs" in asked.names and top is not None:
        found["topk_logprobs"] = full.gather(1, top)
    if "token_logprobs" in asked.names and asked.ids is not None:
        found["token_logprobs"] = full.gather(1, asked.ids)
    if "rest_logprobs" in asked.names and ids is not None:
        # The mass of the others summed up itself: 1 − Σ p would be rounding noise where the rest is small.
        found["rest_logprobs"] = torch.logsumexp(full.scatter(1, ids, ABSENT), -1)
    return found


def _kept_logprobs(logits: Tensor, targets: Tensor, kept: Kept) -> Tensor:
    """Log-probabilities renormalised over each unit's kept set; over the whole vocabulary where it has none."""
    chosen = logits.gather(1, targets[:, None]).squeeze(1)
    values = logits[kept.row, kept.ids]
    top = torch.full_like(chosen, -torch.inf).scatter_reduce(0, kept.row, values.detach(), "amax")
    top = torch.where(kept.has, top, torch.zeros_like(top))
    mass = torch.zeros_like(chosen).index_add(0, kept.row, (values - top[kept.row]).exp())
    inside = torch.where(kept.has, mass, torch.ones_like(mass)).log() + top
    if not bool(kept.has.all()):
        inside = torch.where(kept.has, inside, torch.logsumexp(logits, -1))
    return (chosen - inside).masked_fill(kept.outside, -torch.inf)
