"""The contract of resolvers, as `miles conformance` tests it."""

from miles_model_gguf.conformance import FileConformance, PackageConformance


class TestFile(FileConformance):
    pass


class TestPackage(PackageConformance):
    pass
