"""A merged draft becomes a `RunFile`: every section and every part of it bound to the dataclass that types it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from miles_core.config import layers, schema
from miles_core.config.binding import bind, check_keys, fields_of, join, plain
from miles_core.config.layers import Leaf, Tree, sections, shape, unwrap, use_of
from miles_core.config.rules import demonstrated_size, no_section
from miles_core.config.schema import Algorithm, Part, Policy, RoleConfig, RunFile
from miles_core.discovery import Catalogue, Loaded, ours
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
    """Binds one merged draft, and notes in `tree` what each of its sections was resolved to.

    A `scope` is the draft or an entry of its `policies`; `at` is the dotted path at which it, or a section, stands.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.tree: dict[str, Any] = {}

    def run_file(self, draft: Tree) -> RunFile:
        check_keys("", draft, list(layers.SHAPES))
        policies = self.policies(draft)
        engines = self.one_or_many(draft, "", "rollout", "engines")
        judging = {role.engine for policy in policies.values() for role in policy.roles.values()}
        return RunFile(
            run=self.core(schema.RunConfig, draft, "", "run"),
            eval=self.core(schema.EvalConfig, draft, "", "eval"),
            policies=Frozen(policies),
            engines=Frozen({name: part for name, part in engines.items() if name not in judging}),
            judges=Frozen({name: part for name, part in engines.items() if name in judging}),
            backend=self.needed(draft, "", "backend"),
            sync=next(iter(self.parts(draft, "", "sync").values()), None),
            launcher=self.needed(draft, "", "launcher"),
            **{key: Frozen(self.parts(draft, "", key)) for key in ("trackers", "scorers", "extensions")},
            tree=_freeze(self.tree),  # by now all of it is noted
            origins=Frozen(layers.origins_of(layers.layer(self.tree, "default", layers.origins_of(draft)))),
        )

    def policies(self, draft: Tree) -> dict[str, Policy]:
        if "policies" not in draft:
            return {"main": self.policy("main", draft, "")}
        if beside := next((key for key in POLICY_KEYS if key in draft), ""):
            what = f"{beside!r} stands beside `policies`; each policy has its own"
            raise CombinationError(what, fix=f"move it to policies.<name>.{beside}")
        scopes = sections(draft, "policies")
        if not scopes:
            raise ConfigError("`policies` names no policy", fix="add one, or use the singular sections")
        return {name: self.policy(name, scope, f"policies.{name}") for name, scope in scopes.items()}

    def policy(self, name: str, scope: Tree, at: str) -> Policy:
        share = 1
        if at:
            check_keys(at, scope, ("share", *POLICY_KEYS))
            share = self.bound(schema.PolicyKeys, {k: v for k, v in scope.items() if k == "share"}, at).share
        algorithm = self.algorithm(scope, at)
        if algorithm.keys.episodes == "demonstrations":
            size = Leaf(demonstrated_size(algorithm, self.catalogue), "default")
            scope = layers.merge({"schedule": {"group_size": size}}, scope)
        scope = layers.merge({"renderer": {"use": Leaf("text", "default")}}, scope)
        envs = self.one_or_many(scope, at, "env", "envs")
        if not envs:
            raise self.absent(at, "env")
        return Policy(
            name=name,
            at=at,
            share=share,
            model=self.needed(scope, at, "model"),
            envs=Frozen(envs),
            algorithm=algorithm,
            schedule=self.core(schema.ScheduleConfig, scope, at, "schedule"),
            roles=Frozen(self.roles(scope, at)),
            renderer=self.needed(scope, at, "renderer"),
        )

    def roles(self, scope: Tree, at: str) -> dict[str, RoleConfig]:
        """Always with `actor`, whose optimizer is the section `optimizer`."""
        given = {"actor": Tree(), **sections(scope, "roles")}
        actor = given["actor"] = {"update": Leaf("trained", "default"), **given["actor"]}
        if "optimizer" in actor:
            if isinstance(scope.get("optimizer"), dict):
                one, two = (join(at, key) for key in ("optimizer", "roles.actor.optimizer"))
                raise CombinationError(f"{one} and {two} are one section, given twice", fix="keep one")
            scope = {**scope, "optimizer": actor.pop("optimizer")}
        optimizer = self.core(schema.OptimizerConfig, scope, at, "optimizer")
        roles: dict[str, RoleConfig] = {}
        for name, section in given.items():
            path, values = join(at, f"roles.{name}"), unwrap(section)
            if values.get("optimizer") is None:  # as for a part: null removes it
                values.pop("optimizer", None)
            role = bind(RoleConfig, values, path)
            its_own = role.update == "trained" and name != "actor"
            if "optimizer" in values and not its_own:
                what = f"{path}.optimizer is given, but its update is {role.update.value!r}"
                raise CombinationError(what, fix=f"remove it, or write {path}.update: trained")
            self.note(path, {k: v for k, v in plain(role).items() if k != "optimizer" or its_own})
            roles[name] = replace(role, optimizer=optimizer) if name == "actor" else role
        return roles

    def algorithm(self, scope: Tree, at: str) -> Algorithm:
        section, path = scope.get("algorithm"), join(at, "algorithm")
        if not isinstance(section, dict):
            raise self.absent(at, "algorithm")
        preset = use_of(section)
        loaded = None if preset is None else self.catalogue.load("algorithm", preset)
        keys, _ = self.shared(schema.AlgorithmKeys, loaded, section, path)
        parts: dict[str, Frozen] = {}
        taken: set[str] = set()
        for field in schema.PART_FIELDS:
            found = self.parts(section, path, field)
            if field != "filters":  # filters write neither weights nor metrics, which go by the names of parts
                if not shape(join(path, field)).is_map and found.keys() & taken:  # the same plugin in two fields
                    found = {f"{n}-{field}": replace(p, name=f"{n}-{field}") for n, p in found.items()}
                if twice := found.keys() & taken:
                    raise ConfigError(
                        f"{path}.{field}.{min(twice)}: another part of {path} has that name", fix="rename the instance"
                    )
                taken |= found.keys()
            if found:
                parts[field] = Frozen(found)
        if "loss" not in parts and all(p.kind != "term" for p in parts.get("distill", {}).values()):
            what = f"{path} has no loss; installed presets: {self.catalogue.installed('algorithm')}"
            raise ConfigError(what, fix=f"write `{path}: {{use: …}}`, or give it a loss")
        return Algorithm(preset=preset or "", keys=keys, parts=Frozen(parts))

    def needed(self, scope: Tree, at: str, key: str) -> Part:
        """The part of a section that a run file must have."""
        for part in self.parts(scope, at, key).values():
            return part
        raise self.absent(at, key)

    def absent(self, at: str, key: str) -> ConfigError:
        return ConfigError(no_section(join(at, key), self.catalogue), fix=f"add `{key}: {{use: …}}`")

    def one_or_many(self, scope: Tree, at: str, one: str, many: str) -> dict[str, Part]:
        """The instances of a plural section, or of its singular form."""
        if isinstance(scope.get(one), dict) and sections(scope, many):
            what = f"{join(at, one)} and {join(at, many)} stand side by side"
            raise CombinationError(what, fix=f"name every instance in {join(at, many)}")
        return self.parts(scope, at, one) or self.parts(scope, at, many)

    def parts(self, scope: Tree, at: str, key: str) -> dict[str, Part]:
        """The parts by name that stand in `scope` under `key`: the instances of a map, or one at most."""
        section, path = scope.get(key), join(at, key)
        found = {path: section}
        if shape(path).is_map and isinstance(section, dict):
            found = {join(path, name): instance for name, instance in section.items()}
        parts = [self.part(path, s) for path, s in found.items() if isinstance(s, dict)]
        for path, removed in found.items():
            if isinstance(removed, Leaf):  # noted, or a default would come back when the tree is read as a file
                self.note(path, None)
        return {part.name: part for part in parts}

    def part(self, at: str, section: Tree) -> Part:
        """One part: plugin loaded, core's keys and the plugin's own bound apart."""
        above, _, key = at.rpartition(".")
        kinds, instance = shape(at).kinds, shape(above).is_map
        use = use_of(section) or key
        named = [k for k in kinds if use in self.catalogue.names(k)] or [k for k in kinds if ours(k, use)]
        kind = (*named, kinds[-1])[0]
        if use_of(section) is None and not instance and use not in self.catalogue.names(kind):
            raise ConfigError(
                f"{at} names no plugin; installed: {self.catalogue.installed(*kinds)}", fix=f"add {at}.use"
            )
        try:
            loaded = self.catalogue.load(kind, use)
        except MilesError as error:
            raise type(error)(f"{at}: {error.message}", fix=error.fix) from error.__cause__
        field, its_own = above.rpartition(".")[2] if instance else key, loaded.provider.field
        if kind in ("stage", "term") and its_own != schema.FIELD_OF_PROVIDER.get(field, field):
            what = f"{at}: the {kind} {use!r} stands in {its_own!r}, not in {field!r}"
            raise CombinationError(what, fix=f"move it to algorithm.{its_own}, or choose another {kind}")
        core_type = None if field == "corrections" else layers.CORE_KEYS.get(kind)
        core, options = self.shared(core_type, loaded, section, at)
        return Part(kind=kind, name=key if instance else use, use=use, options=options, core=core, at=at)

    def shared(self, core_type: type | None, loaded: Loaded | None, section: Tree, at: str) -> tuple[Any, Any]:
        """A section of which core types some keys and the plugin the rest: what each makes of its own."""
        ours = {} if core_type is None else fields_of(core_type)
        owned = layers.ALGORITHM_KEYS if core_type is schema.AlgorithmKeys else {"use", *ours}
        config = Nothing if loaded is None else loaded.provider.config
        if both := sorted(owned & fields_of(config).keys()):
            raise PluginContractError(
                f"{loaded}: its config repeats {', '.join(both)}, which core owns in {at}", fix="rename the field"
            )
        if loaded is not None:
            self.note(at, {"use": loaded.provider.name})
        core = self.bound(core_type, {k: v for k, v in section.items() if k in ours}, at) if core_type else None
        rest = {k: v for k, v in section.items() if k not in owned}
        return core, self.bound(config, rest, at, also=sorted(owned))

    def core(self, cls: type[T], scope: Tree, at: str, key: str) -> T:
        """A section that core types as a whole; its defaults where it is absent."""
        section = scope.get(key)
        return self.bound(cls, section if isinstance(section, dict) else {}, join(at, key))

    def bound(self, cls: type[T], section: Tree, at: str, also: Sequence[str] = ()) -> T:
        bound = bind(cls, unwrap(section), at, also)
        self.note(at, plain(bound))
        return bound

    def note(self, at: str, values: dict[str, Any] | None) -> None:
        """Adds `values` to the resolved tree at a path; `None` says that nothing stands there."""
        *way, last = at.split(".")
        branch = self.tree
        for key in way:
            branch = branch.setdefault(key, {})
        branch[last] = None if values is None else {**(branch.get(last) or {}), **values}
