"""`tokenizer.json` and what stands beside it, from the metadata of a GGUF file.

Byte-level BPE only, and only with splitting rules that are known: a text that is split differently from how the model
was trained gives other tokens without any sign of it. For other vocabularies (SentencePiece, WordPiece) nothing is
written, and `model.tokenizer` must name a folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_core.errors import MissingExtraError
from miles_model_gguf.reader import damaged

_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _split(regex: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _GPT2 | {"use_regex": False}]}


_DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _GPT2]}
#: `tokenizer.ggml.pre` -> how a text is split before merging.
SPLITS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gpt-2", "olmo", "phi-2"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _split(_QWEN2)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), _split(_LLAMA3)),
}
_COMPOSED = ("qwen2", "deepseek-r1-qwen")  # their texts are brought to Unicode's composed form first
_WHOLE_FIRST = ("llama3", "llama-v3", "llama-bpe")  # a word that is a token needs no merges
_CONTROL, _USER_DEFINED = 3, 4
_NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}


def unconverted(metadata: Mapping[str, Any]) -> str:
    """Why the tokenizer of this file is not converted; empty where it is."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        return f"a vocabulary of kind {model!r}; converted is byte-level BPE ('gpt2')"
    if pre not in SPLITS:
        return f"splitting rules {pre!r}; known are {', '.join(SPLITS)}"
    return ""


def write(path: Path, metadata: Mapping[str, Any], folder: Path) -> None:
    """Write `tokenizer.json` and the files beside it (configuration, chat template, end tokens) into `folder`: what of
    these the file `path` knows. Raises `ModelSourceError` where its vocabulary contradicts itself."""
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    special = {
        f"{name}_token": tokens[token]
        for key, name in _NAMES.items()
        if isinstance(token := metadata.get(f"tokenizer.ggml.{key}_token_id"), int) and token < len(tokens)
    }
    if not unconverted(metadata):
        (folder / "tokenizer.json").write_text(_tokenizer(path, metadata, special), encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    if template := metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    found = list(dict.fromkeys(token for token in ends if token is not None))
    keys = {"bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"), "eos_token_id": found or None}
    _write_json(folder / "generation_config.json", {name: value for name, value in keys.items() if value is not None})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _tokenizer(path: Path, metadata: Mapping[str, Any], special: Mapping[str, str]) -> str:
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    merges = [merge.split(" ") for merge in metadata.get("tokenizer.ggml.merges") or ()]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(kinds) != len(tokens) or not tokens:
        raise damaged(path, f"its vocabulary has {len(tokens)} tokens, {len(vocabulary)} of them different")
    pre = metadata["tokenizer.ggml.pre"]
    begin = special.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token") else None
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                **{"id": index, "content": tokens[index], "special": kind == _CONTROL},
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            }
            for index, kind in enumerate(kinds)
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if pre in _COMPOSED else None,
        "pre_tokenizer": SPLITS[pre],
        "post_processor": None if begin is None else _begins(begin, vocabulary[begin]),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            **{"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": ""},
            **{"end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False},
            **{"ignore_merges": pre in _WHOLE_FIRST, "vocab": vocabulary, "merges": merges},
        },
    }
    text = json.dumps(spec, ensure_ascii=False)
    _check(path, text)
    return text


def _begins(token: str, index: int) -> dict[str, Any]:
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    sequences = [{"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB")]
    return {
        "type": "TemplateProcessing",
        "single": [first, sequences[0]],
        "pair": [first, *sequences],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }


def _check(path: Path, text: str) -> None:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError(
            f"the tokenizer of {path} needs the library `tokenizers`", fix="pip install 'miles-core[render]'"
        ) from error
    try:
        tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise damaged(path, f"its vocabulary and merges make no tokenizer: {error}") from error
