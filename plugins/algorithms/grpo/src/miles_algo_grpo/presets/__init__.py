"""One file per preset: paper, what it resolves to, and where it differs from the paper."""
