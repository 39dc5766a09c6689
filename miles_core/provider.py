"""What a plugin offers: `Provider`; what it is given when it is built: `BuildContext`.

Light on purpose: importing this module brings in neither NumPy nor OmegaConf nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from miles_core.errors import PluginContractError, blamed

if TYPE_CHECKING:
    from miles_core.config.schema import RunFile
    from miles_core.contracts.engine import Engine
    from miles_core.contracts.model import ModelSource
    from miles_core.contracts.rendering import Renderer, Tokenizer

ConfigT = TypeVar("ConfigT")
ProductT = TypeVar("ProductT", covariant=True)


class Place(StrEnum):
    """Where an object is built. Each (kind, place) has its own Protocol in `contracts/`."""

    CONTROLLER = "controller"
    SAMPLER = "sampler"
    TRAINER = "trainer"
    ENGINE = "engine"


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """What wiring hands to `Provider.build`, beside the plugin's own config.

    Fields that make no sense at a place are `None`; a plugin that needs one asks with `need()`.
    """

    place: Place
    name: str  # instance name, the key in the run file
    run: RunFile  # the whole frozen run file
    policy: str = "main"
    seed: int = 0  # run.seed; derive streams with miles_core.seeds
    run_dir: Path | None = None
    rank: int = 0  # trainer and engine places
    ranks: int = 1
    core: Any = None  # the core-owned keys of this instance's section (a dataclass of config/schema.py), or None
    model: ModelSource | None = None  # the policy's model
    tokenizer: Tokenizer | None = None  # for renderers: the built-in one that the model names
    renderer: Renderer | None = None  # the policy's renderer
    address: str = ""  # engine clients in samplers: the `address` of the controller's engine of the same name
    engine: Engine | None = None  # sync links (place `engine`): the engine client beside which the link runs
    adapters: Mapping[str, Any] = field(default_factory=dict)  # trainer: policy/role -> built ModelAdapter
    extensions: tuple[Any, ...] = ()  # built Extension objects, in config order
    export: Callable[..., Any] | None = None  # sync senders: backend.export, with extensions applied

    def need(self, attribute: str) -> Any:
        """The value of `attribute`; a `PluginContractError` where wiring did not give it."""
        value = getattr(self, attribute)
        if value is None:
            raise PluginContractError(
                f"{self.name!r} needs {attribute!r} at place {self.place.value!r}, and wiring gives none there",
                fix=f"build it at a place that has {attribute!r}, or do not ask for it",
            )
        return value


Capabilities = Iterable[str] | Callable[[Any], Iterable[str]]


@dataclass(frozen=True, kw_only=True)
class Provider(Generic[ConfigT, ProductT]):
    """One thing that a plugin offers.

    `name` equals the entry point's name. `config` is a dataclass type. `build(config, context)` imports the heavy part
    inside and returns a plain object that keeps the Protocol of (kind, `context.place`). `requires` and `offers` are
    capabilities, or a function of the config that returns them. `field` says which field of `algorithm` a stage or term
    may stand in (`advantage`, `loss`, `kl`, …; empty for other kinds). `explain` is what `miles config
    show --explain` prints of an algorithm's part or preset: its formula, then the paper, then deviations from it.
    """

    name: str
    config: type[ConfigT]
    build: Callable[[ConfigT, BuildContext], ProductT]
    requires: Capabilities = ()
    offers: Capabilities = ()
    summary: str = ""
    field: str = ""
    explain: str = ""

    def required(self, config: ConfigT) -> frozenset[str]:
        """The capabilities that this provider needs from its counterpart under `config`."""
        return self._told("requires", self.requires, config)

    def offered(self, config: ConfigT) -> frozenset[str]:
        """The capabilities that this provider has under `config`."""
        return self._told("offers", self.offers, config)

    def _told(self, what: str, words: Capabilities, config: ConfigT) -> frozenset[str]:
        fix = f"mend {what} of that plugin's provider: an iterable of words, or a function of its config to one"
        with blamed(f"plugin {self.name!r} cannot say what it {what}", PluginContractError, fix):
            return frozenset(words(config) if callable(words) else words)
