"""Whole runs: what the plugin offers, chosen by a run file, trained by the learner."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from miles_algo_opd.loopback import Loopback

from miles_core.config.compose import load
from miles_core.discovery import scan
from miles_core.driver import execute
from miles_core.errors import CombinationError, ConfigError, EngineError, ModelSourceError

TOYS = """
run: {name: r, seed: 7, steps: 12}
model: {use: toy, tokenizer: toy, architecture: {model_type: toy}}
renderer: toy
env: {use: toy}
rollout: {use: toy, max_new_tokens: 2}
backend: {use: toy}
sync: {use: toy}
optimizer: {lr: 0.2}
schedule: {groups_per_step: 4, group_size: 4}
trackers: {jsonl: {}}
"""
REAL = """
run: {name: r, seed: 7, steps: 3}
model:
  use: causal-lm
  tokenizer: chars
  alphabet: "0123456789>"
  architecture: {model_type: qwen3, vocab_size: 13, hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1,
    num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 32,
    tie_word_embeddings: true, pad_token_id: 0, eos_token_id: 1}
env: {use: arithmetic, task: sort, digits: 3}
rollout: {use: local, slots: 16, max_new_tokens: 4}
backend: {use: fsdp}
sync: {use: bucketed}
schedule: {groups_per_step: 4, group_size: 4}
optimizer: {lr: 1.0e-2}
trackers: {jsonl: {}}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def start(text: str, more: str, *overrides: str) -> list[dict[str, Any]]:
        (tmp_path / "run.yaml").write_text(text + more)
        run_file = load(tmp_path / "run.yaml", overrides, catalogue=scan())
        asyncio.run(execute(run_file, scan(), threading.Event()))
        lines = Path(f"runs/{run_file.run.name}/metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return start


def values(metrics: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name]["value"] for line in metrics if name in line]


SERVED = """
scorers: {judge: {use: http-teacher, url: "%s", vocabulary: same, backoff_s: 0}}
roles: {teacher: {scorer: judge}}
algorithm: {use: opd, loss: {use: toy}}
"""


def vocabulary_of_toys() -> int:
    from miles_core.testing.toys.rendering import ToyTokenizer

    return int(ToyTokenizer().vocab_size)


def test_a_toy_learns_from_a_served_teacher_and_no_reward(run: Any) -> None:
    with Loopback(vocabulary_of_toys(), seed=3).serving() as teacher:
        metrics = run(TOYS, SERVED % teacher.url, "run.steps=20", "optimizer.lr=0.3")
        asked = len(teacher.requests)
    gaps = values(metrics, "train/opd/reverse_kl")
    assert len(gaps) == 20 and asked == 20 * 16
    assert np.mean(gaps[-4:]) < 0.5 * np.mean(gaps[:4]), gaps


def test_a_task_reward_and_a_teacher_together(run: Any) -> None:
    with Loopback(vocabulary_of_toys(), seed=3).serving() as teacher:
        mixed = "advantage: {use: toy}, distill: {coef: 0.1}, loss: {use: toy}"
        text = (SERVED % teacher.url).replace("loss: {use: toy}", mixed)
        metrics = run(TOYS, text, "run.steps=3")
    assert len(values(metrics, "train/opd/reverse_kl")) == 3
    assert values(metrics, "train/toy/advantage_abs")


def test_a_teacher_that_fails_stops_the_run_by_name(run: Any) -> None:
    from miles_algo_opd.loopback import status

    with Loopback(vocabulary_of_toys()).serving() as teacher:
        teacher.faults = [status(500, "down")] * 1000
        with pytest.raises(EngineError, match="HTTP 500: down") as caught:
            run(TOYS, SERVED % teacher.url)
    assert "teacher 'teacher'" in str(caught.value)


FROZEN = "roles: {teacher: {init: actor, update: frozen}}\n"


@pytest.mark.parametrize(
    "algorithm",
    [
        "{use: opd}",
        "{use: opd_topk, distill: {k: 4}}",
        "{use: opd_topk, distill: {k: 4, support: union, direction: forward, tail: renormalise}}",
        "{use: opd_topk, distill: {k: 13, support: teacher, tail: none}}",
    ],
)
def test_a_teacher_that_is_the_student_has_nothing_to_teach(run: Any, algorithm: str) -> None:
    metrics = run(REAL, FROZEN + f"algorithm: {algorithm}\n", "run.steps=1", "rollout.temperature=0.7")
    name = "train/opd/reverse_kl" if algorithm == "{use: opd}" else "train/topk_kl"
    assert abs(values(metrics, name)[0]) < 1e-6
    assert values(metrics, "train/grad_norm")[0] < 1e-5
    if "topk" in algorithm:
        assert values(metrics, "train/topk_kl/student_mass")[0] <= 1 + 1e-6
        assert values(metrics, "train/mismatch/abs")[0] < 1e-4  # trainer against engine is measured all the same


@pytest.mark.parametrize("support", ["student", "teacher"])
def test_a_model_learns_another_distribution(run: Any, support: str) -> None:
    run(REAL, "algorithm: {use: grpo, loss: {use: reinforce}}\n", "run.name=other", "run.seed=9", "run.steps=1")
    more = "roles: {teacher: {source: runs/other}}\nalgorithm: {use: opd_topk, distill: {k: 5}}\n"
    metrics = run(REAL, more, "run.steps=8", f"algorithm.distill.support={support}")
    kl = values(metrics, "train/topk_kl")
    assert kl[-1] < 0.7 * kl[0]


def test_a_served_teacher_tells_its_top_and_a_model_learns_it(run: Any) -> None:
    """The term reads what the scorer tells: ids, log-probabilities, and no rest."""
    with Loopback(13, seed=3).serving() as teacher:
        served = (SERVED % teacher.url).partition("algorithm")[0]
        more = served + "algorithm: {use: opd_topk, distill: {k: 4, support: teacher}}\n"
        metrics = run(REAL, more, "run.steps=6")
        assert teacher.requests[0]["top_logprobs_num"] == 4
    kl = values(metrics, "train/topk_kl")
    assert kl[-1] < 0.8 * kl[0] and 0 < values(metrics, "train/topk_kl/teacher_mass")[0] < 1


# --- refused before anything starts ---------------------------------------------------------------------------------


def refused(run: Any, error: type[Exception], words: str, text: str, more: str, *overrides: str) -> None:
    with pytest.raises(error, match=words):
        run(text, more, *overrides)
    assert not Path("runs/r").exists()


def test_what_means_nothing_is_refused(run: Any) -> None:
    nobody = "http://127.0.0.1:9"
    topk = "algorithm: {use: opd_topk, distill: {k: 4}}\n"
    served = (SERVED % nobody).partition("algorithm")[0]
    refused(run, CombinationError, r"scores ids that the trainer chooses.*scorer 'judge'", REAL, served + topk)
    union = topk.replace("k: 4", "k: 4, support: union")
    refused(run, CombinationError, r"scores ids that the trainer chooses", REAL, served + union)
    refused(run, CombinationError, "needs the role 'teacher'", REAL, topk)
    refused(run, ConfigError, r"algorithm\.distill\.k must be given", REAL, FROZEN + "algorithm: {use: opd_topk}\n")
    warm = "rollout.temperature=0.7"
    refused(run, CombinationError, r"rollout\.temperature is 0\.7", REAL, served + "algorithm: {use: opd}\n", warm)
    shown = "algorithm: {use: sft, distill: {use: opd}}\n"
    refused(run, CombinationError, "demonstrations have no behaviour", REAL, FROZEN + shown, "schedule.group_size=1")


def test_another_vocabulary_is_refused(run: Any) -> None:
    shown = ("run.steps=1", "rollout=null", "sync=null", "schedule.group_size=1")
    run(REAL, "algorithm: {use: sft}\n", "run.name=one", *shown)
    run(REAL.replace("0123456789>", ">0123456789"), "algorithm: {use: sft}\n", "run.name=other", *shown)
    head, _, rest = REAL.partition("model:")
    text = head + "model: {use: causal-lm, source: runs/one}\nenv:" + rest.partition("\nenv:")[2]
    more = "roles: {teacher: {source: runs/other}}\nalgorithm: {use: opd}\n"
    refused(run, ModelSourceError, r"token 2 is '0' to the actor .* and '>' to roles\.teacher", text, more)


def test_more_tokens_than_there_are(run: Any) -> None:
    with pytest.raises(CombinationError, match=r"the 99 likeliest tokens of role 'actor' are asked for, .* has 13"):
        run(REAL, FROZEN + "algorithm: {use: opd_topk, distill: {k: 99}}\n")
