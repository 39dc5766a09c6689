"""Miles: reinforcement-learning post-training as a small core and plugins.

Importing this package brings in neither torch, NumPy, OmegaConf nor any plugin; read `hookspecs.py` first.
"""

from pluggy import HookimplMarker

__version__ = "0.1.0"

PROJECT = "miles"
hookimpl = HookimplMarker(PROJECT)

#: One integer per plugin kind: the major of its contract, written in the entry-point group `miles.<kind>.v<major>`.
API_VERSIONS: dict[str, int] = {
    "rollout": 1,
    "backend": 1,
    "sync": 1,
    "env": 1,
    "launcher": 1,
    "tracker": 1,
    "algorithm": 1,
    "stage": 1,
    "term": 1,
    "filter": 1,
    "scorer": 1,
    "model": 1,
    "tokenizer": 1,
    "renderer": 1,
    "extension": 1,
}

__all__ = ["API_VERSIONS", "PROJECT", "__version__", "hookimpl"]
