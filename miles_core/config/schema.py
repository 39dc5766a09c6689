"""What the core owns of a run file, typed; and `RunFile`, the frozen result that everything else reads.

A plugin's own dataclass types the rest of its section and may not repeat a key that core owns there. A plugin's rules
across its fields live in `__post_init__` and raise `ValueError` naming field and value; rules across sections live in
`config/rules.py`. Choices are `StrEnum`s whose values are their members' names. Optional numbers are off as `null`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


def opt(default: Any, help: str, *, unit: str = "", low: float | None = None, high: float | None = None) -> Any:
    """A dataclass field with help, unit and inclusive bounds; core checks the bounds of plugins' fields too."""
    metadata = {"help": help, "unit": unit, "low": low, "high": high}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


Journal = StrEnum("Journal", ["full", "light"])
EvalEngines = StrEnum("EvalEngines", ["pool", "pinned", "shared"])
Order = StrEnum("Order", ["slot", "ready"])
OnStale = StrEnum("OnStale", ["drop", "retry", "mask"])
OnFailedEpisode = StrEnum("OnFailedEpisode", ["shrink", "drop_group"])
OffPolicy = StrEnum("OffPolicy", ["corrected", "uncorrected"])
Decay = StrEnum("Decay", ["constant", "linear", "cosine"])
RoleUpdate = StrEnum("RoleUpdate", ["trained", "frozen", "copy", "ema", "adapter_off", "shares"])
Verify = StrEnum("Verify", ["probe", "native", "received", "live"])
EpisodeSource = StrEnum("EpisodeSource", ["sampled", "demonstrations"])
Aggregation = StrEnum("Aggregation", ["token_mean", "episode_mean", "episode_sum", "constant"])
Truncated = StrEnum("Truncated", ["train", "mask", "drop_group"])
RejectDenominator = StrEnum("RejectDenominator", ["original", "kept"])


class OnUpdate(StrEnum):  # spelled out: the publisher is typed by these very words
    in_place = "in_place"
    recompute = "recompute"
    abort = "abort"
    finish = "finish"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Section `run`."""

    name: str = opt("run", "name of the run; its directory is runs/<name>")
    dir: str | None = opt(None, "the run directory itself; runs/<name> where null")
    folder: str | None = opt(None, "base of relative paths of data and code; filled in: the run file's folder")
    seed: int = opt(0, "seed of every random stream", low=0)
    steps: int = opt(100, "training steps", unit="steps", low=1)
    journal: Journal = opt(Journal.full, "whether large columns are journalled too")
    checkpoint_every: int | None = opt(
        None, "checkpoint interval; where null, at the end; the best evaluation is kept, too", unit="steps", low=1
    )
    threads: int = opt(1, "threads of each process's math libraries", unit="threads", low=1)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Section `eval`: evaluation on each environment's own split."""

    every: int | None = opt(None, "evaluate before step 0, every so many steps and at the end; off where null", low=1)
    tasks: int = opt(128, "tasks an evaluation, from the start of the eval split", unit="tasks", low=1, high=100_000)
    temperature: float = opt(0.0, "sampling temperature of evaluations; 0 is greedy", low=0)
    engines: EvalEngines = opt(EvalEngines.pool, "which engines evaluate; only `pool` is built yet")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Section `schedule`: one loop, one knob (`max_staleness`)."""

    groups_per_step: int = opt(16, "groups that a step consumes", unit="groups", low=1)
    group_size: int = opt(8, "episodes sampled for one task", unit="episodes", low=1)
    updates_per_step: int = opt(1, "optimizer updates a step, each on a run of whole groups", low=1)
    max_staleness: int = opt(0, "how many versions a token may lag; 0 is strictly on-policy", unit="steps", low=0)
    off_policy: OffPolicy = opt(OffPolicy.corrected, "`uncorrected` allows staleness without a correction")
    order: Order = opt(Order.slot, "`slot`: a batch waits for its own slots; `ready`: first finished")
    on_stale: OnStale = opt(OnStale.drop, "what becomes of a group that is too old")
    on_update: OnUpdate = opt(OnUpdate.in_place, "what happens to requests in flight when weights change")
    on_failed_episode: OnFailedEpisode = opt(OnFailedEpisode.shrink, "what a failed episode does to its group")
    min_group_size: int = opt(1, "smallest group that may be trained", unit="episodes", low=1)
    oversample: int = opt(0, "extra leases beyond what admission allows", unit="groups", low=0)
    max_leases_per_slot: int = opt(32, "leases that one slot may use before the run stops", low=1)
    publish_every: int = opt(1, "steps between publications", unit="steps", low=1)
    samplers: int = opt(0, "sampler processes; 0 runs episodes in the controller", low=0)
    episode_deadline_s: float = opt(600.0, "deadline of one episode", unit="s", low=0.001)
    stall_deadline_s: float = opt(1800.0, "the run stops where nothing progresses for so long", unit="s", low=0.001)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Section `optimizer`: AdamW with a schedule that advances by optimizer updates."""

    lr: float = opt(1e-6, "peak learning rate", low=0)
    beta1: float = opt(0.9, "decay of the first moment", low=0, high=1 - 1e-9)
    beta2: float = opt(0.95, "decay of the second moment", low=0, high=1 - 1e-9)
    eps: float = opt(1e-8, "added to the root of the second moment", low=0)
    weight_decay: float = opt(0.0, "decoupled weight decay", low=0)
    max_grad_norm: float | None = opt(1.0, "clip of the global gradient norm; off where null", low=1e-30)
    decay: Decay = opt(Decay.constant, "shape after the warm-up")
    warmup_updates: int = opt(0, "linear warm-up", unit="updates", low=0)
    min_lr_ratio: float = opt(0.0, "where the decay ends, as a share of lr", low=0, high=1)


@dataclass(frozen=True, kw_only=True)
class RoleConfig:
    """One entry of `roles`. `init: actor` starts from the actor's weights; `source` from a model of its own. No models
    of the backend are a role with `scorer`, an entry of `scorers` that gives its outputs, and one with `engine`, an
    entry of `engines` that holds the role's model and does nothing else."""

    init: str = opt("", "role whose weights it starts from; empty: `source`")
    source: str = opt("", "model of its own, as model.source; empty: the policy's model")
    update: RoleUpdate = opt(RoleUpdate.frozen, "how its weights change")
    every: int = opt(1, "interval of copy and ema", unit="steps", low=1)
    decay: float = opt(0.0, "decay of ema", low=0, high=1)
    head: str = opt("lm", "`lm` or `value`")
    scorer: str = opt("", "entry of `scorers` that gives the role's outputs instead of a model")
    engine: str = opt("", "entry of `engines` that holds the role's model and scores, instead of the backend")
    from_step: int = opt(0, "first step that trains it, e.g. after a critic's warm-up", unit="steps", low=0)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    @property
    def held_by(self) -> str:
        """The scorer or engine that gives its outputs; empty where it is a model of the backend."""
        return self.scorer or self.engine


@dataclass(frozen=True, kw_only=True)
class PolicyKeys:
    """What core owns of each entry of `policies`, beside the sections of a policy."""

    share: int = opt(1, "turns of the policy in a round of the loop", low=1)


@dataclass(frozen=True, kw_only=True)
class ModelKeys:
    """What core owns of `model`."""

    source: str | None = opt(None, "run folder, Hugging Face folder, resolver source or hub id")
    architecture: dict[str, Any] | None = opt(None, "config.json keys of a model to draw at random instead")
    tokenizer: str | None = opt(None, "built-in tokenizer by name, or a folder; the model's own where null")
    alphabet: str | None = opt(None, "alphabet of the tokenizer `chars`")


@dataclass(frozen=True, kw_only=True)
class EnvKeys:
    """What core owns of an environment's section."""

    weight: float = opt(1.0, "share of tasks, relative to the other environments", low=0)


@dataclass(frozen=True, kw_only=True)
class EngineKeys:
    """What core owns of `rollout` and of each entry of `engines`."""

    count: int = opt(1, "engines of this kind", low=1)
    gpus: float = opt(0.0, "GPUs an engine", low=0)
    max_new_tokens: int = opt(256, "longest answer", unit="tokens", low=1)
    temperature: float = opt(1.0, "sampling temperature; above 0 (eval.temperature may be 0)")
    top_p: float = opt(1.0, "nucleus mass, above 0", low=0, high=1)
    top_k: int | None = opt(None, "most likely tokens kept; all where null", low=1)
    stop: list[str] = opt([], "strings that end an answer, beside the renderer's stop ids")


@dataclass(frozen=True, kw_only=True)
class BackendKeys:
    """What core owns of `backend`."""

    ranks: int = opt(1, "trainer ranks", low=1)
    gpus_per_rank: float = opt(0.0, "GPUs a rank", low=0)


@dataclass(frozen=True, kw_only=True)
class SyncKeys:
    """What core owns of `sync`."""

    verify: Verify = opt(Verify.live, "weakest evidence that a receipt may rest on")
    verify_within: int = opt(1, "publications within which every tensor is checked; 1 checks all, always", low=1)
    min_engines: int = opt(1, "engines that must serve a version; below it the run stops", low=1)
    deadline_s: float = opt(600.0, "deadline of one publication", unit="s", low=0.001)


@dataclass(frozen=True, kw_only=True)
class TermKeys:
    """What core owns of every term's section in `algorithm`."""

    coef: float = opt(1.0, "coefficient; a term with 0 is not built")


@dataclass(frozen=True, kw_only=True)
class AlgorithmKeys:
    """What core owns of `algorithm`, beside the fields that hold parts."""

    episodes: EpisodeSource = opt(EpisodeSource.sampled, "episodes are sampled, or made of demonstrations")
    aggregation: Aggregation = opt(Aggregation.token_mean, "how per-token values become a loss (numerics)")
    constant_length: int | None = opt(None, "L of `constant`; max_new_tokens where null", unit="tokens", low=1)
    truncated: Truncated = opt(Truncated.train, "what a truncated episode does")
    excluded_count_in_baseline: bool = opt(True, "excluded episodes count in their group's statistics")
    reject_denominator: RejectDenominator = opt(RejectDenominator.original, "whether denominators keep rejected tokens")


#: Fields of `algorithm` that hold parts: name -> (kind or kinds, plural).
PART_FIELDS: dict[str, tuple[tuple[str, ...], bool]] = {
    "penalties": (("stage",), True),
    "advantage": (("stage",), False),
    "reward_kl": (("stage",), False),
    "distill": (("stage", "term"), False),
    "whiten": (("stage",), False),
    "corrections": (("stage", "term"), True),
    "loss": (("term",), False),
    "kl": (("term",), False),
    "entropy": (("term",), False),
    "value": (("term",), False),
    "filters": (("filter",), True),
}

#: A part's `Provider.field`, where the field of the run file is a plural.
FIELD_OF_PROVIDER = {"penalties": "penalty", "corrections": "correction", "filters": ""}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One chosen plugin: instance `name`, provider `use` of `kind`, `core` keys and the plugin's own `options`; `at` is
    the dotted path at which it stands in the run file."""

    kind: str
    name: str
    use: str
    options: Any
    core: Any = None
    at: str = ""


def is_on(part: Part) -> bool:
    """Whether this part of an algorithm is built: neither core's coefficient of a term nor a stage's own is 0."""
    return all(getattr(keys, "coef", 1) != 0 for keys in (part.core, part.options))


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The resolved section `algorithm`: a preset is already expanded into its parts."""

    preset: str
    keys: AlgorithmKeys
    parts: Mapping[str, Mapping[str, Part]]  # field -> instance name -> part; singular fields hold at most one

    def one(self, field: str) -> Part | None:
        """The part of a singular field."""
        return next(iter(self.parts.get(field, {}).values()), None)

    def many(self, field: str) -> tuple[Part, ...]:
        return tuple(self.parts.get(field, {}).values())


@dataclass(frozen=True, kw_only=True)
class Policy:
    """One entry of `policies` (`at` is its dotted path), or the singular sections as policy `main` (`at` is empty)."""

    name: str
    share: int
    model: Part  # core: ModelKeys
    renderer: Part
    envs: Mapping[str, Part]  # core: EnvKeys
    algorithm: Algorithm
    schedule: ScheduleConfig
    roles: Mapping[str, RoleConfig]  # always holds `actor`
    at: str = ""


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """A whole run file, validated and frozen. `tree` is what `resolved.yaml` holds; `origins` says where each value
    came from, by dotted path: `default`, `preset NAME`, `file`, `extension NAME`, `command line`."""

    run: RunConfig
    eval: EvalConfig
    policies: Mapping[str, Policy]
    engines: Mapping[str, Part]  # core: EngineKeys; those that sample; empty where nothing does
    backend: Part  # core: BackendKeys
    sync: Part | None  # core: SyncKeys
    launcher: Part
    trackers: Mapping[str, Part]
    scorers: Mapping[str, Part]
    extensions: Mapping[str, Part]
    tree: Mapping[str, Any]
    origins: Mapping[str, str]
    judges: Mapping[str, Part] = field(default_factory=dict)  # core: EngineKeys; engines that a role names

    def parts(self) -> tuple[Part, ...]:
        """Every chosen plugin of the run, once each, in the order of the run file."""
        found = [*self.engines.values(), *self.judges.values(), self.backend, self.launcher, *self.trackers.values()]
        found += [*self.scorers.values(), *self.extensions.values(), *([self.sync] if self.sync else [])]
        for policy in self.policies.values():
            found += [policy.model, policy.renderer, *policy.envs.values()]
            for parts in policy.algorithm.parts.values():
                found += parts.values()
        return tuple(found)


#: Sections that core types, wholly or in part, by the name under which they stand in a run file.
SECTIONS: dict[str, type] = {
    **{"run": RunConfig, "eval": EvalConfig, "model": ModelKeys, "env": EnvKeys, "rollout": EngineKeys},
    **{"backend": BackendKeys, "optimizer": OptimizerConfig, "sync": SyncKeys, "schedule": ScheduleConfig},
    **{"algorithm": AlgorithmKeys, "roles": RoleConfig},
}
