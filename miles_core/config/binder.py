"""A merged draft becomes a `RunFile`: every section and every part of it bound to the dataclass that types it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from miles_core.config import layers, schema
from miles_core.config.binding import bind, fields_of, plain, show, unknown_key
from miles_core.config.layers import Leaf, Tree, chosen, instances, section_at, unwrap
from miles_core.config.schema import Algorithm, Part, Policy, RoleConfig, RunFile
from miles_core.discovery import Catalogue
from miles_core.errors import CombinationError, ConfigError, ConfigTypeError, MilesError, PluginContractError

POLICY_KEYS = ("model", "env", "envs", "algorithm", "schedule", "optimizer", "roles", "renderer")
RUN_KEYS = ("run", "eval", "rollout", "engines", "backend", "sync", "launcher", "trackers", "scorers", "extensions")


class Frozen(dict):
    """A mapping that nobody may change; pickles, and equals the plain dict."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("the run file is frozen")

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return Frozen, (dict(self),)


def _freeze(tree: Any) -> Any:
    return Frozen({k: _freeze(v) for k, v in tree.items()}) if isinstance(tree, dict) else tree


class Binder:
    """Binds a merged draft. Each method returns the bound object and its plain tree."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue

    def run_file(self, draft: Tree) -> RunFile:
        plural = "policies" in draft
        known = (*RUN_KEYS, "policies", *POLICY_KEYS)
        for key in draft:
            if key not in known:
                raise unknown_key("", key, known)
            if plural and key in POLICY_KEYS:
                raise CombinationError(
                    f"{key!r} stands beside `policies`; each policy has its own",
                    fix=f"move it to policies.<name>.{key}",
                )
        run, run_tree = self.core(schema.RunConfig, draft, "run")
        evaluation, eval_tree = self.core(schema.EvalConfig, draft, "eval")
        tree: dict[str, Any] = {"run": run_tree, "eval": eval_tree}
        policies: dict[str, Policy] = {}
        if plural:
            tree["policies"] = {}
            for name, section in instances(draft, "policies").items():
                policies[name], tree["policies"][name] = self.policy(name, section, f"policies.{name}.")
            if not policies:
                raise ConfigError("`policies` names no policy", fix="add one, or use the singular sections")
        else:
            scope = {key: value for key, value in draft.items() if key in POLICY_KEYS}
            policies["main"], policy_tree = self.policy("main", scope, "")
            tree |= policy_tree
        engines = self.several(draft, "rollout", "engines", "", tree)
        backend, tree["backend"] = self.needed(draft, "backend")
        sync = None
        if (transport := section_at(draft, "sync", "sync")) is not None:
            sync, tree["sync"] = self.part(("sync",), "", transport, "sync")
        launcher, tree["launcher"] = self.needed(draft, "launcher")
        many = {key: self.several(draft, "", key, "", tree) for key in ("trackers", "scorers", "extensions")}
        origins = layers.origins_of(draft)
        leaves = layers.origins_of(layers.wrap(tree, "default"))
        return RunFile(
            run=run,
            eval=evaluation,
            policies=Frozen(policies),
            engines=Frozen(engines),
            backend=backend,
            sync=sync,
            launcher=launcher,
            **{key: Frozen(parts) for key, parts in many.items()},
            tree=_freeze(tree),
            origins=Frozen({path: origins.get(path, origin) for path, origin in leaves.items()}),
        )

    def core(self, cls: type[Any], scope: Tree, key: str, prefix: str = "") -> tuple[Any, dict[str, Any]]:
        bound = bind(cls, unwrap(section_at(scope, key, prefix + key) or {}), prefix + key)
        return bound, plain(bound)

    def needed(self, scope: Tree, key: str, prefix: str = "") -> tuple[Part, dict[str, Any]]:
        section = section_at(scope, key, prefix + key)
        if section is None:
            installed = ", ".join(self.catalogue.names(layers.SINGULAR[key])) or "none"
            raise ConfigError(
                f"the run file has no section {prefix}{key}; installed {key} plugins: {installed}",
                fix=f"add `{key}: {{use: …}}`",
            )
        return self.part((layers.SINGULAR[key],), "", section, prefix + key)

    def several(self, scope: Tree, one: str, many: str, prefix: str, tree: dict[str, Any]) -> dict[str, Part]:
        """The instances of a plural section, or of its singular form; adds their trees to `tree`."""
        section = section_at(scope, one, prefix + one) if one else None
        found = instances(scope, many)
        if section is not None and found:
            raise CombinationError(
                f"{prefix}{one} and {prefix}{many} stand side by side", fix=f"name every instance in {prefix}{many}"
            )
        if section is not None:
            part, tree[one] = self.part((layers.PLURAL[many],), "", section, prefix + one)
            return {part.name: part}
        parts: dict[str, Part] = {}
        for name, instance in found.items():
            at = f"{prefix}{many}.{name}"
            parts[name], plain_tree = self.part((layers.PLURAL[many],), name, instance, at, named=True)
            tree.setdefault(many, {})[name] = plain_tree
        for name in layers.removed(
            scope, many
        ):  # said again, or a default would come back when the tree is read as a file
            tree.setdefault(many, {})[name] = None
        return parts

    def policy(self, name: str, scope: Tree, prefix: str) -> tuple[Policy, dict[str, Any]]:
        known = POLICY_KEYS if not prefix else ("share", *POLICY_KEYS)
        for key in scope:
            if key not in known:
                raise unknown_key(prefix.rstrip("."), key, known)
        tree: dict[str, Any] = {}
        share = scope.get("share", Leaf(1, "default"))
        if not isinstance(share, Leaf) or type(share.value) is not int or share.value < 1:
            raise ConfigTypeError(f"{prefix}share is {show(unwrap(share))}; it must be an int from 1", fix="write 1")
        if prefix:
            tree["share"] = share.value
        model, tree["model"] = self.needed(scope, "model", prefix)
        envs = self.several(scope, "env", "envs", prefix, tree)
        if not envs:
            installed = ", ".join(self.catalogue.names("env")) or "none"
            raise ConfigError(
                f"the run file has no section {prefix}env; installed env plugins: {installed}",
                fix="add `env: {use: …}`",
            )
        algorithm, tree["algorithm"] = self.algorithm(scope, prefix)
        if algorithm.keys.episodes == "demonstrations":  # one reference answer a task, unless the file says otherwise
            scope = layers.merge({"schedule": {"group_size": Leaf(1, "default")}}, scope)
        schedule, tree["schedule"] = self.core(schema.ScheduleConfig, scope, "schedule", prefix)
        roles = self.roles(scope, prefix, tree)
        scope = layers.merge({"renderer": {"use": Leaf("text", "default")}}, scope)
        renderer, tree["renderer"] = self.needed(scope, "renderer", prefix)
        policy = Policy(
            name=name,
            share=share.value,
            model=model,
            renderer=renderer,
            envs=Frozen(envs),
            algorithm=algorithm,
            schedule=schedule,
            roles=Frozen(roles),
        )
        return policy, tree

    def roles(self, scope: Tree, prefix: str, tree: dict[str, Any]) -> dict[str, RoleConfig]:
        """Always with `actor`, whose optimizer is the section `optimizer`."""
        sections = {"actor": dict[str, Any](), **instances(scope, "roles")}
        optimizer = section_at(scope, "optimizer", f"{prefix}optimizer")
        if optimizer is not None and "optimizer" in sections["actor"]:
            raise CombinationError(
                f"{prefix}optimizer and {prefix}roles.actor.optimizer are one section, given twice", fix="keep one"
            )
        actor = {"update": Leaf("trained", "default"), **sections["actor"]}
        optimizer = actor.pop("optimizer", optimizer)
        roles: dict[str, RoleConfig] = {}
        for name, section in {**sections, "actor": actor}.items():
            roles[name] = bind(RoleConfig, unwrap(section), f"{prefix}roles.{name}")
            if name == "actor":
                trained = bind(schema.OptimizerConfig, unwrap(optimizer or {}), f"{prefix}optimizer")
                roles[name] = replace(roles[name], optimizer=trained)
            role = plain(roles[name])
            settings = role.pop("optimizer")
            if name == "actor":
                tree["optimizer"] = settings
            elif roles[name].update == "trained":
                role["optimizer"] = settings
            elif "optimizer" in section:
                raise CombinationError(
                    f"{prefix}roles.{name}.optimizer is given, but its update is {roles[name].update.value!r}",
                    fix=f"remove it, or write {prefix}roles.{name}.update: trained",
                )
            tree.setdefault("roles", {})[name] = role
        return roles

    def algorithm(self, scope: Tree, prefix: str) -> tuple[Algorithm, dict[str, Any]]:
        path = f"{prefix}algorithm"
        section = section_at(scope, "algorithm", path)
        presets = ", ".join(self.catalogue.names("algorithm")) or "none"
        if section is None:
            raise ConfigError(
                f"the run file has no section {path}; installed presets: {presets}",
                fix="add `algorithm: {use: …}`, or name its parts: `algorithm: {loss: …}`",
            )
        preset = chosen(section, path)
        known = fields_of(schema.AlgorithmKeys)
        own = {k: unwrap(v) for k, v in section.items() if k not in layers.ALGORITHM_KEYS}
        tree: dict[str, Any] = {}
        if preset is not None:
            provider = self.catalogue.load("algorithm", preset).provider
            tree = {"use": preset, **plain(bind(provider.config, own, path, also=sorted(layers.ALGORITHM_KEYS)))}
        elif own:
            raise unknown_key(path, next(iter(own)), sorted(layers.ALGORITHM_KEYS))
        keys = bind(schema.AlgorithmKeys, {k: unwrap(v) for k, v in section.items() if k in known}, path)
        tree |= plain(keys)
        parts: dict[str, Frozen] = {}
        taken: set[str] = set()
        for field, (kinds, plural) in schema.PART_FIELDS.items():
            at = f"{path}.{field}"
            if plural:
                found = {}
                for name, instance in instances(section, field).items():
                    part, part_tree = self.part(kinds, name, instance, f"{at}.{name}", field, named=True)
                    found[name] = part
                    tree.setdefault(field, {})[name] = part_tree
                for name in layers.removed(section, field):
                    tree.setdefault(field, {})[name] = None
            else:
                one = section_at(section, field, at)
                if one is None:
                    if field in section:
                        tree[field] = None
                    continue
                part, tree[field] = self.part(kinds, "", one, at, field)
                if part.name in taken:  # the same plugin in two fields: metrics and weights need two names
                    part = replace(part, name=f"{part.name}-{field}")
                found = {part.name: part}
            for name in found if field != "filters" else ():  # filters write neither weights nor metrics
                if name in taken:
                    raise ConfigError(f"{at}.{name}: another part of {path} has that name", fix="rename the instance")
                taken.add(name)
            if found:
                parts[field] = Frozen(found)
        if not parts.get("loss"):
            raise ConfigError(
                f"{path} has no loss; installed presets: {presets}",
                fix=f"write `{path}: {{use: …}}`, or give it a loss",
            )
        return Algorithm(preset=preset or "", keys=keys, parts=Frozen(parts)), tree

    def part(
        self, kinds: tuple[str, ...], name: str, section: Tree, path: str, field: str = "", *, named: bool = False
    ) -> tuple[Part, dict[str, Any]]:
        """One part: plugin loaded, core's keys and the plugin's own bound apart. `named`: `use` defaults to `name`."""
        use = chosen(section, path) or (name if named else None)
        if use is None:
            use = path.rpartition(".")[2]
            if not any(use in self.catalogue.names(kind) for kind in kinds):
                installed = ", ".join(n for kind in kinds for n in self.catalogue.names(kind)) or "none"
                raise ConfigError(f"{path} names no plugin; installed: {installed}", fix=f"add {path}.use")
        kind = next((k for k in kinds if use in self.catalogue.names(k)), kinds[-1])
        try:
            loaded = self.catalogue.load(kind, use)
        except MilesError as error:
            raise type(error)(f"{path}: {error.message}", fix=error.fix) from error.__cause__
        provider = loaded.provider
        wanted = schema.FIELD_OF_PROVIDER.get(field, field)
        if kind in ("stage", "term") and provider.field != wanted:
            raise CombinationError(
                f"{path}: the {kind} {use!r} stands in {provider.field!r}, not in {field!r}",
                fix=f"move it to algorithm.{provider.field}, or choose another {kind}",
            )
        core_type = schema.TermKeys if kind == "term" and field != "corrections" else layers.CORE_KEYS.get(kind)
        owned = fields_of(core_type) if core_type else {}
        if both := sorted({"use", *owned} & fields_of(provider.config).keys()):
            raise PluginContractError(
                f"{loaded}: its config repeats {', '.join(both)}, which core owns in {path}", fix="rename the field"
            )
        values = {k: unwrap(v) for k, v in section.items() if k != "use"}
        options = bind(provider.config, {k: v for k, v in values.items() if k not in owned}, path, also=["use", *owned])
        core = bind(core_type, {k: v for k, v in values.items() if k in owned}, path) if core_type else None
        part = Part(kind=kind, name=name or use, use=use, options=options, core=core)
        return part, {"use": use, **(plain(core) if core_type else {}), **plain(options)}
