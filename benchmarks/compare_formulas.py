"""Our formulas beside those of TRL, verl, OpenRLHF and Miles v0, on the same inputs: docs/explanation/comparison.md.

    python benchmarks/compare_formulas.py --python OTHER [--wheels FOLDER]     # runs the others, then writes the page
    python benchmarks/compare_formulas.py                                      # the page from what was measured

OTHER is an interpreter with torch and TRL; the wheels of the three others are fetched into FOLDER with pip, without
their dependencies, and unpacked there (`foreign_formulas.py` says how they are run). What they gave is kept in
docs/assets/comparison.json; ours is computed each time, by the stages and terms that our presets name.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/explanation/comparison.md"
STORED = HERE.parent / "docs/assets/comparison.json"
PINS = {"verl": "0.9.1", "openrlhf": "0.11.2", "miles-rl": "0.0.2"}
NAMES = {"trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF", "miles-rl": "Miles v0 (`miles-rl`)"}
#: Theirs are float32 sums in another order.
EQUAL = 1e-6

TOPICS = {
    "group": "`grpo`: advantages of rewards 1 0 0 0 and 1 1 0 1",
    "group_equal": "`grpo`: advantages of .7 .7000001 .7 .7, equal but for rounding",
    "group_of_one": "`grpo`: advantage of a group of one, reward 1",
    "grpo": "`grpo`: loss and gradient, clip .2/.2, given advantages",
    "dapo": "`dapo`: loss and gradient, clip .2/.28, given advantages",
    "gspo": "`gspo`: loss and gradient, 3e-4/4e-4, given advantages",
    "reinforce_pp": "`reinforce_pp`: whitened returns",
    "reinforce_pp_baseline": "`reinforce_pp_baseline`: whitened centred rewards",
    "tis": "`tis`: weights",
    "gae_returns": "`gae`: returns, gamma .9, lam .8",
    "gae_whitened": "`gae`: whitened advantages",
}
TOKEN_MEAN = "mean over all tokens; ours is the mean of each answer, then of the answers"
SAMPLE_MEAN = "mean of each answer, then of the answers; ours is the mean over all tokens"
#: Why a value differs from ours. A difference without a cause is an error of this script.
CAUSES = {
    ("trl", "group", "default"): "adds 1e-4 to the standard deviation; ours 1e-6",
    ("trl", "group_equal", "default"): "rounding noise over (noise + 1e-4); ours is exactly 0",
    ("trl", "grpo", "default (loss_type dapo)"): TOKEN_MEAN,
    ("trl", "dapo", "default (epsilon_high = epsilon)"): "upper bound .2 unless set",
    ("trl", "tis", "default (sequence_mask, clip_max 3)"): "one weight an answer, 0 above 3",
    ("verl", "group_equal", "default"): "rounding noise over (noise + 1e-6); ours is exactly 0",
    ("verl", "group_of_one", "default"): "the raw reward; ours is 0",
    (
        "verl",
        "grpo",
        "default (token-mean, dual clip 3)",
    ): f"{TOKEN_MEAN}; a negative advantage costs at most 3 times its size",
    (
        "verl",
        "dapo",
        "clip_ratio_high 0.28 (dual clip 3)",
    ): "a negative advantage costs at most 3 times its size; ours only where `dual` is set",
    ("verl", "gspo", "default aggregation, 3e-4/4e-4"): TOKEN_MEAN,
    ("openrlhf", "group", "group_norm"): "adds 1e-9 to the standard deviation; ours 1e-6",
    ("openrlhf", "group_equal", "group_norm"): "rounding noise over itself: advantages of full size; ours is exactly 0",
    ("openrlhf", "group_of_one", "group_norm"): "NaN; ours is 0",
    ("openrlhf", "grpo", "default (token_level_loss)"): TOKEN_MEAN,
    ("openrlhf", "tis", "is_correction_level token (mask outside .5, 5)"): "that is our `icepop`",
    (
        "openrlhf",
        "reinforce_pp",
        "estimator reinforce",
    ): "variance with ddof 0, clamped at 1e-8; ours ddof 1, 1e-8 added",
    ("openrlhf", "reinforce_pp_baseline", "estimator reinforce_baseline"): "variance with ddof 0; ours ddof 1",
    ("openrlhf", "gae_returns", "default"): "masked tokens count as steps of value 0; ours skips them without decay",
    ("openrlhf", "gae_whitened", "default"): "masked tokens count as steps of value 0; variance with ddof 0",
    ("miles-rl", "group_equal", "default"): "rounding noise over (noise + 1e-6); ours is exactly 0",
    ("miles-rl", "group_of_one", "default"): "NaN (the package switches the scaling off for groups of one); ours is 0",
    ("miles-rl", "dapo", "eps_clip_high 0.28"): SAMPLE_MEAN,
    ("miles-rl", "gae_returns", "default"): "masked tokens count as steps, their values too; ours skips them",
    ("miles-rl", "gae_whitened", "normalize_advantages"): "masked tokens count as steps, their values too",
}
ABSENT = {
    ("trl", "reinforce_pp"): "has none",
    ("trl", "reinforce_pp_baseline"): "has none",
    ("trl", "gae_returns"): "has no critic in this version",
    ("trl", "gae_whitened"): "has no critic in this version",
}


# --- inputs -----------------------------------------------------------------------------------------------------------


def inputs() -> dict[str, Any]:
    """Eight answers in two groups of four; one has two masked tokens in its middle (a tool's words)."""
    rng = np.random.default_rng(0)
    lengths, width = [3, 6, 2, 4, 5, 1, 4, 3], 6
    mask = (np.arange(width) < np.array(lengths)[:, None]).astype(float)
    mask[1, 2:4] = 0
    current = -np.abs(rng.normal(size=(8, width)))
    proximal = current - 0.4 * rng.normal(size=(8, width))
    behaviour = proximal - 0.6 * rng.normal(size=(8, width))
    proximal[0, :3] = current[0, :3] - [0.1, -0.1, 0.0006]  # an answer inside GSPO's bounds
    proximal[1, 1] = current[1, 1] - np.log(4.0)  # a ratio of 4 where the advantage is negative
    return {
        "lengths": lengths,
        "mask": mask.tolist(),
        "current": np.round(current, 4).tolist(),
        "proximal": np.round(proximal, 4).tolist(),
        "behaviour": np.round(behaviour, 4).tolist(),
        "values": np.round(rng.normal(size=(8, width)), 4).tolist(),
        "reward": [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0],
        "group": [0] * 4 + [1] * 4,
        "advantage": [1.5, -0.5, -0.5, -0.5, 0.5, 0.5, -1.5, 0.5],
        "equal": [0.7, 0.7000001, 0.7, 0.7],
        "gamma": 0.9,
        "lam": 0.8,
    }


# --- ours -------------------------------------------------------------------------------------------------------------


def ours(data: Mapping[str, Any]) -> dict[str, list[float]]:
    """Topic -> our values, by the parts that our presets resolve to."""
    return dict(_ours(data))


def _ours(data: Mapping[str, Any]) -> Iterator[tuple[str, list[float]]]:
    batch = _batch(data, data["reward"], data["group"])
    trainable = batch.columns["trainable"]

    def run_stage(run: Any, field: str, batch: Any) -> Any:
        return _built(run, field)(batch, np.random.default_rng(0)).columns

    def whitened(run: Any, columns: Any) -> list[float]:
        own = batch.with_columns({"advantages": columns["advantages"]}, ())
        return _list(run_stage(run, "whiten", own)["advantages"][trainable])

    grpo = _run("grpo")
    yield "group", _list(run_stage(grpo, "advantage", batch)["advantages"][batch.offsets[:-1]])
    for topic, rewards in (("group_equal", data["equal"]), ("group_of_one", [1.0])):
        few = _batch({**data, "lengths": [1] * len(rewards)}, rewards, [0] * len(rewards))
        yield topic, _list(run_stage(grpo, "advantage", few)["advantages"])
    for preset in ("grpo", "dapo", "gspo"):
        yield preset, _loss(batch, _run(preset), data)
    for preset in ("reinforce_pp", "reinforce_pp_baseline"):
        run = _run(preset)
        yield preset, whitened(run, run_stage(run, "advantage", batch))
    corrected = _run("grpo", "corrections: {tis: {}}")
    yield "tis", _list(run_stage(corrected, "corrections", batch)["correction_weight"][trainable])
    ppo = _run("ppo", f"advantage: {{gamma: {data['gamma']}, lam: {data['lam']}}}")
    columns = run_stage(ppo, "advantage", batch)
    yield "gae_returns", _list(columns["returns"][trainable])
    yield "gae_whitened", whitened(ppo, columns)


def _list(values: Any) -> list[float]:
    return [float(v) for v in values]


def _batch(data: Mapping[str, Any], reward: Sequence[float], group: Sequence[int]) -> Any:
    from miles_core.columns import CORE_COLUMNS, Batch, ColumnSpec

    lengths = np.array(data["lengths"], np.int64)
    columns: dict[str, Any] = {"reward": np.array(reward, np.float64)}
    names = {
        "trainable": "mask",
        "proximal_logprobs": "proximal",
        "behaviour_logprobs": "behaviour",
        "values": "values",
    }
    for name, key in names.items():
        flat = np.concatenate([np.array(data[key][i], np.float32)[:n] for i, n in enumerate(lengths)])
        columns[name] = flat.astype(bool) if name == "trainable" else flat
    per_unit = np.repeat(np.array(data["advantage"], np.float32)[: len(lengths)], lengths)
    columns["advantages"] = np.where(columns["trainable"], per_unit, 0).astype(np.float32)
    columns["origin"] = np.ones(len(per_unit), np.uint8)
    columns["truncated"] = np.zeros(len(lengths), bool)
    return Batch(
        policy="main",
        step=0,
        trajectory_ids=tuple(f"t{i}" for i in range(len(lengths))),
        episode_ids=tuple(f"e{i}" for i in range(len(lengths))),
        group_ids=tuple(f"g{i}" for i in range(max(group) + 1)),
        lengths=lengths,
        episode_of=np.arange(len(lengths)),
        group_of=np.array(group, np.int64),
        columns=columns,
        specs={**CORE_COLUMNS, **{n: ColumnSpec(name=n, level="unit", dtype="float32") for n in ("values", "returns")}},
        items={},
    )


RUN = """
run: {{name: comparison}}
model: {{use: toy, tokenizer: toy, architecture: {{model_type: toy}}}}
renderer: toy
env: {{use: toy}}
rollout: {{use: toy, max_new_tokens: 6}}
backend: {{use: toy}}
sync: {{use: toy}}
roles: {{critic: {{init: actor, update: shares, head: value}}}}
algorithm: {{use: {preset}, {more}}}
"""


def _run(preset: str, more: str = "") -> Any:
    """A run file of toys around a preset."""
    from miles_core.config.compose import load
    from miles_core.discovery import scan

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.yaml")
        file.write_text(RUN.format(preset=preset, more=more))
        return load(file, [], catalogue=scan())


def _built(run: Any, field: str) -> Any:
    """The part of a field, as wiring builds it."""
    from miles_core.discovery import scan
    from miles_core.provider import BuildContext, Place

    part = next(iter(run.policies["main"].algorithm.parts[field].values()))
    context = BuildContext(place=Place.CONTROLLER, name=part.name, run=run, core=part.core)
    return scan().load(part.kind, part.use).provider.build(part.options, context)


def _loss(batch: Any, run: Any, data: Mapping[str, Any]) -> list[float]:
    """The loss, then its gradient at trainable positions."""
    import torch

    from miles_core.aggregation import with_weights
    from miles_core.contracts.learning import BoundTerm
    from miles_core.numerics import objective
    from miles_core.numerics.views import MicroView

    term, keys = _built(run, "loss"), run.policies["main"].algorithm.keys
    bound = BoundTerm(name="t", term=term, coef=1.0)
    ready = with_weights(batch, [bound.info], keys)
    flat = np.concatenate([np.array(data["current"][i], np.float64)[:n] for i, n in enumerate(data["lengths"])])
    leaf = torch.from_numpy(flat).requires_grad_()
    view = MicroView(ready, lambda output: leaf)
    loss, _ = objective.evaluate(view.at, [bound], str)
    loss.backward()
    return [loss.item(), *_list(leaf.grad.numpy()[batch.columns["trainable"]])]


# --- theirs -----------------------------------------------------------------------------------------------------------


def measure(python: str, wheels: Path) -> dict[str, Any]:
    """What the others give, with their versions."""
    for name, version in PINS.items():
        if not (wheels / name).is_dir():
            fetch = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            subprocess.run([*fetch, "-d", str(wheels), f"{name}=={version}"], check=True)
            wheel = next(wheels.glob(f"{name.replace('-', '_')}-*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(wheels / name)
    ask = "import trl, torch; print(trl.__version__, torch.__version__)"
    trl, torch = subprocess.run(
        [python, "-W", "ignore", "-c", ask], check=True, capture_output=True, text=True
    ).stdout.split()
    command = [python, "-W", "ignore", str(HERE / "foreign_formulas.py"), str(wheels)]
    done = subprocess.run(command, input=json.dumps(inputs()), capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    systems = json.loads(done.stdout)
    return {"inputs": inputs(), "versions": {"trl": trl, **PINS}, "torch": torch.partition("+")[0], "systems": systems}


# --- the page ---------------------------------------------------------------------------------------------------------

HEAD = """\
# Our formulas and theirs

Written by `benchmarks/compare_formulas.py`; do not edit. The same names mean different numbers in different systems.
This table says by how much, on one small input: every system's own code was run on it, and ours was run through the
stages and terms that our presets name.

Compared are {versions}, with torch {torch}. TRL was imported as installed; its advantages and importance weights stand
inside long methods and were cut out and run as they are. The others were unpacked from their wheels and imported with
empty stand-ins for what they import and no formula here uses: {stand_ins}. Nothing was trained, and no engine ran.

The input: eight answers of 1 to 6 tokens in two groups, one of them with two masked tokens in the middle; current,
proximal and behaviour log-probabilities and values with four decimals; one token has a ratio of 4 and a negative
advantage. A cell gives the largest difference over all compared numbers: the loss and the gradient of each token, or
the value at each token or answer. *Equal* is a difference below {equal:g} (float32 there, float64 here).

| what | ours begins with |
|---|---|
{ours}
"""


def differs(mine: Sequence[float], value: Sequence[float]) -> float:
    """The largest difference; NaN where either has one."""
    if len(mine) != len(value):
        raise ValueError(f"{len(value)} numbers, ours are {len(mine)}")
    return float(np.max(np.abs(np.array(mine) - np.array(value))))


def page(stored: Mapping[str, Any], mine: Mapping[str, Sequence[float]]) -> str:
    """The text of docs/explanation/comparison.md."""
    versions = ", ".join(f"{NAMES[name]} {stored['versions'][name]}" for name in NAMES)
    made = sorted({name for system in stored["systems"].values() for name in system["stand_ins"]})
    shown = [f"| {text} | {', '.join(f'{v:.6g}' for v in mine[topic][:4])} |" for topic, text in TOPICS.items()]
    head = HEAD.format(
        versions=versions,
        torch=stored["torch"],
        stand_ins=", ".join(f"`{n}`" for n in made),
        equal=EQUAL,
        ours="\n".join(shown),
    )
    wrapped = [part if part.startswith("|") else textwrap.fill(part, 120) for part in head.split("\n\n")]
    parts = ["\n\n".join(wrapped).rstrip() + "\n"]
    for name in NAMES:
        system = stored["systems"][name]
        parts.append(f"## {NAMES[name]} {stored['versions'][name]}\n")
        if system["error"]:
            parts.append(f"Not run: {system['error']}\n")
            continue
        parts.append("| what | their options | difference | why |\n|---|---|---|---|")
        parts += [*_rows(name, system["records"], mine), ""]
    return "\n".join(parts).rstrip() + "\n"


def _rows(name: str, records: Sequence[Mapping[str, Any]], mine: Mapping[str, Sequence[float]]) -> Iterator[str]:
    for topic, text in TOPICS.items():
        of_topic = [r for r in records if r["topic"] == topic]
        if not of_topic:
            yield f"| {text} | | | {ABSENT[name, topic]} |"
        for record in of_topic:
            gap = differs(mine[topic], record["value"])
            same = gap <= EQUAL
            cause = "" if same else CAUSES[name, topic, record["variant"]]
            shown = "equal" if same else "NaN" if gap != gap else f"{gap:.3g}"
            yield f"| {text} | {record['variant']} | {shown} | {cause} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", help="an interpreter with torch and TRL; without it nothing is run but ours")
    parser.add_argument("--wheels", type=Path, help="where the others' wheels lie, or are put; a temporary folder")
    options = parser.parse_args()
    if options.python:
        with tempfile.TemporaryDirectory() as scratch:
            found = measure(options.python, options.wheels or Path(scratch))
        STORED.write_text(json.dumps(found, separators=(",", ":"), sort_keys=True) + "\n")
    stored = json.loads(STORED.read_text())
    PAGE.write_text(page(stored, ours(stored["inputs"])))
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
