"""The quickstart: warm a tiny model up (once), then let GRPO teach it to sort digits, and show what happened.

`make quickstart` calls it. The two runs are ordinary run files; each line below is what you would type yourself.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from pathlib import Path

from miles_core.run import RunDir

HERE = Path(__file__).parent
MILES = str(Path(sys.executable).with_name("miles"))


def miles(*arguments: str) -> None:
    """Run one `miles` command where the user can see it; stop with its exit code."""
    print(f"\n$ miles {' '.join(arguments)}", flush=True)
    asked: list[int] = []
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else lambda signum, frame: asked.append(signum))
    try:  # Ctrl-C reaches the command too, which saves and says how to go on: let it
        code = subprocess.run([MILES, *arguments], check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)
    if code or asked:  # it may have finished all the same: nothing follows
        sys.exit(128 - code if code < 0 else code or 130)


def is_done(run: Path) -> bool:
    """Whether a run has all of its steps."""
    if not (run / "resolved.yaml").is_file():
        return False
    opened = RunDir.open(run)
    latest = opened.latest()
    return latest is not None and latest.step >= opened.tree()["run"]["steps"]


def free_name(runs: Path, name: str) -> str:
    """`name`, or `name-2`, `name-3`, … : the first that has no directory yet."""
    number = 1
    while (runs / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return name if number == 1 else f"{name}-{number}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs lie")
    options = parser.parse_args()
    seed, runs = options.seed, options.runs

    warmup = runs / ("warmup" if seed == 7 else f"warmup-seed{seed}")
    if is_done(warmup):
        print(f"reusing the warm-up in {warmup}")
    else:
        resume = ["--resume"] if (warmup / "resolved.yaml").is_file() else []
        miles("run", str(HERE / "warmup.yaml"), f"run.dir={warmup}", f"run.seed={seed}", *resume)

    name = free_name(runs, "quickstart" if seed == 7 else f"quickstart-seed{seed}")
    run = runs / name
    miles(
        "run",
        str(HERE / "quickstart.yaml"),
        f"model.source={warmup}",
        f"run.dir={run}",
        f"run.name={name}",
        f"run.seed={seed}",
    )
    miles("show", str(run), "--png", str(run / "curve.png"))
    print(f"""
The run lies in {run} (resolved.yaml: every setting with its origin; metrics.jsonl; checkpoints/; rollouts/).

What to type next (`miles` is {MILES}; `. .venv/bin/activate` puts it on the path):
  miles show {run} --step 50
      the rollouts of another step
  miles config show recipes/quickstart.yaml
      what the run file means, and where each value comes from
  miles plan {run}
      what ran, and which promises hold
  miles run recipes/quickstart.yaml run.name=mine optimizer.lr=2e-4 model.source={warmup}
      a run of your own
  miles export {run} exported/
      a Hugging Face folder of the best checkpoint
Your own data and reward: docs/tutorials/own-data.md""")


if __name__ == "__main__":
    main()
