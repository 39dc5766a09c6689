"""Everything of a run that needs neither engine nor trainer, built and checked before anything is created.

Capabilities, the plugin lock, model sources, renderers, environments and the first task of each split, stages, filters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.columns import CORE_COLUMNS, ColumnSpec
from miles_core.compatibility import match_capabilities, plugin_lock
from miles_core.config.binding import bind, join
from miles_core.config.schema import Part
from miles_core.config.source import RunLoader, resolve_source
from miles_core.errors import (
    CombinationError,
    DataError,
    LateDataError,
    ModelSourceError,
    PluginContractError,
    ResumeError,
    blamed,
)
from miles_core.provider import Place
from miles_core.records import Sampling
from miles_core.sampler import SamplingPolicy
from miles_core.vocabulary import check_vocabulary, longest_text, vocabulary_size
from miles_core.wiring import Wiring, sources_of

if TYPE_CHECKING:
    from miles_core.config.schema import Policy, RunFile
    from miles_core.contracts.engine import Engine
    from miles_core.contracts.learning import Output
    from miles_core.contracts.model import ModelSource
    from miles_core.discovery import Catalogue
    from miles_core.passes import Stages
    from miles_core.wiring import Sources


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What one process builds to run episodes; all but the extensions by policy."""

    extensions: tuple[Any, ...]
    stages: Mapping[str, Stages]
    sampling: Mapping[str, SamplingPolicy]  # with renderer, environments and columns
    scorers: Mapping[str, Any]

    @staticmethod
    def build(wiring: Wiring, place: Place) -> Parts:
        extensions = wiring.extensions(place)
        keys = sampling_of(wiring.run)
        cut = keys is not None and (keys.top_p < 1 or keys.top_k > 0)
        stages, sampling = {}, {}
        for name, policy in wiring.run.policies.items():
            renderer = build_renderer(wiring, policy, place)
            stages[name] = wiring.stages(policy)
            sampling[name] = SamplingPolicy(
                name=name,
                renderer=renderer,
                envs={k: wiring.build(e, place, policy=name, renderer=renderer) for k, e in policy.envs.items()},
                want=frozenset({"keep_ids"} if cut else ()),
                columns=column_specs(stages[name], extensions),
                deadline_s=policy.schedule.episode_deadline_s,
                rewarded=policy.algorithm.keys.episodes == "sampled",
            )
        only = next(iter(sampling.values())).renderer if len(sampling) == 1 else None
        scorers = {key: wiring.build(part, place, renderer=only) for key, part in wiring.run.scorers.items()}
        return Parts(extensions=extensions, stages=stages, sampling=sampling, scorers=scorers)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What `prepare` found out: everything that the controller builds without engines or trainer."""

    wiring: Wiring
    lock: Mapping[str, Any]
    parts: Parts
    filters: Mapping[str, Mapping[str, Any]]  # by policy and name


def prepare(run_file: RunFile, catalogue: Catalogue, run_dir: Path, export: RunLoader, begun: Any = None) -> Prepared:
    """Check everything that needs neither engine nor trainer. Raises `InputError`s; creates nothing but exports of
    other runs (`export(run_dir, step) -> folder` makes a Hugging Face folder of a run's checkpoint) and what resolvers
    keep in `runs/.sources`, for the next attempt: sources come first, as environments may read the renderer, and that
    the tokenizer. `begun`: the lock that a resumed run began with."""
    match_capabilities(run_file, catalogue)
    wiring = Wiring(run_file, catalogue, run_dir, model_sources(run_file, catalogue, export, begun))
    parts = Parts.build(wiring, Place.CONTROLLER)
    for name, policy in parts.sampling.items():
        model = wiring.sources[name]["actor"]
        for key, env in policy.envs.items():
            _probe(key, env, policy.renderer, model, evaluates=run_file.eval.every is not None)
    tasks = _told(parts, "digest")
    _refuse_other(tasks, (begun or {}).get("tasks", {}))
    filters = {
        name: {f.name: wiring.build(f, Place.CONTROLLER, policy=name) for f in policy.algorithm.many("filters")}
        for name, policy in run_file.policies.items()
    }
    lock = plugin_lock([*run_file.parts(), *_unbuilt(run_file, catalogue)], catalogue)
    lock["sources"] = wiring.payload({})["sources"]
    lock |= {"tasks": tasks, "scoring": _told(parts, "scoring_digest")}
    return Prepared(wiring=wiring, lock=lock, parts=parts, filters=filters)


def sampling_of(run: RunFile) -> Sampling | None:
    """Sampling parameters of training: those of the first engine section; `None` where nothing samples."""
    keys = next((part.core for part in run.engines.values()), None)
    if keys is None:
        return None
    return Sampling(
        max_new_tokens=keys.max_new_tokens,
        temperature=keys.temperature,
        top_p=keys.top_p,
        top_k=keys.top_k or 0,
        stop=tuple(keys.stop),
    )


def column_specs(stages: Stages, extensions: tuple[Any, ...]) -> dict[str, ColumnSpec]:
    """Every declared column of a policy: core's, the stages' and the extensions'. A name may be declared twice only
    with the same spec."""
    specs = dict(CORE_COLUMNS)
    declared = [(f"stage {name!r}", spec) for parts in stages.values() for name, stage in parts for spec in stage.gives]
    declared += [(f"extension {e.name!r}", spec) for e in extensions for spec in e.columns]
    for owner, spec in declared:
        if specs.setdefault(spec.name, spec) != spec:
            what = f"{owner} declares column {spec.name!r} as {spec}; it is already declared as {specs[spec.name]}"
            raise PluginContractError(what, fix="use the declared shape, or another name with the plugin's own prefix")
    return specs


def _unbuilt(run_file: RunFile, catalogue: Catalogue) -> list[Part]:
    """Presets and built-in tokenizers: no instance stands for them in the run file, and they decide what runs."""
    policies, known = run_file.policies.values(), catalogue.names("tokenizer")
    found = [("algorithm", p.algorithm.preset) for p in policies if p.algorithm.preset]
    found += [("tokenizer", p.model.core.tokenizer) for p in policies if p.model.core.tokenizer in known]
    return [Part(kind=kind, name=use, use=use, options=None) for kind, use in found]


def model_sources(run_file: RunFile, catalogue: Catalogue, export: RunLoader, begun: Any = None) -> Sources:
    """Each policy's source, and a role's own where it names one. `export(run_dir, step)` makes a folder of a run.

    What the run found when it began (in its lock, `begun`) is taken while its folders are there, so that neither
    another working directory nor a better checkpoint of another run changes what this one started from.
    """
    known = sources_of((begun or {}).get("sources", {}))
    sources = [source for roles in known.values() for source in roles.values()]
    gone = [str(f) for s in sources for f in (s.folder, s.tokenizer_folder) if f and not f.is_dir()]
    if known and not gone:
        return known
    run = run_file.run
    base = Path(run.folder) if run.folder else None

    def resolve(model: Part) -> ModelSource:
        try:
            return resolve_source(model, run.seed, run_loader=export, base=base, catalogue=catalogue)
        except ModelSourceError as error:
            if gone:  # a checkpoint has weights, and neither the configuration nor the tokenizer of its model
                error.fix = f"put back what the run began from: {', '.join(dict.fromkeys(gone))}"
            raise

    found: dict[str, dict[str, ModelSource]] = {}
    for policy in run_file.policies.values():
        model, roles = policy.model, found.setdefault(policy.name, {})
        shared = resolve(model)
        for name, role in policy.roles.items():  # the actor first
            roles[name] = shared
            if role.source:
                roles[name] = resolve(replace(model, core=replace(model.core, source=role.source, architecture=None)))
                check_vocabulary(roles["actor"], roles[name], join(policy.at, f"roles.{name}"))
    return found


def build_renderer(wiring: Wiring, policy: Policy, place: Place) -> Any:
    """The policy's renderer, with the built-in tokenizer that `model.tokenizer` names (a folder is in the source)."""
    keys, source = policy.model.core, wiring.sources[policy.name]["actor"]
    tokenizer = None
    if keys.tokenizer is not None and source.tokenizer_folder is None:
        loaded = wiring.catalogue.load("tokenizer", keys.tokenizer)
        options = bind(loaded.provider.config, {}, "model.tokenizer")
        part = Part(kind="tokenizer", name=keys.tokenizer, use=keys.tokenizer, options=options, core=keys)
        tokenizer = wiring.build(part, place, policy=policy.name)
    return wiring.build(policy.renderer, place, policy=policy.name, model=source, tokenizer=tokenizer)


def _probe(name: str, env: Any, renderer: Any, model: ModelSource, *, evaluates: bool) -> None:
    """Hand out the first task of each split that the run needs, and render it."""
    for split in ("train", "eval") if evaluates else ("train",):
        if split not in env.task_splits:
            raise DataError(
                f"environment {name!r} has no split {split!r}; it has {list(env.task_splits)}",
                fix="give it one, or set eval.every: null" if split == "eval" else "choose another environment",
            )
        with blamed(f"environment {name!r}, split {split!r}", DataError, "mend what the environment reads"):
            source = env.tasks(split)
        if source.size == 0:
            raise DataError(f"split {split!r} of environment {name!r} is empty", fix="give it at least one task")
        try:
            with blamed(f"environment {name!r}, first task of {split!r}", DataError, "mend what the environment reads"):
                task = source.task(0)
        except LateDataError as error:
            raise DataError(error.message, fix=error.fix) from error
        fix = "see where with --traceback, then mend the renderer or use another"
        with blamed(f"the renderer cannot render task {task.id!r}", PluginContractError, fix):
            ids = renderer.prompt(task.prompt)
        _fits(model, renderer, task.id, ids)


def _told(parts: Parts, what: str) -> dict[str, str]:
    """What environments say by their attribute `what`, by policy and name; those without it are left out."""
    found = {}
    for policy, sampling in parts.sampling.items():
        for name, env in sampling.envs.items():
            with blamed(f"environment {name!r} has no {what}", DataError, "mend what the environment reads"):
                if (told := getattr(env, what, None)) is not None:
                    found[f"{policy}/{name}"] = str(told)
    return found


def _refuse_other(tasks: Mapping[str, str], begun: Mapping[str, str]) -> None:
    """Raise `ResumeError` where tasks are read from other things than the run began with."""
    for key, digest in tasks.items():
        if (before := begun.get(key, digest)) != digest:
            policy, _, name = key.partition("/")
            raise ResumeError(
                f"what environment {name!r} of policy {policy!r} reads its tasks from has changed since the run "
                f"began (digest {before[:12]}, now {digest[:12]})",
                fix="put the files back as they were, or start a new run",
            )


def check_lengths(wiring: Wiring, parts: Parts, engines: Iterable[Engine]) -> None:
    """Refuse prompts that are known to be longer (`TaskSource.longest`) than an engine takes (`Engine.longest_prompt`),
    and demonstrations (`longest_shown`) than the model has positions for. Raises `DataError`."""
    limits = [(engine.longest_prompt, repr(engine.name)) for engine in engines if hasattr(engine, "longest_prompt")]
    of_engine = min(limits, default=(math.inf, ""))
    for policy, sampling in parts.sampling.items():
        of_model = (longest_text(wiring.sources[policy]["actor"]) or math.inf, "the model")
        asked = [("train", "longest", *of_engine) if sampling.rewarded else ("train", "longest_shown", *of_model)]
        asked += [("eval", "longest", *of_engine)] if wiring.run.eval.every is not None else []
        for name, (split, what, most, who) in product(sampling.envs, asked):
            tokens, where = getattr(sampling.envs[name].tasks(split), what, None) or (0, "")
            if tokens > most:
                longer = "let the engine take longer ones (max_length of `local`)"
                way = longer if what == "longest" else "give the model more (its max_position_embeddings)"
                raise DataError(
                    f"environment {name!r}: {where}: a text of {tokens} tokens; {who} takes at most {most}",
                    fix=f"shorten or remove it, or {way}",
                )


def check_outputs(sources: Mapping[str, ModelSource], outputs: Iterable[Output]) -> None:
    """Refuse more of a role's likeliest tokens than its vocabulary has. Raises `CombinationError`."""
    for output in outputs:
        size = vocabulary_size(sources[output.role]) if output.role in sources else None
        if size is not None and output.k > size:
            what = f"the {output.k} likeliest tokens of role {output.role!r} are asked for, and its model has {size}"
            raise CombinationError(what, fix=f"write {size} or less (`k` of what learns from it)")


def _fits(model: ModelSource, renderer: Any, task: str, ids: Sequence[int]) -> None:
    """Refuse a tokenizer whose ids the model has no embedding for."""
    size = vocabulary_size(model)
    largest = max([*ids, *renderer.stop_ids], default=0)
    if model.folder is None and model.tokenizer_folder is None:  # drawn for this tokenizer: all of it must fit
        largest = max(largest, renderer.tokenizer.vocab_size - 1)
    for key in [key for key in model.architecture if key.endswith("_token_id")]:
        found = model.architecture[key]
        named = found if isinstance(found, list) else [found]
        if size is not None and any(isinstance(i, int) and i >= size for i in named):
            what = f"model.architecture.{key} is {found}, and its vocab_size is {size}"
            raise ModelSourceError(what, fix="write the tokenizer's id, or leave it out")
    if size is not None and largest >= size:
        raise ModelSourceError(
            f"the tokenizer of model {model.asked!r} has id {largest} (task {task!r}), and the model's vocab_size is "
            f"{size}",
            fix=f"set model.architecture.vocab_size to {largest + 1} or more"
            if model.folder is None
            else "use the model's own tokenizer: leave out model.tokenizer",
        )
