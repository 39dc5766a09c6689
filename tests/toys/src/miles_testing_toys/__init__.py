"""Registers the toy plugins of `miles_core.testing.toys`."""
