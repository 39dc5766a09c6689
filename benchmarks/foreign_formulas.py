"""Formulas of TRL, verl, OpenRLHF and Miles v0 (`miles-rl`), run on given inputs: the half of `compare_formulas.py`
that runs in an interpreter of its own, which has torch and TRL.

    PYTHON benchmarks/foreign_formulas.py FOLDER < inputs.json > outputs.json

TRL is imported as installed. The others need ray, deepspeed, megatron and the like to be imported as a whole; their
wheels are unpacked in FOLDER, and what is missing is replaced by empty stand-ins, whose names are printed too. Where a
formula stands in the middle of a method, its statements are cut out of the source and run as they are.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import textwrap
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the formula, not its compiler
import torch

Record = dict[str, Any]
T = torch.Tensor


# --- stand-ins for what is not installed ------------------------------------------------------------------------------


class _Loose(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and (callable(args[0]) or isinstance(args[0], type)):
            return args[0]  # a decorator
        return super().__call__()

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, item: Any) -> Any:
        return cls


class Anything(metaclass=_Loose):
    """Whatever is asked of it, it is there and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else self


#: What the formulas' files import and no formula uses.
HEAVY = frozenset(
    {
        "ray",
        "deepspeed",
        "tensordict",
        "megatron",
        "sglang",
        "vllm",
        "hydra",
        "codetiming",
        "flash_attn",
        "orjson",
        "pylatexenc",
        "httpx",
        "torchdata",
    }
)


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last in line: finds what nobody else finds."""

    def __init__(self) -> None:
        self.made: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in HEAVY:
            return None
        self.made.add(name.partition(".")[0])
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _missing(name)  # type: ignore[method-assign]
        module.__version__ = "0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: Any) -> None: ...


def _missing(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything


def bare(package: str, folder: Path) -> None:
    """A package whose `__init__` is not run: its modules can be imported one by one, other names are stand-ins."""

    def offered(name: str) -> Any:
        if (folder / name).is_dir() or (folder / f"{name}.py").is_file():
            raise AttributeError(name)
        return _missing(name)

    module = types.ModuleType(package)
    module.__path__ = [str(folder)]
    module.__getattr__ = offered  # type: ignore[method-assign]
    sys.modules[package] = module


def cut_out(source: Path, wanted: Callable[[str], bool]) -> str:
    """The first statement of a file, at any depth, whose text satisfies `wanted`, with its own indentation removed."""
    text = source.read_text()
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and wanted(ast.get_source_segment(text, node) or ""):
            return textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
    raise LookupError(f"the statement is not in {source} any more")


# --- inputs -----------------------------------------------------------------------------------------------------------


class Inputs:
    """Right-padded tensors of eight answers: two groups of four."""

    def __init__(self, data: Record) -> None:
        self.data = data
        for name in ("mask", "proximal", "current", "behaviour", "values"):
            setattr(self, name, torch.tensor(data[name], dtype=torch.float32))
        self.mask: T
        self.reward = torch.tensor(data["reward"], dtype=torch.float32)
        self.group = data["group"]
        self.advantage = torch.tensor(data["advantage"], dtype=torch.float32)
        self.lengths = data["lengths"]  # without padding

    def leaf(self) -> T:
        return self.current.clone().requires_grad_()  # type: ignore[attr-defined, no-any-return]

    def final(self) -> T:
        """The reward on the last trainable token."""
        found = torch.zeros_like(self.mask)
        for i, row in enumerate(self.mask):
            found[i, int(row.nonzero()[-1])] = self.reward[i]
        return found

    def flat(self, x: T) -> list[float]:
        """Trainable positions only, in order."""
        return [float(v) for v in x[self.mask.bool()]]


def with_gradient(leaf: T, loss: T, inputs: Inputs) -> list[float]:
    """The loss, then its gradient at trainable positions."""
    loss.backward()
    assert leaf.grad is not None
    return [float(loss.detach()), *inputs.flat(leaf.grad)]


# --- TRL --------------------------------------------------------------------------------------------------------------


def trl_records(x: Inputs) -> Iterator[Record]:
    from trl.trainer import grpo_trainer
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.utils import nanstd

    source = Path(grpo_trainer.__file__)
    trainer = grpo_trainer.GRPOTrainer
    block = cut_out(source, lambda s: s.startswith('if self.multi_objective_aggregation == "sum_then_normalize"'))

    def advantages(rewards: list[float], size: int, scale: str = "group") -> list[float]:
        namespace = {
            "self": SimpleNamespace(
                multi_objective_aggregation="sum_then_normalize", reward_weights=torch.ones(1), scale_rewards=scale
            ),
            "rewards_per_func": torch.tensor(rewards)[:, None],
            "device": "cpu",
            "unscorable_mask": torch.zeros(len(rewards), dtype=torch.bool),
            "num_generations": size,
            "torch": torch,
            "nanstd": nanstd,
        }
        exec(compile(block, str(source), "exec"), namespace)
        return [float(v) for v in namespace["advantages"]]

    yield {"topic": "group", "variant": "default", "value": advantages(x.reward.tolist(), 4)}
    yield {"topic": "group_of_one", "variant": "default", "value": advantages([1.0], 1)}
    yield {"topic": "group_equal", "variant": "default", "value": advantages(x.data["equal"], 4)}
    defaults = GRPOConfig(output_dir="unused", report_to=[], use_cpu=True, bf16=False)

    def loss(
        loss_type: str, level: str = "token", lo: float = 0.2, hi: float = 0.2, tis: T | None = None
    ) -> list[float]:
        leaf = x.leaf()
        one = SimpleNamespace(gather=lambda t: t, reduce=lambda t, reduction: t, num_processes=1)
        this = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *a, **k: (leaf, torch.zeros_like(leaf), None),
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            importance_sampling_level=level,
            beta=0.0,
            loss_type=loss_type,
            epsilon_low=lo,
            epsilon_high=hi,
            args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
            use_vllm=tis is not None,
            vllm_importance_sampling_correction=tis is not None,
            model=SimpleNamespace(training=True),
            current_gradient_accumulation_steps=1,
            max_completion_length=x.mask.shape[1],
            accelerator=one,
            aux_loss_enabled=False,
            _entropy_bonus_enabled=False,
            _metrics={"train": defaultdict(list)},
        )
        ids = torch.zeros(x.mask.shape, dtype=torch.long)
        batch = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1] + 1,
            "completion_ids": ids,
            "completion_mask": x.mask,
            "advantages": x.advantage,
            "old_per_token_logps": x.proximal,  # type: ignore[attr-defined]
            "num_items_in_batch": x.mask.sum(),
            "importance_sampling_ratio": tis,
        }
        return with_gradient(leaf, trainer._compute_loss(this, None, batch), x)

    yield {"topic": "grpo", "variant": f"default (loss_type {defaults.loss_type})", "value": loss(defaults.loss_type)}
    yield {"topic": "grpo", "variant": "loss_type grpo", "value": loss("grpo")}
    yield {"topic": "dapo", "variant": "default (epsilon_high = epsilon)", "value": loss("dapo")}
    yield {"topic": "dapo", "variant": "epsilon_high 0.28", "value": loss("dapo", hi=0.28)}
    yield {
        "topic": "gspo",
        "variant": "importance_sampling_level sequence, loss_type grpo, 3e-4/4e-4",
        "value": loss("grpo", "sequence", 3e-4, 4e-4),
    }

    def weights(mode: str, top: float | None) -> list[float]:
        cut = cut_out(source, lambda s: s.startswith("sequence_level_is = self.vllm_importance_sampling_mode in"))
        ratio = cut_out(source, lambda s: s.startswith("vllm_importance_sampling_ratio = torch.exp(logps_diff)"))
        level = cut_out(source, lambda s: s.startswith("if sequence_level_is:") and "per_sequence_logps_diff =" in s)
        bound = cut_out(source, lambda s: s.startswith('if self.vllm_importance_sampling_mode in ["sequence_truncate"'))
        namespace = {
            "self": SimpleNamespace(
                vllm_importance_sampling_mode=mode,
                vllm_importance_sampling_clip_min=None,
                vllm_importance_sampling_clip_max=top,
            ),
            "per_token_logps_diff": (x.proximal - x.behaviour) * x.mask,  # type: ignore[attr-defined]
            "torch": torch,
            "math": __import__("math"),
        }
        exec(compile("".join([cut, level, ratio, bound]), str(source), "exec"), namespace)
        return x.flat(namespace["vllm_importance_sampling_ratio"].expand_as(x.mask))

    mode, top = defaults.vllm_importance_sampling_mode, defaults.vllm_importance_sampling_clip_max
    yield {"topic": "tis", "variant": f"default ({mode}, clip_max {top:g})", "value": weights(mode, top)}
    yield {"topic": "tis", "variant": "token_truncate, clip_max 2", "value": weights("token_truncate", 2.0)}


# --- verl -------------------------------------------------------------------------------------------------------------


def verl_records(x: Inputs) -> Iterator[Record]:
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.workers.config import FSDPActorConfig

    final, index = x.final(), x.group
    group = core_algos.compute_grpo_outcome_advantage
    one = torch.ones(1, 1)

    def first(pair: tuple[T, T]) -> list[float]:
        return [float(row[0]) for row in pair[0]]  # every answer's first token is trainable

    import numpy as np

    yield {"topic": "group", "variant": "default", "value": first(group(final, x.mask, np.array(index)))}
    yield {"topic": "group_of_one", "variant": "default", "value": first(group(one, one, np.array([0])))}
    equal = torch.tensor(x.data["equal"])[:, None]
    found = group(equal, torch.ones_like(equal), np.array([0] * len(equal)))
    yield {"topic": "group_equal", "variant": "default", "value": first(found)}

    def loss(name: str, agg: str | None = None, **options: Any) -> list[float]:
        leaf = x.leaf()
        config = FSDPActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=8, **options)
        function = core_algos.get_policy_loss_fn(name)
        wide = x.advantage[:, None].expand_as(x.mask)
        value, _ = function(x.proximal, leaf, wide, x.mask, agg or config.loss_agg_mode, config, None)  # type: ignore[attr-defined]
        return with_gradient(leaf, value, x)

    off = {"clip_ratio_c": 1e9}
    yield {"topic": "grpo", "variant": "default (token-mean, dual clip 3)", "value": loss("vanilla")}
    yield {
        "topic": "grpo",
        "variant": "loss_agg_mode seq-mean-token-mean, clip_ratio_c off",
        "value": loss("vanilla", "seq-mean-token-mean", **off),
    }
    high = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    yield {"topic": "dapo", "variant": "clip_ratio_high 0.28 (dual clip 3)", "value": loss("vanilla", **high)}
    yield {
        "topic": "dapo",
        "variant": "clip_ratio_high 0.28, clip_ratio_c off",
        "value": loss("vanilla", **high, **off),
    }
    small = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
    yield {"topic": "gspo", "variant": "default aggregation, 3e-4/4e-4", "value": loss("gspo", **small)}
    yield {"topic": "gspo", "variant": "seq-mean-token-mean", "value": loss("gspo", "seq-mean-token-mean", **small)}
    returns, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(final, x.mask, AlgoConfig(gamma=1.0))
    yield {"topic": "reinforce_pp", "variant": "default", "value": x.flat(returns)}
    baseline, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        final.clone(), x.mask, np.array(index)
    )
    yield {"topic": "reinforce_pp_baseline", "variant": "default", "value": x.flat(baseline)}
    log_ratio = x.proximal - x.behaviour  # type: ignore[attr-defined]
    weight, _ = rollout_corr_helper.compute_rollout_correction_weights(log_ratio, x.mask)
    yield {"topic": "tis", "variant": "default (token, threshold 2)", "value": x.flat(weight)}
    gamma, lam = x.data["gamma"], x.data["lam"]
    values = x.values * x.mask  # type: ignore[attr-defined]
    gae, target = core_algos.compute_gae_advantage_return(final, values, x.mask, gamma, lam)
    yield {"topic": "gae_returns", "variant": "default", "value": x.flat(target)}
    yield {"topic": "gae_whitened", "variant": "default (always whitened)", "value": x.flat(gae)}


# --- OpenRLHF ---------------------------------------------------------------------------------------------------------


def openrlhf_records(x: Inputs) -> Iterator[Record]:
    from openrlhf.models import loss as losses
    from openrlhf.trainer.ppo_utils import experience_maker

    maker = experience_maker.RemoteExperienceMaker
    block = cut_out(
        Path(experience_maker.__file__), lambda s: s.startswith('if args.algo.advantage.estimator == "rloo":')
    )

    def group(rewards: T) -> list[float]:
        algo = SimpleNamespace(advantage=SimpleNamespace(estimator="group_norm"))
        rollout = SimpleNamespace(n_samples_per_prompt=rewards.shape[1])
        namespace = {"args": SimpleNamespace(algo=algo, rollout=rollout), "rewards": rewards, "torch": torch}
        exec(compile(block, "openrlhf", "exec"), namespace)
        return [float(v) for v in namespace["rewards"].flatten()]

    yield {"topic": "group", "variant": "group_norm", "value": group(x.reward.view(2, 4))}
    yield {"topic": "group_of_one", "variant": "group_norm", "value": group(torch.ones(1, 1))}
    yield {"topic": "group_equal", "variant": "group_norm", "value": group(torch.tensor([x.data["equal"]]))}

    def loss(**options: Any) -> list[float]:
        leaf = x.leaf()
        wide = x.advantage[:, None].expand_as(x.mask)
        value, *_ = losses.PolicyLoss(**options)(leaf, x.proximal, wide, x.mask, x.behaviour)  # type: ignore[attr-defined]
        return with_gradient(leaf, value, x)

    yield {"topic": "grpo", "variant": "default (token_level_loss)", "value": loss()}
    yield {"topic": "grpo", "variant": "token_level_loss false", "value": loss(token_level_loss=False)}
    yield {"topic": "dapo", "variant": "clip_eps_high 0.28", "value": loss(clip_eps_high=0.28)}
    small = {"clip_eps_low": 3e-4, "clip_eps_high": 4e-4}
    yield {
        "topic": "gspo",
        "variant": "policy_loss_type gspo, 3e-4/4e-4",
        "value": loss(policy_loss_type="gspo", **small),
    }

    def weights(**options: Any) -> list[float]:
        """The weight of each token: its corrected loss over its plain loss, one token at a time."""
        found = []
        for i, t in x.mask.nonzero().tolist():
            pick = [v[i : i + 1, t : t + 1] for v in (x.proximal, x.proximal, x.mask, x.mask, x.behaviour)]  # type: ignore[attr-defined]
            found.append(float(losses.PolicyLoss(**options)(*pick)[0] / losses.PolicyLoss()(*pick)[0]))
        return found

    default = {"is_correction_level": "token"}
    yield {"topic": "tis", "variant": "is_correction_level token (mask outside .5, 5)", "value": weights(**default)}
    truncated = {**default, "is_correction_mode": "clip", "is_correction_threshold": (0.0, 2.0)}
    yield {"topic": "tis", "variant": "mode clip, threshold (0, 2)", "value": weights(**truncated)}
    final, gamma, lam = x.final(), x.data["gamma"], x.data["lam"]
    advantages, target = maker.get_advantages_and_returns(None, x.values, final, x.mask, gamma, lam)  # type: ignore[attr-defined]
    yield {"topic": "gae_returns", "variant": "default", "value": x.flat(target)}
    normalise = cut_out(
        Path(experience_maker.__file__),
        lambda s: s.startswith('if args.algo.advantage.estimator in ["gae", "reinforce"'),
    )

    def whitened(estimator: str, advantages: T) -> list[float]:
        algo = SimpleNamespace(advantage=SimpleNamespace(estimator=estimator, no_std_norm=False))
        one = SimpleNamespace(advantages=advantages, action_mask=x.mask)
        exec(
            compile(normalise, "openrlhf", "exec"),
            {"args": SimpleNamespace(algo=algo), "experiences": [one], "torch": torch},
        )
        return x.flat(one.advantages)

    yield {"topic": "gae_whitened", "variant": "default", "value": whitened("gae", advantages)}
    sums = maker.get_cumulative_returns(None, final, x.mask, 1.0)
    yield {"topic": "reinforce_pp", "variant": "estimator reinforce", "value": whitened("reinforce", sums)}
    centred = (x.reward.view(2, 4) - x.reward.view(2, 4).mean(-1, keepdim=True)).flatten()
    last = torch.where(final != 0, 1.0, 0.0)
    for i, row in enumerate(x.mask):
        last[i, int(row.nonzero()[-1])] = 1.0
    sums = maker.get_cumulative_returns(None, last * centred[:, None], x.mask, 1.0)
    yield {
        "topic": "reinforce_pp_baseline",
        "variant": "estimator reinforce_baseline",
        "value": whitened("reinforce_baseline", sums),
    }


# --- Miles v0 ---------------------------------------------------------------------------------------------------------


def miles_records(x: Inputs) -> Iterator[Record]:
    import torch.distributed as dist
    from miles.backends.training_utils import cp_utils, loss, parallel
    from miles.utils import ppo_utils

    one = SimpleNamespace(cp=SimpleNamespace(size=1, rank=0), intra_dp=SimpleNamespace(group=None))
    for module in (parallel, ppo_utils, loss, cp_utils):
        module.get_parallel_state = lambda: one
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rollout = Path(ppo_utils.__file__).parents[1] / "ray/rollout.py"
    block = cut_out(rollout, lambda s: s.startswith("def _post_process_rewards"))

    def group(rewards: list[float], size: int) -> list[float]:
        args = SimpleNamespace(
            advantage_estimator="grpo",
            rewards_normalization=True,
            grpo_std_normalization=True,
            n_samples_per_prompt=size,
            rollout_batch_size=len(rewards) // size,
        )
        namespace: dict[str, Any] = {"torch": torch, "Sample": Any}
        exec(compile(block, str(rollout), "exec"), namespace)
        this = SimpleNamespace(custom_reward_post_process_func=None, args=args)
        samples = [SimpleNamespace(get_reward_value=lambda args, r=r: r) for r in rewards]
        return [float(v) for v in namespace["_post_process_rewards"](this, samples)[1]]

    yield {"topic": "group", "variant": "default", "value": group(x.reward.tolist(), 4)}
    yield {"topic": "group_of_one", "variant": "default", "value": group([1.0], 1)}
    yield {"topic": "group_equal", "variant": "default", "value": group(x.data["equal"], 4)}
    lengths = x.lengths
    masks = [x.mask[i, :n] for i, n in enumerate(lengths)]

    def rows(v: T) -> list[T]:
        return [v[i, :n] for i, n in enumerate(lengths)]

    def policy(lo: float, hi: float, *, sequence: bool = False, per_token: bool = False) -> list[float]:
        leaf = x.leaf()
        current, old = rows(leaf), rows(x.proximal)  # type: ignore[attr-defined]
        if sequence:
            kl = ppo_utils.compute_gspo_kl(current, old, current, masks)
        else:
            kl = torch.cat(old) - torch.cat(current)
        wide = torch.cat([a.expand(n) for a, n in zip(x.advantage, lengths, strict=True)])
        value, _ = ppo_utils.compute_policy_loss(kl, wide, lo, hi)
        total = cp_utils.get_sum_of_sample_mean(lengths, lengths, masks, per_token)(value)
        # What Megatron divides by: rollouts of the step, or tokens.
        return with_gradient(leaf, total / (x.mask.sum() if per_token else len(lengths)), x)

    yield {"topic": "grpo", "variant": "default (mean of sample means)", "value": policy(0.2, 0.2)}
    yield {"topic": "dapo", "variant": "eps_clip_high 0.28", "value": policy(0.2, 0.28)}
    yield {
        "topic": "dapo",
        "variant": "eps_clip_high 0.28, calculate_per_token_loss",
        "value": policy(0.2, 0.28, per_token=True),
    }
    yield {"topic": "gspo", "variant": "3e-4/4e-4", "value": policy(3e-4, 4e-4, sequence=True)}

    def estimate(estimator: str, rewards: list[float], *, whiten: bool) -> Record:
        data: dict[str, Any] = {
            "log_probs": rows(x.proximal),  # type: ignore[attr-defined]
            "rewards": rewards,
            "values": rows(x.values),  # type: ignore[attr-defined]
            "response_lengths": lengths,
            "total_lengths": lengths,
            "loss_masks": masks,
        }
        args = SimpleNamespace(
            use_rollout_logprobs=False,
            kl_coef=0.0,
            advantage_estimator=estimator,
            gamma=x.data["gamma"] if estimator == "ppo" else 1.0,
            lambd=x.data["lam"],
            normalize_advantages=whiten,
            kl_loss_type="k1",
        )
        loss.compute_advantages_and_returns(args, data)
        return data

    def padded(parts: list[T]) -> T:
        found = torch.zeros_like(x.mask)
        for i, part in enumerate(parts):
            found[i, : len(part)] = part
        return found

    found = estimate("reinforce_plus_plus", x.reward.tolist(), whiten=True)
    yield {"topic": "reinforce_pp", "variant": "default", "value": x.flat(padded(found["advantages"]))}
    centred = (x.reward.view(2, 4) - x.reward.view(2, 4).mean(-1, keepdim=True)).flatten().tolist()
    found = estimate("reinforce_plus_plus_baseline", centred, whiten=True)
    yield {"topic": "reinforce_pp_baseline", "variant": "default", "value": x.flat(padded(found["advantages"]))}
    found = estimate("ppo", x.reward.tolist(), whiten=True)
    yield {"topic": "gae_returns", "variant": "default", "value": x.flat(padded(found["returns"]))}
    yield {"topic": "gae_whitened", "variant": "normalize_advantages", "value": x.flat(padded(found["advantages"]))}
    ones = torch.ones_like(torch.cat(masks))
    args = SimpleNamespace(tis_clip_low=0.0, tis_clip=2.0)
    weight, _, _ = loss.vanilla_tis_function(
        args,
        pg_loss=ones,
        train_log_probs=rows(x.proximal),  # type: ignore[attr-defined]
        rollout_log_probs=rows(x.behaviour),  # type: ignore[attr-defined]
        loss_masks=masks,
    )
    yield {"topic": "tis", "variant": "default (0, 2)", "value": x.flat(padded(list(weight.split(lengths))))}


# --- all of them ------------------------------------------------------------------------------------------------------

SYSTEMS: dict[str, Callable[[Inputs], Iterator[Record]]] = {
    "trl": trl_records,
    "verl": verl_records,
    "openrlhf": openrlhf_records,
    "miles-rl": miles_records,
}
#: Packages whose own `__init__` would import what no formula needs: (package, folder below the unpacked wheel).
BARE = {
    "openrlhf": (
        "openrlhf",
        "openrlhf.models",
        "openrlhf.trainer",
        "openrlhf.trainer.ppo_utils",
        "openrlhf.trainer.ray",
    ),
    "miles-rl": ("miles", "miles.utils", "miles.backends", "miles.backends.training_utils"),
}


def main() -> None:
    folder, x = Path(sys.argv[1]), Inputs(json.load(sys.stdin))
    stand_ins = StandIns()
    found: dict[str, Any] = {}
    for name, records in SYSTEMS.items():
        root = next(folder.glob(f"{name}/**/{'miles' if name == 'miles-rl' else name}"), None)
        if root is not None:
            sys.path.insert(0, str(root.parent))
        for package in BARE.get(name, ()):
            bare(package, Path(str(root.parent), *package.split(".")))  # type: ignore[union-attr]
        if name != "trl" and stand_ins not in sys.meta_path:
            sys.meta_path.append(stand_ins)
        stand_ins.made.clear()
        entry: dict[str, Any] = {"records": [], "error": ""}
        try:
            entry["records"] = list(records(x))
        except Exception as error:  # said in the table: not run, and why
            entry["error"] = f"{type(error).__name__}: {error}"
            if "--traceback" in sys.argv:
                raise
        entry["stand_ins"] = sorted(stand_ins.made)
        found[name] = entry
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
