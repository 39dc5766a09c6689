"""The token tree: exact prefixes, one trainable home per sampled token, refusal of what cannot be trained."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_fakes import FakeRenderer, answer, version

from miles_core.columns import CORE_COLUMNS, Align, ColumnSpec, Level
from miles_core.contracts.environment import Session as SessionProtocol
from miles_core.errors import EngineError, RecordError
from miles_core.records import Finish, Message, Origin, Sampling, Span
from miles_core.session import EpisodeFailedError, Session


class Script:
    """Answers in order; records requests."""

    def __init__(self, *replies):
        self.replies, self.requests = list(replies), []

    async def __call__(self, request):
        self.requests.append(request)
        reply = self.replies.pop(0)
        if isinstance(reply, BaseException):
            raise reply
        text, options = reply if isinstance(reply, tuple) else (reply, {})
        extra = options.pop("extra", {})
        return answer(request, text, **options), extra


def make(*replies, columns=CORE_COLUMNS, prompt="p>", **options):
    script = Script(*replies)
    session = Session(
        id="t#0/0",
        policy="main",
        prompt=prompt,
        renderer=FakeRenderer(),
        generate=script,
        sampling=Sampling(max_new_tokens=8),
        seed_of=lambda turn: 100 + turn,
        request_id="lease/0",
        columns=columns,
        **options,
    )
    return session, script


def ids(text):
    return [ord(c) for c in text]


def test_keeps_the_protocol():
    assert isinstance(make()[0], SessionProtocol)


def test_one_turn_by_hand():
    session, script = make(("hi", {"numbers": [3, 3, 4]}))
    turn = asyncio.run(session.sample())
    assert (turn.node, turn.text, turn.finish, turn.tokens) == (0, "hi", "stop", 3)
    assert turn.message == Message(role="assistant", content="hi")
    request = script.requests[0]
    assert (request.id, request.seed, request.session) == ("lease/0/0", 100, "t#0/0")
    assert list(request.prompt["tokens"]) == ids("p>")
    (trajectory,) = session.trajectories()
    assert trajectory.id == "t#0/0/0" and trajectory.length == 5
    assert list(trajectory.columns["tokens"]) == [*ids("p>hi"), 1]
    assert list(trajectory.columns["origin"]) == [0, 0, 1, 1, 1]
    assert list(trajectory.columns["trainable"]) == [False, False, True, True, True]
    assert list(trajectory.columns["behaviour_logprobs"]) == [0, 0, -0.5, -1, -1.5]
    assert {k: v.dtype.name for k, v in trajectory.columns.items()} == {
        "tokens": "int32",
        "origin": "uint8",
        "trainable": "bool",
        "behaviour_logprobs": "float32",
    }
    assert [(s.start, s.end, s.version.number) for s in trajectory.spans] == [(2, 3, 3), (3, 4, 3), (4, 5, 4)]
    assert trajectory.finish == Finish.STOP and trajectory.engine == "e0"


def test_two_turns_keep_the_prefix_and_mask_the_environment():
    async def main():
        session, script = make("a", "b")
        await session.sample()
        await session.sample("no")
        second = script.requests[1]
        assert list(second.prompt["tokens"]) == [*ids("p>a"), 1, 2, *ids("no"), 3]
        assert second.seed == 101
        (trajectory,) = session.trajectories()
        assert list(trajectory.columns["origin"]) == [0, 0, 1, 1, 2, 2, 2, 2, 1, 1]
        assert list(trajectory.columns["trainable"]) == [o == 1 for o in trajectory.columns["origin"]]

    asyncio.run(main())


def test_branches_share_a_turn_and_train_it_once():
    async def main():
        session, _ = make("root", "left", "right", "other")
        first = await session.sample()
        await session.sample("x", parent=first.node)
        await session.sample("yy", parent=first.node)
        await session.sample("new start", parent=-1)
        left, right, other = session.trajectories()
        shared = slice(2, 7)  # "root" and its end token
        assert left.columns["trainable"][shared].all()
        assert not right.columns["trainable"][shared].any()
        assert list(right.columns["origin"][shared]) == [Origin.SAMPLED] * 5
        assert right.columns["behaviour_logprobs"][shared].all()
        assert list(other.columns["tokens"]) == [*ids("new startother"), 1]
        assert [t.id for t in (left, right, other)] == ["t#0/0/0", "t#0/0/1", "t#0/0/2"]
        sampled = sum(int(t.columns["trainable"].sum()) for t in (left, right, other))
        assert sampled == sum(len(w) + 1 for w in ("root", "left", "right", "other"))

    asyncio.run(main())


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(-1, 8), st.text("abc", max_size=3), st.text("xyz", min_size=1, max_size=3)), max_size=9
    )
)
def test_any_tree_trains_every_sampled_token_once(turns):
    async def main():
        session, script = make(*[reply for _, _, reply in turns])
        for count, (parent, new, _) in enumerate(turns):
            await session.sample(new, parent=min(parent, count - 1) if count else None)
        trajectories = session.trajectories()
        total = sum(len(reply) + 1 for _, _, reply in turns)
        assert sum(int(t.columns["trainable"].sum()) for t in trajectories) == total
        whole = {tuple(t.columns["tokens"].tolist()) for t in trajectories}
        for request in script.requests:  # what was sent is a bit-exact prefix of some trajectory
            sent = tuple(request.prompt["tokens"].tolist())
            assert any(tokens[: len(sent)] == sent for tokens in whole)
        for t in trajectories:
            assert bool((t.columns["behaviour_logprobs"][t.columns["origin"] == 1] < 0).all())
            assert not t.columns["behaviour_logprobs"][t.columns["origin"] != 1].any()

    asyncio.run(main())


@pytest.mark.parametrize("finish", [Finish.LENGTH])
def test_a_turn_that_was_cut_off_cannot_be_extended(finish):
    async def main():
        session, _ = make(("a", {"finish": finish}), "b")
        await session.sample()
        with pytest.raises(EpisodeFailedError, match=r"^turn 0 ended with 'length' and cannot be extended \(look at"):
            await session.sample("more")
        (trajectory,) = session.trajectories()
        assert trajectory.finish == Finish.LENGTH

    asyncio.run(main())


def test_unknown_parent_and_mixed_distributions():
    async def main():
        session, _ = make("a", "b", "c")
        with pytest.raises(RecordError, match="has no turn 3; it has 0"):
            await session.sample(parent=3)
        await session.sample(temperature=0.5)
        with pytest.raises(RecordError, match=r"\(1.0, 1.0, 0\), the branch has \(0.5, 1.0, 0\)"):
            await session.sample("x")
        await session.sample("x", temperature=0.5, max_new_tokens=3)
        (trajectory,) = session.trajectories()
        assert trajectory.sampling == Sampling(max_new_tokens=3, temperature=0.5)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"logprobs": np.zeros(1, np.float32)}, r"2 tokens and logprobs of shape \(1,\)"),
        ({"keep_counts": np.zeros(3, np.int32)}, r"2 tokens and keep_counts of shape \(3,\)"),
        ({"numbers": [0]}, "version spans over 1 of 2 tokens"),
        ({"logprobs": np.array(["x", "y"])}, "logprobs of shape .* and dtype <U1"),
        ({"logprobs": np.zeros(2, complex)}, "dtype complex"),
        ({"logprobs": np.array([None, None])}, "dtype object"),
        ({"tokens": np.array([3, -1])}, r"tokens that are no ids: \[3, -1\]"),
        ({"tokens": np.array([3, 2**33])}, "tokens that are no ids"),
        ({"tokens": np.array([3.5, 1.0])}, "tokens that are no ids"),
        ({"keep_counts": np.array([1, 1])}, r"keep_counts \[1, 1\] and keep_ids None, which do not fit"),
        ({"keep_counts": np.array([1, 2]), "keep_ids": np.array([4, 5])}, "which do not fit"),
        ({"keep_counts": np.array([-1, 3]), "keep_ids": np.array([4, 5])}, "which do not fit"),
        ({"keep_counts": np.array([1.0, 1.0]), "keep_ids": np.array([4, 5])}, "which do not fit"),
        ({"keep_counts": np.array([1, 1]), "keep_ids": np.array([4, -5])}, "which do not fit"),
        ({"keep_counts": np.array([1, 1]), "keep_ids": np.array(["a", "b"])}, "which do not fit"),
        ({"keep_counts": np.array([1, 1]), "keep_ids": np.array([[4], [5]])}, "which do not fit"),
    ],
)
def test_engine_answers_are_checked(options, why):
    session, _ = make(("a", options))
    with pytest.raises(EngineError, match=why):
        asyncio.run(session.sample())
    assert isinstance(session.failure, EngineError)


def test_a_stop_that_is_one_string_is_refused():
    session, script = make("a")
    with pytest.raises(TypeError, match="stop='END' would stop at each of its characters; give a tuple of strings"):
        asyncio.run(session.sample(stop="END"))
    assert not script.requests
    asyncio.run(session.sample(stop=("END",)))
    assert script.requests[0].sampling.stop == ("END",)


def test_spans_must_follow_each_other():
    class Odd(Script):
        async def __call__(self, request):
            done = answer(request, "a")
            object.__setattr__(done, "spans", (Span(start=1, end=2, version=version(0)),))
            return done, {}

    session, _ = make()
    session.generate = Odd()
    with pytest.raises(EngineError, match="a version span 1:2 where one from 0 was due"):
        asyncio.run(session.sample())


def test_a_positive_log_probability_is_refused_at_the_border():
    session, _ = make(("a", {"logprobs": np.array([-1, 0.5], np.float32)}))
    asyncio.run(session.sample())
    with pytest.raises(RecordError, match=r"'t#0/0/0'.*above 0"):
        session.trajectories()


def test_engine_error_and_abort_fail_the_episode():
    for finish, why in ((Finish.ERROR, "ended request 'lease/0/0': no reason given"), (Finish.ABORT, "aborted")):
        session, _ = make(("a", {"finish": finish}))
        with pytest.raises(EpisodeFailedError, match=why):
            asyncio.run(session.sample())


def test_keep_ids_stay_flat_over_turns():
    async def main():
        kept = {"keep_counts": np.array([2, 0], np.int32), "keep_ids": np.array([7, 8], np.int32)}
        session, _ = make(("a", kept), ("b", kept))
        await session.sample()
        await session.sample("x")
        (trajectory,) = session.trajectories()
        assert list(trajectory.columns["keep_counts"]) == [0, 0, 2, 0, 0, 0, 0, 2, 0]
        assert list(trajectory.columns["keep_ids"]) == [7, 8, 7, 8]

    asyncio.run(main())


def column(align):
    return ColumnSpec(name="r3.x", level=Level.UNIT, dtype="int32", inner=(1,), fill=-1, align=align, required=False)


def test_collected_columns_follow_their_alignment():
    async def main():
        target = {"r3.x": np.array([[5], [6]], np.int32)}
        session, _ = make(("a", {"extra": target}), ("b", {}), columns=CORE_COLUMNS | {"r3.x": column(Align.TARGET)})
        await session.sample()
        await session.sample("x")
        (trajectory,) = session.trajectories()
        assert trajectory.columns["r3.x"].ravel().tolist() == [-1, -1, 5, 6, -1, -1, -1, -1, -1]

        fed = {"r3.x": np.array([[1], [2], [3]], np.int32)}  # two prompt tokens and the first sampled one
        session, _ = make(("a", {"extra": fed}), columns=CORE_COLUMNS | {"r3.x": column(Align.INPUT)})
        await session.sample()
        assert session.trajectories()[0].columns["r3.x"].ravel().tolist() == [1, 2, 3, -1]

        session, _ = make(("a", {"extra": fed}), columns=CORE_COLUMNS | {"r3.x": column(Align.TARGET)})
        await session.sample()
        with pytest.raises(RecordError, match="has 3 rows for 2 sampled tokens"):
            session.trajectories()

    asyncio.run(main())


def test_undeclared_columns_are_refused():
    session, _ = make(("a", {"extra": {"r3.x": np.zeros((2, 1), np.int32)}}))
    asyncio.run(session.sample())
    with pytest.raises(RecordError, match=r"'r3.x' was never declared"):
        session.trajectories()
