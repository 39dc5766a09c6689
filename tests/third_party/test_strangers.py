"""Plugins that outsiders wrote: judged by `miles conformance`, chosen by config, used in runs."""

import json
from pathlib import Path

import pytest

from miles_core.run import RunDir

PLUGINS = {
    "stage:places": "acme-miles-algo-places",
    "term:soft": "zed-soft-loss",
    "sync:mailbox": "acme-miles-sync-mailbox",
    "env:parity": "oddlab-envs",
    "rollout:tables": "acme-miles-rollout-tables",
    "extension:margin": "acme-miles-margin",
}
REAL = """
run: {name: real, seed: 7, steps: 3}
model:
  use: causal-lm
  tokenizer: chars
  alphabet: "0123456789>"
  architecture: {model_type: qwen3, vocab_size: 13, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
    num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 64,
    tie_word_embeddings: true, rope_theta: 10000.0, pad_token_id: 0, eos_token_id: 1}
env: {use: parity}
rollout: {use: local, max_new_tokens: 2}
backend: {use: fsdp}
sync: {use: mailbox}
algorithm: {use: grpo, advantage: {use: places}, loss: {use: soft}}
optimizer: {lr: 1.0e-2}
schedule: {groups_per_step: 8, group_size: 8, updates_per_step: 2}
trackers: {jsonl: {}}
"""
CHOSEN = (
    *("env={use: parity}", "rollout={use: tables, max_new_tokens: 2}", "sync={use: mailbox}"),
    *("algorithm.advantage={use: places}", "algorithm.loss={use: soft}", "extensions={margin: {}}"),
)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_conformance_judges_it_and_the_listing_remembers(here, strangers, plugin):
    miles = here(strangers)
    said = miles("conformance", plugin, "--json", "conformance.json")
    assert said.code == 0, said.out + said.err
    assert said.out.splitlines()[0].split() == ["check", "result", "detail"] and "FAILED" not in said.out
    written = json.loads(Path("conformance.json").read_text())
    assert written["plugin"] == plugin and written["distribution"] == PLUGINS[plugin]
    assert all(check["passed"] for check in written["checks"])
    kind, _, name = plugin.partition(":")
    rows = [json.loads(line) for line in miles("plugins", "--json", "--kind", kind).out.splitlines()]
    row = next(row for row in rows if row["name"] == name)
    assert row["state"] == "fits" and row["conformance"] == f"{len(written['checks'])} passed"
    kept = json.loads(Path(row["results"]).read_text())
    assert kept["plugins"][plugin]["checks"] == written["checks"]


def test_all_of_them_in_one_run(outside):
    plan = outside.miles("plan", "toy.yaml", *CHOSEN).out
    assert "margin.gap" in plan
    said = outside.miles(
        "run", "toy.yaml", *CHOSEN, "run.steps=40", "rollout.count=2", "trackers={console: {}, jsonl: {}}"
    )
    assert "margin: " in said.out and " tokens of " in said.out
    run = RunDir.open(outside.work / "runs/toy")
    rewards = [line["rollout/reward"]["value"] for line in run.metrics() if "rollout/reward" in line]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    locked = json.loads((run.path / "plugins.lock").read_text())["distributions"]
    assert set(PLUGINS.values()) <= set(locked) and locked["oddlab-envs"]["version"] == "5.0"
    assert "miles-sync-bucketed" not in locked


@pytest.mark.slow
def test_they_train_a_real_model(outside):
    """torch tensors through the stranger's transport, the stranger's loss in the backend of this repository."""
    (outside.work / "real.yaml").write_text(REAL)
    outside.miles("run", "real.yaml")
    lines = [line for line in RunDir.open(outside.work / "runs/real").metrics() if "train/grad_norm" in line]
    assert len(lines) == 3 and all(line["train/grad_norm"]["value"] > 0 for line in lines)


@pytest.mark.slow
def test_a_stranger_may_be_replaced_by_another_in_one_line(outside):
    """The engine with our transport, our engine with the stranger's transport; and what does not fit is refused."""
    for overrides in (["rollout.use=tables"], ["sync.use=mailbox"], ["extensions={margin: {}}", "rollout.use=tables"]):
        outside.miles("run", "toy.yaml", *overrides, "run.steps=2", f"run.name={len(overrides)}-{overrides[0][:4]}")
    said = outside.miles("run", "toy.yaml", "extensions={margin: {}}", code=2)
    assert said.err.startswith("MILES-E006: extension 'margin' needs 'margin.gap', and nothing in the run offers it")
    assert said.err.endswith("Fix: use one of: rollout 'tables' (acme-miles-rollout-tables)\n")
    said = outside.miles(
        "run", "toy.yaml", "sync.use=mailbox", "rollout.use=toy-socket", "launcher.use=toy-processes", code=2
    )
    assert said.err.startswith("MILES-E006: sync 'mailbox' needs 'in_process'"), said.err
