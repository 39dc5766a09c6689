"""Every toy hook, as the entry points of this distribution name them."""

from miles_core.testing.toys.plugin import (
    miles_algorithm,
    miles_backend,
    miles_env,
    miles_extension,
    miles_filter,
    miles_launcher,
    miles_model,
    miles_renderer,
    miles_rollout,
    miles_scorer,
    miles_stage,
    miles_sync,
    miles_term,
    miles_tokenizer,
    miles_tracker,
)

__all__ = [
    "miles_algorithm",
    "miles_backend",
    "miles_env",
    "miles_extension",
    "miles_filter",
    "miles_launcher",
    "miles_model",
    "miles_renderer",
    "miles_rollout",
    "miles_scorer",
    "miles_stage",
    "miles_sync",
    "miles_term",
    "miles_tokenizer",
    "miles_tracker",
]
