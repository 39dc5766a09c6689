"""Which roles have adapters, and which of a run file are refused because of them. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from miles_core.errors import CombinationError

if TYPE_CHECKING:
    from miles_algo_lora.config import LoraConfig
    from miles_core.config.schema import Policy, RoleConfig


def followed(roles: Mapping[str, RoleConfig], role: str) -> str:
    """The role whose weights `role` has: the one that it follows by `copy` or `ema`, or itself."""
    found = roles.get(role)
    return followed(roles, found.init) if found is not None and found.update in ("copy", "ema") and found.init else role


def refuse_blends(config: LoraConfig, policies: Mapping[str, Policy]) -> None:
    """Raise `CombinationError` for a role that follows an adapted one by `ema`.

    A backend blends parameter by parameter, and d·B₁ + (1 − d)·B₂ times d·A₁ + (1 − d)·A₂ is not d·B₁A₁ + (1 − d)·B₂A₂,
    which has up to twice the rank and so is no adapter of this rank at all. A decay of 0 is a copy, one of 1 moves
    nothing; these and `copy` are exact.
    """
    for name, policy in policies.items():
        if config.policies and name not in config.policies:
            continue
        for role, given in policy.roles.items():
            if given.update == "ema" and 0 < given.decay < 1 and followed(policy.roles, role) in config.roles:
                path = f"policies.{name}.roles.{role}" if len(policies) > 1 else f"roles.{role}"
                raise CombinationError(
                    f"{path} follows the adapted role {given.init!r} by ema: A and B of an adapter would be averaged "
                    f"each for itself, which is not the average of what they do, not the product B·A",
                    fix=f"set {path}.update: copy (with {path}.every), which is exact, or train without adapters",
                )
