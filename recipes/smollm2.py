"""recipes/smollm2.yaml for several seeds: does held-out reward rise by more than two standard errors on each of them?

    python recipes/smollm2.py --seeds 1 2 3 --runs runs/smollm2-seeds

Prints reward before and after with their standard errors, and the processor time of each run; exits with 1 where a seed
does not rise. A run that is there already is not run again. Rewards lie between 0 and 1, so the variance of one is at
most mean * (1 - mean); the errors printed are that bound, and the difference is judged by both together.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).with_suffix(".yaml")


def measured(run: Path) -> list[tuple[float, float]]:
    """(held-out reward, its standard error at most) of every evaluation, in the order of steps."""
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    found = [line["eval/reward"] for line in lines if "eval/reward" in line]
    return [(m["value"], math.sqrt(max(0.0, m["value"] * (1 - m["value"])) / m["den"])) for m in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm2-seeds"))
    options = parser.parse_args()
    missed = []
    for seed in options.seeds:
        run = options.runs / f"seed{seed}"
        spent = ""
        if not run.exists():
            command = [sys.executable, "-m", "miles_core.cli", "run", str(FILE), f"run.dir={run}", f"run.seed={seed}"]
            done = subprocess.run(command)
            if done.returncode:
                sys.exit(f"seed {seed}: {' '.join(command)} ended with {done.returncode}")
            usage = resource.getrusage(resource.RUSAGE_CHILDREN)  # of all children so far
            spent = f", processor time of all runs so far {usage.ru_utime + usage.ru_stime:.0f} s"
        (before, low), *_, (after, high) = measured(run)
        errors = (after - before) / math.hypot(low, high)
        print(
            f"seed {seed}: {before:.3f} ± {low:.3f} -> {after:.3f} ± {high:.3f}, {errors:.1f} standard errors{spent}",
            flush=True,
        )
        if errors <= 2:
            missed.append(seed)
    if missed:
        sys.exit(f"seeds {missed} did not rise by more than two standard errors")


if __name__ == "__main__":
    main()
