"""What the kit needs of the resolver: a source of its kind."""

from miles_core.testing import ResolverConformance


class FirstConformance(ResolverConformance):
    name = ".first"

    def sample(self, folder):
        path = folder / "sample.first"
        path.write_text('{"model_type": "toy"}')
        return str(path)
