"""Miles environment `jsonl`: tasks from a file, reward from a Python function."""
