"""Every part and preset against the kit."""

from miles_algo_opd import conformance

from miles_core.testing import PresetConformance


class TestOpdPreset(PresetConformance):
    name = "opd"


class TestTopkPreset(conformance.TopkPresetConformance):
    pass


class TestOpd(conformance.OpdConformance):
    pass


class TestTopkKl(conformance.TopkKlConformance):
    pass


class TestForward(conformance.ForwardConformance):
    pass


class TestUnion(conformance.UnionConformance):
    pass


class TestRenormalised(conformance.RenormalisedConformance):
    pass


class TestTailless(conformance.TaillessConformance):
    pass


class TestHttpTeacher(conformance.HttpTeacherConformance):
    pass
