"""Values that are fine alone and mean nothing together.

`violations` finds them all; a run is refused for the first. Names such as `group` carry the exact meaning
of the numerics reference, so that rules may speak of them. A part of any name says what it needs of the run file by the
requirements of its provider:

    siblings             several episodes a group
    aggregation          algorithm.aggregation said by a preset or the user, not left to the default
    behaviour_logprobs   episodes that an engine sampled
    preference           demonstrations in pairs, chosen and rejected
    several_updates      updates_per_step above 1, or a `bypass`: π must be able to leave π_p
    role:NAME            that role
    scores_at_ids:NAME   that role as a model of the backend: a scorer is not asked for ids that the trainer chooses
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import PurePath

from miles_core.config.binding import join
from miles_core.config.schema import Algorithm, OffPolicy, Part, Policy, RoleConfig, RunFile, is_on
from miles_core.discovery import Catalogue
from miles_core.errors import CombinationError, ConfigRangeError, MilesError

GROUP_BASELINES = ("group", "leave_one_out", "centred")

#: Engines and trainers divide by these numbers in float32.
TINY, HUGE = 1e-30, 1e30

#: What is wrong with a combination, and the fix.
Wrong = Iterator[tuple[str, str]]


def violations(run_file: RunFile, catalogue: Catalogue) -> Iterator[MilesError]:
    """Every value and every combination of this run file that is refused."""
    yield from (ConfigRangeError(message, fix=fix) for message, fix in _ranges(run_file))
    of_policies = (_model, _algorithm, _roles, _schedule, _critic, _requirements)
    rules = [rule(policy, run_file, catalogue) for policy in run_file.policies.values() for rule in of_policies]
    yield from (CombinationError(message, fix=fix) for message, fix in chain(*rules, _engines(run_file, catalogue)))


def no_section(path: str, catalogue: Catalogue) -> str:
    """What is said of a section that is not there and would hold one part: it is named like its kind."""
    kind = path.rpartition(".")[2]
    return f"the run file has no section {path}; installed {kind} plugins: {catalogue.installed(kind)}"


def _at_most(path: str, value: int, limit: int, why: str) -> Wrong:
    if value > limit:
        yield f"{path} is {value}, and {why}; it must be at most {limit}", f"write {path}={limit} or less"


def _ranges(run_file: RunFile) -> Wrong:
    """Values out of a range that no bound of a field can state."""
    below = PurePath(run_file.run.name)
    if run_file.run.dir is None and (below.is_absolute() or ".." in below.parts or not below.parts):
        wrong = f"run.name is {run_file.run.name!r}; it names a folder below runs/"
        yield wrong, "write a plain name; a run elsewhere is run.dir=…"
    if run_file.eval.engines != "pool":
        wrong = f"eval.engines is {run_file.eval.engines.value!r}, which is not built yet: engines of the pool evaluate"
        yield wrong, "write pool"
    if 0 < (hot := run_file.eval.temperature) < TINY or hot > HUGE:
        yield f"eval.temperature is {hot:g}; it must be 0, or from 1e-30 to 1e30", "write 0, which is greedy, or 1.0"
    for part in run_file.engines.values():
        if not TINY <= part.core.temperature <= HUGE:
            wrong = f"{part.at}.temperature is {part.core.temperature:g}; training needs one above 0 (1e-30 to 1e30)"
            yield wrong, "write 1.0; evaluations are greedy with eval.temperature: 0"
        if "" in part.core.stop:
            yield f"{part.at}.stop holds an empty string, which ends every answer at once", "remove it"
        if any("\ud800" <= character <= "\udfff" for stop in part.core.stop for character in stop):
            yield f"{part.at}.stop holds half of a surrogate pair, and no answer does", "write the whole character"
        if part.core.top_p < TINY:
            yield f"{part.at}.top_p is {part.core.top_p:g}; it must be above 0 (1e-30 to 1)", "write 1.0 to keep all"


def _model(policy: Policy, run_file: RunFile, catalogue: Catalogue) -> Wrong:
    at, keys = policy.model.at, policy.model.core
    if (keys.source is None) == (keys.architecture is None):
        given = "neither" if keys.source is None else "both"
        wrong = f"{at} gives {given} of source and architecture; a model comes from exactly one"
        yield wrong, f"write {at}.source: FOLDER, or {at}.architecture: {{…}} to draw one; null takes one of them away"
    if keys.architecture is not None:
        if not keys.architecture.get("model_type"):
            yield f"{at}.architecture has no model_type", f"add {at}.architecture.model_type, e.g. qwen3"
        if keys.tokenizer is None:
            wrong = f"{at}.architecture is drawn at random and has no tokenizer of its own"
            yield wrong, f"add {at}.tokenizer, e.g. chars with {at}.alphabet, or a folder"
    if (keys.tokenizer == "chars") != (keys.alphabet is not None):
        yield (
            f"{at}.tokenizer is {keys.tokenizer!r} and {at}.alphabet is {keys.alphabet!r}; "
            "an alphabet belongs to the tokenizer `chars`",
            f"give both `tokenizer: chars` and `alphabet`, or neither, in {at}",
        )


def _schedule(policy: Policy, run_file: RunFile, catalogue: Catalogue) -> Wrong:
    at, s = join(policy.at, "schedule"), policy.schedule
    yield from _at_most(f"{at}.updates_per_step", s.updates_per_step, s.groups_per_step, "a group is never split")
    yield from _at_most(f"{at}.min_group_size", s.min_group_size, s.group_size, f"a group has {s.group_size} episodes")
    lag = f"{at}.max_staleness is {s.max_staleness}"
    if s.max_staleness == 0 and s.on_stale != "drop":
        yield f"{at}.on_stale is {s.on_stale.value!r}, and {lag}: nothing can be stale", f"remove {at}.on_stale"
    yield from _at_most(f"{at}.publish_every", s.publish_every, s.max_staleness + 1, f"{lag}: tokens would lag more")
    if policy.algorithm.keys.episodes == "demonstrations":
        size = demonstrated_size(policy.algorithm, catalogue)
        if s.group_size != size:
            what = "one episode" if size == 1 else "a pair (chosen, rejected)"
            yield f"{at}.group_size is {s.group_size}, but demonstrations are {what} a task", f"write {size}"
        if s.max_staleness != 0:
            yield f"{lag}, but demonstrations are not sampled and cannot be stale", "write 0"
    elif s.max_staleness > 0 and s.off_policy is OffPolicy.corrected and not policy.algorithm.many("corrections"):
        providers = [loaded.provider for loaded in catalogue.loadable("stage", "term")]
        known = ", ".join(p.name for p in providers if p.field == "correction") or "pip install miles-algo-correction"
        more = f", or add a correction to {join(policy.at, 'algorithm.corrections')}: {known}"
        wrong = f"{lag} (asynchronous), and algorithm.corrections names no off-policy correction"
        yield wrong, f"write {at}.off_policy=uncorrected, or {at}.max_staleness=0{more}"


def required(algorithm: Algorithm, catalogue: Catalogue) -> list[tuple[Part, frozenset[str]]]:
    """Every part of the algorithm that will be built, with its requirements."""
    parts = [part for parts in algorithm.parts.values() for part in parts.values() if is_on(part)]
    return [(part, catalogue.required(part)) for part in parts]


def demonstrated_size(algorithm: Algorithm, catalogue: Catalogue) -> int:
    """The size of a group of demonstrations: one reference answer a task, or one pair of them."""
    return 1 + any("preference" in needs for _, needs in required(algorithm, catalogue))


def _requirements(policy: Policy, run_file: RunFile, catalogue: Catalogue) -> Wrong:
    demonstrated = policy.algorithm.keys.episodes == "demonstrations"
    aggregation, size = (join(policy.at, key) for key in ("algorithm.aggregation", "schedule.group_size"))
    baseline = policy.algorithm.one("advantage")
    for part, needs in required(policy.algorithm, catalogue):
        this = f"{part.at} ({part.use})"
        compares = "siblings" in needs or (part is baseline and part.use in GROUP_BASELINES)
        if compares and policy.schedule.group_size == 1 and not demonstrated:
            wrong = f"{size} is 1, and {this} compares the episodes of a group: nothing to learn"
            yield wrong, f"write {size}=8, or choose another {part.at.rpartition('.')[2]}"
        if "aggregation" in needs and run_file.origins.get(aggregation, "default") == "default":
            wrong = f"{this} weighs whole trajectories, and {aggregation} is left to its default"
            yield wrong, f"write {aggregation}=episode_mean, or token_mean where long answers shall count for more"
        if "behaviour_logprobs" in needs and demonstrated:
            yield (
                f"{this} compares with what an engine sampled, and demonstrations have no behaviour log-probabilities",
                f"remove {part.at}, or choose a preset that samples",
            )
        if "preference" in needs and not demonstrated:
            wrong = f"{this} learns from pairs of demonstrations, and episodes are sampled"
            yield wrong, f"write {join(policy.at, 'algorithm.episodes')}=demonstrations"
        if "several_updates" in needs and policy.schedule.updates_per_step == 1 and not _bypassed(policy.algorithm):
            wrong = f"{this} compares π with π_p, and they are the same while schedule.updates_per_step is 1"
            yield wrong, f"remove {part.at}, or compare with what the engine sampled"
        for need in sorted(needs):
            what, _, name = need.partition(":")
            if what not in ("role", "scores_at_ids"):
                continue
            role, at = policy.roles.get(name), join(policy.at, f"roles.{name}")
            if role is None:
                yield (
                    f"{this} needs the role {name!r}; roles: {', '.join(policy.roles)}",
                    f"add {at}: {{init: actor, update: trained, head: value}}, or update: shares"
                    if name == "critic"
                    else f"add {at}: {{init: actor, update: frozen}}, or with a source or a scorer of its own",
                )
            elif what == "scores_at_ids" and role.held_by:
                kind = "engine" if role.engine else "scorer"
                yield (
                    f"{this} scores ids that the trainer chooses, and {at} is the {kind} {role.held_by!r}, which "
                    "chooses its own",
                    f"give {at} a source instead of a scorer, or let the role choose the ids (support: {name})",
                )


def _bypassed(algorithm: Algorithm) -> Part | None:
    return next((part for part in algorithm.many("corrections") if part.use == "bypass"), None)


def _algorithm(policy: Policy, run_file: RunFile, catalogue: Catalogue) -> Wrong:
    at, algorithm = join(policy.at, "algorithm"), policy.algorithm
    advantage, reward_kl, loss = map(algorithm.one, ("advantage", "reward_kl", "loss"))
    if reward_kl and is_on(reward_kl) and advantage and advantage.use in ("group", "leave_one_out"):
        wrong = f"{at}.reward_kl is given, and {at}.advantage ({advantage.use}) does not read it"
        yield wrong, f"use {at}.kl (a loss term), or an advantage that takes the KL from the reward"
    if bypass := _bypassed(algorithm):
        for part in algorithm.many("corrections"):
            if part.kind == "stage" and part is not bypass:
                wrong = f"{bypass.at} puts π_b in place of π_p: the ratio corrects all, {part.at} would do so once more"
                yield wrong, f"remove {bypass.at} or {part.at}"
        if loss and loss.use == "reinforce":
            wrong = f"{bypass.at} leaves all to the ratio of the policy term, and {loss.at} ({loss.use}) has none"
            yield wrong, f"use clip in {loss.at}, or another correction"
    terms = [part for part in (loss, algorithm.one("distill")) if part and part.kind == "term"]
    if all(part.core.coef == 0 for part in terms):
        yield f"{at}.loss has the coefficient 0: nothing would be learned", "give it one"
    if sum(part.core.weight for part in policy.envs.values()) <= 0:
        yield f"{join(policy.at, 'envs')}: every weight is 0, so no task can be drawn", "give one a weight above 0"


def _roles(policy: Policy, run_file: RunFile, catalogue: Catalogue) -> Wrong:
    roles, path, value = policy.roles, join(policy.at, "roles"), policy.algorithm.one("value")
    for name, role in roles.items():
        at = f"{path}.{name}"
        trains = name == "actor" or (name == "critic" and value and is_on(value))
        if role.update == "trained" and not trains and not role.held_by:
            value_at = join(policy.at, "algorithm.value")
            more = f", give {value_at} a plugin and a coefficient, or" if name == "critic" else ", or"
            wrong = f"{at}.update is 'trained', and no term trains it: {value_at} trains 'critic', others the actor"
            yield wrong, f"remove {at}{more} write {at}.update: frozen where it is only scored"
        if role.init and role.source:
            yield f"{at} gives both init and source", "keep one"
        if role.init and role.init not in roles:
            yield f"{at}.init is {role.init!r}, which is no role; roles: {', '.join(roles)}", "name one of them"
        if role.update in ("copy", "ema", "shares", "adapter_off") and not role.init:
            yield f"{at}.update is {role.update.value!r} and {at}.init names no role to follow", "add init: actor"
        if role.update == "ema" and role.decay == 0:
            yield f"{at}.update is 'ema' and its decay is 0: a copy", f"give {at}.decay, e.g. 0.99, or write copy"
        if role.scorer and (role.init or role.source or role.update == "trained"):
            yield f"{at} is the scorer {role.scorer!r} and a model too", "keep scorer alone, or remove it"
        if role.scorer and role.scorer not in run_file.scorers:
            known = ", ".join(run_file.scorers) or "none"
            yield f"{at}.scorer is {role.scorer!r}; scorers: {known}", "name one of them, or add it to scorers"
        if role.engine:
            yield from _judge(name, role, at, run_file, catalogue)
        met = [name]
        while (following := roles[met[-1]].init) in roles:
            met.append(following)
            if following in met[:-1]:
                yield f"{at}.init goes in a circle: {' -> '.join(met)}", "break it"
                break
    actor = roles["actor"].update
    if actor != "trained":
        yield f"{path}.actor.update is {actor.value!r}; the actor is what is trained", "remove it, or write trained"


def _critic(policy: Policy, run_file: RunFile, catalogue: Catalogue) -> Wrong:
    critic, value = policy.roles.get("critic"), policy.algorithm.one("value")
    if critic is None or critic.scorer:
        return
    at = join(policy.at, "roles.critic")
    asked = [part for part, needs in required(policy.algorithm, catalogue) if "role:critic" in needs]
    if asked and critic.head != "value":
        yield f"{at}.head is {critic.head!r}, and {asked[0].at} needs its values", f"write {at}.head: value"
    if value and is_on(value) and critic.update not in ("trained", "shares"):
        wrong = f"{at}.update is {critic.update.value!r}, and {value.at} would train it"
        yield wrong, f"write {at}.update: trained, or shares for a second head on the actor"
    if critic.update == "shares" and (waits := policy.roles["actor"].from_step):
        yield (
            f"{join(policy.at, 'roles.actor.from_step')} is {waits}, and {at} shares the actor's model: the value loss "
            "would move it",
            f"write {at}.update: trained, or from_step: 0",
        )


def _judge(name: str, role: RoleConfig, at: str, run_file: RunFile, catalogue: Catalogue) -> Wrong:
    """A role that an engine holds."""
    if role.init or role.scorer or role.update != "frozen":
        yield f"{at} is the engine {role.engine!r}, and has init, scorer or an update too", "keep engine and source"
    part = run_file.judges.get(role.engine)
    if part is None:
        known = ", ".join([*run_file.engines, *run_file.judges]) or "none"
        yield f"{at}.engine is {role.engine!r}; engines: {known}", "add it to engines, beside the one that samples"
        return
    if lacking := sorted({"prompt_logprobs", "weights.checkpoint"} - catalogue.offered(part)):
        yield f"{at}.engine is {part.use!r}, which does not offer {', '.join(lacking)}", "choose one that does"
    users = [r for p in run_file.policies.values() for r in p.roles.values() if r.engine == role.engine]
    if part.core.count != 1 or len(users) != 1:
        yield f"{part.at} has count {part.core.count} and {len(users)} roles; it holds one model, once", "give one"
    for sampler in run_file.engines.values():
        core = sampler.core
        if core.temperature != 1 or core.top_p < 1 or core.top_k is not None:
            yield (
                f"{sampler.at} samples with temperature {core.temperature:g}, top_p {core.top_p:g}, top_k "
                f"{core.top_k}, and {at} is an engine, which scores prompts at temperature 1 over all tokens",
                f"sample so too, or make {name!r} a model of the backend ({at}.source without engine)",
            )


def _engines(run_file: RunFile, catalogue: Catalogue) -> Wrong:
    policies, engines, sync = run_file.policies.values(), run_file.engines.values(), run_file.sync
    sampled = any(policy.algorithm.keys.episodes == "sampled" for policy in policies)
    for part in engines:
        if len(policies) > 1 and "policies" not in catalogue.offered(part):
            wrong = f"engine {part.name!r} ({part.use}) serves one policy; the run has {list(run_file.policies)}"
            yield wrong, "choose an engine that offers `policies`, or train one policy a run"
    for part in engines if sampled else ():
        core, at = part.core, part.at
        cut = f"top_p is {core.top_p:g}" if core.top_p < 1 else f"top_k is {core.top_k}"
        if (core.top_p < 1 or core.top_k is not None) and "keep_ids" not in catalogue.offered(part):
            yield (
                f"{at}.{cut}, and {part.use!r} does not offer keep_ids: training could not know which tokens were kept",
                f"write {at}.top_p: 1.0 and {at}.top_k: null, or use an engine that offers keep_ids",
            )
    if engines and sync is None:
        yield f"engines sample from the trained model, and {no_section('sync', catalogue)}", "add `sync: {use: …}`"
    elif engines and sync:
        count = sum(part.core.count for part in engines)
        yield from _at_most("sync.min_engines", sync.core.min_engines, count, f"the run has {count} engines")
    elif sampled:
        wrong = f"episodes are sampled, and {no_section('rollout', catalogue)}"
        yield wrong, "add `rollout: {use: …}`, or use a preset that learns from demonstrations"
    for policy in policies:
        keys, at = policy.algorithm.keys, join(policy.at, "algorithm")
        if not engines and keys.aggregation == "constant" and keys.constant_length is None:
            wrong = f"{at}.aggregation is constant, and there is no rollout whose max_new_tokens could be its length"
            yield wrong, f"add {at}.constant_length"
