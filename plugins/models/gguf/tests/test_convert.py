"""Conversion against transformers' own reading of GGUF files, and every way in which a file can be wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from miles_model_gguf import sample
from miles_model_gguf.cache import LOCK
from miles_model_gguf.reader import read_header
from miles_model_gguf.resolver import GgufResolver
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from miles_core.errors import DeadlineError, MilesError, ModelSourceError

QUANTISED = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def resolve(path: Path, cache: Path) -> Path:
    return GgufResolver().resolve(str(path), cache, 60.0)


def converted(tmp_path: Path, **options: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    sample.write(tmp_path / "x.gguf", **options)
    folder = resolve(tmp_path / "x.gguf", tmp_path / "cache")
    return folder, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen3moe"])
def test_a_converted_folder_computes_what_transformers_computes_from_the_file(
    architecture: str, tmp_path: Path
) -> None:
    folder, _ = converted(tmp_path, architecture=architecture, quantisation="Q8_0")
    ours, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    # Our config: transformers believes that every Qwen3 has heads of 128, whatever the file says.
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", config=ours.config, dtype=torch.float32)
    assert type(ours) is type(theirs)
    state = theirs.state_dict()
    assert set(state) == set(ours.state_dict())
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(ours(tokens).logits, theirs(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("quantisation", QUANTISED)
def test_numbers_are_exactly_what_the_file_holds(quantisation: str, tmp_path: Path) -> None:
    folder, found = converted(tmp_path, quantisation=quantisation)
    original = sample.write(tmp_path / "y.gguf")["blk.1.ffn_down.weight"]
    kind = gguf.GGMLQuantizationType[quantisation]
    tensor = found["model.layers.1.mlp.down_proj.weight"]
    expected = gguf.dequantize(gguf.quantize(original, kind), kind) if quantisation != "F32" else original
    plain = {"F16": torch.float16, "BF16": torch.bfloat16}
    assert tensor.dtype == plain.get(quantisation, torch.float32)
    assert np.array_equal(tensor.float().numpy(), expected.reshape(original.shape))
    assert np.abs(tensor.float().numpy() - original).max() < 0.5  # and the right tensor at all
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == sample.LAYERS


def test_an_output_layer_of_its_own_is_kept(tmp_path: Path) -> None:
    own = np.random.default_rng(1).standard_normal((len(sample.vocabulary()[0]), sample.HIDDEN)).astype(np.float32)
    folder, found = converted(tmp_path, change=lambda writer: writer.add_tensor("output.weight", own))
    assert np.array_equal(found["lm_head.weight"].numpy(), own)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False


def fails(path: Path, message: str) -> None:
    with pytest.raises(ModelSourceError, match=message) as raised:
        resolve(path, path.parent / "cache")
    assert "\nFix: " in str(raised.value) and str(path) in str(raised.value)
    assert [p.name for p in (path.parent / "cache").iterdir()] == [LOCK], "nothing may be left behind"


@pytest.mark.parametrize("kept", [0.0, 0.0001, 0.02, 0.2, 0.5, 0.99, 0.99999])
def test_a_truncated_file_is_refused_wherever_it_ends(kept: float, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    sample.write(path, quantisation="Q4_1")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    fails(path, "is no whole GGUF file: it (has|ends after) [0-9]+ bytes")


def test_damaged_headers_are_refused_and_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    sample.write(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    size = read_header(path).tensors[0].offset
    refused = 0
    for _ in range(60):  # one changed byte: refused in words, or the file is another valid one
        changed = bytearray(whole)
        changed[int(rng.integers(size))] ^= int(rng.integers(1, 256))
        path.write_bytes(changed)
        try:
            resolve(path, tmp_path / "cache")
        except MilesError as error:
            assert isinstance(error, ModelSourceError) and "Fix: " in str(error)
            refused += 1
    assert refused > 5
    huge = whole[:8] + struct.pack("<QQ", 2**60, 2**60) + whole[24:]
    path.write_bytes(huge)
    with pytest.raises(ModelSourceError, match="is no whole GGUF file"):
        resolve(path, tmp_path / "cache")


@pytest.mark.parametrize(
    ("begins", "message"),
    [
        (b"GGML", "it begins with b'GGML'"),
        (b"PK\x03\x04", "it begins with"),
        (b"GGUF" + struct.pack("<I", 1), "is GGUF version 1; versions 2 and 3 are read"),
        (b"GGUF" + struct.pack(">I", 3), r"\(a big-endian file\)"),
    ],
)
def test_other_files_are_refused(begins: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    sample.write(path)
    path.write_bytes(begins + path.read_bytes()[len(begins) :])
    fails(path, message)


def test_an_unknown_architecture_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    sample.write(tmp_path / "x.gguf", architecture="mamba")
    fails(tmp_path / "x.gguf", "of architecture 'mamba'; converted are llama, qwen2, qwen3, qwen3moe")


@pytest.mark.parametrize(("kind", "name"), [(9, "Q8_1"), (15, "Q8_K"), (777, "number 777")])
def test_a_quantisation_that_cannot_be_read_is_refused(kind: int, name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    sample.write(path, quantisation="Q8_0")
    stated = struct.pack("<QQI", sample.HIDDEN, sample.INNER, 8)  # dimensions and quantisation of ffn_gate
    whole = path.read_bytes()
    assert whole.count(stated) == 2 * sample.LAYERS
    path.write_bytes(whole.replace(stated, stated[:-4] + struct.pack("<I", kind), 1))
    fails(path, f"'blk.0.ffn_gate.weight' .* has quantisation {name}, which the package gguf .* cannot dequantise")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip": ("blk.1.attn_q.weight",)}, r"missing \['blk.1.attn_q.weight'\]"),
        ({"skip": ("token_embd.weight",)}, "has no tensor token_embd.weight"),
        ({"block_count": 1}, r"unknown \['blk.1.attn_k.weight'"),
        ({"block_count": 3}, r"missing \['blk.2.attn_k.weight'"),
        ({"feed_forward_length": 128}, r"has shape \(96, 64\), and its metadata make it \(128, 64\)"),
        (
            {"change": lambda w: w.add_tensor("blk.0.attn_q.lora_a", np.zeros((2, 2), np.float32))},
            r"unknown \['blk.0.attn_q.lora_a'\]",
        ),
        ({"change": lambda w: w.add_tensor("rope_freqs.weight", np.zeros(8, np.float32))}, "scaled rotary embedding"),
        ({"change": lambda w: w.add_string("llama.rope.scaling.type", "yarn")}, r"scaled rotary embedding \(yarn\)"),
    ],
)
def test_what_does_not_fit_together_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    sample.write(tmp_path / "x.gguf", **options)
    fails(tmp_path / "x.gguf", message)


def test_a_conversion_past_its_deadline_ends_and_leaves_nothing(tmp_path: Path) -> None:
    sample.write(tmp_path / "x.gguf")
    with pytest.raises(DeadlineError, match="took over 0 s"):
        GgufResolver().resolve(str(tmp_path / "x.gguf"), tmp_path / "cache", 0.0)
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]
