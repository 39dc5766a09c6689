"""What `miles conformance env:jsonl` tests, on the sample file beside this module: a held-out share, files in order."""

from pathlib import Path
from typing import Any, ClassVar

from miles_core.testing import EnvironmentConformance

SAMPLE = str(Path(__file__).with_name("sample.jsonl"))


class FractionConformance(EnvironmentConformance):
    name = "jsonl"
    options: ClassVar[dict[str, Any]] = {"path": SAMPLE, "eval_fraction": 0.25}


class SlicesConformance(FractionConformance):
    options: ClassVar[dict[str, Any]] = {
        "path": f"{SAMPLE}@[:8]",
        "eval_path": f"{SAMPLE}@[8:]",
        "shuffle": False,
    }
