"""A merged draft becomes a `RunFile`: every section and every part of it bound to the dataclass that types it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from miles_core.config import layers, schema
from miles_core.config.binding import bind, check_keys, fields_of, plain
from miles_core.config.layers import At, Leaf, Tree, is_map, kinds_at, sections, unwrap, use_of
from miles_core.config.rules import demonstrated_size
from miles_core.config.schema import Algorithm, Part, Policy, RoleConfig, RunFile
from miles_core.discovery import Catalogue, Loaded
from miles_core.errors import CombinationError, ConfigError, MilesError, PluginContractError

T = TypeVar("T")

#: Sections of a policy: of an entry of `policies`, or of the run file itself, which is then the policy `main`.
POLICY_KEYS = ("model", "env", "envs", "algorithm", "schedule", "optimizer", "roles", "renderer")


class Frozen(dict):
    """A mapping that nobody may change; pickles, and equals the plain dict."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("the run file is frozen")

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return Frozen, (dict(self),)


@dataclass
class Nothing:
    """What an algorithm without a preset takes beside core's keys."""


def _freeze(tree: Any) -> Any:
    return Frozen({k: _freeze(v) for k, v in tree.items()}) if isinstance(tree, dict) else tree


class Binder:
    """Binds one merged draft, and notes in `tree` what each of its sections was resolved to."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.tree: dict[str, Any] = {}

    def run_file(self, draft: Tree) -> RunFile:
        check_keys("", draft, list(layers.SHAPES))
        policies = self.policies(draft)
        engines = self.one_or_many(draft, ("rollout",), ("engines",))
        judging = {role.engine for policy in policies.values() for role in policy.roles.values()}
        return RunFile(
            run=self.core(schema.RunConfig, draft, "run"),
            eval=self.core(schema.EvalConfig, draft, "eval"),
            policies=Frozen(policies),
            engines=Frozen({name: part for name, part in engines.items() if name not in judging}),
            judges=Frozen({name: part for name, part in engines.items() if name in judging}),
            backend=self.needed(draft, "backend"),
            sync=next(iter(self.parts(draft, "sync").values()), None),
            launcher=self.needed(draft, "launcher"),
            **{key: Frozen(self.parts(draft, key)) for key in ("trackers", "scorers", "extensions")},
            tree=_freeze(self.tree),  # by now all of it is noted
            origins=Frozen(layers.origins_of(layers.wrap(self.tree, "default", layers.origins_of(draft)))),
        )

    def policies(self, draft: Tree) -> dict[str, Policy]:
        if "policies" not in draft:
            return {"main": self.policy("main", draft)}
        if beside := next((key for key in POLICY_KEYS if key in draft), ""):
            raise CombinationError(
                f"{beside!r} stands beside `policies`; each policy has its own",
                fix=f"move it to policies.<name>.{beside}",
            )
        scopes = sections(draft, "policies")
        if not scopes:
            raise ConfigError("`policies` names no policy", fix="add one, or use the singular sections")
        return {name: self.policy(name, scope, "policies", name) for name, scope in scopes.items()}

    def policy(self, name: str, scope: Tree, *prefix: str) -> Policy:
        """The sections of `scope`, which stands at `prefix`: that of the whole run file is empty."""
        share = 1
        if prefix:
            check_keys(".".join(prefix), scope, ("share", *POLICY_KEYS))
            share = self.bound(schema.PolicyKeys, {k: v for k, v in scope.items() if k == "share"}, prefix).share
        algorithm = self.algorithm(scope, *prefix, "algorithm")
        if algorithm.keys.episodes == "demonstrations":
            size = Leaf(demonstrated_size(algorithm, self.catalogue), "default")
            scope = layers.merge({"schedule": {"group_size": size}}, scope)
        scope = layers.merge({"renderer": {"use": Leaf("text", "default")}}, scope)
        envs = self.one_or_many(scope, (*prefix, "env"), (*prefix, "envs"))
        if not envs:
            raise self.absent((*prefix, "env"))
        return Policy(
            name=name,
            at=".".join(prefix),
            share=share,
            model=self.needed(scope, *prefix, "model"),
            envs=Frozen(envs),
            algorithm=algorithm,
            schedule=self.core(schema.ScheduleConfig, scope, *prefix, "schedule"),
            roles=Frozen(self.roles(scope, *prefix)),
            renderer=self.needed(scope, *prefix, "renderer"),
        )

    def roles(self, scope: Tree, *prefix: str) -> dict[str, RoleConfig]:
        """Always with `actor`, whose optimizer is the section `optimizer`."""
        given = {"actor": Tree(), **sections(scope, "roles")}
        actor = given["actor"] = {"update": Leaf("trained", "default"), **given["actor"]}
        if "optimizer" in actor:
            if isinstance(scope.get("optimizer"), dict):
                one, two = (".".join((*prefix, key)) for key in ("optimizer", "roles.actor.optimizer"))
                raise CombinationError(f"{one} and {two} are one section, given twice", fix="keep one")
            scope = {**scope, "optimizer": actor.pop("optimizer")}
        optimizer = self.core(schema.OptimizerConfig, scope, *prefix, "optimizer")
        roles: dict[str, RoleConfig] = {}
        for name, section in given.items():
            path, values = (*prefix, "roles", name), unwrap(section)
            at = ".".join(path)
            if values.get("optimizer") is None:  # as for a part: null removes it
                values.pop("optimizer", None)
            role = bind(RoleConfig, values, at)
            its_own = role.update == "trained" and name != "actor"
            if "optimizer" in values and not its_own:
                raise CombinationError(
                    f"{at}.optimizer is given, but its update is {role.update.value!r}",
                    fix=f"remove it, or write {at}.update: trained",
                )
            self.note(path, {k: v for k, v in plain(role).items() if k != "optimizer" or its_own})
            roles[name] = replace(role, optimizer=optimizer) if name == "actor" else role
        return roles

    def algorithm(self, scope: Tree, *path: str) -> Algorithm:
        section, at = scope.get("algorithm"), ".".join(path)
        if not isinstance(section, dict):
            raise self.absent(path)
        preset = use_of(section)
        loaded = None if preset is None else self.catalogue.load("algorithm", preset)
        keys, _ = self.shared(schema.AlgorithmKeys, loaded, section, path)
        parts: dict[str, Frozen] = {}
        taken: set[str] = set()
        for field in schema.PART_FIELDS:
            found = self.parts(section, *path, field)
            if field != "filters":  # filters write neither weights nor metrics, which go by the names of parts
                if not is_map((*path, field)) and found.keys() & taken:  # the same plugin in two fields
                    found = {f"{n}-{field}": replace(p, name=f"{n}-{field}") for n, p in found.items()}
                if twice := found.keys() & taken:
                    raise ConfigError(
                        f"{at}.{field}.{min(twice)}: another part of {at} has that name", fix="rename the instance"
                    )
                taken |= found.keys()
            if found:
                parts[field] = Frozen(found)
        if "loss" not in parts and all(p.kind != "term" for p in parts.get("distill", {}).values()):
            raise ConfigError(
                f"{at} has no loss; installed presets: {self.catalogue.installed('algorithm')}",
                fix=f"write `{at}: {{use: …}}`, or give it a loss",
            )
        return Algorithm(preset=preset or "", keys=keys, parts=Frozen(parts))

    def needed(self, scope: Tree, *path: str) -> Part:
        """The part of a section that a run file must have."""
        found = self.parts(scope, *path)
        if not found:
            raise self.absent(path)
        return next(iter(found.values()))

    def absent(self, path: At) -> ConfigError:
        [kind] = kinds_at(path)
        return ConfigError(
            f"the run file has no section {'.'.join(path)}; installed {kind} plugins: {self.catalogue.installed(kind)}",
            fix=f"add `{path[-1]}: {{use: …}}`",
        )

    def one_or_many(self, scope: Tree, one: At, many: At) -> dict[str, Part]:
        """The instances of a plural section, or of its singular form."""
        if isinstance(scope.get(one[-1]), dict) and sections(scope, many[-1]):
            raise CombinationError(
                f"{'.'.join(one)} and {'.'.join(many)} stand side by side",
                fix=f"name every instance in {'.'.join(many)}",
            )
        return self.parts(scope, *one) or self.parts(scope, *many)

    def parts(self, scope: Tree, *path: str) -> dict[str, Part]:
        """The parts by name that stand in `scope` at `path`: the instances of a map, or one at most."""
        section = scope.get(path[-1])
        found = {path: section}
        if is_map(path) and isinstance(section, dict):
            found = {(*path, name): instance for name, instance in section.items()}
        parts = [self.part(at, s) for at, s in found.items() if isinstance(s, dict)]
        for at, removed in found.items():
            if isinstance(removed, Leaf):  # noted, or a default would come back when the tree is read as a file
                self.note(at, None)
        return {part.name: part for part in parts}

    def part(self, path: At, section: Tree) -> Part:
        """One part: plugin loaded, core's keys and the plugin's own bound apart."""
        at, kinds, instance = ".".join(path), kinds_at(path), is_map(path[:-1])
        use = use_of(section) or path[-1]
        kind = next((k for k in kinds if use in self.catalogue.names(k)), kinds[-1])
        if use_of(section) is None and not instance and use not in self.catalogue.names(kind):
            raise ConfigError(
                f"{at} names no plugin; installed: {self.catalogue.installed(*kinds)}", fix=f"add {at}.use"
            )
        try:
            loaded = self.catalogue.load(kind, use)
        except MilesError as error:
            raise type(error)(f"{at}: {error.message}", fix=error.fix) from error.__cause__
        field, its_own = path[-2] if instance else path[-1], loaded.provider.field
        if kind in ("stage", "term") and its_own != schema.FIELD_OF_PROVIDER.get(field, field):
            raise CombinationError(
                f"{at}: the {kind} {use!r} stands in {its_own!r}, not in {field!r}",
                fix=f"move it to algorithm.{its_own}, or choose another {kind}",
            )
        core, options = self.shared(
            None if field == "corrections" else layers.CORE_KEYS.get(kind), loaded, section, path
        )
        return Part(kind=kind, name=path[-1] if instance else use, use=use, options=options, core=core, at=at)

    def shared(self, core_type: type | None, loaded: Loaded | None, section: Tree, path: At) -> tuple[Any, Any]:
        """A section of which core types some keys and the plugin the rest: what each makes of its own."""
        ours = {} if core_type is None else fields_of(core_type)
        owned = layers.ALGORITHM_KEYS if core_type is schema.AlgorithmKeys else {"use", *ours}
        config = Nothing if loaded is None else loaded.provider.config
        if both := sorted(owned & fields_of(config).keys()):
            raise PluginContractError(
                f"{loaded}: its config repeats {', '.join(both)}, which core owns in {'.'.join(path)}",
                fix="rename the field",
            )
        if loaded is not None:
            self.note(path, {"use": loaded.provider.name})
        core = self.bound(core_type, {k: v for k, v in section.items() if k in ours}, path) if core_type else None
        rest = {k: v for k, v in section.items() if k not in owned}
        return core, self.bound(config, rest, path, also=sorted(owned))

    def core(self, cls: type[T], scope: Tree, *path: str) -> T:
        """A section that core types as a whole; its defaults where it is absent."""
        section = scope.get(path[-1])
        return self.bound(cls, section if isinstance(section, dict) else {}, path)

    def bound(self, cls: type[T], section: Tree, path: At, also: Sequence[str] = ()) -> T:
        bound = bind(cls, unwrap(section), ".".join(path), also)
        self.note(path, plain(bound))
        return bound

    def note(self, path: At, values: dict[str, Any] | None) -> None:
        """Adds `values` to the resolved tree at `path`; `None` says that nothing stands there."""
        branch = self.tree
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
        branch[path[-1]] = None if values is None else {**(branch.get(path[-1]) or {}), **values}
