"""A tracker, an extension, and observers."""

from contextlib import contextmanager

from acme_miles_first.config import Nothing
from miles_core import hookimpl
from miles_core.provider import Provider

TOLD = {"start": 0, "step": 0, "weights": 0, "checkpoint": 0, "end": 0, "requests": 0, "micro": 0}


class Lines:
    def __init__(self, run_dir):
        self.run_dir = run_dir

    def start(self, info):
        self.note(f"start {info['name']}")

    def metrics(self, step, side, values, policy):
        for name, (numerator, denominator) in values.items():
            self.note(f"{step} {policy} {side}/{name} {numerator / denominator if denominator else 'none'}")

    def event(self, kind, fields):
        pass

    def close(self, status):
        told = " ".join(f"{name}={count}" for name, count in TOLD.items())
        self.note(f"end {status} {told}")

    def note(self, line):
        if self.run_dir is not None:
            with open(self.run_dir / "first.txt", "a", encoding="utf-8") as file:
                file.write(line + "\n")


class Counting:
    name = "first"
    columns = ()

    def request(self, request):
        TOLD["requests"] += 1
        return request

    @contextmanager
    def micro(self, view, role, purpose):
        TOLD["micro"] += 1
        yield


@hookimpl
def miles_tracker():
    return Provider(
        name="first", config=Nothing, build=lambda config, context: Lines(context.run_dir), summary="a text file"
    )


@hookimpl
def miles_extension():
    return Provider(name="first", config=Nothing, build=lambda config, context: Counting(), summary="counts")


@hookimpl
def miles_on_run_start(info):
    TOLD["start"] += 1


@hookimpl
def miles_on_step(policy, step, metrics):
    TOLD["step"] += 1


@hookimpl
def miles_on_weights(version, receipts):
    TOLD["weights"] += 1


@hookimpl
def miles_on_checkpoint(step, folder):
    TOLD["checkpoint"] += 1


@hookimpl
def miles_on_run_end(status):
    TOLD["end"] += 1


@hookimpl
def miles_health_checks():
    return [("first", True, "fine", "")]
