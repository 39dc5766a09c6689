"""The commands: what they print, what they import, and how they exit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_core import discovery
from miles_core.cli import main as entry_point
from miles_core.cli import probe, results
from miles_core.cli.main import COMMANDS, build
from miles_core.cli.probe import Finding, look
from miles_core.cli.table import table
from miles_core.discovery import Catalogue

FILE = """
model: {use: causal-lm, source: ./tiny}
env: arithmetic
rollout: {use: toy}
backend: sgd
sync: bucketed
algorithm: grpo
"""
HEAVY = {"torch", "transformers", "numpy", "omegaconf", "yaml", "jinja2", "tokenizers"}


@pytest.fixture
def miles(plugins, tmp_path, monkeypatch, capsys):
    """The command in this process, seeing the test's own plugins only."""
    plugins.parts()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "run.yaml").write_text(FILE)

    def run(*arguments):
        monkeypatch.setattr(discovery, "_scanned", plugins.catalogue())
        with pytest.raises(SystemExit) as stop:
            entry_point(arguments)
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    run.plugins = plugins
    return run


def shell(plugins, *arguments, code=None, cwd=None):
    """The command in a process of its own; with `code`, that script after it instead of the exit."""
    script = (
        "from miles_core.cli import main\ntry:\n    main({!r})\nexcept SystemExit as stop:\n    status = stop.code\n"
    )
    script = script.format(list(arguments)) + (code or "raise SystemExit(status)")
    environment = {**os.environ, "PYTHONPATH": str(plugins.folder)}
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, env=environment, cwd=cwd
    )


SHOW_MODULES = "import sys; print('modules:', *sorted({m.split('.')[0] for m in sys.modules}))"


# --- plugins ---------------------------------------------------------------------------------------------------------


def test_plugins_lists_metadata_and_state(miles):
    miles.plugins.add("acme-old", major=2, names=("old",), summary="An old one " * 12)
    code, out, _ = miles("plugins", "--kind", "sync")
    plugins, distributions = out.split("\n\n")
    rows = [line.split(maxsplit=6) for line in plugins.splitlines()]
    assert code == 0 and rows[0] == ["kind", "name", "distribution", "version", "api", "conformance", "state"]
    assert rows[2:] == [
        ["sync", "bucketed", "acme-parts", "2.0", "v1", "-", "fits"],
        ["sync", "old", "acme-old", "1.0", "v2", "-", "API v2, core speaks v1"],
        ["sync", "p2p", "acme-parts", "2.0", "v1", "-", "fits"],
    ]
    assert distributions.startswith("acme-old 1.0: An old one An old one")
    assert max(map(len, out.splitlines())) <= 120 and distributions.splitlines()[-1] == "acme-parts 2.0:"
    _, out, _ = miles("plugins", "--json", "--kind", "sync")
    assert [json.loads(line)["state"] for line in out.splitlines()] == ["fits", "API v2, core speaks v1", "fits"]
    code, _, err = miles("plugins", "--kind", "teleport")
    assert code == 2 and "'teleport' is no kind of plugin\nFix: use one of: " in err


def test_listing_plugins_is_light(plugins):
    for i in range(20):
        plugins.add(f"acme-many-{i}", names=(f"many{i}",), code="import torch")
    done = shell(plugins, "plugins", code=SHOW_MODULES)
    *listed, modules = done.stdout.splitlines()
    assert sum(line.startswith("sync") and "acme-many" in line for line in listed) == 20, done.stderr
    loaded = set(modules.split())
    assert not loaded & HEAVY
    assert not {m for m in loaded if m.startswith(("acme", "miles_")) and m != "miles_core"}


def test_importing_the_core_is_light(plugins):
    script = "import miles_core, miles_core.provider, miles_core.hookspecs, miles_core.errors, miles_core.discovery\n"
    done = subprocess.run([sys.executable, "-c", script + SHOW_MODULES], capture_output=True, text=True, timeout=120)
    assert not set(done.stdout.split()) & HEAVY


@pytest.mark.parametrize("arguments", [("config", "schema"), ("config", "schema", "sync:bucketed"), ("config", "show")])
def test_config_commands_import_nothing_heavier_than_yaml(plugins, tmp_path, arguments):
    plugins.parts()
    (tmp_path / "run.yaml").write_text(FILE)
    files = ("run.yaml",) if arguments[1] == "show" else ()
    done = shell(plugins, *arguments, *files, code=SHOW_MODULES, cwd=tmp_path)
    assert not set(done.stdout.splitlines()[-1].split()) & (HEAVY - {"yaml"}), done.stderr


def test_checking_plugins_loads_each_in_a_process_of_its_own(miles):
    miles.plugins.add("acme-broken", names=("broken",), code="1 / 0")
    miles.plugins.add("acme-exits", names=("exits",), code="import os; os._exit(7)")
    code, out, _ = miles("plugins", "--check", "--kind", "sync")
    states = {line.split()[1]: line for line in out.partition("\n\n")[0].splitlines()[2:]}
    assert code == 1 and states["p2p"].endswith(" loads")
    assert "broken: sync plugin 'broken' (acme-broken 1.0) cannot be imported: ZeroDivisionError" in states["broken"]
    assert "broken: its process ended with 7" in states["exits"]
    assert "acme_broken" not in sys.modules


def test_conformance_results_belong_to_a_version_and_its_files(miles):
    catalogue = miles.plugins.catalogue()
    entry = catalogue.find("sync", "bucketed")
    assert results.last(entry, catalogue, results.recorded()) == "-"
    results.record(entry, catalogue, 12, 0)
    assert results.last(entry, catalogue, results.recorded()) == "12 passed"
    results.record(catalogue.find("sync", "p2p"), catalogue, 11, 1)
    assert "11 passed, 1 failed" in miles("plugins")[1]
    rows = [json.loads(line) for line in miles("plugins", "--json")[1].splitlines()]
    kept = {row["name"]: json.loads(Path(row["results"]).read_text()) for row in rows if row["results"]}
    assert set(kept) == {"bucketed", "p2p"} and kept["p2p"]["plugins"]["sync:p2p"]["failed"] == 1
    assert (kept["p2p"]["v"], kept["p2p"]["distribution"]) == (1, entry.distribution)
    assert results.last(entry, catalogue, results.recorded()) == "12 passed"
    module = Path(miles.plugins.folder / f"{miles.plugins.modules[0]}.py")
    module.write_text(module.read_text() + "\n# changed\n")
    assert results.last(entry, catalogue, results.recorded()) == "-"


# --- config ----------------------------------------------------------------------------------------------------------


def test_config_show_prints_values_with_origins(miles):
    code, out, _ = miles("config", "show", "run.yaml", "algorithm.kl.coef=0.1", "sync.use=p2p")
    lines = out.splitlines()
    assert code == 0
    for line in (
        '  use: "p2p"  # command line',
        "    coef: 0.1  # command line",
        "    lo: 0.2  # preset grpo",
        '  source: "./tiny"  # file',
        "  groups_per_step: 16  # default",
    ):
        assert line in lines


def test_config_show_explains_the_objective_with_every_constant(miles):
    code, out, _ = miles("config", "show", "run.yaml", "--explain", "algorithm.kl.coef=0.1")
    lines = out.splitlines()
    assert code == 0
    for line in (
        "policy main: grpo",
        "    (R − mean of the group) / (std + eps)",  # what the provider explains
        "    Paper: one.",
        "  minimises 1 · agg(clip) + 0.1 · agg(kl)",
        "  advantage: group (stage of acme-parts 2.0)",
        "    algorithm.loss.lo = 0.2  # preset grpo",
        "    algorithm.kl.coef = 0.1  # command line",
        "  entropy: entropy (term of acme-parts 2.0, off: its coefficient is 0)",
        "  agg: mean over the episodes of one optimizer update of each one's token mean",
        '    algorithm.aggregation = "episode_mean"  # preset grpo',
        "  role actor: from model.source, trained",
    ):
        assert line in lines


@pytest.mark.parametrize(
    ("algorithm", "changed"),
    [
        ("{use: grpo}", None),
        ("{use: dr_grpo}", None),  # which changes grpo; as it stands it is what it says
        ("{use: cispo, hi: 5.0}", None),  # an option of the preset's own
        ("{use: grpo, advantage: {use: group, scale: std, eps: 1.0e-6}, loss: clip, kl: {coef: 0}, filters: {}}", None),
        ("{use: grpo, advantage: {scale: std}, aggregation: token_mean}", "algorithm.aggregation"),
        ("{use: grpo, advantage: {use: batch}, kl: null}", "algorithm.advantage, algorithm.kl"),
        ("{use: grpo, loss: {hi: 0.3}, corrections: {tis: {}}}", "algorithm.corrections, algorithm.loss.hi"),
        ("{use: cispo, hi: 5.0, loss: {hi: 0.3}}", "algorithm.loss.hi"),
        (
            "{use: lossless, loss: {use: clip, lo: 0.1}, aggregation: token_mean}",
            "algorithm.aggregation, algorithm.loss",
        ),
    ],
)
def test_an_explained_preset_says_where_it_was_changed(miles, algorithm, changed):
    preset = """
        from dataclasses import dataclass
        from miles_core import hookimpl
        from miles_core.provider import Provider

        @dataclass
        class Config:
            pass

        @hookimpl
        def miles_algorithm():
            return Provider(name="lossless", config=Config, explain="As it stands.", build=lambda config, context: {
                "advantage": "group", "aggregation": "episode_mean"})
    """
    miles.plugins.add("acme-lossless", kind="algorithm", names=("lossless",), code=preset)
    Path("run.yaml").write_text(FILE.replace("algorithm: grpo", f"algorithm: {algorithm}"))
    code, out, err = miles("config", "show", "run.yaml", "--explain")
    name = algorithm.split()[1].strip(",}")
    lines = out.splitlines()
    assert code == 0 and lines[0] == f"policy main: {name}", err
    if changed is None:
        assert "changed" not in out
    elif name == "lossless":
        assert lines[1] == f"  preset {name}, completed or changed in: {changed}"
        assert lines[2:4] == ["  by itself it is:", "    As it stands."]
    else:
        assert lines[1:3] == [f"  preset {name}, changed in: {changed}", "  by itself it is:"]


def test_an_explained_preset_of_one_of_several_policies(miles):
    Path("many.yaml").write_text(
        """
rollout: {use: toy}
backend: sgd
sync: bucketed
policies:
  alice: {model: {use: causal-lm, source: a}, env: arithmetic, algorithm: {use: grpo, aggregation: token_mean}}
  bob: {model: {use: causal-lm, source: b}, env: jsonl, algorithm: grpo}
"""
    )
    code, out, err = miles("config", "show", "many.yaml", "policies.bob.algorithm.kl.coef=0.1", "--explain")
    assert code == 0, err
    assert [line for line in out.splitlines() if "changed in" in line] == [
        "  preset grpo, changed in: policies.alice.algorithm.aggregation",
        "  preset grpo, changed in: policies.bob.algorithm.kl.coef",
    ]


def test_config_schema_of_a_plugin(miles):
    code, out, _ = miles("config", "schema", "sync:bucketed")
    assert code == 0
    assert out.splitlines()[0] == "sync:bucketed (acme-parts 2.0)"
    assert "bucket_mib  int   256      MiB   from 1 to 4096  size of a bucket" in out
    assert "keys that core owns in this section" in out and "one of: probe, native, received, live" in out
    _, out, _ = miles("config", "schema", "algorithm:cispo", "--json")
    assert json.loads(out.splitlines()[0]) == {
        **{"section": "algorithm:cispo (acme-parts 2.0)", "field": "hi", "type": "float", "default": "(required)"},
        **{"unit": "", "bounds": "at least 0", "help": "upper bound"},
    }
    code, out, _ = miles("config", "schema", "algorithm:grpo")
    assert code == 0 and "short for, under `algorithm`" in out and "  loss: " in out
    code, out, _ = miles("config", "schema", "algorithm:cispo")
    assert code == 0 and "short for" not in out  # it stands for nothing without its option
    _, out, _ = miles("config", "schema", "term:kl")
    assert out.splitlines()[0] == "term:kl (acme-parts 2.0, field kl)" and "coef" in out


def test_config_schema_of_core(miles):
    _, out, _ = miles("config", "schema")
    for section in ("run", "eval", "schedule", "optimizer", "algorithm", "roles"):
        assert f"\n{section}\n" in f"\n{out}"
    _, out, _ = miles("config", "schema", "roles")
    assert "optimizer.lr" in out and "peak learning rate" in out
    code, _, err = miles("config", "schema", "schedul")
    assert code == 2 and err.endswith("Fix: write schedule\n")
    code, _, err = miles("config", "schema", "teleport:x")
    assert code == 2 and "'teleport' is no kind of plugin" in err


def test_every_field_of_core_has_help_and_bounds_where_it_is_a_number():
    from miles_core.cli.config import fields
    from miles_core.config.schema import SECTIONS

    for section, cls in SECTIONS.items():
        for row in fields(cls):
            assert row["help"], f"{section}.{row['field']}"


# --- plan and doctor -------------------------------------------------------------------------------------------------


def test_plan_says_what_is_refused_and_creates_nothing(miles):
    before = sorted(Path().rglob("*"))
    code, out, _ = miles("plan", "run.yaml", "schedule.group_size=1", "rollout.use=blind", "schedule.max_staleness=1")
    assert code == 2
    assert "refused: 3" in out
    for text in (
        "MILES-E104: schedule.max_staleness is 1 (asynchronous)",
        "MILES-E104: schedule.group_size is 1, and algorithm.advantage (group) compares",
        "MILES-E006: sync 'bucketed' needs 'weights.tensors'",
    ):
        assert text in out
    assert sorted(Path().rglob("*")) == before
    assert not (Path("runs")).exists()


def test_plan_prints_parts_capabilities_placement_and_promises(miles):
    code, out, _ = miles("plan", "run.yaml", "rollout.count=2")
    assert code == 2 and "MILES-E110: model.source './tiny' does not exist" in out  # there is no model here
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for line in (
        "algorithm.kl term kl (coefficient 0: not built) acme-parts 2.0",
        "sync 'bucketed' weights.tensors rollout 'toy' yes",
        "engine toy: 2 of toy",
        "yes bit-equal repeats and resumes on one machine",
        "yes on-policy ratio is 1 the same temperature and kept tokens in training as in sampling",
    ):
        assert line in lines, out


def test_plan_of_several_policies_and_engines_says_where_each_part_stands(miles):
    Path("many.yaml").write_text(
        """
engines: {main: {use: toy, count: 2}, judge: {use: plain}}
backend: sgd
sync: bucketed
policies:
  alice: {model: {use: causal-lm, source: a}, envs: {math: {use: arithmetic}}, algorithm: grpo}
  bob: {model: {use: causal-lm, source: b}, env: jsonl, algorithm: sft}
"""
    )
    code, out, _ = miles("plan", "many.yaml")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 2  # there is no model
    for line in (
        "engines.judge rollout plain acme-parts 2.0",
        "policies.alice.envs.math env arithmetic acme-parts 2.0",
        "policies.bob.env env jsonl acme-parts 2.0",
        "policies.bob.algorithm.loss term sft acme-parts 2.0",
        "engine main: 2 of toy",
        "policy bob: 16 groups x 1 episodes a step, 1 update(s); episodes: none, demonstrations are read; "
        "strictly on-policy",
    ):
        assert line in lines, out


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["rollout.use=plain"], "plain does not offer batch_invariant"),
        (["schedule.max_staleness=2", "schedule.off_policy=uncorrected"], "max_staleness is 2, so timing decides"),
        (["schedule.order=ready"], "order is not slot in main"),
    ],
)
def test_plan_withdraws_promises_that_do_not_hold(miles, overrides, why):
    _, out, _ = miles("plan", "run.yaml", *overrides)
    [line] = [line for line in out.splitlines() if "bit-equal" in line]
    assert line.startswith("no ") and why in line


def test_plan_does_not_claim_a_ratio_of_one_for_old_tokens(miles):
    _, out, _ = miles("plan", "run.yaml", "schedule.max_staleness=2", "schedule.off_policy=uncorrected")
    [line] = [line for line in out.splitlines() if "on-policy ratio" in line]
    assert line.startswith("no ") and "max_staleness is 2" in line


def test_plan_and_doctor_refuse_a_run_directory_that_exists(miles):
    folder = Path("runs/mine")
    code, out, _ = miles("plan", "run.yaml", "run.name=mine")
    assert code == 2 and "refused: 1\n" in out and "MILES-E900" not in out
    assert "ok    run directory: runs/mine is free" in miles("doctor", "run.yaml", "run.name=mine")[1].splitlines()
    folder.mkdir(parents=True)
    assert "MILES-E900" not in miles("plan", "run.yaml", "run.name=mine")[1]  # as empty as `miles run` takes it
    (folder / "kept").touch()
    assert "MILES-E900: runs/mine exists, and is no run directory" in miles("plan", "run.yaml", "run.name=mine")[1]
    (folder / "resolved.yaml").touch()
    code, out, _ = miles("plan", "run.yaml", "run.name=mine")
    assert code == 2 and "refused: 2\n" in out
    assert "  MILES-E900: the run directory runs/mine exists\n    Fix: go on with it by --resume" in out
    code, out, _ = miles("doctor", "run.yaml", "run.name=mine")
    assert code == 1 and "FAIL  run directory: MILES-E900: the run directory runs/mine exists" in out.splitlines()
    assert "      Fix: go on with it by --resume" in out


def test_version(miles):
    code, out, _ = miles("--version")
    assert code == 0 and out.startswith("miles ") and out.count(".") >= 1


def test_doctor_of_a_bad_file_is_a_finding(miles):
    code, out, _ = miles("doctor", "run.yaml", "schedule.group_size=0")
    assert code == 1
    assert "FAIL  run.yaml: MILES-E103: schedule.group_size is 0; it must be at least 1" in out
    assert "      Fix: change schedule.group_size" in out and out.endswith("1 finding(s)\n")


def test_doctor_names_a_missing_model_and_asks_the_named_plugins_only(miles):
    miles.plugins.add("acme-broken", names=("broken",), code="1 / 0")
    code, out, _ = miles("doctor", "run.yaml", "sync.use=p2p")
    assert code == 1 and "FAIL  models, data, parts: MILES-E110: model.source './tiny' does not exist" in out
    assert "ok    sync:p2p: loads" in out and "sync:broken" not in out


def test_bare_doctor_finds_what_is_broken(miles):
    checks = """
        from dataclasses import dataclass
        from miles_core import hookimpl
        from miles_core.provider import Provider

        @dataclass
        class Config:
            pass

        @hookimpl
        def miles_sync():
            return Provider(name="ill", config=Config, build=print)

        @hookimpl
        def miles_health_checks():
            return [("acme licence", False, "expired", "renew it"), ("acme disk", True, "fine", "")]
    """
    miles.plugins.add("acme-ill", names=("ill",), code=checks)
    miles.plugins.add("acme-old", major=2, names=("old",))
    code, out, _ = miles("doctor", "--json")
    rows = {row["name"]: row for row in map(json.loads, out.splitlines())}
    assert code == 1
    assert rows["acme licence"] == {"name": "acme licence", "ok": False, "finding": "expired", "fix": "renew it"}
    assert rows["acme disk"]["ok"] and rows["sync:ill"]["ok"]
    assert rows["sync:old"]["finding"] == "acme-old 1.0: API v2, core speaks v1" and not rows["sync:old"]["ok"]


def test_a_plugin_that_hangs_is_given_up(miles):
    miles.plugins.add("acme-hangs", names=("hangs",), code="import time; time.sleep(600)")
    [finding] = probe.probe([miles.plugins.catalogue().find("sync", "hangs")], deadline_s=1.0)
    assert finding == Finding(
        name="sync:hangs",
        ok=False,
        finding="did not load within 1 s",
        fix="upgrade or uninstall acme-hangs; importing a plugin must be quick",
    )


def test_a_health_check_that_raises_is_a_finding(miles, monkeypatch):
    code = "from miles_core import hookimpl\n@hookimpl\ndef miles_health_checks():\n    raise OSError('no')\n"
    more = "from miles_core import hookimpl\n@hookimpl\ndef miles_sync():\n    return P\n"
    config = "from miles_core.provider import Provider\nimport dataclasses\nC = dataclasses.make_dataclass('C', [])\n"
    miles.plugins.add(
        "acme-raises",
        names=("raises",),
        code=config + "P = Provider(name='raises', config=C, build=print)\n" + more + code,
    )
    monkeypatch.setattr(discovery, "_scanned", miles.plugins.catalogue())
    assert look(["sync:raises"])[-1]["finding"] == "a health check raised OSError: no"


# --- leaving the process ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (
            ("config", "show", "absent.yaml"),
            2,
            "MILES-E100: absent.yaml does not exist\nFix: name an existing run file\n",
        ),
        (("config", "show", "run.yaml", "sync.use=p3p"), 2, "MILES-E001: sync: no sync plugin is named 'p3p'"),
        (("plugins", "--bogus"), 2, "No such option: --bogus"),
        (("teleport",), 2, "No such command 'teleport'"),
        (("config", "show"), 2, "Missing argument"),
    ],
)
def test_bad_input_is_one_message_on_stderr_and_exit_2(miles, arguments, code, text):
    found, out, err = miles(*arguments)
    assert (found, out) == (code, "") and text in err and "Traceback" not in err
    assert err.startswith("MILES-E") and err.count("\nFix: ") == 1


def test_traceback_shows_where(miles):
    code, _, err = miles("config", "show", "absent.yaml", "--traceback")
    assert code == 2 and err.startswith("Traceback") and "FileNotFoundError" in err


def test_an_internal_error_says_so(miles, monkeypatch):
    monkeypatch.setattr(results, "recorded", lambda: 1 / 0)
    code, _, err = miles("plugins")
    assert code == 70
    assert err == (
        "MILES-E000: internal error: ZeroDivisionError: division by zero\n"
        "Fix: run it again with --traceback and report what it shows\n"
    )


def test_a_plugin_that_leaves_does_not_end_the_command_in_silence(miles, monkeypatch):
    monkeypatch.setattr(results, "recorded", lambda: sys.exit(0))
    code, _, err = miles("plugins")
    assert code == 70
    assert err.startswith(f"MILES-E000: {__file__}:") and " ended the command by sys.exit(0)\nFix: " in err
    assert miles("plugins", "--traceback")[2].startswith("Traceback")


def test_ctrl_c_exits_with_130(miles, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(results, "recorded", interrupt)
    assert miles("plugins")[0] == 130


def test_no_arguments_prints_help(miles):
    code, out, err = miles()
    assert "Usage: miles" in out + err and code in (0, 2)


def test_every_command_is_there_and_documented():
    app = build()
    names = {c.name for c in app.registered_commands} | {g.name for g in app.registered_groups}
    assert names == set(COMMANDS)
    assert all(c.callback.__doc__ for c in app.registered_commands)


def test_a_closed_pipe_is_no_error(plugins):
    for i in range(20):
        plugins.add(f"acme-many-{i}", names=(f"many{i}",))
    command = f"{sys.executable} -m miles_core.cli plugins | head -1"
    assert "kind" in subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120).stdout


def test_tables_align():
    assert table(["a", "bb"], [["xyz", "1"], ["", "22"]]) == "a    bb\n---  --\nxyz  1\n     22"


def test_scanning_once_a_process(plugins, monkeypatch):
    monkeypatch.setattr(discovery, "_scanned", None)
    assert discovery.scan() is discovery.scan() and isinstance(discovery.scan(), Catalogue)
