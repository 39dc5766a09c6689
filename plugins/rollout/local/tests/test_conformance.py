"""The contract of engines, as `miles conformance rollout:local` tests it."""

from miles_rollout_local.conformance import BatchInvariantConformance, LocalConformance


class TestLocal(LocalConformance):
    pass


class TestBatchInvariant(BatchInvariantConformance):
    pass
