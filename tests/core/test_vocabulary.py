"""Models of one policy share their vocabulary, or the run is refused before it starts."""

import json

import pytest

from miles_core.contracts.model import ModelSource
from miles_core.errors import ModelSourceError
from miles_core.vocabulary import check_vocabulary

BASE = {"a": 0, "b": 1, "ab": 2}


def folder(path, vocab=None, added=(), size=8, text=None):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"vocab_size": size}))
    if vocab is not None:
        entries = [{"id": i, "content": token} for token, i in added]
        tokenizer = {"model": {"vocab": vocab}, "added_tokens": entries}
        (path / "tokenizer.json").write_text(text or json.dumps(tokenizer))
    return ModelSource(asked=path.name, folder=path)


def drawn(size):
    return ModelSource(asked="architecture", architecture={"model_type": "x", "vocab_size": size})


def test_the_same_and_a_larger_vocabulary_fit(tmp_path):
    actor = folder(tmp_path / "actor", BASE, [("<end>", 3)], size=8)
    check_vocabulary(actor, actor, "roles.teacher")
    padded = folder(tmp_path / "padded", BASE, [("<end>", 3), ("<tool>", 4)], size=128)
    check_vocabulary(actor, padded, "roles.teacher")
    pieces = folder(tmp_path / "pieces", [["a", -1.0], ["b", -2.0], ["ab", -3.0]], [("<end>", 3)])
    check_vocabulary(actor, pieces, "roles.teacher")


@pytest.mark.parametrize(
    ("vocab", "added", "words"),
    [
        ({"a": 0, "b": 2, "ab": 1}, [("<end>", 3)], "token 1 is 'b' to the actor (actor) and 'ab' to roles.teacher"),
        (BASE, [], "token 3 is '<end>' to the actor (actor) and no token to roles.teacher (other)"),
    ],
)
def test_another_vocabulary_is_refused(tmp_path, vocab, added, words):
    actor = folder(tmp_path / "actor", BASE, [("<end>", 3)])
    with pytest.raises(ModelSourceError) as caught:
        check_vocabulary(actor, folder(tmp_path / "other", vocab, added), "roles.teacher")
    assert words in str(caught.value) and "give roles.teacher a model with the actor's tokenizer" in caught.value.fix


def test_without_tokenizers_sizes_speak(tmp_path):
    check_vocabulary(drawn(8), folder(tmp_path / "other", size=8), "roles.teacher")
    with pytest.raises(ModelSourceError, match=r"has 9 tokens in its vocabulary, the actor \(architecture\) has 8"):
        check_vocabulary(drawn(8), folder(tmp_path / "more", BASE, size=9), "roles.teacher")
    check_vocabulary(ModelSource(asked="a", architecture={}), drawn(9), "roles.teacher")  # nothing is known


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"vocab": 3}}'])
def test_a_broken_tokenizer_is_named(tmp_path, text):
    actor = folder(tmp_path / "actor", BASE)
    with pytest.raises(ModelSourceError, match=r"tokenizer\.json"):
        check_vocabulary(actor, folder(tmp_path / "other", BASE, text=text), "roles.teacher")
