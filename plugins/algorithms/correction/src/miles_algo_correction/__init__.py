"""Off-policy corrections: `tis`, `icepop`, `mis`, `bypass` (static) and `opsm` (a dynamic weight)."""
