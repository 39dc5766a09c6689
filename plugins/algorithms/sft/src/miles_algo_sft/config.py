"""Options of the preset and the term. Both have none: coefficient, aggregation and schedule are core's."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SftPreset:
    """Preset `sft`: maximum likelihood of demonstrations, mean over all trainable tokens of an update.

    The textbook loss; nothing deviates. No options of its own.
    """


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Term `sft`: −π. No options."""
