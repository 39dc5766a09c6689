"""Backend `fsdp` and model adapter `causal-lm`: train Hugging Face language models with PyTorch's `fully_shard`.

Read `backend.py` first, then `causal_lm.py`. Nothing here imports torch before a provider is built.
"""
