"""The `miles` command. `main` is its entry point; `main.py` lists the commands."""

from miles_core.cli.main import main

__all__ = ["main"]
