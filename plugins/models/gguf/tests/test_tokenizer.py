"""Tokenizer, chat template and end tokens of a converted folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from miles_model_gguf import sample
from miles_model_gguf.resolver import GgufResolver
from miles_model_gguf.tokenizer import SPLITS
from transformers import AutoTokenizer

from miles_core.builtin.chat import ChatRenderer
from miles_core.builtin.hf_tokenizer import load
from miles_core.errors import ModelSourceError

TEXTS = ["hello world", "hell<|im_end|>hello\n\n  x  y", "it's 日本 é 🙂", "ends in a space ", "", "<|im_start|>"]


def converted(tmp_path: Path, **options: Any) -> Path:
    sample.write(tmp_path / "x.gguf", **options)
    return GgufResolver().resolve(str(tmp_path / "x.gguf"), tmp_path / "cache", 60.0)


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe"])
def test_it_is_the_tokenizer_that_transformers_makes(pre: str, tmp_path: Path) -> None:
    ours = load(converted(tmp_path, pre=pre))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf")
    for text in [*TEXTS, "a12 123 4", "1,212.12"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids, skip_special=False) == text


def test_smollm_splits_digits(tmp_path: Path) -> None:
    """A merge of two digits exists in this vocabulary, and must never apply: every digit was a word of its own."""
    ours = load(converted(tmp_path))
    tokens = sample.vocabulary()[0]
    assert [tokens[i] for i in ours.encode("12 hello12")] == ["1", "2", "Ġ", "hello", "1", "2"]
    other = load(converted(tmp_path, pre="gpt-2"))
    assert [tokens[i] for i in other.encode("12")] == ["12"]


def test_the_chat_template_opens_and_closes_turns(tmp_path: Path) -> None:
    tokenizer = load(converted(tmp_path))
    renderer = ChatRenderer(tokenizer, tokenizer.chat_template or "")
    text = tokenizer.decode(renderer.prompt("hello"), skip_special=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.stop_ids == (2,) and tokenizer.pad_id == 2
    assert tokenizer.special_tokens["unk_token"] == "<|endoftext|>"
    assert not tokenizer.adds_bos


def test_a_file_may_ask_for_a_first_token_and_name_two_ends(tmp_path: Path) -> None:
    def change(writer: Any) -> None:
        writer.add_add_bos_token(True)
        writer.add_eot_token_id(0)

    folder = converted(tmp_path, change=change)
    assert load(folder).adds_bos
    assert json.loads((folder / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": [2, 0]}


@pytest.mark.parametrize(
    ("options", "why"),
    [({"model": "llama"}, "a vocabulary of kind 'llama'"), ({"pre": "unheard-of"}, "splitting rules 'unheard-of'")],
)
def test_a_tokenizer_that_is_not_known_is_left_out_in_words(
    options: dict[str, str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = converted(tmp_path, **options)
    assert (folder / "config.json").exists() and not (folder / "tokenizer.json").exists()
    said = " ".join(capsys.readouterr().err.split())
    assert why in said and "model.tokenizer must name a folder with one" in said


def test_a_vocabulary_that_contradicts_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, types, merges = sample.vocabulary()
    for broken, message in (
        (([*tokens, tokens[5]], [*types, 1], merges), "its vocabulary has 266 tokens, 265 of them different"),
        ((tokens, types[:-1], merges), "its vocabulary has 265 tokens"),
        ((tokens, types, [*merges, "he llo"]), "its vocabulary and merges make no tokenizer"),
    ):
        monkeypatch.setattr(sample, "vocabulary", lambda broken=broken: broken)
        with pytest.raises(ModelSourceError, match=message):
            converted(tmp_path)


def test_known_splitting_rules_are_those_that_the_readme_counts() -> None:
    assert {"gpt-2", "smollm", "qwen2", "llama-bpe"} <= set(SPLITS)
