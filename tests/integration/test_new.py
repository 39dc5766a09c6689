"""`miles new`: what it makes installs, lints, type-checks, and fails its suite only where code is to be written."""

import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from miles_core import API_VERSIONS, discovery
from miles_core.contracts.extension import EXTENSION_METHODS
from miles_core.testing import run_suite
from miles_core.testing.runner import SUITES

BIN = Path(sys.executable).parent
#: (kind, name, field): every kind, every field, and a resolver.
ALL = [
    *((kind, f"new-{kind}", "") for kind in API_VERSIONS if kind not in ("stage", "term")),
    *((kind, f"new-{kind[0]}-{field}", field) for kind, field in SUITES if field),
    ("model", ".newfile", ""),
]
LONG = "a-name-that-is-as-long-as-any"


def wheel(project: Path, site: Path) -> None:
    """Build with hatchling, as pip would, and unpack: all that installing a pure wheel is."""
    from hatchling.builders.wheel import WheelBuilder

    made = next(iter(WheelBuilder(str(project)).build(directory=str(site), versions=["standard"])))
    with zipfile.ZipFile(made) as archive:
        archive.extractall(site)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """All packages under `made/`, installed into `site/`."""
    from typer.testing import CliRunner

    from miles_core.cli.main import build

    folder, site = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("site")
    app = build("new")
    for kind, name, field in ALL:
        extra = ["--field", field] if field else []
        done = CliRunner().invoke(app, ["new", kind, name, "--dir", str(folder), "--prefix", "acme", *extra])
        assert done.exit_code == 0, done.output
        assert f"miles conformance {kind}:{name} " in done.output
    for project in folder.iterdir():
        wheel(project, site)
    for number, (kind, name, field) in enumerate(ALL):  # names as long as may be: lines still fit
        long, extra = folder / f"long/{number}", ["--field", field] if field else []
        long.mkdir(parents=True)
        name = f".{LONG}" if name.startswith(".") else LONG
        assert (
            CliRunner().invoke(app, ["new", kind, name, "--dir", str(long), "--prefix", "acme", *extra]).exit_code == 0
        )
    before = list(sys.path)
    sys.path.insert(0, str(site))
    discovery._scanned = None
    yield folder
    sys.path[:] = before
    for name in [n for n in sys.modules if n.startswith("acme_miles_")]:
        del sys.modules[name]
    discovery._scanned = None


@pytest.mark.parametrize(("kind", "name", "field"), ALL, ids=lambda value: value or "-")
def test_it_fails_only_where_code_is_missing(made, kind, name, field):
    assert discovery.scan().load(kind, name).provider.field == field
    results = run_suite(kind, name)
    describing = ("test_config", "test_provider", "test_product_keeps_its_protocol")
    assert all(r.passed for r in results if r.name in describing)
    failed = [r for r in results if not r.passed]
    assert failed and [r for r in failed if "not written yet: " not in r.detail] == []


@pytest.mark.slow
def test_every_package_lints_and_type_checks(made):
    for command in (["check", "--no-cache", "--quiet"], ["format", "--check", "--no-cache", "--quiet"]):
        done = subprocess.run([BIN / "ruff", *command, made], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
    sources = [p for p in made.glob("*/src/*") if p.is_dir()]
    environment = {**os.environ, "MYPYPATH": os.pathsep.join(str(p.parent) for p in sources)}
    packages = [part for p in sources for part in ("-p", p.name)]
    command = [BIN / "mypy", "--strict", "--config-file=", "--cache-dir", made / ".mypy_cache", *packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout


def test_comments_say_what_to_write(made):
    """Above each error stands a comment."""
    for file in made.glob("*/src/*/*.py"):
        lines = file.read_text().splitlines()
        for at, line in enumerate(lines):
            if "NotImplementedError" in line:
                assert lines[at - 1].strip().startswith("#"), f"{file.name}:{at + 1}"


def test_an_extension_is_offered_every_method(made):
    text = next(made.glob("*new-extension/src/*/extension.py")).read_text()
    assert all(f"def {method}(" in text for method in EXTENSION_METHODS)


#: kind -> what chooses the scaffold of that kind in the toys' run file.
CHOSEN = {
    "stage": "algorithm.advantage={use: new-s-advantage}",
    "env": "env={use: new-env}",
    "sync": "sync={use: new-sync}",
    "rollout": "rollout={use: new-rollout, max_new_tokens: 2}",
    "tracker": "trackers={new-tracker: {}}",
    "backend": "backend={use: new-backend}",
    "extension": "extensions={new-extension: {}}",
    "filter": "algorithm.filters={new-filter: {}}",
    "term": "algorithm.loss={use: new-t-loss}",
    "launcher": "launcher={use: new-launcher}",
    "renderer": "renderer=new-renderer",
    "algorithm": "algorithm={use: new-algorithm}",
    "tokenizer": "model={use: toy, tokenizer: new-tokenizer, architecture: {model_type: toy}}",
    "model": "model={use: new-model, tokenizer: toy, architecture: {model_type: toy}}",
}


@pytest.mark.parametrize("kind", CHOSEN)
def test_a_run_that_needs_what_is_not_written_says_so(made, miles, kind):
    """As any error of a plugin: one message about the part, never an internal error."""
    more = ["sync.use=toy-socket", "rollout.use=toy-socket"] if kind == "launcher" else []
    said = miles("run", "toy.yaml", "run.steps=1", CHOSEN[kind], *more)
    assert said.code in (2, 3) and "NotImplementedError: not written yet: " in said.last, said.err
    assert "internal error" not in said.err and "\nFix: " in said.last


# --- names -----------------------------------------------------------------------------------------------------------


def test_the_distribution_is_named_by_the_rule(miles, tmp_path):
    assert miles("new", "sync", "my-sync").code == 0
    assert Path("miles-sync-my-sync/src/miles_sync_my_sync/transport.py").is_file()
    assert miles("new", "sync", "my-sync", "--prefix", "acme", "--dir", str(tmp_path)).code == 0
    assert (tmp_path / "acme-miles-sync-my-sync/src/acme_miles_sync_my_sync/plugin.py").is_file()
    said = miles("new", "stage", "my_adv")
    assert said.code == 0 and "made miles-algo-my-adv: stage plugin 'my_adv', field advantage" in said.out
    assert '"my_adv" = "miles_algo_my_adv.plugin"' in Path("miles-algo-my-adv/pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("asked", "found", "fix"),
    [
        (["synk", "mine"], "'synk' is no kind; kinds are rollout, ", "write sync"),
        (["engine", "mine"], "'engine' is no kind", "write rollout"),
        (["advantage", "mine"], "'advantage' is no kind", "write miles new stage mine --field advantage"),
        (["loss", "mine"], "'loss' is no kind", "write miles new term mine --field loss"),
        (["sync", "MySync"], "the name is 'MySync'; it must be lower-case", "write my-sync"),
        (["sync", "9lives"], "the name is '9lives'", "write lives"),
        (["sync", "../up"], "the name is '../up'", "write up"),
        (["sync", "class"], "the name is 'class', a word of Python's own", "write something like my-class"),
        (["sync", "-"], "the name is '-'", "write something like my-plugin"),
        (["sync", "mine", "--prefix", "Acme Corp"], "--prefix is 'Acme Corp'", "write acme-corp"),
        (["sync", "x" * 60], "would be named miles-sync-xxx", "choose a shorter name or --prefix, by 51 characters"),
        (["stage", "mine", "--field", "advantag"], "stands in one of: advantage, penalty", "write --field advantage"),
        (["term", "mine", "--field", "whiten"], "a term stands in one of: loss, kl", "write --field loss"),
        (["sync", "mine", "--field", "loss"], "only stages and terms have a field", "leave --field out"),
        (["sync", "toy"], "miles-testing-toys 0.1.0 offers the sync plugin 'toy' already", "choose another name"),
        (["sync", "mine", "--dir", "nowhere"], "--dir is nowhere, which is no folder", "mkdir -p nowhere"),
    ],
)
def test_a_bad_request_is_one_message_and_leaves_nothing(miles, asked, found, fix):
    before = sorted(Path.cwd().rglob("*"))
    said = miles("new", *asked)
    assert said.code == 2 and said.out == ""
    assert said.err.startswith("MILES-E090: ") and found in said.err
    assert f"\nFix: {fix}" in said.err and said.err.count("\n") == 2
    assert sorted(Path.cwd().rglob("*")) == before


def test_what_is_there_is_never_touched(miles):
    Path("miles-sync-mine").mkdir()
    Path("miles-sync-mine/notes").write_text("x")
    said = miles("new", "sync", "mine")
    assert said.code == 2 and "miles-sync-mine exists" in said.err
    assert [p.name for p in Path("miles-sync-mine").iterdir()] == ["notes"]


def test_a_disk_that_fails_half_way_leaves_nothing(miles, monkeypatch):
    def full(self, *given, **more):
        if self.name == "plugin.py":
            raise OSError(28, "No space left on device")
        return written(self, *given, **more)

    written = Path.write_text
    monkeypatch.setattr(Path, "write_text", full)
    said = miles("new", "sync", "mine")
    assert said.code == 2 and "cannot be made: No space left on device" in said.err
    assert sorted(p.name for p in Path.cwd().iterdir()) == ["toy.yaml"]


# --- completed -------------------------------------------------------------------------------------------------------

#: (kind, field) -> what is written in place of each error: a few lines make the scaffold a plugin that passes.
WRITTEN = {
    ("stage", "advantage"): {
        "Stage.__call__": """
        from miles_core.numerics.host import group_advantages, to_units
        per_episode = group_advantages(batch.columns["reward"], batch.group_of)
        return StageOutput(columns={"advantages": to_units(batch, per_episode)})"""
    },
    ("stage", "penalty"): {
        "Stage.__call__": """
        import numpy as np
        tokens = np.bincount(batch.episode_of_unit, batch.columns["trainable"], batch.n_episodes)
        return StageOutput(columns={self.gives[0].name: -0.01 * tokens})"""
    },
    ("stage", "reward_kl"): {
        "Stage.__call__": """
        import numpy as np
        d = batch.columns["proximal_logprobs"] - batch.columns["reference.logprobs"]
        return StageOutput(columns={self.gives[0].name: np.where(batch.columns["trainable"], d, 0).astype("f4")})"""
    },
    ("stage", "whiten"): {
        "Stage.__call__": """
        from miles_core.numerics.host import whiten
        white = whiten(batch.columns["advantages"], batch.columns["trainable"])
        return StageOutput(columns={"advantages": white.astype("f4")})"""
    },
    ("stage", "distill"): {
        "Stage.__call__": """
        import numpy as np
        d = batch.columns["proximal_logprobs"] - batch.columns["teacher.logprobs"]
        advantages = batch.columns["advantages"] - np.where(batch.columns["trainable"], d, 0)
        return StageOutput(columns={"advantages": advantages.astype("f4")})"""
    },
    ("stage", "correction"): {
        "Stage.__call__": """
        import numpy as np
        d = batch.columns["proximal_logprobs"] - batch.columns["behaviour_logprobs"]
        w = np.exp(np.minimum(np.where(batch.columns["trainable"], d, 0), 0.7))
        return StageOutput(columns={"correction_weight": w.astype("f4")})"""
    },
    ("term", "loss"): {
        "Term.__call__": """
        return TermOutput(value=-view["advantages"] * view.out(LOGPROBS))"""
    },
    ("term", "kl"): {
        "Term.__call__": """
        d = view.out(LOGPROBS) - view["reference.logprobs"]
        return TermOutput(value=0.5 * d * d)"""
    },
    ("term", "entropy"): {
        "Term.__call__": """
        return TermOutput(value=-view.out(ENTROPY))"""
    },
    ("term", "value"): {
        "Term.__call__": """
        error = view.out(VALUES) - view["returns"]
        return TermOutput(value=error * error)"""
    },
    ("term", "distill"): {
        "Term.__call__": """
        d = view.out(LOGPROBS) - view["teacher.logprobs"]
        return TermOutput(value=0.5 * d * d)"""
    },
    ("filter", ""): {
        "Filter.__call__": """
        return None if len({e.reward for e in group.episodes}) > 1 else "equal"
        """
    },
    ("algorithm", ""): {
        "the tree of preset done-algorithm": """
        return {"advantage": {"use": "toy"}, "loss": {"use": "toy"}}"""
    },
    ("scorer", ""): {
        "Scorer.score": """
        import numpy as np
        from miles_core.errors import CapabilityError
        for column in want:
            if column != "teacher.logprobs":
                raise CapabilityError(f"no column {column}", fix="ask for teacher.logprobs")
        return {"teacher.logprobs": [np.full(t.length, -1.0, np.float32) for t in trajectories]}"""
    },
    ("env", ""): {
        "Tasks.task": """
        index = 2 * (position % 500) + (self._split == "eval")
        return Task(id=f"{self._env}:{self._split}:{index}", prompt=f"{index}=", answer=str(index))""",
        "Environment.score": """
        return Score(reward=float(context.text == task.answer), info={"answer": context.text[:20]})""",
    },
    ("tracker", ""): {
        f"Tracker.{method}": """
        return"""
        for method in ("start", "metrics", "event")
    },
}


def written(project: Path, code: dict[str, str]) -> None:
    """Put `code` where the errors are raised."""
    for file in project.glob("src/*/*.py"):
        lines = file.read_text().splitlines()
        for what, block in code.items():
            for at, line in enumerate(lines):
                if f'"not written yet: {what}"' in line:
                    spaces = line[: len(line) - len(line.lstrip())]
                    lines[at] = textwrap.indent(textwrap.dedent(block).strip(), spaces)
        file.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(("kind", "field"), WRITTEN, ids=lambda value: value or "-")
def test_a_few_lines_complete_it(miles, tmp_path, monkeypatch, kind, field):
    name = f"done-{field or kind}"
    assert miles("new", kind, name, *(["--field", field] if field else []), "--prefix", f"done-{kind}").code == 0
    project = next(Path.cwd().glob("done-*"))
    written(project, WRITTEN[kind, field])
    assert "NotImplementedError" not in "".join(p.read_text() for p in project.glob("src/*/*.py"))
    site = tmp_path / "site"
    site.mkdir()
    wheel(project, site)
    monkeypatch.syspath_prepend(str(site))
    discovery._scanned = None
    said = miles("conformance", f"{kind}:{name}")
    assert said.code == 0, said.out + said.err


@pytest.mark.slow
def test_a_generated_package_installs_with_pip_and_tests_itself(command, tmp_path):
    """As its README says, in an environment of its own that sees ours."""
    assert command("new", "filter", "mine").code == 0
    project = Path("miles-algo-mine")

    def call(*arguments: object) -> subprocess.CompletedProcess:
        return subprocess.run([str(a) for a in arguments], cwd=project, capture_output=True, text=True, timeout=300)

    assert call(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env").returncode == 0
    python = tmp_path / "env/bin/python"
    packages = tmp_path / "env/lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (packages / "ours.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")) + "\n")
    ours = Path(discovery.__file__).parents[1]
    (packages / "core.pth").write_text(f"{ours}\n")
    pip = ["-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "-e", "."]
    done = call(python, *pip)
    assert done.returncode == 0, done.stdout + done.stderr
    for tool in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]):
        done = call(python, "-m", *tool)
        assert done.returncode == 0, done.stdout + done.stderr
    done = call(python, "-m", "pytest", "-q")
    assert done.returncode == 1 and "2 failed, 3 passed" in done.stdout, done.stdout
    written(project, WRITTEN["filter", ""])
    done = call(python, "-m", "pytest", "-q")
    assert done.returncode == 0, done.stdout
