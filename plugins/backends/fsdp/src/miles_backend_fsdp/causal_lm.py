"""Model adapter `causal-lm`: Hugging Face causal language models, for any backend that runs plain modules.

Weights are built without transformers' loading machinery, which patches process-wide state while other threads of a
run may load a model too: modules are made on the meta device, then filled from safetensors or from a private generator.
Not here: multi-modal models, quantised checkpoints, and model-internal losses (a router's balance loss stays unused).
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from miles_backend_fsdp import hf_folder, layout, names, trainable
from miles_backend_fsdp.architecture import check_plain, config_of, empty, unverified_module
from miles_backend_fsdp.attention import Rows
from miles_backend_fsdp.module import Asked, CausalModule, Kept
from miles_backend_fsdp.random_weights import fill
from miles_core.contracts.weights import TensorSpec
from miles_core.errors import NEW_RUN, CapabilityError, LearnerError, ModelSourceError

if TYPE_CHECKING:
    from pathlib import Path

    from miles_backend_fsdp.config import CausalLMConfig
    from miles_core.columns import Batch
    from miles_core.contracts.learning import Output
    from miles_core.contracts.model import ModelSource
    from miles_core.records import Array

HEADS = ("lm", "value", "lm+value")
WIRE_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


class CausalLM:
    """See `miles_core.contracts.model.ModelAdapter`. One adapter may build several modules (roles) of one policy."""

    def __init__(self, config: CausalLMConfig, *, share_prefixes: bool) -> None:
        self._config = config
        self._share = share_prefixes
        self._costs = layout.Costs()
        self._sources: WeakKeyDictionary[Any, ModelSource] = WeakKeyDictionary()

    # --- building ---------------------------------------------------------------------------------------------------

    def build(self, source: ModelSource, seed: int, *, head: str = "lm") -> CausalModule:
        """The module in float32 on CPU, in eval mode. `head` is `lm`, `value` or `lm+value`; a value head begins at 0.

        Raises `ModelSourceError` (unknown, unverified or quantised architectures, weights that do not fit) and
        `CapabilityError` for another head.
        """
        if head not in HEADS:
            raise CapabilityError(f"causal-lm has no head {head!r}", fix="write " + " or ".join(HEADS[:2]))
        config = config_of(source, unverified=self._config.unverified)
        vocabulary = config.vocab_size
        multiple = self._config.pad_vocab_to or 1
        config.vocab_size = -(-vocabulary // multiple) * multiple
        limit = self._config.head_mib * (1 << 18)  # float32 elements
        if self._config.unverified:
            if config.vocab_size != vocabulary:
                raise ModelSourceError("pad_vocab_to with an unverified architecture", fix="set pad_vocab_to: null")
            lm = unverified_module(source, config, seed)
            check_plain(lm)
            module = CausalModule(lm, vocabulary, head, limit)
        else:
            lm = empty(config)
            module = CausalModule(lm, vocabulary, head, limit)
            fill(module, seed, config.initializer_range, vocabulary)
            if source.folder is not None:
                self._load(module, source.folder, head)
        module.lm.config._attn_implementation = "miles_rows"
        trainable.restrict(module, self._config.trainable)
        module.eval()  # no dropout, and none of a router's noise
        self._costs = _costs(module)
        self._sources[module] = source
        return module

    @torch.no_grad()
    def _load(self, module: CausalModule, folder: Path, head: str) -> None:
        wanted: dict[str, torch.Tensor] = {}
        for name, parameter in module.named_parameters():
            if name.startswith(names.PREFIX):
                wanted |= dict(names.parts(name.removeprefix(names.PREFIX), parameter.detach(), module.vocabulary))
        missing, extra = hf_folder.read(folder, wanted)
        tied = bool(module.lm.config.tie_word_embeddings)
        extra = [n for n in extra if not ((tied or head == "value") and n == "lm_head.weight")]
        if missing or extra:
            raise ModelSourceError(
                f"the weights in {folder} are not those of {type(module.lm).__name__}: "
                f"missing {missing[:4] or 'none'}, unknown {extra[:4] or 'none'}",
                fix="use a complete checkpoint of this architecture",
            )

    def blocks(self, module: Any) -> Sequence[Any]:
        """The decoder layers."""
        return list(module.lm.model.layers)

    # --- computing --------------------------------------------------------------------------------------------------

    def cost(self, lengths: Array) -> Array:
        """float64 [n]: a linear and a quadratic part, in the units of the last module built."""
        n = np.asarray(lengths, np.float64)
        return n * self._costs.token + n * n * self._costs.pair

    def outputs(self, module: Any, micro: Batch, want: Sequence[Output]) -> Mapping[str, Any]:
        """Output name -> float32 [units, …]; 0 at units that are not trainable, and at first tokens.

        `bootstrap_value` stands at the last unit of each trajectory that has trainable units: the value head's output
        at that very token. It is 0 elsewhere.

        Raises `CapabilityError` for an output that the module's head does not give, and `LearnerError` where a
        trajectory's sampling cannot be applied.
        """
        wanted = tuple(sorted({output.name for output in want}))
        known = module.gives
        if set(wanted) - known or not wanted:
            raise CapabilityError(
                f"causal-lm was asked for {sorted(wanted)}; this head gives {sorted(known)}",
                fix="ask a role with the right head, or use a model adapter that gives the output",
            )
        plan = layout.build(
            micro,
            choice=str(self._config.layout.value),
            share=self._share,
            pack_tokens=self._config.pack_tokens,
            costs=self._costs,
            to_end="bootstrap_value" in wanted,
        )
        device = next(module.parameters()).device

        def put(x: Array) -> Any:
            return torch.from_numpy(np.ascontiguousarray(x)).to(device)

        rows = None
        if plan.buckets is not None and plan.inverse is not None:
            rows = Rows(tuple(put(bucket) for bucket in plan.buckets), put(plan.inverse))
        asked = _asked(micro, plan, wanted, want, put)
        _check_ids(asked, module.vocabulary)
        with torch.set_grad_enabled(torch.is_grad_enabled() and any(output.grad for output in want)):
            found = module(put(plan.tokens), put(plan.positions), rows, asked)
            at = dict.fromkeys(found, put(plan.units))
            if plan.end_units is not None:
                at["bootstrap_value"] = put(plan.end_units)
            return {
                name: value.new_zeros((micro.units, *value.shape[1:])).index_copy(0, at[name], value)
                for name, value in found.items()
            }

    # --- writing ----------------------------------------------------------------------------------------------------

    def export(self, module: Any, tensors: Iterator[tuple[str, Any]]) -> Iterator[tuple[TensorSpec, Any]]:
        """Hugging Face names as in a checkpoint: tied tensors once, no vocabulary padding, one tensor per expert.

        The tensors that come out are views of those that went in. A value head has no such name and is left out.
        """
        for name, tensor in tensors:
            if not name.startswith(names.PREFIX):
                continue
            for part, view in names.parts(name.removeprefix(names.PREFIX), tensor, module.vocabulary):
                yield TensorSpec(name=part, shape=tuple(view.shape), dtype=WIRE_TYPES[view.dtype]), view

    def save_config(self, module: Any, folder: Path) -> None:
        """Write `config.json`, and `generation_config.json` where the source had one."""
        config = copy.deepcopy(module.lm.config)
        config.vocab_size = module.vocabulary
        config.architectures = [self._class_name(module)]
        config.save_pretrained(folder)
        source = self._sources.get(module)
        if source is not None and source.folder is not None:
            given = source.folder / "generation_config.json"
            if given.is_file():
                shutil.copyfile(given, folder / given.name)

    def _class_name(self, module: Any) -> str:
        # A sharding backend may have made a subclass of the module's class on the spot.
        return next(c.__name__ for c in type(module.lm).__mro__ if c.__module__.startswith("transformers."))


def _costs(module: CausalModule) -> layout.Costs:
    config = module.lm.config
    active = 0.0
    for name, parameter in module.lm.model.layers.named_parameters():
        share = 1.0
        if ".experts." in name:
            share = config.num_experts_per_tok / config.num_experts
        active += parameter.numel() * share
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Attention at these lengths is bound by memory rather than arithmetic, hence the factor over its 4 flops.
    return layout.Costs(token=2.0 * active, pair=8.0 * config.num_hidden_layers * config.num_attention_heads * head_dim)


def _asked(micro: Batch, plan: layout.Layout, wanted: tuple[str, ...], want: Sequence[Output], put: Any) -> Asked:
    trajectory = micro.trajectory_of_unit[plan.units]
    targets = micro.columns["tokens"][plan.units].astype(np.int64)
    temperature = micro.columns.get("temperature")
    tempered = None
    if temperature is not None and len(trajectory):
        per_unit = temperature[trajectory].astype(np.float32)
        _refuse(micro, trajectory, ~(per_unit > 0), "was sampled with a temperature that is not above 0")
        if (per_unit != 1).any():
            tempered = put(per_unit)
    kept = _kept(micro, plan.units, trajectory, targets, put)
    ids, k = _given_ids(micro, plan.units, want), _given_k(want)
    ends = None if plan.ends is None else put(plan.ends)
    return Asked(wanted, put(plan.predictors), put(targets), tempered, kept, None if ids is None else put(ids), k, ends)


def _given_ids(micro: Batch, units: Array, want: Sequence[Output]) -> Array | None:
    """int64 [n, m]: the id columns of `inputs`, side by side."""
    columns = {o.inputs for o in want if o.name == "token_logprobs" or (o.name == "rest_logprobs" and o.inputs)}
    if not columns:
        return None
    if len(columns) > 1 or () in columns:
        raise CapabilityError(
            f"causal-lm was asked for token_logprobs and rest_logprobs at the ids of {sorted(columns)} in one forward",
            fix="name at least one column of ids, and the same ones in every output of a forward",
        )
    return np.concatenate(
        [micro.columns[name][units].astype(np.int64).reshape(len(units), -1) for name in next(iter(columns))], axis=1
    )


def _given_k(want: Sequence[Output]) -> int:
    """The k of the top-k outputs; 0 where there is none."""
    asked = [o for o in want if o.name in ("topk_ids", "topk_logprobs") or (o.name == "rest_logprobs" and not o.inputs)]
    if any(o.k < 1 or o.k != asked[0].k for o in asked):
        raise CapabilityError(
            f"causal-lm was asked for {sorted((o.name, o.k) for o in asked)} in one forward",
            fix="give every top-k output of a forward the same k, at least 1",
        )
    return asked[0].k if asked else 0


def _check_ids(asked: Asked, vocabulary: int) -> None:
    if asked.k > vocabulary:
        raise CapabilityError(
            f"causal-lm was asked for the {asked.k} most likely of {vocabulary} tokens",
            fix=f"take a k of {vocabulary} or less {NEW_RUN}",
        )
    if (
        asked.ids is not None
        and asked.ids.numel()
        and not (0 <= int(asked.ids.min()) <= int(asked.ids.max()) < vocabulary)
    ):
        raise LearnerError(
            f"token ids from {int(asked.ids.min())} to {int(asked.ids.max())} were asked of a model with {vocabulary}",
            fix="take the ids from a model with the same vocabulary",
        )


def _kept(micro: Batch, units: Array, trajectory: Array, targets: Array, put: Any) -> Kept | None:
    counts = micro.columns.get("keep_counts")
    cut = np.zeros(len(units), bool)
    if "top_p" in micro.columns:
        cut |= micro.columns["top_p"][trajectory] < 1
    if "top_k" in micro.columns:
        cut |= micro.columns["top_k"][trajectory] > 0
    demonstrated = micro.columns["origin"][units] == 3 if "origin" in micro.columns else np.zeros(len(units), bool)
    if counts is None or "keep_ids" not in micro.items:
        _refuse(micro, trajectory, cut & ~demonstrated, "was sampled with top_p or top_k, and its keep_ids are missing")
        return None
    flat, _ = micro.items["keep_ids"]
    counts = counts.astype(np.int64)
    starts = np.cumsum(counts) - counts
    own = counts[units]
    if not own.any():
        return None
    row = np.repeat(np.arange(len(units)), own)
    at = np.repeat(starts[units] - (np.cumsum(own) - own), own) + np.arange(len(row))
    ids = flat[at].astype(np.int64)
    inside = np.zeros(len(units), bool)
    inside[row[ids == targets[row]]] = True
    return Kept(put(ids), put(row), put(own > 0), put((own > 0) & ~inside))


def _refuse(micro: Batch, trajectory: Array, bad: Array, what: str) -> None:
    if bad.any():
        found = micro.trajectory_ids[int(trajectory[np.flatnonzero(bad)[0]])]
        raise LearnerError(f"trajectory {found!r} {what}", fix="check what the engine returned for it")
