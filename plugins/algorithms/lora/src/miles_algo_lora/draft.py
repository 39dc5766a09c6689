"""The extension where no model is: it gives roles that start from an adapted one the base instead of a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miles_algo_lora.roles import refuse_blends

if TYPE_CHECKING:
    from miles_algo_lora.config import LoraConfig
    from miles_core.columns import ColumnSpec
    from miles_core.provider import BuildContext

#: How a role of the run file must look to be replaced: only where its weights come from is said.
_UNSAID = {"init"}


class LoraDraft:
    """See `miles_core.contracts.extension`. Built in controllers and samplers."""

    columns: tuple[ColumnSpec, ...] = ()

    def __init__(self, config: LoraConfig, context: BuildContext) -> None:
        self.name = "lora"
        self._config = config
        if context.run is not None:  # while the run file is still a draft there is none
            refuse_blends(config, context.run.policies)

    def on_config(self, draft: Mapping[str, Any]) -> Mapping[str, Any]:
        """`roles.reference: {init: actor}` becomes `{init: actor, update: adapter_off}`: adapters start at zero, so
        the frozen copy of the actor that would be made otherwise is the base itself."""
        found = dict(draft)
        if isinstance(policies := draft.get("policies"), Mapping):
            covered = {n: p for n, p in policies.items() if isinstance(p, Mapping) and self._covers(n)}
            changed = {n: _shared(p, self._config.roles) for n, p in covered.items()}
            found["policies"] = {**policies, **changed}
            return found
        return _shared(found, self._config.roles) if self._covers("main") else found

    def _covers(self, policy: str) -> bool:
        return not self._config.policies or policy in self._config.policies


def _shared(policy: Mapping[str, Any], adapted: list[str]) -> dict[str, Any]:
    roles = policy.get("roles")
    if not isinstance(roles, Mapping):
        return dict(policy)
    filled = {
        name: {**role, "update": "adapter_off"}
        if isinstance(role, Mapping) and role.keys() == _UNSAID and role["init"] in adapted
        else role
        for name, role in roles.items()
    }
    return {**policy, "roles": filled}
