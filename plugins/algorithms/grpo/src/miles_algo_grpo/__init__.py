"""Group-relative policy gradients: presets from `grpo` to `reinforce_pp_baseline`, with their stages, filter, terms."""
