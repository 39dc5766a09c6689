"""Every error of the core, each with a stable code, an exit code and a fix.

A message says what was asked, what was found and what would fit; `fix` is one imperative line. The command line prints
`str(error)` and exits with `error.exit_code`: 2 for bad input found before anything was created, 3 for a run that began
and had to stop, 70 for what should never happen. Plugins raise these classes (or subclass one, keeping its code).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

EXIT_FINDINGS = 1
EXIT_BAD_INPUT = 2
EXIT_STOPPED = 3
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130


#: How to go on with what a resume refuses.
NEW_RUN = "in a new run from a checkpoint of this one (run.name=NEW model.source=RUN model.architecture=null)"


class MilesError(Exception):
    """Base of all errors that a user may see."""

    code: ClassVar[str] = "MILES-E000"
    exit_code: ClassVar[int] = EXIT_INTERNAL

    def __init__(self, message: str, *, fix: str) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.code}: {self.message}\nFix: {self.fix}"

    def __reduce__(self) -> tuple[object, ...]:  # keyword-only `fix` must survive a process boundary
        return partial(type(self), fix=self.fix), (self.message,)


class InputError(MilesError):
    """Bad input, found before the first lease; nothing was created."""

    code = "MILES-E090"
    exit_code = EXIT_BAD_INPUT


class StoppedError(MilesError):
    """The run began and cannot go on without breaking a promise; the run directory is kept."""

    code = "MILES-E300"
    exit_code = EXIT_STOPPED


def clause(error: BaseException, limit: int = 300) -> str:
    """`error` as a part of another message: one line, without code and fix, cut where a library lists all it knows."""
    text = error.message if isinstance(error, MilesError) else f"{type(error).__name__}: {error}"
    text = " ".join(text.split()).rstrip(":")
    return text if len(text) <= limit else f"{text[:limit].rstrip()} …"


def blamed(what: str, kind: type[MilesError], fix: str) -> AbstractContextManager[None]:
    """What plugin code raises in here, by `sys.exit()` too, becomes a `kind` that says what was going on; Miles' own
    errors pass."""
    return _Blame(what, kind, fix)


@dataclass(slots=True)
class _Blame(AbstractContextManager[None]):
    """A class, since it is entered with every task and event, and a generator takes five times as long."""

    what: str
    kind: type[MilesError]
    fix: str

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if error is not None and isinstance(error, Exception | SystemExit) and not isinstance(error, MilesError):
            raise self.kind(f"{self.what}: {clause(error)}", fix=self.fix) from error


def met_late(error: MilesError) -> None:
    """Bad input that a run met after it had begun stops that run: it exits with 3 in place of 2."""
    vars(error)["exit_code"] = EXIT_STOPPED


# --- plugins: E0xx ---------------------------------------------------------------------------------------------------


class UnknownPluginError(InputError):
    """A config names a plugin that is not installed."""

    code = "MILES-E001"


class AmbiguousPluginError(InputError):
    """Two distributions offer one name."""

    code = "MILES-E002"


class PluginLoadError(InputError):
    """The import of a plugin failed; the cause is chained."""

    code = "MILES-E003"


class IncompatiblePluginError(InputError):
    """A plugin speaks another API major, or its core range excludes this core."""

    code = "MILES-E004"


class PluginContractError(InputError):
    """A plugin's hooks, providers or built object do not keep the contract."""

    code = "MILES-E005"


class CapabilityError(InputError):
    """Something needs a capability that the chosen counterpart does not offer."""

    code = "MILES-E006"


class LockError(InputError):
    """The installed plugins differ from the plugin lock."""

    code = "MILES-E007"


class MissingExtraError(InputError):
    """An optional dependency is not installed."""

    code = "MILES-E008"


class UntestableError(InputError):
    """The conformance kit cannot build a plugin with what it has; the plugin must ship more."""

    code = "MILES-E009"


# --- configuration: E1xx ---------------------------------------------------------------------------------------------


class ConfigError(InputError):
    """A run file is unreadable or a value in it is wrong."""

    code = "MILES-E100"


class UnknownKeyError(ConfigError):
    """A key that no section or plugin knows."""

    code = "MILES-E101"


class ConfigTypeError(ConfigError):
    """A value of the wrong type."""

    code = "MILES-E102"


class ConfigRangeError(ConfigError):
    """A value out of its range."""

    code = "MILES-E103"


class CombinationError(ConfigError):
    """Values that are fine alone and mean nothing together."""

    code = "MILES-E104"


class ModelSourceError(InputError):
    """`model.source` names nothing that can be loaded, or an architecture that is not verified."""

    code = "MILES-E110"


class TemplateError(InputError):
    """A chat prompt without a chat template, or a template that cannot render it."""

    code = "MILES-E111"


# --- records and columns: E2xx ---------------------------------------------------------------------------------------


class RecordError(MilesError):
    """A record is inconsistent; names field, lengths and trajectory."""

    code = "MILES-E200"
    exit_code = EXIT_STOPPED


# --- the loop: E3xx --------------------------------------------------------------------------------------------------


class LedgerError(StoppedError):
    """An entry that would break exactly-once accounting."""

    code = "MILES-E301"


class JournalError(StoppedError):
    """The journal cannot be written or read."""

    code = "MILES-E302"


class DeadlineError(StoppedError):
    """A wait passed its deadline."""

    code = "MILES-E303"


class StarvedError(StoppedError):
    """A slot used up its leases: a filter or failures rejected everything."""

    code = "MILES-E304"


class RewardError(StoppedError):
    """A reward that is not a number."""

    code = "MILES-E305"


class CheckpointError(StoppedError):
    """A checkpoint cannot be written or read; earlier ones stay valid."""

    code = "MILES-E306"


# --- weights: E4xx ---------------------------------------------------------------------------------------------------


class WeightError(StoppedError):
    """Weights could not be carried or verified."""

    code = "MILES-E400"


class QuorumError(StoppedError):
    """Fewer engines than `sync.min_engines` serve the published version."""

    code = "MILES-E401"


# --- learning: E5xx --------------------------------------------------------------------------------------------------


class LearnerError(StoppedError):
    """A training step met a value that it must not train on."""

    code = "MILES-E500"


# --- engines: E6xx, backends: E7xx -----------------------------------------------------------------------------------


class EngineError(StoppedError):
    """An engine failed or broke its contract."""

    code = "MILES-E600"


def bad_answer(engine: str, request: str, what: str) -> EngineError:
    """An engine answered a request with what its contract does not allow."""
    fix = "run `miles conformance rollout:NAME` against that engine"
    return EngineError(f"engine {engine!r} answered request {request!r} with {what}", fix=fix)


class BackendError(StoppedError):
    """A training backend failed or broke its contract."""

    code = "MILES-E700"


# --- environments and data: E8xx -------------------------------------------------------------------------------------


class DataError(InputError):
    """A dataset row or split is unusable, found before the run started; names file and line."""

    code = "MILES-E800"


class LateDataError(StoppedError):
    """A bad dataset row met during the run; names file and line."""

    code = "MILES-E801"


class TrackerError(StoppedError):
    """A tracker cannot write what it was told to keep."""

    code = "MILES-E850"


# --- runs and commands: E9xx -----------------------------------------------------------------------------------------


class RunExistsError(InputError):
    """The run directory exists."""

    code = "MILES-E900"


class ResumeError(InputError):
    """A resume with another config or other tasks, or of a run whose own values were edited; says what differs."""

    code = "MILES-E901"


class RunDirError(InputError):
    """The run directory cannot be made."""

    code = "MILES-E903"


class ExportError(InputError):
    """An exported folder, or a picture of curves, cannot be written."""

    code = "MILES-E904"


class RunBusyError(InputError):
    """Another process is running in the run directory."""

    code = "MILES-E905"


class RunNotFoundError(InputError):
    """No run, or no checkpoint, where one was named."""

    code = "MILES-E902"
