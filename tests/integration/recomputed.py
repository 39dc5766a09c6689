"""A second trainer, in float64 and as plainly as the numerics reference says it: from the journal of a run it computes
what every optimizer update of it must have been. It shares no formula with the code under test."""

import copy
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from miles_core.frames import decode_group
from miles_core.journal import read


def by_step(run: Path) -> dict[int, list]:
    """The groups that each step trained, in slot order."""
    groups, steps = {}, {}
    for frame in read(run / "journal"):
        if frame.kind == "group":
            groups[frame.header["lease"]] = decode_group(frame.header, frame.body)
        elif frame.kind == "trained":
            steps[frame.header["step"]] = [groups[lease] for lease in frame.header["leases"]]
    return {step: sorted(found, key=lambda g: (g.slot, g.id)) for step, found in steps.items()}


def leases_of(run: Path) -> dict[str, dict]:
    """Task -> slot, and how its lease ended, and why (of trained ones: at which step)."""
    leases = {}
    for frame in read(run / "journal"):
        header = frame.header
        if frame.kind == "lease":
            leases[header["id"]] = {"task": header["task"], "slot": header["slot"]}
        elif frame.kind == "trained":
            for lease in header["leases"]:
                leases[lease] |= {"end": "trained", "why": header["step"]}
        elif frame.kind == "end":
            leases[header["lease"]] |= {"end": header["end"], "why": header["why"]}
    return {lease["task"]: lease for lease in leases.values()}


@dataclass
class Rows:
    """The trajectories of some groups, right-padded: [rows, tokens] and [rows]."""

    tokens: torch.Tensor
    trainable: torch.Tensor  # what is trained: without episodes that are excluded
    behaviour: torch.Tensor
    temperature: torch.Tensor
    cut: torch.Tensor  # ended for want of tokens
    lengths: torch.Tensor
    episode: np.ndarray
    group: np.ndarray
    sampled: list[int]
    episodes: list
    excluded: list[bool]


def truncated(episode) -> bool:
    return episode.status == "truncated" or any(t.finish == "length" for t in episode.trajectories)


def rows_of(groups: list, mask_truncated: bool = False) -> Rows:
    episodes = [e for g in groups for e in g.episodes]
    excluded = [e.status == "failed" or (mask_truncated and truncated(e)) for e in episodes]
    found = [(i, t) for i, e in enumerate(episodes) for t in e.trajectories]
    longest = max(t.length for _, t in found)

    def padded(column, dtype):
        block = np.zeros((len(found), longest), dtype)
        for row, (_, t) in enumerate(found):
            block[row, : t.length] = t.columns[column]
        return torch.from_numpy(block)

    trainable = padded("trainable", bool)
    for row, (i, _) in enumerate(found):
        trainable[row] &= not excluded[i]
    return Rows(
        tokens=padded("tokens", np.int64),
        trainable=trainable,
        behaviour=padded("behaviour_logprobs", np.float64),
        temperature=torch.tensor([t.sampling.temperature for _, t in found], dtype=torch.float64),
        cut=torch.tensor([t.finish == "length" for _, t in found]),
        lengths=torch.tensor([t.length for _, t in found]),
        episode=np.array([i for i, _ in found]),
        group=np.repeat(np.arange(len(groups)), [len(g.episodes) for g in groups]),
        sampled=[int((t.columns["origin"] == 1).sum()) for _, t in found],
        episodes=episodes,
        excluded=excluded,
    )


class Model:
    """A Hugging Face model in float64, with a value head on it where asked (`shared`: beside its own head), and its
    optimizer."""

    def __init__(self, folder: Path, optimizer, total: int, value: bool = False, shared: bool = False) -> None:
        self.lm = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double().eval()
        size = self.lm.config.hidden_size
        self.head = torch.zeros(size + 1, dtype=torch.float64, requires_grad=True) if value else None
        trunk = self.lm.model if value and not shared else self.lm
        self.parameters = [*trunk.parameters(), *([self.head] if value else [])]
        self.options, self.total, self.updates = optimizer, total, 0
        self.adam = torch.optim.AdamW(
            self.parameters,
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )

    def logprobs(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """log π(token t | before t) and the entropy of that distribution, 0 at the first token."""
        logits = self.lm(input_ids=rows.tokens, use_cache=False).logits[:, :-1] / rows.temperature[:, None, None]
        full = logits.log_softmax(-1)
        own = full.gather(-1, rows.tokens[:, 1:, None])[..., 0]
        entropy = -(full.exp() * full).sum(-1)
        first = torch.zeros(len(own), 1, dtype=torch.float64)
        return torch.cat([first, own], 1), torch.cat([first, entropy], 1)

    def values(self, rows: Rows) -> torch.Tensor:
        """The head's output at each token."""
        hidden = self.lm.model(input_ids=rows.tokens, use_cache=False)[0]
        return hidden @ self.head[:-1] + self.head[-1]

    def step(self) -> float:
        """One update from the gradients: the norm before clipping. The rate falls linearly by updates."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = math.sqrt(sum(float((g * g).sum()) for g in grads))
        if norm > self.options.max_grad_norm:
            for grad in grads:
                grad.mul_(self.options.max_grad_norm / norm)
        self.adam.param_groups[0]["lr"] = self.options.lr * (1 - self.updates / self.total)
        self.adam.step()
        self.adam.zero_grad()
        self.updates += 1
        return norm


def before(values: torch.Tensor) -> torch.Tensor:
    """V_t is the head's output at position t−1."""
    return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], 1)


# --- rewards and advantages -----------------------------------------------------------------------------------------


def rewards_of(rows: Rows, counted: bool, overlong: tuple[float, float] | None) -> np.ndarray:
    """R per episode; NaN where it is in no statistic."""
    found = []
    for i, episode in enumerate(rows.episodes):
        reward = math.nan if episode.reward is None or episode.status == "failed" else episode.reward
        if rows.excluded[i] and not counted:
            reward = math.nan
        if overlong is not None:
            most, buffer = overlong
            longest = max((n for n, e in zip(rows.sampled, rows.episode, strict=True) if e == i), default=0)
            reward -= min(1.0, max(0.0, (longest - (most - buffer)) / buffer))
        found.append(reward)
    return np.array(found)


def by_group(rows: Rows, reward: np.ndarray, formula) -> np.ndarray:
    found = np.full(len(reward), math.nan)
    for g in set(rows.group.tolist()):
        members = [i for i in np.flatnonzero(rows.group == g) if not math.isnan(reward[i])]
        for i in members:
            found[i] = formula(reward[i], [reward[j] for j in members], [reward[j] for j in members if j != i])
    return found


def standardised(scale: bool):
    def formula(r, group, others):
        if not others or max(group) - min(group) <= 1e-6 * max(1.0, *map(abs, group)):
            return 0.0
        mean = sum(group) / len(group)
        std = math.sqrt(sum((x - mean) ** 2 for x in group) / (len(group) - 1))
        return (r - mean) / (std + 1e-6) if scale else r - mean

    return formula


def left_out(r, group, others):
    return r - sum(others) / len(others) if others else 0.0


def centred(r, group, others):
    return r - sum(group) / len(group)


def walk(rows: Rows, visit) -> torch.Tensor:
    """visit(row, its trainable positions) -> values of these."""
    found = torch.zeros(rows.tokens.shape, dtype=torch.float64)
    for row in range(len(rows.tokens)):
        live = torch.nonzero(rows.trainable[row])[:, 0].tolist()
        if live:
            found[row, live] = torch.tensor(visit(row, live), dtype=torch.float64)
    return found


def token_rewards(rows: Rows, reward: np.ndarray, kl: torch.Tensor, row: int, live: list[int]) -> list[float]:
    found = [-float(kl[row, t]) for t in live]
    found[-1] += reward[rows.episode[row]]
    return found


def gae(rows, reward, kl, values, ends, gamma, lam, bootstrap):
    """(advantages, returns)."""

    def visit(row, live):
        rewards = token_rewards(rows, reward, kl, row, live)
        after, ahead = 0.0, float(ends[row]) if bootstrap and rows.cut[row] else 0.0
        found = []
        for t, r in zip(reversed(live), reversed(rewards), strict=True):
            delta = r + gamma * ahead - float(values[row, t])
            after, ahead = delta + gamma * lam * after, float(values[row, t])
            found.append(after)
        return found[::-1]

    advantages = walk(rows, visit)
    return advantages, torch.where(rows.trainable, advantages + values, 0.0)


def returns(rows, reward, kl, gamma):
    def visit(row, live):
        rewards = token_rewards(rows, reward, kl, row, live)
        return [sum(r * gamma**n for n, r in enumerate(rewards[i:])) for i in range(len(live))]

    return walk(rows, visit)


def whitened(rows: Rows, x: torch.Tensor) -> torch.Tensor:
    values = x[rows.trainable]
    mean = values.mean()
    var = ((values - mean) ** 2).sum() / (len(values) - 1)
    return torch.where(rows.trainable, (x - mean) / (var + 1e-8).sqrt(), 0.0)


# --- the objective --------------------------------------------------------------------------------------------------


def aggregate(x: torch.Tensor, rows: Rows, at: np.ndarray, recipe: "Recipe", kept=None) -> torch.Tensor:
    """agg(x) over the minibatch whose rows are `at` (bool). Its episodes count even where they have no row. `kept` is m
    without what was rejected: numerators lose the rest, denominators only where the run says so."""
    here = torch.from_numpy(at)
    kept = rows.trainable if kept is None else kept
    picked = torch.where(kept, x, 0.0)[here]
    counts = (kept if recipe.reject_denominator else rows.trainable)[here].sum(1)
    if recipe.how == "token_mean":
        return picked.sum() / counts.sum()
    if recipe.how == "constant":
        return picked.sum() / (rows.minibatch_episodes * recipe.length)
    if recipe.how == "episode_sum":
        return picked.sum() / rows.minibatch_episodes
    total = 0.0
    for episode in set(rows.episode[at].tolist()):
        own = torch.from_numpy(rows.episode[at] == episode)
        if counts[own].sum():
            total = total + picked[own].sum() / counts[own].sum()
    return total / rows.minibatch_episodes


# --- corrections: of log w = π_p − π_b and m, the weight and what is rejected ---------------------------------------


def per_row(x: torch.Tensor, m: torch.Tensor, mean: bool) -> torch.Tensor:
    total = torch.where(m, x, 0.0).sum(1)
    return (total / m.sum(1).clamp(min=1) if mean else total)[:, None].expand_as(x)


def tis(high: float):
    return lambda log_w, m: (log_w.exp().clamp(0, high), torch.zeros_like(m))


def icepop(low: float, high: float):
    def correct(log_w, m):
        w = log_w.exp()
        return torch.where((w >= low) & (w <= high), w, 0.0), torch.zeros_like(m)

    return correct


def mis(high: float, most: float, veto: float):
    """Mode clip at level sequence, rejection by the geometric mean, a veto, a mean weight of 1 over trajectories."""

    def correct(log_w, m):
        w = per_row(log_w, m, mean=False).exp().clamp(1 / high, high)
        geometric = per_row(log_w, m, mean=True).exp()
        vetoed = (m & (log_w.exp() < veto)).any(1, keepdim=True).expand_as(m)
        rejected = (geometric > most) | (geometric < 1 / most) | vetoed
        mean = torch.stack([w[row, 0] for row in range(len(w)) if (m & ~rejected)[row].any()]).mean()
        return w / mean, rejected

    return correct


def policy_term(loss: str, rho: torch.Tensor, a: torch.Tensor, pi: torch.Tensor, lo: float, hi: float) -> torch.Tensor:
    if loss == "clip":
        return torch.maximum(-rho * a, -rho.clamp(1 - lo, 1 + hi) * a)
    if loss == "cispo":
        return -rho.clamp(1 - lo, 1 + hi).detach() * a * pi
    return -a * pi


@dataclass(kw_only=True)
class Recipe:
    """What a preset means, by the table of presets."""

    advantage: object
    loss: str = "clip"
    lo: float = 0.2
    hi: float = 0.2
    sequence: bool = False
    how: str = "token_mean"
    whiten: bool = False
    overlong: tuple[float, float] | None = None
    length: int | None = None
    kl: float = 0.0
    entropy: float = 0.0
    reward_kl: float = 0.0
    mask_truncated: bool = False
    counted: bool = True
    drop_truncated: bool = False
    gamma: float = 1.0
    lam: float = 1.0
    bootstrap: bool = False
    correct: object = None
    shared: bool = False  # the critic is a head on the actor's module
    bypass: bool = False
    opsm: float | None = None
    reject_denominator: bool = False


PRESETS = {
    "grpo": Recipe(advantage=standardised(True), how="episode_mean"),
    "dr_grpo": Recipe(advantage=standardised(False), how="constant"),
    "rloo": Recipe(advantage=left_out, loss="reinforce", how="episode_sum"),
    "dapo": Recipe(advantage=standardised(True), hi=0.28),
    "gspo": Recipe(advantage=standardised(True), sequence=True, lo=3e-4, hi=4e-4, how="episode_mean"),
    "cispo": Recipe(advantage=standardised(True), loss="cispo", lo=1.0),
    "reinforce_pp": Recipe(advantage="returns", whiten=True),
    "reinforce_pp_baseline": Recipe(advantage=centred, whiten=True),
    "ppo": Recipe(advantage="gae", whiten=True),
}


def retrain(run: Path, base: Path, recipe: Recipe, policy, steps: int) -> tuple[list[dict], Model, Model | None]:
    """Per step what was computed: Σ over updates of the losses, norms, shares; then the models that came out."""
    updates = policy.schedule.updates_per_step
    optimizer = policy.roles["actor"].optimizer
    actor = Model(base, optimizer, steps * updates, value=recipe.shared, shared=recipe.shared)
    reference = copy.deepcopy(actor.lm)
    critic = actor if recipe.shared else None
    if recipe.advantage == "gae" and not recipe.shared:
        critic = Model(base, policy.roles["critic"].optimizer, steps * updates, value=True)
    told = []
    for _, groups in sorted(by_step(run).items()):
        if recipe.drop_truncated:
            groups = [g for g in groups if not any(map(truncated, g.episodes))]
        rows = rows_of(groups, recipe.mask_truncated)
        m = rows.trainable
        reward = rewards_of(rows, recipe.counted, recipe.overlong)
        with torch.no_grad():
            proximal, _ = actor.logprobs(rows)
            current, actor.lm = actor.lm, reference
            behind, _ = actor.logprobs(rows)
            actor.lm = current
        kl = recipe.reward_kl * (proximal - behind)
        old = target = None
        if recipe.advantage == "gae":
            with torch.no_grad():
                out = critic.values(rows)
            old, ends = before(out), out.gather(1, rows.lengths[:, None] - 1)[:, 0]
            a, target = gae(rows, reward, kl, old, ends, recipe.gamma, recipe.lam, recipe.bootstrap)
        elif recipe.advantage == "returns":
            a = returns(rows, reward, kl, recipe.gamma)
        else:
            episodes = torch.from_numpy(by_group(rows, reward, recipe.advantage))
            a = torch.where(m, episodes[rows.episode][:, None] - kl, 0.0)
        if recipe.whiten:
            a = whitened(rows, a)
        log_w = (proximal - rows.behaviour)[m]
        weight, kept = torch.ones_like(a), m
        if recipe.correct is not None:
            weight, rejected = recipe.correct(torch.where(m, proximal - rows.behaviour, 0.0), m)
            kept = m & ~rejected
        proximal = rows.behaviour if recipe.bypass else proximal
        line = {"loss": 0.0, "grad_norm": 0.0, "critic.loss": 0.0, "clip/clip_low": 0.0, "clip/clip_high": 0.0}
        line |= {"mismatch/k3": float((log_w.exp() - 1 - log_w).sum()), "updates": 0, "opsm/masked": 0.0}
        line |= {"reward": float(np.nansum(reward)), "rejected": int((m & ~kept).sum()), "trainable": int(m.sum())}
        first, cuts = 0, []
        for left in range(min(updates, len(groups)), 0, -1):  # runs of whole groups, sizes differing by at most one
            size = -(-(len(groups) - first) // left)
            cuts.append(range(first, first + size))
            first += size
        for cut in cuts:
            at = np.isin(rows.group[rows.episode], list(cut))
            rows.minibatch_episodes = int(np.isin(rows.group, list(cut)).sum())
            if not m[torch.from_numpy(at)].any():
                continue
            pi, entropy = actor.logprobs(rows)
            log_ratio = torch.where(m, pi - proximal, 0.0)
            if recipe.sequence:
                log_ratio = (log_ratio.sum(1) / m.sum(1).clamp(min=1))[:, None].expand_as(log_ratio)
            rho = log_ratio.exp()
            policy_loss = weight * policy_term(recipe.loss, rho, a, pi, recipe.lo, recipe.hi)
            inside = m & torch.from_numpy(at)[:, None]
            if recipe.opsm is not None:
                left = per_row((rows.behaviour - pi).detach(), m, mean=True) > recipe.opsm
                policy_loss = torch.where(left & (a < 0), 0.0, policy_loss)
                line["opsm/masked"] += int((left & (a < 0) & inside).sum())
            loss = aggregate(policy_loss, rows, at, recipe, kept)
            d = pi - behind
            loss = loss + recipe.kl * aggregate((-d).exp() - 1 + d, rows, at, recipe, kept)
            loss = loss - recipe.entropy * aggregate(entropy, rows, at, recipe, kept)
            value = torch.zeros(())
            if critic is not None:
                v = before(critic.values(rows))
                held = old + (v - old).clamp(-0.2, 0.2)
                error = torch.maximum((v - target) ** 2, (held - target) ** 2)
                value = 0.5 * aggregate(error, rows, at, recipe)
            (loss + value).backward()
            line["loss"] += loss.item()
            line["critic.loss"] += value.item()
            line["grad_norm"] += actor.step()
            line["updates"] += 1
            line["clip/clip_low"] += int(((rho < 1 - recipe.lo) & (a < 0) & inside & kept).sum())
            line["clip/clip_high"] += int(((rho > 1 + recipe.hi) & (a > 0) & inside & kept).sum())
            if critic is not None and not recipe.shared:
                critic.step()
        told.append(line)
    return told, actor, critic
