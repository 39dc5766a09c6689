"""Find plugins by metadata, load one by name.

Scanning reads `entry_points.txt` and `METADATA` of installed distributions and imports no plugin. `Catalogue.load`
imports the one module that a name stands for, registers it once in our plugin manager, and judges it on the way:
group major and core range (from metadata), import, hook signatures, entry-point name against providers. A broken plugin
that nobody names never fails a run: it is a row in `miles plugins`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import inspect
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from miles_core import API_VERSIONS, PROJECT, __version__, hookspecs
from miles_core.errors import (
    AmbiguousPluginError,
    IncompatiblePluginError,
    MilesError,
    MissingExtraError,
    PluginContractError,
    PluginLoadError,
    UnknownPluginError,
    blamed,
    clause,
)
from miles_core.provider import BuildContext, Place, Provider

if TYPE_CHECKING:
    from miles_core.config.schema import Part

CORE = "miles-core"
_GROUP = re.compile(r"miles\.([a-z_]+)\.v(\d+)")
#: Name, specifier and extra of a `Requires-Dist` line, so that scanning need not import `packaging.requirements`.
_REQUIREMENT = re.compile(
    r"""\s*([\w.-]+)\s*(?:\[[^\]]*\])?\s*\(?([^);]*)\)?[^;]*(?:;.*?\bextra\s*==\s*['"]([^'"]+))?"""
)

#: Distributions of this repository, for the `pip install` line of an unknown name.
OURS = {
    "miles-rollout-local": ("rollout:local",),
    "miles-backend-fsdp": ("backend:fsdp", "model:causal-lm"),
    "miles-sync-bucketed": ("sync:bucketed",),
    "miles-algo-grpo": (
        *("algorithm:grpo", "algorithm:dr_grpo", "algorithm:rloo", "algorithm:dapo", "algorithm:gspo"),
        *("algorithm:cispo", "algorithm:reinforce_pp", "algorithm:reinforce_pp_baseline"),
        *("stage:group", "stage:leave_one_out", "stage:batch", "stage:centred", "stage:returns", "stage:whiten"),
        *("stage:reward_kl", "stage:overlong", "filter:dynamic_sampling"),
        *("term:clip", "term:cispo", "term:reinforce", "term:kl", "term:entropy"),
    ),
    "miles-algo-correction": ("stage:tis", "stage:icepop", "stage:mis", "stage:bypass", "term:opsm"),
    "miles-algo-opd": ("algorithm:opd", "algorithm:opd_topk", "stage:opd", "term:topk_kl", "scorer:http-teacher"),
    "miles-algo-lora": ("extension:lora",),
    "miles-algo-rewards": (
        *("stage:compose", "stage:rank", "stage:duplicates"),
        *("scorer:format", "scorer:group-reward", "scorer:http-reward", "scorer:reward-model"),
    ),
    "miles-algo-ppo": ("algorithm:ppo", "stage:gae", "term:value"),
    "miles-algo-dpo": ("algorithm:dpo", "term:dpo"),
    "miles-algo-sft": ("algorithm:sft", "term:sft"),
    **{f"miles-env-{name}": (f"env:{name}",) for name in ("arithmetic", "jsonl", "math", "reasoning-gym")},
    "miles-model-gguf": ("model:.gguf", "model:gguf:"),
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry point of a plugin, as its metadata says it. `requires_core` is its range of miles-core, "" if none."""

    kind: str
    name: str
    major: int
    module: str
    distribution: str
    version: str
    summary: str = ""
    requires_core: str = ""
    extras: tuple[tuple[str, str], ...] = ()  # (extra, requirement's name)

    def __str__(self) -> str:
        return f"{self.kind} plugin {self.name!r} ({self.distribution} {self.version})"


@dataclass(frozen=True, kw_only=True)
class Loaded(Entry):
    """A plugin that passed gates A to C: its entry, and the provider of that name."""

    provider: Provider[Any, Any]

    def build_early(self, options: Any, name: str, seed: int = 0) -> Any:
        """What the provider builds in the controller while there is no run file yet."""
        unready: Any = None
        return self.build(options, BuildContext(place=Place.CONTROLLER, name=name, run=unready, seed=seed))

    def build(self, options: Any, context: Any) -> Any:
        """What the provider builds. Raises `MissingExtraError` where an import of it fails, and `PluginLoadError` for
        whatever else it raises that is no error of Miles."""
        failed, fix = f"{self} cannot be built", "see where with --traceback, then mend or leave out that plugin"
        with blamed(failed, PluginLoadError, fix):
            try:
                return self.provider.build(options, context)
            except ImportError as error:
                lacking = (error.name or "what it imports").partition(".")[0]
                fix = f"pip install {lacking}, or the extra that {self.distribution} names for it"
                raise MissingExtraError(f"{failed}: {error}", fix=fix) from error


def ours(kind: str, name: str) -> str:
    """The distribution of this repository that offers a plugin; empty where none does."""
    return next((dist for dist, offers in OURS.items() if f"{kind}:{name}" in offers), "")


def close(name: str, choices: Iterable[str]) -> str:
    """The most similar of `choices`, or what `name` begins with (`environment`: env), or an empty string."""
    known = list(choices)
    similar, alike = (difflib.get_close_matches(name, known, 1, cutoff) for cutoff in (0.75, 0.55))
    begun = sorted((c for c in known if len(c) > 2 and name.startswith(c)), key=len, reverse=True)
    return next(iter([*similar, *begun, *alike]), "")


def scan() -> Catalogue:
    """The catalogue of this process's `sys.path`, read once."""
    global _scanned
    with _lock:
        if _scanned is None:
            _scanned = Catalogue.read()
        return _scanned


_scanned: Catalogue | None = None
_lock = threading.RLock()


@dataclass
class Catalogue:
    """All entries, and what was loaded of them. `pm` knows loaded modules only; observers are called through it."""

    every: tuple[Entry, ...]
    pm: pluggy.PluginManager = field(default_factory=lambda: pluggy.PluginManager(PROJECT))
    _loaded: dict[tuple[str, str], Loaded] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pm.add_hookspecs(hookspecs)

    @staticmethod
    def read(path: Sequence[str] | None = None) -> Catalogue:
        """Scan the distributions on `path` (default `sys.path`). A distribution found twice counts where first met."""
        found: dict[str, tuple[Entry, ...]] = {}
        for dist in importlib.metadata.distributions(path=list(sys.path if path is None else path)):
            try:
                name, offered = _entries_of(dist)
            except Exception as error:  # a broken installation is a row of the listing, never the end of a run
                name, why = str(getattr(dist, "_path", dist)), f"unreadable metadata: {error}"
                offered = (Entry(kind="?", name="?", major=0, module="", distribution=name, version="?", summary=why),)
            found.setdefault(name, offered)
        every = chain(*found.values())
        return Catalogue(tuple(sorted(every, key=lambda e: (e.kind, e.name, e.distribution, -e.major))))

    def entries(self, kind: str | None = None) -> tuple[Entry, ...]:
        """Entries of one kind, or all, by kind and name."""
        return tuple(e for e in self.every if kind in (None, e.kind))

    def names(self, kind: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(e.name for e in self.entries(kind)))

    def installed(self, *kinds: str) -> str:
        """The names of some kinds, for a message."""
        return ", ".join(name for kind in kinds for name in self.names(kind)) or "none"

    def state(self, entry: Entry) -> str:
        """`fits`, or why `load` would refuse, from metadata alone."""
        if entry.kind not in API_VERSIONS:
            return "unknown kind"
        refused = self._refused(entry)
        return refused[0] if refused else "fits"

    def find(self, kind: str, name: str) -> Entry:
        """The entry that `name` stands for, judged by metadata only (unknown, ambiguous, gates A and B)."""
        named = [e for e in self.entries(kind) if e.name == name]
        if not named or kind not in API_VERSIONS:
            raise self._unknown(kind, name)
        entry = next((e for e in named if e.major == API_VERSIONS[kind]), named[0])
        if refused := self._refused(entry):
            raise refused[1]
        return entry

    def _refused(self, entry: Entry) -> tuple[str, MilesError] | None:
        """Why an entry of a known kind is not loaded: in short, and as the error."""
        kind, ours, core = entry.kind, API_VERSIONS[entry.kind], f"{CORE} {__version__}"
        rivals = [e for e in self.entries(kind) if (e.name, e.major) == (entry.name, ours)]
        error: type[MilesError] = IncompatiblePluginError
        if entry.major != ours:
            short = f"API v{entry.major}, core speaks v{ours}"
            message = f"{entry} targets {kind} API v{entry.major}; {core} speaks v{ours}"
            fix = f"install a release of {entry.distribution} for {kind} API v{ours}"
            fix += f", or upgrade {CORE}" if entry.major > ours else ""
        elif len({e.distribution for e in rivals}) > 1:
            error, short = AmbiguousPluginError, f"name clash: {', '.join(e.distribution for e in rivals)}"
            both = " and ".join(f"{e.distribution} {e.version}" for e in rivals)
            message = f"two distributions offer the {kind} plugin {entry.name!r}: {both}"
            fix = "keep one of them: " + ", or ".join(f"pip uninstall {e.distribution}" for e in rivals)
        elif not self._in_range(entry):
            wanted = f"{CORE}{entry.requires_core}"
            short, message = f"needs {wanted}", f"{entry} needs {wanted}; {core} is installed"
            fix = f"pip install '{wanted}', or install a release of {entry.distribution} that takes {core}"
        else:
            return None
        return short, error(message, fix=fix)

    def load(self, kind: str, name: str) -> Loaded:
        """Import the module that offers `name`, and nothing else.

        Raises `UnknownPluginError`, `AmbiguousPluginError`, `IncompatiblePluginError` (gates A and B),
        `PluginLoadError` (cause chained), `PluginContractError` (gate C).
        """
        with _lock:
            if (kind, name) not in self._loaded:
                entry = self.find(kind, name)
                offered = self._providers(entry, self._register(entry))
                if name not in offered:
                    raise PluginContractError(
                        f"{entry}: its entry point is named {name!r}, but miles_{kind}() of {entry.module} offers "
                        f"{', '.join(map(repr, offered)) or 'nothing'}",
                        fix="name the entry point like Provider.name, one entry point for each provider",
                    )
                self._loaded[kind, name] = Loaded(**vars(entry), provider=offered[name])
            return self._loaded[kind, name]

    def loadable(self, *kinds: str) -> Iterator[Loaded]:
        """Every plugin of some kinds, or of all, that can be loaded: only for advice, on the way to an error."""
        for kind in kinds or sorted(API_VERSIONS):
            for name in self.names(kind):
                with suppress(MilesError):
                    yield self.load(kind, name)

    def required(self, part: Part) -> frozenset[str]:
        """What the plugin of a part needs from others, under its options."""
        return self.load(part.kind, part.use).provider.required(part.options)

    def offered(self, part: Part) -> frozenset[str]:
        """What the plugin of a part has for others, under its options."""
        return self.load(part.kind, part.use).provider.offered(part.options)

    def _register(self, entry: Entry) -> ModuleType:
        if ":" in entry.module:
            raise PluginContractError(
                f"{entry}: its entry point names an object, {entry.module}", fix="name the module that holds the hooks"
            )
        try:
            module = importlib.import_module(entry.module)
        except (Exception, SystemExit) as error:
            raise PluginLoadError(
                f"{entry} cannot be imported: {type(error).__name__}: {error}", fix=_install_line(entry, error)
            ) from error
        if self.pm.is_registered(module):
            return module
        try:
            self.pm.register(module, name=f"{entry.distribution}:{entry.module}")
            self.pm.check_pending()
        except pluggy.PluginValidationError as error:
            if self.pm.is_registered(module):  # unknown hooks are only found after registration
                self.pm.unregister(module)
            raise PluginContractError(
                f"{entry} breaks the hook contract: {clause(error)}", fix=_hook_fix(str(error))
            ) from error
        return module

    def _providers(self, entry: Entry, module: ModuleType) -> dict[str, Provider[Any, Any]]:
        hook, given = f"{entry}: miles_{entry.kind}()", list[Any]()
        with blamed(f"{hook} raised", PluginContractError, "a hook only describes; move what can fail into `build`"):
            for impl in getattr(self.pm.hook, f"miles_{entry.kind}").get_hookimpls():
                if impl.plugin is module:
                    returned = impl.function()
                    given += returned if isinstance(returned, list | tuple) else [returned]
        offered: dict[str, Provider[Any, Any]] = {}
        for provider in given:
            if not isinstance(provider, Provider):
                found, fix = f"a {type(provider).__name__}", "return a Provider, or a list of them"
            elif not (isinstance(provider.config, type) and is_dataclass(provider.config)):
                found, fix = f"{provider.name!r} with config {provider.config!r}", "make config a dataclass type"
            elif provider.name in offered:
                found, fix = f"two providers named {provider.name!r}", "give every provider a name of its own"
            else:
                offered[provider.name] = provider
                continue
            raise PluginContractError(f"{hook} offers {found}", fix=fix)
        return offered

    def _in_range(self, entry: Entry) -> bool:
        if not entry.requires_core or entry.distribution == CORE:
            return True
        from packaging.specifiers import InvalidSpecifier, SpecifierSet

        try:
            return SpecifierSet(entry.requires_core).contains(__version__, prereleases=True)
        except InvalidSpecifier:
            return False

    def _unknown(self, kind: str, name: str) -> UnknownPluginError:
        elsewhere = [e.kind for e in self.every if e.name == name]
        if distribution := ours(kind, name):
            fix = f"pip install {distribution}"
        elif similar := close(name, self.names(kind)):
            fix = f"write {similar!r}, if that was meant"
        elif elsewhere:
            fix = f"{name!r} is of kind {elsewhere[0]}; name a {kind} plugin here"
        else:
            fix = "install the distribution that offers it, or use one that is installed"
        named = dict.fromkeys(f"{e.name} ({e.distribution} {e.version})" for e in self.entries(kind))
        installed = ", ".join(named) or "none"
        return UnknownPluginError(f"no {kind} plugin is named {name!r}; installed: {installed}", fix=fix)


def _entries_of(dist: importlib.metadata.Distribution) -> tuple[str, tuple[Entry, ...]]:
    """Normalised name and entries of one distribution; metadata is parsed only where it has plugins."""
    text = dist.read_text("entry_points.txt")
    if not text or "[miles." not in text:
        return "", ()
    meta = dist.metadata
    name = _normalised(meta["Name"])
    lines = map(_REQUIREMENT.match, meta.get_all("Requires-Dist") or [])
    requires = [(_normalised(line[1]), line[2].replace(" ", ""), line[3]) for line in lines if line]
    shared: dict[str, Any] = {
        **{"distribution": name, "version": meta["Version"], "summary": meta["Summary"] or ""},
        "requires_core": ",".join(spec for what, spec, extra in requires if what == CORE and not extra and spec),
        "extras": tuple((extra, what) for what, _, extra in requires if extra),
    }
    return name, tuple(
        Entry(kind=group[1], name=point.name, major=int(group[2]), module=point.value, **shared)
        for point in dist.entry_points
        if (group := _GROUP.fullmatch(point.group))
    )


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _install_line(entry: Entry, error: BaseException) -> str:
    missing = (getattr(error, "name", None) or "").split(".")[0] if isinstance(error, ImportError) else ""
    if not missing:
        return f"upgrade or reinstall {entry.distribution}; `--traceback` shows where it failed"
    extra = next((extra for extra, requirement in entry.extras if requirement == _normalised(missing)), "")
    return f"pip install '{entry.distribution}[{extra}]'" if extra else f"pip install what provides {missing!r}"


def _hook_fix(said: str) -> str:
    """What would fit, from what pluggy says of a hook implementation."""
    hook = (re.search(r"hook '(\w+)'", said) or ["", ""])[1]
    if spec := getattr(hookspecs, hook, None):
        return f"the hook is {hook}({', '.join(inspect.signature(spec).parameters)}); take any of these"
    similar = close(hook, (name for name in vars(hookspecs) if name.startswith("miles_")))
    return f"name it {similar}, if that was meant" if similar else "remove it; miles_core/hookspecs.py lists every hook"
