"""Plugins of many kinds, as written against miles-core 0.1.0."""
