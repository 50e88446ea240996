"""Our planners in every save and load of a framework that passes none of its own.

Most trainers call ``dcp.save`` and ``dcp.load`` without ``planner=``, or with torch's default
class. ``installed`` replaces the planner where torch reads it: in the functions behind ``save``
and ``load``, and in the executors behind ``async_save``. It does not matter from where a framework
imported ``save``, and an ``async_save`` has its planner before the context is left.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from threading import RLock, current_thread, get_ident
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from dcp_placements._torch import ASYNC_EXECUTORS, ASYNC_THREAD, LOAD, SAVE, Seam
from dcp_placements.errors import PlacementError
from dcp_placements.load.planner import PlacementLoadPlanner
from dcp_placements.placements import Placements
from dcp_placements.save.planner import PlacementSavePlanner

_lock = RLock()
_entered: list[tuple[installed, int]] = []
"""Those that are entered and not left, each with the thread that entered it, the innermost last."""


class installed:
    """Serve every save and load inside by the planners of ``placements``.

    ``dcp.save``, ``dcp.load`` and ``dcp.async_save`` that are called without a planner, or with an
    instance of exactly torch's ``DefaultSavePlanner`` or ``DefaultLoadPlanner``, use ours; the
    options of torch's instance are carried over. An ``async_save`` is planned by ours even if its
    thread or process plans after the context is left.

    It is a context manager: ``with installed(placements): ...``; without ``with`` it does nothing,
    which is warned of. Contexts nest: the innermost
    counts. They hold for all threads of the process, since frameworks save from threads of their
    own; so a thread cannot enter one of another declaration while another thread is inside.

    Args:
        placements: The rules and names of this job.
        save: Options of ``PlacementSavePlanner`` for the saves inside, such as
            ``{"on_conflict": "warn"}``; they count before those of torch's instance.
        load: The same of ``PlacementLoadPlanner``.
        strict: Refuse a save or load that passes another planner of its own; by default such a
            planner is left alone, with a warning that names it.

    Raises:
        PlacementError: ``placements`` is none, an unknown option; on entry, another declaration by
            another thread; inside, with ``strict=True``, by a save or load.
    """

    def __init__(
        self,
        placements: Placements,
        *,
        save: Mapping[str, Any] | None = None,
        load: Mapping[str, Any] | None = None,
        strict: bool = False,
    ) -> None:
        if not isinstance(placements, Placements):
            raise PlacementError(
                f"installed() takes a Placements, not {type(placements).__name__}\n"
                "    way out:     installed(Placements(rules, rename=...))"
            )
        self._placements = placements
        self._options = {"save": dict(save or {}), "load": dict(load or {})}
        self._strict = strict
        for call, options in self._options.items():
            try:
                self._planner(call, None)
            except TypeError as error:
                raise PlacementError(f"installed({call}={options}): {error}") from None
        self._was_entered = False

    def __del__(self) -> None:
        # Not where a constructor refused its arguments, nor where the process ends.
        if not getattr(self, "_was_entered", True) and not sys.is_finalizing():
            warnings.warn(
                "installed(placements) was called and never entered: no save or load used it\n"
                "    way out:     with installed(placements): around the saves and loads; an "
                "ExitStack's enter_context() where they are in other functions",
                stacklevel=2,
            )

    def _declares(self) -> tuple[Any, ...]:
        return self._placements, self._options, self._strict

    def __enter__(self) -> None:
        self._was_entered = True
        with _lock:
            for other, thread in _entered:
                if thread != get_ident() and other._declares() != self._declares():
                    raise PlacementError(
                        "another thread is inside installed() with another declaration, which "
                        "this one would change under its saves and loads\n"
                        "    way out:     planner=placements.save_planner() in one of the threads; "
                        "or one after the other"
                    )
            if not _entered:
                _replace_seams()
            _entered.append((self, get_ident()))

    def __exit__(self, *_: object) -> None:
        with _lock:
            # The last one: the same instance may be entered again inside another.
            own = [at for at, (one, _) in enumerate(_entered) if one is self]
            del _entered[own[-1]]
            if not _entered:
                _restore_seams()

    def _planner(self, call: str, planner: Any) -> Any:
        """Return the planner of a call that was made with ``planner``, which may be None."""
        default, names = _DEFAULTS[call]
        if planner is None or type(planner) is default:
            given = {name: getattr(planner, name) for name in names if planner is not None}
            options = {**given, **self._options[call]}
            return getattr(self._placements, f"{call}_planner")(**options)
        if isinstance(planner, PlacementSavePlanner | PlacementLoadPlanner):
            return planner
        kind = type(planner)
        text = (
            f"dcp.{call} was called with planner={kind.__module__}.{kind.__qualname__}, which "
            "installed() does not replace\n"
            "    way out:     pass placements.save_planner() or placements.load_planner() where "
            "the framework lets you"
        )
        if self._strict:
            raise PlacementError(text)
        warnings.warn(text, stacklevel=3)
        return planner


_DEFAULTS: dict[str, tuple[type, tuple[str, ...]]] = {
    "save": (
        DefaultSavePlanner,
        ("flatten_state_dict", "flatten_sharded_tensors", "dedup_save_to_lowest_rank"),
    ),
    "load": (
        DefaultLoadPlanner,
        ("flatten_state_dict", "flatten_sharded_tensors", "allow_partial_load"),
    ),
}
"""By call torch's planner, and those of its options that are carried over."""


def _served(function: Callable[..., Any], call: str) -> Callable[..., Any]:
    """Return a function that is called with the planner of the innermost context."""
    signature = inspect.signature(function)

    def served(*args: Any, **kwargs: Any) -> Any:
        with _lock:
            innermost = _entered[-1][0] if _entered else None
        # In its thread async_save has the planner of its call, perhaps outside of this context.
        in_thread = call == "save" and current_thread().name.startswith(ASYNC_THREAD)
        if innermost is None or in_thread:
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.arguments["planner"] = innermost._planner(call, bound.arguments.get("planner"))
        return function(*bound.args, **bound.kwargs)

    return served


_replaced: list[tuple[Seam, Any, Any]] = []
"""The seams in use, with what was there before and what is there now."""


def _replace_seams() -> None:
    for seam in (SAVE, LOAD, *ASYNC_EXECUTORS):
        original = getattr(*seam)
        if seam in ASYNC_EXECUTORS:
            # Its saves have their planner when they are started.
            execute_save = _served(original.execute_save, "save")
            ours: Any = type(original.__name__, (original,), {"execute_save": execute_save})
        else:
            ours = _served(original, "save" if seam is SAVE else "load")
        setattr(*seam, ours)
        _replaced.append((seam, original, ours))


def _restore_seams() -> None:
    """Put back what was there; what somebody else has put over ours since stays.

    Ours changes nothing outside a context.
    """
    while _replaced:
        seam, original, ours = _replaced.pop()
        if getattr(*seam) is ours:
            setattr(*seam, original)
