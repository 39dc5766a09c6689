"""The environment: which problems make a split and in which order, and what an answer is worth."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.errors import DataError, LateDataError
from miles_core.records import Score, Task
from miles_core.seeds import generator
from miles_core.verifying import prompts
from miles_core.verifying.extract import ASKED, Extract, Found, demonstrated, find, shown
from miles_core.verifying.workers import Pool, WorkerLostError
from miles_env_math import choices
from miles_env_math.config import MathConfig, OnOverlap, Unjudged
from miles_env_math.problems import Problem, find_file, load

if TYPE_CHECKING:
    from miles_core.contracts.environment import EpisodeContext
    from miles_core.provider import BuildContext
    from miles_core.records import Array


class VerifierError(Exception):
    """A verdict that could not be had: the episode fails and says why, and the run goes on."""


def build(config: MathConfig, context: BuildContext) -> MathEnvironment:
    """Files are opened by `tasks`."""
    policy = context.run.policies.get(context.policy)
    base = context.run.run.folder
    return MathEnvironment(
        config,
        name=context.name,
        seed=context.seed,
        policy=context.policy,
        folders=[Path(f).resolve() for f in (base, Path.cwd()) if f is not None],
        plain=policy is not None and policy.renderer.use == "text",
    )


class Problems:
    """Keeps the contract `TaskSource` over some problems of a file; `rows` are their numbers in it."""

    def __init__(
        self,
        env: MathEnvironment,
        split: str,
        problems: Sequence[Problem],
        rows: Sequence[int],
        *,
        shuffle: bool,
    ) -> None:
        self._env, self._split, self._problems, self._rows = env, split, problems, rows
        self.size: int | None = len(rows)
        self._order = lru_cache(maxsize=2)(env.order) if shuffle else None
        self._read: set[int] = set()

    def task(self, position: int) -> Task:
        """Raises `LateDataError`, naming file and line, for a reference that math-verify cannot read."""
        epoch, place = divmod(position, len(self._rows))
        if self._order is not None:
            place = int(self._order(epoch, len(self._rows))[place])
        row = self._rows[place]
        problem = self._problems[row]
        if row not in self._read:
            try:
                self._env.check(problem)
            except DataError as error:
                raise LateDataError(error.message, fix=error.fix) from error
            self._read.add(row)
        return self._env.task(problem, f"{self._env.name}:{self._split}:{row}")

    def check(self, count: int) -> None:
        """Read the first `count` references. Raises `DataError`."""
        for row in self._rows[:count]:
            self._env.check(self._problems[row])
            self._read.add(row)


class MathEnvironment:
    """Keeps the contract `Environment`, single-turn."""

    def __init__(
        self,
        config: MathConfig,
        *,
        name: str,
        seed: int,
        policy: str = "main",
        folders: Sequence[Path] = (),
        plain: bool = False,
    ) -> None:
        """`plain` makes prompts one string where the config leaves it open."""
        self.config, self.name = config, name
        self._seed, self._policy, self._folders, self._plain = seed, policy, tuple(folders), plain
        held_out = config.eval_path is not None or config.eval_fraction is not None
        self.task_splits: tuple[str, ...] = ("train", "eval") if held_out else ("train",)
        settings = {
            **{"deadline_s": config.deadline_s, "memory_mib": config.memory_mib},
            **{"decimals": config.decimals, "strict": config.strict},
        }
        self._pool = Pool.shared("miles_env_math.worker", settings, config.workers)
        self._sources: dict[str, Problems] = {}
        #: The least and the most that an answer may earn.
        self.reward_range = (0.0, 1.0 + config.format_reward)

    # --- tasks -------------------------------------------------------------------------------------------------------

    def tasks(self, split: str) -> Problems:
        """Raises `DataError` for a missing file, a bad row, an empty split, or splits that share a problem."""
        if split not in self.task_splits:
            fix = "set env.eval_fraction, or env.eval_path" if split == "eval" else "ask for `train` or `eval`"
            raise DataError(f"environment {self.name!r} has no split {split!r}", fix=fix)
        if not self._sources:
            self._sources = self._open()
        return self._sources[split]

    def _open(self) -> dict[str, Problems]:
        config = self.config
        train = load(find_file(config.path, self._folders), config)
        held, rows, held_rows = train, list(range(len(train))), list[int]()
        if config.eval_path is not None:
            held = load(find_file(config.eval_path, self._folders), config)
            held_rows = list(range(len(held)))
            rows = self._disjoint(train, held)
        elif config.eval_fraction is not None:
            keys = sorted({problem.key for problem in train})
            count = min(max(1, round(config.eval_fraction * len(keys))), len(keys) - 1)
            lowest = set(keys[: max(count, 0)])
            held_rows = [row for row in rows if train[row].key in lowest]
            rows = [row for row in rows if train[row].key not in lowest]
        sources = {}
        for split, problems, own in (("train", train, rows), ("eval", held, held_rows)):
            if split in self.task_splits:
                if not own:
                    raise DataError(
                        f"environment {self.name!r}: split {split!r} is empty; {config.path} has {len(train)} problems",
                        fix="add problems, or choose another eval_fraction or eval_path",
                    )
                sources[split] = Problems(self, split, problems, own, shuffle=split == "train" and config.shuffle)
                sources[split].check(config.check_references)
        return sources

    def _disjoint(self, train: list[Problem], held: list[Problem]) -> list[int]:
        """The training rows whose problem the evaluation does not ask."""
        seen = {problem.key: problem for problem in held}
        twins = [(problem, seen[problem.key]) for problem in train if problem.key in seen]
        if twins and self.config.on_overlap is OnOverlap.refuse:
            raise DataError(
                f"environment {self.name!r}: the problem of {twins[0][0].where} is also that of the evaluation's"
                f" {twins[0][1].where}" + (f", and {len(twins) - 1} more are shared" if twins[1:] else ""),
                fix="remove them from one file, or set env.on_overlap: drop",
            )
        return [row for row, problem in enumerate(train) if problem.key not in seen]

    def order(self, epoch: int, count: int) -> Array:
        """int64 [count]: a permutation for each epoch, that depends on nothing else."""
        return generator(self._seed, self._policy, "math", self.name, epoch).permutation(count)

    def check(self, problem: Problem) -> None:
        """Whether math-verify reads the reference. Raises `DataError` naming file and line."""
        if problem.choices:
            return
        try:
            told = self._pool.ask({"op": "reference", "text": problem.answer}, self.config.deadline_s)
        except WorkerLostError as lost:
            told = {"raised": str(lost)}
        if "raised" in told:
            raise DataError(
                f"{problem.where}: math-verify cannot read the answer {shown(problem.answer)!r}: {told['raised']}",
                fix="repair or remove the row, or name another field with env.answer_field",
            )

    def task(self, problem: Problem, id: str) -> Task:
        place, tag = self.config.extract[0], self.config.tag
        question = choices.asked(problem.text, problem.choices) if problem.choices else problem.text
        asked = ASKED[place].format(tag=tag)
        metadata = {**problem.metadata, "where": problem.where.rpartition("/")[2]}
        if problem.choices:
            asked = asked.replace("final answer", "letter of the right option")
            metadata["choices"] = list(problem.choices)
        return Task(
            id=id,
            prompt=prompts.make(self.config.prompt, question, asked, plain=self._plain),
            answer=problem.answer,
            demonstrations=(demonstrated(problem.answer, place, tag),),
            metadata=metadata,
        )

    # --- verdicts ----------------------------------------------------------------------------------------------------

    async def score(self, task: Task, context: EpisodeContext) -> Score:
        """1 where the extracted answer is equal to the reference, else 0, and `format_reward` on top. Raises
        `VerifierError` for an answer that cannot be judged in time."""
        config = self.config
        found = find(context.text, config.extract, config.tag)
        if found.answer is None:
            cut = "; the answer was cut off at max_new_tokens" if context.finish == "length" else ""
            return self._scored(False, found, "no answer", found.why + cut)
        if len(found.answer) > config.max_answer_chars and not self._searched(found):
            why = f"the answer has {len(found.answer):,} characters, and at most {config.max_answer_chars:,} are judged"
            return self._scored(False, found, "too long", why)
        if options := task.metadata.get("choices"):
            letter, how = choices.named(found.answer, options)
            why = f"{found.why}; {how}" if how else found.why
            if not letter:
                return self._scored(False, found, "no answer", why)
            right = letter == task.answer
            return self._scored(right, found, "right" if right else "wrong", why, option=letter)
        return await self._verified(task.answer or "", found)

    def _searched(self, found: Found) -> bool:
        """Whether math-verify looks for the answer itself, in the end of the text."""
        return self.config.extract[found.place] is Extract.whole

    async def _verified(self, reference: str, found: Found) -> Score:
        search = self._searched(found)
        answer = (found.answer or "")[-self.config.max_answer_chars :]
        request = {"op": "verify", "reference": reference, "answer": answer, "search": search}
        try:
            told = await self._pool.ask_async(request, self.config.deadline_s)
        except WorkerLostError as lost:
            told = {"raised": str(lost)}
        if "raised" in told:
            if self.config.unjudged is Unjudged.fail:
                raise VerifierError(f"math-verify could not judge it: {told['raised']}, answer {answer[:80]!r}")
            return self._scored(False, found, "unjudged", f"math-verify could not judge it: {told['raised']}")
        why = found.why if told["read"] or told["equal"] else f"{found.why}; no mathematics in it"
        read = {"read": told["read"]} if told["read"] not in ("", answer) else {}
        return self._scored(told["equal"], found, "right" if told["equal"] else "wrong", why, **read)

    def _scored(self, right: bool, found: Found, verdict: str, why: str, **more: str) -> Score:
        bonus = self.config.format_reward if found.place == 0 else 0.0
        components = {"format": bonus} if self.config.format_reward else {}
        info = {} if found.answer is None else {"extracted": shown(found.answer)}
        return Score(
            reward=float(right) + bonus, components=components, info={**info, **more, "verdict": verdict, "why": why}
        )
