"""Extension `margin`: asks engines how far ahead of the second choice the first one was, at every sampled token.

The column `margin.gap` travels with the tokens; at the end of the run its mean is printed.
"""

from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from miles_core import hookimpl
from miles_core.columns import ColumnSpec, Level
from miles_core.provider import Provider

GAP = ColumnSpec(name="margin.gap", level=Level.UNIT, dtype="float32", required=False, help="lead of the first choice")
SEEN = {"asked": 0, "trained": 0.0, "tokens": 0}


@dataclass(frozen=True, kw_only=True)
class MarginConfig:
    """No options."""


class Margin:
    name, columns = "margin", (GAP,)

    def request(self, request):
        SEEN["asked"] += 1
        return replace(request, want=request.want | {GAP.name})

    def collect(self, raw, request):
        return {GAP.name: raw[GAP.name]} if GAP.name in request.want else {}

    @contextmanager
    def micro(self, view, role, purpose):
        if purpose == "update" and GAP.name in view:
            gaps = np.asarray(view[GAP.name])[np.asarray(view["trainable"])]
            SEEN["trained"] += float(gaps.sum())
            SEEN["tokens"] += len(gaps)
        yield


@hookimpl
def miles_extension():
    return Provider(
        name="margin",
        config=MarginConfig,
        build=lambda config, context: Margin(),
        requires=(GAP.name,),
        summary="how clear each choice was",
    )


@hookimpl
def miles_on_run_end(status):
    if SEEN["tokens"]:
        print(
            f"margin: {SEEN['tokens']} tokens of {SEEN['asked']} requests, mean {SEEN['trained'] / SEEN['tokens']:.3f}"
        )
