"""Every hook of Miles. Read this file first.

A hook contributes providers at wiring time, or watches a run at most once a step. No hook runs per sample, token,
tensor or bucket: hot paths call the plain objects that providers build. A plugin module is registered once, however
many names it serves, and only if the run file (or a command) names one of them. Provider hooks take no argument and
return a `Provider` or a list of them; they are collecting. Observer hooks return nothing and must not change data.

Each hook `miles_<kind>` belongs to the entry-point group `miles.<kind>.v1`.
"""

# Every spec below follows one template: purpose; called by whom, where and how often; what it returns; an example.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pluggy import HookspecMarker

from miles_core import PROJECT

if TYPE_CHECKING:
    from pathlib import Path

    from miles_core.provider import Provider
    from miles_core.records import Metric, Version

    Providers = Provider[Any, Any] | Sequence[Provider[Any, Any]]

hookspec = HookspecMarker(PROJECT)


@hookspec
def miles_rollout() -> Providers:
    """Offer inference engines.

    Collecting. Called once a process at wiring time. Built at:
    controller and samplers.
    The product keeps the contract of `miles_core.contracts.engine.Engine`.

    Raises: nothing; a provider that cannot work says so in `build`. Must not import anything heavy.

    >>> from dataclasses import dataclass
    >>> from miles_core import hookimpl
    >>> from miles_core.provider import Provider
    >>> @dataclass(frozen=True)
    ... class Config:
    ...     size: int = 1
    >>> @hookimpl
    ... def miles_rollout():
    ...     return Provider(name="acme", config=Config, build=lambda config, context: object())
    >>> miles_rollout().name
    'acme'

    Since API v1.
    """


@hookspec
def miles_backend() -> Providers:
    """Offer training backends.

    Collecting. Called once a process at wiring time. Built at:
    every trainer rank.
    The product keeps the contract of `miles_core.contracts.backend.Backend`.

    Raises: nothing; a provider that cannot work says so in `build`. Must not import anything heavy.

    >>> from dataclasses import dataclass
    >>> from miles_core import hookimpl
    >>> from miles_core.provider import Provider
    >>> @dataclass(frozen=True)
    ... class Config:
    ...     size: int = 1
    >>> @hookimpl
    ... def miles_backend():
    ...     return Provider(name="acme", config=Config, build=lambda config, context: object())
    >>> miles_backend().name
    'acme'

    Since API v1.
    """


@hookspec
def miles_sync() -> Providers:
    """Offer weight transports.

    Collecting. Called once a process at wiring time. Built at:
    the controller (`Transport`), every trainer rank (`Sender`) and beside every engine (`Link`).
    The product keeps the contract of `miles_core.contracts.weights`.

    Raises: nothing; a provider that cannot work says so in `build`. Must not import anything heavy.

    >>> from dataclasses import dataclass
    >>> from miles_core import hookimpl
    >>> from miles_core.provider import Provider
    >>> @dataclass(frozen=True)
    ... class Config:
    ...     size: int = 1
    >>> @hookimpl
    ... def miles_sync():
    ...     return Provider(name="acme", config=Config, build=lambda config, context: object())
    >>> miles_sync().name
    'acme'

    Since API v1.
    """


@hookspec
def miles_env() -> Providers:
    """Offer environments.

    Collecting. Called once a process at wiring time. Built at:
    the controller (to hand out tasks) and every sampler (to run episodes).
    The product keeps the contract of `miles_core.contracts.environment.Environment`.

    Raises: nothing; a provider that cannot work says so in `build`. Must not import anything heavy.

    >>> from dataclasses import dataclass
    >>> from miles_core import hookimpl
    >>> from miles_core.provider import Provider
    >>> @dataclass(frozen=True)
    ... class Config:
    ...     size: int = 1
    >>> @hookimpl
    ... def miles_env():
    ...     return Provider(name="acme", config=Config, build=lambda config, context: object())
    >>> miles_env().name
    'acme'

    Since API v1.
    """


@hookspec
def miles_launcher() -> Providers:
    """Offer launchers.

    Collecting. Called once a process at wiring time. Built at:
    the controller.
    The product keeps the contract of `miles_core.contracts.launcher.Launcher`.

    Raises: nothing; a provider that cannot work says so in `build`. Must not import anything heavy.

    >>> from dataclasses import dataclass
    >>> from miles_core import hookimpl
    >>> from miles_core.provider import Provider
    >>> @dataclass(frozen=True)
    ... class Config:
    ...     size: int = 1
    >>> @hookimpl
    ... def miles_launcher():
    ...     return Provider(name="acme", config=Config, build=lambda config, context: object())
    >>> miles_launcher().name
    'acme'

    Since API v1.
    """


@hookspec
def miles_tracker() -> Providers:
    """Offer trackers.

    Collecting. Called once a process at wiring time. Built at:
    the controller.
    The product keeps the contract of `miles_core.contracts.launcher.Tracker`.

    Raises: nothing; a provider that cannot work says so in `build`. Must not import anything heavy.

    >>> from dataclasses import dataclass
    >>> from miles_core import hookimpl
    >>> from miles_core.provider import Provider
    >>> @dataclass(frozen=True)
    ... class Config:
    ...     size: int = 1
    >>> @hookimpl
    ... def miles_tracker():
    ...     return Provider(name="acme", config=Config, build=lambda config, context: object())
    >>> miles_tracker().name
    'acme'

    Since API v1.
    """


@hookspec
def miles_algorithm() -> Providers:
    """Offer presets.

    Collecting. Called once a process at wiring time. Built at:
    the controller, while the run file is composed.
    The product keeps a plain tree for the section `algorithm`, and nothing else.

    Raises: nothing; a provider that cannot work says so in `build`. Must not import anything heavy.

    >>> from dataclasses import dataclass
    >>> from miles_core import hookimpl
    >>> from miles_core.provider import Provider
    >>> @dataclass(frozen=True)
    ... class Config:
    ...     size: int = 1
    >>> @hookimpl
    ... def miles_algorithm():
    ...     return Provider(name="acme", config=Config, build=lambda config, context: {"loss": {"use": "clip"}})
    >>> miles_algorithm().name
    'acme'

    Since API v1.
    """


@hookspec
def miles_stage() -> Providers:
    """Offer algorithm stages.

    Collecting. Called once a process at wiring time. Built at:
    the controller.
    The product keeps the contract of `miles_core.contracts.learning.Stage`.

    Raises: nothing; a provider that cannot work says so in `build`. Must not import anything heavy.

    >>> from dataclasses import dataclass
    >>> from miles_core import hookimpl
    >>> from miles_core.provider import Provider
    >>> @dataclass(frozen=True)
    ... class Config:
    ...     size: int = 1
    >>> @hookimpl
    ... def miles_stage():
    ...     return Provider(name="acme", config=Config, build=lambda config, context: object(), field="advantage")
    >>> miles_stage().name
    'acme'

    Since API v1.
    """


@hookspec
def miles_term() -> Providers:
    """Offer algorithm terms.

    Collecting. Called once a process at wiring time. Built at:
    every trainer rank.
    The product keeps the contract of `miles_core.contracts.learning.Term`.

    Raises: nothing; a provider that cannot work says so in `build`. Must not import anything heavy.

    >>> from dataclasses import dataclass
    >>> from miles_core import hookimpl
    >>> from miles_core.provider import Provider
    >>> @dataclass(frozen=True)
    ... class Config:
    ...     size: int = 1
    >>> @hookimpl
    ... def miles_term():
    ...     return Provider(name="acme", config=Config, build=lambda config, context: object(), field="loss")
    >>> miles_term().name
    'acme'

    Since API v1.
    """


@hookspec
def miles_filter() -> Providers:
    """Offer group filters.

    Collecting. Called once a process at wiring time. Built at:
    the controller.
    The product keeps the contract of `miles_core.contracts.learning.Filter`.

    Raises: nothing; a provider that cannot work says so in `build`. Must not import anything heavy.

    >>> from dataclasses import dataclass
    >>> from miles_core import hookimpl
    >>> from miles_core.provider import Provider
    >>> @dataclass(frozen=True)
    ... class Config:
    ...     size: int = 1
    >>> @hookimpl
    ... def miles_filter():
    ...     return Provider(name="acme", config=Config, build=lambda config, context: object())
    >>> miles_filter().name
    'acme'

    Since API v1.
    """


@hookspec
def miles_scorer() -> Providers:
    """Offer scorers.

    Collecting. Called once a process at wiring time. Built at:
    every sampler.
    The product keeps the contract of `miles_core.contracts.environment.Scorer`.

    Raises: nothing; a provider that cannot work says so in `build`. Must not import anything heavy.

    >>> from dataclasses import dataclass
    >>> from miles_core import hookimpl
    >>> from miles_core.provider import Provider
    >>> @dataclass(frozen=True)
    ... class Config:
    ...     size: int = 1
    >>> @hookimpl
    ... def miles_scorer():
    ...     return Provider(name="acme", config=Config, build=lambda config, context: object())
    >>> miles_scorer().name
    'acme'

    Since API v1.
    """


@hookspec
def miles_model() -> Providers:
    """Offer model adapters and resolvers.

    Collecting. Called once a process at wiring time. Built at:
    every trainer rank (`ModelAdapter`), or the controller (`ModelResolver`).
    The product keeps the contract of `miles_core.contracts.model`.

    Raises: nothing; a provider that cannot work says so in `build`. Must not import anything heavy.

    >>> from dataclasses import dataclass
    >>> from miles_core import hookimpl
    >>> from miles_core.provider import Provider
    >>> @dataclass(frozen=True)
    ... class Config:
    ...     size: int = 1
    >>> @hookimpl
    ... def miles_model():
    ...     return Provider(name="acme", config=Config, build=lambda config, context: object())
    >>> miles_model().name
    'acme'

    Since API v1.
    """


@hookspec
def miles_tokenizer() -> Providers:
    """Offer tokenizers that need no files.

    Collecting. Called once a process at wiring time. Built at:
    the controller and every sampler.
    The product keeps the contract of `miles_core.contracts.rendering.Tokenizer`.

    Raises: nothing; a provider that cannot work says so in `build`. Must not import anything heavy.

    >>> from dataclasses import dataclass
    >>> from miles_core import hookimpl
    >>> from miles_core.provider import Provider
    >>> @dataclass(frozen=True)
    ... class Config:
    ...     size: int = 1
    >>> @hookimpl
    ... def miles_tokenizer():
    ...     return Provider(name="acme", config=Config, build=lambda config, context: object())
    >>> miles_tokenizer().name
    'acme'

    Since API v1.
    """


@hookspec
def miles_renderer() -> Providers:
    """Offer renderers.

    Collecting. Called once a process at wiring time. Built at:
    the controller and every sampler.
    The product keeps the contract of `miles_core.contracts.rendering.Renderer`.

    Raises: nothing; a provider that cannot work says so in `build`. Must not import anything heavy.

    >>> from dataclasses import dataclass
    >>> from miles_core import hookimpl
    >>> from miles_core.provider import Provider
    >>> @dataclass(frozen=True)
    ... class Config:
    ...     size: int = 1
    >>> @hookimpl
    ... def miles_renderer():
    ...     return Provider(name="acme", config=Config, build=lambda config, context: object())
    >>> miles_renderer().name
    'acme'

    Since API v1.
    """


@hookspec
def miles_extension() -> Providers:
    """Offer extensions that cut across parts.

    Collecting. Called once a process at wiring time. Built at:
    every place.
    The product keeps the contract of `miles_core.contracts.extension.Extension`.

    Raises: nothing; a provider that cannot work says so in `build`. Must not import anything heavy.

    >>> from dataclasses import dataclass
    >>> from miles_core import hookimpl
    >>> from miles_core.provider import Provider
    >>> @dataclass(frozen=True)
    ... class Config:
    ...     size: int = 1
    >>> @hookimpl
    ... def miles_extension():
    ...     return Provider(name="acme", config=Config, build=lambda config, context: object())
    >>> miles_extension().name
    'acme'

    Since API v1.
    """


@hookspec
def miles_health_checks() -> Sequence[tuple[str, bool, str, str]]:
    """Contribute findings to `miles doctor`.

    Collecting. Called by `miles doctor` in a process of its own. Returns rows of (name, ok, finding, fix).

    Must not change data, block, or raise; an error in an observer stops the run with its own text.

    >>> from miles_core import hookimpl
    >>> @hookimpl
    ... def miles_health_checks():
    ...     return [("acme licence", False, "expired", "renew it")]
    >>> miles_health_checks()[0][0]
    'acme licence'

    Since API v1.
    """


@hookspec
def miles_on_run_start(info: Mapping[str, Any]) -> None:
    """Watch: the run is about to take its first lease.

    Called once by the controller. `info` as in `Tracker.start`.

    Must not change data, block, or raise; an error in an observer stops the run with its own text.

    >>> from miles_core import hookimpl
    >>> @hookimpl
    ... def miles_on_run_start(info):
    ...     print("started", info["name"])
    >>> miles_on_run_start({"name": "quickstart"})
    started quickstart

    Since API v1.
    """


@hookspec
def miles_on_step(policy: str, step: int, metrics: Mapping[str, Metric]) -> None:
    """Watch: a step was trained.

    Called by the controller once a step and policy. `metrics` are (numerator, denominator) by `side/name`.

    Must not change data, block, or raise; an error in an observer stops the run with its own text.

    >>> from miles_core import hookimpl
    >>> @hookimpl
    ... def miles_on_step(step, metrics):
    ...     print(step, metrics["train/loss"])
    >>> miles_on_step(3, {"train/loss": (1.0, 2.0)})
    3 (1.0, 2.0)

    Since API v1.
    """


@hookspec
def miles_on_weights(version: Version, receipts: Mapping[str, Any]) -> None:
    """Watch: a version was published, with the receipts of the engines that serve it.

    Called by the controller once a publication.

    Must not change data, block, or raise; an error in an observer stops the run with its own text.

    >>> from miles_core import hookimpl
    >>> @hookimpl
    ... def miles_on_weights(version):
    ...     print(version)
    >>> miles_on_weights("main@0.1")
    main@0.1

    Since API v1.
    """


@hookspec
def miles_on_checkpoint(step: int, folder: Path) -> None:
    """Watch: a checkpoint was committed.

    Called by the controller after the commit marker is on disk.

    Must not change data, block, or raise; an error in an observer stops the run with its own text.

    >>> from miles_core import hookimpl
    >>> @hookimpl
    ... def miles_on_checkpoint(step, folder):
    ...     print(step, folder)
    >>> miles_on_checkpoint(10, "checkpoints/step_000010")
    10 checkpoints/step_000010

    Since API v1.
    """


@hookspec
def miles_on_run_end(status: str) -> None:
    """Watch: the run ended.

    Called once by the controller. `status` is `finished`, `interrupted` or the error's code.

    Must not change data, block, or raise; an error in an observer stops the run with its own text.

    >>> from miles_core import hookimpl
    >>> @hookimpl
    ... def miles_on_run_end(status):
    ...     print(status)
    >>> miles_on_run_end("finished")
    finished

    Since API v1.
    """
