"""Our planners in every save and load of a framework, also where it passes one of its own.

Most trainers call ``dcp.save`` and ``dcp.load`` without ``planner=``, or with torch's default
class. ``installed`` replaces the planner where torch reads it: in the functions behind ``save``
and ``load``, and in the executors behind ``async_save``. It does not matter from where a framework
imported ``save``, and an ``async_save`` has its planner before the context is left.
"""

from __future__ import annotations

import inspect
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from threading import RLock, current_thread, get_ident
from typing import Any, NamedTuple

from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from dcp_placements._torch import (
    ASYNC_EXECUTORS,
    ASYNC_THREAD,
    LOAD,
    SAVE,
    Seam,
    WholeFileLoadPlanner,
    world_size,
)
from dcp_placements.adoption import MAY_DIFFER, adopt, obstacle, ours_of
from dcp_placements.declaration import Placements
from dcp_placements.errors import Fault, PlacementError, raised_line
from dcp_placements.load.planner import PlacementLoadPlanner
from dcp_placements.save.planner import PlacementSavePlanner
from dcp_placements.short_text import near_names

_lock = RLock()
_entered: list[tuple[Serving, int]] = []
"""What is entered and not left, each with the thread that entered it, the innermost last."""


class EndedCall(NamedTuple):
    """A save or load that has ended without an error.

    Attributes:
        kind: ``"save"`` or ``"load"``.
        planner: The planner that served it, one of this package unless a framework's own was left
            alone.
        arguments: What torch's function was called with, by name.
        seconds: Its wall time on this rank; of an ``async_save`` from its start to its end.
    """

    kind: str
    planner: Any
    arguments: Mapping[str, Any]
    seconds: float


class Serving:
    """Gives saves and loads their planners, while it is entered.

    Args:
        declare: Returns the declaration; called for each save and load.
        save: Options of ``PlacementSavePlanner``.
        load: Options of ``PlacementLoadPlanner``.
        strict: Whether another planner is refused.
        ended: Takes each save and load that has ended without an error, on each rank, in the thread
            in which it ended.
        failed: Takes the error of each other one; it is raised all the same.
    """

    def __init__(
        self,
        declare: Callable[[], Placements],
        *,
        save: Mapping[str, Any] | None = None,
        load: Mapping[str, Any] | None = None,
        strict: bool = False,
        ended: Callable[[EndedCall], None] | None = None,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._declare, self._strict = declare, strict
        self._ended, self._failed = ended, failed
        self._options = {"save": dict(save or {}), "load": dict(load or {})}
        for kind, options in self._options.items():
            names = inspect.signature(_PLANNERS[kind]).parameters
            for name in options.keys() - names.keys():
                near = near_names(name, names, 3) or [*names]
                raise PlacementError(
                    f"{kind}={options}: there is no option {name!r}; there is "
                    f"{', '.join(map(repr, near))}"
                )
            try:
                getattr(Placements(None), f"{kind}_planner")(**options)
            except (TypeError, PlacementError) as error:
                raise PlacementError(f"{kind}={options}: {error}") from None

    def is_same(self, other: Serving) -> bool:
        """Whether another one serves by the same declaration and options."""
        own = self._declare, self._options, self._strict
        return own == (other._declare, other._options, other._strict)

    def planner(self, kind: str, planner: Any) -> Any:
        """Return the planner of a call that was made with ``planner``, which may be None."""
        default, names = _DEFAULTS[kind]
        if isinstance(planner, PlacementSavePlanner | PlacementLoadPlanner):
            return planner
        is_theirs = planner is not None and type(planner) is not default
        if type(planner) is WholeFileLoadPlanner and not self._strict:
            return planner  # torch's own, which reads a checkpoint as it is
        if is_theirs and (reason := obstacle(planner, default)):
            if not self._strict and getattr(planner, MAY_DIFFER, None) and self._is_bare:
                return planner
            class_of_it = type(planner)
            text = (
                f"this {kind} is not checked: dcp.{kind} was called with planner="
                f"{class_of_it.__module__}.{class_of_it.__qualname__}, which is not served\n"
                f"    found:       it {reason}\n"
                "    way out:     hooks that call super(), as those of a class that is served; or "
                "placements.save_planner(), .load_planner() where the framework lets you; "
                "strict=True (run --strict) refuses such a call"
            )
            if self._strict:
                raise PlacementError(text)
            warnings.warn(text, stacklevel=3)
            return planner
        given = {name: getattr(planner, name) for name in names if hasattr(planner, name)}
        options = {**given, **self._options[kind]}
        try:
            ours = getattr(self._declare(), f"{kind}_planner")(**options)
        except Exception as error:
            if world_size() == 1:
                raise
            return _refusing(kind, error)
        return adopt(planner, ours) if is_theirs else ours

    @property
    def _is_bare(self) -> bool:
        """Whether nothing is declared: ours would place each tensor where it says itself."""
        placements = self._declare()
        return placements.rules is None and placements.rename is None

    def call(self, kind: str, function: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
        """Call torch's function with the planner of a save or load, and tell of its end.

        Args:
            kind: ``"save"`` or ``"load"``.
            function: Torch's.
            bound: Its arguments.
        """
        arguments = _named_arguments(bound)
        start = time.monotonic()

        def end(future: Future[Any] | None = None) -> None:
            if future is not None and future.cancelled():
                return
            if future is not None and (error := future.exception()) is not None:
                fail(error)
            elif self._ended is not None:
                seconds = time.monotonic() - start
                self._ended(EndedCall(kind, ours_of(arguments["planner"]), arguments, seconds))

        def fail(error: BaseException) -> None:
            if self._failed is not None:
                self._failed(error)

        try:
            arguments["planner"] = self.planner(kind, arguments.get("planner"))
            result = function(*bound.args, **bound.kwargs)
        except BaseException as error:
            fail(error)
            raise
        if isinstance(result, Future):
            result.add_done_callback(end)
        else:
            end()
        return result

    def enter(self) -> None:
        """Serve all saves and loads of the process from now on.

        Raises:
            PlacementError: Another thread has entered another declaration.
        """
        with _lock:
            for other, thread in _entered:
                if thread != get_ident() and not other.is_same(self):
                    raise PlacementError(
                        "another thread is inside installed() with another declaration, which "
                        "this one would change under its saves and loads\n"
                        "    way out:     planner=placements.save_planner() in one of the threads; "
                        "or one after the other"
                    )
            if not _entered:
                _replace_seams()
            _entered.append((self, get_ident()))

    def leave(self) -> None:
        """Serve none of them any more, but for what entered it before and has not left it."""
        with _lock:
            # The last one: the same instance may be entered again inside another.
            own = [number for number, (other, _) in enumerate(_entered) if other is self]
            del _entered[own[-1]]
            if not _entered:
                _restore_seams()


class installed:
    """Serve every save and load inside by the planners of ``placements``.

    ``dcp.save``, ``dcp.load`` and ``dcp.async_save`` that are called without a planner, or with an
    instance of exactly torch's ``DefaultSavePlanner`` or ``DefaultLoadPlanner``, use ours; the
    options of torch's instance are carried over. An instance of a subclass of these is adopted: its
    hooks reach ours where they call ``super()``. An ``async_save`` is planned by ours even if its
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
        strict: Refuse a save or load that passes a planner which cannot be adopted; by default it
            is left alone, with a warning that names its class and hook.

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
        try:
            self._serving = Serving(_Declared(placements), save=save, load=load, strict=strict)
        except PlacementError as error:
            raise PlacementError(f"installed({error})") from None
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

    def __enter__(self) -> None:
        self._was_entered = True
        self._serving.enter()

    def __exit__(self, *_: object) -> None:
        self._serving.leave()


@dataclass(frozen=True, slots=True)
class _Declared:
    """A declaration that is the same for each save and load."""

    placements: Placements

    def __call__(self) -> Placements:
        return self.placements


_PLANNERS: dict[str, Any] = {"save": PlacementSavePlanner, "load": PlacementLoadPlanner}

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


def _refusing(kind: str, error: Exception) -> Any:
    """Return a planner that refuses a save or load for which the declaration failed."""
    first, *more = str(error).split("\n")
    details = [line.strip() for line in more]
    headline = first
    if not isinstance(error, PlacementError):
        headline = f"the declaration fails: {type(error).__name__}: {first}"
        details.append(raised_line(error))
    planner = _PLANNERS[kind]()
    planner.refused = [Fault(f"this {kind}", headline, tuple(details))]
    return planner


def _named_arguments(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Return the arguments of a call that may have ``planner``, to be set there.

    A framework may have put a function of its own over torch's, which takes ``**kwargs``: torch
    gives ``planner`` by name.
    """
    parameters = bound.signature.parameters
    if "planner" in parameters:
        return bound.arguments
    rest = next(name for name, each in parameters.items() if each.kind is each.VAR_KEYWORD)
    arguments: dict[str, Any] = bound.arguments.setdefault(rest, {})
    return arguments


def _served(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """Return a function that is called with the planner of the innermost context."""
    signature = inspect.signature(function)

    def served(*args: Any, **kwargs: Any) -> Any:
        with _lock:
            innermost = _entered[-1][0] if _entered else None
        # In its thread async_save has the planner of its call, perhaps outside of this context.
        in_thread = kind == "save" and current_thread().name.startswith(ASYNC_THREAD)
        if innermost is None or in_thread:
            return function(*args, **kwargs)
        return innermost.call(kind, function, signature.bind(*args, **kwargs))

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
