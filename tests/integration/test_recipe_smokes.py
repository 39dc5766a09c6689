"""Every recipe of recipes/all.yaml, a few steps of it; and the page of their results says what was measured."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import yaml

from miles_core.config.compose import load
from miles_core.discovery import scan

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("recipes_all", ROOT / "recipes/all.py")
recipes_all = importlib.util.module_from_spec(_SPEC)
sys.modules["recipes_all"] = recipes_all
_SPEC.loader.exec_module(recipes_all)
RECIPES = recipes_all.recipes()
RESULTS = json.loads((recipes_all.ASSETS / "results.json").read_text())
FEW = ("run.steps=2", "eval.every=null")
SMALL = ("env.digits=1", "schedule.groups_per_step=4", "schedule.group_size=8")
#: Enough of the warm-up that some answers are right and some are wrong.
WARM = ("run.steps=60", "schedule.groups_per_step=32", "env.digits=1")


@pytest.mark.parametrize("name", RECIPES)
def test_the_chain_binds(name):
    """Every run file is valid with what it is given from the runs before it."""
    for link in RECIPES[name].chain:
        file, *overrides = recipes_all.arguments(link, Path("runs"), 0)
        run_file = load(Path(file), overrides, catalogue=scan())
        assert run_file.run.dir == f"runs/{link.name}-seed0"
    before = [link.file for link in RECIPES[name].chain]
    assert all(source in before[:i] for i, link in enumerate(RECIPES[name].chain) for source in link.sources.values())


def test_the_page_is_that_of_the_results():
    assert recipes_all.PAGE.read_text() == recipes_all.page(RECIPES, RESULTS)
    assert set(RESULTS) <= set(RECIPES)
    for name in RESULTS:
        assert (recipes_all.ASSETS / f"{name}.svg").stat().st_size < 60_000


@pytest.mark.parametrize("name", RESULTS)
def test_what_was_measured_reached_its_goal(name):
    assert set(RESULTS[name]) >= {"0", "1", "2"}
    assert not [wrong for found in RESULTS[name].values() for wrong in recipes_all.missed(RECIPES[name], found)]


def test_a_missed_goal_is_said():
    recipe = recipes_all.Recipe("x", (), "", {"m": {"start": [0.3, 0.55], "goal": 0.85}, "k": {"falls_to": 0.5}}, ())
    good = {"m": [[0, 0.4], [9, 0.9]], "k": [[0, 2.0], [9, 0.9]]}
    assert not recipes_all.missed(recipe, good)
    assert "below 0.85" in recipes_all.missed(recipe, {**good, "m": [[0, 0.4], [9, 0.8]]})[0]
    assert "starts at 0.600" in recipes_all.missed(recipe, {**good, "m": [[0, 0.6], [9, 0.9]]})[0]
    assert "falls from 2.0000 to 1.1000" in recipes_all.missed(recipe, {**good, "k": [[0, 2.0], [9, 1.1]]})[0]
    assert "| **no** |" in recipes_all.page({"x": recipe}, {"x": {"0": {**good, "m": [[0, 0.4], [9, 0.8]]}}})


FAKE = """#!{python}
import json, pathlib, sys
run = pathlib.Path(next(a for a in sys.argv if a.startswith("run.dir="))[8:])
with open(run.parent / "calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
run.mkdir(exist_ok=True)
if "--resume" not in sys.argv:
    sys.exit(130)
(run / "events.jsonl").write_text(json.dumps({{"type": "run_end", "status": "finished"}}))
"""


def test_an_interrupted_run_is_resumed_and_a_finished_one_left_alone(tmp_path, monkeypatch):
    miles = tmp_path / "miles"
    miles.write_text(FAKE.format(python=sys.executable))
    miles.chmod(0o755)
    monkeypatch.setattr(recipes_all, "MILES", str(miles))
    link = recipes_all.Link("dapo.yaml", {"model.source": "warmup.yaml"})
    with pytest.raises(RuntimeError, match=r"ended with 130; see .*dapo-seed1\.log"):
        recipes_all.run_link(link, tmp_path, 1)
    recipes_all.run_link(link, tmp_path, 1)
    recipes_all.run_link(link, tmp_path, 1)
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert second == f"{first} --resume"
    assert first.endswith(f"run.dir={tmp_path}/dapo-seed1 run.seed=1 model.source={tmp_path}/warmup-seed1")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Runs a link once, and says where."""
    import asyncio
    import threading

    from miles_core.driver import execute

    runs = tmp_path_factory.mktemp("runs")

    def run(link, overrides=()):
        where = recipes_all.run_dir(runs, link.file, 0)
        if not where.exists():
            file, *given = recipes_all.arguments(link, runs, 0)
            run_file = load(Path(file), [*given, "trackers={jsonl: {}}", *overrides], catalogue=scan())
            result = asyncio.run(execute(run_file, scan(), threading.Event()))
            assert result.status == "finished"
        return where

    return run


def small(link):
    """What makes a run of this file small: one digit, where its environment asks for digits."""
    env = yaml.safe_load((ROOT / "recipes" / link.file).read_text())["env"]
    return [option for option in SMALL if "digits" in env or "digits" not in option]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_few_steps(name, ran):
    *before, last = RECIPES[name].chain
    for link in before:
        ran(link, WARM if link.name == "warmup" else (*FEW, *small(link)))
    where = ran(last, (*FEW, *small(last), *RECIPES[name].smoke))
    lines = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"]["value"] for line in lines if "train/loss" in line]
    assert len(losses) == 2
