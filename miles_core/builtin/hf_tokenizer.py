"""Tokenizers from a model folder's `tokenizer.json`, through the library `tokenizers` (extra `render`), and the choice
of a renderer's tokenizer.

What the folder says beside the vocabulary is read from `tokenizer_config.json`, `special_tokens_map.json`,
`chat_template.jinja` and the end tokens of `generation_config.json` and `config.json`. Files of older kinds
(`vocab.json` with `merges.txt`, `tokenizer.model`) are refused with the line that converts them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.errors import DataError, MissingExtraError, ModelSourceError

if TYPE_CHECKING:
    from miles_core.contracts.rendering import Tokenizer
    from miles_core.provider import BuildContext

#: What `save` copies from the folder that was loaded, beside `tokenizer.json`.
SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")


def choose(context: BuildContext) -> Tokenizer:
    """The tokenizer of a renderer: the built-in one that the model names, else the one in the model's folder."""
    if context.tokenizer is not None:
        return context.tokenizer
    source = context.need("model")
    if source.tokenizer_folder is None:
        raise ModelSourceError(
            f"model {source.asked!r} comes without a tokenizer, and `model.tokenizer` names none",
            fix="set model.tokenizer to a built-in tokenizer (chars, with model.alphabet) or to a folder",
        )
    return load(source.tokenizer_folder)


def load(folder: Path) -> HFTokenizer:
    """The tokenizer of `folder`. Raises `ModelSourceError` where there is none or it is unreadable, and
    `MissingExtraError` without the library `tokenizers`."""
    return HFTokenizer(Path(folder))


class HFTokenizer:
    """Keeps the contract `Tokenizer`. `adds_bos` says whether the folder's own rules put a BOS before a text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokenizer = _read_tokenizer(folder)
        config = _read_json(folder, "tokenizer_config.json")
        self.special_tokens = _special_tokens(config, _read_json(folder, "special_tokens_map.json"))
        self.chat_template = _chat_template(folder, config)
        # Ids may have holes, so the size is that of the highest id, not the count.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eos_ids = self._eos_ids()
        pad = self._tokenizer.token_to_id(self.special_tokens.get("pad_token", ""))
        self.pad_id = int(pad) if pad is not None else (self.eos_ids[0] if self.eos_ids else 0)
        bos = self._tokenizer.token_to_id(self.special_tokens.get("bos_token", ""))
        self.adds_bos = bos is not None and bos in self._tokenizer.encode("", add_special_tokens=True).ids
        self._lossy = _is_lossy(json.loads(self._tokenizer.to_str()))

    def encode(self, text: str) -> list[int]:
        """Ids without added special tokens; special tokens spelled in `text` become their ids. Raises `DataError` for a
        character that the vocabulary cannot spell, where the tokenizer would drop it without a word."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        if self._lossy:
            self._check_cover(text, encoding)
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def save(self, folder: Path) -> None:
        """Copy the files of the loaded folder; a `generation_config.json` that is already there stays."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if folder.resolve() == self.folder.resolve():
            return
        shutil.copyfile(self.folder / "tokenizer.json", folder / "tokenizer.json")
        for name in SIDE_FILES:
            keep = name == "generation_config.json" and (folder / name).exists()
            if (self.folder / name).is_file() and not keep:
                shutil.copyfile(self.folder / name, folder / name)
        if not (folder / "tokenizer_config.json").exists():
            config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
            (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _spells(self, character: str) -> bool:
        return bool(self._tokenizer.encode(character, add_special_tokens=False).ids)

    def _eos_ids(self) -> tuple[int, ...]:
        found: list[int] = []
        for name in ("generation_config.json", "config.json"):
            value = _read_json(self.folder, name).get("eos_token_id")
            found += [value] if isinstance(value, int) else [v for v in value or () if isinstance(v, int)]
        own = self._tokenizer.token_to_id(self.special_tokens.get("eos_token", ""))
        found += [] if own is None else [int(own)]
        return tuple(dict.fromkeys(i for i in found if 0 <= i < self.vocab_size))

    def _check_cover(self, text: str, encoding: Any) -> None:
        covered, special = bytearray(len(text)), bytearray(len(text))
        for start, end in encoding.offsets:
            covered[start:end] = b"\x01" * (end - start)
        if 0 in covered:
            added = self._tokenizer.get_added_tokens_decoder()
            for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
                if token in added:
                    special[start:end] = covered[start:end]
            # Offsets slip to the left behind a dropped character, so which one it was is asked for each alone.
            alone = (i for i, c in enumerate(text) if not special[i] and not self._spells(c))
            at = next(alone, covered.find(0))
            raise DataError(
                f"the tokenizer in {self.folder} has no token for {text[at]!r} (U+{ord(text[at]):04X}), character {at}"
                f" of {_short(text)}",
                fix="use only characters of the tokenizer's vocabulary, or another model",
            )


def _short(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


def _read_tokenizer(folder: Path) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError(
            f"the tokenizer in {folder} needs the library `tokenizers`, which is not installed",
            fix="pip install 'miles-core[render]'",
        ) from error
    path = folder / "tokenizer.json"
    if not path.is_file():
        names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
        found = f"it holds {', '.join(names[:12]) or 'nothing'}" if folder.is_dir() else "there is no such folder"
        raise ModelSourceError(
            f"no tokenizer.json in {folder}; {found}",
            fix="convert once: transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelSourceError(f"{path} is unreadable: {error}", fix="save the tokenizer again") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _read_json(folder: Path, name: str) -> Mapping[str, Any]:
    path = folder / name
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelSourceError(f"{path} is unreadable: {error}", fix="repair the file or copy it again") from error
    return value if isinstance(value, dict) else {}


def _special_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, … as strings; the first config that names one wins."""
    found: dict[str, str] = {}
    for config in configs:
        for key, value in config.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found.setdefault(key, text)
    return found


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The default chat template: `chat_template.jinja` before `tokenizer_config.json`, as transformers does."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _is_lossy(spec: Mapping[str, Any]) -> bool:
    """Whether unknown characters are dropped silently: BPE without unknown token, bytes or normalisation."""
    model = spec.get("model") or {}
    if model.get("type") != "BPE" or model.get("unk_token") or model.get("byte_fallback"):
        return False
    return "ByteLevel" not in json.dumps(spec.get("pre_tokenizer")) and spec.get("normalizer") is None
