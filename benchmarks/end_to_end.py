"""One GRPO step end to end: Miles against a bare loop of transformers and PyTorch, and against TRL's GRPOTrainer.

All sides train the same exported model on the same kind of task with the same shapes, each in a process of its own, in
turns, with the same number of threads. Printed are ratios of the median step; below 1 is faster. TRL is
measured where it is installed (`pip install trl`).

    python benchmarks/end_to_end.py --model runs/warmup            # recipe A's shape: 16 x 16, 6 new tokens
    python benchmarks/end_to_end.py --model runs/warmup --ragged   # 8 x 8, answers of up to 128 tokens
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RUN_FILE = """
run: {{name: bench, dir: {dir}, seed: 3, steps: {steps}}}
model: {{use: causal-lm, source: {model}}}
env: {{use: arithmetic, task: sort, digits: 5}}
rollout: {{use: local, slots: {slots}, max_new_tokens: {new}}}
backend: {{use: fsdp}}
sync: {{use: bucketed}}
algorithm: {{use: grpo, aggregation: token_mean}}
optimizer: {{lr: 1.0e-4}}
schedule: {{groups_per_step: {groups}, group_size: {size}}}
trackers: {{jsonl: {{}}}}
"""


def miles(model: str, steps: int, groups: int, size: int, new: int) -> dict[str, float]:
    """Median seconds of a step, and of its phases."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.yaml"
        run = Path(folder) / "run"
        slots = groups * size
        file.write_text(
            RUN_FILE.format(dir=run, steps=steps, model=model, slots=slots, new=new, groups=groups, size=size)
        )
        subprocess.run([Path(sys.executable).with_name("miles"), "run", file], check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    times = [line for line in lines if "time/step_s" in line][3:]
    names = {name for line in times for name in line if name.startswith("time/")}
    return {name: statistics.median(line[name]["value"] for line in times) for name in sorted(names)}


def tasks(rng: random.Random, count: int) -> list[tuple[str, str]]:
    found = []
    for _ in range(count):
        digits = [rng.choice("0123456789") for _ in range(5)]
        found.append(("".join(digits) + ">", "".join(sorted(digits))))
    return found


def bare(model: str, steps: int, groups: int, size: int, new: int) -> list[float]:
    """Seconds of each step of a plain loop: cached sampling in one batch, one padded forward and backward, AdamW."""
    import time

    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(model)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    eos, rng, seconds = 1, random.Random(3), []
    for _ in range(steps):
        began = time.perf_counter()
        chosen = tasks(rng, groups)
        encoded = [tokenizer.encode(question, add_special_tokens=False) for question, _ in chosen]
        prompts = torch.tensor(encoded).repeat_interleave(size, 0)
        with torch.no_grad():
            cache, x, done = None, prompts, torch.zeros(len(prompts), dtype=torch.bool)
            tokens, logprobs, masks = [], [], []
            for _ in range(new):
                out = lm(input_ids=x, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, logits = out.past_key_values, out.logits[:, -1]
                token = torch.multinomial(F.softmax(logits, -1), 1).squeeze(1)
                logprobs.append(F.log_softmax(logits, -1).gather(1, token[:, None]).squeeze(1))
                tokens.append(token)
                masks.append(~done)
                done = done | (token == eos)
                x = token[:, None]
                if done.all():
                    break
        sampled, old, mask = torch.stack(tokens, 1), torch.stack(logprobs, 1), torch.stack(masks, 1).float()
        texts = tokenizer.batch_decode(torch.where(mask > 0, sampled, 0), skip_special_tokens=True)
        right = [float(text == chosen[i // size][1]) for i, text in enumerate(texts)]
        rewards = torch.tensor(right).view(groups, size)
        centred = rewards - rewards.mean(1, keepdim=True)
        advantage = (centred / (rewards.std(1, keepdim=True) + 1e-6)).view(-1, 1)
        width = prompts.shape[1]
        logits = lm(input_ids=torch.cat([prompts, sampled], 1)).logits[:, width - 1 : -1]
        new_logprobs = F.log_softmax(logits, -1).gather(2, sampled.unsqueeze(2)).squeeze(2)
        ratio = (new_logprobs - old).exp()
        loss = (-torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return seconds


def trl(model: str, steps: int, groups: int, size: int, new: int) -> list[float]:
    """Seconds of each step of TRL's GRPOTrainer."""
    import time

    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rows = [{"prompt": q, "answer": a} for q, a in tasks(random.Random(3), steps * groups)]
    tokenizer = AutoTokenizer.from_pretrained(model, pad_token="<pad>", eos_token="<eos>")

    def reward(completions: list[str], answer: list[str], **_: object) -> list[float]:
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.marks: list[float] = []

        def on_step_end(self, *_: object, **__: object) -> None:
            self.marks.append(time.perf_counter())

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=groups * size,
            num_generations=size,
            max_completion_length=new,
            max_steps=steps,
            learning_rate=1e-4,
            beta=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    return [b - a for a, b in zip(clock.marks, clock.marks[1:], strict=False)]


def _child(side: str, arguments: list[str]) -> float:
    """Median step of one side, in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--side", side, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{side} failed:\n{done.stderr[-2000:]}")
    seconds = json.loads(done.stdout.splitlines()[-1])
    return statistics.median(seconds[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a run directory or a Hugging Face folder")
    parser.add_argument("--ragged", action="store_true", help="8 x 8 with up to 128 new tokens")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--side", choices=["bare", "trl"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    groups, size, new = (8, 8, 128) if options.ragged else (16, 16, 6)
    if options.side:
        side = {"bare": bare, "trl": trl}[options.side]
        print(json.dumps(side(options.model, options.steps, groups, size, new)))
        return
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    folder = options.model
    if (Path(folder) / "resolved.yaml").is_file():
        folder = str(Path(tempfile.mkdtemp()) / "model")
        subprocess.run([Path(sys.executable).with_name("miles"), "export", options.model, folder], check=True)
    arguments = ["--model", folder, "--steps", str(options.steps), *(["--ragged"] if options.ragged else [])]
    sides = ["bare"]
    try:
        import trl as _  # noqa: F401

        sides.append("trl")
    except ImportError:
        print("TRL is not installed: measuring against the bare loop only")
    rounds: list[dict[str, float]] = []
    for number in range(options.rounds):
        ours = miles(folder, options.steps, groups, size, new)
        theirs = {side: _child(side, arguments) for side in sides}
        rounds.append({side: ours["time/step_s"] / seconds for side, seconds in theirs.items()})
        shares = {k.removeprefix("time/").removesuffix("_s"): v / ours["time/step_s"] for k, v in ours.items()}
        shown = ", ".join(f"{k} {v:.2f}" for k, v in shares.items() if k in ("wait", "train", "publish"))
        print(f"round {number}: " + ", ".join(f"miles / {k} {v:.2f}" for k, v in rounds[-1].items()), f"({shown})")
    shape = f"{groups} x {size}, {new} new tokens, {options.threads} thread(s)"
    for side in sides:
        ratios = [r[side] for r in rounds]
        print(
            f"{shape}: miles / {side} = {statistics.median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
