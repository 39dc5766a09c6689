"""`miles show RUN`: curves and rollouts of a run, in the terminal and as a picture."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from miles_core.errors import ExportError, MissingExtraError, RunNotFoundError, blamed

if TYPE_CHECKING:
    from miles_core.run import RunDir

FEW = 12  # below so many points, numbers say more than a picture
WIDTH, HEIGHT = 60, 10  # characters; a braille character holds 2 x 4 dots

Curve = list[tuple[int, float]]


def show(
    run: Annotated[Path, typer.Argument(help="a run directory, e.g. runs/quickstart")],
    metric: Annotated[
        list[str] | None, typer.Option(help="curves to draw, e.g. rollout/reward; may be repeated")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="print the rollouts of this step; first and last where absent")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="rollouts to print a step")] = 3,
    png: Annotated[Path | None, typer.Option(help="also write the curves as a PNG file")] = None,
) -> None:
    """Print what a run was, its curves, and readable rollouts with prompt, answer, verdict and reward."""
    from miles_core.rollouts import sampled_steps
    from miles_core.run import RunDir

    opened = RunDir.open(run)
    console = Console()
    curves = read_curves(opened)
    if not curves:
        raise RunNotFoundError(f"{run} has no metrics yet", fix="wait for the first step, or look at events.jsonl")
    console.print(Text(headline(opened)))
    chosen = metric or [name for name in ("rollout/reward", "eval/reward", "eval/loss") if name in curves]
    chosen = chosen or ["train/loss"]
    for name in chosen:
        if name not in curves:
            raise RunNotFoundError(f"{run} has no metric {name!r}", fix="choose one of " + ", ".join(sorted(curves)))
        console.print(Text(draw(name, curves[name]) if len(curves[name]) >= FEW else listed(name, curves[name])))
    steps = sampled_steps(opened.path / "rollouts")
    wanted = [step] if step is not None else sorted({*steps[:1], *steps[-1:]})
    for one in wanted:
        _print_samples(console, opened, one, samples)
    if png is not None:
        write_png(png, {name: curves[name] for name in chosen})
        console.print(f"curve: {png}")


def headline(run: RunDir) -> str:
    """Name, preset, steps done and how it ended or goes on, best checkpoint."""
    tree = run.tree()
    policies = tree.get("policies") or {"": tree}
    presets = dict.fromkeys(str((p.get("algorithm") or {}).get("use") or "no preset") for p in policies.values())
    steps = {line["policy"]: line["step"] + 1 for line in run.metrics() if line["type"] == "train"}
    done = min(steps.values(), default=0)  # a policy of a larger share takes several of its own in one
    best = run.best()
    told = f"best checkpoint: step {best.step}" if best else "no best checkpoint"
    return (
        f"{tree['run']['name']}: {', '.join(presets)}, {_status(run)}, {done} of {tree['run']['steps']} steps, {told}"
    )


def _status(run: RunDir) -> str:
    """How its newest process ended; `not ended` where it runs still, or was killed."""
    status = "not ended"
    file = run.path / "events.jsonl"
    for text in file.read_text().splitlines() if file.exists() else ():
        try:
            event = json.loads(text)
        except ValueError:  # a torn last line
            continue
        if event.get("type") in ("run_start", "run_end"):
            status = event.get("status") or "not ended"
    return str(status) if not str(status).startswith("MILES-") else f"stopped with {status}"


def read_curves(run: RunDir) -> dict[str, Curve]:
    """Metric name -> (step, value); a step that was run again after a resume keeps its last value."""
    curves: dict[str, dict[int, float]] = {}
    for line in run.metrics():
        for name, value in line.items():
            if isinstance(value, dict) and value.get("value") is not None:
                curves.setdefault(name, {})[line["step"]] = float(value["value"])
    return {name: sorted(points.items()) for name, points in curves.items()}


def listed(name: str, curve: Curve) -> str:
    """A short curve as numbers."""
    return f"{name}: " + ", ".join(f"{value:.3f} (step {step})" for step, value in curve)


def draw(name: str, curve: Curve, width: int = WIDTH, height: int = HEIGHT) -> str:
    """The curve in braille dots with its first, last and extreme values."""
    steps, values = [s for s, _ in curve], [v for _, v in curve]
    low, high = min(values), max(values)
    span, reach = (high - low) or 1.0, (steps[-1] - steps[0]) or 1
    rows = [[0] * width for _ in range(height)]
    for step, value in curve:
        x = round((step - steps[0]) / reach * (2 * width - 1))
        y = round((high - value) / span * (4 * height - 1))
        rows[y // 4][x // 2] |= (0x01, 0x08, 0x02, 0x10, 0x04, 0x20, 0x40, 0x80)[(y % 4) * 2 + x % 2]
    lines = [f"{name}: {values[0]:.3f} -> {values[-1]:.3f}, step {steps[0]} to {steps[-1]}"]
    for index, row in enumerate(rows):
        label = f"{high:8.3f}" if index == 0 else f"{low:8.3f}" if index == height - 1 else " " * 8
        lines.append(f"{label} |" + "".join(chr(0x2800 + dots) for dots in row))
    return "\n".join(lines)


def _print_samples(console: Console, run: RunDir, step: int, count: int) -> None:
    from miles_core.rollouts import read_samples, sampled_steps

    lines = list(read_samples(run.path / "rollouts", "train", step))
    if not lines:
        have = sampled_steps(run.path / "rollouts")
        raise RunNotFoundError(
            f"{run.path} has no rollouts of step {step}",
            fix=f"choose --step {have[0]} to {have[-1]}" if have else "let the run train a step first",
        )
    console.print(f"\nrollouts of step {step}")
    for line in _varied(lines)[:count]:
        console.print(Panel(Text(describe(line)), title=Text(line["episode"]), title_align="left"))


def _varied(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first episode of every group, then the second of every group, and so on."""
    seen: Counter[str] = Counter()
    ranked: list[tuple[int, int, dict[str, Any]]] = []
    for line in lines:
        group = line["episode"].rpartition("/")[0]
        ranked.append((seen[group], len(ranked), line))
        seen[group] += 1
    return [line for _, _, line in sorted(ranked, key=lambda row: row[:2])]


def describe(line: dict[str, Any]) -> str:
    """One episode as text: prompt, answers, verdict, lengths, and why the reward was what it was."""
    rows = [f"prompt    {line['prompt']}"]
    rows += [f"answer    {turn}" for turns in line["turns"] for turn in turns]
    if line["expected"] is not None:
        rows.append(f"expected  {line['expected']}")
    rows += [f"· {key:7} {value}" for key, value in line["info"].items()]
    rows += [f"{'+ ' + key:9} {value}" for key, value in line["components"].items()]
    detail = ", ".join(filter(None, (line["status"], "/".join(line["finish"]), f"{sum(line['tokens'])} tokens")))
    if line["versions"] or line["reward"] is not None:
        reward = "none" if line["reward"] is None else f"{line['reward']:g}"
        by = f"; sampled by {', '.join(line['versions'])}" if line["versions"] else ""
        rows.append(f"reward    {reward} ({detail}{by})")
    else:  # a demonstration
        rows.append(f"length    {detail}")
    if line["error"]:
        rows.append(f"error     {line['error']}")
    return "\n".join(rows)


def write_png(path: Path, curves: dict[str, Curve]) -> None:
    """Draw the curves one under another with matplotlib (extra `plot`)."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("a PNG needs matplotlib", fix="pip install 'miles-core[plot]'") from error
    figure = Figure(figsize=(7, 2.6 * len(curves)), layout="constrained")
    axes = list(figure.subplots(len(curves), 1, squeeze=False)[:, 0])
    for ax, (name, curve) in zip(axes, curves.items(), strict=True):
        ax.plot([s for s, _ in curve], [v for _, v in curve], linewidth=1.2)
        ax.set_ylabel(name)
        ax.grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    with blamed(f"{path} cannot be written", ExportError, "name a .png file in a folder that exists"):
        figure.savefig(path, dpi=130)
