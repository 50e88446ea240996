"""All commands, and the exit codes of their errors."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, Any

import torch
import typer

from dcp_placements.cli.arguments import STORAGE_OPTIONS
from dcp_placements.cli.commands.differing import diff_command
from dcp_placements.cli.commands.doctoring import doctor_command
from dcp_placements.cli.commands.drawing import draw_command
from dcp_placements.cli.commands.explaining import explain_command
from dcp_placements.cli.commands.exporting import export_command
from dcp_placements.cli.commands.importing import import_command
from dcp_placements.cli.commands.inspecting import inspect_command
from dcp_placements.cli.commands.megatron import megatron_command
from dcp_placements.cli.commands.merging import merge_metadata_command
from dcp_placements.cli.commands.rehearsing import rehearse_command, reshard_command
from dcp_placements.cli.commands.transferring import transfer_command
from dcp_placements.cli.commands.verifying import verify_command
from dcp_placements.cli.printing import print_error
from dcp_placements.errors import PlacementError, format_name
from dcp_placements.offline import CannotLook
from dcp_placements.storage.metadata.provenance import own_version
from dcp_placements.storage.remote.filesystem import default_options, is_url

PROGRAM = "dcp-placements"
DEBUG = "DCP_PLACEMENTS_DEBUG"
"""The environment variable that shows the traceback of unexpected errors."""

MAX_MESSAGE = 500
"""Characters of an unexpected error's message."""

COMMANDS: dict[str, Callable[..., int]] = {
    "inspect": inspect_command,
    "explain": explain_command,
    "verify": verify_command,
    "diff": diff_command,
    "megatron": megatron_command,
    "import": import_command,
    "export": export_command,
    "rehearse": rehearse_command,
    "reshard": reshard_command,
    "transfer": transfer_command,
    "doctor": doctor_command,
    "draw": draw_command,
    "merge-metadata": merge_metadata_command,
}
"""Each function returns the command's exit code."""

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


def _add_command(name: str, function: Callable[..., int]) -> None:
    @wraps(function)
    def command(storage_option: list[Any] | None = None, **kwargs: Any) -> None:
        urls = [str(value) for value in kwargs.values() if isinstance(value, str) and is_url(value)]
        with default_options(urls, dict(storage_option or ())):
            raise typer.Exit(_exit_code(lambda: function(**kwargs)))

    signature = inspect.signature(function, eval_str=True)
    option = inspect.Parameter(
        "storage_option",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=STORAGE_OPTIONS,
    )
    command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), option]
    )
    # typer's own summary is cut short.
    first_paragraph = (function.__doc__ or "").partition("\n\n")[0]
    app.command(name, short_help=" ".join(first_paragraph.split()))(command)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"{PROGRAM} {own_version()}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions."),
    ] = False,
) -> None:
    # Without a docstring: the help is that of the application.
    pass


def _exit_code(command: Callable[[], int]) -> int:
    try:
        return command()
    except (CannotLook, OSError) as error:
        print_error(str(error))
        return 2
    except PlacementError as error:
        print_error(str(error))
        return 1
    except typer.BadParameter:
        raise  # typer prints it, with the command's usage
    except Exception as error:
        # A file that is damaged in an unforeseen way, or a bug of ours.
        if os.environ.get(DEBUG):
            raise
        message = format_name(error)[:MAX_MESSAGE]
        print_error(f"{type(error).__name__}: {message} ({DEBUG}=1 shows where)")
        return 2


for _name, _function in COMMANDS.items():
    _add_command(_name, _function)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    try:
        app(None if arguments is None else list(arguments), prog_name=PROGRAM)
    except SystemExit as stopped:
        return stopped.code if isinstance(stopped.code, int) else 0
    return 0
