"""The provider `bucketed` of kind `sync`."""

from __future__ import annotations

from typing import Any

from miles_core import hookimpl
from miles_core.provider import BuildContext, Place, Provider
from miles_sync_bucketed.config import BucketedConfig


def _build(config: BucketedConfig, context: BuildContext) -> Any:
    if context.place == Place.TRAINER:
        from miles_sync_bucketed.sender import BucketedSender

        return BucketedSender(
            policy=context.policy,
            rank=context.rank,
            export=context.need("export"),
            deadline_s=context.need("core").deadline_s,
        )
    if context.place == Place.ENGINE:
        from miles_sync_bucketed.link import BucketedLink

        return BucketedLink(engine=context.need("engine"), keys=context.need("core"))
    from miles_sync_bucketed.transport import BucketedTransport

    return BucketedTransport(config)


@hookimpl
def miles_sync() -> Provider[BucketedConfig, Any]:
    return Provider(
        name="bucketed",
        config=BucketedConfig,
        build=_build,
        requires=("weights.tensors",),
        summary="buckets of whole tensors on one host: in-process or through shared memory",
    )
