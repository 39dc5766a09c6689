"""An adapter in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`, which `peft` loads back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

if TYPE_CHECKING:
    from miles_algo_lora.config import LoraConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: The folder inside an exported model that holds the adapter.
ADAPTER = "adapter"


def write(
    folder: Path,
    tensors: Mapping[str, Any],
    config: LoraConfig,
    base: str,
    layers: Sequence[str],
    modules: Sequence[str],
) -> None:
    """Write both files into `folder`, which is made. `layers` are Hugging Face names of the adapted layers, `modules`
    of those that were trained whole."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "target_modules": sorted(layers),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": sorted(set(modules)) or None,
    }
    (folder / CONFIG).write_text(json.dumps(told, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(plain, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(folder.stat().st_mode & 0o666)  # the library makes it private to its writer
