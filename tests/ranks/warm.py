"""A process that has imported torch, and forks one of itself for each program of the tests.

Started by ``tests/torchrun.py``, once for all programs of a pytest process: the import costs more
than most of them. Reads a line of JSON per program, which has ``arguments`` (those behind
``python``), ``cwd``, ``environment`` and the files ``stdout`` and ``stderr``; answers with the
number of the child, and with its exit code when it has ended.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

# The last is imported when optimizers, FSDP and DTensors are first used: seconds, in each process.
MODULES = ("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch._dynamo")
OWN = (__file__, runpy.__file__, "<frozen runpy>")


def served() -> dict[str, Any] | None:
    """Fork a child per line, and return what it shall run; None in this process, at the end."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            request: dict[str, Any] = json.loads(line)
            return request
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def behind_runpy(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the program."""
    while trace and trace.tb_next and trace.tb_frame.f_code.co_filename in OWN:
        trace = trace.tb_next
    return trace


def run(request: dict[str, Any]) -> None:
    """Become ``python`` with these arguments."""
    os.setsid()  # all that it starts can be ended together
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, name in enumerate((os.devnull, request["stdout"], request["stderr"])):
        with open(name, "r+b" if number == 0 else "wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.argv[:] = request["arguments"]
    is_module = sys.argv[0] == "-m"
    if is_module:
        sys.argv.pop(0)
    sys.path[0] = request["cwd"] if is_module else str(Path(sys.argv[0]).parent)
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception as error:
        sys.excepthook(type(error), error, behind_runpy(error.__traceback__))
        sys.exit(1)


if __name__ == "__main__":
    for name in MODULES:
        import_module(name)
    gc.freeze()  # a collection in a child leaves these pages shared
    if child := served():
        run(child)
