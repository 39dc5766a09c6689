"""Two ranks in processes of their own, over gloo, against one rank: sharded adapters over a sharded frozen base."""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

CASES: dict[str, dict[str, Any]] = {"dora": {"unit_mib": 0, "checkpointing": True, "micro_tokens": 30}}


def run(case: str, folder: Path, rank: int, ranks: int) -> None:
    """Three updates with the reference inside the micro-batch; save, load, one more; rank 0 writes what it saw."""
    from lora_support import ADAPTER_OFF, LOGPROBS, REFERENCE, backend, batch_of, extension, stream, terms
    from safetensors.torch import save_file

    meet = f"file://{folder}/meet" if ranks > 1 else None
    added = extension(ADAPTER_OFF, rank=3, dora=case == "dora")
    made = backend(
        added, ADAPTER_OFF, rank=rank, ranks=ranks, lr=1e-3, rendezvous=meet, deadline_s=120.0, **CASES[case]
    )
    seen: list[Any] = []
    for step in range(3):
        batch = batch_of(step)
        result = made.update(batch, terms(0.1))
        scores = made.score(batch, [LOGPROBS, REFERENCE])
        seen.append([result.grad_norm, {name: column.tolist() for name, column in scores.items()}])
    made.save(folder / f"save_{ranks}")
    made.update(batch_of(7), terms(0.1))
    made.load(folder / f"save_{ranks}")
    made.update(batch_of(8), terms(0.1))
    made.save_model("main", folder / f"model_{ranks}")
    weights = stream(made)
    if rank == 0:
        (folder / f"seen_{ranks}.json").write_text(json.dumps(seen))
        save_file(weights, folder / f"weights_{ranks}.safetensors")
    made.close()


def entry(case: str, folder: str, rank: int, ranks: int) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)
    run(case, Path(folder), rank, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one(case: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run(case, tmp_path, 0, 1)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=entry, args=(case, str(tmp_path), rank, 2)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(150)
    assert [worker.exitcode for worker in workers] == [0, 0]
    one, two = (json.loads((tmp_path / f"seen_{n}.json").read_text()) for n in (1, 2))
    for (norm, scores), (other, others) in zip(one, two, strict=True):
        assert norm == pytest.approx(other, rel=1e-4)
        for name, column in scores.items():
            np.testing.assert_allclose(column, others[name], atol=2e-4)
    reference = [scores["reference.logprobs"] for _, scores in two]
    assert reference[0] != reference[1]  # another batch; the base itself did not move:
    for file in ("weights_{}.safetensors", "model_{}/model.safetensors", "model_{}/adapter/adapter_model.safetensors"):
        a, b = (load_file(tmp_path / file.format(n)) for n in (1, 2))
        assert a.keys() == b.keys()
        for name, tensor in a.items():
            torch.testing.assert_close(tensor, b[name], atol=3e-4, rtol=1e-3)
    state = json.loads((tmp_path / "save_2" / "state.json").read_text())
    assert state["policies"]["main"]["actor"]["updates"] == 3
