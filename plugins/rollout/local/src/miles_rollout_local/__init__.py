"""miles-rollout-local: an in-process inference engine on transformers models. `plugin.py` is the entry point."""
