"""What `miles conformance` tests of `model:.gguf` and `model:gguf:`: a tiny Llama, as a file and inside a package."""

from __future__ import annotations

import sys
from pathlib import Path

from miles_core.testing import ResolverConformance
from miles_model_gguf import sample


class FileConformance(ResolverConformance):
    name = ".gguf"

    def sample(self, folder: Path) -> str:
        path = folder / "sample.gguf"
        sample.write(path)
        return str(path)


class PackageConformance(ResolverConformance):
    name = "gguf:"

    def sample(self, folder: Path) -> str:
        package = folder / f"miles_gguf_sample_{folder.name.replace('-', '_')}"
        package.mkdir()
        sample.write(package / "sample.gguf")
        sys.path.append(str(folder))  # where packages are looked for; the folder is gone after the test
        return f"gguf:{package.name}"
