"""Every part and preset against the kit, with the options that change what they compute."""

from miles_algo_ppo import conformance

from miles_core.testing import PresetConformance


class TestPpo(PresetConformance):
    name = "ppo"


class TestGae(conformance.GaeConformance):
    pass


class TestGaeDiscounted(conformance.DiscountedConformance):
    pass


class TestGaeBootstrapped(conformance.BootstrappedConformance):
    pass


class TestGaeWithRewardKl(conformance.WithRewardKlConformance):
    pass


class TestValue(conformance.ClippedConformance):
    pass


class TestValueUnclipped(conformance.UnclippedConformance):
    pass
