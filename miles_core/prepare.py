"""Everything of a run that needs neither engine nor trainer, built and checked before anything is created.

Capabilities, the plugin lock, model sources, renderers, environments and the first task of each split, stages, filters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.compatibility import match_capabilities, plugin_lock
from miles_core.config.schema import Part
from miles_core.config.source import resolve_source
from miles_core.errors import DataError, LateDataError, ModelSourceError, blamed
from miles_core.provider import Place
from miles_core.wiring import Wiring, column_specs

if TYPE_CHECKING:
    from miles_core.columns import ColumnSpec
    from miles_core.config.schema import Policy, RunFile
    from miles_core.contracts.model import ModelSource
    from miles_core.discovery import Catalogue
    from miles_core.wiring import Sources


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What `prepare` found out: everything that the controller builds without engines or trainer, by policy."""

    wiring: Wiring
    lock: Mapping[str, Any]
    sources: Sources
    renderers: Mapping[str, Any]
    envs: Mapping[str, Mapping[str, Any]]
    stages: Mapping[str, dict[str, list[tuple[str, Any]]]]
    filters: Mapping[str, Mapping[str, Any]]
    extensions: tuple[Any, ...]
    columns: Mapping[str, Mapping[str, ColumnSpec]]


def prepare(run_file: RunFile, catalogue: Catalogue, run_dir: Path, export: Callable[..., Path]) -> Prepared:
    """Check everything that needs neither engine nor trainer. Raises `InputError`s; creates nothing but exports of
    other runs (`export(run_dir, step) -> folder` makes a Hugging Face folder of a run's checkpoint)."""
    match_capabilities(run_file, catalogue)
    wiring = Wiring(run_file, catalogue, run_dir)
    sources = {p.name: model_sources(p, wiring, export) for p in run_file.policies.values()}
    extensions = wiring.extensions(Place.CONTROLLER)
    renderers, envs, stages, filters, columns = {}, {}, {}, {}, {}
    for policy in run_file.policies.values():
        name = policy.name
        renderers[name] = build_renderer(wiring, policy, sources[name]["actor"], Place.CONTROLLER)
        envs[name] = {
            key: wiring.build(part, Place.CONTROLLER, policy=name, renderer=renderers[name])
            for key, part in policy.envs.items()
        }
        for key, env in envs[name].items():
            _probe(key, env, renderers[name], sources[name]["actor"], evaluates=run_file.eval.every is not None)
        stages[name] = wiring.stages(policy)
        filters[name] = {
            part.name: wiring.build(part, Place.CONTROLLER, policy=name) for part in policy.algorithm.many("filters")
        }
        columns[name] = column_specs(stages[name], extensions)
    return Prepared(
        wiring=wiring,
        lock=plugin_lock([*run_file.parts(), *_unbuilt(run_file, catalogue)], catalogue),
        sources=sources,
        renderers=renderers,
        envs=envs,
        stages=stages,
        filters=filters,
        extensions=extensions,
        columns=columns,
    )


def _unbuilt(run_file: RunFile, catalogue: Catalogue) -> list[Part]:
    """Presets and built-in tokenizers: no instance stands for them in the run file, and they decide what runs."""
    found = [("algorithm", p.algorithm.preset) for p in run_file.policies.values() if p.algorithm.preset]
    known = catalogue.names("tokenizer")
    named = [p.model.core.tokenizer for p in run_file.policies.values()]
    found += [("tokenizer", name) for name in named if name in known]
    return [Part(kind=kind, name=use, use=use, options=None) for kind, use in found]


def model_sources(policy: Policy, wiring: Wiring, export: Callable[[Path, int | None], Path]) -> dict[str, ModelSource]:
    """The actor's source, and a role's own where it names one. `export(run_dir, step)` makes a folder of a run."""
    folder = wiring.run.run.folder

    def resolve(part: Part) -> ModelSource:
        return resolve_source(
            part,
            wiring.run.run.seed,
            run_loader=export,
            base=Path(folder) if folder else None,
            catalogue=wiring.catalogue,
        )

    own = resolve(policy.model)
    found = {}
    for name, role in policy.roles.items():
        keys = replace(policy.model.core, source=role.source, architecture=None) if role.source else None
        found[name] = own if keys is None else resolve(replace(policy.model, core=keys))
    return found


def build_renderer(wiring: Wiring, policy: Policy, source: ModelSource, place: Place) -> Any:
    """The policy's renderer, with the built-in tokenizer that `model.tokenizer` names (a folder is in the source)."""
    keys = policy.model.core
    tokenizer = None
    if keys.tokenizer is not None and source.tokenizer_folder is None:
        loaded = wiring.catalogue.load("tokenizer", keys.tokenizer)
        part = Part(
            kind="tokenizer", name=keys.tokenizer, use=keys.tokenizer, options=loaded.provider.config(), core=keys
        )
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
        _fits(model, renderer, task.id, renderer.prompt(task.prompt))


def _fits(model: ModelSource, renderer: Any, task: str, ids: Sequence[int]) -> None:
    """Refuse a tokenizer whose ids the model has no embedding for."""
    text = json.dumps(model.architecture) if model.folder is None else (model.folder / "config.json").read_text()
    size = json.loads(text).get("vocab_size")
    largest = max([*ids, *renderer.stop_ids], default=0)
    if model.folder is None and model.tokenizer_folder is None:  # drawn for this tokenizer: all of it must fit
        largest = max(largest, renderer.tokenizer.vocab_size - 1)
    if isinstance(size, int) and largest >= size:
        raise ModelSourceError(
            f"the tokenizer of model {model.asked!r} has id {largest} (task {task!r}), and the model's vocab_size is "
            f"{size}",
            fix=f"set model.architecture.vocab_size to {largest + 1} or more"
            if model.folder is None
            else "use the model's own tokenizer: leave out model.tokenizer",
        )
