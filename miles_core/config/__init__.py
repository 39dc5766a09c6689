"""Run files: composition (`compose`), the schema of what core owns (`schema`), origins and the frozen result."""
