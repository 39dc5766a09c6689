"""Provider of the environment `jsonl`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core import hookimpl
from miles_core.provider import BuildContext, Provider
from miles_env_jsonl.config import JsonlConfig

if TYPE_CHECKING:
    from miles_env_jsonl.environment import JsonlEnvironment


def _build(config: JsonlConfig, context: BuildContext) -> JsonlEnvironment:
    from miles_env_jsonl.environment import build

    return build(config, context)


@hookimpl
def miles_env() -> Provider[JsonlConfig, JsonlEnvironment]:
    return Provider(
        name="jsonl",
        config=JsonlConfig,
        build=_build,
        summary="tasks from a JSONL or Parquet file, reward from a Python function",
    )
