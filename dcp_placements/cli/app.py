"""All commands, and what becomes of their errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import typer

from dcp_placements.cli.commands.differing import diff_command
from dcp_placements.cli.commands.doctoring import doctor_command
from dcp_placements.cli.commands.drawing import draw_command
from dcp_placements.cli.commands.explaining import explain_command
from dcp_placements.cli.commands.exporting import export_command
from dcp_placements.cli.commands.importing import import_command
from dcp_placements.cli.commands.inspecting import inspect_command
from dcp_placements.cli.commands.megatron import megatron_command
from dcp_placements.cli.commands.merging import merge_metadata_command
from dcp_placements.cli.commands.rehearsing import rehearse_command
from dcp_placements.cli.commands.verifying import verify_command
from dcp_placements.cli.printing import complain
from dcp_placements.errors import PlacementError, format_name
from dcp_placements.offline import CannotLook

PROGRAM = "dcp-placements"
DEBUG = "DCP_PLACEMENTS_DEBUG"
"""The environment variable that has errors nobody foresaw shown with a traceback."""

MAX_ERROR_TOLD = 500

app = typer.Typer(
    name=PROGRAM,
    help="Look into, check, compare, rehearse and repair a checkpoint. Exit code 0: sound or same; "
    "1: faults or different; 2: could not look.",
    no_args_is_help=True,
    add_completion=False,
    # Panels cut long names of options at 80 columns.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _command(name: str, function: Callable[..., int]) -> None:
    """Make a command of a function that returns its exit code."""

    @wraps(function)
    def command(*args: Any, **kwargs: Any) -> None:
        raise typer.Exit(_exit_code(lambda: function(*args, **kwargs)))

    # The first paragraph, all of it; left to itself the list of commands cuts it short.
    told = " ".join((function.__doc__ or "").partition("\n\n")[0].split())
    app.command(name, short_help=told)(command)


def _exit_code(work: Callable[[], int]) -> int:
    try:
        code = work()
        sys.stdout.flush()
        return code
    except CannotLook as error:
        complain(str(error))
        return 2
    except PlacementError as error:
        complain(str(error))
        return 1
    except BrokenPipeError:
        # Somebody reads the first lines only. Nothing is left to be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        complain(format_name(error))
        return 2
    except typer.BadParameter:
        raise  # of arguments, which typer tells of
    except Exception as error:
        # A file that is damaged in a way that nobody thought of, or a fault of ours.
        if os.environ.get(DEBUG):
            raise
        told = format_name(error)[:MAX_ERROR_TOLD]
        complain(f"{type(error).__name__}: {told} ({DEBUG}=1 shows where)")
        return 2


_command("inspect", inspect_command)
_command("explain", explain_command)
_command("verify", verify_command)
_command("diff", diff_command)
_command("megatron", megatron_command)
_command("import", import_command)
_command("export", export_command)
_command("rehearse", rehearse_command)
_command("doctor", doctor_command)
_command("draw", draw_command)
_command("merge-metadata", merge_metadata_command)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    try:
        app(None if arguments is None else list(arguments), prog_name=PROGRAM)
    except SystemExit as exited:
        return exited.code if isinstance(exited.code, int) else 0
    return 0
