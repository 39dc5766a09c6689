"""Toy model adapter (kind `model`) and toy resolver: tables from an architecture, a folder, or a `.toy` file."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file, save_file

from miles_core.contracts.weights import Tensor, TensorSpec
from miles_core.errors import CapabilityError, ModelSourceError
from miles_core.testing.toys.autodiff import Var
from miles_core.testing.toys.table import (
    Array,
    ToyModel,
    contexts,
    entropy_of,
    initial_weights,
    log_softmax,
    pick_logprobs,
    rest_logprobs,
    token_logprobs,
    top_ids,
)

if TYPE_CHECKING:
    from miles_core.columns import Batch
    from miles_core.contracts.learning import Output
    from miles_core.contracts.model import ModelSource

WEIGHTS_FILE = "model.safetensors"


class ToyAdapter:
    """Builds `ToyModel`s and runs them over micro-batches. `vocab_size` is what an architecture may leave out."""

    def __init__(self, vocab_size: int, order: int = 2, scale: float = 0.01) -> None:
        self._defaults = {"model_type": "toy", "vocab_size": vocab_size, "order": order, "scale": scale}

    def build(self, source: ModelSource, seed: int, *, head: str = "lm") -> ToyModel:
        config = self._defaults | dict(source.architecture or _read_config(source))
        if config["model_type"] != "toy":
            raise ModelSourceError(
                f"the toy adapter was given model_type {config['model_type']!r}; it builds 'toy' only",
                fix="set model.architecture.model_type: toy, or choose the adapter of that family",
            )
        weights = initial_weights(config, seed, head)
        if source.folder is not None and head == "lm":
            weights = _read_weights(source.folder / WEIGHTS_FILE, weights)
        return ToyModel(config, weights)

    def blocks(self, module: ToyModel) -> Sequence[Var]:
        return list(module.params.values())

    def cost(self, lengths: Array) -> Array:
        return np.asarray(lengths, np.float64)

    def outputs(self, module: ToyModel, micro: Batch, want: Sequence[Output]) -> Mapping[str, Any]:
        """Outputs are float32 numbers (as columns are), so that scoring twice gives a ratio of exactly 1."""
        tokens = np.asarray(micro.columns["tokens"], np.int64)
        ctx = contexts(tokens, micro.lengths, module.order)
        first = np.zeros(micro.units, bool)
        first[micro.offsets[:-1][micro.lengths > 0]] = True
        found: dict[str, Any] = {}
        scaled: Var | None = None
        for output in want:
            if output.name == "values":
                result = module.values(ctx)
            else:
                if scaled is None:
                    temperature = np.asarray(micro.per_unit("temperature"), np.float64)
                    scaled = module.logits(ctx) / np.where(temperature > 0, temperature, 1.0)[:, None]
                keep = keep_mask(micro, tokens, module.vocab_size)
                if output.name == "logprobs":
                    result = pick_logprobs(scaled, tokens, keep) * ~first
                elif output.name == "entropy":
                    result = entropy_of(scaled) * ~first
                elif output.name in ("topk_ids", "topk_logprobs", "token_logprobs", "rest_logprobs"):
                    ids = _ids_of(output, micro, scaled.value, keep)
                    if output.name == "topk_ids":
                        found[output.name] = np.where(first[:, None], 0, ids).astype(np.int32)
                        continue
                    if output.name == "rest_logprobs":
                        result = rest_logprobs(scaled, ids, keep) * ~first
                    else:
                        result = token_logprobs(scaled, ids, keep) * ~first[:, None]
                else:
                    raise CapabilityError(
                        f"the toy adapter has no output {output.name!r}; it has logprobs, entropy, values, topk_ids, "
                        "topk_logprobs, token_logprobs and rest_logprobs",
                        fix="choose a part that needs none of the others",
                    )
            rounded = Var(result.value.astype(np.float32), [(result, lambda g: g)])
            found[output.name] = rounded if output.grad else rounded.value
        return found

    def export(self, module: ToyModel, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[TensorSpec, Tensor]]:
        for name, tensor in tensors:
            yield TensorSpec(name=name, shape=tuple(tensor.shape), dtype="F32"), tensor

    def save_config(self, module: ToyModel, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(module.config, indent=1, sort_keys=True), encoding="utf-8")


def _ids_of(output: Output, micro: Batch, scaled: Array, keep: Array) -> Array:
    """int64 [units, m]: the ids that an output speaks of: those of its columns, or the k most likely ones."""
    if output.inputs:
        return np.concatenate(
            [micro.columns[n].reshape(micro.units, -1) for n in output.inputs], axis=1, dtype=np.int64
        )
    if not 1 <= output.k <= scaled.shape[1]:
        raise CapabilityError(
            f"the toy adapter was asked for {output.name!r} with k={output.k} of {scaled.shape[1]} tokens",
            fix="give a k from 1 to the size of the vocabulary, or columns of ids",
        )
    return top_ids(scaled, keep, output.k)


def keep_mask(micro: Batch, tokens: Array, vocab_size: int) -> Array:
    """bool [units, vocabulary]: the ids that sampling kept. All of them for a unit without a set."""
    keep = np.ones((len(tokens), vocab_size), bool)
    counts = micro.columns.get("keep_counts")
    if counts is None or "keep_ids" not in micro.items:
        return keep
    flat, _ = micro.items["keep_ids"]
    keep[counts > 0] = False
    keep[np.repeat(np.arange(len(tokens)), counts), flat] = True
    return keep


def score_tokens(weights: Mapping[str, Array], config: Mapping[str, Any], tokens: Sequence[int]) -> Array:
    """float64 [n]: log-probability of each token of one sequence at temperature 1; 0 for the first."""
    model = ToyModel(config, weights)
    ids = np.asarray(tokens, np.int64)
    logp = log_softmax(model.logits(contexts(ids, np.array([len(ids)]), model.order)).value)
    out = logp[np.arange(len(ids)), ids]
    out[:1] = 0.0
    return np.asarray(out)


def save_model(adapter: ToyAdapter, module: ToyModel, weights: Mapping[str, Array], folder: Path) -> None:
    """A folder that `ToyAdapter.build` loads: `config.json` and `model.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    adapter.save_config(module, folder)
    save_file({name: np.ascontiguousarray(value) for name, value in weights.items()}, folder / WEIGHTS_FILE)


def _read_config(source: ModelSource) -> dict[str, Any]:
    if source.folder is None:
        return {}
    path = source.folder / "config.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"cannot read {path}: {error}", fix="name a folder with a config.json") from error


def _read_weights(path: Path, expected: Mapping[str, Array]) -> dict[str, Array]:
    try:
        found = load_file(path)
    except Exception as error:  # safetensors raises its own class, and OSError
        raise ModelSourceError(f"cannot read {path}: {error}", fix="export the model again") from error
    for name, value in expected.items():
        if name not in found or found[name].shape != value.shape or found[name].dtype != value.dtype:
            have = "missing" if name not in found else f"{found[name].dtype}{list(found[name].shape)}"
            raise ModelSourceError(
                f"{path}: tensor {name!r} is {have}; the config asks for {value.dtype}{list(value.shape)}",
                fix="make config.json and model.safetensors agree",
            )
    return {name: found[name] for name in expected}


class ToyResolver:
    """Turns a `.toy` file (JSON: config, and bias of a model without tables) into a folder; safe to repeat."""

    def resolve(self, source: str, cache: Path, deadline_s: float) -> Path:
        path = Path(source.removeprefix("toy:"))
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            config = {"model_type": "toy", "order": 2, **data["config"]}
            bias = np.asarray(data["bias"], np.float32)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelSourceError(
                f"cannot read {path}: {error!r}", fix="give JSON with `config` and `bias`"
            ) from error
        name = f"{path.stem}-{_digest(path)}"
        target = cache / name
        if _whole(target):
            return target
        cache.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=name, dir=cache))
        weights = {n: np.zeros_like(w) for n, w in initial_weights(config, 0, "lm").items()} | {"bias": bias}
        adapter = ToyAdapter(int(config["vocab_size"]))
        save_model(adapter, ToyModel(config, weights), weights, draft)
        if not _whole(target):
            shutil.rmtree(target, ignore_errors=True)
        try:
            os.rename(draft, target)
        except OSError:  # another process was first
            if not _whole(target):
                raise
            shutil.rmtree(draft)
        return target


def _whole(folder: Path) -> bool:
    """Renamed into place as a whole, and nothing of it is gone."""
    return all((folder / name).exists() for name in ("config.json", WEIGHTS_FILE))


def _digest(path: Path) -> str:
    import xxhash

    return str(xxhash.xxh3_64_hexdigest(path.read_bytes()))
