"""Which parameters of a model are trained: option `trainable` of `causal-lm`.

A frozen parameter takes no gradient and no optimizer state, and no checkpoint holds it; it is exported like any other.
Below the lowest trained block nothing is kept for the backward pass either, which ends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from miles_backend_fsdp import names
from miles_core.errors import ConfigError


def restrict(module: Any, patterns: Sequence[str]) -> None:
    """Freeze every parameter of `module.lm` whose Hugging Face name matches none of `patterns` (shell wildcards).

    Nothing is frozen where `patterns` is empty; a value head, which no checkpoint knows, is always trained. Raises
    `ConfigError` for a pattern that matches nothing.
    """
    own = {n.removeprefix(names.PREFIX): p for n, p in module.named_parameters() if n.startswith(names.PREFIX)}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in own):
            raise _no_match(pattern, list(own), type(module.lm).__name__, len(module.lm.model.layers) - 1)
    for name, parameter in own.items():
        parameter.requires_grad_(not patterns or any(fnmatchcase(name, pattern) for pattern in patterns))


def _no_match(pattern: str, own: list[str], model: str, last: int) -> ConfigError:
    if pattern.startswith("lm_head") and "model.embed_tokens.weight" in own:
        fix = "the output layer is the embedding here: name model.embed_tokens.weight"
    else:
        close = get_close_matches(pattern, own, 1, 0.3) or own
        fix = f"name parameters as {close[0]!r}, with * for any part: model.layers.{last}.*"
    outer = ", ".join(name for name in own if ".layers." not in name)
    return ConfigError(
        f"model.trainable has {pattern!r}, which matches no parameter of {model} "
        f"(model.layers.0 to model.layers.{last}, {outer})",
        fix=fix,
    )
