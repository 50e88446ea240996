"""What each rank asks for: keys of the checkpoint by the form in which it asks, and boxes.

Ranks divide wholes among them: numbered experts, listed rows, boxes of sharded tensors. A rank that
loads with the numbers, rows or boxes of another one reads tensors of the right shape, but the wrong
ones. No rank sees that by itself, so each sends what it asks for, and the coordinator compares.

Most ranks ask for the same keys in the same forms, and differ in their boxes alone. So the two are
sent apart: keys of which thousands of ranks send equal bytes are unpacked once.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dcp_placements.layout.sharding import Box, Chunk, Pick, Sharding
from dcp_placements.storage.metadata.record import Cuts, SavedRename

Ints = npt.NDArray[np.int64]


class Form(NamedTuple):
    """What tensors of which a rank asks for a part have in common.

    Attributes:
        shape: Of the whole tensor.
        cuts: How axes shard it, as text.
        dims: The dims whose rows the rank lists, ascending.
        rule: The name of the rule that lists them; None where rename= stacks them, and without any.
    """

    shape: tuple[int, ...]
    cuts: str
    dims: tuple[int, ...] = ()
    rule: str | None = None

    @staticmethod
    def of(sharding: Sharding, cuts: Cuts, rule: str | None) -> Form:
        """Return the form of tensors.

        Args:
            sharding: How they are cut.
            cuts: The same by the names of axes.
            rule: The name of the rule that lists their rows; None where rename= stacks them.
        """
        dims = tuple(sorted({cut.dim for cut in sharding.cuts if isinstance(cut, Pick)}))
        text = ", then ".join(map(str, cuts))
        return Form(sharding.global_shape, text, dims, rule if dims else None)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a rank asks for, as it is sent to the coordinator.

    Attributes:
        keys: The keys by form, packed; empty where nothing is compared.
        boxes: Of each form in turn, the boxes: offsets and sizes as integers.
        renames: The renames in force on the rank.
    """

    keys: bytes = b""
    boxes: bytes = b""
    renames: tuple[SavedRename, ...] = ()


@dataclass(slots=True)
class Asking:
    """Collects what one rank asks for.

    Attributes:
        positions: The checkpoint's keys that are tensors, and the position of each.
        groups: By form and boxes, the positions of keys.
        others: Those of keys that are asked for as a whole, or of which parts may be left out.
    """

    positions: Mapping[str, int]
    groups: dict[tuple[Form, tuple[Box, ...]], list[int]] = field(default_factory=dict)
    others: list[int] = field(default_factory=list)

    def group(self, form: Form, chunks: Iterable[Chunk]) -> list[int]:
        """Return the positions of keys of one form and these boxes, to be extended."""
        boxes = tuple(sorted({chunk.box for chunk in chunks}))
        return self.groups.setdefault((form, boxes), [])

    def packed(self, excused: Collection[str], renames: tuple[SavedRename, ...]) -> Asked:
        """Return what is sent.

        Args:
            excused: Families of numbers of which some may be left out.
            renames: The renames in force on the rank.
        """
        groups = [
            (tuple(form), len(boxes), _packed_positions(positions))
            for (form, boxes), positions in self.groups.items()
        ]
        keys = pickle.dumps((groups, _packed_positions(self.others), tuple(excused)))
        numbers = [
            number
            for _, boxes in self.groups
            for box in boxes
            for number in (*box.offsets, *box.sizes)
        ]
        boxes = np.array(numbers, _kind([form for form, _ in self.groups])).tobytes()
        return Asked(zlib.compress(keys, 1), boxes, renames)


class Askers(NamedTuple):
    """Ranks that ask for keys in one form, each for as many boxes.

    Attributes:
        form: The form.
        ranks: The ranks.
        boxes: ``(ranks, boxes, 2 * ndim)``: offsets, then sizes.
    """

    form: Form
    ranks: Sequence[int]
    boxes: Ints

    def by_boxes(self) -> dict[bytes, list[int]]:
        """Return the ranks by the boxes that they ask for, as bytes."""
        ranks: dict[bytes, list[int]] = {}
        for rank, boxes in zip(self.ranks, rows_of(self.boxes), strict=True):
            ranks.setdefault(boxes, []).append(rank)
        return ranks


class AskedKeys(NamedTuple):
    """The keys that several ranks ask for.

    Attributes:
        ranks: The ranks.
        positions: Of the keys, in no order.
        excused: Families of numbers of which some may be left out.
    """

    ranks: Sequence[int]
    positions: Sequence[int]
    excused: Collection[str]


@dataclass(slots=True)
class AllAsked:
    """What all ranks ask for.

    Attributes:
        requests: By the keys.
        parts: Positions of keys, and the ranks that ask for a part of each of these; without keys
            that any rank asks for as a whole.
    """

    requests: list[AskedKeys] = field(default_factory=list)
    parts: list[tuple[list[int], list[Askers]]] = field(default_factory=list)

    @staticmethod
    def of(asked: Mapping[int, Asked]) -> AllAsked:
        """Return what ranks ask for, unpacked."""
        by_keys: dict[bytes, list[int]] = {}
        for rank, one in asked.items():
            if one.keys:
                by_keys.setdefault(one.keys, []).append(rank)
        result = AllAsked()
        askers: dict[bytes, list[Askers]] = {}
        whole: set[int] = set()
        for keys, ranks in by_keys.items():
            groups, packed_others, excused = pickle.loads(zlib.decompress(keys))
            others = _positions(packed_others)
            whole.update(others)
            positions = others.copy()
            forms = [Form(*form) for form, _, _ in groups]
            data = b"".join([asked[rank].boxes for rank in ranks])
            table = np.frombuffer(data, _kind(forms)).reshape(len(ranks), -1).astype(np.int64)
            at = 0
            for form, (_, count, packed) in zip(forms, groups, strict=True):
                ends = at + count * 2 * len(form.shape)
                boxes = table[:, at:ends].reshape(len(ranks), count, 2 * len(form.shape))
                askers.setdefault(packed, []).append(Askers(form, ranks, boxes))
                positions += _positions(packed)
                at = ends
            result.requests.append(AskedKeys(ranks, positions, excused))
        numbers: dict[int, list[int]] = {}
        for number, packed in enumerate(askers):
            for position in _positions(packed):
                if position not in whole:
                    numbers.setdefault(position, []).append(number)
        together: dict[tuple[int, ...], list[int]] = {}
        for position, common in sorted(numbers.items()):
            together.setdefault(tuple(common), []).append(position)
        members = list(askers.values())
        result.parts = [
            (positions, [one for number in common for one in members[number]])
            for common, positions in together.items()
        ]
        return result


def rows_of(table: Ints) -> list[bytes]:
    """Return each row of an array of two dims or more as bytes."""
    data = table.tobytes()
    nbytes = len(data) // max(len(table), 1)
    return [data[nbytes * at : nbytes * (at + 1)] for at in range(len(table))]


def _packed_positions(positions: Iterable[int]) -> bytes:
    """Return positions packed, in ascending order: most steps recur from layer to layer."""
    return np.diff(np.array(sorted(positions), np.int32), prepend=np.int32(0)).tobytes()


def _positions(packed: bytes) -> list[int]:
    positions: list[int] = np.cumsum(np.frombuffer(packed, np.int32)).tolist()
    return positions


def _kind(forms: Iterable[Form]) -> np.dtype[Any]:
    """Return the dtype that holds all offsets and sizes of boxes."""
    return np.min_scalar_type(max([size for form in forms for size in form.shape], default=0))
