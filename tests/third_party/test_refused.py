"""What does not fit is refused with one message: code, what was asked, what was found, what to do. And it harms no
run that does not name it."""

import json
import re
from pathlib import Path

import pytest

HEAD = """
from dataclasses import dataclass
from miles_core import hookimpl
from miles_core.provider import Provider

@dataclass(frozen=True, kw_only=True)
class Config:
    pass
"""
ONE = """
@hookimpl
def miles_{kind}():
    return Provider(name="{name}", config=Config, build=lambda config, context: object(), summary="For a test.", {more})
"""
LIAR = """
from dataclasses import replace
from miles_core.testing.toys.engine import ToyEngine
from miles_core.testing.toys.plugin import ENGINE_OFFERS

class Liar(ToyEngine):
    async def generate(self, request):
        return await super().generate(replace(request, want=frozenset()))

@hookimpl
def miles_rollout():
    build = lambda config, context: Liar(context.name, renderer=context.renderer)
    return Provider(name="liar", config=Config, build=build, offers=ENGINE_OFFERS, summary="Promises too much.")
"""


def one(kind: str, name: str, more: str = "") -> str:
    return HEAD + ONE.format(kind=kind, name=name, more=more)


@pytest.fixture(scope="session")
def misfits(package, into, tmp_path_factory):
    """All of them at once, beside ours."""
    site = tmp_path_factory.mktemp("misfits")
    stage = one("stage", "future", 'field="advantage"')
    into(
        site,
        [
            package(
                "acme-future", {"stage": {"future": "acme_future"}}, {"acme_future": stage}, major=2, version="2.0"
            ),
            package("acme-pigeon", {"sync": {"pigeon": "acme_pigeon"}}, {"acme_pigeon": one("sync", "pigeon")}),
            package(
                "zed-pigeon", {"sync": {"pigeon": "zed_pigeon"}}, {"zed_pigeon": one("sync", "pigeon")}, version="0.2"
            ),
            package(
                "acme-broken", {"tracker": {"broken": "acme_broken"}}, {"acme_broken": "PLACES = {}['everywhere']\n"}
            ),
            package("acme-liar", {"rollout": {"liar": "acme_liar"}}, {"acme_liar": HEAD + LIAR}),
            package(
                "acme-needs",
                {"env": {"needs": "acme_needs"}},
                {"acme_needs": "import acme_nowhere\n" + one("env", "needs")},
                extras='[project.optional-dependencies]\nworld = ["acme-nowhere>=1"]',
            ),
            package("acme-bare", {"env": {"bare": "acme_bare"}}, {"acme_bare": "import acme_nothing\n"}),
            package(
                "acme-old",
                {"filter": {"old": "acme_old"}},
                {"acme_old": one("filter", "old")},
                requires=["miles-core>=0.0.1,<0.1"],
            ),
            package("acme-misnamed", {"filter": {"named": "acme_misnamed"}}, {"acme_misnamed": one("filter", "other")}),
            package(
                "acme-unhooked",
                {"filter": {"unhooked": "acme_unhooked"}},
                {"acme_unhooked": one("filter", "unhooked") + "\n@hookimpl\ndef miles_on_stepp(step):\n    pass\n"},
            ),
            package("acme-hollow", {"scorer": {"hollow": "acme_hollow"}}, {"acme_hollow": one("scorer", "hollow")}),
        ],
    )
    return site


@pytest.fixture
def miles(misfits, here):
    return here(misfits)


#: What is chosen -> the whole message. `…` stands for a path.
CASES = {
    "a newer API": (
        "algorithm.advantage={use: future}",
        "MILES-E004: algorithm.advantage: stage plugin 'future' (acme-future 2.0) targets stage API v2; "
        "miles-core 0.1.0 speaks v1",
        "install a release of acme-future for stage API v1, or upgrade miles-core",
    ),
    "a name clash": (
        "sync={use: pigeon}",
        "MILES-E002: sync: two distributions offer the sync plugin 'pigeon': acme-pigeon 1.0 and zed-pigeon 0.2",
        "keep one of them: pip uninstall acme-pigeon, or pip uninstall zed-pigeon",
    ),
    "a broken import": (
        "trackers={broken: {}}",
        "MILES-E003: trackers.broken: tracker plugin 'broken' (acme-broken 1.0) cannot be imported: "
        "KeyError: 'everywhere'",
        "upgrade or reinstall acme-broken; `--traceback` shows where it failed",
    ),
    "a missing dependency that an extra names": (
        "env={use: needs}",
        "MILES-E003: env: env plugin 'needs' (acme-needs 1.0) cannot be imported: "
        "ModuleNotFoundError: No module named 'acme_nowhere'",
        "pip install 'acme-needs[world]'",
    ),
    "a missing dependency that nothing names": (
        "env={use: bare}",
        "MILES-E003: env: env plugin 'bare' (acme-bare 1.0) cannot be imported: "
        "ModuleNotFoundError: No module named 'acme_nothing'",
        "pip install what provides 'acme_nothing'",
    ),
    "a range of other cores": (
        "algorithm.filters={old: {}}",
        "MILES-E004: algorithm.filters.old: filter plugin 'old' (acme-old 1.0) needs miles-core<0.1,>=0.0.1; "
        "miles-core 0.1.0 is installed",
        "pip install 'miles-core<0.1,>=0.0.1', or install a release of acme-old that takes miles-core 0.1.0",
    ),
    "an entry point that the module does not offer": (
        "algorithm.filters={named: {}}",
        "MILES-E005: algorithm.filters.named: filter plugin 'named' (acme-misnamed 1.0): its entry point is named "
        "'named', but miles_filter() of acme_misnamed offers 'other'",
        "name the entry point like Provider.name, one entry point for each provider",
    ),
    "a hook that there is not": (
        "algorithm.filters={unhooked: {}}",
        "MILES-E005: algorithm.filters.unhooked: filter plugin 'unhooked' (acme-unhooked 1.0) breaks the hook "
        "contract: PluginValidationError: unknown hook 'miles_on_stepp' in plugin <module 'acme_unhooked' from '…'>",
        "name it miles_on_step, if that was meant",
    ),
    "a product without its methods": (
        "scorers={hollow: {}}",
        "MILES-E005: scorer plugin 'hollow' (acme-hollow 1.0) built a object at place 'controller', which is no "
        "miles_core.contracts.environment.Scorer: score() is missing; close() is missing",
        "run `miles conformance scorer:hollow` and give what is missing",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_misfit_is_refused_in_one_message(miles, case):
    override, message, fix = CASES[case]
    said = miles("run", "toy.yaml", override)
    assert (said.code, said.out) == (2, "")
    assert re.sub(r"from '[^']*'", "from '…'", said.err) == f"{message}\nFix: {fix}\n"
    assert not Path("runs").exists()


def test_a_lying_capability(miles):
    """`miles conformance` says what is promised and not kept; a run that relies on it stops with the engine's name."""
    said = miles("conformance", "rollout:liar")
    assert said.code == 1 and said.out.count("FAILED") >= 2
    assert re.search(r"test_keep_ids +FAILED +keep_ids and keep_counts come where they are wanted; found: ", said.out)
    assert "\nrollout:liar: " in said.out and "passed, " in said.out
    said = miles("run", "toy.yaml", "rollout.use=liar", "rollout.top_p=0.9", "run.steps=2")
    assert said.code == 3 and said.err.startswith("MILES-E600: task 'toy:train:"), said.err
    assert (
        "engine 'liar' answered request " in said.err
        and "with no column keep_counts, which it promises to give\nFix: run `miles conformance rollout:" in said.err
    )


def test_misfits_harm_nobody_else(miles):
    assert miles("run", "toy.yaml", "run.steps=2").code == 0
    rows = [json.loads(line) for line in miles("plugins", "--json").out.splitlines()]
    states = {r["name"]: r["state"] for r in rows if r["distribution"].startswith(("acme-", "zed-"))}
    assert states == {
        **dict.fromkeys(("broken", "liar", "needs", "bare", "named", "unhooked", "hollow"), "fits"),
        "future": "API v2, core speaks v1",
        "pigeon": "name clash: acme-pigeon, zed-pigeon",
        "old": "needs miles-core<0.1,>=0.0.1",
    }


# --- plugins that raise where they should only describe or be built ---------------------------------------------------

MOODY = """
from dataclasses import dataclass, field
from miles_core import hookimpl
from miles_core.provider import Provider

@dataclass(frozen=True, kw_only=True)
class Plain:
    pass

@dataclass(frozen=True, kw_only=True)
class Picky:
    size: int = field(default=3, metadata={"help": "x"})

    def __post_init__(self):
        raise ValueError(f"size is {self.size}; it is never right")

@dataclass(frozen=True, kw_only=True)
class Odd:
    def __post_init__(self):
        raise RuntimeError("an odd class")

def fails(*given):
    raise RuntimeError("it has a bad day")

def lacks(config, context):
    import acme_nowhere

def moods(field):
    base = {"config": Plain, "build": fails, "field": field, "summary": "For a test."}
    return [
        Provider(**{**base, "name": "cannot-build"}),
        Provider(**{**base, "name": "lacks", "build": lacks}),
        Provider(**{**base, "name": "cannot-offer", "offers": fails}),
        Provider(**{**base, "name": "cannot-require", "requires": lambda config: 5}),
        Provider(**{**base, "name": "picky", "config": Picky}),
        Provider(**{**base, "name": "odd", "config": Odd}),
        Provider(**{**base, "name": "nothing", "build": lambda config, context: None}),
    ]
"""
HOOK = """
@hookimpl
def miles_{kind}():
    return moods("{field}")
"""
TOY_MODEL = "architecture: {model_type: toy}"
KINDS = {
    "stage": ("advantage", "algorithm.advantage={use: NAME}"),
    "term": ("loss", "algorithm.loss={use: NAME}"),
    "filter": ("", "algorithm.filters={NAME: {}}"),
    "env": ("", "env={use: NAME}"),
    "scorer": ("", "scorers={NAME: {}}"),
    "sync": ("", "sync={use: NAME}"),
    "rollout": ("", "rollout={use: NAME}"),
    "backend": ("", "backend={use: NAME}"),
    "tracker": ("", "trackers={NAME: {}}"),
    "extension": ("", "extensions={NAME: {}}"),
    "renderer": ("", "renderer=NAME"),
    "launcher": ("", "launcher={use: NAME}"),
    "algorithm": ("", "algorithm={use: NAME}"),
    "model": ("", f"model={{use: NAME, tokenizer: toy, {TOY_MODEL}}}"),
    "tokenizer": ("", f"model={{use: toy, tokenizer: NAME, {TOY_MODEL}}}"),
}
#: mood -> codes that are right, and what the message says. A launcher and an engine lack what others need (E006) first.
MOODS = {
    "cannot-build": (("E003", "E006"), " (acme-moody 1.0) cannot be built: RuntimeError: it has a bad day\nFix: see "),
    "lacks": (("E008", "E006"), "(acme-moody 1.0) cannot be built: No module named 'acme_nowhere'\nFix: pip install "),
    "cannot-offer": (("E005", "E003"), "RuntimeError: it has a bad day\nFix: "),
    "cannot-require": (("E005", "E003"), "\nFix: "),
    "picky": (("E103",), ": size is 3; it is never right\nFix: change the values under "),
    "odd": (("E005",), ": Odd raised RuntimeError: an odd class\nFix: "),
    "nothing": (("E005", "E006"), "\nFix: "),
}


@pytest.fixture(scope="session")
def moody(package, into, tmp_path_factory):
    site = tmp_path_factory.mktemp("moody")
    code = MOODY + "".join(HOOK.format(kind=kind, field=field) for kind, (field, _) in KINDS.items())
    into(site, [package("acme-moody", {k: dict.fromkeys(MOODS, "acme_moody") for k in KINDS}, {"acme_moody": code})])
    return site


@pytest.mark.parametrize("mood", MOODS)
def test_what_a_plugin_raises_is_never_an_internal_error(moody, here, mood):
    """Of every kind: one message that names the plugin or its section, before anything was created."""
    miles = here(moody)
    codes, words = MOODS[mood]
    for kind, (_, override) in KINDS.items():
        said = miles("run", "toy.yaml", override.replace("NAME", mood))
        code = said.err[6:10]
        assert said.code == 2 and said.err.startswith("MILES-E") and code in codes, (kind, said.err)
        assert code == "E006" or words in said.err, (kind, said.err)
        assert not Path("runs").exists(), kind
