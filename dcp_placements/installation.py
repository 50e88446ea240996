"""Our planners in every save and load of a framework that passes none of its own.

Most trainers call ``dcp.save`` and ``dcp.load`` without ``planner=``, or with torch's default
class. ``installed`` replaces the planner where torch reads it: in the functions behind ``save``
and ``load``, and in the executors behind ``async_save``. It does not matter from where a framework
imported ``save``, and an ``async_save`` has its planner before the context is left.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from threading import RLock, current_thread
from typing import Any

from dcp_placements._torch import (
    ASYNC_EXECUTORS,
    ASYNC_THREAD,
    LOAD,
    SAVE,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    Seam,
)
from dcp_placements.errors import PlacementError
from dcp_placements.load.planner import PlacementLoadPlanner
from dcp_placements.placements import Placements
from dcp_placements.save.planner import PlacementSavePlanner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Installation:
    """One ``installed`` context: what serves the calls inside it."""

    placements: Placements
    strict: bool

    def save_planner(self, planner: Any, target: str) -> Any:
        """Return the planner of a save that was called with ``planner``, which may be None."""
        if current_thread().name.startswith(ASYNC_THREAD):
            return planner  # chosen when async_save was called, perhaps outside of this context
        if planner is not None and type(planner) is not DefaultSavePlanner:
            return self._others("dcp.save", planner, PlacementSavePlanner, target)
        options = {} if planner is None else _options(planner, _SAVE_OPTIONS)
        return self._ours("dcp.save", self.placements.save_planner(**options), target)

    def load_planner(self, planner: Any, target: str) -> Any:
        """Return the planner of a load that was called with ``planner``, which may be None."""
        if planner is not None and type(planner) is not DefaultLoadPlanner:
            return self._others("dcp.load", planner, PlacementLoadPlanner, target)
        options = {} if planner is None else _options(planner, _LOAD_OPTIONS)
        return self._ours("dcp.load", self.placements.load_planner(**options), target)

    @staticmethod
    def _ours(call: str, planner: Any, target: str) -> Any:
        logger.info("%s%s: planned by %s", call, target, type(planner).__name__)
        return planner

    def _others(self, call: str, planner: Any, ours: type, target: str) -> Any:
        """Return a planner that is neither None nor torch's default class."""
        name = f"{type(planner).__module__}.{type(planner).__qualname__}"
        logger.info("%s%s: planned by %s, as the caller passed it", call, target, name)
        if isinstance(planner, ours):
            return planner
        text = (
            f"{call}{target} was called with planner={name}, which installed() does not replace\n"
            "    likely:      the framework has a planner of its own, and the Placements do not "
            "apply to this call\n"
            "    way out:     pass placements.save_planner() or placements.load_planner() where "
            "the framework lets you"
        )
        if self.strict:
            raise PlacementError(text)
        warnings.warn(text, stacklevel=4)
        return planner


_SAVE_OPTIONS = ("flatten_state_dict", "flatten_sharded_tensors", "dedup_save_to_lowest_rank")
_LOAD_OPTIONS = ("flatten_state_dict", "flatten_sharded_tensors", "allow_partial_load")

_lock = RLock()
_installations: list[_Installation] = []
"""Those that are entered and not left, the innermost last; the same for all threads."""


class installed:
    """Serve every save and load inside by the planners of ``placements``.

    ``dcp.save``, ``dcp.load`` and ``dcp.async_save`` that are called without a planner, or with an
    instance of exactly torch's ``DefaultSavePlanner`` or ``DefaultLoadPlanner``, use ours; the
    options of torch's instance are carried over. An ``async_save`` is planned by ours even if its
    thread or process plans after the context is left. One line per call is logged, by
    ``logging.getLogger("dcp_placements.installation")`` at level INFO.

    It is a context manager: ``with installed(placements): ...``. Contexts nest: the innermost
    counts. They hold for all threads of the process.

    Args:
        placements: The rules and names of this job.
        strict: Refuse a save or load that passes another planner of its own; by default such a
            planner is left alone, with a warning that names it.

    Raises:
        PlacementError: ``placements`` is none; inside, with ``strict=True``, by a save or load.
    """

    def __init__(self, placements: Placements, *, strict: bool = False) -> None:
        if not isinstance(placements, Placements):
            raise PlacementError(
                f"installed() takes a Placements, not {type(placements).__name__}\n"
                "    way out:     installed(Placements(rules, rename=...))"
            )
        self._installation = _Installation(placements, strict)
        self._entered = False

    def __enter__(self) -> None:
        with _lock:
            if not _installations:
                _replace_seams()
            _installations.append(self._installation)
        self._entered = True

    def __exit__(self, *_: object) -> None:
        with _lock:
            # The last one: the same instance may be entered again inside another.
            own = [at for at, one in enumerate(_installations) if one is self._installation]
            del _installations[own[-1]]
            if not _installations:
                _restore_seams()

    def __del__(self) -> None:
        if not getattr(self, "_entered", True):
            warnings.warn(
                "installed(placements) was called and never entered: it changed nothing\n"
                "    way out:     with installed(placements): ..., around the calls of the "
                "framework",
                stacklevel=2,
            )


def _innermost() -> _Installation | None:
    with _lock:
        return _installations[-1] if _installations else None


def _with_planner(
    function: Callable[..., Any], choose: Callable[[_Installation, Any, str], Any], storage: str
) -> Callable[..., Any]:
    """Return a function that is called with the planner that ``choose`` returns."""
    signature = inspect.signature(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        installation = _innermost()
        if installation is None:
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        where = bound.arguments.get("checkpoint_id")
        if where is None:
            where = getattr(bound.arguments.get(storage), "checkpoint_id", None)
        target = "" if where is None else f" of {where}"
        bound.arguments["planner"] = choose(installation, bound.arguments.get("planner"), target)
        return function(*bound.args, **bound.kwargs)

    return call


def _executor(kind: type) -> type:
    """Return a class of executors whose saves have their planner when they are started."""
    start = kind.execute_save  # type: ignore[attr-defined]
    execute_save = _with_planner(start, _Installation.save_planner, "storage_writer")
    return type(kind.__name__, (kind,), {"execute_save": execute_save})


_replaced: list[tuple[Seam, Any, Any]] = []
"""The seams in use, with what was there before and what is there now."""


def _replace_seams() -> None:
    for seam in (SAVE, LOAD, *ASYNC_EXECUTORS):
        original = seam.get()
        if seam is SAVE:
            ours: Any = _with_planner(original, _Installation.save_planner, "storage_writer")
        elif seam is LOAD:
            ours = _with_planner(original, _Installation.load_planner, "storage_reader")
        else:
            ours = _executor(original)
        seam.set(ours)
        _replaced.append((seam, original, ours))


def _restore_seams() -> None:
    """Put back what was there; what somebody else has put over ours since stays.

    Ours changes nothing outside a context.
    """
    while _replaced:
        seam, original, ours = _replaced.pop()
        if seam.get() is ours:
            seam.set(original)


def _options(planner: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the options that torch's planner was made with."""
    return {name: getattr(planner, name) for name in names}
