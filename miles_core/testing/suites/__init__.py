"""One suite per kind and field; import them from `miles_core.testing`."""
