"""The environment: mixtures and curricula by position, splits by a hash of the question, verdicts with their reason."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.errors import ConfigError, DataError, EngineError
from miles_core.records import Score, Task
from miles_core.seeds import derive
from miles_core.verifying import prompts
from miles_core.verifying.extract import ASKED, Found, demonstrated, find, shown
from miles_core.verifying.workers import Pool, WorkerLostError
from miles_env_reasoning_gym.config import (
    DatasetConfig,
    EvalStage,
    ReasoningGymConfig,
    Unjudged,
)

if TYPE_CHECKING:
    from miles_core.contracts.environment import EpisodeContext
    from miles_core.provider import BuildContext

#: Draws until the split counts as exhausted, divided by the split's share: e^-40 for one that has questions enough.
MISSES = 40
DRAWS_DEADLINE_S = 600.0
#: Data sets whose verifier pays for answers that are wrong, and how.
UNSOUND = {
    "game_of_life_halting": "any text that is not empty earns 1",
    "puzzle24": "any four numbers that make 24 earn 1, whichever were given",
}


class VerifierError(Exception):
    """A verdict that could not be had: the episode fails and says why, and the run goes on."""


def build(config: ReasoningGymConfig, context: BuildContext) -> ReasoningGym:
    """Raises `ConfigError` for data sets, options and levels that reasoning-gym does not have or refuses."""
    policy = context.run.policies.get(context.policy)
    base = context.run.run.folder
    folders = [str(Path(f).resolve()) for f in (base, Path.cwd()) if f is not None]
    share = -(-context.run.eval.tasks // max(len(policy.envs) if policy is not None else 1, 1))
    asked = share if context.run.eval.every is not None else 1
    environment = ReasoningGym(
        config,
        name=context.name,
        seed=context.seed,
        policy=context.policy,
        folders=folders,
        plain=policy is not None and policy.renderer.use == "text",
        asked=asked,
    )
    environment.check()
    return environment


class Entry:
    """One data set of the mixture."""

    def __init__(self, key: str, config: DatasetConfig) -> None:
        self.key, self.name, self.config = key, config.dataset or key, config
        plan = config.curriculum.all() if config.curriculum is not None else ()
        levels = [(s.level if s.level is not None else config.level, {**config.options, **s.options}) for s in plan]
        self.specs = [
            {"name": self.name, "options": options, "level": level, "ranges": config.ranges.value}
            for level, options in levels or [(config.level, config.options)]
        ]

    def stage(self, position: int, split: str, draw: int) -> int:
        """The stage of a position; `draw` decides whether it reviews an earlier one."""
        curriculum = self.config.curriculum
        if curriculum is None:
            return 0
        last = len(self.specs) - 1
        if split == "eval":
            return last if curriculum.evaluate is EvalStage.last else 0
        stage = min(position // curriculum.every, last)
        if stage and draw < curriculum.review * 2**64:
            return draw % stage
        return stage


class Tasks:
    """Keeps the contract `TaskSource`: endless. A training task is drawn from its position alone; evaluation asks
    different questions only, so that its tasks are drawn in order once."""

    size: int | None = None

    def __init__(self, env: ReasoningGym, split: str) -> None:
        self._env, self._split = env, split
        # Evaluation asks the same questions whatever the run's seed, so that runs compare.
        self._stream: tuple[int, str] = (env.seed, env.policy) if split == "train" else (0, "eval")
        self._held: list[Task] = []
        self._seen: set[str] = set()

    def task(self, position: int) -> Task:
        """Raises `DataError` where the data set has no question, or no further one, for this split."""
        if self._split == "train":
            return self._drawn(position, frozenset())
        while len(self._held) <= position:
            task = self._drawn(len(self._held), self._seen)
            self._seen.add(task.metadata["digest"])
            self._held.append(task)
        return self._held[position]

    def _seed(self, *path: int | str) -> int:
        seed, policy = self._stream
        return derive(seed, policy, "reasoning-gym", self._env.name, self._split, *path)

    def _drawn(self, position: int, seen: set[str] | frozenset[str]) -> Task:
        env = self._env
        entry = env.entry(position, self._seed("mixture"))
        stage = entry.stage(position, self._split, self._seed("review", position))
        share = env.config.eval_share
        misses = int(MISSES / (share if self._split == "eval" else 1 - share)) + 1
        start, limit = 0, misses
        while start < limit:
            found = env.draw(entry, stage, self._split, self._seed(position), start, limit)
            if found is None:
                break
            if found["digest"] not in seen:
                return env.task(found, entry, stage, f"{env.name}:{self._split}:{position}")
            start = found["number"] + 1
        known = f" beyond the {len(seen)} already held out" if seen else ""
        raise DataError(
            f"environment {env.name!r}: {misses} draws from {entry.name} give no question of split {self._split!r}"
            f"{known}; with these options it has too few different ones" + env.complaint,
            fix="make the data set harder or wider through its options, move env.eval_share"
            f" (it is {share:g})" + (", or ask for fewer eval.tasks" if seen else ""),
        )


class ReasoningGym:
    """Keeps the contract `Environment`, single-turn."""

    task_splits = ("train", "eval")

    def __init__(
        self,
        config: ReasoningGymConfig,
        *,
        name: str,
        seed: int,
        policy: str = "main",
        folders: Sequence[str] = (),
        plain: bool = False,
        asked: int = 1,
    ) -> None:
        """`plain` makes prompts one string where the config leaves it open. `asked` tasks of the eval split are drawn
        as soon as it is asked for, so that too small a data set shows before the run."""
        self.config, self.name, self.seed, self.policy = config, name, seed, policy
        self.complaint = ""  # what the last draws that found nothing met
        self._asked = asked
        self._plain = plain
        self._entries = [Entry(key, entry) for key, entry in config.entries().items()]
        total, running = sum(e.config.weight for e in self._entries), 0.0
        self._ends = [(running := running + e.config.weight) / total for e in self._entries]
        settings = {
            "modules": [_module(name, folders) for name in config.modules],
            "folders": [] if all(name.endswith(".py") for name in config.modules) else list(folders),
            **{"deadline_s": config.deadline_s, "memory_mib": config.memory_mib},
        }
        self._pool = Pool.shared("miles_env_reasoning_gym.worker", settings, config.workers)
        self._sources: dict[str, Tasks] = {}
        #: The least and the most that an answer may earn; a verdict beyond it fails the episode.
        self.reward_range = (0.0, 1.0 + config.format_reward)

    def check(self) -> None:
        """Build every data set once. Raises `ConfigError`."""
        for entry in self._entries:
            if entry.name in UNSOUND and not entry.config.unsound:
                raise ConfigError(
                    f"the verifier of {entry.name} is no good for training: {UNSOUND[entry.name]}",
                    fix="choose another data set, or set unsound: true",
                )
            try:
                self._pool.ask({"op": "check", "specs": entry.specs}, DRAWS_DEADLINE_S)
            except WorkerLostError as lost:
                raise ConfigError(
                    f"{entry.name} cannot be built: building it {lost}",
                    fix="change its options, or raise env.deadline_s",
                ) from lost

    # --- tasks -------------------------------------------------------------------------------------------------------

    def tasks(self, split: str) -> Tasks:
        """Raises `DataError` for a split that does not exist, or that has too few questions."""
        if split not in self.task_splits:
            raise DataError(
                f"environment {self.name!r} has no split {split!r}", fix="ask for " + " or ".join(self.task_splits)
            )
        if split not in self._sources:
            source = Tasks(self, split)
            source.task(self._asked - 1 if split == "eval" else 0)
            self._sources[split] = source
        return self._sources[split]

    def entry(self, position: int, offset: int) -> Entry:
        """Which data set a position belongs to: any run of positions holds each in its share, nearly exactly (an
        additive recurrence with the golden ratio)."""
        place = (offset + position * 0x9E3779B97F4A7C15) % 2**64 / 2**64
        return next(e for e, end in zip(self._entries, self._ends, strict=True) if place < end or end >= 1.0)

    def draw(self, entry: Entry, stage: int, split: str, seed: int, start: int, limit: int) -> dict[str, Any] | None:
        """The first item of the split among draws `start` to `limit`, as the worker tells it."""
        request = {
            **{"op": "draw", "spec": entry.specs[stage], "seed": seed, "start": start, "limit": limit},
            **{"split": split, "share": self.config.eval_share},
        }
        try:
            found = self._pool.ask(request, DRAWS_DEADLINE_S)
        except WorkerLostError as lost:
            raise DataError(
                f"environment {self.name!r}: drawing an item of {entry.name} {lost}",
                fix=f"raise env.deadline_s (it is {self.config.deadline_s:g}), or make its options easier",
            ) from lost
        self.complaint = f"; {found['raised']} raised, the last {found['last']}" if found.get("raised") else ""
        return found if "index" in found else None

    def task(self, found: dict[str, Any], entry: Entry, stage: int, id: str) -> Task:
        answer = found["answer"]
        place, tag = self.config.extract[0], self.config.tag
        said = ASKED[place].format(tag=tag)
        return Task(
            id=id,
            prompt=prompts.make(self.config.prompt, found["question"], said, plain=self._plain),
            answer=answer,
            demonstrations=() if answer is None else (demonstrated(answer, place, tag),),
            metadata={
                **{"dataset": entry.key, "stage": stage, "index": found["index"], "digest": found["digest"]},
            },
        )

    # --- verdicts ----------------------------------------------------------------------------------------------------

    async def score(self, task: Task, context: EpisodeContext) -> Score:
        """What the verifier says of the extracted answer, in [0, 1]; 0 where there is none. Raises `VerifierError` for
        a verifier that hangs, dies, raises or leaves its range."""
        config = self.config
        found = find(context.text, config.extract, config.tag)
        if found.answer is None:
            return self._scored(0.0, found, "no answer", found.why, context)
        if len(found.answer) > config.max_answer_chars:
            why = f"the answer has {len(found.answer):,} characters, and at most {config.max_answer_chars:,} are judged"
            return self._scored(0.0, found, "too long", why, context)
        entry = next((e for e in self._entries if e.key == task.metadata.get("dataset")), None)
        if entry is None:
            raise VerifierError(f"the data set {task.metadata.get('dataset')!r} of the task is not configured here")
        told = await self._verdict(entry, task, found.answer)
        if "score" not in told:
            if config.unjudged is Unjudged.fail:
                raise VerifierError(f"the verifier of {entry.name} {told['unjudged']}, answer {found.answer[:80]!r}")
            return self._scored(0.0, found, "unjudged", f"the verifier {told['unjudged']}", context)
        score = told["score"]
        if not 0.0 <= score <= 1.0:
            raise VerifierError(
                f"the verifier of {entry.name} returned {score:g}, outside its stated range of 0 to 1, answer"
                f" {found.answer[:80]!r}"
            )
        verdict = "right" if score == 1.0 else "wrong" if score == 0.0 else f"partly right ({score:.3g})"
        return self._scored(score, found, verdict, found.why, context)

    async def _verdict(self, entry: Entry, task: Task, answer: str) -> dict[str, Any]:
        data = task.metadata
        request = {
            **{"op": "score", "spec": entry.specs[data["stage"]], "index": data["index"], "digest": data["digest"]},
            "answer": answer,
        }
        try:
            told = await self._pool.ask_async(request, self.config.deadline_s)
        except WorkerLostError as lost:
            return {"unjudged": str(lost)}
        if "raised" in told:
            return {"unjudged": f"raised {told['raised']}"}
        if "differs" in told:
            raise EngineError(
                f"the item of task {task.id} cannot be made again: {told['differs']}",
                fix="score with the version of reasoning-gym that made the tasks; a data set of your own must draw"
                " every item from its seed and number alone",
            )
        return told

    def _scored(self, score: float, found: Found, verdict: str, why: str, context: EpisodeContext) -> Score:
        config = self.config
        earned = score if config.threshold is None else float(score >= config.threshold)
        components = {}
        if config.threshold is not None:
            components["score"] = score
        if config.format_reward:
            components["format"] = config.format_reward if found.place == 0 else 0.0
        info = {} if found.answer is None else {"extracted": shown(found.answer)}
        info |= {"verdict": verdict, "why": why}
        if found.answer is None and context.finish == "length":
            info["why"] += "; the answer was cut off at max_new_tokens"
        return Score(reward=earned + components.get("format", 0.0), components=components, info=info)


def _module(name: str, folders: Sequence[str]) -> str:
    """A file's absolute path, or a module's name as it is."""
    if not name.endswith(".py"):
        return name
    places = [Path(name)] if Path(name).is_absolute() else [Path(folder) / name for folder in folders]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        looked = ", ".join(dict.fromkeys(map(str, places)))
        raise ConfigError(f"modules names {name!r}, and there is no such file; looked at {looked}", fix="correct it")
    return str(found.resolve())
