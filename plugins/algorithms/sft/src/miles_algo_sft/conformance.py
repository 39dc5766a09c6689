"""What `miles conformance` tests of the term: numbers worked by hand."""

from collections.abc import Sequence
from typing import ClassVar

from miles_core.testing import LossConformance, TermExample


class SftConformance(LossConformance):
    name = "sft"
    examples: ClassVar[Sequence[TermExample]] = (
        TermExample(
            trainable=[[0, 1, 1], [1, 0]],
            outputs={"logprobs": [7, -1, -2.5, 0, 3]},
            value=[0, 1, 2.5, 0, 0],
            gradient={"logprobs": [0, -1, -1, -1, 0]},
        ),
    )
