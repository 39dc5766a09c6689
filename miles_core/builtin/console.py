"""Tracker `console`: progress for a person. On a terminal, live bars with reward, loss, tokens a second and lag; in a
log, one plain line a step. Evaluations and what goes wrong get lines of their own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from miles_core import hookimpl
from miles_core.config.schema import opt
from miles_core.provider import BuildContext, Provider
from miles_core.records import Metric

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, Task, TaskID

#: What a step's line shows: label, the metrics that may hold it (first found), format.
SHOWN: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("rollout/reward",), "{:.3f}"),
    ("loss", ("train/loss",), "{:.3g}"),
    ("grad_norm", ("train/grad_norm",), "{:.2g}"),
    ("lag", ("rollout/lag",), "{:.2f}"),
    ("tokens/s", ("time/tokens_per_s",), "{:.0f}"),
    ("step s", ("time/step_s",), "{:.2f}"),
)
#: Events that a person should see, and how they read.
LOUD = {
    "changed": "changed since this run began",
    "checkpoint": "checkpoint",
    "engine_quarantined": "engine out of service",
    "engine_returned": "engine back in service",
    "episode_failed": "episode failed",
    "lease_dropped": "group dropped",
    "lease_stale": "group too old",
}
#: Of one kind of bad news, only so many lines a step; the rest is counted. These are no bad news.
LINES_A_KIND = 3
ALL_TOLD = ("changed", "checkpoint")


class Style(StrEnum):
    auto = "auto"
    live = "live"
    plain = "plain"


@dataclass(frozen=True, kw_only=True)
class ConsoleConfig:
    style: Style = opt(Style.auto, "`live` bars, `plain` lines, or `auto`: live on a terminal")
    every: int = opt(1, "plain style: a line every so many steps", unit="steps", low=1)


class ConsoleTracker:
    """Keeps the contract `Tracker`. `policies` are told apart where there are several."""

    def __init__(self, console: Console, policies: Sequence[str], *, live: bool, every: int = 1, how: str = "") -> None:
        """`how` is what evaluations sample with, e.g. `greedy`."""
        self._console = console
        self._policies = tuple(policies)
        self._live = live
        self._every = every
        self._how = how
        self._eval_failure: dict[str, str] = {}  # policy -> why an episode of the evaluation at hand failed first
        self._steps = 0
        self._held: dict[str, tuple[int, dict[str, float]]] = {}  # policy -> its step in the making
        self._printed: dict[str, int] = {}  # policy -> last step whose line was printed
        self._loud: dict[str, int] = {}
        self._progress: Progress | None = None
        self._bars: dict[str, tuple[TaskID, TaskID]] = {}
        self._began = time.monotonic()

    def start(self, info: Mapping[str, Any]) -> None:
        self._steps = int(info["steps"])
        first = int(info.get("first_step") or 0)
        self._say(f"run {info['name']} in {info['dir']}" + (f", from step {first}" if first else ""))
        if info.get("summary"):
            self._say(str(info["summary"]))
        self._began = time.monotonic()
        if self._live:
            self._start_bars(first)

    def metrics(self, step: int, side: str, values: Mapping[str, Metric], policy: str) -> None:
        found = {
            name if name.startswith(f"{side}/") else f"{side}/{name}": num / den
            for name, (num, den) in values.items()
            if den
        }
        if side == "eval":
            counted = values.get("reward", values.get("eval/reward", (0, 0)))[1]
            how = f" ({self._how}, {counted:g} tasks)" if self._how and "eval/reward" in found else ""
            done = f"{step} step{'' if step == 1 else 's'}"
            said = _evaluation(found) + self._failures(values, policy)
            self._say(f"{self._whose(policy)}evaluation after {done}{how}: {said}")
            return
        held_step, held = self._held.get(policy, (step, {}))
        if held_step != step:
            self._line(policy)
            held = {}
        held.update(found)
        self._held[policy] = (step, held)
        if self._progress is not None:
            _, bar = self._bars[policy]
            self._progress.update(bar, completed=step + 1, shown=self._shown(held))
        # `time` comes last of a step's sides where there is one; else the next step, or the end, prints the line.
        if side == "time":
            self._line(policy)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        policy = str(fields.get("policy", self._policies[0]))
        if kind in ("group_finished", "evaluating") and self._progress is not None and "done" in fields:
            what = "groups" if kind == "group_finished" else "evaluation"
            bar, _ = self._bars[policy]
            self._progress.update(
                bar, description=self._whose(policy) + what, completed=fields["done"], total=fields["of"]
            )
        elif kind == "episode_failed" and "evaluation" in fields:  # the evaluation's own line tells
            self._eval_failure.setdefault(policy, str(fields.get("why")))
        elif kind in LOUD:
            self._loud[kind] = self._loud.get(kind, 0) + 1
            if kind in ALL_TOLD or self._loud[kind] <= LINES_A_KIND:
                told = ", ".join(f"{key} {value}" for key, value in fields.items() if key != "policy")
                whose = self._whose(policy) if "policy" in fields else ""  # else it is the whole run's
                self._say(f"{whose}{LOUD[kind]}: {told}")

    def close(self, status: str) -> None:
        for policy in self._held:
            self._line(policy)
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        told = f"stopped with {status}" if status.startswith("MILES-") else status
        self._say(f"{told} after {time.monotonic() - self._began:.1f} s")

    def _line(self, policy: str) -> None:
        """Print the step in the making, once, and begin to count anew."""
        step, held = self._held[policy]
        if self._printed.get(policy) == step:
            return
        self._printed[policy] = step
        if not self._live and (step % self._every == 0 or step + 1 == self._steps):
            self._say(f"{self._whose(policy)}step {step + 1}/{self._steps}  {self._shown(held)}")
        for kind, count in self._loud.items():
            if kind not in ALL_TOLD and count > LINES_A_KIND:
                self._say(f"{LOUD[kind]}: {count - LINES_A_KIND} more")
        self._loud.clear()

    def _shown(self, held: Mapping[str, float]) -> str:
        parts = []
        for label, names, form in SHOWN:
            value = next((held[n] for n in names if n in held), None)
            if value is not None and (value or label != "tokens/s"):  # demonstrations sample none
                parts.append(f"{label} {form.format(value)}")
        return "  ".join(parts)

    def _failures(self, values: Mapping[str, Metric], policy: str) -> str:
        why = self._eval_failure.pop(policy, "")
        count, _ = values.get("failed_episodes", (0, 1))
        if not count:
            return ""
        of = values["reward"][1] if "reward" in values else count
        return f", {count:g} of {of:g} episodes FAILED" + (f": {why}" if why else "")

    def _whose(self, policy: str) -> str:
        return f"[{policy}] " if len(self._policies) > 1 else ""

    def _say(self, text: str) -> None:
        from rich.control import strip_control_codes

        try:
            if self._live:
                self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
            elif not self._console.quiet:  # rich would take longer than all else that a step's line costs
                self._console.file.write(strip_control_codes(text) + "\n")
                self._console.file.flush()
        except SystemExit:  # who read this is gone (`| head`), and rich would leave: the run goes on
            self._console.quiet = True
        except BrokenPipeError:
            with suppress(SystemExit):
                self._console.on_broken_pipe()  # as rich does: what else is printed has nowhere to go

    def _start_bars(self, first: int) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column
        from rich.text import Text

        class Shown(ProgressColumn):
            """The numbers, which alone give way where the terminal is narrow."""

            def render(self, task: Task) -> Text:
                return Text(str(task.fields["shown"]), no_wrap=True, overflow="ellipsis")

        def whole() -> Column:
            return Column(no_wrap=True)

        self._progress = Progress(
            TextColumn("{task.description}", table_column=whole()),
            BarColumn(bar_width=24 if self._console.width > 100 else 8, table_column=whole()),
            MofNCompleteColumn(table_column=whole()),
            TimeRemainingColumn(table_column=whole()),
            Shown(),
            console=self._console,
        )
        for policy in self._policies:
            whose = self._whose(policy)
            groups = self._progress.add_task(f"{whose}groups", total=None, shown="")
            steps = self._progress.add_task(f"{whose}steps", total=self._steps, completed=first, shown="")
            self._bars[policy] = (groups, steps)
        self._progress.start()


def _evaluation(found: Mapping[str, float]) -> str:
    """Rewards or losses first; failures are told apart."""
    named = {name.removeprefix("eval/"): value for name, value in found.items()}
    first = sorted(named, key=lambda name: (not name.startswith(("reward", "loss")), name))
    shown = [f"{name} {named[name]:.3f}" for name in first if name != "failed_episodes"]
    return ", ".join(shown[:6]) or "nothing rewarded"


def _build(config: ConsoleConfig, context: BuildContext) -> ConsoleTracker:
    from rich.console import Console

    console = Console()
    live = console.is_terminal if config.style == Style.auto else config.style == Style.live
    how = f"T={t:g}" if (t := context.run.eval.temperature) else "greedy"
    policies = tuple(context.run.policies) or (context.policy,)
    return ConsoleTracker(console, policies, live=live, every=config.every, how=how)


@hookimpl
def miles_tracker() -> Provider[ConsoleConfig, ConsoleTracker]:
    return Provider(
        name="console", config=ConsoleConfig, build=_build, summary="progress bars, or a plain line a step in a log"
    )
