"""The contracts of backends and model adapters, as `miles conformance` tests them."""

from miles_backend_fsdp.conformance import CausalLMConformance, FsdpConformance, MicroBatchesConformance


class TestFsdp(FsdpConformance):
    pass


class TestFsdpInMicroBatches(MicroBatchesConformance):
    pass


class TestCausalLM(CausalLMConformance):
    pass
