"""All commands, and the exit codes of their errors.

A command's module, and torch with it, is imported when the command runs: help and completion of
commands need neither.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dcp_placements.cli.printing import print_error, print_json_error, readers_may_stop
from dcp_placements.cli.progress import progress
from dcp_placements.errors import CannotLook, PlacementError, format_name

PROGRAM = "dcp-placements"
DEBUG = "DCP_PLACEMENTS_DEBUG"
"""The environment variable that shows the traceback of unexpected errors."""

MAX_MESSAGE = 500
"""Characters of an unexpected error's message."""

EXAMINE, COMPARE, REPAIR, CONVERT = (
    "Examine a checkpoint",
    "Check and compare",
    "Repair",
    "Convert and move",
)


@dataclass(frozen=True, slots=True)
class CommandSummary:
    """A command, as the list of commands has it.

    Attributes:
        function: ``module:function`` in ``dcp_placements.cli.commands``; it returns the exit code.
        purpose: The heading above it.
        text: The first paragraph of the function's docstring.
    """

    function: str
    purpose: str
    text: str

    def load(self) -> Callable[..., int]:
        """Import the function."""
        module, _, name = self.function.partition(":")
        function: Callable[..., int] = getattr(
            import_module(f"dcp_placements.cli.commands.{module}"), name
        )
        return function


COMMANDS = {
    "inspect": CommandSummary(
        "inspecting:inspect_command",
        EXAMINE,
        "Sum up tensors, small objects with their values, and the record of the save.",
    ),
    "explain": CommandSummary(
        "explaining:explain_command",
        EXAMINE,
        "Follow one tensor from its rule to axes, chunks, files and byte ranges.",
    ),
    "draw": CommandSummary(
        "drawing:draw_command",
        EXAMINE,
        "Draw a tensor's chunks by writer rank, or the bytes that each rank wrote.",
    ),
    "megatron": CommandSummary(
        "megatron:megatron_command",
        EXAMINE,
        "Report which ranks wrote mp_rank_* files, and what is missing or does not fit.",
    ),
    "verify": CommandSummary(
        "verifying:verify_command",
        COMPARE,
        "Find holes, overlaps, missing and damaged files, mixed saves.",
    ),
    "diff": CommandSummary(
        "differing:diff_command",
        COMPARE,
        "Compare two checkpoints element by element; --rename maps A's keys to B's.",
    ),
    "rehearse": CommandSummary(
        "rehearsing:rehearse_command",
        COMPARE,
        "Plan a load on every rank of a mesh that need not exist. No data is read.",
    ),
    "doctor": CommandSummary(
        "doctoring:doctor_command",
        REPAIR,
        "Report which experts survived a save that took them for replicas, and who wrote them.",
    ),
    "merge-metadata": CommandSummary(
        "merging:merge_metadata_command",
        REPAIR,
        "Write .metadata for plain DCP, after a save without collectives or without stock "
        "metadata.",
    ),
    "import": CommandSummary(
        "importing:import_command",
        CONVERT,
        "Turn Megatron's mp_rank_* files, or safetensors, into a DCP checkpoint that loads "
        "anywhere.",
    ),
    "export": CommandSummary(
        "exporting:export_command",
        CONVERT,
        "Write a checkpoint as the files that from_pretrained reads, or as one torch file.",
    ),
    "reshard": CommandSummary(
        "rehearsing:reshard_command",
        CONVERT,
        "Rewrite a checkpoint for the mesh that will load it: each rank's bytes in one file.",
    ),
    "transfer": CommandSummary(
        "transferring:transfer_command",
        CONVERT,
        "Plan which rank of one world sends which bytes to which of another. No data is read.",
    ),
}

PRESETS = {
    "dcp_placements.presets": "megatron_core, megatron_lite, transformers, veomni",
    "dcp_placements.presets.hub": "deepseek_v3, mixtral, qwen3_moe",
}
"""Names of presets by module: rules for a mesh or a model; and renames to the names of the hub."""


class CommandGroup(TyperGroup):
    """The commands by purpose. A command's own options are there once it is to run."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command with its options, and the other arguments."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            # Most commands import torch. A shell that completes words must not be drawn over.
            completing = ctx.resilient_parsing
            with nullcontext() if completing else progress(f"{PROGRAM} {name}"):
                command = _load_command(name)
        return name, command, rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the lists of commands and presets."""
        for purpose in dict.fromkeys(command.purpose for command in COMMANDS.values()):
            with formatter.section(purpose):
                formatter.write_dl(
                    [(name, c.text) for name, c in COMMANDS.items() if c.purpose == purpose]
                )
        with formatter.section("Presets, for a trainer's rules and for --rename MODULE:FUNC"):
            formatter.write_dl(list(PRESETS.items()))


app = typer.Typer(
    name=PROGRAM,
    cls=CommandGroup,
    help="Inspect, check, compare, convert and repair checkpoints. The exit code is 0 for sound or "
    "equal, 1 for faults or differences, and 2 if a command could not read or write.",
    no_args_is_help=True,
    # Panels cut long names of options at 80 columns.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _placeholder() -> None:
    """Do nothing: ``CommandGroup`` puts the command in its place."""


for _name, _summary in COMMANDS.items():
    app.command(_name, short_help=_summary.text)(_placeholder)


def _load_command(name: str) -> Any:
    """Return a command with its options."""
    from dcp_placements.cli.arguments import STORAGE_OPTIONS
    from dcp_placements.storage.remote.urls import default_options, is_url

    function = COMMANDS[name].load()

    @wraps(function)
    def command(storage_option: list[Any] | None = None, **kwargs: Any) -> None:
        urls = [str(value) for value in kwargs.values() if isinstance(value, str) and is_url(value)]

        def run_function() -> int:
            with default_options(urls, dict(storage_option or ())):
                return function(**kwargs)

        raise typer.Exit(_exit_code(run_function, json=kwargs.get("json", False)))

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
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command(name)(command)
    return typer.main.get_command(alone)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        # Without an import: that of torch takes seconds.
        print(f"{PROGRAM} {_version(PROGRAM)}, torch {_version('torch')}")
        raise typer.Exit


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


@app.callback()
def _main(
    is_asked: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions."),
    ] = False,
) -> None:
    # Without a docstring: the help is that of the application.
    pass


def _exit_code(command: Callable[[], int], *, json: bool) -> int:
    try:
        return command()
    except PlacementError as error:
        code = 2 if isinstance(error, CannotLook) else 1
        failure: Exception = error
        message = str(error)
    except OSError as error:
        code, failure, message = 2, error, str(error)
    except typer.BadParameter:
        raise  # ``run`` prints it, with the command's usage
    except Exception as error:
        # A file that is damaged in an unforeseen way, or a bug of ours.
        if os.environ.get(DEBUG):
            raise
        text = format_name(error)[:MAX_MESSAGE]
        message = f"{type(error).__name__}: {text} ({DEBUG}=1 shows where)"
        code, failure = 2, error
    if json:
        print_json_error(type(failure).__name__, message)
    print_error(message)
    return code


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with readers_may_stop():
            code = app(given, prog_name=PROGRAM, standalone_mode=False)
    except SystemExit as stopped:
        return stopped.code if isinstance(stopped.code, int) else 0
    except Exception as error:
        # typer has no public name for the class of its errors of usage.
        show_usage = getattr(error, "show", None)
        if show_usage is None:
            raise
        if "--json" in given:
            print_json_error("UsageError", getattr(error, "format_message", error.__str__)())
        with readers_may_stop():
            show_usage()
        return 2
    return code if isinstance(code, int) else 0
