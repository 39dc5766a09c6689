"""Readable samples of what was trained on: `rollouts/step_NNNNNN.jsonl`, a bounded number of groups a step.

One line an episode, written once the step has trained. They are for people (`miles show`); the journal is the record.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.collaborators import Learnt
from miles_core.errors import RunNotFoundError, TrackerError, blamed
from miles_core.files import lines_of
from miles_core.jsontext import readable
from miles_core.records import Episode, Group, Origin, Trajectory
from miles_core.waits import GO_ON

#: What of a line is shown, of which type.
_SHOWN: dict[str, Any] = dict.fromkeys(("policy", "episode", "prompt", "status"), str)
_SHOWN |= dict.fromkeys(("turns", "tokens"), list) | {"info": dict, "reward": int | float | None}

GROUPS_A_STEP = 4
EPISODES_A_GROUP = 4
_WRITTEN = (Origin.SAMPLED, Origin.DEMONSTRATION)


@dataclass(frozen=True)
class Rollouts:
    """Writes the first groups of each step to `folder`; `text` decodes sampled ids, by policy."""

    folder: Path
    text: Mapping[str, Callable[[Any], str]]

    def write(
        self, policy: str, step: int, side: str, groups: Sequence[Group], learnt: Learnt = lambda episode: {}
    ) -> None:
        """`side` is `train` or `eval`; `learnt` says what training made of an episode (`Learner.learnt`). Raises
        `TrackerError` where the file cannot be written."""
        most = GROUPS_A_STEP if side == "train" else GROUPS_A_STEP * EPISODES_A_GROUP  # evaluations have groups of one
        shown = [(group, episode) for group in groups[:most] for episode in group.episodes[:EPISODES_A_GROUP]]
        with blamed(f"samples of step {step} could not be written to {self.folder}", TrackerError, GO_ON):
            lines = [readable(_line(g, e, self.text[policy], learnt(e.id))) + b"\n" for g, e in shown]
            _file(self.folder, side, step).write_bytes(b"".join(lines))


def _file(folder: Path, side: str, step: int) -> Path:
    return folder / f"{_prefix(side)}_{step:06d}.jsonl"


def _prefix(side: str) -> str:
    return "step" if side == "train" else side


def _line(group: Group, episode: Episode, text: Callable[[Any], str], learnt: Mapping[str, float]) -> dict[str, Any]:
    prompt, trajectories = group.task.prompt, episode.trajectories
    parts = [_parts(trajectory, text) for trajectory in trajectories]
    return {
        "v": 1,
        "policy": group.policy,
        "episode": episode.id,
        "prompt": prompt if isinstance(prompt, str) else "\n".join(f"{m.role}: {m.content}" for m in prompt),
        "expected": group.task.answer,
        "turns": [[told for origin, told, _ in some if origin in _WRITTEN] for some in parts],
        "between": [[told for origin, told, _ in some if origin == Origin.ENVIRONMENT] for some in parts],
        "reward": episode.reward,
        "components": dict(episode.components),
        "learnt": dict(learnt),
        "info": dict(episode.info),
        "status": episode.status.value,
        "error": episode.error,
        "finish": [t.finish.value for t in trajectories],
        "tokens": [t.length for t in trajectories],
        "written": [sum([n for origin, _, n in some if origin in _WRITTEN]) for some in parts],
        "versions": sorted({str(version) for version in {s.version for t in trajectories for s in t.spans}}),
    }


def _parts(trajectory: Trajectory, text: Callable[[Any], str]) -> list[tuple[int, str, int]]:
    """Origin, text and count of tokens of each contiguous part behind the prompt."""
    tokens, parts, at = np.asarray(trajectory.columns["tokens"]).tolist(), [], 0
    for origin, run in itertools.groupby(np.asarray(trajectory.columns["origin"]).tolist()):
        start, at = at, at + len(list(run))
        if origin != Origin.PROMPT:
            parts.append((origin, text(tokens[start:at]), at - start))
    return parts


def read_samples(folder: Path, side: str, step: int) -> Iterator[dict[str, Any]]:
    """Lines of one step; nothing where that step wrote none."""
    file = _file(folder, side, step)
    with blamed(f"{file} is damaged", RunNotFoundError, "remove it, or choose another --step"):
        for line in lines_of(file):
            sample = json.loads(line)
            if not all(isinstance(sample[key], kind) for key, kind in _SHOWN.items()):
                raise ValueError(f"not an episode: {line:.80}")
            yield sample


def sampled_steps(folder: Path, side: str = "train") -> list[int]:
    """Steps that have samples of that side, ascending."""
    return sorted(int(p.stem.rpartition("_")[2]) for p in folder.glob(_prefix(side) + "_*.jsonl"))
