"""``python -m dcp_placements.run``: any trainer with these planners, no line of it changed.

The program runs as ``__main__`` inside ``installed``, with its own arguments and exit code::

    torchrun --nproc-per-node 8 -m dcp_placements.run train.py --config x
    torchrun --nproc-per-node 8 -m dcp_placements.run --placements ours.py:placements train.py

Without ``--placements`` it is an alarm: saves and loads are those of torch's planners, but for what
would be lost, which is refused. With it, ``placements(meshes)`` returns the declaration. It is
called at each save and load, so that meshes that the program makes later are there. A load of a
checkpoint in which experts were lost is told of. ``--propose FILE.py`` gets the declaration that a
refused save hands over, ``--report FILE`` a line per save and load.
"""

from __future__ import annotations

import argparse
import ast
import atexit
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from itertools import pairwise
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from dcp_placements.declaration import Placements
from dcp_placements.errors import PlacementError
from dcp_placements.installation import Serving
from dcp_placements.program_meshes import ProgramMeshes
from dcp_placements.program_watch import Watch, is_first, say
from dcp_placements.short_text import format_error, format_names
from dcp_placements.storage.store import open_plain

Declare = Callable[[ProgramMeshes], Any]
"""A function of the user's, which returns the ``Placements`` of this rank."""

_USAGE = """\
python -m dcp_placements.run [--placements FILE.py:FUNCTION] [--save KEY=VALUE] [--load KEY=VALUE]
                             [--propose FILE.py] [--report FILE] [--strict]
                             PROGRAM.py | -m MODULE  [ARGUMENTS]"""
_NOTHING = Placements(None)


class RefusedStart(Exception):
    """The program was not started; its text is one line."""


def main(arguments: Sequence[str]) -> None:
    """Run a program inside ``installed``; what it raises, and its exit code, are its own.

    Args:
        arguments: The command line, without the name of this module.

    Raises:
        RefusedStart: Options, the file of the declaration or the program cannot be used.
    """
    given = _parsed(arguments)
    meshes = ProgramMeshes()
    declare = None if given.placements is None else _declaration(given.placements)

    def declared() -> Placements:
        if declare is None:
            return _NOTHING
        placements = declare(meshes)
        if not isinstance(placements, Placements):
            raise PlacementError(
                f"--placements {given.placements} returned a {type(placements).__name__}, not a "
                "Placements\n    way out:     return Placements(rules, rename=...)"
            )
        return placements

    try:
        watch = Watch(given.report, given.propose)
    except OSError as error:
        raise RefusedStart(f"--report {given.report}: {error.strerror}") from None
    try:
        save, load = _options(given.save), _options(given.load)
        serving = Serving(
            declared,
            save=save,
            load=load,
            strict=given.strict,
            ended=watch.ended,
            failed=watch.failed,
        )
    except PlacementError as error:
        raise RefusedStart(f"--{format_error(error)}") from None
    code, spec = _program(given)
    sys.argv[:] = [code.co_filename, *given.program[1:]]
    module = ModuleType("__main__")
    module.__file__, module.__spec__ = os.path.abspath(code.co_filename), spec
    module.__package__ = None if spec is None else spec.parent
    of_file = SourceFileLoader("__main__", module.__file__)
    module.__loader__ = of_file if spec is None else spec.loader
    sys.modules["__main__"] = module
    meshes.record()
    # It is not left: threads of the program may save after its main module has ended.
    serving.enter()
    has_failed = True
    try:
        exec(code, vars(module))
        has_failed = False
    except SystemExit as leaving:
        has_failed = bool(leaving.code)
        raise
    finally:
        if not has_failed:
            # Threads have ended then; a process that the program has forked is not the program.
            process = os.getpid()
            atexit.register(lambda: _end(watch) if os.getpid() == process else None)


def _end(watch: Watch) -> None:
    """Say that nothing was watched, at the end of a program that has raised nothing."""
    if not watch.count and is_first():
        say(
            "this process made no save or load of torch.distributed.checkpoint: nothing was checked"
        )


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options before the program, and the program with its arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m dcp_placements.run", usage=_USAGE, allow_abbrev=False, description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--placements", metavar="FILE.py:FUNCTION", help="returns the Placements")
    for kind in ("save", "load"):
        help_text = f"an option of Placements.{kind}_planner(), as often as wanted"
        parser.add_argument(
            f"--{kind}", metavar="KEY=VALUE", action="append", default=[], help=help_text
        )
    parser.add_argument(
        "--propose", metavar="FILE.py", help="a new file; gets the declaration of a refused save"
    )
    parser.add_argument("--report", metavar="FILE", help="gets a JSON line per save and load")
    parser.add_argument(
        "--strict", action="store_true", help="refuse a planner of the program's that is not served"
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is a module")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM ARGUMENTS")
    given = parser.parse_args(arguments)
    if not given.program:
        parser.error("a program is missing")
    for option, value in pairwise(given.program):
        if option == "--placements" and re.fullmatch(r".+\.py:\w+", value):
            say(f"{option} {value} is for the program: an option of run stands before PROGRAM")
    if given.propose is not None and Path(given.propose).exists():
        parser.error(
            f"--propose {given.propose}: this file exists: give another name, or remove it"
        )
    return given


def _options(pairs: Sequence[str]) -> dict[str, Any]:
    """Return options given as ``KEY=VALUE``; a value that is no Python literal is text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, is_pair, text = pair.partition("=")
        if not is_pair:
            raise RefusedStart(f"{pair!r} is not KEY=VALUE")
        try:
            options[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[key] = text
    return options


def _declaration(place: str) -> Declare:
    """Return the function that ``FILE.py:FUNCTION`` names; the file is executed."""
    path, is_pair, name = place.rpartition(":")
    if not is_pair:
        raise RefusedStart(f"--placements {place}: not FILE.py:FUNCTION{_functions_of(place)}")
    try:
        open_plain(path).close()
    except OSError as error:
        why = f"{path} cannot be read: {error.strerror}"
        raise RefusedStart(f"--placements {place}: {why}") from None
    spec = importlib.util.spec_from_file_location("declared_placements", path)
    if spec is None or spec.loader is None:
        raise RefusedStart(f"--placements {place}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # Modules beside it, behind all others: the program's own stay what they are.
    sys.path.append(str(Path(path).resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        kind = type(error).__name__
        raise RefusedStart(f"--placements {place}: {kind}: {format_error(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        missing = "no function of this name" if function is None else "no function"
        raise RefusedStart(f"--placements {place}: {missing} in {path}{_functions_of(path)}")
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):  # a class of torch's has no signature
        raise RefusedStart(
            f"--placements {place}: takes more or less than meshes alone: def {name}(meshes):"
        ) from None
    declare: Declare = function
    return declare


def _functions_of(path: str) -> str:
    """Return what names of functions a file of Python has; empty where it has none."""
    try:
        with open_plain(path) as stream:
            tree = ast.parse(stream.read())
    except (OSError, SyntaxError, ValueError):
        return ""
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return f"; it has {format_names(names, 4)}" if names else ""


def _program(given: argparse.Namespace) -> tuple[CodeType, ModuleSpec | None]:
    """Return the code of the program, and the spec of a module; ``sys.path`` becomes its own."""
    program = given.program[0]
    if given.is_module:
        try:
            spec = importlib.util.find_spec(program)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{program}.__main__")
        except ModuleNotFoundError as error:
            if not f"{program}.".startswith(f"{error.name}."):
                raise  # of a module that it imports
            raise RefusedStart(f"-m {program}: {format_error(error)}") from None
        except ValueError as error:
            raise RefusedStart(f"-m {program}: {format_error(error)}") from None
        get_code = getattr(None if spec is None else spec.loader, "get_code", None)
        code = None if spec is None or get_code is None else get_code(spec.name)
        if code is None:
            raise RefusedStart(f"there is no module {program} to run")
        return code, spec
    try:
        with open_plain(program) as stream:
            source = stream.read()
    except OSError as error:
        raise RefusedStart(f"{program} cannot be read: {error.strerror}") from None
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(program).resolve().parent)
    return compile(source, program, "exec", dont_inherit=True), None


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RefusedStart as refused:
        say(str(refused))
        sys.exit(2)
