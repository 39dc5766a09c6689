"""`miles export RUN DIR`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="a run directory")],
    folder: Annotated[Path, typer.Argument(help="where to write; must not exist")],
    step: Annotated[
        int | None, typer.Option(help="checkpoint to export; the best, else the latest, where absent")
    ] = None,
    policy: Annotated[str, typer.Option(help="which policy's actor; the first where absent")] = "",
) -> None:
    """Write weights, config and tokenizer of a checkpoint as a folder that transformers and engines load."""
    from miles_core.export import export as write
    from miles_core.run import RunDir

    written = write(RunDir.open(run), step, folder, policy)
    print(f"exported step {written} of {run} to {folder}")
