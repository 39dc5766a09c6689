"""Values that are fine alone and mean nothing together.

`violations` finds them all (for `miles plan`), `check` raises the first. Names such as `group` carry the exact meaning
of the numerics reference, so that rules may speak of them; a stage of any other name that compares the episodes of one
group says so with the requirement `siblings`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from miles_core.config.schema import OffPolicy, Policy, RunFile
from miles_core.discovery import Catalogue
from miles_core.errors import CombinationError, ConfigRangeError, MilesError

GROUP_BASELINES = ("group", "leave_one_out", "centred")


def check(run_file: RunFile, catalogue: Catalogue) -> None:
    """Raise the first violation."""
    for error in violations(run_file, catalogue):
        raise error


def violations(run_file: RunFile, catalogue: Catalogue) -> Iterator[MilesError]:
    """Every combination of this run file that is refused."""
    below = PurePath(run_file.run.name)
    if run_file.run.dir is None and (below.is_absolute() or ".." in below.parts or not below.parts):
        yield ConfigRangeError(
            f"run.name is {run_file.run.name!r}; it names a folder below runs/",
            fix="write a plain name; a run elsewhere is run.dir=…",
        )
    for name, policy in run_file.policies.items():
        prefix = "" if "policies" not in run_file.tree else f"policies.{name}."
        yield from _model(policy, prefix)
        yield from _schedule(policy, prefix)
        yield from _algorithm(policy, prefix, run_file, catalogue)
        yield from _roles(policy, prefix)
        if sum(part.core.weight for part in policy.envs.values()) <= 0:
            yield CombinationError(
                f"{prefix}envs: every weight is 0, so no task can be drawn", fix="give one a weight above 0"
            )
    yield from _engines(run_file, catalogue)


def _model(policy: Policy, prefix: str) -> Iterator[MilesError]:
    at, keys = f"{prefix}model", policy.model.core
    if (keys.source is None) == (keys.architecture is None):
        given = "neither" if keys.source is None else "both"
        yield CombinationError(
            f"{at} gives {given} of source and architecture; a model comes from exactly one",
            fix=f"write {at}.source: FOLDER, or {at}.architecture: {{…}} to draw one at random"
            if given == "neither"
            else f"remove one, e.g. {at}.source=null",
        )
    if keys.architecture is not None and "model_type" not in keys.architecture:
        yield CombinationError(
            f"{at}.architecture has no model_type", fix=f"add {at}.architecture.model_type, e.g. qwen3"
        )
    if keys.architecture is not None and keys.tokenizer is None:
        yield CombinationError(
            f"{at}.architecture is drawn at random and has no tokenizer of its own",
            fix=f"add {at}.tokenizer, e.g. chars with {at}.alphabet, or a folder",
        )
    if (keys.tokenizer == "chars") != (keys.alphabet is not None):
        yield CombinationError(
            f"{at}.tokenizer is {keys.tokenizer!r} and {at}.alphabet is {keys.alphabet!r}; "
            "an alphabet belongs to the tokenizer `chars`",
            fix=f"give both `tokenizer: chars` and `alphabet`, or neither, in {at}",
        )


def _schedule(policy: Policy, prefix: str) -> Iterator[MilesError]:
    at, s = f"{prefix}schedule", policy.schedule
    if s.updates_per_step > s.groups_per_step:
        yield CombinationError(
            f"{at}.updates_per_step is {s.updates_per_step}, but a step has {s.groups_per_step} groups, and a group is "
            "never split",
            fix=f"lower it to {s.groups_per_step}, or raise {at}.groups_per_step",
        )
    if s.min_group_size > s.group_size:
        yield CombinationError(
            f"{at}.min_group_size is {s.min_group_size}, but a group has {s.group_size} episodes",
            fix=f"lower it to {s.group_size} at most",
        )
    if s.publish_every > s.max_staleness + 1:
        yield CombinationError(
            f"{at}.publish_every is {s.publish_every}: tokens would lag up to {s.publish_every - 1} steps, and "
            f"{at}.max_staleness allows {s.max_staleness}",
            fix=f"write {at}.max_staleness={s.publish_every - 1}, or {at}.publish_every={s.max_staleness + 1}",
        )
    if policy.algorithm.keys.episodes == "demonstrations":
        if s.group_size != 1:
            yield CombinationError(
                f"{at}.group_size is {s.group_size}, but demonstrations are one episode a task", fix="write 1"
            )
        if s.max_staleness != 0:
            yield CombinationError(
                f"{at}.max_staleness is {s.max_staleness}, but demonstrations are not sampled and cannot be stale",
                fix="write 0",
            )
    elif s.max_staleness > 0 and s.off_policy is OffPolicy.corrected and not policy.algorithm.many("corrections"):
        yield CombinationError(
            f"{at}.max_staleness is {s.max_staleness} (asynchronous), and algorithm.corrections names no off-policy "
            "correction",
            fix=f"add a correction, or say {at}.off_policy=uncorrected, or {at}.max_staleness=0",
        )


def _algorithm(policy: Policy, prefix: str, run_file: RunFile, catalogue: Catalogue) -> Iterator[MilesError]:
    at, algorithm = f"{prefix}algorithm", policy.algorithm
    sampled = algorithm.keys.episodes == "sampled"
    for field in algorithm.parts:
        for part in algorithm.many(field):
            needs = catalogue.load(part.kind, part.use).provider.required(part.options)
            siblings = "siblings" in needs or (field == "advantage" and part.use in GROUP_BASELINES)
            if siblings and sampled and policy.schedule.group_size == 1:
                yield CombinationError(
                    f"{prefix}schedule.group_size is 1, and {at}.{field} ({part.use}) compares the episodes of a "
                    "group: every advantage would be 0",
                    fix=f"write {prefix}schedule.group_size=8, or choose another {field}",
                )
    advantage, reward_kl = algorithm.one("advantage"), algorithm.one("reward_kl")
    if reward_kl is not None and advantage is not None and advantage.use in ("group", "leave_one_out"):
        yield CombinationError(
            f"{at}.reward_kl is given, and {at}.advantage ({advantage.use}) does not read it",
            fix=f"use {at}.kl (a loss term), or an advantage that takes the KL from the reward",
        )
    policy_terms = [p for field in ("loss", "distill") for p in algorithm.many(field) if p.kind == "term"]
    if all(part.core.coef == 0 for part in policy_terms):
        yield CombinationError(f"{at}.loss has the coefficient 0: nothing would be learned", fix="give it one")
    if algorithm.keys.aggregation == "constant" and algorithm.keys.constant_length is None and not run_file.engines:
        yield CombinationError(
            f"{at}.aggregation is constant, and there is no rollout whose max_new_tokens could be its length",
            fix=f"add {at}.constant_length",
        )


def _roles(policy: Policy, prefix: str) -> Iterator[MilesError]:
    roles = policy.roles
    for name, role in roles.items():
        at = f"{prefix}roles.{name}"
        if role.init and role.source:
            yield CombinationError(f"{at} gives both init and source", fix="keep one")
        if role.init and role.init not in roles:
            yield CombinationError(
                f"{at}.init is {role.init!r}, which is no role; roles: {', '.join(roles)}", fix="name one of them"
            )
        if role.update in ("copy", "ema", "shares", "adapter_off") and not role.init:
            yield CombinationError(
                f"{at}.update is {role.update.value!r} and {at}.init names no role to follow", fix="add init: actor"
            )
        met = [name]
        while (following := roles[met[-1]].init) in roles:
            if following in met:
                yield CombinationError(f"{at}.init goes in a circle: {' -> '.join([*met, following])}", fix="break it")
                break
            met.append(following)
    if roles["actor"].update != "trained":
        yield CombinationError(
            f"{prefix}roles.actor.update is {roles['actor'].update.value!r}; the actor is what is trained",
            fix="remove it, or write trained",
        )


def _engines(run_file: RunFile, catalogue: Catalogue) -> Iterator[MilesError]:
    singular = "rollout" in run_file.tree
    sampled = any(p.algorithm.keys.episodes == "sampled" for p in run_file.policies.values())
    for name, part in run_file.engines.items():
        at, core = "rollout" if singular else f"engines.{name}", part.core
        if core.temperature <= 0:
            yield ConfigRangeError(
                f"{at}.temperature is {core.temperature:g}; sampling to train on needs a temperature above 0",
                fix="write 1.0; evaluations are greedy with eval.temperature: 0",
            )
        if core.top_p <= 0:
            yield ConfigRangeError(f"{at}.top_p is {core.top_p:g}; it must be above 0", fix="write 1.0 to keep all")
        offers = catalogue.load(part.kind, part.use).provider.offered(part.options)
        if sampled and (core.top_p < 1 or core.top_k is not None) and "keep_ids" not in offers:
            cut = f"top_p is {core.top_p:g}" if core.top_p < 1 else f"top_k is {core.top_k}"
            yield CombinationError(
                f"{at}.{cut}, and {part.use!r} does not offer keep_ids: training could not know which tokens were kept",
                fix=f"write {at}.top_p: 1.0 and {at}.top_k: null, or use an engine that offers keep_ids",
            )
    if sampled and not run_file.engines:
        installed = ", ".join(catalogue.names("rollout")) or "none"
        yield CombinationError(
            f"episodes are sampled, and the run file has no section rollout; installed rollout plugins: {installed}",
            fix="add `rollout: {use: …}`, or use a preset that learns from demonstrations",
        )
    if run_file.engines and run_file.sync is None:
        installed = ", ".join(catalogue.names("sync")) or "none"
        yield CombinationError(
            f"engines sample from the trained model, and the run file has no section sync; installed: {installed}",
            fix="add `sync: {use: …}`",
        )
    count = sum(part.core.count for part in run_file.engines.values())
    if run_file.engines and run_file.sync is not None and run_file.sync.core.min_engines > count:
        yield CombinationError(
            f"sync.min_engines is {run_file.sync.core.min_engines}, and the run has {count} engines",
            fix=f"write sync.min_engines: {count} at most",
        )
