"""Toy plugins of every kind and place; see `plugin.py`."""
