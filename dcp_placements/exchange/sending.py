"""One rank's part of an exchange: what it reads for others, and how it sends that.

When all ranks have read they agree that none failed. Then each sends what it read to the ranks that
need it: in round ``n`` to the ``n``-th rank after it.

Two ranks both need four norms, of which rank 0 reads the first two::

    share(items)           reads of norm.0 and norm.1, and of what it alone needs
    finish(None, lookup)   sends norm.0 and norm.1 to rank 1, receives norm.2 and norm.3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import product, zip_longest
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import ReadItem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType

from dcp_placements._torch import PLAIN_TYPES, agreeing_device, global_rank
from dcp_placements.bind.rule_and_dtensor import Placing
from dcp_placements.errors import (
    Fault,
    PlacementError,
    format_faults,
)
from dcp_placements.exchange.readers import Answer
from dcp_placements.load.arrival import MemoryOf
from dcp_placements.load.request import Request
from dcp_placements.short_text import format_ranks
from dcp_placements.table.table import Holding, Sent, unpacked_ints

SENT_NBYTES = 8 << 20
"""The most bytes of one message. Below a few MiB a message costs latency alone."""


class ExchangeBroken(PlacementError):
    """An exchange that was cut off: a rank is gone, or too slow.

    Torch gathers errors from all ranks, so it would wait for the rank that is gone and end with an
    error about that. Pickling this error therefore raises it at once.
    """

    def __reduce__(self) -> NoReturn:
        raise self


class ReplicaExchange:
    """One load's exchange, on one rank.

    Args:
        process_group: The process group that the load runs on; None for the default one.

    Attributes:
        ranks: The global ranks of the process group.
        group: A hash of these ranks, which the coordinator compares.
        answer: The coordinator's answer.
        failure: The error that kept this rank from planning its reads.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._process_group = process_group
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(process_group))
        self.group = hash(self.ranks)
        self._holding = Holding()
        # What is sent to each rank and received from it, in the same order on both ranks.
        self._sent: dict[int, list[MetadataIndex]] = {}
        self._received: dict[int, list[MetadataIndex]] = {}
        self._received_nbytes = 0
        self.answer = Answer()
        self.failure: Exception | None = None

    @property
    def is_active(self) -> bool:
        """Whether anything is exchanged on any rank."""
        return self.answer.is_active

    def wish(self, request: Request) -> Sent:
        """Return what this rank could receive from others: tensors that share no memory."""
        asked = request.asked
        without = {
            fqn
            for fqn, value in asked.state_dict.items()
            if fqn in request.tied
            or fqn in asked.tied
            or not _can_be_sent(value, asked.placing, fqn)
        }
        self._holding = request.holding.without(without)
        return self._holding.packed()

    def accept(self, answer: Any) -> Fault | None:
        """Keep the coordinator's answer; return why nothing is exchanged, if a user can change it.

        The result is None if the coordinator does not know the exchange.
        """
        self.answer = answer if isinstance(answer, Answer) else Answer()
        return self.answer.obstacle

    def share(self, items: Sequence[ReadItem]) -> tuple[list[ReadItem], tuple[str, ...]]:
        """Return this rank's share of the reads, and the keys that it reads entirely by itself.

        Args:
            items: The reads of all that it needs.
        """
        here = global_rank()
        sets = {n: unpacked_ints(packed).tolist() for n, packed in self.answer.sets.items()}
        numbers = iter(unpacked_ints(self.answer.numbers).tolist())
        # What others need, too, in an order that is the same on all ranks.
        shared: list[tuple[str, tuple[int, ...], int, int, int]] = []
        for held in self._holding.groups:
            for fqn, (position, box) in product(held.fqns, list(enumerate(held.boxes))):
                if number := next(numbers):
                    nbytes = box.numel * held.group.itemsize
                    shared.append((fqn, box.offsets, position, nbytes, number))
        reader_of: dict[tuple[str, int | None], int] = {}
        for fqn, offsets, position, nbytes, number in sorted(shared):
            reader, *ranks = sets[number]
            reader_of[fqn, position] = reader
            index = MetadataIndex(fqn, torch.Size(offsets), position)
            if reader == here:
                for rank in ranks:
                    self._sent.setdefault(rank, []).append(index)
            else:
                self._received.setdefault(reader, []).append(index)
                self._received_nbytes += nbytes
        is_shared = {fqn for fqn, _ in reader_of}
        tensors = (item.dest_index.fqn for item in items if item.type is LoadItemType.TENSOR)
        alone = tuple(dict.fromkeys(fqn for fqn in tensors if fqn not in is_shared))
        own = [
            item
            for item in items
            if reader_of.get((item.dest_index.fqn, item.dest_index.index), here) == here
        ]
        return own, alone

    def finish(self, error: BaseException | None, lookup: MemoryOf) -> int:
        """Agree that all ranks have read, send each other what was read; return the bytes received.

        Args:
            error: The error of this rank's reads, if any.
            lookup: Returns the memory of a destination on this rank.

        Raises:
            PlacementError: On all ranks, where one could not read or is gone.
        """
        error = self.failure or error
        try:
            failures = self._failures(error) if self._count(error is not None) else []
        except Exception as cause:
            raise self._broken(cause, error) from cause
        if failures:
            text = "nothing can be exchanged, since not all ranks could read"
            if global_rank() == self.ranks[0]:
                raise PlacementError(format_faults(text, failures)) from error
            raise PlacementError(f"{text}: rank {self.ranks[0]} has the reasons") from error
        try:
            with torch.no_grad():
                self._send(lookup)
            self._count(False)
        except Exception as cause:
            raise self._broken(cause, None) from cause
        return self._received_nbytes

    def _send(self, lookup: MemoryOf) -> None:
        """Send what this rank read to the others, and receive what they read.

        All ranks have the same order of rounds, so no two wait for each other. Two messages are
        under way at a time.
        """
        here, device = self.ranks.index(global_rank()), agreeing_device(self._process_group)
        under_way: deque[Callable[[], None]] = deque()
        for distance in range(1, len(self.ranks)):
            to = self.ranks[(here + distance) % len(self.ranks)]
            source = self.ranks[here - distance]
            own = [lookup(index).detach() for index in self._sent.get(to, ())]
            theirs = [lookup(index).detach() for index in self._received.get(source, ())]
            for sent, received in zip_longest(batches(own), batches(theirs)):
                if len(under_way) == 2:
                    under_way.popleft()()
                under_way.append(self._begun(sent, to, received, source, device))
        for settle in under_way:
            settle()

    def _begun(
        self,
        sent: list[torch.Tensor] | None,
        to: int,
        received: list[torch.Tensor] | None,
        source: int,
        device: torch.device,
    ) -> Callable[[], None]:
        """Begin to send one message and to receive one; return a function that waits for both."""
        operations = []
        if sent:
            buffer = _direct(sent, device)
            if buffer is None:
                buffer = torch.cat([_bytes_of(tensor).to(device) for tensor in sent])
            operations.append(dist.P2POp(dist.isend, buffer, to, self._process_group))
        if received:
            direct = _direct(received, device)
            sizes = [tensor.nbytes for tensor in received]
            theirs = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
            if direct is not None:
                theirs = direct
            operations.append(dist.P2POp(dist.irecv, theirs, source, self._process_group))
        works = dist.batch_isend_irecv(operations)

        def settle() -> None:
            for work in works:
                work.wait()
            operations.clear()  # they keep what is sent until then
            if received and direct is None:
                for tensor, data in zip(received, theirs.split(sizes), strict=True):
                    # A clone is aligned for any dtype.
                    tensor.copy_(data.clone().view(tensor.dtype).view(tensor.shape))

        return settle

    def _count(self, has_failed: bool) -> int:
        """Return the number of ranks that have failed; a collective call."""
        tensor = torch.tensor([int(has_failed)], device=agreeing_device(self._process_group))
        dist.all_reduce(tensor, group=self._process_group)
        return int(tensor)

    def _failures(self, error: BaseException | None) -> list[Fault]:
        """Return a fault for each rank that could not read; a collective call."""
        text = None
        if error is not None:
            kind = "" if isinstance(error, PlacementError) else f"{type(error).__name__}: "
            text = f"{kind}{error}".splitlines()
        texts: list[list[str] | None] = [None] * len(self.ranks)
        dist.all_gather_object(texts, text, group=self._process_group)
        return [
            Fault(
                "this load",
                f"could not read: {lines[0] if lines else 'no reason given'}",
                tuple([line.strip() for line in lines[1:]]),
                ranks=(rank,),
            )
            for rank, lines in zip(self.ranks, texts, strict=True)
            if lines is not None
        ]

    def _broken(self, cause: Exception, error: BaseException | None) -> ExchangeBroken:
        details = [f"torch says:  {(str(cause).splitlines() or [''])[0]}"]
        if error is not None:
            details.append(f"this rank:   {type(error).__name__}: {error}")
        details += [
            "likely:      a rank was killed (out of memory?), or takes longer than the timeout of "
            "the process group; the launcher tells which",
            "way out:     load again: tensors may be half filled now",
        ]
        ranks = format_ranks(self.ranks)
        fault = Fault("load", f"{ranks} could not exchange what they read", tuple(details))
        return ExchangeBroken(format_faults("the exchange was broken off", [fault]))


def _can_be_sent(value: Any, placing: Placing, fqn: str) -> bool:
    """Whether the bytes of a value can be sent as they are, chunk by chunk."""
    if (placed := placing.placed.get(fqn)) is not None:
        value = placed.tensor
        # Stacked rows are not one block of memory; a row that a rank has twice is filled twice.
        offsets = {chunk.offsets for chunk in placed.place.chunks}
        if placed.rows or placed.has_own_key or len(offsets) < len(placed.place.chunks):
            return False
    return (
        type(value) in PLAIN_TYPES
        and value.layout == torch.strided
        and value.device.type != "meta"
        and not (value.is_conj() or value.is_neg() or value.is_quantized)
    )


def batches(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors in batches that fit a message; the same on all ranks, whatever the strides."""
    batch: list[torch.Tensor] = []
    nbytes = 0
    for whole in tensors:
        for tensor in _slices(whole):
            if batch and nbytes + tensor.nbytes > SENT_NBYTES:
                yield batch
                batch, nbytes = [], 0
            batch.append(tensor)
            nbytes += tensor.nbytes
    if batch:
        yield batch


def _slices(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of a tensor that fit a message, in C order."""
    if tensor.nbytes <= SENT_NBYTES:
        yield tensor
        return
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    size = tensor.shape[dim]
    rows = max(SENT_NBYTES * size // tensor.nbytes, 1)
    for start in range(0, size, rows):
        yield from _slices(tensor.narrow(dim, start, min(rows, size - start)))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in C order as bytes; a view if the tensor is contiguous."""
    # A tensor of one element is contiguous with any stride; a view of bytes needs stride 1.
    flat = tensor.detach().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def _direct(batch: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """Return the bytes of a batch as a view; None where they are not one block on the device."""
    first = batch[0]
    if len(batch) > 1 or not first.is_contiguous() or first.device != device:
        return None
    return _bytes_of(first)
