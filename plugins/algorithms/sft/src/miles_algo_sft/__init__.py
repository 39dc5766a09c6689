"""Supervised fine-tuning: preset and term `sft`."""
