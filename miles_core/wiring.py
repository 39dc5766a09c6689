"""Build what the run file chose, in the process that needs it.

A loaded plugin manager does not travel: every process gets the frozen tree and the plugin lock, resolves the same names
itself (`wire`) and refuses to work where its lock differs. `Wiring.build` is the only place where a provider's `build`
is called; it checks the product against its Protocol once. `TrainerWorker` is what a trainer rank is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_core.columns import Batch
from miles_core.compatibility import check_lock, check_product
from miles_core.config.compose import from_tree
from miles_core.config.schema import Part, Policy, RunFile, is_on
from miles_core.contracts.backend import Backend, RoleSpec
from miles_core.contracts.learning import BoundTerm, TermInfo, UpdateResult
from miles_core.contracts.model import ModelSource
from miles_core.contracts.weights import Manifest, Sender, TensorSpec
from miles_core.discovery import Catalogue, scan
from miles_core.passes import PHASES
from miles_core.provider import BuildContext, Place
from miles_core.records import Version
from miles_core.seeds import derive

#: Fields of `algorithm` whose parts are terms whenever their provider is of kind `term`.
TERM_FIELDS = ("loss", "kl", "entropy", "value", "distill", "corrections")

Sources = Mapping[str, Mapping[str, ModelSource]]  # policy -> role -> source


@dataclass(frozen=True)
class Wiring:
    """The frozen run file and model sources, and the catalogue of this process."""

    run: RunFile
    catalogue: Catalogue
    run_dir: Path
    sources: Sources
    built: list[Any] = field(default_factory=list)  # what `closers` close, in the order in which it was built

    def payload(self, lock: Mapping[str, Any]) -> dict[str, Any]:
        """Plain data from which `wire` makes the same in another process."""
        sources = {p: {role: _plain(source) for role, source in roles.items()} for p, roles in self.sources.items()}
        return {"tree": self.run.tree, "lock": lock, "run_dir": str(self.run_dir), "sources": sources}

    def build(self, part: Part, place: Place, **context: Any) -> Any:
        """The product of `part` at `place`, checked against its Protocol. Keyword arguments fill `BuildContext`."""
        loaded = self.catalogue.load(part.kind, part.use)
        given = BuildContext(
            place=place,
            name=part.name,
            run=self.run,
            seed=self.run.run.seed,
            run_dir=self.run_dir,
            core=part.core,
            **context,
        )
        product = loaded.build(part.options, given)
        if part.kind != "tracker":  # closed with the run's status, by whoever reports it
            self.built.append(product)
        check_product(loaded, place, product)
        return product

    def extensions(self, place: Place, **context: Any) -> tuple[Any, ...]:
        """Every extension of the run, in config order."""
        return tuple(self.build(part, place, **context) for part in self.run.extensions.values())

    def closers(self) -> list[Callable[[], Any]]:
        """How to close what was built and can be closed, latest first."""
        return [product.close for product in reversed(self.built) if hasattr(product, "close")]

    def stages(self, policy: Policy) -> dict[str, list[tuple[str, Any]]]:
        """Built stages by field, in the order in which they run. One whose own `coef` is 0 is not built."""
        found: dict[str, list[tuple[str, Any]]] = {}
        for phase, part in _chosen(policy, "stage", PHASES):
            built = self.build(part, Place.CONTROLLER, policy=policy.name)
            found.setdefault(phase, []).append((part.name, built))
        return found

    def terms(self, policy: Policy) -> tuple[BoundTerm, ...]:
        """Built terms of the actor's objective. A term whose coefficient is 0 is not built and needs no role."""
        bound = []
        for name, part in _chosen(policy, "term", TERM_FIELDS):
            term = self.build(part, Place.TRAINER, policy=policy.name)
            role = "critic" if name == "value" and "critic" in policy.roles else "actor"
            dynamic = name == "corrections"
            coef = 1.0 if dynamic else part.core.coef
            bound.append(BoundTerm(name=part.name, term=term, coef=coef, role=role, dynamic=dynamic))
        return tuple(bound)


def _chosen(policy: Policy, kind: str, fields: Sequence[str]) -> list[tuple[str, Part]]:
    """(field, part) of the policy's algorithm for every part of `kind` that is on, in the order of `fields`."""
    parts = [(field, part) for field in fields for part in policy.algorithm.many(field)]
    return [(field, part) for field, part in parts if part.kind == kind and is_on(part)]


def _plain(source: ModelSource) -> dict[str, Any]:
    return {name: str(v.absolute()) if isinstance(v, Path) else v for name, v in vars(source).items()}


def _source(plain: Mapping[str, Any]) -> ModelSource:
    folders = {name: Path(plain[name]) for name in ("folder", "tokenizer_folder") if plain[name]}
    return ModelSource(**{**plain, **folders})


def sources_of(plain: Mapping[str, Any]) -> Sources:
    """The `sources` of a `Wiring.payload`, or of a run's lock."""
    return {policy: {role: _source(fields) for role, fields in roles.items()} for policy, roles in plain.items()}


def wire(*, tree: Mapping[str, Any], lock: Mapping[str, Any], run_dir: str, sources: Mapping[str, Any]) -> Wiring:
    """Wire this process from `Wiring.payload`. Raises `LockError` where the lock says other than what is installed."""
    catalogue = scan()
    check_lock(lock, catalogue)
    return Wiring(from_tree(tree, catalogue), catalogue, Path(run_dir), sources_of(sources))


def trainer_worker(*, rank: int, count: int, cancelled: Callable[[], bool], **payload: Any) -> TrainerWorker:
    """Factory named in the trainers' `WorkerSpec`."""
    return TrainerWorker(wire(**payload), rank, count, cancelled)


class TrainerWorker:
    """One trainer rank: the backend with its adapters, terms, extensions and weight senders.

    Methods are called collectively through `Workers.call`, each on this rank's own thread.
    """

    def __init__(self, wiring: Wiring, rank: int, count: int, cancelled: Callable[[], bool]) -> None:
        self._wiring = wiring
        self._cancelled = cancelled
        self._senders: dict[str, Sender] = {}
        try:
            self._build({"rank": rank, "ranks": count})
        except BaseException:
            with suppress(Exception):  # what failed first is the better news
                self.close()
            raise

    def _build(self, shared: dict[str, Any]) -> None:
        wiring, run = self._wiring, self._wiring.run
        shared["extensions"] = wiring.extensions(Place.TRAINER, **shared)
        specs: dict[str, dict[str, RoleSpec]] = {name: {} for name in run.policies}
        for policy in run.policies.values():
            for name, role in policy.roles.items():
                if role.held_by:
                    continue  # no model of this backend
                source = wiring.sources[policy.name][name]
                specs[policy.name][name] = RoleSpec(
                    name=name,
                    source=source,
                    adapter=wiring.build(policy.model, Place.TRAINER, policy=policy.name, model=source, **shared),
                    init=role.init,
                    update=role.update.value,
                    every=role.every,
                    decay=role.decay,
                    head=role.head,
                    optimizer=role.optimizer if role.update == "trained" else None,
                    seed=derive(run.run.seed, policy.name, "init", role.init or name),
                )
        adapters = {f"{policy}/{name}": spec.adapter for policy, roles in specs.items() for name, spec in roles.items()}
        self.backend: Backend = wiring.build(run.backend, Place.TRAINER, adapters=adapters, **shared)
        self.backend.build(specs, {p.name: run.run.steps * p.schedule.updates_per_step for p in run.policies.values()})
        self.score, self.blend = self.backend.score, self.backend.blend  # nothing of this rank is added to these
        self.save, self.load, self.save_model = self.backend.save, self.backend.load, self.backend.save_model
        self._terms = {p.name: wiring.terms(p) for p in run.policies.values()}
        if run.sync is not None:
            export = self.backend.export
            for name in run.policies:
                self._senders[name] = wiring.build(run.sync, Place.TRAINER, policy=name, export=export, **shared)

    def declare(self, policy: str) -> list[TermInfo]:
        """What the controller must know of this policy's terms."""
        return [bound.info for bound in self._terms[policy]]

    def update(self, minibatch: Batch) -> UpdateResult:
        return self.backend.update(minibatch, self._terms[minibatch.policy])

    def specs(self, policy: str) -> list[TensorSpec]:
        """The weight stream's specs, from a dry pass on meta tensors."""
        return [spec for spec, _ in self.backend.export(policy, "full", True)]

    def describe(self, policy: str) -> bytes:
        return self._senders[policy].describe()

    def connect(self, policy: str, plan: bytes) -> None:
        self._senders[policy].connect(plan)

    def stage(self, version: Version) -> Manifest | None:
        return self._senders[version.policy].stage(version)

    def carry(self, version: Version) -> None:
        self._senders[version.policy].carry(version, self._cancelled)

    def close(self) -> None:
        for close in self._wiring.closers():
            close()
