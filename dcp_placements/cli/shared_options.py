"""Options and arguments that several commands take."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dcp_placements.errors import CannotLook, PlacementError
from dcp_placements.rules.mesh_axes import MeshAxes
from dcp_placements.rules.patterns import EVERY

if TYPE_CHECKING:
    import torch

CommandOption = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A decorator that gives a command an option, or an argument."""


class Parsed(click.ParamType):  # type: ignore[type-arg]  # older versions have none
    """The type of options whose text a function parses."""

    name = "text"

    def __init__(self, parse: Callable[[str], Any]) -> None:
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the parsed value; an error of the function is the option's."""
        try:
            return self._parse(value) if isinstance(value, str) else value
        except PlacementError as error:
            self.fail(str(error), param, ctx)


def parse_nbytes(text: str) -> int:
    """Return the bytes of ``512MiB``; units are binary, however they are spelled."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise CannotLook(f"{text!r} is no size: write for instance 512MiB or 2GiB")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def parse_dtype(text: str) -> torch.dtype:
    """Return the dtype of this name in torch."""
    import torch

    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise CannotLook(f"{text!r} is no dtype: write for instance bfloat16")
    return dtype


def parse_pair(text: str) -> tuple[str, str]:
    """Return the two names of ``NAME=NAME``."""
    first, _, second = text.partition("=")
    if not first or not second:
        raise CannotLook(f"{text!r}: write NAME=NAME, as in lm_head.weight=embed.weight")
    return first, second


def parse_storage_option(text: str) -> tuple[str, Any]:
    """Return the name and the value of ``KEY=VALUE``; a value that is JSON is decoded.

    >>> parse_storage_option("anon=true"), parse_storage_option("key=AKIA0")
    (('anon', True), ('key', 'AKIA0'))
    """
    name, _, value = text.partition("=")
    if not name or not value:
        raise CannotLook(f"{text!r}: write KEY=VALUE, as in endpoint_url=http://host:9000")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def resolve(spec: str) -> Callable[..., Any]:
    """Return the function that ``MODULE:FUNC`` names; the working directory is searched first.

    Raises:
        CannotLook: There is no such module or function, or importing it fails.
    """
    module_name, _, path = spec.partition(":")
    if not module_name or not path:
        raise CannotLook(f"{spec!r} names no function: write MODULE:FUNC, as in my_rules:rules")
    if module_name.endswith(".py") or "/" in module_name:
        file = Path(module_name).with_suffix("")
        raise CannotLook(
            f"{spec!r} names a file, not a module\n"
            f"    way out:     {file.name}:{path}, in the directory {file.parent}, or with that in "
            "PYTHONPATH"
        )
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function: Any = import_module(module_name)
    except Exception as error:
        # A user's module can raise anything while it is imported.
        raise CannotLook(
            f"{spec}: module {module_name} cannot be imported: {type(error).__name__}: {error}\n"
            f"    looked in:   {here} and the installed packages"
        ) from error
    for name in path.split("."):
        function = getattr(function, name, None)
    if function is None:
        raise CannotLook(f"{spec}: {module_name} has no function {path}")
    if not callable(function):
        raise CannotLook(f"{spec} is of type {type(function).__name__}, no function")
    return function  # type: ignore[no-any-return]


def parse_mesh(text: str) -> MeshAxes:
    """Return the axes of ``"ep=8,edp=2"``.

    >>> parse_mesh("ep=8,edp=2")
    {'ep': 8, 'edp': 2}

    Raises:
        CannotLook: It is not of that form, or names an axis twice.
    """
    axes: MeshAxes = {}
    for axis_text in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*([1-9]\d*)\s*", axis_text)
        if match is None or match[1] in axes:
            why = f"{axis_text.strip()!r} is not axis=size with a size of 1 and more"
            if match is not None:
                why = f"it names axis {match[1]!r} twice"
            raise CannotLook(f"{text!r} is no mesh, {why}: write for instance ep=8,edp=2")
        axes[match[1]] = int(match[2])
    return axes


def parse_fsdp(text: str) -> tuple[str, list[str]]:
    """Return the pattern of keys and the axes of ``experts=edp``, or of ``edp,ep`` for all keys.

    >>> parse_fsdp("experts=edp"), parse_fsdp("edp,ep")
    (('experts', ['edp']), ('**', ['edp', 'ep']))
    """
    pattern, _, axes = text.rpartition("=")
    return pattern or EVERY, [name.strip() for name in axes.split(",") if name.strip()]


def fsdp_of(given: Iterable[tuple[str, list[str]]]) -> dict[str, list[str]]:
    """Return the axes of FSDP by pattern; the pattern of all other keys comes last."""
    return dict(sorted(given, key=lambda pattern_axes: pattern_axes[0] == EVERY))


class Argument(click.Argument):
    """An argument with a text for the help, which only newer versions of click show."""

    def __init__(self, *args: Any, text: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.text = f"{text}  [required]" if self.required else text


def argument(
    name: str, metavar: str, text: str, *, required: bool = True, nargs: int = 1
) -> CommandOption:
    """Return an argument."""
    options: dict[str, Any] = {"metavar": metavar, "required": required, "nargs": nargs}
    return click.argument(name, cls=Argument, text=text, **options)


checkpoint_argument = argument("ckpt", "CKPT", "The checkpoint's directory or URL.")
out_argument = argument("out", "OUT", "The checkpoint to write; must not exist.")
fqn_option = click.option(
    "--fqn",
    metavar="PATTERN",
    help="Only keys that match: dotted names, * for one name, ** for any number of them.",
)
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Say what would be written, and write nothing."
)
fsdp_option = click.option(
    "--fsdp",
    metavar="[PATTERN=]AXIS,...",
    type=Parsed(parse_fsdp),
    multiple=True,
    callback=lambda context, option, given: fsdp_of(given),
    help="The axes over which FSDP shards dim 0: of all tensors, or of those that match. May be "
    "repeated.",
)


def number_option(name: str, help_text: str) -> CommandOption:
    """Return an option that is a number from 1 up."""
    return click.option(name, metavar="N", type=click.IntRange(min=1), help=help_text)


def size_option(name: str, help_text: str, default: str | None = None) -> CommandOption:
    """Return an option that is a number of bytes."""
    kind = Parsed(parse_nbytes)
    return click.option(name, metavar="SIZE", type=kind, default=default, help=help_text)


def memory_option(default: str) -> CommandOption:
    """Return the option that bounds the memory of data."""
    return size_option("--memory", "The most memory for data, such as 512MiB.", default)


def function_option(name: str, help_text: str, *, required: bool = False) -> CommandOption:
    """Return an option that names a function."""
    kind = Parsed(resolve)
    return click.option(name, metavar="MODULE:FUNC", type=kind, required=required, help=help_text)


rules_option = function_option("--rules", "A function mesh -> Placements.", required=True)


def parse_whole(text: str) -> Any:
    """Return the path of a model, or the function that ``MODULE:FUNC`` names."""
    is_path = os.path.exists(text) or "://" in text or ":" not in text
    return text if is_path else resolve(text)


whole_option = click.option(
    "--whole",
    metavar="MODEL",
    type=Parsed(parse_whole),
    help="The unsharded model: a Hugging Face directory or URL, or MODULE:FUNC, which returns it.",
)


mesh_option = click.option(
    "--mesh",
    metavar="AXIS=SIZE,...",
    type=Parsed(parse_mesh),
    required=True,
    help="Outermost axis first: ep=8,edp=2.",
)


class SourceOption(click.Option):
    """An option of the files that a command reads; the help lists these apart."""


def source_options(prefix: str = "") -> CommandOption:
    """Return the options for what the names of files do not say, for every command that reads some.

    The command gets ``opening``: the arguments of ``offline.open_source`` beside the path.

    Args:
        prefix: Text before ``rules`` and ``mesh``, where the command has such options of its own.
    """
    functions, meshes, count = Parsed(resolve), Parsed(parse_mesh), click.IntRange(min=1)
    of_ranks = "Files per rank, items of an engine: {} of the world that saved{}."
    declared: dict[str, tuple[str, str, click.ParamType[Any], str]] = {
        "files": (
            "files",
            "NAME",
            click.STRING,
            "Files per rank: their name, with {rank} for the number. Verl's are found.",
        ),
        "rules": (
            f"{prefix}rules",
            "MODULE:FUNC",
            functions,
            of_ranks.format("the function mesh -> Placements", ""),
        ),
        "axes": (
            f"{prefix}mesh",
            "AXIS=SIZE,...",
            meshes,
            of_ranks.format("the mesh", ", outermost axis first: ep=8,edp=2"),
        ),
        "vocab_size": (
            "vocab-size",
            "N",
            count,
            "Megatron: rows without padding, if the files lack the number.",
        ),
        "expert_parallel_size": (
            "expert-parallel-size",
            "N",
            count,
            "Megatron: if the files leave it open.",
        ),
        "expert_tensor_parallel_size": (
            "expert-tensor-parallel-size",
            "N",
            count,
            "Megatron: if the files hold no arguments.",
        ),
    }

    def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def opened(*, storage_options: Any, **given: Any) -> Any:
            opening = {name: given.pop(f"source_{name}") for name in declared}
            return command(opening={**opening, "storage_options": storage_options}, **given)

        for name, (option, metavar, kind, text) in reversed(declared.items()):
            decorated = click.option(
                f"--{option}",
                f"source_{name}",
                cls=SourceOption,
                metavar=metavar,
                type=kind,
                help=text,
            )
            opened = decorated(opened)
        return opened

    return with_options
