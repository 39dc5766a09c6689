"""Miles environment `arithmetic`: small procedural tasks with exact verifiers."""
