"""Term `soft`: -A·π + tau/2 · (π - π_p)². Operators only, so that it runs on torch and on NumPy toys alike."""

from dataclasses import dataclass

from miles_core import hookimpl
from miles_core.config.schema import opt
from miles_core.contracts.learning import LOGPROBS, TermOutput
from miles_core.provider import Provider


@dataclass(frozen=True, kw_only=True)
class SoftConfig:
    tau: float = opt(0.1, "stiffness of the spring", low=0)


class Soft:
    level, mask, weighted, aggregation = "unit", "kept", True, None
    outputs = (LOGPROBS,)
    needs = frozenset({"advantages"})

    def __init__(self, config):
        self.tau = config.tau

    def __call__(self, view):
        current, proximal = view.out(LOGPROBS), view["proximal_logprobs"]
        moved = current - getattr(proximal, "value", proximal)
        return TermOutput(value=moved * moved * (0.5 * self.tau) - current * view["advantages"])


@hookimpl
def miles_term():
    return Provider(
        name="soft",
        config=SoftConfig,
        build=lambda config, context: Soft(config),
        field="loss",
        summary="policy gradient with a spring to the old policy",
    )
