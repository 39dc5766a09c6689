"""`python -m miles_core.cli` is `miles`."""

from miles_core.cli.main import main

main()
