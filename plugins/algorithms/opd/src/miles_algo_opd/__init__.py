"""On-policy distillation: presets `opd` and `opd_topk`, stage `opd`, term `topk_kl`, scorer `http-teacher`."""
