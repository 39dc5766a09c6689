"""Two ranks in processes of their own, over gloo, against one rank."""

from __future__ import annotations

import json
import multiprocessing
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsdp_support import BOOTSTRAP, SHARES, TERMS, VALUES, batch_of, bound, make_backend, random_groups, source, weights
from safetensors.torch import load_file, save_file

from miles_backend_fsdp.config import Dtype, FsdpConfig
from miles_core.config.schema import OptimizerConfig
from miles_core.contracts.learning import ENTROPY, LOGPROBS, Output
from miles_core.errors import BackendError

OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-3, max_grad_norm=0.3)  # a large eps: rounding is not amplified
CASES = {
    "plain": {"micro_tokens": 40},
    "blocks": {"micro_tokens": 10**6, "unit_mib": 0, "checkpointing": True},
    "bfloat16": {"dtype": "bfloat16", "unit_mib": 0},
    "idle": {"micro_tokens": 10**6, "one": True},
    "shares": {"micro_tokens": 40, "unit_mib": 0, "shares": True},
    "trainable": {"micro_tokens": 40, "unit_mib": 0, "trainable": ["model.layers.1.self_attn.*", "model.norm.*"]},
}


def setting(case: str) -> tuple[FsdpConfig, dict[str, Any]]:
    options = dict(CASES[case])
    changes = {"one": options.pop("one", False), "shares": options.pop("shares", False)}
    changes["options"] = {"trainable": options.pop("trainable", [])}
    if "dtype" in options:
        options["dtype"] = Dtype[options["dtype"]]
    return FsdpConfig(**options), changes


def batches(one: bool) -> list[Any]:
    found = [batch_of(random_groups(seed), seed) for seed in range(3)]
    return [batch.select([1]) for batch in found] if one else found


def run(case: str, folder: Path, rank: int, ranks: int) -> None:
    """Train three updates, save, train one more; rank 0 writes what it saw."""
    torch.set_num_threads(1)
    base, changes = setting(case)
    meet = f"file://{folder}/meet" if ranks > 1 else None
    config = replace(base, rendezvous=meet, deadline_s=120.0)
    backend = make_backend(
        architecture=source("qwen3_moe" if case == "blocks" else "qwen3"),
        config=config,
        optimizer=OPTIMIZER,
        options=changes["options"],
        roles={"reference": {"init": "actor", "update": "frozen"}, **(SHARES if changes["shares"] else {})},
        rank=rank,
        ranks=ranks,
    )
    terms, outputs = [bound()], [LOGPROBS, ENTROPY]
    if case in ("plain", "idle"):  # a rank that has nothing to do gives columns of the same type and width
        outputs += [Output(name=name, k=3) for name in ("topk_ids", "topk_logprobs", "rest_logprobs")]
    if changes["shares"]:
        terms, outputs = TERMS, [LOGPROBS, VALUES, BOOTSTRAP]
    given = batches(changes["one"])
    seen: list[Any] = []
    for batch in given:
        scores = backend.score(batch, outputs)
        result = backend.update(batch, terms)
        metrics = {name: list(pair) for name, pair in sorted(result.metrics.items())}
        seen.append([metrics, result.grad_norm, {name: column.tolist() for name, column in scores.items()}])
    backend.save(folder / f"save_{ranks}")
    backend.blend("main", "reference", "actor", 0.5)
    backend.update(given[0], terms)
    whole = weights(backend)
    backend.save_model("main", folder / f"model_{ranks}")
    if rank == 0:
        (folder / f"seen_{ranks}.json").write_text(json.dumps(seen))
        save_file({k: v.float().clone() for k, v in whole.items()}, folder / f"weights_{ranks}.safetensors")
    backend.close()


def entry(case: str, folder: str, rank: int, ranks: int) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    run(case, Path(folder), rank, ranks)


def spawn(case: str, folder: Path, ranks: int) -> None:
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=entry, args=(case, str(folder), rank, ranks)) for rank in range(ranks)]
    for process in started:
        process.start()
    for process in started:
        process.join(timeout=240)
    codes = [process.exitcode for process in started]
    for process in started:
        if process.is_alive():
            process.kill()
    assert codes == [0] * ranks


def close(a: Any, b: Any, case: str) -> bool:
    tolerance = {"rtol": 0.05, "atol": 0.05} if case == "bfloat16" else {"rtol": 2e-4, "atol": 1e-5}
    return bool(np.allclose(a, b, **tolerance))


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(CASES))
def test_two_ranks_equal_one(case: str, tmp_path: Path) -> None:
    run(case, tmp_path, 0, 1)
    spawn(case, tmp_path, 2)
    one, two = (json.loads((tmp_path / f"seen_{n}.json").read_text()) for n in (1, 2))
    for (metrics, norm, scores), (others, other_norm, other_scores) in zip(one, two, strict=True):
        assert set(metrics) == set(others) and set(scores) == set(other_scores)
        for name in metrics:
            assert close(metrics[name], others[name], case), name
        assert close(norm, other_norm, case)
        for name in scores:
            assert close(scores[name], other_scores[name], case)
    first, second = (load_file(tmp_path / f"weights_{n}.safetensors") for n in (1, 2))
    for name in first:
        assert close(first[name], second[name], case), name
    # What two ranks saved loads on one, and the run goes on as theirs did.
    base, changes = setting(case)
    backend = make_backend(
        architecture=source("qwen3_moe" if case == "blocks" else "qwen3"),
        config=base,
        optimizer=OPTIMIZER,
        options=changes["options"],
        roles=SHARES if changes["shares"] else {},
    )
    backend.load(tmp_path / "save_2")
    backend.update(batches(changes["one"])[0], TERMS if changes["shares"] else [bound()])
    for name, tensor in weights(backend).items():
        assert close(tensor.float(), second[name], case), name
    backend.close()
    assert (tmp_path / "model_2" / "model.safetensors").is_file()


def test_ranks_without_a_place_to_meet_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # whatever other tests of this process left
    with pytest.raises(BackendError, match="2 trainer ranks have no place to meet"):
        make_backend(rank=0, ranks=2)
