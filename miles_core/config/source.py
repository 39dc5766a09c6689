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
from dataclasses import replace
from pathlib import Path

from miles_core.config.binding import bind
from miles_core.config.schema import Part
from miles_core.contracts.model import ModelResolver, ModelSource
from miles_core.discovery import OURS, Catalogue, scan
from miles_core.errors import MissingExtraError, ModelSourceError, PluginContractError

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
        return _with_tokenizer(source, keys.tokenizer, base, catalogue)
    asked, path = keys.source, _existing(keys.source, base)
    run, step = _run(asked, base)
    if run is not None:
        folder = run_loader(run, step)
    elif resolver := _resolver(asked, path, seed, catalogue):
        folder = Path(resolver.resolve(str(path or asked), cache, deadline_s))
    else:
        folder = _folder(asked, path, base, catalogue) or _from_hub(asked, deadline_s)
    if not (folder / "config.json").is_file():
        what = f"model.source {asked!r} was resolved to {folder}, which has no config.json"
        raise ModelSourceError(what, fix="name a source that holds a whole model in Hugging Face format")
    from_run = "" if run is None else str(run) if step is None else f"{run}@{step}"
    source = ModelSource(asked=asked, folder=folder, from_run=from_run)
    return _with_tokenizer(source, keys.tokenizer, base, catalogue)


def _run(asked: str, base: Path | None) -> tuple[Path | None, int | None]:
    """The run folder that `asked` names, and the step where it names one."""
    stepped = _STEP.fullmatch(asked)
    for text, step in ((asked, None), *([(stepped[1], int(stepped[2]))] if stepped else [])):
        path = _existing(text, base)
        if path is not None and (path / "resolved.yaml").is_file() and (path / "checkpoints").is_dir():
            return path, step
    return None, None


def _folder(asked: str, path: Path | None, base: Path | None, catalogue: Catalogue) -> Path | None:
    """The local folder that `asked` names; `None` for what may be a hub id. Raises `ModelSourceError` for neither."""
    if path is not None and (path / "config.json").is_file():
        return path
    if path is not None and path.is_dir():
        holds = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        wrong = f"is a folder without config.json (it holds: {holds})"
        fix = "name a Hugging Face folder, or a run folder that `miles run` made"
    elif path is not None:
        known = ", ".join(n for n in catalogue.names("model") if n.startswith(".")) or "none"
        wrong = f"is a file; suffixes that installed plugins resolve: {known}"
        fix = f"install a model plugin that resolves {path.suffix or 'such'} files, or name a Hugging Face folder"
    elif not _HUB_ID.fullmatch(asked) or asked.startswith("runs/") or _existing(asked.split("/")[0], base) is not None:
        wrong = f"does not exist (looked at {', '.join(map(str, _places(asked, base)))})"
        fix = "name an existing Hugging Face folder or run folder; a run that was not started yet has none"
    elif _run(f"runs/{asked}", base)[0] is not None:
        wrong, fix = f"is no model; there is a run runs/{asked}", f"write runs/{asked}"
    else:
        return None
    raise ModelSourceError(f"model.source {asked!r} {wrong}", fix=fix)


def _places(asked: str, base: Path | None) -> list[Path]:
    path = Path(asked).expanduser()
    return list(dict.fromkeys(folder.absolute() / path for folder in (Path(), base or Path())))


def _existing(asked: str, base: Path | None) -> Path | None:
    return next((p.resolve() for p in _places(asked, base) if p.exists()), None)


def _resolver(asked: str, path: Path | None, seed: int, catalogue: Catalogue) -> ModelResolver | None:
    """The plugin that resolves `asked`, named like its scheme with the colon, or like its suffix."""
    names = (asked[: asked.find(":") + 1], Path(asked).suffix)
    known = {*catalogue.names("model"), *(o.removeprefix("model:") for offers in OURS.values() for o in offers)}
    name = next((name for name in names if name in known), None)  # of ours and not installed: loading it says how to
    if name is None or (path is not None and path.is_dir()):
        return None
    loaded = catalogue.load("model", name)
    resolver = loaded.build_early(bind(loaded.provider.config, {}, f"model.source {asked!r}"), name, seed)
    if not isinstance(resolver, ModelResolver):
        raise PluginContractError(f"{loaded} built a {type(resolver).__name__}, no resolver", fix="give it resolve()")
    return resolver


def _from_hub(asked: str, deadline_s: float) -> Path:
    what = f"model.source {asked!r} is no local folder, and"
    fix = "check the name and the network, or download it and name the folder"
    command = [sys.executable, "-c", _FETCH, asked]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelSourceError(f"{what} the hub did not deliver it within {deadline_s:g} s", fix=fix) from error
    if "No module named 'huggingface_hub'" in done.stderr:
        fix = "pip install huggingface_hub, or name a local folder"
        raise MissingExtraError(f"{what} fetching from the hub needs huggingface_hub", fix=fix)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ModelSourceError(f"{what} the hub refused it: {reason}", fix=fix)
    return Path(done.stdout.strip().splitlines()[-1])


def _with_tokenizer(source: ModelSource, asked: str | None, base: Path | None, catalogue: Catalogue) -> ModelSource:
    folder = source.folder if asked is None else _existing(asked, base)
    if folder is not None and (folder / "tokenizer.json").is_file():
        return replace(source, tokenizer_folder=folder)
    if asked in catalogue.names("tokenizer"):
        return source
    wrong, fix = f"model.source {source.asked!r} has no tokenizer.json", "add model.tokenizer: a folder that has one"
    if asked is not None:
        known = catalogue.installed("tokenizer")
        wrong = f"model.tokenizer {asked!r} is neither a built-in tokenizer ({known}) nor a folder with tokenizer.json"
        fix = "name one of them"
    raise ModelSourceError(wrong, fix=fix)
