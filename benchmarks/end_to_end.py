"""One GRPO step end to end: Miles against a bare loop of transformers and PyTorch, and against TRL's GRPOTrainer.

All sides train the same model on the same tasks, reward and shapes (`shapes.py`), each in a process of its own, in
turns, with the same number of threads. Printed are ratios of the median step behind the warm-up, in wall time and in
processor time of the whole process; below 1 is faster. With one thread a side, processor time is what an idle machine
would take, and it is the number to believe on a busy one.

    python benchmarks/end_to_end.py --model runs/warmup            # recipe A's shape: 16 x 16, 6 new tokens
    python benchmarks/end_to_end.py --ragged                       # 8 x 8, answers of up to 128 tokens
    python benchmarks/end_to_end.py --ragged --trl-python PATH     # TRL from another environment

Goals: at most 1.3 x the bare loop and 0.85 x TRL for recipe A's shape, 0.5 x TRL for the ragged one. TRL is measured
where `--trl-python` (this interpreter by default) can import it; it must have the same versions of torch and
transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from shapes import RAGGED, RECIPE_A, WARM_UP_STEPS, Shape, exact, machine, measured, model_folder, tasks

Seconds = list[tuple[float, float]]  # wall and processor seconds of each step


def miles(shape: Shape, model: str, steps: int) -> Seconds:
    """Miles as `miles run` drives it, with all of its accounting, trackers and files."""
    found = measured(shape, model, steps)["steps"]
    return [(step["wall"], step["cpu"]) for step in found]


def bare(shape: Shape, model: str, steps: int) -> Seconds:
    """A plain loop: cached sampling in one batch until all have ended, one padded forward and backward, AdamW."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(model)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    groups, size, eos = shape.groups, shape.size, 1
    given, seconds = tasks(steps * groups), []
    for number in range(steps):
        began = time.perf_counter(), time.process_time()
        chosen = given[number * groups : (number + 1) * groups]
        encoded = [tokenizer.encode(question, add_special_tokens=False) for question, _ in chosen]
        prompts = torch.tensor(encoded).repeat_interleave(size, 0)
        with torch.no_grad():
            cache, x, done = None, prompts, torch.zeros(len(prompts), dtype=torch.bool)
            tokens, logprobs, masks = [], [], []
            for _ in range(shape.new):
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
        values = [exact(text, chosen[i // size][1]) for i, text in enumerate(texts)]
        rewards = torch.tensor(values).view(groups, size)
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
        seconds.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    return seconds[WARM_UP_STEPS:]


def trl(shape: Shape, model: str, steps: int) -> Seconds:
    """TRL's GRPOTrainer with everything off that is not a step: no logs, no saves, no progress bar."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = [{"prompt": question, "answer": answer} for question, answer in tasks(steps * shape.groups)]
    tokenizer = AutoTokenizer.from_pretrained(model, pad_token="<pad>", eos_token="<eos>")

    def reward(completions: list[str], answer: list[str], **_: object) -> list[float]:
        return [exact(text, right) for text, right in zip(completions, answer, strict=True)]

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.marks: Seconds = []

        def on_step_end(self, *_: object, **__: object) -> None:
            self.marks.append((time.perf_counter(), time.process_time()))

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=shape.groups * shape.size,
            num_generations=shape.size,
            max_completion_length=shape.new,
            max_steps=steps,
            learning_rate=1e-4,
            beta=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
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
    pairs = list(zip(clock.marks, clock.marks[1:], strict=False))
    return [(b[0] - a[0], b[1] - a[1]) for a, b in pairs[WARM_UP_STEPS - 1 :]]


SIDES: dict[str, Callable[[Shape, str, int], Seconds]] = {"miles": miles, "bare": bare, "trl": trl}


def _child(python: str, side: str, arguments: list[str]) -> tuple[float, float]:
    """Median wall and processor seconds of a step of one side, in a process of its own."""
    command = [python, __file__, "--side", side, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{side} failed:\n{done.stderr[-2000:]}")
    seconds = json.loads(done.stdout.splitlines()[-1])
    return statistics.median(s[0] for s in seconds), statistics.median(s[1] for s in seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the run directory of recipes/warmup.yaml, or a Hugging Face folder")
    parser.add_argument("--ragged", action="store_true", help="8 x 8 with up to 128 new tokens")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter that can import TRL")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = RAGGED if options.ragged else RECIPE_A
    if options.side:
        print(json.dumps(SIDES[options.side](shape, options.model, options.steps)))
        return
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    interpreters = {"miles": sys.executable, "bare": sys.executable}
    found = subprocess.run([options.trl_python, "-c", "import trl"], capture_output=True, check=False)
    if found.returncode:
        print(f"TRL is not installed for {options.trl_python}: measuring against the bare loop only")
    else:
        interpreters["trl"] = options.trl_python
    rounds: list[dict[str, tuple[float, float]]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = model_folder(shape, options.model, Path(place))
        arguments = ["--model", str(folder), "--steps", str(options.steps), *(["--ragged"] if options.ragged else [])]
        for number in range(options.rounds):
            seconds = {side: _child(python, side, arguments) for side, python in interpreters.items()}
            rounds.append(seconds)
            shown = ", ".join(f"{side} {1e3 * a:.0f} ({1e3 * b:.0f})" for side, (a, b) in seconds.items())
            print(f"round {number}: ms a step, wall (processor): {shown}; {machine()}", flush=True)
    print(f"{shape.groups} x {shape.size}, up to {shape.new} new tokens, {options.threads} thread(s) a side")
    for side in interpreters:
        if side != "miles":
            for which, name in enumerate(("wall time", "processor time")):
                ratios = [r["miles"][which] / r[side][which] for r in rounds]
                spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
                print(f"  miles / {side}, {name}: {statistics.median(ratios):.2f} (from {spread})")


if __name__ == "__main__":
    main()
