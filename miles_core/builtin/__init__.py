"""Built-in plugins, loaded by entry point only, like any other."""
