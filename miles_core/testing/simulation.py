"""Whole runs of the loop in virtual time: fakes for every collaborator, a clock that jumps, and kills at any await.

Nothing sleeps for real and nothing learns; what is real is the schedule, the ledger and the journal on disk. A sampled
token depends on (task, attempt, member, index) and on the weights that served it, and weights are a hash of everything
that was trained, so that two runs which end with equal weights trained the same tokens in the same order.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import selectors
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.collaborators import PolicySetup, RunResult
from miles_core.config.schema import EvalConfig, ScheduleConfig
from miles_core.files import Files
from miles_core.journal import Journal
from miles_core.ledger import Lease, Ledger
from miles_core.records import (
    Array,
    Episode,
    Group,
    Metric,
    Origin,
    Sampling,
    Status,
    Task,
    Trajectory,
    Version,
    episode_id,
    group_id,
    spans_of,
    trajectory_id,
)
from miles_core.schedule import Loop


class Killed(KeyboardInterrupt):
    """The simulated process died here."""


class Deadlock(AssertionError):
    """Everything waits and no timer is set."""


def digest(*parts: object) -> int:
    """A 63-bit number that depends on all parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


class _Jumping(selectors.SelectSelector):
    """Never waits: where the loop would sleep, its clock jumps."""

    loop: VirtualClock

    def select(self, timeout: float | None = None) -> Any:
        loop = self.loop
        loop.turns += 1
        if loop.kill_at is not None and loop.turns >= loop.kill_at:
            loop.kill_at = None
            raise Killed
        if timeout is None:
            raise Deadlock("every task waits, and no timer is set")
        loop.now += max(0.0, timeout)
        return super().select(0)


class VirtualClock(asyncio.SelectorEventLoop):
    """An event loop whose time is virtual. `turns` counts its iterations; at turn `kill_at` it raises `Killed`."""

    def __init__(self, kill_at: int | None = None) -> None:
        selector = _Jumping()
        selector.loop = self
        self.now = 0.0
        self.turns = 0
        self.kill_at: int | None = None
        super().__init__(selector)
        self.kill_at = kill_at

    def time(self) -> float:
        return self.now


class Disk(Files):
    """Files that can fail: `fail_at` maps the number of an operation (counted from 0) to what happens there: `error`
    (nothing is done), `torn` (half is written, then an error), `kill` (half is written, and the process dies). Only
    writes can be done by halves; other operations fail or die before anything is done."""

    def __init__(self, fail_at: Mapping[int, str] | None = None) -> None:
        self.fail_at = dict(fail_at or {})
        self.operations = 0
        self.dead = False

    def _next(self, *, writes: bool = False) -> str:
        if self.dead:
            raise OSError(5, "the process is dead")
        what = self.fail_at.get(self.operations, "")
        self.operations += 1
        if what == "error" or (what == "torn" and not writes):
            raise OSError(28, "No space left on device")
        if what == "kill" and not writes:
            self.dead = True
            raise Killed
        return what

    def create(self, path: Path) -> int:
        self._next()
        return super().create(path)

    def write(self, fd: int, parts: Sequence[bytes]) -> None:
        what = self._next(writes=True)
        if not what:
            return super().write(fd, parts)
        data = b"".join(parts)
        super().write(fd, [data[: len(data) // 2]])
        if what == "kill":
            self.dead = True
            raise Killed
        raise OSError(28, "No space left on device")

    def truncate(self, path: Path, size: int) -> None:
        self._next()
        super().truncate(path, size)

    def sync(self, fd: int) -> None:
        self._next()

    def sync_folder(self, folder: Path) -> None:
        self._next()


def imbalances(ledger: Ledger, *, finished: bool = False) -> list[str]:
    """What a ledger's books contradict between any two calls; empty where they balance. `finished` allows no open
    lease."""
    found: list[str] = []
    for policy, book in ledger.books.items():
        groups, ended, leases = ledger.schedules[policy].groups_per_step, book.ended, book.open.values()
        training = sum(o.lease.split == "train" for o in leases)
        due = ended["trained"] + ended["dropped"] + training + len(book.pending)
        claimed = sum(o.claimed for o in leases)
        done = sum(o.group is not None and o.lease.split == "train" for o in leases)
        ends = sum(ended[end] for end in ("trained", "evaluated", "dropped", "returned"))
        for name, have, want in (
            ("slots taken, against consumed and open ones", len(book.slots), book.consumed * groups + training),
            ("positions taken, against leases that hold one", len(book.positions), due),
            ("groups trained, against steps consumed", ended["trained"], book.consumed * groups),
            ("finished groups, against waiting and claimed ones", done, len(book.finished) + claimed),
            ("leases issued, against ended and open ones", ended["issued"], ends + len(leases)),
        ):
            if have != want:
                found.append(f"policy {policy}: {name}: {have} and {want}")
        if finished and leases:
            found.append(f"policy {policy}: {len(leases)} leases have no end")
    return found


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run. `policies` maps a name to its share. Probabilities are per group (`reject`) and per episode (`fail`).

    `timing` seeds how long everything takes; nothing else depends on it. `turns` are the calls of an episode, between
    which the served version may change. `size` is the number of tasks, `None` without end.
    """

    schedule: ScheduleConfig
    steps: int
    policies: Mapping[str, int] = field(default_factory=lambda: {"main": 1})
    timing: int = 0
    reject: float = 0.0
    fail: float = 0.0
    long: float = 0.0
    turns: int = 2
    size: int | None = None
    checkpoint_every: int | None = None
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    demonstrations: bool = False
    train_s: float = 3.0
    publish_s: float = 0.5


class Simulation:
    """A run that may be killed and resumed. What survives a kill: the journal's folder, and `checkpoints`; those
    survive the death of this very process where they are kept as files in the folder `keep`."""

    def __init__(self, scenario: Scenario, folder: Path, *, keep: Path | None = None) -> None:
        self.scenario = scenario
        self.folder = folder
        self.schedules = dict.fromkeys(scenario.policies, scenario.schedule)
        self.keep = keep
        found = keep.glob("*.json") if keep is not None else ()
        self.checkpoints: dict[int, str] = {int(path.stem): path.read_text() for path in found}
        self.best: int | None = None
        self.weights = {policy: digest("initial", policy) for policy in scenario.policies}
        self.served: dict[str, tuple[Version, int]] = {}
        self.trained: list[tuple[str, int, tuple[str, ...]]] = []  # policy, step, group ids: the valid history
        self.published: list[str] = []
        self.evaluations: list[tuple[str, int, float]] = []
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.metrics_seen: list[tuple[int, str, Mapping[str, Metric], str]] = []
        self.turns = 0
        self.operations = 0
        self.now = 0.0
        self.ledger: Ledger | None = None
        self.stopped = False
        self.stop_after: int | None = None  # steps trained, after which a stop is asked for
        self.disk = Disk()
        self.sampler: Any = FakeSampler(self)
        self.learner_error: tuple[int, Exception] | None = None  # raised by this step
        self.rollouts: Any = None

    # --- running -----------------------------------------------------------------------------------------------------

    def run(
        self, *, kill_at: int | None = None, disk: Disk | None = None, steps: int | None = None
    ) -> RunResult | None:
        """Run, or go on after a kill or an error; `None` where it was killed. Errors of the loop are raised."""
        self.disk = disk or Disk()
        self.stopped = False
        self.served = {}
        clock = VirtualClock(kill_at)
        asyncio.set_event_loop(clock)
        self.now = 0.0
        try:
            return clock.run_until_complete(self._run(steps or self.scenario.steps))
        except Killed:
            return None
        finally:
            self.disk.dead = True  # from here on nothing reaches the disk any more
            clock.set_exception_handler(lambda *_: None)  # the dead say nothing
            self.turns, self.operations, self.now = clock.turns, self.disk.operations, clock.now
            clock.kill_at = None
            left = asyncio.all_tasks(clock)
            for task in left:
                task.cancel()
            if left:
                clock.run_until_complete(asyncio.wait(left))
            for task in left:
                if not task.cancelled():
                    task.exception()
            asyncio.set_event_loop(None)
            clock.close()

    async def _run(self, steps: int) -> RunResult:
        journal = Journal(self.folder, files=self.disk, segment_bytes=1 << 16)
        step = max(self.checkpoints, default=None)
        if step is None and len(list(self.folder.glob("*.frames"))) == 1:
            self.ledger = Ledger(journal, self.schedules)
        else:
            if step is None:
                saved: dict[str, Any] = {"weights": {}, "ledger": Ledger(None, self.schedules).snapshot()}
                saved["ledger"]["journal"] = [0, 0]
            else:
                saved = json.loads(self.checkpoints[step])
            self.weights = {p: saved["weights"].get(p, digest("initial", p)) for p in self.schedules}
            self.ledger = Ledger.resume(saved["ledger"], journal, self.schedules)
            self.trained = [t for t in self.trained if t[1] < self.ledger.books[t[0]].consumed]
            for policy, book in self.ledger.books.items():
                for entry in self.ledger.waiting(policy):
                    assert entry.versions is None or entry.versions[1] <= book.consumed, (
                        "kept, though of a void version"
                    )
        self.invariants()
        loop = Loop(
            policies=[self._setup(policy, share) for policy, share in self.scenario.policies.items()],
            ledger=self.ledger,
            sampler=self.sampler,
            publisher=None if self.scenario.demonstrations else _Publisher(self),
            checkpoint=_Checkpoint(self),
            steps=steps,
            stop=self,
            checkpoint_every=self.scenario.checkpoint_every,
            evaluation=self.scenario.evaluation,
            trackers=[self],
            rollouts=self.rollouts,
        )
        try:
            return await loop.run()
        finally:
            if not journal.broken and not self.disk.dead:
                journal.close()

    def _setup(self, policy: str, share: int) -> PolicySetup:
        reject = self.scenario.reject

        def choosy(group: Group) -> str | None:
            tokens = [np.asarray(t.columns["tokens"]).tolist() for e in group.episodes for t in e.trajectories]
            return "unlucky" if digest("reject", group.task.id, tokens) % 1000 < 1000 * reject else None

        return PolicySetup(
            name=policy,
            schedule=self.scenario.schedule,
            tasks=_Tasks(self.scenario.size),
            learner=_Learner(self, policy),
            share=share,
            filters={"choosy": choosy} if reject else {},
            sampling=None if self.scenario.demonstrations else Sampling(max_new_tokens=8),
            eval_sampling=None if self.scenario.demonstrations else Sampling(max_new_tokens=8, temperature=0.0),
        )

    def invariants(self) -> None:
        """Raise `AssertionError` where the ledger contradicts itself."""
        assert self.ledger is not None
        problems = imbalances(self.ledger)
        assert not problems, problems

    # --- stop and tracker --------------------------------------------------------------------------------------------

    def is_set(self) -> bool:
        return self.stopped

    def start(self, info: Mapping[str, Any]) -> None: ...

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.events.append((kind, dict(fields)))
        self.invariants()

    def metrics(self, step: int, side: str, values: Mapping[str, Metric], policy: str) -> None:
        self.metrics_seen.append((step, side, dict(values), policy))

    def close(self, status: str) -> None: ...


class _Tasks:
    def __init__(self, size: int | None) -> None:
        self.size = size

    def task(self, position: int) -> tuple[str, Task, int]:
        index = position if self.size is None else position % self.size
        attempt = 0 if self.size is None else position // self.size
        return "toy", Task(id=f"toy:train:{index}", prompt=str(index)), attempt

    def evaluation(self, count: int) -> list[tuple[str, Task]]:
        return [("toy", Task(id=f"toy:eval:{i}", prompt=str(i))) for i in range(count)]


class FakeSampler:
    """Episodes of several calls; each call's tokens carry the version that served them. `error_at` makes the n-th
    episode call raise, `hang_at` makes it wait for ever."""

    def __init__(self, world: Simulation) -> None:
        self.world = world
        self.calls = 0
        self.error_at: int | None = None
        self.hang_at: int | None = None
        self.aborted: list[str] = []

    async def abort(self, lease_ids: Sequence[str]) -> None:
        self.aborted += lease_ids

    async def run(self, lease: Lease, *, group_size: int, sampling: Sampling | None, split: str) -> Group:
        jobs = [self._episode(lease, member, sampling, split) for member in range(group_size)]
        tasks = [asyncio.ensure_future(job) for job in jobs]
        try:
            episodes = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return Group(
            id=group_id(lease.task.id, lease.attempt),
            policy=lease.policy,
            slot=lease.slot,
            attempt=lease.attempt,
            task=lease.task,
            episodes=tuple(episodes),
        )

    async def _episode(self, lease: Lease, member: int, sampling: Sampling | None, split: str) -> Episode:
        scenario = self.world.scenario
        call = self.calls
        self.calls += 1
        seed = (lease.policy, lease.task.id, lease.attempt, member)
        clock = digest("time", scenario.timing, lease.id, member)
        slow = 40 if clock % 1000 < 1000 * scenario.long else 1
        tokens: list[int] = []
        versions: list[Version] = []
        for turn in range(scenario.turns):
            if sampling is None:
                tokens.append(digest(seed, turn) % 97)
                continue
            version, weights = self.world.served[lease.policy]
            for _ in range(1 + digest(seed, turn, weights) % 3):
                tokens.append(digest(seed, len(tokens), weights) % 97)
                versions.append(version)
            if call == self.error_at:
                raise RuntimeError("the sampler broke")
            await asyncio.sleep(1e9 if call == self.hang_at else slow * (1 + clock % 7) / 4)
            clock //= 7
        name = episode_id(group_id(lease.task.id, lease.attempt), member)
        if split == "train" and digest("fail", seed, tokens) % 1000 < 1000 * scenario.fail:
            return Episode(id=name, member=member, trajectories=(), status=Status.FAILED, error="unlucky episode")
        n = len(tokens)
        columns: dict[str, Array] = {
            "tokens": np.array(tokens, np.int32),
            "origin": np.full(n, Origin.DEMONSTRATION if sampling is None else Origin.SAMPLED, np.uint8),
            "trainable": np.ones(n, bool),
            "behaviour_logprobs": -np.array(tokens, np.float32) / 97,
        }
        trajectory = Trajectory(
            id=trajectory_id(name, 0), length=n, columns=columns, spans=spans_of(versions), sampling=sampling
        )
        return Episode(id=name, member=member, trajectories=(trajectory,), reward=float(tokens[0] % 2))


class _Learner:
    def __init__(self, world: Simulation, policy: str) -> None:
        self.world = world
        self.policy = policy
        self.changed = True

    async def step(self, step: int, groups: Sequence[Group]) -> Mapping[str, Metric]:
        world = self.world
        await asyncio.sleep(world.scenario.train_s * (1 + digest("train", world.scenario.timing, step) % 3))
        if world.learner_error is not None and world.learner_error[0] == step:
            raise world.learner_error[1]
        bound = world.scenario.schedule.max_staleness
        content: list[Any] = []
        for group in groups:
            for episode in group.episodes:
                for t in episode.trajectories:
                    trainable = t.columns["trainable"]
                    assert isinstance(trainable, np.ndarray)
                    for span in t.spans:
                        old = step - span.version.number > bound
                        assert not old or not trainable[span.start : span.end].any(), "a token older than allowed"
                    content.append([np.asarray(t.columns[name]).tolist() for name in ("tokens", "trainable")])
        ids = tuple(group.id for group in groups)
        seen = {i for policy, _, trained in world.trained if policy == self.policy for i in trained}
        assert not seen & set(ids), "a group was trained twice"
        assert len(set(ids)) == len(ids) == world.scenario.schedule.groups_per_step
        world.trained.append((self.policy, step, ids))
        world.weights[self.policy] = digest(world.weights[self.policy], content)
        if world.stop_after is not None and len(world.trained) >= world.stop_after:
            world.stopped = True
        return {"train/loss": (1.0, 1.0)}


class _Publisher:
    def __init__(self, world: Simulation) -> None:
        self.world = world

    async def publish(self, version: Version, changed: bool = True) -> Mapping[str, Any]:
        weights = self.world.weights[version.policy]
        await asyncio.sleep(self.world.scenario.publish_s)
        self.world.served[version.policy] = (version, weights)
        self.world.published.append(str(version))
        return {"engine": object()}


class _Checkpoint:
    def __init__(self, world: Simulation) -> None:
        self.world = world

    async def save(self, step: int, ledger: Mapping[str, Any], *, best: bool) -> Path:
        weights = dict(self.world.weights)
        text = json.dumps({"weights": weights, "ledger": ledger})
        await asyncio.sleep(1.0)
        assert weights == self.world.weights, "the trainer moved during a checkpoint"
        if not self.world.disk.dead:
            self.world.checkpoints[step] = text
            if self.world.keep is not None:
                draft = self.world.keep / f"{step}.draft"
                draft.write_text(text)
                draft.rename(self.world.keep / f"{step}.json")
            self.world.best = step if best else self.world.best
        return Path(f"step_{step:06d}")
