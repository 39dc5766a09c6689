"""LoRA as an extension: low-rank adapters that are trained over a frozen base."""
