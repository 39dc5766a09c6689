"""Rollouts as a person reads them: which ones, in which order, and why a reward was what it was."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from miles_core.cli.show import Order
from miles_core.errors import RunNotFoundError
from miles_core.rollouts import EPISODES_A_GROUP, GROUPS_A_STEP, read_samples, sampled_steps
from miles_core.side import IDS

if TYPE_CHECKING:
    from miles_core.run import RunDir

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
REASONS = 5  # reasons of failed episodes that are printed
Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which rollouts to print: `samples` of the step, of the first and the last where `step` is `None`; or, with
    `episode` or `verdict`, so many over all steps. `chars` 0 cuts nothing."""

    side: str = "train"
    step: int | None = None
    samples: int = 3
    order: Order = Order.varied
    episode: str = ""
    verdict: str = ""
    chars: int = 1000
    as_json: bool = False


def show_rollouts(console: Console, run: RunDir, wanted: Wanted) -> None:
    """Print what `wanted` selects. Raises `RunNotFoundError` where there is nothing."""
    folder = run.path / "rollouts"
    steps = sampled_steps(folder, wanted.side)
    searched = bool(wanted.episode or wanted.verdict)
    if wanted.step is not None and wanted.step not in steps:
        have = f"choose --step {_ranges(steps)}" if steps else "let the run train a step first"
        what = f"step {wanted.step}" if wanted.side == "train" else f"an evaluation after {wanted.step} steps"
        raise RunNotFoundError(f"{run.path} has no rollouts of {what}", fix=have)
    if wanted.step is not None:
        steps = [wanted.step]
    elif not searched:
        steps = sorted({*steps[:1], *steps[-1:]})
    by_step = {step: list(read_samples(folder, wanted.side, step)) for step in steps}
    if searched:
        _print(console, _found(run, by_step, wanted), wanted)
    else:
        for step, lines in by_step.items():
            if not wanted.as_json:
                console.print(Text(f"\n{summary(step, wanted.side, lines)}"))
            _print(console, [{"step": step, **line} for line in lines], wanted)
    if not wanted.as_json and (failures := _failures(run)):
        console.print(Text(f"\n{told_failures(failures)}"))


def _ranges(steps: list[int]) -> str:
    """`0 to 9`, or the steps themselves where they do not follow each other."""
    if len(steps) > 1 and steps == list(range(steps[0], steps[-1] + 1)):
        return f"{steps[0]} to {steps[-1]}"
    return ", ".join(map(str, steps if len(steps) <= 20 else [*steps[:10], "…", *steps[-9:]]))


def _found(run: RunDir, by_step: dict[int, list[Line]], wanted: Wanted) -> list[Line]:
    """The episodes that were searched for, of all steps."""
    found = [
        {"step": step, **line}
        for step, lines in by_step.items()
        for line in lines
        if wanted.episode in line["episode"] and line["info"].get("verdict", "").startswith(wanted.verdict)
    ]
    if not found:
        pairs = (("episode", wanted.episode), ("verdict", wanted.verdict))
        asked = " and ".join(f"{what} {value!r}" for what, value in pairs if value)
        verdicts = {_kind(line["info"].get("verdict", "")) for lines in by_step.values() for line in lines} - {""}
        known = f"; verdicts: {', '.join(sorted(verdicts))}" if verdicts and wanted.verdict else ""
        written = f"of every step the first {GROUPS_A_STEP} groups are written, {EPISODES_A_GROUP} episodes each"
        raise RunNotFoundError(f"{run.path} has no rollout with {asked}{known}", fix=f"choose another: {written}")
    return found


def _print(console: Console, lines: list[Line], wanted: Wanted) -> None:
    for line in _ordered(lines, wanted.order)[: wanted.samples]:
        if wanted.as_json:
            print(json.dumps(line, ensure_ascii=False))
            continue
        table = Table.grid(padding=(0, 1))
        for label, text in rows(line, wanted.chars):
            table.add_row(Text(label, no_wrap=True), Text(text))
        title = line["episode"] if not (wanted.episode or wanted.verdict) else f"step {line['step']}: {line['episode']}"
        console.print(Panel(table, title=Text(title), title_align="left"))


def summary(step: int, side: str, lines: Sequence[Line]) -> str:
    """One line on all the rollouts of a step that were written: how many, their reward, their verdicts."""
    what = f"rollouts of step {step}" if side == "train" else f"rollouts of the evaluation after {step} steps"
    rewards = [line["reward"] for line in lines if line["reward"] is not None]
    parts = [f"{len(lines)} written"]
    if rewards:
        parts.append(f"reward {sum(rewards) / len(rewards):.3f}")
    verdicts = Counter(_kind(line["info"]["verdict"]) for line in lines if line["info"].get("verdict"))
    parts += [f"{count} {verdict}" for verdict, count in verdicts.most_common()]
    return f"{what}: " + ", ".join(parts)


def _kind(verdict: str) -> str:
    """A verdict without its number: `partly right (0.4)` counts as `partly right`."""
    return verdict.partition(" (")[0]


def _ordered(lines: list[Line], order: Order) -> list[Line]:
    if order is Order.varied:
        return _varied(lines)
    if order is Order.longest:
        return sorted(lines, key=lambda line: -sum(line["tokens"]))
    rewarded = [line for line in lines if line["reward"] is not None]
    return sorted(rewarded, key=lambda line: line["reward"], reverse=order is Order.best)


def _varied(lines: list[Line]) -> list[Line]:
    """The first episode of every group, then the second of every group, and so on."""
    seen: Counter[str] = Counter()
    ranked: list[tuple[int, int, Line]] = []
    for line in lines:
        group = line["episode"].rpartition("/")[0]
        ranked.append((seen[group], len(ranked), line))
        seen[group] += 1
    return [line for _, _, line in sorted(ranked, key=lambda row: row[:2])]


def describe(line: Line, chars: int = 1000) -> str:
    """One episode as plain text."""
    return "\n".join(f"{label:9} {text}" for label, text in rows(line, chars))


def rows(line: Line, chars: int = 1000) -> list[tuple[str, str]]:
    """One episode as (label, text): prompt, answers, what was extracted and the verdict, lengths, and how the reward
    came about."""
    found = [("prompt", cut(line["prompt"], chars))]
    several = len(line["turns"]) > 1
    between = line.get("between") or [[] for _ in line["turns"]]
    for number, (turns, said) in enumerate(zip(line["turns"], between, strict=True), start=1):
        label = f"answer {number}" if several else "answer"
        for turn, after in itertools.zip_longest(turns, said, fillvalue=""):
            found.append((label, cut(turn, chars)))
            found += [("then", cut(after, chars))] if after else []
    if line["expected"] is not None:
        found.append(("expected", cut(str(line["expected"]), chars)))
    found += [(f"· {key}", cut(value, chars)) for key, value in line["info"].items()]
    found += [(f"+ {key}", f"{value:g}") for key, value in line["components"].items()]
    learnt = line.get("learnt", {})
    penalties = {key.removeprefix("reward."): value for key, value in learnt.items() if key.startswith("reward.")}
    found += [(f"- {key}", f"{value:g}") for key, value in penalties.items()]
    detail = ", ".join(filter(None, (line["status"], "/".join(line["finish"]), _length(line))))
    if line["versions"] or line["reward"] is not None:
        reward = "none" if line["reward"] is None else f"{line['reward']:g}"
        if penalties and line["reward"] is not None:
            reward += f", trained on {line['reward'] + sum(penalties.values()):g}"
        if "advantage" in learnt:
            reward += f", advantage {learnt['advantage']:+.3f}"
        by = f"; sampled by {', '.join(line['versions'])}" if line["versions"] else ""
        found.append(("reward", f"{reward} ({detail}{by})"))
    else:  # a demonstration
        found.append(("length", detail))
    if line["error"]:
        found.append(("error", line["error"]))
    return found


def _length(line: Line) -> str:
    written = line.get("written")
    total = sum(line["tokens"])
    return f"{total} tokens" if written is None else f"{sum(written)} of {total} tokens written"


def cut(text: str, chars: int) -> str:
    """`text`, or its beginning and its end, where an answer mostly stands, with the count of what is left out. What
    would move a terminal's cursor is spelled out."""
    if chars and len(text) > chars:
        head, tail = chars * 3 // 5, chars - chars * 3 // 5
        text = f"{text[:head]} […{len(text) - chars:,} characters…] {text[-tail:]}"
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _failures(run: RunDir) -> Counter[str]:
    """Reasons of failed training episodes over the whole run, counted without ids."""
    reasons: Counter[str] = Counter()
    for event in run.events():
        if event.get("type") == "episode_failed" and "evaluation" not in event:
            reasons[IDS.sub("", str(event.get("why")))] += 1
    return reasons


def told_failures(reasons: Counter[str]) -> str:
    """How many episodes failed, and why."""
    total = reasons.total()
    rows = [f"{total} episode{'s' * (total != 1)} failed and {'were' if total != 1 else 'was'} not trained on:"]
    rows += [f"{count:6} x {why[:300]}" for why, count in reasons.most_common(REASONS)]
    if len(reasons) > REASONS:
        rows.append(f"       and {len(reasons) - REASONS} other reasons (events.jsonl has every one)")
    return "\n".join(rows)
