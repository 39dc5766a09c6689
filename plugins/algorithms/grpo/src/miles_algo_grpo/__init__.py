"""Group-relative policy gradients: presets `grpo`, `dr_grpo`, `rloo`, with their stages and terms."""
