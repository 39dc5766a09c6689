"""Two raters of text: a regular expression, and a user's function that sees all answers of a group at once."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from miles_algo_rewards.config import FormatConfig, GroupRewardConfig, Whole
from miles_algo_rewards.items import Item, groups_of
from miles_algo_rewards.waits import all_of, in_thread
from miles_core.errors import ConfigError, RewardError

#: What a function may ask for, by parameter name: lists with an entry an answer, then what the answers share.
OFFERED = ("texts", "finishes", "ids", "prompt", "answer", "metadata", "task")


class Format:
    """`right` where the text has the pattern, else `wrong`."""

    def __init__(self, config: FormatConfig) -> None:
        pattern = re.compile(config.pattern, re.DOTALL)
        self._fits = pattern.fullmatch if config.match is Whole.full else pattern.search
        self._right, self._wrong = config.right, config.wrong

    async def __call__(self, items: Sequence[Item]) -> Sequence[float]:
        return [self._right if self._fits(item.text) else self._wrong for item in items]


class GroupFunction:
    """Calls the function once a group, with those of `OFFERED` that it names.

    A plain function runs in a thread, one group after the other; a coroutine function for several groups at once. What
    it raises, a wrong count, and a passed deadline are `RewardError`s that name the group.
    """

    def __init__(self, config: GroupRewardConfig, folders: Sequence[Path]) -> None:
        self._config = config
        self._function = load(config.function, folders)
        self._async = inspect.iscoroutinefunction(self._function)
        self._names = _wanted(config.function, self._function)

    async def __call__(self, items: Sequence[Item]) -> Sequence[float]:
        groups = groups_of(items)
        limit = asyncio.Semaphore(self._config.concurrency if self._async else 1)
        found = await all_of([self._one(g, [items[i] for i in places], limit) for g, places in groups.items()])
        rewards = [0.0] * len(items)
        for places, given in zip(groups.values(), found, strict=True):
            for place, reward in zip(places, given, strict=True):
                rewards[place] = reward
        return rewards

    async def _one(self, group: str, items: Sequence[Item], limit: asyncio.Semaphore) -> list[float]:
        given = {
            "texts": [item.text for item in items],
            "finishes": [item.finish for item in items],
            "ids": [item.id for item in items],
            **{name: getattr(items[0], name) for name in ("prompt", "answer", "metadata", "task")},
        }
        arguments = {name: given[name] for name in self._names}
        async with limit:
            try:
                async with asyncio.timeout(self._config.deadline_s):
                    if self._async:
                        found = await self._function(**arguments)
                    else:
                        found = await in_thread(partial(self._function, **arguments))
            except TimeoutError as error:
                raise self._failed(group, f"gave nothing within {self._config.deadline_s:g} s") from error
            except Exception as error:
                raise self._failed(group, f"failed: {type(error).__name__}: {error}") from error
        try:
            rewards = list(found)
        except TypeError as error:
            raise self._failed(group, f"gave {found!r:.80}, not a list of numbers") from error
        if len(rewards) != len(items):
            raise self._failed(group, f"gave {len(rewards)} rewards for {len(items)} answers")
        return rewards

    def _failed(self, group: str, what: str) -> RewardError:
        return RewardError(
            f"the function {self._config.function!r} {what} (group {group!r})",
            fix="correct the function, then go on with --resume",
        )


def load(spec: str, folders: Sequence[Path]) -> Callable[..., Any]:
    """The function of `module:function` or `file.py:function`: a file below one of `folders`, or an installed module.

    Raises `ConfigError` where there is no such file, module or function, or where the import fails.
    """
    name, _, function_name = spec.rpartition(":")
    relative = Path(name) if name.endswith(".py") else Path(*name.split(".")).with_suffix(".py")
    path = next((folder / relative for folder in folders if (folder / relative).is_file()), None)
    try:
        module = importlib.import_module(name) if path is None and not name.endswith(".py") else _file(path)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise _missing(spec, relative, folders) from error
        raise _broken(spec, error) from error
    except Exception as error:
        raise _broken(spec, error) from error
    if module is None:
        raise _missing(spec, relative, folders)
    function = getattr(module, function_name, None)
    if not callable(function):
        named = [n for n, v in vars(module).items() if inspect.isroutine(v) and not n.startswith("_")]
        raise ConfigError(
            f"the function is {spec!r}, and {getattr(module, '__file__', name)} has no function {function_name!r}",
            fix=f"name one of its functions: {', '.join(named) or 'it has none'}",
        )
    _wanted(spec, function)
    checked: Callable[..., Any] = function
    return checked


def _file(path: Path | None) -> Any:
    """The module of a file, under a name of its own; `None` where there is no file."""
    if path is None:
        return None
    digest = hashlib.sha256(str(path.resolve()).encode() + path.read_bytes()).hexdigest()[:16]
    name = f"_miles_group_reward_{digest}"
    if name not in sys.modules:
        found = importlib.util.spec_from_file_location(name, path)
        assert found is not None and found.loader is not None  # a .py file always has a loader
        module = importlib.util.module_from_spec(found)
        sys.modules[name] = module
        try:
            found.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _wanted(spec: str, function: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters that the function gets; `ConfigError` where it asks for others."""
    names = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind == parameter.VAR_KEYWORD:
            return OFFERED
        if parameter.name in OFFERED and parameter.kind != parameter.POSITIONAL_ONLY:
            names.append(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind != parameter.VAR_POSITIONAL:
            raise ConfigError(
                f"the function {spec!r} asks for {parameter.name!r}, which is not offered by name",
                fix=f"use parameters among {', '.join(OFFERED)}",
            )
    return tuple(names)


def _missing(spec: str, relative: Path, folders: Sequence[Path]) -> ConfigError:
    looked = ", ".join(dict.fromkeys(str(folder / relative) for folder in folders))
    return ConfigError(
        f"the function is {spec!r}, and there is no such file or module; looked at {looked}",
        fix="put the file beside the run file, or correct the name",
    )


def _broken(spec: str, error: BaseException) -> ConfigError:
    return ConfigError(
        f"the function is {spec!r}, and its import fails: {type(error).__name__}: {error}",
        fix="make the file importable: python -c 'import …' shows the whole error",
    )
