"""Fixtures: small plugin distributions, written as metadata and a module into a folder on `sys.path`."""

import importlib
import sys
import textwrap
from pathlib import Path

import pytest

from miles_core.discovery import Catalogue

BUILTIN = """
[miles.launcher.v1]
inline = miles_core.builtin.inline
[miles.tracker.v1]
console = miles_core.builtin.console
jsonl = miles_core.builtin.jsonl
[miles.renderer.v1]
text = miles_core.builtin.text
chat = miles_core.builtin.chat
[miles.tokenizer.v1]
chars = miles_core.builtin.chars
"""

#: A whole run's worth of plugins. Products are not built by config tests.
PARTS = """
from dataclasses import dataclass, field
from enum import StrEnum
from miles_core import hookimpl
from miles_core.config.schema import opt
from miles_core.provider import Provider

def build(config, context):
    return object()

class Scale(StrEnum):
    std = "std"
    none = "none"

@dataclass(frozen=True, kw_only=True)
class Nothing:
    pass

@dataclass(frozen=True, kw_only=True)
class Engine:
    slots: int = opt(64, "requests at once", unit="requests", low=1)

@dataclass(frozen=True, kw_only=True)
class Bucketed:
    bucket_mib: int = opt(256, "size of a bucket", unit="MiB", low=1, high=4096)

@dataclass(frozen=True, kw_only=True)
class Digits:
    digits: int = opt(5, "length", low=1)
    ops: list[str] = opt(["sort"], "operations")

@dataclass(frozen=True, kw_only=True)
class Group:
    scale: Scale = opt(Scale.std, "divide by")
    eps: float = opt(1e-6, "added", low=0)

@dataclass(frozen=True, kw_only=True)
class Clip:
    lo: float = opt(0.2, "lower", low=0)
    hi: float | None = opt(None, "upper; lo where null", low=0)

@dataclass(frozen=True, kw_only=True)
class Kl:
    estimator: str = opt("k3", "estimator")

@dataclass(frozen=True, kw_only=True)
class Tis:
    high: float = opt(2.0, "cap", low=0)

@dataclass(frozen=True, kw_only=True)
class Cispo:
    hi: float = field(metadata={"help": "upper bound", "low": 0})

@hookimpl
def miles_rollout():
    offers = ["weights.tensors", "logprobs", "pause.in_place", "pause.abort"]
    return [
        Provider(name="toy", config=Engine, build=build, offers=[*offers, "keep_ids", "batch_invariant", "policies"]),
        Provider(name="blind", config=Nothing, build=build, offers=["logprobs"]),
        Provider(name="plain", config=Nothing, build=build, offers=[*offers, "policies"]),
        Provider(name="reader", config=Nothing, build=build, offers=["prompt_logprobs", "weights.checkpoint"]),
    ]

@hookimpl
def miles_backend():
    return [Provider(name="sgd", config=Nothing, build=build), Provider(name="adam", config=Nothing, build=build)]

@hookimpl
def miles_sync():
    return [
        Provider(name="bucketed", config=Bucketed, build=build, requires=["weights.tensors"]),
        Provider(name="p2p", config=Nothing, build=build, requires=["weights.tensors"]),
    ]

@hookimpl
def miles_env():
    return [
        Provider(name="arithmetic", config=Digits, build=build),
        Provider(name="jsonl", config=Nothing, build=build),
    ]

@hookimpl
def miles_model():
    return Provider(name="causal-lm", config=Nothing, build=build)

EXPLAIN = "(R − mean of the group) / (std + eps)\\nPaper: one."

@hookimpl
def miles_stage():
    return [
        Provider(name="group", config=Group, build=build, field="advantage", explain=EXPLAIN),
        Provider(name="mine", config=Nothing, build=build, field="advantage", requires=["siblings"]),
        Provider(name="batch", config=Nothing, build=build, field="advantage"),
        Provider(name="tis", config=Tis, build=build, field="correction"),
        Provider(name="reward_kl", config=Kl, build=build, field="reward_kl"),
        Provider(name="kl", config=Kl, build=build, field="reward_kl"),
    ]

@hookimpl
def miles_term():
    return [
        Provider(name="clip", config=Clip, build=build, field="loss"),
        Provider(name="reinforce", config=Nothing, build=build, field="loss"),
        Provider(name="sft", config=Nothing, build=build, field="loss"),
        Provider(name="kl", config=Kl, build=build, field="kl"),
        Provider(name="other_kl", config=Nothing, build=build, field="kl"),
        Provider(name="entropy", config=Nothing, build=build, field="entropy"),
        Provider(name="opsm", config=Nothing, build=build, field="correction", requires=["behaviour_logprobs"]),
        Provider(name="dpo", config=Nothing, build=build, field="loss", requires=["preference", "role:reference"]),
        Provider(name="sequence", config=Nothing, build=build, field="loss", requires=["aggregation"]),
        Provider(name="student", config=Nothing, build=build, field="distill", requires=["scores_at_ids:teacher"]),
    ]

@hookimpl
def miles_algorithm():
    grpo = {
        "advantage": {"use": "group", "scale": "std"},
        "loss": {"use": "clip", "lo": 0.2},
        "kl": {"use": "kl", "estimator": "k3", "coef": 0.0},
        "entropy": {"coef": 0.0},
        "aggregation": "episode_mean",
    }
    return [
        Provider(name="grpo", config=Nothing, build=lambda c, x: grpo),
        Provider(name="dr_grpo", config=Nothing, build=lambda c, x: {
            "use": "grpo", "advantage": {"scale": "none"}, "aggregation": "constant"}),
        Provider(name="cispo", config=Cispo, build=lambda c, x: {"use": "grpo", "loss": {"lo": 1.0, "hi": c.hi}}),
        Provider(name="sft", config=Nothing, build=lambda c, x: {"episodes": "demonstrations", "loss": "sft"}),
        Provider(name="dpo", config=Nothing, build=lambda c, x: {"episodes": "demonstrations", "loss": "dpo"}),
        Provider(name="odd", config=Nothing, build=lambda c, x: {"los": "clip"}),
        Provider(name="listed", config=Nothing, build=lambda c, x: ["clip"]),
        Provider(name="ring", config=Nothing, build=lambda c, x: {"use": "ring2"}),
        Provider(name="ring2", config=Nothing, build=lambda c, x: {"use": "ring"}),
    ]

class Faster:
    name, columns = "faster", ()
    def on_config(self, draft):
        schedule = {**draft["schedule"], "groups_per_step": draft["schedule"]["groups_per_step"] * 2}
        return {**draft, "schedule": schedule, "sync": {**draft["sync"], "bucket_mib": 8}}  # only changes count

@hookimpl
def miles_extension():
    return [
        Provider(name="faster", config=Nothing, build=lambda c, x: Faster()),
        Provider(name="silent", config=Nothing, build=build, requires=["routed_experts"]),
    ]

@hookimpl
def miles_scorer():
    return Provider(name="remote", config=Nothing, build=build)

@hookimpl
def miles_tracker():
    return Provider(name="paper", config=Nothing, build=build)
"""

NAMES = {
    "rollout": ["toy", "blind", "plain", "reader"],
    "backend": ["sgd", "adam"],
    "sync": ["bucketed", "p2p"],
    "env": ["arithmetic", "jsonl"],
    "model": ["causal-lm"],
    "stage": ["group", "mine", "batch", "tis", "reward_kl", "kl"],
    "term": ["clip", "reinforce", "sft", "kl", "other_kl", "entropy", "opsm", "dpo", "sequence", "student"],
    "algorithm": ["grpo", "dr_grpo", "cispo", "sft", "dpo", "odd", "listed", "ring", "ring2"],
    "extension": ["faster", "silent"],
    "scorer": ["remote"],
    "tracker": ["paper"],
}

ONE = """
from dataclasses import dataclass
from miles_core import hookimpl
from miles_core.provider import Provider

@dataclass(frozen=True, kw_only=True)
class Config:
    size: int = 1

@hookimpl
def miles_{kind}():
    return Provider(name={name!r}, config=Config, build=lambda config, context: object())
"""


class Plugins:
    """Writes distributions into `folder`, and reads a catalogue of them alone (built-ins included)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: list[str] = []
        self.metadata("miles-core", "0.1.0", BUILTIN)

    def metadata(self, distribution, version, entry_points, requires=(), summary="", extra=""):
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        head = [f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\nSummary: {summary}"]
        (info / "METADATA").write_text("\n".join([*head, *(f"Requires-Dist: {r}" for r in requires), extra]))
        (info / "entry_points.txt").write_text(entry_points)
        importlib.invalidate_caches()  # it goes by times, which are coarse on some machines

    def module(self, name, code):
        (self.folder / f"{name}.py").write_text(textwrap.dedent(code))
        self.modules.append(name)

    def add(
        self,
        distribution="acme-miles-sync-foo",
        version="1.0",
        *,
        kind="sync",
        names=("foo",),
        code=None,
        major=1,
        requires=("miles-core>=0.1,<1",),
        module=None,
        **more,
    ):
        """One distribution with one module; without `code`, a module that offers the first name."""
        module = module or distribution.replace("-", "_")
        self.module(module, code if code is not None else ONE.format(kind=kind, name=names[0]))
        lines = [f"[miles.{kind}.v{major}]", *(f"{name} = {module}" for name in names)]
        self.metadata(distribution, version, "\n".join(lines), requires, **more)

    def parts(self, more=""):
        """`PARTS`, enough for a whole run file."""
        module = f"acme_parts_{self.folder.parent.name.replace('-', '_')}"
        self.module(module, PARTS + textwrap.dedent(more))
        lines = []
        for kind, names in NAMES.items():
            lines += [f"[miles.{kind}.v1]", *(f"{name} = {module}" for name in names)]
        self.metadata("acme-parts", "2.0", "\n".join(lines), ("miles-core>=0.1,<1",))
        return self

    def catalogue(self) -> Catalogue:
        return Catalogue.read([str(self.folder)])


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    made = Plugins(folder)
    yield made
    for name in made.modules:
        sys.modules.pop(name, None)
