"""Numbers. The only room of the core that imports torch; this package itself imports nothing."""
