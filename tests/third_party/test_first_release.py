"""A distribution as it was written against the first release still loads, conforms and runs. It is never edited."""

import hashlib
import shutil
from pathlib import Path

import pytest

from miles_core.journal import read

FIRST = Path(__file__).parent / "first_release"
DIGEST = "8c74ad68f64fb06709f54532cfd1ba87e65a6feeb7faae9b8d273cbb5f1fdc8c"
PLUGINS = (
    *("stage:first", "stage:first-penalty", "term:first", "filter:first", "algorithm:first", "env:first"),
    *("scorer:first", "sync:first", "tracker:first", "extension:first", "renderer:first"),
    *("rollout:first", "tokenizer:first", "model:.first"),
)


def test_it_is_what_it_was():
    """Do not repair it here: a core that it does not fit breaks what its API major promised."""
    files = sorted(p for p in FIRST.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    whole = hashlib.sha256()
    for path in files:
        whole.update(f"{path.relative_to(FIRST).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    assert whole.hexdigest() == DIGEST


@pytest.fixture(scope="module")
def site(tmp_path_factory, wheel, into):
    folder = tmp_path_factory.mktemp("site")
    into(folder, [wheel(FIRST)])
    return folder


@pytest.mark.parametrize("plugin", PLUGINS)
def test_it_still_conforms(here, site, plugin):
    said = here(site)("conformance", plugin)
    assert said.code == 0, said.out + said.err


def test_it_still_runs(here, site):
    chosen = (
        "algorithm={use: first}",
        "env={use: first}",
        "sync={use: first}",
        "renderer=first",
        "extensions={first: {}}",
        "rollout={use: first, max_new_tokens: 2}",
        "model={use: toy, tokenizer: first, architecture: {model_type: toy}}",
    )
    miles = here(site)
    said = miles("run", "toy.yaml", *chosen, "trackers={first: {}}", "run.steps=4", "run.checkpoint_every=2")
    assert said.code == 0, said.err
    last = Path("runs/toy/first.txt").read_text().splitlines()[-1]
    told = dict(part.split("=") for part in last.split()[2:])
    assert (
        last.startswith("end finished") and told["start"] == "1" and told["step"] == "4" and told["checkpoint"] == "2"
    )
    assert int(told["weights"]) == 5 and int(told["requests"]) > 0 and int(told["micro"]) > 0
    said = miles("run", "runs/toy", "--resume", "run.steps=5")
    assert said.code == 0, said.err


def test_its_scorer_is_called_as_it_was_written(here, site):
    """`tasks` came later: a scorer without that parameter is called without it."""
    said = here(site)(
        *("run", "toy.yaml", "run.steps=2", "scorers={first: {}}", "roles={reference: {scorer: first}}"),
        "algorithm.reward_kl={use: toy-reward-kl}",
        "algorithm.advantage={use: toy-kl-advantage}",
    )
    assert said.code == 0, said.err


def test_a_run_directory_of_the_first_release_is_read(here, site, tmp_path):
    """Curves, samples, journal and weights of a run of toys that the first release made."""
    miles = here(site)
    (tmp_path / "runs").mkdir()
    shutil.copytree(FIRST.with_name("first_run") / "first", tmp_path / "runs/first")
    said = miles("show", "runs/first")
    assert said.code == 0 and "rollout/reward" in said.out, said.err
    kinds = [frame.kind for frame in read(tmp_path / "runs/first/journal")]
    assert kinds[0] == "segment" and kinds.count("trained") == 3 and kinds.count("group") == 6
    assert miles("export", "runs/first", "folder").code == 0 and Path("folder/config.json").is_file()
    assert "every promise held" in miles("audit", "runs/first").out
    source = ("model.source=runs/first", "model.architecture=null")
    said = miles("run", "toy.yaml", *source, "run.steps=1", "run.name=next")
    assert said.code == 0, said.err
    said = miles("run", "runs/first", "--resume", "run.steps=4")
    assert said.code == 2 and said.err.startswith("MILES-E007: "), said.err  # other files than it was locked to
