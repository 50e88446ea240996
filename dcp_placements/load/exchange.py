"""Each byte that several ranks need is read by one of them, and sent to the others.

With its plan each rank sends what it needs, in the tables of a save. The coordinator numbers the
sets of ranks that need the same boxes, and answers with the set of each box. The ranks of a set
divide its bytes by the same rule, so that no other word is needed. When all have read they agree
that none failed; then each sends its share to the others of the set, round by round.

Two ranks that both need the router, a ``(4, 3)`` tensor, and each another expert::

    answer to both    router: set 1, which is ranks (0, 1); experts: 0, no set
    shares of set 1   Share(0, 0, 0, 2)   rank 0 reads rows 0-1 of target 0
                      Share(1, 0, 2, 4)   rank 1 reads rows 2-3
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint import Metadata, ReadItem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType

from dcp_placements._torch import agreeing_device, global_rank
from dcp_placements.bind.binding import Placing
from dcp_placements.errors import Fault, PlacementError, format_faults, format_ranks
from dcp_placements.layout.boxes import Ints
from dcp_placements.layout.sharding import Box
from dcp_placements.report import LoadReport, Traffic
from dcp_placements.storage.index.storage_table import places_of
from dcp_placements.storage.metadata.save_ids import writer_of
from dcp_placements.table.cover import cover_of
from dcp_placements.table.table import (
    Holding,
    Sent,
    holding_of,
    packed_ints,
    unpacked_ints,
)
from dcp_placements.table.world import Piece, World

SHARE_NBYTES = 256 << 10
"""A set with fewer bytes per rank is read by fewer of them: more would cost latency alone."""

SPLIT_NBYTES = 64 << 10
"""No box of fewer bytes is split."""

BATCH_NBYTES = 8 << 20
"""The most bytes of one message. Below a few MiB a message costs latency alone."""

ALIGNED_NBYTES = 16
"""Tensors in one message begin at multiples of this."""

Lookup = Callable[[MetadataIndex], torch.Tensor]
"""Returns the memory of a destination."""


class Wish(NamedTuple):
    """What a rank could have from others, as it is sent to the coordinator.

    Attributes:
        group: Hash of the ranks of the process group that it exchanges on.
        sent: The tables and boxes of what it needs.
        has_hook: Whether the rank's storage reader calls the exchange after the reads.
    """

    group: int
    sent: Sent = Sent()
    has_hook: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The coordinator's answer to a rank's wish.

    Attributes:
        is_active: Whether anything is exchanged on any rank; all ranks then agree after the reads.
        sets: Packed: the set of each box of each piece of each table; 0 for none.
        split: For each table whose groups are split, packed: the piece of each key.
        holders: By set, its ranks, ascending, packed.
        why: Why nothing is exchanged, where the user can change it, and what to do.
    """

    is_active: bool = False
    sets: bytes = packed_ints(())
    split: tuple[bytes, ...] = ()
    holders: Mapping[int, bytes] = field(default_factory=dict)
    why: tuple[str, str] | None = None

    @property
    def notes(self) -> list[Fault]:
        """What the user reads where nothing is exchanged and could be."""
        if self.why is None:
            return []
        about = (f"because:     {self.why[0]}", f"way out:     {self.why[1]}")
        return [Fault("exchange=True", "every rank reads all that it needs by itself", about)]


def answers(wishes: Sequence[Wish | None], ranks: Sequence[int]) -> list[Answer]:
    """Return the coordinator's answer to each rank.

    Args:
        wishes: In the order of the process group; None where a planner exchanges nothing.
        ranks: The global ranks in that order.
    """
    given = [wish for wish in wishes if wish is not None]
    why = _obstacle(given, wishes, ranks)
    if len(wishes) == 1 or why is not None:
        return [Answer(why=why)] * len(wishes)
    with_tables = [at for at, wish in enumerate(given) if wish.sent.tables]
    world = World([given[at].sent for at in with_tables])
    holders, sets = _sets(world)
    if not holders:
        return [Answer()] * len(wishes)
    rank_of = np.array([ranks[at] for at in with_tables], np.int64)
    packed = [packed_ints(rank_of[one]) for one in holders]
    answer_of = [Answer(True) for _ in wishes]
    for cohort in world.cohorts:
        splits = [world.split[table] for table in cohort.tables]
        split = tuple([packed_ints(pieces) if pieces else b"" for pieces in splits])
        for position in cohort.ranks.tolist():
            numbers = sets[position]
            own = {int(n): packed[n - 1] for n in np.unique(numbers) if n}
            answer_of[with_tables[position]] = Answer(True, packed_ints(numbers), split, own)
    return answer_of


def _obstacle(
    given: Sequence[Wish], wishes: Sequence[Wish | None], ranks: Sequence[int]
) -> tuple[str, str] | None:
    """Return why these ranks cannot exchange at all, and what to do; None where they can."""
    if len(given) < len(wishes):
        without = [rank for rank, wish in zip(ranks, wishes, strict=True) if wish is None]
        why = f"the planner of {format_ranks(without)} was not given exchange=True"
        return why, "exchange=True on all ranks"
    if not all(wish.has_hook for wish in given):
        why = "the storage reader does not call the exchange after the reads"
        return why, "storage_reader=PlacementFileSystemReader(path)"
    if {wish.group for wish in given} != {_hash(ranks)}:
        why = f"the load runs on another process group, of {len(ranks)} ranks"
        return why, "exchange=group, the one that the load runs on"
    return None


def _hash(ranks: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(repr(tuple(ranks)).encode())


def _sets(world: World) -> tuple[list[Ints], list[Ints]]:
    """Return the ranks of each set; and by rank the set of each of its boxes."""
    numbers: dict[bytes, int] = {}
    sets = world.by_rank([_sets_of_rows(piece, numbers) for piece in world.pieces])
    return [np.frombuffer(ranks, np.int64) for ranks in numbers], sets


def _sets_of_rows(piece: Piece, numbers: dict[bytes, int]) -> Ints:
    """Return by row of a piece the set of its box, which is numbered where it is new."""
    if len({(source.group.shape, source.group.dtype) for source in piece.sources}) > 1:
        return np.zeros(len(piece.ranks), np.int64)
    cover = cover_of(piece.ranks, piece.boxes)
    of_box = np.zeros(len(cover.boxes), np.int64)
    for box in np.flatnonzero((np.diff(cover.starts) > 1) & (cover.numel > 0)).tolist():
        of_box[box] = numbers.setdefault(cover.holders(box).tobytes(), len(numbers) + 1)
    return of_box[cover.box_of]


class Target(NamedTuple):
    """A box that all ranks of a set need.

    Attributes:
        fqn: The checkpoint's key.
        box: The box.
        at: Its number among this rank's chunks of the tensor.
        itemsize: Bytes of an element here.
    """

    fqn: str
    box: Box
    at: int
    itemsize: int

    @property
    def dim(self) -> int:
        """The first dim longer than 1, along which the box is split; 0 where there is none."""
        return next((dim for dim, size in enumerate(self.box.sizes) if size > 1), 0)

    @property
    def rows(self) -> int:
        """Its size along that dim."""
        return self.box.sizes[self.dim] if self.box.sizes else 1

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return self.box.numel * self.itemsize

    def view(self, share: Share, lookup: Lookup) -> torch.Tensor:
        """Return a share as a view of this rank's memory."""
        whole = lookup(MetadataIndex(self.fqn, torch.Size(self.box.offsets), self.at)).detach()
        if not self.box.sizes:
            return whole
        return whole.narrow(self.dim, share.start, share.stop - share.start)


class Share(NamedTuple):
    """Rows of a target that one rank reads for all ranks of a set."""

    rank: int
    target: int
    start: int
    stop: int


def shares(targets: Sequence[Target], ranks: Sequence[int], turn: int = 0) -> list[Share]:
    """Return which rank reads which rows: every row once, the same bytes for each rank.

    The result depends on the arguments alone, so all ranks of a set compute the same. Two ranks and
    three targets of 4 rows and 1 MiB each::

        target   rank 0     rank 1
        0        rows 0-3
        1        rows 0-1   rows 2-3
        2                   rows 0-3

    Args:
        targets: The targets of a set, in an order that all its ranks have.
        ranks: Of the set.
        turn: The position of the rank that reads first.
    """
    total = sum(target.nbytes for target in targets)
    count = max(1, min(len(ranks), total // SHARE_NBYTES))
    readers = [ranks[(i * len(ranks) // count + turn) % len(ranks)] for i in range(count)]
    ends = [total * (i + 1) / count for i in range(count)]
    found, begin = [], 0
    for number, target in enumerate(targets):
        nbytes, start = target.nbytes, 0
        is_split = nbytes >= SPLIT_NBYTES
        at = bisect_right(ends, begin if is_split else begin + nbytes / 2)
        while start < target.rows:
            stop = target.rows
            if is_split and at < count - 1:
                stop = min(max(round((ends[at] - begin) * stop / nbytes), start), stop)
            if stop > start:
                found.append(Share(readers[at], number, start, stop))
            start, at = stop, at + 1
        begin += nbytes
    return found


class ExchangeBroken(PlacementError):
    """An exchange that was cut off: a rank is gone, or too slow.

    Torch would gather it from all ranks, wait for the rank that is gone, and end with an error
    about that. It cannot be pickled: pickling raises it, at once.
    """

    def __reduce__(self) -> NoReturn:
        raise self


class _Set(NamedTuple):
    """The ranks of a set, what they need, and who reads what of it."""

    ranks: tuple[int, ...]
    targets: list[Target]
    shares: list[Share]

    def views(self, rank: int, lookup: Lookup) -> list[torch.Tensor]:
        """Return what a rank reads as views of the memory of this one."""
        return [
            self.targets[one.target].view(one, lookup) for one in self.shares if one.rank == rank
        ]


@dataclass(slots=True)
class _Step:
    """Messages to one rank and from another one that are under way.

    Attributes:
        taken: What is received.
        operations: The sending, and the receiving last.
        works: What waits for them.
    """

    taken: list[torch.Tensor]
    operations: list[dist.P2POp] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)

    def add(self, kind: Any, buffer: torch.Tensor, rank: int, group: Any) -> None:
        """Add an operation."""
        self.operations.append(dist.P2POp(kind, buffer, rank, group))

    def settle(self) -> None:
        """Wait, and put what came through a buffer into its place."""
        for work in self.works:
            work.wait()
        buffer = self.operations[-1].tensor
        if self.taken and buffer.data_ptr() != self.taken[0].data_ptr():
            for tensor, part in _parts(self.taken, buffer):
                tensor.copy_(part)


class Exchange:
    """One load's exchange, on one rank.

    Args:
        group: The process group that the load runs on; None for the default one.

    Attributes:
        answer: The coordinator's.
        failure: What kept this rank from planning its reads.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._holding = Holding()
        self._sets: list[_Set] = []
        self.answer = Answer()
        self.failure: Exception | None = None

    def wish(self, state_dict: Mapping[str, Any], placing: Placing, fqns: Collection[str]) -> Wish:
        """Return what this rank could have from others.

        Args:
            state_dict: Flat, with the checkpoint's keys.
            placing: Its tensors' places.
            fqns: The keys that this rank need not read by itself.
        """
        without = {
            fqn
            for fqn, value in state_dict.items()
            if fqn not in fqns or not _can_be_sent(value, placing, fqn)
        }
        self._holding = holding = holding_of(state_dict, placing.placed, {}, without)
        return Wish(_hash(self._ranks), holding.sent)

    def share(
        self, items: Sequence[ReadItem], metadata: Metadata, report: LoadReport
    ) -> list[ReadItem]:
        """Return this rank's part of the reads.

        Args:
            items: All that it needs.
            metadata: The checkpoint's.
            report: Takes in the keys of which it reads all by itself.
        """
        targets = self._targets()
        shared = {target.fqn for of_set in targets.values() for target in of_set}
        reads: dict[tuple[str, int], list[ReadItem]] = {}
        for item in items:
            reads.setdefault((item.dest_index.fqn, item.dest_index.index or 0), []).append(item)
        tensors = (item.dest_index.fqn for item in items if item.type is LoadItemType.TENSOR)
        report.alone = tuple(dict.fromkeys(fqn for fqn in tensors if fqn not in shared))
        for number, of_set in sorted(targets.items()):
            whole = {target: reads.pop((target.fqn, target.at)) for target in of_set}
            # By the rank that wrote it: a rank reads in its own file, as far as it can.
            firsts = [whole[target][0] for target in of_set]
            writers = [
                writer_of(info.relative_path)
                for info in places_of(firsts, metadata.storage_data or {})
            ]
            order = sorted(zip((-1 if w is None else w for w in writers), of_set, strict=True))
            of_set = [target for _, target in order]
            ranks = tuple(unpacked_ints(self.answer.holders[number]).tolist())
            turn = ranks.index(order[0][0]) if order[0][0] in ranks else number
            made = _Set(ranks, of_set, shares(of_set, ranks, turn))
            self._sets.append(made)
            for one in made.shares:
                if one.rank == global_rank():
                    target = of_set[one.target]
                    parts = [_clipped(item, target.dim, one) for item in whole[target]]
                    kept = reads.setdefault((target.fqn, target.at), [])
                    kept += [part for part in parts if part is not None]
        return [item for kept in reads.values() for item in kept]

    def _targets(self) -> dict[int, list[Target]]:
        """Return by set what this rank has of it."""
        numbers = iter(unpacked_ints(self.answer.sets).tolist())
        targets: dict[int, list[Target]] = {}
        for groups, split in zip(self._holding.tables, self.answer.split, strict=True):
            keys = [(fqn, one) for one in groups for fqn in one.fqns]
            whole = [number for number, one in enumerate(groups) for _ in one.fqns]
            pieces = unpacked_ints(split).tolist() if split else whole
            of_piece: dict[int, list[int]] = {}  # pieces are numbered in the order they begin
            for piece, (fqn, one) in zip(pieces, keys, strict=True):
                if piece not in of_piece:
                    of_piece[piece] = list(islice(numbers, len(one.boxes)))
                for at, (box, number) in enumerate(zip(one.boxes, of_piece[piece], strict=True)):
                    if number:
                        target = Target(fqn, box, at, one.group.itemsize)
                        targets.setdefault(number, []).append(target)
        return targets

    def finish(self, error: BaseException | None, lookup: Lookup, report: LoadReport) -> None:
        """Agree that all ranks have read, and send each other what was read.

        Args:
            error: What went wrong on this rank before.
            lookup: Returns a destination's memory on this rank.
            report: This rank's; takes in the bytes exchanged.

        Raises:
            PlacementError: On all ranks, where one could not read or is gone.
        """
        error = self.failure or error
        received = sum(
            of_set.targets[one.target].nbytes
            * (one.stop - one.start)
            // of_set.targets[one.target].rows
            for of_set in self._sets
            for one in of_set.shares
            if one.rank != global_rank()
        )
        opens, nbytes = report.traffic.opens, report.traffic.storage_nbytes
        try:
            (failed,) = self._summed(error is not None)
            failures = self._failures(error) if failed else []
        except Exception as cause:
            raise self._broken(cause, error) from cause
        if failures:
            raise PlacementError(self._refusal(failures)) from error
        try:
            with torch.no_grad():
                for of_set in self._sets:
                    self._send(of_set, lookup)
            self._summed(False)
        except Exception as cause:
            raise self._broken(cause, None) from cause
        report.traffic = Traffic(opens, nbytes, received)

    def _send(self, of_set: _Set, lookup: Lookup) -> None:
        """Send this rank's share of a set to the others, and receive theirs.

        In round ``n`` each rank sends to the ``n``-th behind it and receives from the ``n``-th
        before it, so that no rank waits for another one that waits for it.
        """
        ranks, here = of_set.ranks, of_set.ranks.index(global_rank())
        device = agreeing_device(self._group)
        own = of_set.views(global_rank(), lookup)
        under_way: deque[_Step] = deque()
        for distance in range(1, len(ranks)):
            to, source = ranks[(here + distance) % len(ranks)], ranks[here - distance]
            theirs = of_set.views(source, lookup)
            for sent, taken in zip_longest(batches(own), batches(theirs)):
                if len(under_way) == 2:
                    under_way.popleft().settle()
                step = _Step(taken or [])
                if sent:
                    step.add(dist.isend, _joined(sent, device), to, self._group)
                if taken:
                    step.add(dist.irecv, _joined(taken, device, copied=False), source, self._group)
                step.works = dist.batch_isend_irecv(step.operations)
                under_way.append(step)
        for step in under_way:
            step.settle()

    def _summed(self, *numbers: int) -> list[int]:
        device = agreeing_device(self._group)
        tensor = torch.tensor([int(number) for number in numbers], device=device)
        dist.all_reduce(tensor, group=self._group)
        return [int(number) for number in tensor.tolist()]

    def _failures(self, error: BaseException | None) -> list[Fault]:
        """Return a fault per rank that could not read; a collective call."""
        text = None
        if error is not None:
            kind = "" if isinstance(error, PlacementError) else f"{type(error).__name__}: "
            text = f"{kind}{error}".splitlines()
        texts: list[list[str] | None] = [None] * len(self._ranks)
        dist.all_gather_object(texts, text, group=self._group)
        return [
            Fault(
                "this load",
                f"could not read: {lines[0] if lines else 'no reason given'}",
                tuple([line.strip() for line in lines[1:]]),
                ranks=(rank,),
            )
            for rank, lines in zip(self._ranks, texts, strict=True)
            if lines is not None
        ]

    def _refusal(self, failures: Sequence[Fault]) -> str:
        """Return the text of the error; that of the first rank has the reasons of all."""
        opening = "nothing can be exchanged, since not all ranks could read"
        if global_rank() == self._ranks[0]:
            return format_faults(opening, failures)
        return f"{opening}: rank {self._ranks[0]} has the reasons"

    def _broken(self, cause: Exception, error: BaseException | None) -> ExchangeBroken:
        details = [f"torch says:  {(str(cause).splitlines() or [''])[0]}"]
        if error is not None:
            details.append(f"this rank:   {type(error).__name__}: {error}")
        details += [
            "likely:      a rank was killed (out of memory?), or takes longer than the timeout of "
            "the process group; the launcher tells which",
            "way out:     load again: tensors may be half filled now",
        ]
        ranks = format_ranks(self._ranks)
        fault = Fault("load", f"{ranks} could not exchange what they read", tuple(details))
        return ExchangeBroken(format_faults("the exchange was broken off", [fault]))


def _can_be_sent(value: Any, placing: Placing, fqn: str) -> bool:
    """Whether the bytes of a value can be sent as they are, chunk by chunk."""
    if (placed := placing.placed.get(fqn)) is not None:
        value = placed.tensor
        # A tensor of stacked rows is no single piece of memory; of a row that a rank has twice
        # each is filled.
        offsets = {chunk.offsets for chunk in placed.chunks}
        if placed.parts or placed.has_own_key or len(offsets) < len(placed.chunks):
            return False
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and value.layout == torch.strided
        and value.device.type != "meta"
        and not (value.is_conj() or value.is_neg() or value.is_quantized)
    )


def _clipped(item: ReadItem, dim: int, share: Share) -> ReadItem | None:
    """Return the part of a read that falls into a share; None where there is none."""
    if not item.lengths:
        return item
    begin = item.dest_offsets[dim]
    start, stop = max(begin, share.start), min(begin + item.lengths[dim], share.stop)
    if start >= stop:
        return None
    if (start, stop) == (begin, begin + item.lengths[dim]):
        return item
    offsets, stored_offsets = list(item.dest_offsets), list(item.storage_offsets)
    lengths = list(item.lengths)
    offsets[dim], lengths[dim] = start, stop - start
    stored_offsets[dim] += start - begin
    return replace(
        item,
        dest_offsets=torch.Size(offsets),
        storage_offsets=torch.Size(stored_offsets),
        lengths=torch.Size(lengths),
    )


def batches(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors in batches that fit a message; the same on all ranks, whatever the strides."""
    batch: list[torch.Tensor] = []
    nbytes = 0
    for whole in tensors:
        for tensor in _pieces(whole):
            end = _aligned(nbytes) + tensor.nbytes
            if batch and end > BATCH_NBYTES:
                yield batch
                batch, end = [], tensor.nbytes
            batch.append(tensor)
            nbytes = end
    if batch:
        yield batch


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of a tensor that fit a message, in C order."""
    if tensor.nbytes <= BATCH_NBYTES:
        yield tensor
        return
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    size = tensor.shape[dim]
    rows = max(BATCH_NBYTES * size // tensor.nbytes, 1)
    for start in range(0, size, rows):
        yield from _pieces(tensor.narrow(dim, start, min(rows, size - start)))


def _joined(
    batch: Sequence[torch.Tensor], device: torch.device, *, copied: bool = True
) -> torch.Tensor:
    """Return the bytes of a batch: its own memory where that is one piece, else a buffer."""
    first = batch[0]
    if len(batch) == 1 and first.is_contiguous() and first.device == device:
        return first.as_strided((first.numel(),), (1,)).view(torch.uint8)
    nbytes = 0
    for tensor in batch:
        nbytes = _aligned(nbytes) + tensor.nbytes
    buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
    for tensor, part in _parts(batch, buffer) if copied else ():
        part.copy_(tensor)
    return buffer


def _parts(
    batch: Sequence[torch.Tensor], buffer: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor of a batch with its part of the buffer."""
    start = 0
    for tensor in batch:
        start = _aligned(start)
        part = buffer[start : start + tensor.nbytes]
        yield tensor, part.view(tensor.dtype).view(tensor.shape)
        start += tensor.nbytes


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED_NBYTES) * ALIGNED_NBYTES
