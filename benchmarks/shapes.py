"""What `end_to_end.py` and `controller_share.py` share: the two shapes, their models and tasks, and a measured run.

`recipe A`: 16 x 16 answers of up to 6 tokens, from a model that a run of `recipes/warmup.yaml` left.
`ragged`: 8 x 8 answers of up to 128 tokens, from a model with random weights, which ends an answer with probability
1/46 at every token: lengths are geometric, with a mean of 43 and one in seventeen cut off, on every side alike. Such
answers are almost never right: advantages are mostly 0, which take as long to train on as any others.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ALPHABET = "0123456789+-*=,> abcdefghijklmnopqrstuvwxyz?"
#: Steps that no side is judged by: allocators, caches and first connections.
WARM_UP_STEPS = 3
RUN_FILE = """
run: {{name: bench, dir: {run}, seed: 3, steps: {steps}}}
model: {{use: causal-lm, source: {model}}}
env: {{use: arithmetic, task: sort, digits: 5}}
rollout: {{use: local, slots: {slots}, max_new_tokens: {new}}}
backend: {{use: fsdp}}
sync: {{use: bucketed}}
algorithm: {{use: grpo, aggregation: token_mean}}
optimizer: {{lr: 1.0e-4}}
schedule: {{groups_per_step: {groups}, group_size: {size}}}
trackers: {{console: {{}}, jsonl: {{}}}}
"""


#: The model of recipe A (keys of a config.json), without vocabulary, lengths and special tokens.
MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Shape:
    """`groups` prompts a step, `size` answers each, of up to `new` tokens."""

    name: str
    groups: int
    size: int
    new: int


RECIPE_A = Shape("recipe A", 16, 16, 6)
RAGGED = Shape("ragged", 8, 8, 128)


def exact(text: str, answer: str) -> float:
    """The reward: 1 where the answer is right."""
    return float(text == answer)


def tasks(count: int) -> list[tuple[str, str]]:
    """(prompt, answer): five digits to sort."""
    rng = random.Random(3)
    found = []
    for _ in range(count):
        digits = [rng.choice("0123456789") for _ in range(5)]
        found.append(("".join(digits) + ">", "".join(sorted(digits))))
    return found


def model_folder(shape: Shape, warmup: str | None, into: Path) -> Path:
    """A Hugging Face folder with the shape's model: the exported warm-up, or random weights."""
    folder = into / f"model-{shape.groups}"
    if shape == RECIPE_A:
        if warmup is None:
            raise SystemExit("recipe A's shape needs --model: the run directory of recipes/warmup.yaml, or a folder")
        if not (Path(warmup) / "resolved.yaml").is_file():
            return Path(warmup)
        subprocess.run([Path(sys.executable).with_name("miles"), "export", warmup, folder], check=True)
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from miles_core.builtin.chars import CharsTokenizer

    torch.manual_seed(3)
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = AutoConfig.for_model(**MODEL, **special, vocab_size=46, max_position_embeddings=256)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    CharsTokenizer(ALPHABET).save(folder)
    return folder


@dataclass
class Clock:
    """Observes a run: per step its wall seconds, and processor seconds: of the process and of each thread by
    name."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    _before: dict[str, float] = field(default_factory=dict)
    _at: float = 0.0
    _cpu: float = 0.0

    def mark(self) -> None:
        now, cpu, spent = time.perf_counter(), time.process_time(), thread_seconds()
        if self._before:
            own = {name: spent[name] - self._before.get(name, 0.0) for name in spent}
            self.steps.append({"wall": now - self._at, "cpu": cpu - self._cpu, "threads": own})
        # What looking took is nobody's.
        self._at, self._cpu, self._before = time.perf_counter(), time.process_time(), thread_seconds()


def thread_seconds() -> dict[str, float]:
    """Processor seconds of each live thread so far; threads that share a name are added up."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        if thread.ident is not None:
            seconds = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            found[thread.name] = found.get(thread.name, 0.0) + seconds
    return found


def measured(shape: Shape, model: str, steps: int) -> dict[str, Any]:
    """Run Miles in this process: `steps` (see `Clock`) behind the warm-up, `metrics` (lines of metrics.jsonl)."""
    from miles_core import hookimpl
    from miles_core.config.compose import load
    from miles_core.discovery import scan
    from miles_core.driver import execute

    clock = Clock()

    class Observer:
        @hookimpl
        def miles_on_step(self) -> None:
            clock.mark()

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "run.yaml").write_text(
            RUN_FILE.format(
                run=folder / "run",
                model=model,
                steps=steps,
                slots=shape.groups * shape.size,
                new=shape.new,
                groups=shape.groups,
                size=shape.size,
            )
        )
        catalogue = scan()
        catalogue.pm.register(Observer())
        with (folder / "log").open("w") as log, redirect_stdout(log), redirect_stderr(log):
            asyncio.run(execute(load(folder / "run.yaml", catalogue=catalogue), catalogue, threading.Event()))
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {"steps": clock.steps[WARM_UP_STEPS - 1 :], "metrics": lines}


def machine() -> str:
    """What a reader must know of the machine to judge a number."""
    threads = os.environ.get("OMP_NUM_THREADS", "default")
    optimised = "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
    python = f"CPython {platform.python_version()} built {'with' if optimised else 'without'} optimisation"
    return f"{threads} thread(s) a process, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {python}"
