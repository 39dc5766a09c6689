"""`miles plan` of a run that trains a part of a model: the sizes that it prints are those of the trainer."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_lora_config import RUN

from miles_core.cli import main
from miles_core.config.compose import load
from miles_core.discovery import scan
from miles_core.export import export_cached
from miles_core.prepare import prepare
from miles_core.wiring import TrainerWorker

WIDTH = {"F32": 4, "BF16": 2}
FOLLOWS = "roles.reference={init: actor, update: copy}"
BASE = "roles.reference={init: actor}"
LAYERS, R = 2, 2
SHAPES = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 64), (32, 64), (64, 32)]  # (in, out) of each projection
ADAPTERS = LAYERS * sum(R * (i + o) for i, o in SHAPES)
NORMS = LAYERS * (2 * 32 + 2 * 16) + 32
WHOLE = LAYERS * sum(i * o for i, o in SHAPES) + NORMS + 13 * 32


def bytes_of(text: str) -> int:
    """What `1.5 MiB` says; printed to three places where it is small."""
    return round(float(text.removesuffix(" MiB")) * 2**20)


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Lines of `miles plan` by role, and its exit code."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)

    def plan(*overrides: str) -> tuple[dict[str, str], int]:
        with pytest.raises(SystemExit) as leaving:
            main(["plan", "run.yaml", *overrides])
        out = capfd.readouterr().out
        lines = re.findall(r"^  main/(\w+): (.*)$", out, re.MULTILINE)
        return ({"all": out} | dict(lines)), int(str(leaving.value.code))

    return plan


def trainer(*overrides: str) -> TrainerWorker:
    catalogue = scan()
    run = load(Path("run.yaml"), overrides, catalogue=catalogue)
    wiring = prepare(run, catalogue, Path("runs"), export_cached).wiring
    return TrainerWorker(wiring, 0, 1, lambda: False)


@pytest.mark.parametrize(
    ("overrides", "trained", "sent"),
    [
        ([], ADAPTERS, 4 * WHOLE),
        (["backend.dtype=bfloat16", "rollout.dtype=bfloat16"], ADAPTERS, 2 * WHOLE),
        (["extensions.lora.train_also=['*norm.weight']"], ADAPTERS + NORMS, 4 * WHOLE),
        (["extensions.lora.dora=true"], ADAPTERS + LAYERS * sum(o for _, o in SHAPES), 4 * WHOLE),
        (["extensions=null", "model.trainable=['model.layers.1.*']"], (WHOLE - 13 * 32 - 32) // 2, 4 * WHOLE),
    ],
)
def test_the_plan_counts_what_the_trainer_trains_sends_and_keeps(
    planned: Any, overrides: list[str], trained: int, sent: int, tmp_path: Path
) -> None:
    given = [*overrides, FOLLOWS, "rollout.count=2"]
    found, code = planned(*given)
    assert code == 0, found["all"]
    whole = WHOLE + (trained if "extensions=null" not in overrides else 0)
    whole -= NORMS if any("norm" in o for o in overrides) else 0
    for text in (
        f"{whole} parameters, {trained} of them trained",
        f"{(4 * whole + 12 * trained) / 2**20:.3f} MiB to train in float32",
        f"{12 * trained / 2**20:.3f} MiB in a checkpoint; {2 * sent / 2**20:.3f} MiB to 2 engine(s) a publication",
    ):
        assert text in found["actor"]
    assert f"{4 * whole / 2**20:.3f} MiB to hold in float32, {4 * trained / 2**20:.3f} MiB" in found["reference"]
    worker = trainer(*given)
    assert sum(int(np.prod(s.shape)) * WIDTH[s.dtype] for s in worker.specs("main")) == sent
    worker.save(tmp_path / "saved")
    kept = load_file(tmp_path / "saved" / "rank_00000_of_00001.safetensors")
    for role, width in (("actor", 12), ("reference", 4)):
        assert sum(t.nbytes for name, t in kept.items() if f"main/{role}/" in name) == width * trained
    worker.close()


def test_adapters_alone_are_what_is_sent(planned: Any) -> None:
    worker = trainer(BASE)
    worker.save_model("main", Path("base"))
    worker.close()
    drawn = planned(BASE, "extensions.lora.export=adapter")
    assert drawn[1] == 2 and "models are main: drawn at random" in drawn[0]["all"]
    based = (BASE, "extensions.lora.export=adapter", "model.source=./base", "model.architecture=null")
    found, code = planned(*based)
    assert code == 0, found["all"]
    assert f"{4 * ADAPTERS / 2**20:.3f} MiB to 1 engine(s) a publication" in found["actor"]
    worker = trainer(*based)
    assert sum(int(np.prod(s.shape)) * WIDTH[s.dtype] for s in worker.specs("main")) == 4 * ADAPTERS
    worker.close()


def test_without_adapters_all_is_trained_and_sent_in_the_type_of_the_backend(planned: Any) -> None:
    worker = trainer(BASE, "backend.dtype=bfloat16", "rollout.dtype=bfloat16")
    worker.save_model("main", Path("base"))  # two bytes a parameter
    worker.close()
    based = (BASE, "extensions=null", "model.source=./base", "model.architecture=null")
    for more, width in (((), 4), (("backend.dtype=bfloat16", "rollout.dtype=bfloat16"), 2)):
        found, code = planned(*based, *more)
        assert code == 0, found["all"]
        kept, sent = (f"{n * WHOLE / 2**20:.3f} MiB" for n in (12, width))
        assert (
            f"parameters, {16 * WHOLE / 2**20:.3f} MiB to train in float32, {kept} in a checkpoint; {sent} to 1"
            in (found["actor"])
        )


def test_what_a_scorer_gives_is_no_model_of_the_run(planned: Any) -> None:
    far = "scorers={far: {use: http-teacher, url: 'http://127.0.0.1:1'}}"
    distil = "algorithm={use: opd}"
    found, code = planned(BASE, far, distil, "extensions=null", "roles.teacher={scorer: far}")
    assert code == 0 and found["teacher"] == "no model of this run, asked of scorer far", found["all"]


def test_targets_that_match_nothing_are_refused_by_the_plan(planned: Any) -> None:
    found, code = planned(BASE, "extensions.lora.targets=['*_projection']")
    assert code == 2 and "has '*_projection', which no linear layer of role 'actor' matches" in found["all"]


def test_a_model_that_needs_numbers_is_said_to(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from miles_backend_fsdp.causal_lm import CausalLM

    build = CausalLM.build

    def picky(self: Any, source: Any, seed: int, *, head: str = "lm") -> Any:
        module = build(self, source, seed, head=head)
        assert float(module.lm.model.norm.weight.sum()) > 0
        return module

    worker = trainer(BASE)
    worker.save_model("main", Path("base"))
    worker.close()
    monkeypatch.setattr(CausalLM, "build", picky)
    found, code = planned(BASE, "model.source=./base", "model.architecture=null")
    told = f"{WHOLE} parameters; what of them is trained and sent is known once the model is built: its adapter needs"
    assert code == 0 and told in found["actor"] and "MiB" not in found["actor"]
    assert "its size is known once it is built" in planned(BASE)[0]["actor"]


@pytest.mark.parametrize("missing", ["miles_algo_lora.trainer", "miles_backend_fsdp.causal_lm", "torch.overrides"])
def test_a_controller_without_what_trains_plans_all_the_same(
    planned: Any, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.delitem(sys.modules, "miles_core.numerics._dry", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    found, code = planned(BASE)
    assert code == 0, found["all"]
    assert found["actor"] == "architecture -> drawn at random as qwen3; its size is known once it is built"
