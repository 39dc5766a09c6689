"""The base of every conformance suite: what is tested, labelled checks, and a runner that needs no pytest.

A suite is a class with `test_…` methods that take nothing but `self`, so that pytest collects a subclass and
`run_suite` calls the same methods. Every assertion has a label that is unique in its suite; the kit's own tests break a
toy on purpose for each label and see exactly that assertion fail.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import re
import tempfile
import time
import typing
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

from miles_core.errors import MilesError
from miles_core.provider import BuildContext, Place, Provider


class CheckError(AssertionError):
    """A check that failed. `label` says which."""

    def __init__(self, label: str, found: str) -> None:
        super().__init__(f"{label}; found: {found}" if found else label)
        self.label = label


@dataclass(frozen=True, slots=True)
class Result:
    """One test of a suite. `label` is the assertion that failed, where one did."""

    name: str
    passed: bool
    detail: str
    seconds: float
    label: str = ""


def check(label: str, condition: Any, found: Any = "") -> None:
    """Fail with `label` unless `condition`; `found` says what there was instead."""
    if not bool(condition):
        raise CheckError(label, str(found))


def refuses(label: str, errors: type[BaseException] | tuple[type[BaseException], ...], work: Callable[[], Any]) -> None:
    """Fail with `label` unless `work()` raises one of `errors`."""
    try:
        result = work()
    except errors:
        return
    except Exception as error:
        raise CheckError(label, f"{type(error).__name__}: {error}") from error
    raise CheckError(label, f"no error, but {result!r:.200}")


async def refuses_async(
    label: str, errors: type[BaseException] | tuple[type[BaseException], ...], work: Awaitable[Any]
) -> None:
    """As `refuses`, for something to await."""
    try:
        result = await work
    except errors:
        return
    except Exception as error:
        raise CheckError(label, f"{type(error).__name__}: {error}") from error
    raise CheckError(label, f"no error, but {result!r:.200}")


def minimal_context(place: Place, name: str, **given: Any) -> BuildContext:
    """A `BuildContext` around an almost empty run file, for building one part alone."""
    from miles_core.config.schema import BackendKeys, EvalConfig, Part, RunConfig, RunFile

    part = Part(kind="backend", name="none", use="none", options=None, core=BackendKeys())
    run = RunFile(
        run=RunConfig(),
        eval=EvalConfig(),
        policies={},
        engines={},
        backend=part,
        sync=None,
        launcher=Part(kind="launcher", name="inline", use="inline", options=None),
        trackers={},
        scorers={},
        extensions={},
        tree={},
        origins={},
    )
    return BuildContext(place=place, name=name, run=given.pop("run", run), **given)


class Conformance:
    """Subclass a suite of your kind, say which plugin, and pytest runs it:

    class TestMine(TransportConformance):
        name = "mine"
        options: ClassVar = {"bucket_mib": 1}

    `provider` may be set instead of `name`, for a plugin that is not installed. Suites document what else a subclass
    may override (weights of its own model, a sample file, …).
    """

    kind: ClassVar[str] = ""
    places: ClassVar[tuple[Place, ...]] = ()
    helpers: ClassVar[tuple[type, ...]] = ()  # further classes whose checks belong to the suite
    name: str = ""
    options: ClassVar[Mapping[str, Any]] = {}
    provider: Provider[Any, Any] | None = None
    deadline_s: float = 120.0  # of each test that awaits something: a plugin that hangs fails it

    # --- what is tested ----------------------------------------------------------------------------------------------

    def the_provider(self) -> Provider[Any, Any]:
        """The provider under test: `provider`, or the installed one of `name`."""
        if self.provider is not None:
            return self.provider
        from miles_core.discovery import scan

        return scan().load(self.kind, self.name).provider

    def config(self) -> Any:
        """The plugin's config, from `options` as a run file would write them (or as typed values)."""
        from miles_core.config.binding import convert, hints

        kind = self.the_provider().config
        typed = hints(kind)  # type: ignore[arg-type]
        given = {
            key: convert(typed[key], value, key) if key in typed and type(value) in (str, list, dict) else value
            for key, value in self.options.items()
        }
        return kind(**given)

    def offered(self) -> frozenset[str]:
        return self.the_provider().offered(self.config())

    def context(self, place: Place, **given: Any) -> BuildContext:
        """Override to add what your plugin needs from wiring. Core's own keys of the section have their defaults."""
        from miles_core.config import schema

        keys = {"rollout": "EngineKeys", "env": "EnvKeys", "backend": "BackendKeys", "sync": "SyncKeys"}
        keys |= {"model": "ModelKeys", "tokenizer": "ModelKeys", "term": "TermKeys"}
        if self.kind in keys:
            small = {"max_new_tokens": 16} if self.kind == "rollout" else {}  # models of a suite have few positions
            given.setdefault("core", getattr(schema, keys[self.kind])(**small))
        return minimal_context(place, given.pop("name", self.name or self.the_provider().name), **given)

    def build(self, place: Place, **given: Any) -> Any:
        return self.the_provider().build(self.config(), self.context(place, **given))

    def example(self, place: Place) -> Any:
        """A product for the Protocol check."""
        return self.build(place)

    def probe(self) -> None:
        """Build what the tests build: whatever this raises, all of them would."""
        self.config()

    # --- helpers -----------------------------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end, within the suite's deadline."""

        async def bounded() -> Any:
            async with asyncio.timeout(self.deadline_s):
                return await work

        return asyncio.run(bounded())

    @contextmanager
    def folder(self) -> typing.Iterator[Path]:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)

    # --- what every plugin promises ----------------------------------------------------------------------------------

    def test_config(self) -> None:
        config = self.the_provider().config
        check("config is a frozen dataclass", is_dataclass(config) and config.__dataclass_params__.frozen, config)  # type: ignore[attr-defined]
        given = self.config()
        check("config survives pickling", _survives(given), given)
        bare = [f.name for f in fields(config) if not f.metadata.get("help")]
        check("every option has a help text", not bare, bare)
        asked = [f.name for f in fields(config) if f.default is MISSING and f.default_factory is MISSING]
        missing = [name for name in asked if name not in self.options]
        check("options without a default are given", not missing, missing)

    def test_provider(self) -> None:
        provider = self.the_provider()
        check("the provider has a summary", provider.summary.strip())
        sets = [provider.offered(self.config()), provider.required(self.config())]
        good = all(isinstance(c, str) and c and " " not in c for s in sets for c in s)
        check("capabilities are short words", good, sets)

    def test_product_keeps_its_protocol(self) -> None:
        from miles_core.compatibility import check_product
        from miles_core.discovery import Loaded

        provider = self.the_provider()
        whose = "the plugin under test"
        loaded = Loaded(
            kind=self.kind, name=provider.name, major=1, module="", distribution=whose, version="0", provider=provider
        )
        for place in self.places:
            product = self.example(place)
            try:
                check_product(loaded, place, product)
            except MilesError as error:
                raise CheckError("the product keeps its Protocol", str(error)) from error
            finally:
                self.dispose(product)

    def dispose(self, product: Any) -> None:
        """Close a product that was built for a look only."""
        closing = getattr(product, "close", None)
        if closing is None:
            return
        if inspect.iscoroutinefunction(closing):
            self.run(closing())
        elif not inspect.signature(closing).parameters:
            closing()


def _survives(config: Any) -> bool:
    try:
        return bool(pickle.loads(pickle.dumps(config)) == config)  # a config of this process, never from outside
    except Exception:
        return False


def labels(suite: type[Conformance]) -> set[str]:
    """Every label that the suite's own checks use, read from its source."""
    found: set[str] = set()
    for cls in (*suite.__mro__, *suite.helpers):
        if issubclass(cls, Conformance) or cls in suite.helpers:
            found |= set(
                re.findall(r"(?:(?:check|refuses|refuses_async|CheckError)\(\s*|label = )\"([^\"]+)\"", _source(cls))
            )
    return found


def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):  # made on the fly, without checks of its own
        return ""


def tests(suite: type[Conformance]) -> list[str]:
    """Names of its tests, in the order in which they are written, the base's first."""
    names: dict[str, None] = {}
    for cls in reversed(suite.__mro__):
        names |= {n: None for n, value in vars(cls).items() if n.startswith("test_") and callable(value)}
    return list(names)


def run_class(suite: type[Conformance], only: str | None = None) -> list[Result]:
    """Run a suite's tests, each on an instance of its own."""
    results = []
    for name in tests(suite):
        if only is not None and name != only:
            continue
        started = time.perf_counter()
        detail = label = ""
        try:
            getattr(suite(), name)()
        except CheckError as error:
            detail, label = str(error), error.label
        except TimeoutError:
            detail = label = f"ends within {suite.deadline_s:g} s"
        except MilesError as error:
            detail = str(error)
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
        results.append(Result(name, not detail, detail, time.perf_counter() - started, label))
    return results
