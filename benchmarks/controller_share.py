"""How much of a step is neither engine nor trainer: leases, sessions, verdicts, journal, stages, trackers, publication.

    python benchmarks/controller_share.py --model runs/warmup [--rounds 3] [--profile]

A run of each shape (`shapes.py`), as `miles run` drives it, in a process of its own. The engine and the trainer compute
on threads of their own (publishing copies weights there, and digests on another); what is left is the controller's
thread. The share is its processor time, the garbage collector's included, over
that of the whole process, summed over all steps behind the warm-up, so other processes do not disturb it. Goals: at
most 0.15 for recipe A's shape and 0.05 for the ragged one.

`--profile` shows instead where the controller's thread spends its time (cProfile, which itself costs as much again).
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shapes import RAGGED, RECIPE_A, Shape, machine, measured, model_folder

GOALS = {RECIPE_A: 0.15, RAGGED: 0.05}
#: Threads that compute: the engine's, the trainer's, and the one that digests live weights.
COMPUTE = {"engine": "engine", "miles-trainer": "trainer", "asyncio": "digests"}


def share(shape: Shape, model: str, steps: int) -> dict[str, float]:
    """Processor seconds a step by side, and of the process as `whole`."""
    found: list[dict[str, Any]] = measured(shape, model, steps)["steps"]
    spent = {"controller": 0.0, **dict.fromkeys(COMPUTE.values(), 0.0)}
    for step in found:
        for thread, seconds in step["threads"].items():
            side = next((side for start, side in COMPUTE.items() if thread.startswith(start)), "controller")
            spent[side] += seconds / len(found)
    return spent | {"whole": sum(spent.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the run directory of recipes/warmup.yaml, or a folder")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--child", choices=[shape.name for shape in GOALS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    shapes = {shape.name: shape for shape in GOALS}
    if options.child:
        print(json.dumps(share(shapes[options.child], options.model, options.steps)))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as place:
        for name, shape in shapes.items():
            model = str(model_folder(shape, options.model, Path(place)))
            if options.profile:
                profile = cProfile.Profile()
                profile.runcall(measured, shape, model, options.steps)
                pstats.Stats(profile).sort_stats("tottime").print_stats(40)
                continue
            shares = []
            for _ in range(options.rounds):
                command = [sys.executable, __file__, "--child", name, "--model", model, "--steps", str(options.steps)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise RuntimeError(f"the run of {name} failed:\n{done.stderr[-2000:]}")
                spent = json.loads(done.stdout.splitlines()[-1])
                shares.append(spent["controller"] / spent["whole"])
                shown = ", ".join(f"{side} {1e3 * seconds:.1f}" for side, seconds in spent.items())
                each = 1e6 * spent["controller"] / (shape.groups * shape.size)
                print(f"{name}: ms a step: {shown}; {each:.0f} µs a trajectory; {machine()}", flush=True)
            spread = f"{min(shares):.3f} to {max(shares):.3f}"
            print(f"{name}: controller's share {statistics.median(shares):.3f} (from {spread}; goal {GOALS[shape]})")


if __name__ == "__main__":
    main()
