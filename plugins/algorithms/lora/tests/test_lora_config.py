"""What a run file with adapters is refused for, before anything of the run is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_core.cli import main
from miles_core.config.compose import load
from miles_core.discovery import scan
from miles_core.errors import CombinationError
from miles_core.export import export_cached
from miles_core.prepare import prepare

RUN = """
run: {name: adapted, seed: 1, steps: 2}
model:
  use: causal-lm
  tokenizer: chars
  alphabet: "0123456789>"
  architecture: {model_type: qwen3, vocab_size: 13, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
    num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 64,
    tie_word_embeddings: true, rope_theta: 10000.0, pad_token_id: 0, eos_token_id: 1}
env: {use: arithmetic, task: sort, digits: 1}
rollout: {use: local, max_new_tokens: 3}
sync: {use: bucketed}
backend: {use: fsdp}
algorithm: {use: grpo, kl: {coef: 0.05}}
schedule: {groups_per_step: 4, group_size: 4}
extensions: {lora: {rank: 2}}
"""
EMA = "{init: actor, update: ema, decay: 0.9}"


def prepared(folder: Path, *overrides: str) -> None:
    (folder / "run.yaml").write_text(RUN)
    catalogue = scan()
    prepare(load(folder / "run.yaml", overrides, catalogue=catalogue), catalogue, folder / "runs", export_cached)


@pytest.mark.parametrize(
    ("overrides", "role", "follows"),
    [
        ([f"roles.reference={EMA}"], "reference", "actor"),
        (
            ["roles.reference={init: actor, update: copy}", "roles.old={init: reference, update: ema, decay: 0.5}"],
            "old",
            "reference",
        ),
        ([f"roles.reference={EMA}", "extensions={mine: {use: lora, dora: true}}"], "reference", "actor"),
    ],
)
def test_a_blend_of_adapters_is_refused(tmp_path: Path, overrides: list[str], role: str, follows: str) -> None:
    told = rf"roles\.{role} follows the adapted role '{follows}' by ema: .* not the product B·A"
    with pytest.raises(CombinationError, match=told) as refused:
        prepared(tmp_path, *overrides)
    assert f"set roles.{role}.update: copy" in str(refused.value.fix)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        ["roles.reference={init: actor, update: copy, every: 3}"],
        ["roles.reference={init: actor, update: ema, decay: 1.0}"],  # never moves
        ["roles.reference={init: actor}"],
        [f"roles.reference={EMA}", "extensions.lora=null"],
        [
            "algorithm.use=ppo",
            f"roles.reference={EMA}",
            "roles.critic={init: actor, update: trained, head: value}",
            "extensions.lora.roles=[critic]",
        ],
    ],
)
def test_what_is_exact_is_not(tmp_path: Path, overrides: list[str]) -> None:
    prepared(tmp_path, *overrides)


def test_of_several_policies_only_the_adapted_ones_are_refused(tmp_path: Path) -> None:
    lines = RUN.splitlines()
    shared = [line for line in lines if line.startswith(("run:", "rollout:", "sync:", "backend:", "extensions:"))]
    own = [line for line in lines if line not in shared and line]
    policies = [f"  {name}:\n" + "\n".join("    " + line for line in own) for name in ("one", "other")]
    (tmp_path / "run.yaml").write_text("\n".join([*shared, "policies:", *policies]) + "\n")
    given = [f"policies.one.roles.reference={EMA}", "policies.other.roles.reference={init: actor}"]
    catalogue = scan()

    def check(*more: str) -> None:
        run = load(tmp_path / "run.yaml", [*given, *more], catalogue=catalogue)
        prepare(run, catalogue, tmp_path / "runs", export_cached)

    with pytest.raises(CombinationError, match=r"policies\.one\.roles\.reference follows the adapted role 'actor'"):
        check()
    check("extensions.lora.policies=[other]")


def test_the_plan_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    with pytest.raises(SystemExit) as leaving:
        main(["plan", "run.yaml", f"roles.reference={EMA}"])
    said = capfd.readouterr().out
    assert leaving.value.code == 2 and "refused: 1" in said and "set roles.reference.update: copy" in said
