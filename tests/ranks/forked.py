"""Ranks that are forked from one process: torch is imported once, and not by every rank.

    python tests/ranks/forked.py RANKS MODULES PROGRAM [argument ...]

Imports what the program imports at its top and the modules (joined by commas), forks the ranks, and
runs the program in each with the environment that torchrun sets. The exit code is 0 when every
rank's is; some seconds after the first other one the rest are ended.
"""

from __future__ import annotations

import ast
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import torch.distributed as dist

# What imports torch._dynamo when it is first called: seconds, in each rank.
LATE = ("fully_shard", "torch.optim", "distribute_tensor")

GRACE = 5.0
"""Seconds that the other ranks have to say why they fail, too."""


def fork(work: Callable[[], object], **environment: str) -> int:
    """Return the process id of a child that calls ``work``, and does nothing else."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ.update(environment)
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)  # torch's, with the rank
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def import_what(program: Path) -> None:
    """Import what a program imports at its top, and the names that modules import when asked."""
    for node in ast.parse(program.read_text()).body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            module = import_module(node.module)
            for alias in node.names:
                getattr(module, alias.name, None)


def main() -> int:
    sys.argv.pop(0)
    ranks, modules, program = int(sys.argv.pop(0)), sys.argv.pop(0), Path(sys.argv[0])
    sys.path[:0] = [str(program.parent), *map(str, Path(__file__).resolve().parents[1:3])]
    import_what(program)
    for module in filter(None, modules.split(",")):
        import_module(module)
    if any(word in program.read_text() for word in LATE):
        import_module("torch._dynamo")
    work = partial(runpy.run_path, str(program), run_name="__main__")
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    running = {fork(work, RANK=str(n), LOCAL_RANK=str(n), **common) for n in range(ranks)}
    # The store has threads, so it is opened after the forks; until then connections wait.
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    ends = None  # when the rest are ended, once a rank has failed
    while running:
        child, status = os.waitpid(-1, 0 if ends is None else os.WNOHANG)
        running.discard(child)
        if child and status and ends is None:
            ends = time.monotonic() + GRACE
        elif not child and time.monotonic() < ends:
            time.sleep(0.05)
        elif not child:
            for other in running:
                os.kill(other, signal.SIGKILL)
            ends = float("inf")
    del store
    return int(ends is not None)


if __name__ == "__main__":
    sys.exit(main())
