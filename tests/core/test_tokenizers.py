"""Tokenizer `chars`, tokenizers from folders, and the choice between them."""

import json
import re
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from miles_core.builtin import chars, hf_tokenizer
from miles_core.builtin.chars import CharsTokenizer
from miles_core.contracts.rendering import Tokenizer
from miles_core.errors import ConfigError, DataError, ModelSourceError

ALPHABET = "0123456789+-*=,> abcdefghijklmnopqrstuvwxyz?é\n<p>"[:45] + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level BPE folder with ChatML specials, made here; ids of added tokens leave a hole."""
    path = tmp_path_factory.mktemp("bpe")
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab | {"he": 256}, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "bos_token": "<|bos|>",
        "eos_token": {"content": "<|im_end|>", "lstrip": False},
        "pad_token": None,
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<|endoftext|>", "bos_token": "other"}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [260, 9999]}))
    (path / "config.json").write_text(json.dumps({"eos_token_id": 259}))
    return path


def test_chars_ids():
    t = CharsTokenizer("ab>")
    assert isinstance(t, Tokenizer)
    assert (t.vocab_size, t.pad_id, t.eos_ids) == (5, 0, (1,))
    assert t.encode("b>a<eos><pad>") == [3, 4, 2, 1, 0]
    assert t.decode([3, 0, 4, 1]) == "b>"
    assert t.decode([3, 0, 4, 1], skip_special=False) == "b<pad>><eos>"
    assert t.decode([2, 5, 99]) == "a\ufffd\ufffd"
    with pytest.raises(DataError, match=r"'z' \(U\+007A\) of 'abz' is not in model.alphabet 'ab>'"):
        t.encode("abz")


@pytest.mark.parametrize(("alphabet", "says"), [("", "it is empty"), ("aba", "it repeats 'a'")])
def test_chars_alphabet(alphabet, says):
    with pytest.raises(ConfigError, match=says):
        CharsTokenizer(alphabet)


def test_chars_needs_an_alphabet():
    with pytest.raises(ConfigError, match=r"model.alphabet is not given"):
        chars.miles_tokenizer().build(chars.CharsConfig(), SimpleNamespace(core=SimpleNamespace(alphabet=None)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("chars")
    CharsTokenizer("".join(dict.fromkeys(ALPHABET))).save(path)
    return path


@given(
    text=st.text(st.sampled_from(sorted(set(ALPHABET))), max_size=40), special=st.sampled_from(["", "<eos>", "<pad>"])
)
def test_saved_chars_load_alike(saved, text, special):
    t = CharsTokenizer("".join(dict.fromkeys(ALPHABET)))
    loaded = hf_tokenizer.load(saved)
    whole = text + special + text
    assert loaded.encode(whole) == t.encode(whole)
    ids = t.encode(whole)
    assert t.decode(ids, skip_special=False) == whole == loaded.decode(ids, skip_special=False)
    assert t.decode(ids) == loaded.decode(ids)


def test_saved_chars_load_in_transformers(saved):
    from transformers import AutoTokenizer

    t = CharsTokenizer("".join(dict.fromkeys(ALPHABET)))
    theirs = AutoTokenizer.from_pretrained(saved)
    assert theirs("31415>", add_special_tokens=True)["input_ids"] == t.encode("31415>")
    assert (theirs.pad_token_id, theirs.eos_token_id, len(theirs)) == (0, 1, t.vocab_size)
    assert theirs.decode(t.encode("12 >3<eos>"), skip_special_tokens=True) == "12 >3"
    loaded = hf_tokenizer.load(saved)
    assert (loaded.pad_id, loaded.eos_ids, loaded.vocab_size) == (t.pad_id, t.eos_ids, t.vocab_size)
    assert loaded.special_tokens == t.special_tokens and loaded.chat_template is None and not loaded.adds_bos


def test_saved_chars_refuse_strangers(saved):
    with pytest.raises(DataError, match=r"no token for 'Z' \(U\+005A\), character 2 of '1 Z'"):
        hf_tokenizer.load(saved).encode("1 Z")


@pytest.mark.parametrize(("text", "at"), [("a+1=", 1), ("12A4=", 2), ("ab<eos>c*", 8), ("a<eos", 1)])
def test_the_stranger_is_named_wherever_it_stands(tmp_path, text, at):
    CharsTokenizer("0123456789=abcdefghijklmnopqrstuvwxyz").save(tmp_path)
    with pytest.raises(DataError, match=rf"no token for {re.escape(repr(text[at]))} \(U\+.*\), character {at} of"):
        hf_tokenizer.load(tmp_path).encode(text)


def test_folder(folder):
    t = hf_tokenizer.load(folder)
    assert isinstance(t, Tokenizer)
    assert t.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert t.chat_template == "yes" and t.adds_bos
    assert t.eos_ids == (260, 259)  # the generation config's first; ids beyond the vocabulary are left out
    assert t.pad_id == 260 and t.vocab_size == 261
    text = "hello wörld, he said <|im_end|>\n 日本"  # longer than the truncation that the file asks for
    ids = t.encode(text)
    assert 259 in ids and 257 not in ids and ids[0] == 256
    assert t.decode(ids, skip_special=False) == text
    assert t.decode(ids) == text.replace("<|im_end|>", "")


def test_folder_saves_itself(folder, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 258}')
    hf_tokenizer.load(folder).save(tmp_path)
    again = hf_tokenizer.load(tmp_path)
    assert again.encode("hello") == hf_tokenizer.load(folder).encode("hello")
    assert again.chat_template == "yes" and again.eos_ids == (258, 259)


def test_template_file_wins(folder, tmp_path):
    hf_tokenizer.load(folder).save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert hf_tokenizer.load(tmp_path).chat_template == "from the file"


def test_folder_without_tokenizer(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ModelSourceError, match=r"no tokenizer.json in .*; it holds vocab.json\nFix: convert once"):
        hf_tokenizer.load(tmp_path)
    with pytest.raises(ModelSourceError, match="there is no such folder"):
        hf_tokenizer.load(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelSourceError, match="unreadable"):
        hf_tokenizer.load(tmp_path)


def test_choice():
    own = CharsTokenizer("ab")
    assert hf_tokenizer.choose(SimpleNamespace(tokenizer=own)) is own
    source = SimpleNamespace(asked="somewhere", tokenizer_folder=None)
    with pytest.raises(ModelSourceError, match="'somewhere' comes without a tokenizer"):
        hf_tokenizer.choose(SimpleNamespace(tokenizer=None, need=lambda name: source))
