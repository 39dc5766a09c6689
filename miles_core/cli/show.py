"""`miles show RUN`: curves and rollouts of a run, in the terminal and as a picture."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from miles_core.errors import ExportError, MissingExtraError, RunNotFoundError, blamed

if TYPE_CHECKING:
    from miles_core.run import RunDir

FEW = 12  # below so many points, numbers say more than a picture
WIDTH, HEIGHT = 60, 10  # characters; a braille character holds 2 x 4 dots

Curve = list[tuple[int, float]]


class Order(StrEnum):
    """In which order rollouts are printed."""

    varied = "varied"
    best = "best"
    worst = "worst"
    longest = "longest"


VARIED = Order.varied


def show(
    run: Annotated[Path, typer.Argument(help="a run directory, e.g. runs/quickstart")],
    metric: Annotated[
        list[str] | None, typer.Option(help="curves to draw, e.g. rollout/reward; may be repeated")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="print the rollouts of this step, from 0; first and last where absent")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="rollouts to print a step")] = 3,
    evaluation: Annotated[bool, typer.Option("--eval", help="rollouts of evaluations, not of training")] = False,
    order: Annotated[Order, typer.Option(help="which rollouts come first; varied takes every group in turn")] = VARIED,
    best: Annotated[bool, typer.Option("--best", help="short for --order best")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="short for --order worst")] = False,
    episode: Annotated[str, typer.Option(help="only episodes whose id holds this text, of every step")] = "",
    verdict: Annotated[str, typer.Option(help="only episodes whose verdict begins so, e.g. wrong")] = "",
    chars: Annotated[int, typer.Option(min=0, help="characters of a text that are printed; 0 for all")] = 1000,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the chosen rollouts as JSON lines, and no more")
    ] = False,
    png: Annotated[Path | None, typer.Option(help="also write the curves as a PNG file")] = None,
) -> None:
    """Print what a run was, its curves, and readable rollouts: prompt, answer, what was extracted from it, the verdict,
    lengths, and how the reward came about."""
    from miles_core.cli.episodes import Wanted, show_rollouts
    from miles_core.run import RunDir

    opened = RunDir.open(run)
    console = Console()
    curves = read_curves(opened)
    if not curves:
        fix = "wait for the first step, or look at events.jsonl; the tracker jsonl writes what is shown"
        raise RunNotFoundError(f"{run} has no metrics: {_status(opened)}", fix=fix)
    chosen = metric or [name for name in ("rollout/reward", "eval/reward", "eval/loss") if name in curves]
    if "rollout/reward" not in chosen and "train/loss" in curves and not metric:
        chosen.insert(0, "train/loss")
    for name in chosen:
        if name not in curves:
            raise RunNotFoundError(f"{run} has no metric {name!r}", fix="choose one of " + ", ".join(sorted(curves)))
    if not as_json:
        console.print(Text(headline(opened)))
        for name in chosen:
            wide, curve = max(10, min(WIDTH, console.width - 10)), curves[name]
            console.print(Text(draw(name, curve, wide) if len(curve) >= FEW else listed(name, curve)))
    wanted = Wanted(
        side="eval" if evaluation else "train",
        step=step,
        samples=samples,
        order=Order.best if best else Order.worst if worst else order,
        episode=episode,
        verdict=verdict,
        chars=chars,
        as_json=as_json,
    )
    show_rollouts(console, opened, wanted)
    if png is not None:
        write_png(png, {name: curves[name] for name in chosen})
        console.print(f"curve: {png}")


def headline(run: RunDir) -> str:
    """Name, preset, steps done and how it ended or goes on, best checkpoint."""
    tree = run.tree()
    policies = tree.get("policies") or {"": tree}
    presets = dict.fromkeys(str((p.get("algorithm") or {}).get("use") or "no preset") for p in policies.values())
    steps = {line["policy"]: line["step"] + 1 for line in run.metrics() if line["type"] == "train"}
    latest = run.latest()
    # A policy of a larger share takes several of its own in one; a run without this tracker has its checkpoints.
    done = max(min(steps.values(), default=0), latest.step if latest else 0)
    best = run.best()
    told = f"best checkpoint: step {best.step}" if best else "no best checkpoint"
    return (
        f"{tree['run']['name']}: {', '.join(presets)}, {_status(run)}, {done} of {tree['run']['steps']} steps, {told}"
    )


def _status(run: RunDir) -> str:
    """How its newest process ended; `not ended` where it runs still, or was killed."""
    status = "not ended"
    for event in run.events():
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
    return f"{name}: " + ", ".join(f"{value:.3g} (step {step})" for step, value in curve)


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
    lines = [f"{name}: {values[0]:.3g} -> {values[-1]:.3g}, step {steps[0]} to {steps[-1]}"]
    labels = [f"{high:.3g}", *[""] * (height - 2), f"{low:.3g}"]
    beside = max(8, *map(len, labels))
    for label, row in zip(labels, rows, strict=True):
        lines.append(f"{label:>{beside}} |" + "".join(chr(0x2800 + dots) for dots in row))
    return "\n".join(lines)


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
