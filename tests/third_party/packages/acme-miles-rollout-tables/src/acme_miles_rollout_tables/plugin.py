"""What this distribution offers; the engine is imported when it is built."""

from dataclasses import dataclass

from miles_core import hookimpl
from miles_core.provider import Provider

OFFERS = (
    *("weights.tensors", "logprobs", "batch_invariant", "policies"),
    *("pause.in_place", "pause.abort", "margin.gap"),
)


@dataclass(frozen=True, kw_only=True)
class TablesConfig:
    """No options."""


def build(config, context):
    from acme_miles_rollout_tables.engine import TablesEngine

    return TablesEngine(context.name, context.need("renderer"))


@hookimpl
def miles_rollout():
    return Provider(name="tables", config=TablesConfig, build=build, offers=OFFERS, summary="sums of tables, in NumPy")
