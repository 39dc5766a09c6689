"""What turns a draft into a fuller draft: presets of `algorithm`, and extensions that may change the run file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_core.config.binder import Binder
from miles_core.config.binding import bind
from miles_core.config.layers import ALGORITHM_KEYS, Tree, chosen, expand, instances, merge, unwrap, wrap
from miles_core.discovery import Catalogue
from miles_core.errors import ConfigError, PluginContractError
from miles_core.provider import BuildContext, Place


def with_presets(draft: Tree, catalogue: Catalogue) -> Tree:
    """The draft with every policy's preset expanded beneath what the file says."""
    draft = dict(draft)
    if isinstance(section := draft.get("algorithm"), dict):
        draft["algorithm"] = _expand_preset(section, "algorithm", catalogue, ())
    if isinstance(policies := draft.get("policies"), dict):
        draft["policies"] = dict(policies)
        for name, policy in policies.items():
            if isinstance(policy, dict) and isinstance(section := policy.get("algorithm"), dict):
                expanded = _expand_preset(section, f"policies.{name}.algorithm", catalogue, ())
                draft["policies"][name] = {**policy, "algorithm": expanded}
    return draft


def _expand_preset(section: Tree, path: str, catalogue: Catalogue, above: tuple[str, ...]) -> Tree:
    """`section` over what its preset resolves to; a preset may name another one that it builds on."""
    name = chosen(section, path)
    if name is None:
        return section
    if name in above:
        raise ConfigError(f"{path}: presets build on each other in a circle: {', '.join(above)}", fix="use another")
    provider = catalogue.load("algorithm", name).provider
    options = {k: unwrap(v) for k, v in section.items() if k not in ALGORITHM_KEYS}
    no_context: Any = None  # a preset is a pure function of its options
    built = provider.build(bind(provider.config, options, path, also=sorted(ALGORITHM_KEYS)), no_context)
    stray = [k for k in built if k not in ALGORITHM_KEYS] if isinstance(built, Mapping) else ["no mapping"]
    if stray:
        raise PluginContractError(
            f"the preset {name!r} gives {', '.join(map(repr, stray))}; a preset gives a mapping of `algorithm` keys",
            fix=f"give only: {', '.join(sorted(ALGORITHM_KEYS))}",
        )
    below: Tree = expand({"algorithm": wrap(built, f"preset {name}")})["algorithm"]
    below = _expand_preset(below, path, catalogue, (*above, name))
    below.pop("use", None)
    return merge({"algorithm": below}, {"algorithm": section}, keep_core=False)["algorithm"]  # type: ignore[no-any-return]


def on_config(draft: Tree, name: str, catalogue: Catalogue) -> Mapping[str, Any]:
    """What the extension `name` changes. It is built in the controller, before there is a run file."""
    part, _ = Binder(catalogue).part(
        ("extension",), name, instances(draft, "extensions")[name], f"extensions.{name}", named=True
    )
    unready: Any = None
    context = BuildContext(place=Place.CONTROLLER, name=name, run=unready)
    on_config = getattr(catalogue.load("extension", part.use).provider.build(part.options, context), "on_config", None)
    changes = on_config(unwrap(draft)) if on_config else {}
    if not isinstance(changes, Mapping):
        raise PluginContractError(
            f"on_config of extension {name!r} returned a {type(changes).__name__}", fix="return a mapping of changes"
        )
    return changes
