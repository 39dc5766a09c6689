"""Shared pieces: a whole loop of toys without the core's schedule and learner, so that toys can be tested alone."""

import numpy as np
import pytest

from miles_core.columns import CORE_COLUMNS, Level, collate
from miles_core.config.schema import OptimizerConfig
from miles_core.contracts.backend import RoleSpec
from miles_core.contracts.engine import Request
from miles_core.contracts.environment import EpisodeContext
from miles_core.contracts.learning import BoundTerm
from miles_core.contracts.model import ModelSource
from miles_core.records import Episode, Group, Origin, Span, Trajectory, Version
from miles_core.seeds import derive
from miles_core.testing.toys import config, parts
from miles_core.testing.toys.adapter import ToyAdapter
from miles_core.testing.toys.backend import ToyBackend
from miles_core.testing.toys.engine import ToyEngine
from miles_core.testing.toys.envs import EchoEnvironment
from miles_core.testing.toys.rendering import ToyRenderer, ToyTokenizer

SOURCE = ModelSource(asked="toy", architecture={"model_type": "toy"})


def version(number=0, policy="main", lineage=0):
    return Version(policy=policy, lineage=lineage, number=number)


def role(name="actor", **changes):
    given = {"source": SOURCE, "adapter": ToyAdapter(15), "optimizer": OptimizerConfig(lr=0.2), "seed": 7}
    return RoleSpec(name=name, **{**given, **changes})


def built_backend(roles=None, policies=("main",), **options):
    backend = ToyBackend(**options)
    roles = {"actor": role()} if roles is None else roles
    backend.build({p: roles for p in policies}, dict.fromkeys(policies, 100))
    return backend


async def hand_over(backend, engine, number=0, policy="main"):
    """The weights of a policy straight through the port, without a transport."""
    port = engine.port("tensors")
    v = version(number, policy)
    await port.begin(v)
    await port.load([(spec, tensor) for spec, tensor in backend.export(policy, "full")])
    await port.end(v)


def trajectory(prompt, completion, sampling, identity):
    tokens = np.concatenate([np.asarray(prompt, np.int32), completion.columns["tokens"]])
    n, k = len(prompt), len(tokens) - len(prompt)
    sampled = np.arange(len(tokens)) >= n
    columns = {
        "tokens": tokens,
        "origin": np.where(sampled, Origin.SAMPLED, Origin.PROMPT).astype(np.uint8),
        "trainable": sampled,
        "behaviour_logprobs": np.concatenate([np.zeros(n, np.float32), completion.columns["logprobs"]]),
    }
    if "keep_counts" in completion.columns:
        columns["keep_counts"] = np.concatenate([np.zeros(n, np.int32), completion.columns["keep_counts"]])
        columns["keep_ids"] = completion.columns["keep_ids"]
    spans = tuple(Span(start=s.start + n, end=s.end + n, version=s.version) for s in completion.spans)
    assert not spans or spans[-1].end == n + k
    return Trajectory(
        id=identity, length=len(tokens), columns=columns, spans=spans, finish=completion.finish, sampling=sampling
    )


async def sample_group(engine, env, renderer, position, sampling, size=4, want=()):
    task = env.tasks("train").task(position)
    prompt = renderer.prompt(task.prompt)
    episodes = []
    for member in range(size):
        name = f"{task.id}#0/{member}"
        request = Request(
            id=name,
            policy="main",
            prompt={"tokens": np.array(prompt, np.int32)},
            sampling=sampling,
            seed=derive(7, "main", "sample", task.id, position, member),
            want=frozenset(want),
        )
        done = await engine.generate(request)
        path = trajectory(prompt, done, sampling, f"{name}/0")
        context = EpisodeContext(
            renderer=renderer,
            sampling=sampling,
            rng=np.random.default_rng(0),
            split="train",
            deadline_s=10,
            text=renderer.text(done.columns["tokens"].tolist()),
        )
        score = await env.score(task, context)
        episodes.append(Episode(id=name, member=member, trajectories=(path,), reward=score.reward))
    group = f"{task.id}#{position}"
    return Group(id=group, policy="main", slot=position, attempt=0, task=task, episodes=tuple(episodes))


def batch_of(groups, terms=(), **extra):
    """A batch with advantages and `weight.<term>` of `token_mean`."""
    batch = collate("main", 0, groups, {**CORE_COLUMNS, **extra})
    stage = parts.CentredAdvantage(config.StageConfig())
    out = stage(batch, np.random.default_rng(0))
    batch = batch.with_columns(out.columns, stage.gives)
    weights, specs = {}, []
    for term in terms:
        share = batch.kept / max(batch.kept.sum(), 1)
        weights[f"weight.{term.name}"] = share
        specs.append(type(CORE_COLUMNS["tokens"])(name=f"weight.{term.name}", level=Level.UNIT, dtype="float32"))
    return batch.with_columns(weights, specs)


def policy_term(name="toy", term=None, coef=1.0):
    return BoundTerm(name=name, term=parts.Policy(config.TermConfig()) if term is None else term, coef=coef)


@pytest.fixture
def renderer():
    return ToyRenderer(ToyTokenizer())


@pytest.fixture
def env():
    return EchoEnvironment("toy", config.EnvConfig())


@pytest.fixture
def engine(renderer):
    return ToyEngine("main-0", renderer=renderer)
