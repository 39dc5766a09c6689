"""`model.source`: what it names, found before anything is built.

In this order: an existing run folder (its best checkpoint, else its latest; `runs/x@40` is step 40), exported through
an injected function; a Hugging Face folder; a resolver plugin by scheme (`gguf:…`) or suffix (`.gguf`); a hub id,
fetched in a process of its own with a deadline. Only safetensors weights are fetched: nothing is unpickled.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles_core.config.schema import Part
from miles_core.contracts.model import ModelResolver, ModelSource
from miles_core.discovery import Catalogue, scan
from miles_core.errors import MissingExtraError, ModelSourceError, PluginContractError
from miles_core.provider import BuildContext, Place

#: Exports a checkpoint of a run (step, or `None` for the best, else the latest) and returns the Hugging Face folder.
RunLoader = Callable[[Path, int | None], Path]

HUB_DEADLINE_S = 600.0
_STEP = re.compile(r"(.+)@(\d+)")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FETCH = """
import sys
from huggingface_hub import snapshot_download
patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
print("\\n" + snapshot_download(sys.argv[1], allow_patterns=patterns))
"""


def resolve_source(
    part: Part,
    seed: int,
    *,
    run_loader: RunLoader,
    base: Path | None = None,
    cache: Path = Path("runs/.sources"),
    catalogue: Catalogue | None = None,
    deadline_s: float = HUB_DEADLINE_S,
) -> ModelSource:
    """Where the model of a `model` section comes from. `part.core` is a `ModelKeys`.

    Relative paths count from the working directory, then from `base` (the run file's folder). Resolvers write into
    `cache`. Raises `ModelSourceError` where the source, or the tokenizer, is not there.
    """
    keys, catalogue = part.core, catalogue or scan()
    if keys.architecture is not None:
        source = ModelSource(asked="architecture", architecture=dict(keys.architecture))
    else:
        found, folder, from_run = locate(keys.source, base, catalogue), None, ""
        if found.path is not None and found.what == "run folder":
            folder = run_loader(found.path, found.step)
            from_run = str(found.path) if found.step is None else f"{found.path}@{found.step}"
        elif found.resolver:
            local = str(found.path) if found.path is not None else keys.source
            folder = _resolve(local, found.resolver, seed, cache, catalogue, deadline_s)
        else:
            folder = found.path or _from_hub(keys.source, deadline_s)
        if not (folder / "config.json").is_file():
            raise ModelSourceError(
                f"model.source {keys.source!r} was resolved to {folder}, which has no config.json",
                fix="name a source that holds a whole model in Hugging Face format",
            )
        source = ModelSource(asked=keys.source, folder=folder, from_run=from_run)
    return _with_tokenizer(source, keys.tokenizer, base, catalogue)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a source names: `what` is `run folder`, `folder`, `resolver` or `hub id`."""

    what: str
    path: Path | None = None
    step: int | None = None
    resolver: str = ""


def locate(asked: str, base: Path | None, catalogue: Catalogue) -> Found:
    """What `asked` names, without opening or fetching it. Raises `ModelSourceError` where it names nothing."""
    stepped = _STEP.fullmatch(asked)
    for text, step in ((asked, None), *([(stepped[1], int(stepped[2]))] if stepped else [])):
        path = _existing(text, base)
        if path is not None and (path / "resolved.yaml").is_file() and (path / "checkpoints").is_dir():
            return Found(what="run folder", path=path, step=step)
    path, resolver = _existing(asked, base), _resolver(asked, catalogue)
    if path is not None and path.is_dir():
        if not (path / "config.json").is_file():
            holds = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
            raise ModelSourceError(
                f"model.source {asked!r} is a folder without config.json (it holds: {holds})",
                fix="name a Hugging Face folder, or a run folder that `miles run` made",
            )
        return Found(what="folder", path=path)
    if resolver:
        return Found(what="resolver", path=path, resolver=resolver)
    if path is not None:
        known = ", ".join(n for n in catalogue.names("model") if n.startswith(".")) or "none"
        raise ModelSourceError(
            f"model.source {asked!r} is a file; suffixes that installed plugins resolve: {known}",
            fix=f"install a model plugin that resolves {path.suffix or 'such'} files, or name a Hugging Face folder",
        )
    if not _HUB_ID.fullmatch(asked) or _existing(asked.split("/")[0], base) is not None or asked.startswith("runs/"):
        raise ModelSourceError(
            f"model.source {asked!r} does not exist (looked at {', '.join(str(p) for p in _places(asked, base))})",
            fix="name an existing Hugging Face folder or run folder; a run that was not started yet has none",
        )
    return Found(what="hub id")


def _places(asked: str, base: Path | None) -> list[Path]:
    path = Path(asked).expanduser()
    places = [path.absolute()] if base is None or path.is_absolute() else [path.absolute(), base.absolute() / path]
    return list(dict.fromkeys(places))


def _existing(asked: str, base: Path | None) -> Path | None:
    return next((p.resolve() for p in _places(asked, base) if p.exists()), None)


def _resolver(asked: str, catalogue: Catalogue) -> str:
    """The entry point that resolves `asked`: its scheme with the colon, or its suffix; empty where there is none."""
    scheme = asked.partition(":")[0] + ":" if ":" in asked else ""
    suffix = Path(asked).suffix
    return next((n for n in (scheme, suffix) if n and n in catalogue.names("model")), "")


def _resolve(asked: str, name: str, seed: int, cache: Path, catalogue: Catalogue, deadline_s: float) -> Path:
    loaded = catalogue.load("model", name)
    unready: Any = None
    context = BuildContext(place=Place.CONTROLLER, name=name, run=unready, seed=seed)
    resolver = loaded.provider.build(loaded.provider.config(), context)
    if not isinstance(resolver, ModelResolver):
        raise PluginContractError(f"{loaded} built a {type(resolver).__name__}, no resolver", fix="give it resolve()")
    return Path(resolver.resolve(asked, cache, deadline_s))


def _from_hub(asked: str, deadline_s: float) -> Path:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _FETCH, asked], capture_output=True, text=True, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelSourceError(
            f"model.source {asked!r} is no local folder, and the hub did not deliver it within {deadline_s:g} s",
            fix="check the name and the network, or download it and name the folder",
        ) from error
    if done.returncode == 0:
        return Path(done.stdout.strip().splitlines()[-1])
    reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    if "No module named 'huggingface_hub'" in done.stderr:
        raise MissingExtraError(
            f"model.source {asked!r} is no local folder, and fetching from the hub needs huggingface_hub",
            fix="pip install huggingface_hub, or name a local folder",
        )
    raise ModelSourceError(
        f"model.source {asked!r} is no local folder, and the hub refused it: {reason}",
        fix="check the name and the network, or download it and name the folder",
    )


def _with_tokenizer(source: ModelSource, asked: str | None, base: Path | None, catalogue: Catalogue) -> ModelSource:
    if asked is None:
        if source.folder is None or not (source.folder / "tokenizer.json").is_file():
            raise ModelSourceError(
                f"model.source {source.asked!r} has no tokenizer.json", fix="add model.tokenizer: a folder that has one"
            )
        return replace(source, tokenizer_folder=source.folder)
    folder = _existing(asked, base)
    if folder is not None and (folder / "tokenizer.json").is_file():
        return replace(source, tokenizer_folder=folder)
    if asked in catalogue.names("tokenizer"):
        return source
    raise ModelSourceError(
        f"model.tokenizer {asked!r} is neither a built-in tokenizer ({', '.join(catalogue.names('tokenizer'))}) nor a "
        "folder with tokenizer.json",
        fix="name one of them",
    )
