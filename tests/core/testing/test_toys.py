"""The toys are real plugins: they learn, agree with each other, and survive what the contracts promise."""

import asyncio
import io
import json
import socket
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.contracts.engine import Request
from miles_core.contracts.environment import EpisodeContext
from miles_core.errors import BackendError, CapabilityError, EngineError, LearnerError, WeightError
from miles_core.provider import Place
from miles_core.records import Sampling
from miles_core.testing import minimal_context
from miles_core.testing.suites import batches
from miles_core.testing.toys import wire
from miles_core.testing.toys.adapter import score_tokens
from miles_core.testing.toys.autodiff import Var
from miles_core.testing.toys.config import EnvConfig, ExtensionConfig, Fault, SocketEngineConfig
from miles_core.testing.toys.envs import EchoEnvironment
from miles_core.testing.toys.extension import ToyExtension
from miles_core.testing.toys.plugin import miles_rollout
from miles_core.testing.toys.socket_engine import SocketEngine
from miles_core.testing.toys.sync import ToyLink
from miles_core.testing.toys.sync_socket import SocketSender
from miles_core.testing.toys.table import contexts, cut, uniform
from miles_core.testing.toys.view import ToyView

from .conftest import batch_of, built_backend, hand_over, policy_term, role, sample_group, version


def test_a_loop_of_toys_learns_to_echo(engine, env, renderer):
    async def loop():
        backend = built_backend()
        await engine.start()
        sampling = Sampling(max_new_tokens=2)
        terms = [policy_term()]
        rewards = []
        for step in range(30):
            await hand_over(backend, engine, step)
            groups = await asyncio.gather(
                *(sample_group(engine, env, renderer, step * 16 + g, sampling, size=8) for g in range(16))
            )
            batch = batch_of(groups, terms)
            result = backend.update(batch, terms)
            assert not result.skipped
            assert result.metrics["mismatch/max_abs"][0] == 0
            rewards.append(float(np.mean(batch.columns["reward"])))
        await engine.close()
        return rewards

    rewards = asyncio.run(loop())
    assert np.mean(rewards[:3]) < 0.25
    assert np.mean(rewards[-5:]) > 0.8


# --- differentiation -------------------------------------------------------------------------------------------------

FORMULAS = {
    "ratio": lambda x, a: np.maximum(-np.exp(x) * a, -np.clip(np.exp(x), 0.8, 1.2) * a),
    "square": lambda x, a: np.square(x - a) + x**3 / 2.0,
    "where": lambda x, a: np.where(a > 0, np.log(np.exp(x) + 1.0), np.minimum(x, a)),
    "norm": lambda x, a: np.tanh(x) / np.sqrt((x * x).sum() + 1.0) + abs_of(x),
    "reverse": lambda x, a: 2.0 / (1.0 + np.exp(x)) - (a - x) + (a * x)[::-1],
}


def abs_of(x):
    return np.absolute(x)


@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_agree_with_differences(name):
    rng = np.random.default_rng(3)
    x, a = rng.standard_normal(6), rng.standard_normal(6)
    formula = FORMULAS[name]
    leaf = Var(x)
    formula(leaf, a).sum().backward()
    for i in range(6):
        step = np.zeros(6)
        step[i] = 1e-6
        numeric = (formula(Var(x + step), a).sum().value - formula(Var(x - step), a).sum().value) / 2e-6
        assert leaf.grad[i] == pytest.approx(numeric, abs=1e-7, rel=1e-5)


def test_a_gradient_is_never_lost_silently():
    with pytest.raises(TypeError, match="does not know"):
        np.sin(Var([1.0]))
    with pytest.raises(TypeError, match="does not know"):
        np.concatenate([Var([1.0]), Var([1.0])])
    assert isinstance(Var([1.0]).detach(), np.ndarray)


def test_masked_nan_reaches_no_gradient():
    leaf = Var([1.0, np.nan])
    (np.where(np.array([True, False]), leaf, 0.0) * np.array([2.0, 1.0])).sum().backward()
    assert leaf.grad.tolist() == [2.0, 0.0]


# --- the table model, by hand ----------------------------------------------------------------------------------------


def test_logprobs_by_hand():
    weights = {"bias": np.array([2.0, 0.0], np.float32), "table.0.weight": np.zeros((2, 2), np.float32)}
    found = score_tokens(weights, {"order": 1, "vocab_size": 2}, [1, 0, 1])
    assert found == pytest.approx([0.0, -0.12692801, -2.12692801])


def test_contexts_stop_at_the_border_of_a_trajectory():
    found = contexts(np.array([5, 6, 7, 8]), np.array([2, 2]), 2)
    assert found.tolist() == [[0, 0], [5, 0], [0, 0], [7, 0]]


def test_uniform_draws_depend_on_seed_and_number_only():
    seeds, draws = np.full(20000, 7, np.uint64), np.arange(20000, dtype=np.uint64)
    u = uniform(seeds, draws)
    assert 0.0 <= u.min() and u.max() < 1.0
    assert abs(u.mean() - 0.5) < 0.01 and abs(u.var() - 1 / 12) < 0.005
    assert np.array_equal(u[5:6], uniform(seeds[:1], draws[5:6]))
    assert not np.array_equal(u, uniform(seeds + np.uint64(1), draws))


def test_cut_by_hand():
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]]))
    one, zero = np.ones(1), np.zeros(1, int)
    assert cut(logits, one, zero + 2, one).tolist() == [[True, True, False, False]]
    assert cut(logits, one, zero, one * 0.79).tolist() == [[True, True, False, False]]
    assert cut(logits, one, zero, one * 0.81).tolist() == [[True, True, True, False]]
    assert cut(logits, one, zero, one).all()


# --- frames ----------------------------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.text(min_size=1, max_size=5), st.integers(-5, 5), max_size=3),
    st.lists(st.sampled_from(["<f4", "<i8", "|u1", ">f8", "|b1"]), max_size=3),
)
def test_frames_come_back(header, dtypes):
    header.pop("arrays", None)
    arrays = {f"a{i}": np.arange(6).reshape(2, 3).astype(d) for i, d in enumerate(dtypes)}
    arrays["scalar"] = np.array(3.5, np.float32)
    frame = wire.encode(header, arrays)
    found, back = wire.receive_blocking(io.BytesIO(frame))
    assert found == header
    assert all(np.array_equal(back[k], v) and back[k].shape == v.shape for k, v in arrays.items())


@pytest.mark.parametrize(
    "listed",
    [[["a", "O", [1]]], [["a", "f4", [-1]]], [["a", "f4", [9]]], [["a", "f4", [1]]], [["a", "f4", "x"]], 5],
)
def test_hostile_frames_are_refused(listed):
    text = json.dumps({"arrays": listed}).encode()
    with pytest.raises(WeightError):
        wire.decode(text, b"12345678")


def test_absurd_lengths_and_torn_frames_are_refused():
    with pytest.raises(WeightError, match="announces"):
        wire.frame_lengths(b"\xff" * 12)
    frame = wire.encode({"x": 1}, {"a": np.zeros(3)})
    for n in (0, 5, len(frame) - 1):
        with pytest.raises(EOFError):
            wire.receive_blocking(io.BytesIO(frame[:n]))


# --- engines in processes --------------------------------------------------------------------------------------------


def socket_engine(renderer, **options):
    context = minimal_context(Place.CONTROLLER, "engine-0", renderer=renderer)
    provider = next(p for p in miles_rollout() if p.name == "toy-socket")
    return provider.build(SocketEngineConfig(**options), context)


def ask(prompt=(3, 4), **sampling):
    return Request(
        id="r",
        policy="main",
        prompt={"tokens": np.array(prompt, np.int32)},
        sampling=Sampling(**{"max_new_tokens": 4, **sampling}),
        seed=5,
        deadline_s=30.0,
    )


def test_a_killed_engine_says_so_and_can_be_replaced(renderer):
    async def scenario():
        backend = built_backend()
        engine = socket_engine(renderer, own_process=True, step_s=0.05)
        await engine.start()
        await hand_over(backend, engine)
        assert (await engine.generate(ask())).engine == "engine-0"
        waiting = asyncio.ensure_future(engine.generate(ask(max_new_tokens=10_000)))
        await asyncio.sleep(0.1)
        engine.process.kill()
        with pytest.raises(EngineError, match="connection lost"):
            await waiting
        health = await engine.health()
        assert not health.ok and "connection lost" in health.detail
        with pytest.raises(EngineError, match="engine-0"):
            await engine.generate(ask())
        await engine.close()
        again = socket_engine(renderer, own_process=True)
        await again.start()
        await hand_over(backend, again, 1)
        assert (await again.generate(ask())).spans[0].version.number == 1
        await again.close()

    asyncio.run(scenario())


def test_a_sampler_reaches_the_engine_by_its_address(renderer):
    async def scenario():
        backend, engine = built_backend(), socket_engine(renderer)
        await engine.start()
        await hand_over(backend, engine)
        client = SocketEngine("engine-0", address=engine.address)
        await client.start()
        one, two = await engine.generate(ask()), await client.generate(ask())
        assert np.array_equal(one.columns["tokens"], two.columns["tokens"])
        with pytest.raises(CapabilityError, match="nonsense"):
            await client.generate(replace(ask(), want=frozenset({"nonsense"})))
        await client.close()
        assert (await engine.health()).ok
        await engine.close()

    asyncio.run(scenario())


def test_nobody_at_an_address_is_an_error():
    async def scenario():
        client = SocketEngine("engine-0", address="127.0.0.1:1", connect_s=0.1)
        with pytest.raises(EngineError, match="was not reached"):
            await client.start()

    asyncio.run(scenario())


# --- sync, backend, environment, extension ---------------------------------------------------------------------------


def test_the_in_process_transport_refuses_a_trainer_elsewhere(engine):
    async def scenario():
        plan = json.dumps({"source": {"pid": -1, "channel": "x"}, "phase": "live", "name": "e"}).encode()
        with pytest.raises(CapabilityError, match="toy-socket"):
            await ToyLink(engine).connect(plan)

    asyncio.run(scenario())


def test_a_stranger_gets_no_weights():
    backend = built_backend()
    sender = SocketSender(backend.export, rank=0, bucket_bytes=1000)
    sender.connect(json.dumps({"links": ["engine-0"]}).encode())
    sender.stage(version())
    stop = threading.Event()
    thread = threading.Thread(target=sender.carry, args=(version(), stop.is_set))
    thread.start()
    with socket.create_connection(("127.0.0.1", json.loads(sender.describe())["port"])) as stranger:
        stranger.sendall(wire.encode({"secret": "guess", "version": str(version()), "link": "engine-0"}))
        stranger.settimeout(10.0)
        assert stranger.recv(100) == b""
    assert thread.is_alive()
    stop.set()
    thread.join(10.0)
    sender.close()
    assert not thread.is_alive()


def test_every_rank_of_the_backend_agrees(engine, env, renderer):
    async def groups():
        await engine.start()
        await hand_over(built_backend(), engine)
        made = [await sample_group(engine, env, renderer, i, Sampling(max_new_tokens=2)) for i in range(4)]
        await engine.close()
        return made

    terms = [policy_term()]
    batch = batch_of(asyncio.run(groups()), terms)
    ranks = [built_backend(rank=r) for r in range(3)]
    results = [rank.update(batch, terms) for rank in ranks]
    assert results[0] == results[1] == results[2]
    streams = [[t.tobytes() for _, t in rank.export("main", "full")] for rank in ranks]
    assert streams[0] == streams[1] == streams[2]


def test_adapter_off_and_offloaded_backends_refuse():
    with pytest.raises(CapabilityError, match="adapter_off"):
        built_backend({"actor": role(), "reference": role("reference", init="actor", update="adapter_off")})
    backend = built_backend()
    backend.offload(["weights"])
    with pytest.raises(BackendError, match="offloaded"):
        backend.export("main", "full")


@pytest.mark.parametrize(("fault", "seen"), [("nan", "nan"), ("text", "one")])
def test_faults_of_the_environment(fault, seen, renderer):
    env = EchoEnvironment("toy", EnvConfig(fault=Fault(fault), fault_every=1))
    context = EpisodeContext(
        renderer=renderer,
        sampling=Sampling(max_new_tokens=1),
        rng=np.random.default_rng(0),
        split="train",
        deadline_s=1.0,
    )
    score = asyncio.run(env.score(env.tasks("train").task(0), context))
    assert str(score.reward) == seen
    broken = EchoEnvironment("toy", EnvConfig(fault=Fault.error, fault_every=1))
    with pytest.raises(RuntimeError, match="injected failure on toy:train:"):
        asyncio.run(broken.score(broken.tasks("train").task(0), context))


def test_the_extension_sees_a_misaligned_column():
    extension = ToyExtension(ExtensionConfig())
    batch = batches.batch_of(batches.groups())
    tokens = batch.columns["tokens"]
    right = np.concatenate([[0], tokens[:-1]]).astype(np.int32)
    view = ToyView(batch.with_columns({"toy.previous": right}, extension.columns), lambda output: None)
    with extension.micro(view, "actor", "update"):
        assert extension.seen["checked"] == int(batch.columns["trainable"].sum())
    wrong = ToyView(batch.with_columns({"toy.previous": right + 1}, extension.columns), lambda output: None)
    with pytest.raises(LearnerError, match="not aligned"), extension.micro(wrong, "actor", "update"):
        pass


def test_the_delta_learns_and_is_exported(env, renderer):
    """With the extension only the delta moves, and the engine gets it inside the bias."""
    extension = ToyExtension(ExtensionConfig(replay=False))
    backend = built_backend(extensions=[extension])
    before = {spec.name: tensor.copy() for spec, tensor in backend.export("main", "full")}
    batch = batches.batch_of(batches.groups())
    batch = batches.with_column(batch, "advantages", batches.spread(batch))
    share = (batch.kept / batch.kept.sum()).astype(np.float32)
    batch = batches.with_column(batch, "weight.toy", share)
    assert not backend.update(batch, [policy_term()]).skipped
    after = {spec.name: tensor for spec, tensor in backend.export("main", "full")}
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert moved == {"bias"}
    assert [s.name for s, _ in backend.export("main", "full", True)] == list(after)
