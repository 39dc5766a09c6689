"""Run every recipe of `all.yaml` for several seeds, and say which of them learn. `make recipes` calls it.

    python recipes/all.py --seeds 0 1 2 [--only dapo gspo] [--runs runs/recipes]

One run at a time. A run that is finished is not run again; one that was interrupted is resumed. What the runs measured
goes to docs/assets/recipes/results.json, and from there to curves beside it and to the table of
docs/explanation/recipes.md (`--draw` does only that). Exits with 1 where a recipe misses its goal or does not end.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
ASSETS = HERE.parent / "docs/assets/recipes"
PAGE = HERE.parent / "docs/explanation/recipes.md"
MILES = str(Path(sys.executable).with_name("miles"))
COST_CPU_S = 180.0  # what a chain may take, warm-up and evaluations included

HEAD = """\
# Recipes that learn

Written by `recipes/all.py` from `recipes/all.yaml` and what its runs measured; do not edit. `make recipes` runs all of
them for the seeds 0, 1 and 2, one after the other, and continues where it was interrupted. Values are the first and the
last of each seed; `eval/reward` is the accuracy at temperature 1 on tasks that are never trained on.

| recipe | run files | metric | start → end of each seed | goal | reached |
|---|---|---|---|---|---|"""

Curves = dict[str, list[list[float]]]  # metric -> [step, value] by step


@dataclass(frozen=True)
class Link:
    """One run of a chain; `sources`: key of the run file -> link whose run directory it is given."""

    file: str
    sources: Mapping[str, str]

    @property
    def name(self) -> str:
        return Path(self.file).stem


@dataclass(frozen=True)
class Recipe:
    name: str
    chain: tuple[Link, ...]
    says: str
    checks: Mapping[str, Mapping[str, Any]]
    smoke: tuple[str, ...]


def recipes(file: Path = HERE / "all.yaml") -> dict[str, Recipe]:
    """The list, in its order."""
    found = {}
    for name, entry in yaml.safe_load(file.read_text()).items():
        chain: list[Link] = []
        for part in entry["chain"]:
            own = {"file": part} if isinstance(part, str) else part
            before = {"model.source": chain[-1].file} if chain else {}
            chain.append(Link(own["file"], own.get("from", before)))
        found[name] = Recipe(name, tuple(chain), entry["says"], entry["checks"], tuple(entry.get("smoke", ())))
    return found


# --- running --------------------------------------------------------------------------------------------------------


def run_dir(runs: Path, file: str, seed: int) -> Path:
    return runs / f"{Path(file).stem}-seed{seed}"


def arguments(link: Link, runs: Path, seed: int) -> list[str]:
    """What follows `miles run`."""
    sources = [f"{key}={run_dir(runs, file, seed)}" for key, file in link.sources.items()]
    return [str(HERE / link.file), f"run.dir={run_dir(runs, link.file, seed)}", f"run.seed={seed}", *sources]


def finished(run: Path) -> bool:
    events = run / "events.jsonl"
    last = events.read_text().splitlines()[-1:] if events.exists() else []
    return bool(last) and json.loads(last[0]).get("status") == "finished"


def run_link(link: Link, runs: Path, seed: int) -> float:
    """Run or resume one link, if it is not finished; the CPU seconds that it took, then or earlier."""
    run = run_dir(runs, link.file, seed)
    cost = runs / f"{run.name}.cpu_s"
    if not finished(run):
        before = _cpu_s()
        resume = ["--resume"] if run.exists() else []
        with open(runs / f"{run.name}.log", "a") as log:
            done = subprocess.run([MILES, "run", *arguments(link, runs, seed), *resume], stdout=log, stderr=log)
        spent = _cpu_s() - before + (float(cost.read_text()) if resume and cost.exists() else 0.0)
        cost.write_text(f"{spent:.1f}\n")
        if done.returncode:
            raise RuntimeError(f"miles run ended with {done.returncode}; see {log.name}")
    return float(cost.read_text()) if cost.exists() else 0.0


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def curves(run: Path, metrics: Mapping[str, Any]) -> Curves:
    """The metrics of a run by step; a step that was trained again keeps its last value."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found: Curves = {}
    for name in metrics:
        by_step = {line["step"]: line[name]["value"] for line in lines if name in line}
        found[name] = [[step, round(value, 5)] for step, value in sorted(by_step.items())]
    return found


def stored() -> dict[str, dict[str, Curves]]:
    """What was measured so far: recipe -> seed -> curves."""
    file = ASSETS / "results.json"
    return json.loads(file.read_text()) if file.exists() else {}


def store(name: str, seed: int, found: Curves) -> None:
    """Add one seed to the file, one recipe a line."""
    results = stored()
    results.setdefault(name, {})[str(seed)] = found
    lines = [f"{json.dumps(key)}: {json.dumps(results[key], sort_keys=True)}" for key in sorted(results)]
    (ASSETS / "results.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


# --- judging and showing --------------------------------------------------------------------------------------------


def ends(curve: list[list[float]], check: Mapping[str, Any]) -> tuple[float, float]:
    """First and last value, or means over the first and last lines."""
    over = check.get("over", 1)
    values = [value for _, value in curve]
    return sum(values[:over]) / len(values[:over]), sum(values[-over:]) / len(values[-over:])


def missed(recipe: Recipe, found: Curves) -> list[str]:
    """Which checks one seed misses, in words."""
    wrong = []
    for metric, check in recipe.checks.items():
        first, last = ends(found[metric], check)
        low, high = check.get("start", (-float("inf"), float("inf")))
        if not low <= first <= high:
            wrong.append(f"{metric} starts at {first:.3f}, not within {low} and {high}")
        if "goal" in check and last < check["goal"]:
            wrong.append(f"{metric} ends at {last:.3f}, below {check['goal']}")
        if "falls_to" in check and last > check["falls_to"] * first:
            wrong.append(f"{metric} falls from {first:.4f} to {last:.4f} only")
    return wrong


def page(all_recipes: Mapping[str, Recipe], results: Mapping[str, Mapping[str, Curves]]) -> str:
    """The text of docs/explanation/recipes.md."""
    rows, pictures = [], []
    for name, recipe in all_recipes.items():
        seeds = results.get(name, {})
        files = " → ".join(f"`{link.file}`" for link in recipe.chain)
        for metric, check in recipe.checks.items():
            both = [ends(found[metric], check) for _, found in sorted(seeds.items())]
            goal = f"≥ {check['goal']}" if "goal" in check else f"≤ {check['falls_to']} × start"
            shown = ", ".join(f"{first:.3f} → {last:.3f}" for first, last in both) or "not run"
            verdict = "**no**" if any(missed(recipe, found) for found in seeds.values()) else "yes" if both else ""
            rows.append(f"| `{name}`: {recipe.says} | {files} | `{metric}` | {shown} | {goal} | {verdict} |")
        if seeds:
            pictures.append(f"![{name}](../assets/recipes/{name}.svg)")
    return "\n".join([HEAD, *rows, "", *pictures, ""])


def draw(all_recipes: Mapping[str, Recipe], results: Mapping[str, Mapping[str, Curves]]) -> None:
    """One small picture a recipe: its first metric over steps, a line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "recipes", "font.size": 8}
    from matplotlib import pyplot

    for name in results:
        metric, check = next(iter(all_recipes[name].checks.items()))
        figure, axes = pyplot.subplots(figsize=(2.8, 1.9), layout="constrained")
        for seed, found in sorted(results[name].items()):
            axes.plot(*zip(*found[metric], strict=True), label=f"seed {seed}", linewidth=1)
        if "goal" in check:
            axes.axhline(check["goal"], color="grey", linewidth=0.6, linestyle=":")
        axes.set(title=name, xlabel="step", ylabel=metric)
        axes.legend(frameon=False)
        figure.savefig(ASSETS / f"{name}.svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", help="recipes to run; all where absent")
    parser.add_argument("--runs", type=Path, default=Path("runs/recipes"), help="where the runs lie")
    parser.add_argument("--draw", action="store_true", help="run nothing; write page and curves from results.json")
    options = parser.parse_args()
    known = recipes()
    if unknown := sorted(set(options.only or ()) - set(known)):
        sys.exit(f"no recipe {unknown[0]!r}; recipes: {', '.join(known)}")
    ASSETS.mkdir(parents=True, exist_ok=True)
    options.runs.mkdir(parents=True, exist_ok=True)
    bad = []
    for name in [] if options.draw else (options.only or known):
        recipe = known[name]
        for seed in options.seeds:
            try:
                cost = sum(run_link(link, options.runs, seed) for link in recipe.chain)
            except RuntimeError as error:
                bad.append(f"{name}, seed {seed}: {error}")
                print(bad[-1], flush=True)
                continue
            found = curves(run_dir(options.runs, recipe.chain[-1].file, seed), recipe.checks)
            store(name, seed, found)
            wrong = missed(recipe, found) + ([f"cost {cost:.0f} CPU s"] if cost > COST_CPU_S else [])
            shown = ", ".join(
                f"{m} {a:.3f} -> {b:.3f}" for m, c in recipe.checks.items() for a, b in [ends(found[m], c)]
            )
            print(f"{name}, seed {seed}: {shown} in {cost:.0f} CPU s {'MISSED' if wrong else 'ok'}", flush=True)
            bad += [f"{name}, seed {seed}: {what}" for what in wrong]
    PAGE.write_text(page(known, stored()))
    draw(known, stored())
    if bad:
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
