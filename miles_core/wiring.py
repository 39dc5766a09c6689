"""Build what the run file chose, in the process that needs it.

A loaded plugin manager does not travel: every process gets the frozen tree and the plugin lock, resolves the same names
itself (`wire`) and refuses to work where its lock differs. `Wiring.build` is the only place where a provider's `build`
is called; it checks the product against its Protocol once. `TrainerWorker` is what a trainer rank is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.compatibility import check_lock, check_product
from miles_core.config.compose import from_tree
from miles_core.contracts.backend import Backend, RoleSpec
from miles_core.contracts.learning import BoundTerm, TermInfo, UpdateResult
from miles_core.contracts.model import ModelSource
from miles_core.discovery import Catalogue, scan
from miles_core.errors import CapabilityError, CombinationError, MilesError, MissingExtraError, PluginContractError
from miles_core.provider import BuildContext, Place
from miles_core.seeds import derive

if TYPE_CHECKING:
    from miles_core.columns import Batch, ColumnSpec
    from miles_core.config.schema import Part, Policy, RunFile
    from miles_core.contracts.learning import Output
    from miles_core.contracts.weights import Manifest, Sender, TensorSpec
    from miles_core.records import Array, Version

#: Fields of `algorithm` whose parts are terms whenever their provider is of kind `term`.
TERM_FIELDS = ("loss", "kl", "entropy", "value", "distill", "corrections")
#: Fields whose parts are stages whenever their provider is of kind `stage`, in the order in which they run.
STAGE_FIELDS = ("penalties", "reward_kl", "advantage", "distill", "whiten", "corrections")

Sources = Mapping[str, Mapping[str, ModelSource]]  # policy -> role -> source


@dataclass(frozen=True)
class Wiring:
    """The frozen run file and the catalogue of this process."""

    run: RunFile
    catalogue: Catalogue
    run_dir: Path

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
        try:
            product = loaded.provider.build(part.options, given)
        except MilesError:
            raise
        except ImportError as error:
            lacking = (error.name or "what it imports").partition(".")[0]
            raise MissingExtraError(
                f"{part.kind} {part.use!r} ({loaded.distribution} {loaded.version}) cannot be built: {error}",
                fix=f"pip install {lacking}, or the extra that {loaded.distribution} names for it",
            ) from error
        check_product(loaded, place, product)
        return product

    def extensions(self, place: Place, **context: Any) -> tuple[Any, ...]:
        """Every extension of the run, in config order."""
        return tuple(self.build(part, place, **context) for part in self.run.extensions.values())

    def stages(self, policy: Policy) -> dict[str, list[tuple[str, Any]]]:
        """Built stages by field, in the order in which they run."""
        built: dict[str, list[tuple[str, Any]]] = {}
        for field in STAGE_FIELDS:
            parts = [p for p in policy.algorithm.many(field) if p.kind == "stage"]
            if parts:
                built[field] = [(p.name, self.build(p, Place.CONTROLLER, policy=policy.name)) for p in parts]
        return built

    def terms(self, policy: Policy) -> tuple[BoundTerm, ...]:
        """Built terms of the actor's objective. A term whose coefficient is 0 is not built and needs no role."""
        bound = []
        for field in TERM_FIELDS:
            for part in policy.algorithm.many(field):
                dynamic = field == "corrections"
                if part.kind != "term" or (not dynamic and part.core.coef == 0):
                    continue
                term = self.build(part, Place.TRAINER, policy=policy.name)
                role = "critic" if field == "value" and "critic" in policy.roles else "actor"
                coef = 1.0 if dynamic else part.core.coef
                bound.append(BoundTerm(name=part.name, term=term, coef=coef, role=role, dynamic=dynamic))
        return tuple(bound)


def wire(tree: Mapping[str, Any], lock: Mapping[str, Any], run_dir: str) -> Wiring:
    """Wire this process from plain data. Raises `LockError` where what is installed here differs from the lock."""
    catalogue = scan()
    check_lock(lock, catalogue)
    return Wiring(from_tree(tree, catalogue), catalogue, Path(run_dir))


def sources_to_plain(sources: Sources) -> dict[str, dict[str, dict[str, Any]]]:
    """Model sources as JSON: they travel to workers in a payload."""

    def plain(source: ModelSource) -> dict[str, Any]:
        return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(source).items()}

    return {policy: {role: plain(s) for role, s in roles.items()} for policy, roles in sources.items()}


def sources_from_plain(plain: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Sources:
    def source(fields: Mapping[str, Any]) -> ModelSource:
        paths = {k: Path(fields[k]) if fields[k] else None for k in ("folder", "tokenizer_folder")}
        return ModelSource(**{**fields, **paths})

    return {policy: {role: source(f) for role, f in roles.items()} for policy, roles in plain.items()}


def trainer_worker(
    *,
    rank: int,
    count: int,
    cancelled: Callable[[], bool],
    tree: Mapping[str, Any],
    lock: Mapping[str, Any],
    run_dir: str,
    sources: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> TrainerWorker:
    """Factory named in the trainers' `WorkerSpec`."""
    return TrainerWorker(wire(tree, lock, run_dir), sources_from_plain(sources), rank, count, cancelled)


class TrainerWorker:
    """One trainer rank: the backend with its adapters, terms, extensions and weight senders.

    Methods are called collectively through `Workers.call`, each on this rank's own thread.
    """

    def __init__(self, wiring: Wiring, sources: Sources, rank: int, count: int, cancelled: Callable[[], bool]) -> None:
        run = wiring.run
        shared: dict[str, Any] = {"rank": rank, "ranks": count}
        extensions = wiring.extensions(Place.TRAINER, **shared)
        specs: dict[str, dict[str, RoleSpec]] = {}
        adapters: dict[str, Any] = {}
        for policy in run.policies.values():
            specs[policy.name] = {}
            for name, role in policy.roles.items():
                source = sources[policy.name][name]
                adapter = wiring.build(
                    policy.model, Place.TRAINER, policy=policy.name, model=source, extensions=extensions, **shared
                )
                adapters[f"{policy.name}/{name}"] = adapter
                specs[policy.name][name] = RoleSpec(
                    name=name,
                    source=source,
                    adapter=adapter,
                    init=role.init,
                    update=role.update.value,
                    every=role.every,
                    decay=role.decay,
                    head=role.head,
                    optimizer=role.optimizer if role.update == "trained" else None,
                    seed=derive(run.run.seed, policy.name, "init", role.init or name),
                )
        self.backend: Backend = wiring.build(
            run.backend, Place.TRAINER, adapters=adapters, extensions=extensions, **shared
        )
        self.backend.build(specs, {p.name: run.run.steps * p.schedule.updates_per_step for p in run.policies.values()})
        self._terms = {p.name: wiring.terms(p) for p in run.policies.values()}
        self._cancelled = cancelled
        self._senders: dict[str, Sender] = {}
        if run.sync is not None:
            for name in run.policies:
                self._senders[name] = wiring.build(
                    run.sync, Place.TRAINER, policy=name, export=self.backend.export, extensions=extensions, **shared
                )

    def declare(self, policy: str) -> list[TermInfo]:
        """What the controller must know of this policy's terms."""
        return [
            TermInfo(
                name=b.name,
                coef=b.coef,
                role=b.role,
                dynamic=b.dynamic,
                level=b.term.level,
                mask=b.term.mask,
                weighted=b.term.weighted,
                aggregation=b.term.aggregation,
                outputs=b.term.outputs,
                needs=b.term.needs,
            )
            for b in self._terms[policy]
        ]

    def score(self, batch: Batch, outputs: tuple[Output, ...]) -> Mapping[str, Array]:
        return self.backend.score(batch, outputs)

    def update(self, minibatch: Batch) -> UpdateResult:
        return self.backend.update(minibatch, self._terms[minibatch.policy])

    def blend(self, policy: str, dst: str, src: str, decay: float) -> None:
        self.backend.blend(policy, dst, src, decay)

    def specs(self, policy: str) -> list[TensorSpec]:
        """The weight stream's specs, from a dry pass on meta tensors."""
        return [spec for spec, _ in self.backend.export(policy, "full", True)]

    def describe(self, policy: str) -> bytes:
        return self._sender(policy).describe()

    def connect(self, policy: str, plan: bytes) -> None:
        self._sender(policy).connect(plan)

    def stage(self, version: Version) -> Manifest | None:
        return self._sender(version.policy).stage(version)

    def carry(self, version: Version) -> None:
        self._sender(version.policy).carry(version, self._cancelled)

    def _sender(self, policy: str) -> Sender:
        if policy not in self._senders:
            raise CapabilityError(
                f"policy {policy!r} has no weight transport in this run", fix="add a `sync` section to the run file"
            )
        return self._senders[policy]

    def save(self, folder: str) -> None:
        self.backend.save(Path(folder))

    def load(self, folder: str) -> None:
        self.backend.load(Path(folder))

    def save_model(self, policy: str, folder: str) -> None:
        self.backend.save_model(policy, Path(folder))

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        self.backend.close()


def column_specs(stages: Mapping[str, list[tuple[str, Any]]], extensions: tuple[Any, ...]) -> dict[str, ColumnSpec]:
    """Every declared column of a policy: core's, the stages' and the extensions'. A name may be declared twice only
    with the same spec."""
    from miles_core.columns import CORE_COLUMNS

    specs = dict(CORE_COLUMNS)
    declared = [(f"stage {name!r}", spec) for parts in stages.values() for name, stage in parts for spec in stage.gives]
    declared += [(f"extension {e.name!r}", spec) for e in extensions for spec in e.columns]
    for owner, spec in declared:
        if specs.setdefault(spec.name, spec) != spec:
            raise PluginContractError(
                f"{owner} declares column {spec.name!r} as {spec}; it is already declared as {specs[spec.name]}",
                fix="use the declared shape, or another name with the plugin's own prefix",
            )
    return specs


def check_roles(policy: Policy, terms: list[TermInfo], stages: Mapping[str, list[tuple[str, Any]]]) -> None:
    """Refuse a part that needs a role which the run file does not have. Raises `CombinationError`."""
    wanted: dict[str, str] = {}
    for term in terms:
        for output in term.outputs:
            wanted[output.role] = term.name
        for column in term.needs:
            wanted |= _role_of_column(column, term.name)
    for parts in stages.values():
        for name, stage in parts:
            for column in stage.needs:
                wanted |= _role_of_column(column, name)
    missing = {role: part for role, part in wanted.items() if role not in policy.roles}
    if missing:
        role, part = next(iter(missing.items()))
        raise CombinationError(
            f"policy {policy.name!r}: part {part!r} needs the role {role!r}; the run file has {sorted(policy.roles)}",
            fix=f"add `roles: {{{role}: {{init: actor, update: frozen}}}}`, or set the part's coefficient to 0",
        )


def _role_of_column(column: str, part: str) -> dict[str, str]:
    role, dot, rest = column.partition(".")
    return {role: part} if dot and rest in ("logprobs", "topk_ids", "topk_logprobs", "values") else {}
