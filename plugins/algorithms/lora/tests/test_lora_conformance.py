from miles_algo_lora.conformance import DoraConformance, LoraConformance, RankStabilisedConformance


class TestLora(LoraConformance):
    pass


class TestRankStabilised(RankStabilisedConformance):
    pass


class TestDora(DoraConformance):
    pass
