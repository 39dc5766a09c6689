"""What a model's configuration says of tokens, and whether two models mean the same by an id: every role of a policy is
fed the actor's tokens.

Judged by `tokenizer.json` where both models have one, else by `vocab_size` of their configurations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miles_core.errors import ModelSourceError, blamed

if TYPE_CHECKING:
    from pathlib import Path

    from miles_core.contracts.model import ModelSource


def check_vocabulary(actor: ModelSource, other: ModelSource, what: str) -> None:
    """Raise `ModelSourceError` where `other`, the source of `what`, has not all of the actor's tokens under their ids.

    It may know more of them. Sizes are compared only where a tokenizer is missing: models of one family are padded
    differently.
    """
    ours, theirs, wrong = _tokens(actor), _tokens(other), ""
    first, second = f"the actor ({actor.asked})", f"{what} ({other.asked})"
    if ours is None or theirs is None:
        sizes = vocabulary_size(actor), vocabulary_size(other)
        if None not in sizes and sizes[0] != sizes[1]:
            wrong = f"{second} has {sizes[1]} tokens in its vocabulary, {first} has {sizes[0]}"
    elif differing := [index for index, token in ours.items() if theirs.get(index) != token]:
        one = differing[0]
        found = repr(theirs[one]) if one in theirs else "no token"
        wrong = f"token {one} is {ours[one]!r} to {first} and {found} to {second}: their vocabularies differ"
    if wrong:
        raise ModelSourceError(wrong, fix=f"give {what} a model with the actor's tokenizer")


def _tokens(source: ModelSource) -> dict[int, str] | None:
    """Id -> token, of the model's own tokenizer file."""
    folder = source.folder or source.tokenizer_folder
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    data = _read(folder / "tokenizer.json")
    with blamed(f"{folder / 'tokenizer.json'} is no tokenizer", ModelSourceError, "repair it, or name another folder"):
        vocabulary = data["model"]["vocab"]
        if isinstance(vocabulary, list):  # unigram: [piece, score]
            vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
        found = {int(index): str(token) for token, index in vocabulary.items()}
        return found | {int(entry["id"]): str(entry["content"]) for entry in data.get("added_tokens") or ()}


def vocabulary_size(source: ModelSource) -> int | None:
    """`vocab_size` of the model's configuration, where it says one."""
    return _number(source, "vocab_size")


def longest_text(source: ModelSource) -> int | None:
    """Tokens that the model has positions for, where its configuration says so and does not stretch them (YaRN, …)."""
    stretched = [_said(source, key) or {} for key in ("rope_scaling", "rope_parameters")]
    if any(rope.get("rope_type", rope.get("type", "default")) != "default" for rope in stretched):
        return None
    return _number(source, "max_position_embeddings")


def _number(source: ModelSource, key: str) -> int | None:
    value = _said(source, key)
    return value if isinstance(value, int) else None


def _said(source: ModelSource, key: str) -> Any:
    config = source.architecture if source.folder is None else _read(source.folder / "config.json")
    return config.get(key) if isinstance(config, Mapping) else None


def _read(path: Path) -> Any:
    with blamed(f"{path} cannot be read", ModelSourceError, "repair it, or name another folder"):
        return json.loads(path.read_text(encoding="utf-8"))
