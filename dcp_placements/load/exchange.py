"""Each byte is read by one rank of a replica set, and sent to the others when all have read.

What may be shared is claimed with the plan, so planning costs no collective of its own. After the
reads all ranks agree that nobody failed; only then are tensors broadcast, in batches, straight
into where they belong. Everything goes in one order on all ranks, so that none waits for another
that waits for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import xxhash

from dcp_placements._torch import (
    Metadata,
    MetadataIndex,
    ReadItem,
    TensorStorageMetadata,
    axis_group,
    filled,
    group_device,
)
from dcp_placements.bind.binding import Binding
from dcp_placements.bind.placed import Placed, Placing
from dcp_placements.errors import Fault, PlacementError, format_faults, format_ranks
from dcp_placements.layout.sharding import Box, Cut
from dcp_placements.load.reads import Finders
from dcp_placements.load.shares import Claim, Claims, Share, Verdict, Wanted, shares
from dcp_placements.report import LoadReport, Traffic
from dcp_placements.storage.metadata.save_ids import writer_of

BATCH_NBYTES = 8 << 20
"""Bytes of one broadcast at most; two are under way at a time, which is what an exchange takes in
memory. Below a few MiB a broadcast costs latency alone."""

ALIGNED_NBYTES = 16
"""Tensors in one buffer begin at multiples of this."""


class ExchangeBroken(PlacementError):
    """An exchange that was cut off: some rank is gone, or too slow.

    Torch would collect it from all ranks, and so wait for the one that is gone and end with an
    error about that. It cannot be sent: it is raised where it would be, at once.
    """

    def __reduce__(self) -> NoReturn:
        raise self


class Line(NamedTuple):
    """The ranks along one axis of a replica set, this rank among them."""

    group: dist.ProcessGroup | None
    ranks: tuple[int, ...]
    position: int
    name: str

    def hash(self, label: str) -> int:
        """Return a hash that identifies the line: its ranks and its group."""
        return xxhash.xxh3_64_intdigest(repr((label, self.name, self.ranks)).encode())


class Target(NamedTuple):
    """A destination box of this rank that others want, too.

    Attributes:
        fqn: The checkpoint's key.
        at: Its number among the tensor's chunks.
        box: The box, in the checkpoint's tensor.
        itemsize: Of the stored elements.
        tensor: The local tensor that it is part of.
    """

    fqn: str
    at: int
    box: Box
    itemsize: int
    tensor: torch.Tensor

    @property
    def dim(self) -> int:
        """The first dim that is longer than 1: the one that it is split along."""
        return next((dim for dim, size in enumerate(self.box.sizes) if size > 1), 0)


@dataclass(slots=True)
class ReplicaSet:
    """Ranks that want the same, and what they want."""

    label: str
    lines: tuple[Line, ...]
    targets: list[Target] = field(default_factory=list)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple([len(line.ranks) for line in self.lines])

    @property
    def coordinate(self) -> tuple[int, ...]:
        return tuple([line.position for line in self.lines])

    def member(self, coordinate: Sequence[int]) -> int:
        """Return a member's number: its place in the grid, the last axis fastest."""
        number = 0
        for position, size in zip(coordinate, self.sizes, strict=True):
            number = number * size + position
        return number

    def coordinate_of(self, member: int) -> tuple[int, ...]:
        """Return where in the grid a member is."""
        places = []
        for size in reversed(self.sizes):
            member, position = divmod(member, size)
            places.append(position)
        return tuple(reversed(places))

    def claim(self) -> Claim:
        """Return what this rank tells the coordinator of the set."""
        content = xxhash.xxh3_64()
        for target in self.targets:
            wanted = (target.fqn, *target.box, target.tensor.dtype, target.tensor.device.type)
            content.update(repr(wanted).encode())
        lines = tuple([line.hash(self.label) for line in self.lines])
        return Claim(content.intdigest(), lines, self.sizes, self.coordinate)


class Exchange:
    """One load's exchange, on one rank.

    Args:
        group: The process group that the load runs on; None for the default one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._world = _line(group)
        self._sets: list[ReplicaSet] = []
        self._granted: list[tuple[ReplicaSet, list[list[Share]]]] = []
        self._lines: dict[tuple[Binding, bool], tuple[str, tuple[Line, ...]]] = {}
        self._rooms: dict[tuple[torch.device, int], torch.Tensor] = {}
        self.verdict = Verdict(False)

    def claims(
        self,
        state_dict: Mapping[str, Any],
        placing: Placing,
        metadata: Metadata,
        alone: Callable[[str], bool],
    ) -> Claims:
        """Return what this rank would share, set by set.

        Args:
            state_dict: Flat, with the checkpoint's keys.
            placing: Its tensors' places.
            metadata: The checkpoint's.
            alone: Whether a key is this rank's own affair.
        """
        sets: dict[tuple[str, tuple[Line, ...]], ReplicaSet] = {}
        for fqn in sorted(state_dict):
            stored = metadata.state_dict_metadata.get(fqn)
            if not isinstance(stored, TensorStorageMetadata) or alone(fqn):
                continue
            placed = placing.placed.get(fqn)
            value = state_dict[fqn] if placed is None else placed.tensor
            if not _is_plain(value):
                continue
            if placed is None:
                label = "plain tensors" if value.dim() else "scalars"
                lines: tuple[Line, ...] = (self._world,)
                boxes = [Box((0,) * value.dim(), tuple(value.shape))]
            else:
                label, lines = self._lines_of(placed)
                boxes = [chunk.box for chunk in placed.chunks]
            if math.prod(len(line.ranks) for line in lines) == 1:
                continue
            found = sets.setdefault((label, lines), ReplicaSet(label, lines))
            itemsize = stored.properties.dtype.itemsize
            found.targets += [
                Target(fqn, at, box, itemsize, value) for at, box in enumerate(boxes) if box.numel
            ]
        self._sets = [found for found in sets.values() if found.targets]
        world = self._world
        return Claims(
            world.hash(""), len(world.ranks), world.position, tuple([s.claim() for s in self._sets])
        )

    def share(self, items: Iterable[ReadItem], metadata: Metadata) -> list[ReadItem]:
        """Return this rank's part of the reads, the coordinator having granted what is shared."""
        granted = [
            (number, found)
            for number, found in zip(self.verdict.numbers, self._sets, strict=True)
            if number >= 0
        ]
        writers = _Writers(metadata)
        mine: dict[tuple[str, int], list[tuple[int, Share]]] = {}
        for _, found in sorted(granted, key=lambda each: each[0]):
            wanted = [_wanted(target, found, writers) for target in found.targets]
            parts = shares(wanted, math.prod(found.sizes))
            self._granted.append((found, parts))
            me = found.member(found.coordinate)
            for target, split in zip(found.targets, parts, strict=True):
                own = [(target.dim, share) for share in split if share.member == me]
                mine[target.fqn, target.at] = own
        kept: list[ReadItem] = []
        for item in items:
            key = (item.dest_index.fqn, item.dest_index.index or 0)
            if key not in mine:
                kept.append(item)
                continue
            for dim, share in mine[key]:
                part = _clipped(item, dim, share)
                if part is not None:
                    kept.append(part)
        return kept

    def finish(
        self,
        error: BaseException | None,
        view: Callable[[MetadataIndex], torch.Tensor],
        report: LoadReport,
    ) -> None:
        """Agree that all have read, and send each other what was read.

        Args:
            error: What went wrong on this rank before.
            view: Where a destination lies in this rank's memory.
            report: This rank's; what was exchanged is added to it.

        Raises:
            PlacementError: On all ranks alike, where one could not read or is gone.
        """
        mine = 0 if error is not None else self._received_nbytes()
        opens, nbytes = report.traffic.opens, report.traffic.storage_nbytes
        try:
            failed, *totals = self._summed(error is not None, opens, nbytes, mine)
            failures = self._failures(error) if failed else []
        except Exception as cause:
            raise self._broken(cause, error) from cause
        if failures:
            raise PlacementError(
                format_faults("nothing can be exchanged, since not all ranks could read", failures)
            ) from error
        try:
            with torch.no_grad():
                for found, parts in self._granted:
                    self._send(found, parts, view)
            self._summed(False)
        except Exception as cause:
            raise self._broken(cause, None) from cause
        self._rooms.clear()
        report.traffic = Traffic(opens, nbytes, mine)
        report.all_traffic = Traffic(*totals)

    def _lines_of(self, placed: Placed) -> tuple[str, tuple[Line, ...]]:
        """Return the axes along which the ranks hold the same, and this rank's line along each."""
        binding = placed.binding
        key = binding, type(placed) is Placed
        memo = self._lines.get(key)
        if memo is not None:
            return memo
        names: list[str] = []
        lines: list[Line] = []
        if type(placed) is Placed and binding.is_uniform and binding.homes:
            cut = {cut.axis for cut in binding.sharding.cuts if isinstance(cut, Cut)}
            for at, (axis, home) in enumerate(zip(binding.axes, binding.homes, strict=True)):
                if at in cut or axis.size == 1:
                    continue
                group = axis_group(*home)
                if group is not None and dist.get_world_size(group) == axis.size:
                    names.append(str(axis.name))
                    lines.append(_line(group))
        self._lines[key] = found = (" x ".join(names), tuple(lines))
        return found

    def _summed(self, *numbers: int) -> list[int]:
        device = group_device(self._group, torch.device("cpu"))
        tensor = torch.tensor([int(number) for number in numbers], device=device)
        dist.all_reduce(tensor, group=self._group)
        return [int(number) for number in tensor.tolist()]

    def _failures(self, error: BaseException | None) -> list[Fault]:
        text = None
        if error is not None:
            kind = "" if isinstance(error, PlacementError) else f"{type(error).__name__}: "
            text = f"{kind}{error}".splitlines()
        everybodys: list[list[str] | None] = [None] * len(self._world.ranks)
        dist.all_gather_object(everybodys, text, group=self._group)
        return [
            Fault(
                f"rank {rank}",
                f"could not read its share: {lines[0] if lines else 'no reason given'}",
                tuple([line.strip() for line in lines[1:]]),
            )
            for rank, lines in zip(self._world.ranks, everybodys, strict=True)
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
        ranks = format_ranks(self._world.ranks)
        fault = Fault("load", f"{ranks} could not exchange what they read", tuple(details))
        return ExchangeBroken(format_faults("the exchange was broken off", [fault]))

    def _received_nbytes(self) -> int:
        return sum(
            _part(target, share).numel * target.tensor.dtype.itemsize
            for found, parts in self._granted
            for target, split in zip(found.targets, parts, strict=True)
            for share in split
            if share.member != found.member(found.coordinate)
        )

    def _send(
        self,
        found: ReplicaSet,
        parts: Sequence[Sequence[Share]],
        view: Callable[[MetadataIndex], torch.Tensor],
    ) -> None:
        """Broadcast a set's shares along one axis after the other.

        Along the first axis each line has its own members' shares after it, along the second all
        lines' of one line, and so on: what a rank sends on is what it has by then.
        """
        by_owner: dict[tuple[int, ...], list[tuple[Target, Share]]] = {}
        for target, split in zip(found.targets, parts, strict=True):
            for share in split:
                owner = found.coordinate_of(share.member)
                by_owner.setdefault(owner, []).append((target, share))
        here = found.coordinate
        for axis, line in enumerate(found.lines):
            sender = _Sender(line, self._rooms)
            for source in range(len(line.ranks)):
                sent = [
                    pair
                    for owner in sorted(by_owner)
                    if owner[axis] == source and owner[axis + 1 :] == here[axis + 1 :]
                    for pair in by_owner[owner]
                ]
                sender.send(source, [_view(target, share, view) for target, share in sent])
            sender.drain()


class _Sender:
    """Broadcasts tensors along a line, two batches under way at a time.

    Args:
        line: The ranks.
        rooms: Buffers, two per device, for all that are not sent from where they lie.
    """

    def __init__(self, line: Line, rooms: dict[tuple[torch.device, int], torch.Tensor]) -> None:
        self._line = line
        self._rooms = rooms
        self._turn = 0
        self._under_way: deque[tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]] = deque()

    def send(self, source: int, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast the tensors of one member into those of the others."""
        for batch in batches(tensors):
            while len(self._under_way) >= 2:
                self._settle()
            self._start(source, batch)

    def drain(self) -> None:
        """Wait for all that is under way."""
        while self._under_way:
            self._settle()

    def _start(self, source: int, batch: Sequence[torch.Tensor]) -> None:
        mine = source == self._line.position
        device = group_device(self._line.group, batch[0].device)
        arrived: list[tuple[torch.Tensor, torch.Tensor]] = []
        if len(batch) == 1 and batch[0].is_contiguous() and batch[0].device == device:
            flat = batch[0].as_strided((batch[0].numel(),), (1,)).view(torch.uint8)
        else:
            room = self._room(device)
            start = 0
            for tensor in batch:
                start = _aligned(start)
                held = room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                if mine:
                    held.copy_(tensor)
                else:
                    arrived.append((tensor, held))
                start += tensor.nbytes
            flat = room[:start]
        work = dist.broadcast(
            flat, src=self._line.ranks[source], group=self._line.group, async_op=True
        )
        self._under_way.append((work, arrived))

    def _settle(self) -> None:
        work, arrived = self._under_way.popleft()
        work.wait()
        for tensor, held in arrived:
            tensor.copy_(held)

    def _room(self, device: torch.device) -> torch.Tensor:
        self._turn = 1 - self._turn
        key = (device, self._turn)
        if key not in self._rooms:
            self._rooms[key] = torch.empty(BATCH_NBYTES, dtype=torch.uint8, device=device)
        return self._rooms[key]


def batches(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors in batches that fit a buffer; alike on all ranks, whatever their strides."""
    batch: list[torch.Tensor] = []
    nbytes = 0
    for whole in tensors:
        for tensor in _pieces(whole):
            end = _aligned(nbytes) + tensor.nbytes
            if batch and (end > BATCH_NBYTES or tensor.device != batch[0].device):
                yield batch
                batch, end = [], tensor.nbytes
            batch.append(tensor)
            nbytes = end
    if batch:
        yield batch


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of a tensor that fit a buffer, in C order."""
    if tensor.nbytes <= BATCH_NBYTES:
        yield tensor
        return
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    size = tensor.shape[dim]
    rows = max(BATCH_NBYTES * size // tensor.nbytes, 1)
    for start in range(0, size, rows):
        yield from _pieces(tensor.narrow(dim, start, min(rows, size - start)))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED_NBYTES) * ALIGNED_NBYTES


def _line(group: dist.ProcessGroup | None) -> Line:
    ranks = tuple(dist.get_process_group_ranks(group))
    name = "" if group is None else str(getattr(group, "group_name", ""))
    return Line(group, ranks, dist.get_rank(group), name)


def _is_plain(value: Any) -> bool:
    """Whether a value's bytes can be sent as they are."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and value.layout == torch.strided
        and value.device.type != "meta"
        and not (value.is_conj() or value.is_neg() or value.is_quantized)
    )


def _wanted(target: Target, found: ReplicaSet, writers: _Writers) -> Wanted:
    rows = target.box.sizes[target.dim] if target.box.sizes else 1
    near = None
    # Only of a single line does a rank know all members.
    if len(found.lines) == 1:
        writer = writers.of(target)
        ranks = found.lines[0].ranks
        near = ranks.index(writer) if writer in ranks else None
    return Wanted(target.box.numel * target.itemsize, rows, near)


class _Writers:
    """Who wrote what is wanted, by the name of the file."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._finders = Finders()
        self._lately: dict[tuple[int, int], int] = {}

    def of(self, target: Target) -> int | None:
        """Return the rank that wrote a box, where it is stored as it is wanted."""
        stored = self._metadata.state_dict_metadata[target.fqn]
        assert isinstance(stored, TensorStorageMetadata)
        chunks = stored.chunks
        # Tensors that lie alike are found at one index.
        key = (target.at, hash(target.box))
        at = self._lately.get(key, -1)
        if not (0 <= at < len(chunks) and _is_box(chunks[at], target.box)):
            meeting = self._finders.of(stored).meeting(target.box)
            if len(meeting) != 1 or meeting[0][1] != target.box:
                return None
            at = self._lately[key] = meeting[0][0]
        index = MetadataIndex(target.fqn, chunks[at].offsets, at)
        info = (self._metadata.storage_data or {}).get(index)
        return writer_of(str(getattr(info, "relative_path", "")))


def _is_box(chunk: Any, box: Box) -> bool:
    return bool(chunk.offsets == box.offsets and chunk.sizes == box.sizes)


def _part(target: Target, share: Share) -> Box:
    """Return a share of a destination, seen from the destination."""
    sizes = target.box.sizes
    if not sizes:
        return Box((), ())
    dim = target.dim
    offsets = (*(0,) * dim, share.start, *(0,) * (len(sizes) - dim - 1))
    return Box(offsets, (*sizes[:dim], share.stop - share.start, *sizes[dim + 1 :]))


def _view(
    target: Target, share: Share, view: Callable[[MetadataIndex], torch.Tensor]
) -> torch.Tensor:
    index = MetadataIndex(target.fqn, torch.Size(target.box.offsets), target.at)
    whole = view(index).detach()
    if not target.box.sizes:
        return whole
    return whole.narrow(target.dim, share.start, share.stop - share.start)


def _clipped(item: ReadItem, dim: int, share: Share) -> ReadItem | None:
    """Return the part of a read that fills a share; None where it fills nothing of it."""
    if not item.lengths:
        return item
    begin = item.dest_offsets[dim]
    start = max(begin, share.start)
    stop = min(begin + item.lengths[dim], share.stop)
    if start >= stop:
        return None
    if (start, stop) == (begin, begin + item.lengths[dim]):
        return item
    offsets = list(item.dest_offsets)
    stored_offsets = list(item.storage_offsets)
    lengths = list(item.lengths)
    offsets[dim], lengths[dim] = start, stop - start
    stored_offsets[dim] += start - begin
    changed = {
        "dest_offsets": torch.Size(offsets),
        "storage_offsets": torch.Size(stored_offsets),
        "lengths": torch.Size(lengths),
    }
    return filled(ReadItem, {**item.__dict__, **changed})
