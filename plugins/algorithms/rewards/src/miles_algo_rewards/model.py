"""A reward model in this process: a sequence classifier of transformers, batched by padded tokens (torch).

Deterministic: no dropout, no gradient, and batches made of the sorted inputs, so that the same answers meet in the same
batches whatever order they come in. Inputs: the tokenizer's chat template over prompt and answer where it has one, else
the two texts as a pair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles_algo_rewards.config import Output, RewardModelConfig
from miles_algo_rewards.items import Item
from miles_algo_rewards.waits import in_thread
from miles_core.errors import ConfigError


class ModelRater:
    """Rates items by one output of the model. Calls take turns."""

    def __init__(self, config: RewardModelConfig, folders: Sequence[Path]) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils import logging

        self._torch = torch
        self._config = config
        folder = next((f / config.source for f in folders if (f / config.source / "config.json").is_file()), None)
        if folder is None:
            looked = ", ".join(dict.fromkeys(str(f / config.source) for f in folders))
            raise ConfigError(
                f"the reward model's source is {config.source!r}, and there is no config.json; looked at {looked}",
                fix="name a folder of a transformers sequence classifier with its tokenizer",
            )
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        words: Any = logging
        words.disable_progress_bar()  # the terminal is the run's
        try:
            model, told = AutoModelForSequenceClassification.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, output_loading_info=True
            )
        finally:
            words.enable_progress_bar()
        if told["missing_keys"]:
            raise ConfigError(
                f"the reward model {folder} lacks {', '.join(sorted(told['missing_keys'])[:3])}: it would be a guess",
                fix="name a model that was trained as a sequence classifier",
            )
        self._model: Any = model.float().to(config.device).eval()
        outputs = int(self._model.config.num_labels)
        if config.label >= outputs:
            raise ConfigError(
                f"label is {config.label}, and the reward model {folder} has {outputs} outputs",
                fix=f"write a label below {outputs}",
            )
        self._most = _longest(config, self._tokenizer, self._model)
        self._pad = self._model.config.pad_token_id
        if self._pad is None:
            self._pad = self._tokenizer.pad_token_id
        if self._pad is None:
            raise ConfigError(
                f"the reward model {folder} names no pad token, which batches of several lengths need",
                fix="set pad_token_id in its config.json",
            )
        self._model.config.pad_token_id = self._pad
        self._turn = asyncio.Lock()

    async def __call__(self, items: Sequence[Item]) -> Sequence[float]:
        async with self._turn:
            return await in_thread(lambda: self.rate(items))

    def rate(self, items: Sequence[Item]) -> list[float]:
        """The reward of each item, here and now."""
        inputs = [self.ids(item) for item in items]
        order = sorted(range(len(items)), key=lambda i: (len(inputs[i]), inputs[i]))
        rewards = [0.0] * len(items)
        for batch in batches([len(inputs[i]) for i in order], self._config.batch_tokens):
            places = [order[i] for i in batch]
            for place, reward in zip(places, self._forward([inputs[p] for p in places]), strict=True):
                rewards[place] = self._config.scale * reward
        return rewards

    def ids(self, item: Item) -> list[int]:
        """The model's input, cut at its beginning where it is too long."""
        prompt = item.prompt
        if self._tokenizer.chat_template:
            asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [vars_of(m) for m in prompt]
            said = [*asked, {"role": "assistant", "content": item.text}]
            rendered = self._tokenizer.apply_chat_template(said, tokenize=False)
            ids = self._tokenizer(rendered, add_special_tokens=False)["input_ids"]
        else:
            question = prompt if isinstance(prompt, str) else "\n".join(m.content for m in prompt)
            ids = self._tokenizer(question, item.text)["input_ids"]
        return list(ids)[-self._most :]

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        torch = self._torch
        width = max(len(row) for row in rows)
        tokens = torch.full((len(rows), width), self._pad, dtype=torch.long)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row)
            mask[i, : len(row)] = 1
        with torch.inference_mode():
            device = self._config.device
            logits = self._model(input_ids=tokens.to(device), attention_mask=mask.to(device)).logits.float()
        if self._config.output is Output.probability:
            logits = logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(dim=1)
        return [float(x) for x in logits[:, self._config.label].cpu()]


def batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Runs of rows, in order of rising length, whose padded size is within `budget`; a longer row is alone."""
    found: list[list[int]] = []
    for row, length in enumerate(lengths):
        if found and (len(found[-1]) + 1) * length <= budget:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def vars_of(message: Any) -> dict[str, str]:
    return {"role": message.role, "content": message.content}


def _longest(config: RewardModelConfig, tokenizer: Any, model: Any) -> int:
    known = [config.max_tokens, getattr(model.config, "max_position_embeddings", None), tokenizer.model_max_length]
    return int(min(n for n in known if n is not None))
