"""Which commands there are, and how an error leaves the process.

Only the module of the command that was typed is imported, so that `miles plugins` stays as light as it promises.
"""

from __future__ import annotations

import errno
import importlib
import sys
import threading
import traceback as traces
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from miles_core.cli.leaving import GRACE_S, leave_within
from miles_core.cli.streams import settle
from miles_core.errors import EXIT_BAD_INPUT, EXIT_INTERNAL, EXIT_INTERRUPTED, InputError, MilesError

#: Command -> module and attribute; a `typer.Typer` there becomes a group. A new command is one line.
COMMANDS = {
    "run": "miles_core.cli.run:run",
    "plan": "miles_core.cli.plan:plan",
    "plugins": "miles_core.cli.plugins:plugins",
    "config": "miles_core.cli.config:app",
    "doctor": "miles_core.cli.doctor:doctor",
    "show": "miles_core.cli.show:show",
    "audit": "miles_core.cli.audit:audit",
    "export": "miles_core.cli.export:export",
    "conformance": "miles_core.cli.conformance:conformance",
    "new": "miles_core.cli.new:new",
}


def build(only: str | None = None) -> typer.Typer:
    """The whole command, or with nothing but the command `only`."""
    app = typer.Typer(
        name="miles",
        help="Reinforcement-learning post-training as a small core and plugins.",
        epilog="--traceback anywhere shows where an error was raised.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    for name, target in COMMANDS.items():
        if only in (None, name):
            module, attribute = target.split(":")
            command: Any = getattr(importlib.import_module(module), attribute)
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name)
            else:
                app.command(name)(command)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"miles {version('miles-core')}")
        raise typer.Exit()


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 fine, 1 findings, 2 bad input, 3 stopped, 70 internal error, 130 interrupted."""
    if arguments is None:
        settle()
    try:
        _main(arguments)
    except SystemExit as leaving:
        if arguments is None:
            with suppress(MilesError):  # was said already: Python's last flush would say it again, with another code
                sys.stdout.flush()
            if threading.active_count() > 1:
                leave_within(GRACE_S, leaving.code if isinstance(leaving.code, int) else 0)
        raise


def _main(arguments: Sequence[str] | None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    wants_traceback = "--traceback" in given
    given = [argument for argument in given if argument != "--traceback"]
    only = given[0] if given and given[0] in COMMANDS else None
    try:
        code = build(only)(args=given, prog_name="miles", standalone_mode=False)
        sys.stdout.flush()
    except MilesError as error:
        _say(str(error), wants_traceback)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except SystemExit as error:
        if getattr(error.__context__, "errno", None) == errno.EPIPE:  # the parser's own, where nobody reads any more
            raise
        where = traces.extract_tb(error.__traceback__)[-1]
        _say(
            f"MILES-E000: {where.filename}:{where.lineno} ended the command by sys.exit({error.code!r})\n"
            "Fix: raise an exception there, which says what is wrong; --traceback shows who called it",
            wants_traceback,
        )
        sys.exit(EXIT_INTERNAL)
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error of the parser, whichever click typer brings
            if type(error).__name__ == "NoArgsIsHelpError":
                _say(error.format_message(), wants_traceback)
                sys.exit(EXIT_BAD_INPUT)
            context = getattr(error, "ctx", None)
            command = context.command_path if context is not None else "miles"
            _say(str(InputError(error.format_message(), fix=f"{command} --help shows what it takes")), wants_traceback)
            sys.exit(EXIT_BAD_INPUT)
        if type(error).__name__ == "Abort":
            sys.exit(EXIT_INTERRUPTED)
        _say(
            f"MILES-E000: internal error: {type(error).__name__}: {error}\n"
            "Fix: run it again with --traceback and report what it shows",
            wants_traceback,
        )
        sys.exit(EXIT_INTERNAL)
    sys.exit(code if isinstance(code, int) else 0)


def _say(text: str, wants_traceback: bool) -> None:
    if wants_traceback:
        traces.print_exc()
    print(text, file=sys.stderr)
