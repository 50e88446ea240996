"""What is told of the saves and loads of a program that runs inside ``installed``.

The reports leave the process as lines of JSON, one per save and load, which rank 0 appends to a
file. The first load of a checkpoint that another planner wrote is looked at as ``doctor`` looks at
it: such a save may have lost experts, and nobody was told. The declaration that a refusal hands
over is written to a file, since a launcher puts the rank before each line that it prints.

A line of a save by two ranks::

    {"kind": "save", "path": "ckpt/3", "step": 3, "seconds": 0.4, "ranks": 2, "tensors": 2, ...}
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import IO, Any

from dcp_placements._torch import global_rank
from dcp_placements.advice.block import block_in
from dcp_placements.errors import PlacementError
from dcp_placements.installation import EndedCall
from dcp_placements.load.planner import PlacementLoadPlanner
from dcp_placements.offline.doctor import OVERWRITTEN, Diagnosis, diagnose
from dcp_placements.save.planner import PlacementSavePlanner
from dcp_placements.storage.provenance import provenance_of
from dcp_placements.storage.store import without_waiting

_COUNTED = {"keys": "tensors", "objects": "objects", "missing": "missing", "unread": "unread"}
"""Collections of keys of a report, of which a line has the number, by its name there."""

_LISTED = (
    *("ranks", "rules", "items", "unique_nbytes", "whole_nbytes", "replica_nbytes"),
    *("wanted_nbytes", "read_nbytes", "compared", "warnings"),
)
"""Attributes of a report that a line has as they are."""


class Watch:
    """Takes the saves and loads of a program as they end.

    Args:
        report: The file to which rank 0 appends a line for each; None for none.
        propose: The new file that gets the declaration of a refusal; None for none.

    Raises:
        OSError: The file of the lines cannot be written. Later such an error is printed alone.
    """

    def __init__(self, report: str | None = None, propose: str | None = None) -> None:
        self._report, self._propose = report, propose
        self._directory = os.getcwd()  # the program may change it
        if self._report is not None and is_first():
            with self._lines(self._report):
                pass  # it can be written
        self._looked_at: set[str] = set()
        self.count = 0
        """Saves and loads that have ended, with an error or without."""

    @staticmethod
    def _lines(path: str) -> IO[str]:
        """Open the file of the lines; a FIFO that nobody reads is refused."""
        return open(path, "a", encoding="utf-8", opener=without_waiting)

    def failed(self, error: BaseException) -> None:
        """Write the declaration that an error hands over, on the rank that has it."""
        self.count += 1
        failures = getattr(error, "failures", None)  # torch's, of all ranks
        errors = [each[0] for each in failures.values()] if failures else [error]
        block = next(filter(None, [block_in(str(each)) for each in errors]), "")
        if self._propose is None or not block:
            return
        try:
            place = os.path.join(self._directory, self._propose)
            with open(place, "x", encoding="utf-8") as file:
                file.write(block)
        except OSError as problem:
            say(f"--propose {self._propose}: {problem.strerror}: the declaration is not written")
        else:
            say(
                f"the declaration is in {self._propose}: read it, then run with "
                f"--placements {self._propose}:placements"
            )

    def ended(self, call: EndedCall) -> None:
        """Tell of a save or load; on rank 0 alone."""
        self.count += 1
        if global_rank() != 0:
            return
        path = path_of(call)
        if call.kind == "load" and path not in self._looked_at:
            self._looked_at.add(path)
            if finding := lost_experts(path, call.planner):
                warnings.warn(finding, stacklevel=2)
        if self._report is not None:
            line = json.dumps({"kind": call.kind, "path": path, **line_of(call)})
            try:
                with self._lines(os.path.join(self._directory, self._report)) as file:
                    file.write(line + "\n")
            except OSError as problem:
                say(f"--report {self._report}: {problem.strerror}: no more lines are written")
                self._report = None


def is_first() -> bool:
    """Whether this is rank 0, also before and after its process group, by a launcher's variable."""
    return os.environ.get("RANK", str(global_rank())) == "0"


def say(text: str) -> None:
    """Print a line to the program's errors."""
    print(f"dcp_placements.run: {text}", file=sys.stderr, flush=True)


def path_of(call: EndedCall) -> str:
    """Return the path or URL that a save writes to or a load reads; empty where nothing tells."""
    storage = call.arguments.get(f"storage_{'writer' if call.kind == 'save' else 'reader'}")
    path: Any = getattr(storage, "checkpoint_id", None) or getattr(storage, "path", "")
    return str(path)


def line_of(call: EndedCall) -> dict[str, Any]:
    """Return what a line has of a save or load: step, seconds, and numbers of its report.

    A planner that is none of ours has no report, and ``served`` is false; one that was sent to
    another process has no report here.
    """
    metadata = getattr(call.planner, "metadata", None) if call.kind == "load" else None
    provenance = None if metadata is None else provenance_of(metadata)
    step = getattr(call.planner, "step", None) if call.kind == "save" else None
    line: dict[str, Any] = {
        "step": step if provenance is None else provenance.get("step"),
        "seconds": round(call.seconds, 3),
    }
    line["served"] = isinstance(call.planner, PlacementSavePlanner | PlacementLoadPlanner)
    report = getattr(call.planner, "report", None)
    if report is None or not report.planned:
        return line
    described = report.as_dict()
    for attribute, name in _COUNTED.items():
        if attribute in described:
            line[name] = len(described[attribute])
    line |= {name: described[name] for name in _LISTED if name in described}
    return line


def lost_experts(path: str, planner: Any) -> str | None:
    """Return what ``doctor`` finds lost in the checkpoint that a planner has read; None if nothing.

    Args:
        path: Of the checkpoint.
        planner: The planner of the load.
    """
    metadata = getattr(planner, "metadata", None)  # a framework's own planner may have none
    if metadata is not None and provenance_of(metadata) is not None:  # its save was proved
        return None
    try:
        diagnosis = diagnose(path)
    except PlacementError:  # not a checkpoint that the command line opens
        return None
    lost = {
        fqn: tensor for fqn, tensor in diagnosis.tensors.items() if tensor.verdict == OVERWRITTEN
    }
    if not lost:
        return None
    text = str(Diagnosis(diagnosis.path, lost, ()))
    return f"{path} was written without some experts, and this program has loaded it\n    {text}"
