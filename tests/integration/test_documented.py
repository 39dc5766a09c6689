"""Pages that promise to work are run from their own text."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from miles_core.config.compose import load

ROOT = Path(__file__).parents[2]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


#: page, name of the part, what `miles conformance` calls it, lines to type, command line of a run
PACKAGES = [
    ("write-an-advantage", "median", "stage:median", None, ["algorithm.advantage={use: median}"]),
    ("write-a-loss", "mirror", "term:mirror", 40, ["algorithm.loss={use: mirror}", "schedule.updates_per_step=2"]),
    ("write-a-correction", "soft", "stage:soft", 25, ["algorithm.corrections={soft: {}}", "schedule.max_staleness=1"]),
]


@pytest.mark.parametrize(("page", "name", "part", "lines", "overrides"), PACKAGES, ids=[p[0] for p in PACKAGES])
def test_the_plugin_of_the_how_to_installs_conforms_and_runs(tmp_path, toy_text, page, name, part, lines, overrides):
    page = f"docs/how-to/{page}.md"
    package = tmp_path / f"acme-miles-{name}"
    (package / f"acme_miles_{name}").mkdir(parents=True)
    (package / "pyproject.toml").write_text(blocks(page, "toml")[0])
    module, tests = blocks(page, "python")[:2]
    typed = [line for line in module.splitlines() if line.strip()]
    assert lines is None or len(typed) <= lines
    (package / f"acme_miles_{name}/__init__.py").write_text(module)
    (tmp_path / "test_it.py").write_text(tests)
    site = tmp_path / "site"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}

    def call(*command: object) -> None:
        done = subprocess.run(
            [str(c) for c in command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr

    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--target", site]
    call(*pip, package)
    miles = Path(sys.executable).with_name("miles")
    call(miles, "conformance", part)
    (tmp_path / "toy.yaml").write_text(toy_text)
    call(miles, "run", "toy.yaml", "run.steps=3", *overrides)
    call(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path / "test_it.py")


def test_the_documented_policies_bind(tmp_path):
    text = next(b for b in blocks("docs/how-to/several.md", "yaml") if "policies:" in b)
    (tmp_path / "two.yaml").write_text(text)
    assert list(load(tmp_path / "two.yaml").policies) == ["first", "second"]


def test_the_documented_preferences_and_critics_bind(tmp_path):
    for number, text in enumerate(blocks("docs/how-to/preferences.md", "yaml")):
        (tmp_path / f"{number}.yaml").write_text(text)
    assert [load(tmp_path / f"{n}.yaml").policies["main"].algorithm.preset for n in range(2)] == ["sft", "dpo"]
    own, shared = blocks("docs/how-to/critic.md", "yaml")
    roles = re.compile(r"^roles:\n(  .*\n)+", re.MULTILINE)
    for text, update in ((own, "trained"), (roles.sub(shared, own), "shares")):
        (tmp_path / "ppo.yaml").write_text(text)
        assert load(tmp_path / "ppo.yaml").policies["main"].roles["critic"].update == update


def test_the_documented_adapters_bind(tmp_path):
    whole, several = blocks("docs/how-to/adapters.md", "yaml")
    (tmp_path / "lora.yaml").write_text(whole)
    run = load(tmp_path / "lora.yaml")
    assert run.policies["main"].roles["reference"].update == "adapter_off"
    (tmp_path / "both.yaml").write_text(re.sub(r"^extensions:\n(  .*\n)+", several, whole, flags=re.MULTILINE))
    assert [part.options.rank for part in load(tmp_path / "both.yaml").extensions.values()] == [32, 4]


def test_the_documented_teachers_bind(tmp_path):
    whole, mixed, beside, held, served = blocks("docs/how-to/distil.md", "yaml")
    algorithm = re.compile(r"^algorithm:.*\n", re.MULTILINE)
    roles = re.compile(r"^roles:\n(  .*\n)+", re.MULTILINE)
    texts = [whole, algorithm.sub(mixed, whole), algorithm.sub(beside, whole)]
    texts.append(re.sub(r"^rollout:.*\n", "", roles.sub("", algorithm.sub("", whole)), flags=re.MULTILINE) + held)
    texts.append(roles.sub("", algorithm.sub("", whole)) + served)
    for text, preset in zip(texts, ("opd_topk", "opd", "grpo", "opd_topk", "opd_topk"), strict=True):
        (tmp_path / "distil.yaml").write_text(text)
        run = load(tmp_path / "distil.yaml")
        found = run.policies["main"].algorithm
        assert (found.preset, found.one("distill").use) == (preset, "opd" if preset == "opd" else "topk_kl")
    assert run.policies["main"].roles["teacher"].scorer == "judges"


@pytest.mark.parametrize("page", ["README.md", "docs/tutorials/first-run.md"])
def test_the_documented_run_file_is_the_recipe(tmp_path, page):
    (tmp_path / "shown.yaml").write_text(blocks(page, "yaml")[0])
    shown, recipe = load(tmp_path / "shown.yaml"), load(ROOT / "recipes/quickstart.yaml")
    assert shown.policies == recipe.policies and shown.engines == recipe.engines and shown.eval == recipe.eval


def test_the_documented_reward_is_composed(tmp_path, monkeypatch, toy_text, toy):
    page = "docs/how-to/compose-a-reward.md"
    (tmp_path / "judge.py").write_text(blocks(page, "python")[0])
    shown = blocks(page, "yaml")[0].replace("use: grpo", "use: toy")
    ran = toy("run.steps=3", text=toy_text.replace("algorithm: {use: toy}\n", shown))
    for name in re.findall(r"`(rollout/reward\S*|train/\S+)`", (ROOT / page).read_text()):
        assert len(ran.curve(name)) == 3, name


def test_documented_install_lines_exist():
    for line in re.findall(r"-e (plugins/\S+)", (ROOT / "docs/tutorials/own-data.md").read_text()):
        assert tomllib.loads((ROOT / line / "pyproject.toml").read_text())["project"]["name"] == "miles-env-jsonl"


def test_the_documented_ways_to_read_rollouts(toy, miles):
    toy("run.steps=3", "eval={every: 1, tasks: 4}")
    commands = [line.split("  ")[0] for line in blocks("docs/how-to/read-rollouts.md", "sh")[0].splitlines()]
    assert len(commands) == 7
    for command in commands:
        said = miles(*command.replace("RUN", "runs/toy").replace("train:0#", ":train:").split()[1:])
        assert said.code == 0 and "toy:" in said.out, (command, said)
