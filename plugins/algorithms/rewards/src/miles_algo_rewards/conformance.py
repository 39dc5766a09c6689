"""What `miles conformance` tests: penalties, and scorers with what each needs (a service, a model, a function)."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from miles_core.columns import Batch
from miles_core.provider import BuildContext, Place
from miles_core.testing import PenaltyConformance, ScorerConformance
from miles_core.testing.suites import batches
from miles_core.testing.toys.rendering import ToyRenderer, ToyTokenizer


class ComposeConformance(PenaltyConformance):
    name = "compose"
    options: ClassVar[dict[str, Any]] = {"weights": {"tidy": 0.5, "judge.reward": -2.0}, "base": 0.5}

    def batch(self, made: Any = None) -> Batch:
        batch = super().batch(made)
        scored = np.array([len(i) + n for i, n in zip(batch.trajectory_ids, batch.lengths, strict=True)], np.float32)
        batch = batches.with_column(batch, "judge.reward", scored, level="trajectory")  # type: ignore[arg-type]
        tidy = np.arange(batch.n_episodes) * 0 + batch.columns["reward"]
        return batches.with_column(batch, "reward.tidy", np.nan_to_num(tidy), level="episode")  # type: ignore[arg-type]


class RankConformance(PenaltyConformance):
    name = "rank"


class DuplicatesConformance(PenaltyConformance):
    name = "duplicates"


class RaterConformance(ScorerConformance):
    """Raters read text: they are built with the toys' renderer."""

    want: ClassVar[tuple[str, ...]] = ("rater.reward",)
    per_unit: ClassVar[tuple[str, ...]] = ()

    def context(self, place: Place, **given: Any) -> BuildContext:
        return super().context(place, renderer=ToyRenderer(ToyTokenizer()), **given)


class FormatConformance(RaterConformance):
    name = "format"
    options: ClassVar[dict[str, Any]] = {"pattern": "[0-4]$"}


def distinct(texts: Sequence[str]) -> list[float]:
    """1 for an answer that nobody else in the group gave."""
    return [float(texts.count(text) == 1) for text in texts]


class GroupRewardConformance(RaterConformance):
    name = "group-reward"
    options: ClassVar[dict[str, Any]] = {"function": f"{__name__}:distinct"}


class HttpRewardConformance(RaterConformance):
    name = "http-reward"
    options: ClassVar[dict[str, Any]] = {"url": "http://127.0.0.1/", "batch_size": 4}

    def build(self, place: Place, **given: Any) -> Any:
        """The scorer of a service on 127.0.0.1 that rates an answer by its length."""
        service = ThreadingHTTPServer(("127.0.0.1", 0), Lengths)
        threading.Thread(target=service.serve_forever, daemon=True).start()
        config = replace(self.config(), url=f"http://127.0.0.1:{service.server_address[1]}/rate")
        return self.the_provider().build(config, self.context(place, **given))


class Lengths(BaseHTTPRequestHandler):
    """Rates every answer by the length of its text."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"rewards": [len(item["text"]) for item in asked["items"]]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing on the terminal."""


class RewardModelConformance(RaterConformance):
    name = "reward-model"
    options: ClassVar[dict[str, Any]] = {"source": "tiny", "batch_tokens": 32}

    def build(self, place: Place, **given: Any) -> Any:
        """The scorer of a small model drawn at random."""
        with tempfile.TemporaryDirectory() as name:
            tiny_model(Path(name))
            config = replace(self.config(), source=name)
            return self.the_provider().build(config, self.context(place, **given))


def tiny_model(folder: Path, *, labels: int = 1, seed: int = 0) -> None:
    """A classifier of 2 layers with a tokenizer of characters, saved as transformers does."""
    import torch
    import transformers
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    vocabulary = {c: i for i, c in enumerate(["<pad>", "<unk>", *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    library: Any = transformers
    fast = library.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    fast.model_max_length = 64
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = library.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=0,
        num_labels=labels,
    )
    library.LlamaForSequenceClassification(config).save_pretrained(folder, safe_serialization=True)
