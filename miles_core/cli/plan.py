"""`miles plan FILE`: what a run would be, and what of it is refused, without starting or creating anything of it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from miles_core.errors import EXIT_BAD_INPUT, MilesError, MissingExtraError, clause
from miles_core.provider import Place

if TYPE_CHECKING:
    from miles_core.config.schema import Policy, RunFile
    from miles_core.discovery import Catalogue
    from miles_core.wiring import Wiring


@dataclass(frozen=True, kw_only=True)
class Promise:
    """Something that this run may or may not rely on, and why."""

    name: str
    holds: bool
    why: str


def plan(
    file: Annotated[Path, typer.Argument(help="a run file, or a run directory")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, e.g. schedule.max_staleness=2")] = None,
) -> None:
    """Print resolved parts, capabilities, placement, sizes, promises that hold, and every refused combination."""
    from miles_core.cli.table import table
    from miles_core.compatibility import capability_rows, match_capabilities
    from miles_core.config.compose import load, reload
    from miles_core.config.rules import violations
    from miles_core.discovery import scan
    from miles_core.driver import run_path
    from miles_core.run import refuse_existing

    catalogue = scan()
    given = tuple(overrides or ())
    if file.is_dir():
        run_file = reload(file, given, catalogue=catalogue)
    else:
        run_file = load(file, given, catalogue=catalogue, check=False)
    refused = list(violations(run_file, catalogue))
    path = run_path(run_file)
    print(f"run {run_file.run.name}: {run_file.run.steps} steps, seed {run_file.run.seed}, directory {path}")

    print("\nparts")
    print(table(["where", "kind", "plugin", "distribution", "version"], _parts(run_file, catalogue)))

    print("\ncapabilities")
    rows = capability_rows(run_file, catalogue)
    cells = [[r.asked_by, r.capability, ", ".join(r.offered_by) or "nobody", "yes" if r.met else "NO"] for r in rows]
    print(table(["asked by", "needs", "offered by", "met"], cells) if cells else "nothing is asked for")
    try:
        match_capabilities(run_file, catalogue)
    except MilesError as error:
        refused.append(error)

    print("\nplacement")
    print("\n".join(f"  {line}" for line in placement(run_file)))

    if not refused:
        try:
            models = "\n".join(f"  {line}" for line in _models(run_file, catalogue, path))
            print(f"\nmodels\n{models}")
        except MilesError as error:
            refused.append(error)

    if not file.is_dir():  # a run directory is asked for to go on with it
        try:
            refuse_existing(path)
        except MilesError as error:
            refused.append(error)

    print("\npromises")
    rows_of = [["yes" if p.holds else "no", p.name, p.why] for p in promises(run_file, catalogue)]
    print(table(["holds", "promise", "because"], rows_of))

    if refused:
        print(f"\nrefused: {len(refused)}")
        for reason in refused:
            print(f"  {str(reason).replace(chr(10), chr(10) + '    ')}")
        raise typer.Exit(EXIT_BAD_INPUT)
    print("\nnothing is refused")


def _parts(run_file: RunFile, catalogue: Catalogue) -> list[list[str]]:
    from miles_core.config.schema import is_on

    rows = []
    for part in run_file.parts():
        entry = catalogue.find(part.kind, part.use)
        off = "" if is_on(part) else " (coefficient 0: not built)"
        rows.append([part.at, part.kind, part.use + off, entry.distribution, entry.version])
    return rows


def placement(run_file: RunFile) -> list[str]:
    """Who runs where, one line each."""
    backend, launcher = run_file.backend, run_file.launcher.use
    gpus = f", {backend.core.gpus_per_rank:g} GPUs each" if backend.core.gpus_per_rank else ""
    lines = [f"trainer: {backend.core.ranks} rank(s) of {backend.use}{gpus}, placed by {launcher}"]
    for name, part in run_file.engines.items():
        gpus = f", {part.core.gpus:g} GPUs each" if part.core.gpus else ""
        lines.append(f"engine {name}: {part.core.count} of {part.use}{gpus}")
    lines += [f"engine {name}: {part.use}, holds a role's model and scores" for name, part in run_file.judges.items()]
    for name, policy in run_file.policies.items():
        s = policy.schedule
        where = f"{s.samplers} sampler processes" if s.samplers else "in the controller"
        if policy.algorithm.keys.episodes == "demonstrations":
            where = "none, demonstrations are read"
        lag = "strictly on-policy" if s.max_staleness == 0 else f"at most {s.max_staleness} versions behind"
        lines.append(
            f"policy {name}: {s.groups_per_step} groups x {s.group_size} episodes a step, {s.updates_per_step} "
            f"update(s); episodes: {where}; {lag}"
        )
    return lines


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of one role's model. `moving`: parameters that change in the run; `sent`: bytes of a publication to one engine,
    where that is known. `unknown`: why only the first of them is known."""

    parameters: int
    moving: int
    sent: int | None
    unknown: str = ""

    def told(self, engines: int, *, trained: bool) -> str:
        """One line. float32: a weight, and beside one that is trained its gradient and two moments."""
        if self.unknown:
            what = "what of them is trained and sent is known once the model is built"
            return f"{_count(self.parameters)} parameters; {what}: {self.unknown}"
        held = 4 * self.parameters + (12 * self.moving if trained else 0)
        kept = (12 if trained else 4) * self.moving
        part = f", {_count(self.moving)} of them trained" if trained and self.moving < self.parameters else ""
        what = "to train" if trained else "to hold"
        line = f"{_count(self.parameters)} parameters{part}, {_mib(held)} {what} in float32"
        line += f", {_mib(kept)} in a checkpoint" if kept else ""
        if engines and self.sent is not None:
            line += f"; {_mib(self.sent * engines)} to {engines} engine(s) a publication"
        return line


def _count(parameters: int) -> str:
    return f"{parameters / 1e6:.2f} M" if parameters >= 100_000 else str(parameters)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.{0 if nbytes >= 100 << 20 else 1 if nbytes >= 1 << 20 else 3}f} MiB"


def _models(run_file: RunFile, catalogue: Catalogue, path: Path) -> list[str]:
    """Model sources with their sizes; also finds what an environment, a prompt template or an adapting extension would
    refuse."""
    from miles_core.export import export_cached
    from miles_core.prepare import prepare

    wiring = prepare(run_file, catalogue, path, export_cached).wiring
    engines = sum(part.core.count for part in run_file.engines.values())
    lines = []
    for policy in run_file.policies.values():
        sizes = _sizes(wiring, policy)
        for role, source in wiring.sources[policy.name].items():
            keys, told = policy.roles[role], f"{policy.name}/{role}"
            if keys.update in ("shares", "adapter_off"):
                lines.append(f"{told}: {keys.update.value} the model of {keys.init}")
                continue
            if keys.held_by and not keys.engine:
                lines.append(f"{told}: no model of this run, asked of scorer {keys.scorer}")
                continue
            where = source.folder or f"drawn at random as {source.architecture['model_type']}"
            size = sizes[role]
            told = f"{told}: {source.asked} -> {where}"
            if size is None:
                lines.append(f"{told}; its size is known once it is built")
            else:
                sent_to = engines if role == "actor" and run_file.sync is not None else 0
                lines.append(f"{told}, {size.told(sent_to, trained=keys.update == 'trained')}")
    return lines


def _sizes(wiring: Wiring, policy: Policy) -> dict[str, Size | None]:
    """By role: from the files of its model, or from a dry pass where less than all of it is trained or sent. `None`:
    not known before the model is built."""
    found = {role: _of_folder(wiring, policy, role) for role in policy.roles}
    try:
        extensions = wiring.extensions(Place.TRAINER, rank=0, ranks=1)
        adapting = [e for e in extensions if hasattr(e, "model") or hasattr(e, "export")]
        if not adapting and not getattr(policy.model.options, "trainable", None):
            return found
        return found | _dry(wiring, policy, extensions)
    except (_NotDry, MissingExtraError) as error:  # a controller need not have what trainers have
        why = str(error) if isinstance(error, _NotDry) else clause(error)
        return {role: size and replace(size, unknown=why) for role, size in found.items()}


def _of_folder(wiring: Wiring, policy: Policy, role: str) -> Size | None:
    """All of it is trained, and sent in the type that the backend says, or else in that of the files."""
    folder = wiring.sources[policy.name][role].folder
    if folder is None:
        return None
    nbytes = parameters = 0
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                nbytes += tensor["data_offsets"][1] - tensor["data_offsets"][0]
                parameters += math.prod(tensor["shape"])
    sent = {"float32": 4 * parameters, "bfloat16": 2 * parameters}.get(_wire_type(wiring), nbytes)
    moves = policy.roles[role].update in ("trained", "copy", "ema")
    return Size(parameters=parameters, moving=parameters if moves else 0, sent=sent)


class _NotDry(Exception):
    """A model adapter that does not build without numbers."""


def _dry(wiring: Wiring, policy: Policy, extensions: tuple[Any, ...]) -> dict[str, Size]:
    """What the trainer would build and export, on meta tensors. Raises what an extension refuses."""
    try:
        from miles_core.numerics import _dry as dry
    except ImportError as error:
        raise _NotDry(str(error)) from error

    given: dict[str, Any] = {"policy": policy.name, "rank": 0, "ranks": 1, "extensions": extensions}
    modules: dict[str, Any] = {}
    adapters: dict[str, Any] = {}
    for role, keys in policy.roles.items():
        if keys.held_by or keys.update in ("shares", "adapter_off"):
            continue
        source = wiring.sources[policy.name][role]
        shared = any(r.update == "shares" and r.init == role for r in policy.roles.values())
        adapters[role] = wiring.build(policy.model, Place.TRAINER, model=source, **given)
        try:
            with dry.without_numbers():
                modules[role] = adapters[role].build(source, 0, head="lm+value" if shared else keys.head)
        except Exception as error:  # it may be right with numbers
            raise _NotDry(f"its adapter needs numbers ({clause(error)})") from error
        if not dry.is_module(modules[role]):
            raise _NotDry(f"its adapter builds a {type(modules[role]).__name__} with numbers")
    for role in modules:
        for extension in extensions:
            if hasattr(extension, "model"):
                with dry.without_numbers():
                    modules[role] = extension.model(modules[role], role, policy.name)
    own = {role: dry.parameters(module) for role, module in modules.items()}
    found = {}
    for role, counts in own.items():
        leader = role
        while policy.roles[leader].update in ("copy", "ema"):
            leader = policy.roles[leader].init
        moves = policy.roles[leader].update == "trained"
        trained = {name for name, (_, is_trained) in own.get(leader, {}).items() if is_trained and moves}
        moving = sum(n for name, (n, _) in counts.items() if name in trained)
        sent = None
        if role == "actor":
            export: Any = adapters[role].export(
                modules[role], dry.stream(modules[role], _wire_type(wiring) or "float32")
            )
            for extension in extensions:
                if hasattr(extension, "export"):
                    export = extension.export(export, "full", policy.name)
            sent = sum(math.prod(spec.shape) * dry.WIDTHS[spec.dtype] for spec, _ in export)
        found[role] = Size(parameters=sum(n for n, _ in counts.values()), moving=moving, sent=sent)
    return found


def _wire_type(wiring: Wiring) -> str:
    """The type in which the backend says that it computes and exports; empty where it does not say."""
    return str(getattr(wiring.run.backend.options, "dtype", ""))


def promises(run_file: RunFile, catalogue: Catalogue) -> list[Promise]:
    """What this run may rely on. A part that offers `dropout` says that it draws random masks while training."""
    offers = {id(p): catalogue.load(p.kind, p.use).provider.offered(p.options) for p in run_file.parts()}
    policies = run_file.policies.values()
    sampled = [p for p in policies if p.algorithm.keys.episodes == "sampled"]
    dropout = [p.use for p in run_file.parts() if "dropout" in offers[id(p)]]
    drops = f"{', '.join(dropout)} uses dropout" if dropout else ""
    stale = max((p.schedule.max_staleness for p in sampled), default=0)
    unordered = [p.name for p in policies if p.schedule.order != "slot"]
    varying = [p.use for p in run_file.engines.values() if "batch_invariant" not in offers[id(p)]] if sampled else []
    switches = [p.at for p in run_file.engines.values() if p.use in varying and hasattr(p.options, "batch_invariant")]
    how = f" ({', '.join(f'{at}.batch_invariant=true' for at in switches)} would)" if switches else ""
    against = [
        *([f"max_staleness is {stale}, so timing decides which version samples"] if stale else []),
        *([f"order is not slot in {', '.join(unordered)}"] if unordered else []),
        *([f"{', '.join(varying)} does not offer batch_invariant{how}"] if varying else []),
    ]
    found = [
        Promise(name="each group is trained at most once", holds=True, why="leases, journal and checkpoints"),
        Promise(name="bit-equal repeats and resumes", holds=not against, why="; ".join(against) or "on one machine"),
        Promise(
            name="loss independent of micro-batches and ranks", holds=not drops, why=drops or "global denominators"
        ),
    ]
    if sampled:
        found.append(
            Promise(
                name=f"no token older than {stale} version(s)", holds=True, why="admission by schedule.max_staleness"
            )
        )
        older = f"max_staleness is {stale}, so older versions may have sampled" if stale else ""
        unlike = "; ".join(filter(None, (older, drops)))
        ratio = unlike or "the same temperature and kept tokens in training as in sampling"
        found.append(Promise(name="on-policy ratio is 1", holds=not unlike, why=ratio))
    if run_file.sync is not None and run_file.engines:
        evidence = run_file.sync.core.verify.value
        found.append(
            Promise(name="engines serve verified weights only", holds=True, why=f"receipts with evidence {evidence!r}")
        )
    return found
