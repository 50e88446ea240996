"""All commands, and the exit codes of their errors.

Modules that need torch are imported in the functions that use them: help and completion need none.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from importlib.metadata import version
from inspect import signature
from itertools import chain
from typing import Any

import click

from dcp_placements import __version__
from dcp_placements.cli import commands
from dcp_placements.cli.own_process import in_own_process, why_ended
from dcp_placements.cli.printing import Shown, print_error, print_json_error, readers_may_stop
from dcp_placements.cli.shared_options import (
    Argument,
    Parsed,
    SourceOption,
    parse_storage_option,
    size_option,
)
from dcp_placements.errors import CannotLook, PlacementError
from dcp_placements.short_text import format_name
from dcp_placements.storage.process_limits import default_limit, limit_time, limited_memory

PROGRAM = "dcp-placements"
DEBUG = "DCP_PLACEMENTS_DEBUG"
"""The environment variable that shows the traceback of unexpected errors."""

MAX_MESSAGE = 500
"""Characters of an unexpected error's message."""

PURPOSES: dict[str, tuple[Callable[..., Shown], ...]] = {
    "Examine a checkpoint": (
        *(commands.inspect_command, commands.draw_command, commands.megatron_command),
    ),
    "Check and compare": (
        *(commands.verify_command, commands.diff_command, commands.rehearse_command),
    ),
    "Repair": (commands.doctor_command, commands.stock_metadata_command),
    "Convert": (commands.import_command, commands.export_command, commands.reshard_command),
}
"""The commands by purpose; each function returns what is printed, and the exit code."""

FILES_OF_RANKS = "Options of files of ranks, Megatron's and an engine's"

PRESETS = {
    "dcp_placements.presets": "megatron_core, megatron_lite, transformers, veomni",
    "dcp_placements.presets.hub": "deepseek_v3, gpt_oss, mixtral, qwen3_moe",
}
"""Names of presets by module: rules for a mesh or a model; and renames to the names of the hub."""


class Command(click.Command):
    """A command whose help lists its arguments."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the lists of arguments, of options, and of those of the files that are read."""
        arguments = [parameter for parameter in self.params if isinstance(parameter, Argument)]
        with formatter.section("Arguments"):
            formatter.write_dl([(argument.metavar or "", argument.text) for argument in arguments])
        records = [(param, param.get_help_record(ctx)) for param in self.get_params(ctx)]
        for kind, title in ((click.Option, "Options"), (SourceOption, FILES_OF_RANKS)):
            listed = [record for param, record in records if record and type(param) is kind]
            if listed:
                with formatter.section(title):
                    formatter.write_dl(listed)


class CommandGroup(click.Group):
    """The commands by purpose."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the lists of commands and presets."""
        for purpose, held in PURPOSES.items():
            with formatter.section(purpose):
                texts = [_first_paragraph(function) for function in held]
                formatter.write_dl([*zip(map(_name, held), texts, strict=True)])
        with formatter.section("Presets, for a trainer's rules and for --rename MODULE:FUNC"):
            formatter.write_dl(list(PRESETS.items()))


def _first_paragraph(command: Callable[..., Shown]) -> str:
    """Return the first paragraph of a command's docstring, as one line."""
    return " ".join((command.__doc__ or "").partition("\n\n")[0].split())


def _name(command: Callable[..., Shown]) -> str:
    return command.__name__.removesuffix("_command").replace("_", "-")


def _command(function: Callable[..., Shown]) -> click.Command:
    """Return a command that prints what a function returns, and exits with its code."""

    @wraps(function)
    def command(*, json: bool, **given: Any) -> None:
        if (options := given.pop("storage_option", None)) is not None:
            given["storage_options"] = dict(options)
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _print_warning  # type: ignore[assignment]
                code = function(**given).show(json=json)
        except Exception as error:
            code, message = _explained(error)
            if json:
                # Where stdout takes nothing (a full disk), the error is on stderr alone.
                with suppress(OSError):
                    print_json_error(type(error).__name__, message)
            print_error(message)
        raise click.exceptions.Exit(code)

    printing = click.command(_name(function), cls=Command)(command)
    printing.params.append(click.Option(["--json"], is_flag=True, help="Print one JSON document."))
    if {"storage_options", "opening"} & signature(function).parameters.keys():
        option = click.Option(
            ["--storage-option"],
            metavar="KEY=VALUE",
            type=Parsed(parse_storage_option),
            multiple=True,
            help="An option of the URLs' file systems, for fsspec. May be repeated.",
        )
        printing.params.append(option)
    return printing


def _print_version(context: click.Context, option: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        # Without an import of torch, which takes seconds.
        print(f"{PROGRAM} {__version__}, torch {version('torch')}")
        raise click.exceptions.Exit


@click.group(PROGRAM, cls=CommandGroup, context_settings={"show_default": True})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print versions.",
)
@size_option(
    "--most-memory",
    "The most memory that a command may take; by default half of this machine's.",
)
@click.pass_context
def app(context: click.Context, most_memory: int | None) -> None:
    """Inspect, check, compare, convert and repair checkpoints.

    The exit code is 0 for sound or equal, 1 for faults or differences, and 2 if a command could not
    read or write.
    """
    if most_memory is not None:
        # The memory of its import, larger for a build with CUDA, is not counted.
        import torch  # noqa: F401
    else:
        most_memory = default_limit()
    context.with_resource(limited_memory(most_memory))


for _function in chain.from_iterable(PURPOSES.values()):
    app.add_command(_command(_function))


def _print_warning(message: Warning | str, category: type[Warning], *location: Any) -> None:
    """Print a warning without its location in the source."""
    print_error(str(message) if category is UserWarning else f"{category.__name__}: {message}")


def _explained(error: Exception) -> tuple[int, str]:
    """Return the exit code and the message of an error; raise a bug again for debugging."""
    if isinstance(error, PlacementError | OSError):
        is_finding = isinstance(error, PlacementError) and not isinstance(error, CannotLook)
        return 1 if is_finding else 2, str(error)
    if isinstance(error, MemoryError):
        return 2, (
            "more memory is needed than a command may take (half of this machine's, or "
            "--most-memory before the command)\n"
            "    likely:      a file of unknown origin claims more than it has"
        )
    # A file that is damaged in an unforeseen way, or a bug of ours.
    if os.environ.get(DEBUG):
        raise error
    text = format_name(error)[:MAX_MESSAGE]
    return 2, f"{type(error).__name__}: {text} ({DEBUG}=1 shows where)"


def run_limited() -> int:
    """Run the command of this process in one of its own, under limits; return its exit code."""

    def limited() -> int:
        limit_time()
        return run(sys.argv[1:])

    code, number = in_own_process(limited)
    message = None if number is None else why_ended(number)
    if message is None:
        return code
    if "--json" in sys.argv:
        print_json_error("CannotLook", message)
    print_error(message)
    return 2


def run(arguments: Sequence[str]) -> int:
    """Run one command; return its exit code."""
    given = list(arguments)
    try:
        with readers_may_stop():
            code = app(given, prog_name=PROGRAM, standalone_mode=False)
    except SystemExit as stopped:  # completion has printed what it found
        return stopped.code if isinstance(stopped.code, int) else 0
    except click.ClickException as error:
        if "--json" in given:
            print_json_error("UsageError", error.format_message())
        with readers_may_stop():
            error.show()
        return error.exit_code
    return code if isinstance(code, int) else 0
