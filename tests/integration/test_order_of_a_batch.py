"""The order of groups in a step and of members in a group changes neither the loss nor a gradient, in float64, whatever
the preset: everything between the sampled groups and the gradient of every log-probability, entropy and value."""

import asyncio
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from miles_core.columns import CORE_COLUMNS
from miles_core.config.compose import load
from miles_core.contracts.learning import UpdateResult
from miles_core.discovery import scan
from miles_core.learner import Learner
from miles_core.numerics import objective
from miles_core.numerics.views import MicroView
from miles_core.records import Episode, Finish, Group, Sampling, Task, Trajectory
from miles_core.wiring import Wiring

RUN = """
run: {name: order}
model: {use: causal-lm, source: ./none}
env: {use: arithmetic}
rollout: {use: local, max_new_tokens: 8}
backend: {use: fsdp}
sync: {use: bucketed}
algorithm: {use: grpo}
schedule: {groups_per_step: 6, group_size: 4}
"""
REFERENCE = "roles.reference={init: actor, update: frozen}"
CRITIC = "roles.critic={init: actor, update: trained, head: value}"
NEAR = [REFERENCE, "algorithm.kl.coef=0.1", "algorithm.entropy.coef=0.01"]
REWARD_KL = [REFERENCE, "algorithm.reward_kl.coef=0.1"]
MIS = (
    "algorithm.corrections={mis: {level: sequence, normalize: batch, mode: mask, reject: {level: geometric}}, opsm: {}}"
)
PRESETS = {
    "grpo": NEAR,
    "dr_grpo": [*NEAR, "algorithm.constant_length=9"],
    "rloo": NEAR,
    "dapo": [*NEAR, "algorithm.truncated=mask", "algorithm.excluded_count_in_baseline=false"],
    "gspo": NEAR,
    "cispo": [*NEAR, "algorithm.loss.hi=0.2"],
    "reinforce_pp": [*REWARD_KL, "algorithm.advantage.gamma=0.9"],
    "reinforce_pp_baseline": REWARD_KL,
    "ppo": [*REWARD_KL, CRITIC, "algorithm.advantage={gamma: 0.9, lam: 0.8, bootstrap_truncated: true}"],
}


def numbers(trajectory, name, length):
    """Made of the trajectory's identity, wherever it stands."""
    rng = np.random.default_rng(zlib.crc32(f"{trajectory}|{name}".encode()))
    return -rng.exponential(size=length)


def groups_of(seed):
    """Six groups of one to five episodes, some with siblings, some cut off, with rewards that are no round numbers."""
    rng = np.random.default_rng(seed)
    made = []
    for g, size in enumerate((4, 1, 5, 3, 4, 2)):
        episodes = []
        for e in range(size):
            rows = []
            for r in range(int(rng.integers(1, 3))):
                n = int(rng.integers(4, 11))
                id = f"g{g}/{e}/{r}"
                origin = np.where(np.arange(n) < 2, 0, np.where(rng.random(n) < 0.2, 2, 1)).astype(np.uint8)
                columns = {
                    "tokens": rng.integers(2, 9, n).astype(np.int32),
                    "origin": origin,
                    "trainable": (origin == 1) & (rng.random(n) < 0.9),
                    "behaviour_logprobs": np.where(origin == 1, numbers(id, "behaviour", n), 0).astype(np.float32),
                }
                finish = Finish.LENGTH if rng.random() < 0.3 else Finish.STOP
                sampling = Sampling(max_new_tokens=8)
                rows.append(Trajectory(id=id, length=n, columns=columns, finish=finish, sampling=sampling))
            reward = float(rng.normal(0.3, 0.7) if g != 3 else 0.1)
            episodes.append(Episode(id=f"g{g}/{e}", member=e, trajectories=tuple(rows), reward=reward))
        task = Task(id=f"t{g}", prompt="")
        made.append(Group(id=f"g{g}", policy="main", slot=g, attempt=0, task=task, episodes=tuple(episodes)))
    return made


class Trainer:
    """Outputs by trajectory in float64; keeps the losses, and gradients by trajectory and output."""

    def __init__(self, terms):
        self.terms = terms
        self.losses, self.gradients = [], {}

    async def score(self, batch, outputs):
        def column(output):
            rows = zip(batch.trajectory_ids, batch.lengths, strict=True)
            return np.concatenate([numbers(id, f"old {output.role} {output.name}", int(n)) for id, n in rows])

        return {output.column: column(output) for output in outputs}

    async def update(self, minibatch):
        leaves = {}

        def output(asked):
            if asked not in leaves:
                rows = zip(minibatch.trajectory_ids, minibatch.lengths, strict=True)
                old = "" if asked.name == "entropy" else f"old {asked.role} {asked.name}"
                value = [numbers(i, old, int(n)) + 0.2 * numbers(i, f"{asked.name} now", int(n)) for i, n in rows]
                leaves[asked] = torch.from_numpy(np.concatenate(value)).requires_grad_()
            return leaves[asked]

        loss, _ = objective.evaluate(MicroView(minibatch, output).at, self.terms, str)
        loss.backward()
        self.losses.append(loss.item())
        for asked, leaf in leaves.items():
            if leaf.grad is not None:
                parts = np.split(leaf.grad.numpy(), minibatch.offsets[1:-1])
                self.gradients |= {
                    (asked.role, asked.name, i): p for i, p in zip(minibatch.trajectory_ids, parts, strict=True)
                }
        return UpdateResult(metrics={}, grad_norm=1.0)

    async def blend(self, policy, dst, src, decay): ...


def learnt(folder, groups, *overrides):
    (folder / "run.yaml").write_text(RUN)
    catalogue = scan()
    run_file = load(folder / "run.yaml", overrides, catalogue=catalogue)
    policy = run_file.policies["main"]
    wiring = Wiring(run_file, catalogue, Path("."), {})
    trainer = Trainer(wiring.terms(policy))
    infos = [term.info for term in trainer.terms]
    learner = Learner(policy, 7, wiring.stages(policy), infos, trainer, CORE_COLUMNS, max_new_tokens=8)
    asyncio.run(learner.step(0, groups))
    return trainer


def same(one, other):
    assert len(one.losses) == len(other.losses) and one.gradients.keys() == other.gradients.keys()
    np.testing.assert_allclose(one.losses, other.losses, rtol=1e-12, atol=1e-14)
    for key, gradient in one.gradients.items():
        np.testing.assert_allclose(other.gradients[key], gradient, rtol=1e-12, atol=1e-14, err_msg=str(key))


@pytest.mark.parametrize("corrections", ["", MIS])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_order_changes_nothing(tmp_path, preset, corrections):
    given = [f"algorithm.use={preset}", *PRESETS[preset], *([corrections] if corrections else [])]
    for seed in range(3):
        groups = groups_of(seed)
        rng = np.random.default_rng(seed)

        def turned(group, rng=rng):
            return replace(group, episodes=tuple(group.episodes[i] for i in rng.permutation(len(group.episodes))))

        straight = learnt(tmp_path, groups, *given)
        assert abs(straight.losses[0]) > 1e-4 and any(np.abs(g).max() > 1e-4 for g in straight.gradients.values())
        slots = rng.permutation(len(groups))  # core trains in the order of slots
        moved = [replace(turned(g), slot=int(slot)) for g, slot in zip(groups, slots, strict=True)]
        same(straight, learnt(tmp_path, moved, *given))
        # two updates: which groups meet in one is a matter of slots, and only members may change places
        two = "schedule.updates_per_step=2"
        parts = learnt(tmp_path, groups, *given, two)
        assert len(parts.losses) == 2
        same(parts, learnt(tmp_path, [turned(g) for g in reversed(groups)], *given, two))
