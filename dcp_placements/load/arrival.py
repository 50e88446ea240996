"""What has arrived of a request, and what ends the load.

A load ends in one order, when all that it reads is there: tied memory is settled, other ranks get
what they need of it, numbers are put into the state dict, and optimizer state that the checkpoint
lacks is reset. A load that fails has done none of that.

Ep rank 1 of two has one memory for ``embed`` and ``head``; its optimizer has stepped ``w``, of
which the checkpoint has no state::

    arrival.take("embed", memory, buffer)       # read into a buffer of its own
    arrival.take("head", memory, buffer)
    arrival.end()                               # both are equal: memory has them
                                                # optim.state.w.step is 0
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint import ReadItem
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_placements._torch import is_made_of_others
from dcp_placements.errors import (
    Fault,
    PlacementError,
    format_faults,
    raise_faults,
)
from dcp_placements.load.casting import check_quantizer
from dcp_placements.load.request import Request, is_scalar
from dcp_placements.load.state_at_birth import Reset, as_number, copy_of
from dcp_placements.names.flat import put_at, value_at
from dcp_placements.names.known_states import STEP
from dcp_placements.names.optimizer_state import FLATTEN, OptimizerStates, ParameterNames
from dcp_placements.report import LoadReport
from dcp_placements.short_text import folded_names, format_names
from dcp_placements.storage.torch_metadata import StoredLocation
from dcp_placements.table.digests import full_digest
from dcp_placements.table.table import Sent

WARNING = "look at this load"
"""Begins a warning."""

Buffered = tuple[str, torch.Tensor, torch.Tensor]
"""What was read into a buffer: its key, the memory that it is for, and the buffer."""

MemoryOf = Callable[[MetadataIndex], torch.Tensor]
"""Returns the memory of a destination."""


class Exchange(Protocol):
    """What a load asks of ``dcp_placements.exchange``, which it imports for ``exchange=`` alone.

    Attributes:
        group: Hash of the ranks that exchange.
        failure: What kept this rank from planning its reads.
    """

    group: int
    failure: Exception | None

    @property
    def is_active(self) -> bool:
        """Whether anything is exchanged, once the answer was accepted."""
        ...

    def wish(self, request: Request) -> Sent:
        """Return what this rank could have from others."""
        ...

    def accept(self, answer: Any) -> Fault | None:
        """Take the coordinator's answer; return what a user can change so that it is active."""
        ...

    def share(self, items: Sequence[ReadItem]) -> tuple[list[ReadItem], tuple[str, ...]]:
        """Return this rank's part of the reads, and the keys of which it reads all by itself."""
        ...

    def finish(self, error: BaseException | None, lookup: MemoryOf) -> int:
        """Exchange what was read; return the bytes received."""
        ...


def warn(report: LoadReport, notes: Sequence[Fault]) -> None:
    """Warn of what is accepted, and keep it in the report."""
    report.warnings += tuple(map(str, notes))
    warnings.warn(format_faults(WARNING, notes, "note"), stacklevel=3)


class Arrival:
    """What has arrived of one request, and what is due when all of it has.

    The items of a load, and its plan, name its arrival, since a planner may have several loads
    under way. Pickled it is None: a plan that is sent has no tensors.

    Args:
        request: What the rank asked for.
        report: The report on the load; complete when it has ended.
        lookup: Returns the memory of an item that does not know its own.
        exchange: What the ranks exchange; None where they do not.

    Attributes:
        ids: The records of save ids that are read.
    """

    def __init__(
        self, request: Request, report: LoadReport, lookup: MemoryOf, exchange: Exchange | None
    ) -> None:
        self.request = request
        self.report = report
        self.lookup = lookup
        self.exchange = exchange
        self.ids: dict[MetadataIndex, StoredLocation] = {}
        self._asked = request.asked
        self._nested: Any = request.asked.nested
        self._buffered: list[Buffered] = []
        self._lists: dict[str, Sequence[Any]] = {}
        self._remaining = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def expect(self, items: int) -> None:
        """End the load after so many items, where the reader does not tell when all are read."""
        request = self.request
        values = request.asked.state_dict.values()
        has_lists = any(isinstance(value, ParameterNames) for value in values)
        if request.tied or request.missing.resets or request.numbers or has_lists:
            self._remaining = items
            if not items:
                self.end()

    def count(self) -> None:
        """Take in that an item was read; readers may call from several threads."""
        if self._remaining:
            with self._lock:
                self._remaining -= 1
                is_last = not self._remaining
            if is_last:
                self.end()

    def take(self, fqn: str, memory: torch.Tensor, tensor: torch.Tensor) -> None:
        """Take what was read of a tensor.

        Args:
            fqn: Its key.
            memory: The part of the state dict's tensor that it is for.
            tensor: What was read: ``memory`` itself, or a buffer.

        Raises:
            PlacementError: Quantized values of another scale than the tensor has.
        """
        if tensor.is_quantized:
            check_quantizer(fqn, memory, tensor)
        if fqn in self.request.tied:
            self._buffered.append((fqn, memory.detach(), tensor.detach()))

    def take_object(self, fqn: str, value: Any) -> None:
        """Put an object into its place; lists of parameters are compared at the end."""
        asked = self._asked
        if isinstance(asked.state_dict[fqn], ParameterNames):
            self._lists[fqn] = value
        elif is_scalar(asked.state_dict[fqn]):
            self._fill(fqn, value)
        else:
            self._put(fqn, value)

    def end(self, error: BaseException | None = None) -> None:
        """End the load, once all that it asked for was read, or could not be.

        Memory that was read under another key, as that of tied parameters or of one ``step`` for
        all, keeps what was read.

        Args:
            error: What went wrong while this rank read.

        Raises:
            PlacementError: Different contents of one memory, or a parameter in another group than
                in the save; with an exchange, on all ranks where one could not read or is gone.
        """
        if error is None:
            try:
                settle_tied(self._buffered, self.request.tied)
                raise_faults(OTHER_GROUPS, self._group_faults())
            except PlacementError as refusal:
                error = refusal
        if self.exchange is not None:
            nbytes = self.exchange.finish(error, self.lookup)
            self.report.traffic = replace(self.report.traffic, exchanged_nbytes=nbytes)
        elif error is not None:
            raise error
        self._put_numbers()
        self._reset_states()

    def _group_faults(self) -> list[Fault]:
        """Return the lists with parameters that the save has in other parameter groups.

        The options of a numbered group are read by its number. A parameter that is in no list which
        this rank reads is new, unless its weight or state is in the checkpoint and there are other
        lists. Groups with equal options count as one.
        """
        state_dict, faults = self._asked.state_dict, []
        of_unread: dict[str, set[str]] = {}  # by optimizer
        for fqn, stored in self._lists.items():
            others = [name for name in state_dict[fqn] if name not in set(stored)]
            if others and not self._asked.policy.excuses(fqn):
                head = fqn[: fqn.index("param_groups.")]
                listed = [of for of in self._lists if of.startswith(head)]
                saved = {str(name): of for of in listed for name in self._lists[of]}
                if head not in of_unread:
                    of_unread[head] = self._names_of_unread_groups(head, len(listed))
                for name in of_unread[head].intersection(others):
                    saved.setdefault(name, "a group that this rank does not have")
                moved = {
                    name: saved[name]
                    for name in others
                    if name in saved and self._options(saved[name]) != self._options(fqn)
                }
                faults += [_moved_fault(fqn, moved)] if moved else []
        return faults

    def _names_of_unread_groups(self, head: str, read: int) -> set[str]:
        """Return the names that a parameter of a group which this rank does not read may have.

        Args:
            head: The head of an optimizer's keys.
            read: Number of its lists that this rank reads; none is left where these are all.
        """
        keys = self._asked.stored
        lists = [key for key in keys if key.startswith(head) and key.endswith(".params")]
        if len(lists) <= read:
            return set()
        states = OptimizerStates(keys)
        held = {key: states.of(key) for key in keys}
        names = {of.parameter for of in held.values() if of and of.head == head}
        return names | _endings(key for key, of in held.items() if of is None)

    def _options(self, fqn: str) -> dict[str, str]:
        """Return the options of a parameter group as text, without the beginning of their keys.

        The options of a group that this rank does not have are none.

        Args:
            fqn: The key of its list.
        """
        start, asked = fqn.removesuffix("params"), self._asked
        return {
            key.removeprefix(start): repr(
                value
                if isinstance(value, torch.Tensor)
                else value_at(self._nested, self._path(key))
            )
            for key, value in asked.state_dict.items()
            if key.startswith(start) and key != fqn
        }

    def _put_numbers(self) -> None:
        """Put numbers that were read as tensors into their places."""
        for fqn, own in self.request.numbers.items():
            self._put(fqn, as_number(self._asked.state_dict[fqn].item(), own))

    def _reset_states(self) -> None:
        """Reset the optimizer state that the checkpoint lacks; warn where that loses steps."""
        resets, tied = self.request.missing.resets, self.request.tied
        if not resets:
            return
        stepped = dict.fromkeys(self._stepped(resets))
        resets = {
            fqn: reset
            for fqn, reset in resets.items()
            if not (reset.stays_if_stepped and reset.parameter in stepped)
        }
        new = dict.fromkeys(self._unlisted(resets))
        used = {
            reset.parameter: None
            for reset in resets.values()
            if reset.parameter in stepped and reset.parameter not in new
        }
        before = {
            fqn: [tensor.clone() for tensor in self._asked.tensors(fqn)]
            for fqn in resets
            if fqn in tied
        }
        for fqn, reset in resets.items():
            self._reset(fqn, reset)
        land(self._buffered)
        for fqn, values in before.items():
            if not all(map(torch.equal, values, self._asked.tensors(fqn))):
                used[resets[fqn].parameter] = None
        notes = [new_note(list(new))] if new else []
        notes += [reset_note(list(used))] if used else []
        if notes:
            warn(self.report, notes)

    def _unlisted(self, resets: Mapping[str, Reset]) -> Iterator[str]:
        """Yield parameters whose weight is read, and that the saved optimizer did not have.

        By the lists of nested optimizer state, where this rank reads all lists of the optimizer,
        and they have the names of the checkpoint's weights.
        """
        asked, stateless = self._asked, self.request.missing.stateless
        for head in dict.fromkeys([state.head for state in map(asked.states.of, resets) if state]):
            start = f"{head}param_groups."
            lists = [
                key for key in asked.stored if key.startswith(start) and key.endswith("params")
            ]
            listed = {str(name) for key in lists for name in self._lists.get(key, ())}
            if not lists or not all(key in self._lists for key in lists):
                continue
            if listed.difference(_endings(key for key in asked.stored if not asked.states.of(key))):
                continue
            for fqn, reset in resets.items():
                state = asked.states.of(fqn)
                if (
                    state is not None
                    and state.head == head
                    and state.parameter in stateless
                    and state.parameter not in listed
                    and not (asked.policy.partial or asked.policy.excuses(fqn))
                ):
                    yield reset.parameter

    def _stepped(self, resets: Mapping[str, Reset]) -> Iterator[str]:
        """Yield the parameters that were stepped on this rank, so that a reset loses something.

        A fresh optimizer may have counted a step, by which its moments are no longer 0 where
        weights decay; one that counts none has moments of 0.
        """
        fqns_of: dict[str, list[str]] = {}
        for fqn, reset in resets.items():
            if fqn not in self.request.tied:
                fqns_of.setdefault(reset.parameter, []).append(fqn)
        for parameter, fqns in fqns_of.items():
            counts = [fqn for fqn in fqns if fqn.endswith(f".{STEP}")]
            moments = [fqn for fqn in fqns if resets[fqn].is_zero and not counts]
            held = [self._asked.state_dict[fqn] for fqn in counts]
            steps = [torch.tensor(count) for count in held if isinstance(count, int | float)]
            steps += [tensor for fqn in counts for tensor in self._asked.tensors(fqn)]
            values = [tensor for fqn in moments for tensor in self._asked.tensors(fqn)]
            if any(bool(((step != 0) & (step != 1)).any()) for step in steps) or any(
                bool(value.any()) for value in values
            ):
                yield parameter

    def _reset(self, fqn: str, reset: Reset) -> None:
        """Set optimizer state to what it is before a first step."""
        value, number = self._asked.state_dict[fqn], reset.value
        if reset.option is not None:
            held = self._asked.state_dict[reset.option]
            if not isinstance(held, torch.Tensor):
                held = value_at(self._nested, self._path(reset.option))
            number = float(held)
        if isinstance(value, int | float):
            self._put(fqn, as_number(number, value))
        weights = () if reset.weight is None else self._asked.weights_beside(fqn, reset.weight)
        for index, tensor in enumerate(map(torch.Tensor.detach, self._asked.tensors(fqn))):
            if reset.weight is not None:
                weight = weights[index].detach()
                tensor.copy_(copy_of(weight, tensor, reset.stride))
            elif reset.option is not None and tensor.is_complex():
                tensor.fill_(complex(number, number))
            elif is_made_of_others(tensor):  # such as codes and scales: it encodes what it gets
                plain = torch.full(tensor.shape, number, dtype=tensor.dtype, device=tensor.device)
                tensor.copy_(plain)
            else:
                tensor.fill_(number)

    def _put(self, fqn: str, value: Any) -> None:
        """Put a value into its place in the user's state dict, or its places."""
        for path in (self._path(fqn), *self._asked.placing.more_paths.get(fqn, ())):
            put_at(self._nested, path, value)

    def _path(self, fqn: str) -> Any:
        """Return where a key stands in the user's state dict."""
        return self._asked.placing.mappings.get(fqn, (fqn,))

    def _fill(self, fqn: str, value: Any) -> None:
        """Put a number that was read as an object into a tensor without dims.

        Raises:
            PlacementError: It is no number, or a fraction where the tensor has integers.
        """
        dtype = self._asked.state_dict[fqn].dtype
        is_number = type(value) in (int, float)
        is_whole = is_number and float(value).is_integer()
        if not is_number or not (is_whole or dtype.is_floating_point or dtype.is_complex):
            headline = f"the checkpoint holds {value!r:.80}, but the state dict a {dtype} tensor"
            way_out = (
                "way out:     a value of that kind under this key; or another name for this one"
            )
            raise_faults("a number cannot be loaded", [Fault(fqn, headline, (way_out,))])
        for tensor in self._asked.tensors(fqn):
            tensor.detach().fill_(value)


OTHER_GROUPS = "options of parameter groups would be those of other parameters"
"""Begins the refusal of lists of parameters."""


def _moved_fault(fqn: str, moved: Mapping[str, str]) -> Fault:
    """Return the fault of parameters that the save has in other groups.

    Args:
        fqn: The key of the list.
        moved: The key of its list in the checkpoint, by parameter.
    """
    return Fault(
        fqn,
        f"this rank lists {format_names(folded_names(list(moved)), 3)} in this group, and the "
        "checkpoint does not",
        (
            f"saved in:    {format_names(list(dict.fromkeys(moved.values())), 3)}",
            "reason:      the options of a group (its lr, its weight decay) are read by the number "
            "of the group",
            "likely:      the groups were built in another order, joined or split; or a pipeline "
            "stage has no parameter of an earlier group",
            FLATTEN,
            "or:          waive={pattern: reason} where the options are those of the new group on "
            "purpose",
        ),
    )


def _endings(keys: Iterable[str]) -> set[str]:
    """Return what keys end in, from any component on."""
    ends: set[str] = set()
    for key in keys:
        while key and key not in ends:
            ends.add(key)
            key = key.partition(".")[2]
    return ends


def new_note(parameters: Sequence[str]) -> Fault:
    """Return the note of parameters that are read, and that the saved optimizer did not have."""
    return _state_note(
        parameters,
        "begins anew: the optimizer that was saved did not have them",
        "likely:      they were frozen then; or tied to another weight, whose state is theirs",
        'way out:     rename=Replace("lm_head", "embed_tokens") in saves and loads, where the '
        "one was tied to the other; optional=[pattern] of their state where they are new to "
        "the optimizer",
    )


def reset_note(parameters: Sequence[str]) -> Fault:
    """Return the note of parameters that were stepped, and whose state was reset."""
    return _state_note(
        parameters,
        "was reset to its beginning: the checkpoint has none",
        "likely:      they were stepped for the first time after the checkpoint was saved",
        "reason:      moments and step counts of later steps do not belong to the weights that "
        "were read",
    )


def _state_note(parameters: Sequence[str], what: str, *details: str) -> Fault:
    """Return a note on the optimizer state of some parameters.

    Args:
        parameters: The parameters.
        what: What becomes of their state.
        details: The lines below the names of the parameters.
    """
    count = len(parameters)
    headline = f"that of {count} parameter{'' if count == 1 else 's'} {what}"
    shown = f"parameters:  {format_names(parameters, 6)}"
    return Fault("optimizer state", headline, (shown, *details))


MAX_KEYS = 6
"""Keys of one memory that a message lists."""

_SHOWN_ELEMENTS = 4
"""Elements of a tensor that a message shows."""

UNLIKE = "what is one here differs in the checkpoint"


def land(buffered: Sequence[Buffered]) -> None:
    """Put what was read into its memory."""
    for _, memory, buffer in buffered:
        memory.copy_(buffer)


def settle_tied(buffered: Sequence[Buffered], tied: Mapping[str, tuple[str, ...]]) -> None:
    """Put what was read into its memory; refuse what was overwritten by another key's.

    Whatever is read into tensors that overlap goes into a buffer of its own first, since one memory
    keeps the contents that are read last. A buffer whose contents memory lacks at the end was
    overwritten.

    Raises:
        PlacementError: Some have one memory, but other contents.
    """
    land(buffered)
    lost: dict[tuple[str, ...], dict[str, str]] = {}
    for fqn, memory, buffer in buffered:
        if full_digest(memory) != full_digest(buffer):
            both = (tensor.flatten()[:_SHOWN_ELEMENTS] for tensor in (buffer, memory))
            read, left = (elements.tolist() for elements in both)
            lost.setdefault(tied[fqn], {})[fqn] = f"{read} of {fqn}, where {left} is left"
    faults = [unlike_fault(keys, [*fqns], next(iter(fqns.values()))) for keys, fqns in lost.items()]
    raise_faults(UNLIKE, faults)


def unlike_fault(keys: tuple[str, ...], lost: Sequence[str], contents: str) -> Fault:
    """Return the fault of keys with different contents in the checkpoint, and one memory here.

    Args:
        keys: All that share the memory; a single key is a stack, whose rows share it.
        lost: The keys whose contents are not there.
        contents: The first elements, as text.
    """
    what = "them" if len(keys) > 1 else "several rows of it"
    # Keys that were overwritten come first, since a long list is cut.
    return Fault(
        format_names([*dict.fromkeys((*lost, *keys))], MAX_KEYS),
        f"this rank has one memory for {what}, but the checkpoint has different contents",
        (
            f"overwritten: {format_names(lost, MAX_KEYS)}",
            f"contents:    {contents}",
            "way out:     load into a model that does not tie them, for rows with one tensor per "
            "row; or leave all keys but one out of the state dict: its contents are then those of "
            "all",
        ),
    )
