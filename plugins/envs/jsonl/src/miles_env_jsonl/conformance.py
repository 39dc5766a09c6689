"""What `miles conformance env:jsonl` tests: the environment on the sample file beside this module."""

from pathlib import Path
from typing import Any, ClassVar

from miles_core.testing import EnvironmentConformance


class JsonlConformance(EnvironmentConformance):
    name = "jsonl"
    options: ClassVar[dict[str, Any]] = {"path": str(Path(__file__).with_name("sample.jsonl")), "eval_fraction": 0.25}
