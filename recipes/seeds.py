"""The quickstart for several seeds: does it learn every time? Exits with 1 where one seed does not.

    python recipes/seeds.py --seeds 0 1 2 --runs runs/seeds

Prints the accuracy at temperature 1 on held-out tasks, before and after reinforcement learning, and the seconds that
both runs took.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
START, GOAL = (0.3, 0.55), 0.85  # accuracy after the warm-up lies within START; at the end it is at least GOAL


def accuracies(run: Path) -> list[float]:
    """`eval/reward` of the run, in the order of its steps."""
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [line["eval/reward"]["value"] for line in lines if "eval/reward" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/seeds"), help="where the runs lie; they must be new")
    options = parser.parse_args()
    missed = []
    for seed in options.seeds:
        began = time.monotonic()
        command = [sys.executable, str(HERE / "quickstart.py"), "--seed", str(seed), "--runs", str(options.runs)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        if done.returncode:
            sys.exit(f"seed {seed}: {' '.join(command)} ended with {done.returncode}")
        found = accuracies(options.runs / ("quickstart" if seed == 7 else f"quickstart-seed{seed}"))
        seconds = time.monotonic() - began
        print(f"seed {seed}: accuracy {found[0]:.3f} -> {found[-1]:.3f} in {seconds:.0f} s", flush=True)
        if not START[0] <= found[0] <= START[1] or found[-1] < GOAL:
            missed.append(seed)
    if missed:
        sys.exit(f"seeds {missed} missed it: from {START[0]}-{START[1]} to at least {GOAL}")


if __name__ == "__main__":
    main()
