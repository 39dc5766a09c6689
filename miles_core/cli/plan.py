"""`miles plan FILE`: what a run would be, and what of it is refused, without starting or creating anything of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from miles_core.errors import EXIT_BAD_INPUT, MilesError

if TYPE_CHECKING:
    from miles_core.config.schema import RunFile
    from miles_core.contracts.model import ModelSource
    from miles_core.discovery import Catalogue


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


def _models(run_file: RunFile, catalogue: Catalogue, path: Path) -> list[str]:
    """Model sources with their sizes; also finds what an environment or a prompt template would refuse."""
    from miles_core.export import export_cached
    from miles_core.prepare import prepare

    prepared = prepare(run_file, catalogue, path, export_cached)
    engines = sum(part.core.count for part in run_file.engines.values())
    lines = []
    for policy, roles in prepared.wiring.sources.items():
        for role, source in roles.items():
            keys = run_file.policies[policy].roles[role]
            if keys.update in ("shares", "adapter_off"):
                lines.append(f"{policy}/{role}: {keys.update.value} the model of {keys.init}")
                continue
            size = _size(source, engines if role == "actor" else 0, trained=keys.update == "trained")
            lines.append(f"{policy}/{role}: {source.asked} -> {size}")
    return lines


def _size(source: ModelSource, engines: int, *, trained: bool) -> str:
    if source.folder is None:
        return f"drawn at random as {source.architecture['model_type']}; its size is known once it is built"
    nbytes = parameters = 0
    for file in sorted(source.folder.glob("*.safetensors")):
        with open(file, "rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                nbytes += tensor["data_offsets"][1] - tensor["data_offsets"][0]
                count = 1
                for side in tensor["shape"]:
                    count *= side
                parameters += count
    traffic = f"; {nbytes * engines / 2**20:.1f} MiB to {engines} engine(s) a publication" if engines else ""
    held = (16 if trained else 4) * parameters / 2**20  # float32 weight; gradient and two moments beside it
    what = "to train" if trained else "to hold"
    return f"{source.folder}, {parameters / 1e6:.2f} M parameters, {held:.0f} MiB {what} in float32{traffic}"


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
