"""Direct preference optimisation: preset and term `dpo`."""
