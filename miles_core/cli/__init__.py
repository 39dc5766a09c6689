"""The `miles` command."""
