"""The user's reward function: found by name, checked before the run, called with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import numpy as np

from miles_core.errors import ConfigError, MilesError, RewardError
from miles_core.records import Score
from miles_core.session import EpisodeFailedError
from miles_env_jsonl.config import JsonlConfig

#: What a reward function may ask for, by parameter name.
OFFERED = ("text", "answer", "prompt", "metadata", "finish", "task")
#: Calls that passed their deadline and still hang, above which the run stops: each holds a thread.
MAX_HANGING = 64


def load(spec: str, folders: Sequence[Path]) -> Callable[..., Any]:
    """The function of `module:function` or `file.py:function`. Raises `ConfigError` where module or function are
    missing, the module's import fails, or the function asks for something that is not offered."""
    module_name, _, function_name = spec.rpartition(":")
    module = _module(spec, module_name, folders)
    function = getattr(module, function_name, None)
    if not callable(function):
        named = [n for n, v in vars(module).items() if inspect.isroutine(v) and not n.startswith("_")]
        raise ConfigError(
            f"env.reward is {spec!r}, and {module.__file__ or module_name} has no function {function_name!r}",
            fix=f"name one of its functions: {', '.join(named) or 'it has none'}",
        )
    _check_signature(spec, function)
    checked: Callable[..., Any] = function
    return checked


def wanted(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names that the function gets; all where it takes `**anything`."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return OFFERED
    return tuple(p.name for p in parameters if p.name in OFFERED)


def needs_answer(function: Callable[..., Any]) -> bool:
    """Whether the function cannot be called without an answer."""
    parameter = inspect.signature(function).parameters.get("answer")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _check_signature(spec: str, function: Callable[..., Any]) -> None:
    for parameter in inspect.signature(function).parameters.values():
        optional = parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if parameter.kind == parameter.POSITIONAL_ONLY or (parameter.name not in OFFERED and not optional):
            raise ConfigError(
                f"env.reward {spec!r} asks for {parameter.name!r}, which is not offered by name",
                fix=f"use parameters among {', '.join(OFFERED)}",
            )


def _module(spec: str, name: str, folders: Sequence[Path]) -> ModuleType:
    relative = Path(name) if name.endswith(".py") else Path(*name.split(".")).with_suffix(".py")
    inside = contextlib.ExitStack()
    for folder in folders:
        if (
            len(relative.parts) > 1
            and not name.endswith(".py")
            and (folder / relative.parts[0] / "__init__.py").is_file()
        ):
            inside.enter_context(_on_path(folder))  # a package: its modules import each other
            break
        if (folder / relative).is_file():
            return _from_file(spec, (folder / relative).resolve())
    if not name.endswith(".py"):
        try:
            with inside:
                return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise _import_failed(spec, name, error) from error
        except (Exception, SystemExit) as error:
            raise _import_failed(spec, name, error) from error
    looked = ", ".join(dict.fromkeys(str(folder / relative) for folder in folders))
    raise ConfigError(
        f"env.reward is {spec!r}, and there is no such file or module; looked at {looked}"
        + ("" if name.endswith(".py") else f", and for an installed module {name!r}"),
        fix="put the file beside the run file, or correct the name",
    )


def _from_file(spec: str, path: Path) -> ModuleType:
    """Import a file under a name of its own, so that `reward.py` never meets an installed `reward`. Its folder is on
    the path meanwhile, for modules beside it."""
    digest = hashlib.sha256(f"{path}\0{path.stat().st_mtime_ns}".encode()).hexdigest()[:16]
    name = f"_miles_reward_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None  # a .py file always has a loader
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        with _on_path(path.parent):
            found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_failed(spec, str(path), error) from error
    return module


@contextlib.contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _import_failed(spec: str, what: str, error: BaseException) -> ConfigError:
    frames = traceback.extract_tb(error.__traceback__)
    at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    if isinstance(error, SyntaxError) and error.filename:  # raised in Python's own import
        at = f" at {error.filename}:{error.lineno}"
    return ConfigError(
        f"env.reward is {spec!r}, and importing {what} fails{at}: {type(error).__name__}: {error}",
        fix="make the file importable: python -c 'import …' shows the whole error",
    )


def to_score(value: Any, spec: str, task_id: str) -> Score:
    """What the function returned, as a `Score`. Raises `RewardError` for anything that is not a number."""
    if isinstance(value, Score):
        return Score(
            reward=None if value.reward is None else _number(value.reward, "reward", spec, task_id),
            components={k: _number(v, k, spec, task_id) for k, v in value.components.items()},
            info=dict(value.info),
        )
    if isinstance(value, Mapping) and "reward" in value:
        rest = {str(k): v for k, v in value.items() if k != "reward"}
        return Score(
            reward=_number(value["reward"], "reward", spec, task_id),
            components={k: _number(v, k, spec, task_id) for k, v in rest.items() if not isinstance(v, str)},
            info={k: v for k, v in rest.items() if isinstance(v, str)},
        )
    return Score(reward=_number(value, "its result", spec, task_id))


def _number(value: Any, what: str, spec: str, task_id: str) -> float:
    if isinstance(value, numbers.Real | np.number | np.bool_) and not isinstance(value, np.complexfloating):
        return float(value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a tensor or array of one number
        return _number(value.item(), what, spec, task_id)
    raise RewardError(
        f"reward function {spec!r} on task {task_id}: {what} is {value!r:.80} ({type(value).__name__}), not a number",
        fix="return a number, or an object with `reward` and named numbers; does every path end in `return`?",
    )


def check_range(score: Score, config: JsonlConfig) -> None:
    """Raises `ValueError`, which fails the episode, for a reward outside `reward_range`; NaN fails it anyway."""
    if config.reward_range is not None and score.reward is not None and math.isfinite(score.reward):
        least, most = config.reward_range
        if not least <= score.reward <= most:
            raise ValueError(
                f"reward function {config.reward!r} returned {score.reward:g}, outside its stated range of"
                f" {least:g} to {most:g}"
            )


def _file(function: Any) -> str | None:
    """The file in which a function, a callable object or what a `partial` calls was written; `None` where it is none of
    Python's."""
    while isinstance(function, functools.partial):
        function = function.func
    called = function if inspect.isroutine(function) else getattr(type(function), "__call__", None)  # noqa: B004
    code = getattr(inspect.unwrap(called), "__code__", None)
    return None if code is None else str(code.co_filename)


class Runner:
    """Calls one function with a deadline. An async one runs on the event loop; a plain one on daemon threads, at most
    `threads` at once, so that a call that hangs costs a thread and never the run."""

    def __init__(self, function: Callable[..., Any], spec: str, deadline_s: float, threads: int) -> None:
        self._function, self._spec, self._deadline_s = function, spec, deadline_s
        self._names = wanted(function)
        self._file = _file(function)
        readable = self._file is not None and Path(self._file).is_file()
        self.digest = hashlib.sha256(Path(str(self._file)).read_bytes()).hexdigest() if readable else None
        called = getattr(function, "__call__", None)  # noqa: B004 - an object whose call is async
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
        self._threads = threads
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._idle: list[_Worker] = []
        self._hanging: list[_Worker] = []

    async def call(self, offered: Mapping[str, Any], task_id: str) -> Score:
        """Raises `EpisodeFailedError` that says what the function raised and in which line of its file, `TimeoutError`
        past the deadline, `RewardError` for what is no number."""
        bound = functools.partial(self._function, **{name: offered[name] for name in self._names})
        try:
            if self._is_async:
                value = await self._in_time(bound(), task_id)
            else:
                value = await self._on_thread(bound, task_id)
                if inspect.isawaitable(value):  # a plain function that hands out a coroutine
                    value = await self._in_time(value, task_id)
        except Exception as error:
            own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self._file]
            if isinstance(error, MilesError) or not own:
                raise
            told = f"{type(error).__name__}: {error} ({own[-1].filename}:{own[-1].lineno})"
            raise EpisodeFailedError(told) from error
        return to_score(value, self._spec, task_id)

    async def _in_time(self, call: Awaitable[Any], task_id: str) -> Any:
        limit = asyncio.timeout(self._deadline_s)
        try:
            async with limit:
                return await call
        except TimeoutError as error:
            if not limit.expired():
                raise  # the function's own
            raise self._late(task_id) from error

    async def _on_thread(self, call: Callable[[], Any], task_id: str) -> Any:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._threads))
        async with self._slots[1]:
            self._hanging = [worker for worker in self._hanging if worker.busy]
            if len(self._hanging) >= MAX_HANGING:
                raise RewardError(
                    f"{len(self._hanging)} calls of reward function {self._spec!r} hang past their deadline of"
                    f" {self._deadline_s:g} s",
                    fix="find what it waits for, and give that a timeout; or raise env.reward_deadline_s",
                )
            worker = self._idle.pop() if self._idle else _Worker()
            result = worker.start(call, loop)
            try:
                return await self._in_time(result, task_id)
            finally:
                if worker.busy:
                    worker.leave()
                    self._hanging.append(worker)
                else:
                    self._idle.append(worker)

    def _late(self, task_id: str) -> TimeoutError:
        return TimeoutError(f"reward function {self._spec!r} took longer than {self._deadline_s:g} s on task {task_id}")


class _Worker:
    """One daemon thread that runs one call at a time."""

    def __init__(self) -> None:
        self.busy = False
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, name="reward", daemon=True).start()

    def start(self, call: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> asyncio.Future[Any]:
        result: asyncio.Future[Any] = loop.create_future()
        self.busy = True

        def run() -> None:
            value, failure = None, None
            try:
                value = call()
            except Exception as error:
                failure = error
            except BaseException as error:  # sys.exit() in a reward must not end the thread without a word
                failure = RuntimeError(f"{type(error).__name__}: {error}")
            if isinstance(failure, StopIteration):  # a future cannot hold one
                failure = RuntimeError(f"StopIteration: {failure}")

            def tell() -> None:
                self.busy = False
                if not result.done():
                    result.set_result(value) if failure is None else result.set_exception(failure)

            try:
                loop.call_soon_threadsafe(tell)
            except RuntimeError:  # the loop has ended; nobody waits any more
                self.busy = False

        self._calls.put(run)
        return result

    def leave(self) -> None:
        """End the thread once its call returns."""
        self._calls.put(None)

    def _work(self) -> None:
        while (run := self._calls.get()) is not None:
            run()
